"""Prices that a change of structure must keep: every kind, scope, link and payload, under both models.

Run as a script with tests, tests/cost and the root on PYTHONPATH, it writes them anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from laws import SETTING, of_terms

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost import collective_model, composite, features, quantiles
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.step.kinds import CHANNELS, SHARDING_KINDS, possible_groups
from shardcore.step.lower import lower

KEPT = Path(__file__).parents[1] / "files" / "kept_prices.json"
TABLES = (
    Table("plain", 40_000, 32, 8.0, Zipf(1.05)),
    Table("wide", 9_000, 128, 2.0, Zipf(1.2), features=2),
    Table("half", 5_000, 16, 4.0, Zipf(0.9), precision="fp16", weighted=True),
    Table("words", 7_000, 32, 3.0, Zipf(1.1), sequence=True),
    Table("other", 3_000, 8, 1.0, Zipf(0.5), collection="second"),
    Table("deep", 90_000, 64, 5.0, Zipf(1.1), load_factor=0.1),
    Table("deeper", 60_000, 32, 1.5, Zipf(1.0), load_factor=0.0),
)
HOST_MEMORY = {"memory": (Memory("host", 1 << 34, 20.0),)}
LINKS = {
    "measured": {},
    "within": {"links": make_links(within_host=50.0)},
    "own": {"links": make_links(within_host=50.0, between_hosts=2.0, latency_ms=0.03)},
    "shared": {"links": make_links(between_hosts=3.0, latency_ms=0.0, shared=True)},
}
TERMS = (
    "once",
    "messages",
    "far_rounds",
    "skew_ms",
    "near_bytes",
    "near_busiest_bytes",
    "far_bytes",
    "far_busiest_bytes",
    "port_busiest_bytes",
    "uplink_bytes",
    "shared_uplink_bytes",
    "head_start",
)
HOSTS = {"one": "aaaa", "pairs": "abab", "odd": "aaab", "apart": "abcd"}


def neural_model(precision: str, seed: int) -> NeuralModel:
    """A model of drawn weights, all collectives measured but ids within buckets."""
    rng = np.random.default_rng(seed)
    k, c = len(features.DRIVERS), len(features.CONDITIONS)
    levels = np.array(quantiles.LEVELS)
    w = {
        "rates": rng.uniform(0, 1e-5, (k, 2)),
        "launch": rng.uniform(0.01, 0.1, 2),
        "load_typical": rng.uniform(1e2, 1e4, k),
        "condition_low": np.full(c, -10.0),
        "condition_high": np.full(c, 10.0),
        "condition_mean": np.zeros(c),
        "condition_sd": np.ones(c),
        "contention.0.weight": rng.uniform(0, 0.1, (k, 3)),
        "contention.0.bias": rng.normal(size=3),
        "contention.1.weight": rng.uniform(0, 0.1, (3, 2)),
        "band.log_ms": np.array([0.0]),
        "band.width": np.array([0.1]),
        "band.level": levels,
        "band.error": np.linspace(-2, 2, len(levels)),
        "network.0.weight": rng.normal(size=(c, 2)) / 10,
        "network.0.bias": rng.normal(size=2) / 10,
    }
    scale = dict(zip(TERMS, [1e-2, 1e-3, 1e-2, 1e-2] + [1e-8] * 7 + [1e-3], strict=True))

    def drawn() -> np.ndarray:
        of = dict(zip(TERMS, rng.uniform(0, 1, len(TERMS)), strict=True))
        return of_terms(**{name: of[name] * scale[name] for name in TERMS})

    # Kept before there were pods.
    for i, channel in enumerate(c for c in CHANNELS if "pod" not in c.group):
        for direction in channel.definition.directions if i % 3 != 2 else ():
            for payload in channel.definition.payloads if i % 2 else ("fp32",):
                w[collective_model.rates_weight_name(channel, direction, payload)] = drawn()
        w |= {
            collective_model.step_factor_name(channel, direction): rng.uniform(1, 3, 1)
            for direction in channel.definition.directions
            if i % 2
        }
    w |= {
        collective_model.rates_weight_name(collective_model.ALL_TO_ALL, direction): drawn()
        for direction in ("forward", "backward")
    }
    w |= {"bucketize_ids": np.array([0.02, 1e-8]), "order_ids": np.array([0.01, 2e-8])}
    return NeuralModel(replace(SETTING, precision=precision), w, {"ranges": {"batch": [64, 4096]}})


MODELS = {
    "analytic": AnalyticModel(SETTING),
    "neural": neural_model("fp32", 1),
    "mixed": composite.Composite((neural_model("fp16", 2), neural_model("fp32", 1))),
}


def placements(problem: Problem) -> list[Placement]:
    """Tables by every kind in turn that runs them there, one cut by columns."""
    found, kinds = [], [kind for kind in SHARDING_KINDS.values() if kind.name != "pod_row"]
    for i, table in enumerate(problem.tables):
        on = problem.allowed_devices(table.name)
        may = [
            kind
            for kind in kinds
            if possible_groups(kind, table.rows, problem.topology, on)
            and (kind.may_cache_rows or not table.in_host_memory)
            and (not table.sequence or kind.sequence_kind)
        ]
        kind = may[(i + len(problem.tables)) % len(may)]
        cuts = 2 if kind.cuts_columns and table.dim >= 32 else 1
        groups, width = possible_groups(kind, table.rows, problem.topology, on), table.dim // cuts
        for j in range(cuts):
            found.append(
                Placement(
                    kind.name,
                    Shard(table, 0, table.rows, j * width, (j + 1) * width),
                    groups[(i + j) % len(groups)],
                )
            )
    return found


def cases():
    """(name, problem, plan) of hosts and links, of jobs, and of tables in one memory or two."""
    for where, hosts in HOSTS.items():
        for links, given in LINKS.items():
            speeds = (1.0, 1.0, 2.0, 1.0)
            devices = tuple(Device(1 << 36, s, h) for s, h in zip(speeds, hosts, strict=True))
            topology = Topology(devices, **given, **HOST_MEMORY)
            towers = where == "pairs" and links != "within"
            jobs = {
                "plain": Job(),
                "half": Job(
                    forward_payload="fp16",
                    backward_payload="bf16",
                    dense_forward_ms=0.1,
                    dense_backward_ms=0.1,
                ),
            }
            jobs |= {"towers": Job(tower_ratio=2.0)} if towers else {}
            for name, job in jobs.items():
                for some, tables in (("all", TABLES), ("one", TABLES[:2] + TABLES[3:5])):
                    pins = Constraints()
                    if name == "towers":
                        tables = tuple(t for t in tables if not t.sequence)
                        pins = Constraints(
                            pinned=tuple(
                                (t.name, topology.devices_by_host[i % 2]) for i, t in enumerate(tables)
                            )
                        )
                    problem = Problem(
                        "kept",
                        tables[:: -1 if some == "one" else 1],
                        topology,
                        256,
                        constraints=pins,
                        job=job,
                    )
                    yield f"{where} {links} {name} {some}", problem, Plan(tuple(placements(problem)))


def priced() -> dict[str, list[float]]:
    """[D] ms of each case under each model that knows its precisions."""
    found = {}
    for name, problem, plan in cases():
        workload = lower(plan, problem, fits=False)
        for which, model in MODELS.items():
            if which != "neural" or problem.precision == "fp32":
                cost = price(workload, model.for_problem(problem))
                found[f"{which}: {name}"] = [
                    *cost.device_ms,
                    cost.total_ms,
                    *map(
                        sum,
                        (cost.forward_compute_ms, cost.forward_comm_ms, cost.backward_comm_ms, cost.input_ms),
                    ),
                ]
    return found


@pytest.fixture(scope="module")
def now() -> dict[str, list[float]]:
    return priced()


@pytest.mark.parametrize("which", MODELS)
def test_prices_are_kept(which, now):
    kept = {name: ms for name, ms in json.loads(KEPT.read_text()).items() if name.startswith(which)}
    assert kept.keys() == {name for name in now if name.startswith(which)}
    for name, ms in kept.items():
        np.testing.assert_allclose(now[name], ms, rtol=1e-7, err_msg=name)


if __name__ == "__main__":
    KEPT.write_text(
        "{\n"
        + ",\n".join(
            f"{json.dumps(n)}: {json.dumps([float(f'{x:.12g}') for x in ms])}" for n, ms in priced().items()
        )
        + "\n}\n"
    )
