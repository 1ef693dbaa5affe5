"""Problems drawn at random, their tables cut, and what a plan of these costs: for tests of what searches
keep."""

from dataclasses import replace

import numpy as np
from shapes import with_room

from shardcore.access_statistics import Zipf
from shardcore.constraints import Constraints
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.layouts import shards_on
from shardcore.search.shards import consolidate, division, halve_columns, placed
from shardcore.topology import Device, Topology
from shardcore.traffic import channels_of
from shardcore.types import Plan, Problem, Setting, Shard, Table
from shardcore.workload import lower

BATCH = 48


class SlowScatter(AnalyticModel):
    """Reduce-scatters take twice their bytes: tells the collectives of a pooled output apart."""

    def comm(self, traffic, compute_ms, topology):
        times = np.array([1 + (c.collective == "reduce_scatter") for c in channels_of(traffic)])
        return super().comm((traffic.T * times).T, compute_ms, topology)


MODEL = SlowScatter(Setting("made-up", BATCH), launch_us=2, table_us=1, lookup_ns=10,
                    exchange_latency_ms=0.001, exchange_gbps=1)


def draw_problem(seed: int, n_tables: int = 12, n_devices: int = 4, memory: int = 2**22,
                 optimizer: str = "exact_sgd") -> Problem:
    rng = np.random.default_rng(seed)
    tables = tuple(Table(f"t{i}", int(rng.integers(1, 2000)), int(rng.choice([4, 8, 12, 32, 64])),
                         float(rng.choice([0, 1, 7.5, 30])), Zipf(float(rng.uniform(0, 1.5))))
                   for i in range(n_tables))
    devices = tuple(Device(memory, float(rng.choice([1, 1, 2]))) for _ in range(n_devices))
    return with_room(Problem("drawn", tables, Topology(devices), BATCH, optimizer))


def on_two_hosts(problem: Problem) -> Problem:
    """Of four devices two each; a table is pinned to the second."""
    devices = tuple(replace(d, host=h) for d, h in zip(problem.topology.devices, "xyxy", strict=True))
    return replace(problem, topology=Topology(devices), constraints=Constraints(pinned=(("t1", ("y",)),)))


def plan_of(shards, devices, problem) -> Plan:
    return Plan(consolidate(placed([(s,) for s in shards], devices, problem)))


def total_ms(shards, devices, problem, fits=True) -> float:
    return price(lower(plan_of(shards, devices, problem), problem, fits=fits),
                 replace(MODEL, setting=replace(MODEL.setting, optimizer=problem.optimizer))).total_ms


def draw_cuts(rng: np.random.Generator, problem: Problem, rows: bool) -> list[Shard]:
    """Tables cut at random: some by rows, over all devices or those of the host that they are pinned to;
    others by columns."""
    shards = []
    for i, table in enumerate(problem.tables):
        found = division(table, problem) if rows and (i == 1 or rng.random() < 0.3) else None
        shards += [s for _, s in shards_on(found)] if found else [Shard.whole(table)]
    for _ in range(8):
        i = rng.integers(len(shards))
        if shards[i].full_rows:
            shards[i:i + 1] = halve_columns(shards[i]) or [shards[i]]
    return shards
