"""Steps and plans under hardware profiles: MLPerf's systems, and plans for 8 to 128 H100.

A published step of MLPerf is a whole one, with its dense part, and parts of it run side by side. So the
embeddings of a plan may take no longer.
"""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from bench import common
from bench.published_cards import profile_of
from shardcore import report
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible
from shardcore.core.job import Job
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import price, total_ms
from shardcore.cost.profile import Profile, load_profile
from shardcore.cost.profile_fit import scaled
from shardcore.io import files
from shardcore.measure.sampling.placements import deal_columns
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import lower
from shardcore.tables.public import public_pool

STEP = "training step (DLRM-DCNv2, whole model)"
"""Op of MLPerf's steps in tables of timings."""
H100 = "nvidia-h100-sxm"
_PCIE = {"switch_generation": 1, "network_gbps": 25}
SHEETS: Mapping[str, Mapping[str, float]] = {
    "H100 PCIe": {"hbm_gbps": 2039, "sm_ghz": 200.1, "nvlink_gbps": 64, **_PCIE},
    "L40": {
        "memory_bytes": 48e9,
        "hbm_gbps": 864,
        "sm_ghz": 353.6,
        "l2_bytes": 96 << 20,
        "nvlink_gbps": 32,
        **_PCIE,
    },
    "L40S": {
        "memory_bytes": 48e9,
        "hbm_gbps": 864,
        "sm_ghz": 357.8,
        "l2_bytes": 96 << 20,
        "nvlink_gbps": 32,
        **_PCIE,
    },
}
"""Cards of MLPerf's systems without a profile, by their data sheets. Their links within a host are PCIe."""
_FP16 = Job(forward_payload="fp16", backward_payload="fp16")
_EVALS = 10_000
_DRAWS = 6
_SECONDS = 30.0
"""Budget of a search for the production list."""
_BUDGETS = {"torchrec": Budget(seconds=1200)}
"""TorchRec's planner sweeps its options. It gets to the end for all but Merlin's medium and large."""


# --- MLPerf -------------------------------------------------------------------------------------------------


def steps(timings: Path, shipped: Mapping[str, Profile]) -> str:
    """A table of MLPerf's systems in a file: the published step, and the predicted embeddings of our plan.

    Each system is priced by its card's profile, or by its data sheet (SHEETS). Others are left out by name.
    """
    with open(timings, encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["op"] == STEP]
    seen: dict[tuple[str, ...], tuple[float, float]] = {}
    cells, found, left_out = [], [], Counter[str]()
    for row in rows:
        key = row["gpu"], row["hosts"], row["ranks"], row["B"]
        sheet, name = SHEETS.get(row["gpu"]), profile_of(row["gpu"]) or ""
        if not (sheet or name):
            left_out[row["gpu"]] += 1
            continue
        if key not in seen:
            profile = scaled(shipped[H100], row["gpu"].replace(" ", "-"), **sheet) if sheet else shipped[name]
            seen[key] = _step(profile, int(row["hosts"]), int(row["ranks"]), int(row["B"]))
        ms, band = seen[key]
        step_ms = float(row["time_us"]) / 1e3
        found.append((key, ms, step_ms))
        system = row["source"].split("/results/")[-1].split("/")[0]
        layout = f"{row['hosts']} x {int(row['ranks']) // int(row['hosts'])} {row['gpu']}"
        cells.append(
            (
                system,
                layout,
                row["B"],
                f"{step_ms:.2f}",
                f"{ms:.2f} ±{band:.0%}",
                "yes" if ms <= step_ms else "NO",
            )
        )
    # Systems of one layout have one prediction. Others are in order if predictions and steps are.
    pairs = [(a, b) for a, b in combinations(found, 2) if a[0] != b[0] and abs(np.log(a[2] / b[2])) > 0.05]
    right = sum((a[1] < b[1]) == (a[2] < b[2]) for a, b in pairs)
    headers = ("system", "devices", "batch", "published step, ms", "predicted embeddings, ms", "below")
    order = f"{right} of {len(pairs)} pairs of systems that differ by more than 5% are in order."
    left = "".join(f" No profile is of card {gpu!r}: {n} left out." for gpu, n in left_out.items())
    return (
        f"{report.markdown_table(headers, cells)}\n\n{order}{left}\n" if rows else "The file has no steps.\n"
    )


def _step(profile: Profile, hosts: int, ranks: int, batch: int) -> tuple[float, float]:
    """Predicted ms of our plan's embeddings, and the band."""
    tables = public_pool("mlperf-dlrm-dcnv2")
    problem = Problem(
        "mlperf", tables, profile.topology(hosts, ranks // hosts), batch, "exact_adagrad", job=_FP16
    )
    model = profile.model().for_problem(problem)
    workload = lower(SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=_EVALS)), problem)
    cost = price(workload, model)
    # Ids travel while the dense part runs, in HugeCTR as in TorchRec's pipelines.
    return cost.total_ms - max(cost.input_ms), model.band(workload)


# --- plans --------------------------------------------------------------------------------------------------


def problems(inputs: Path, profile: Profile) -> Iterator[tuple[Problem, Plan | None]]:
    """Problems for 8 to 128 H100, and a published plan where there is one."""
    pool = public_pool("mlperf-dlrm-dcnv2")
    for hosts, batch in ((1, 55_296), (2, 65_536), (8, 135_168), (16, 135_168)):
        topology = profile.topology(hosts, 8)
        yield Problem(f"mlperf-{8 * hosts}", pool, topology, batch, "exact_adagrad", job=_FP16), None
    merlin = json.loads((inputs / "merlin_synthetic_tables_tiny_to_large.json").read_text())
    for name, hosts in (("tiny", 1), ("small", 1), ("medium", 2), ("large", 4)):
        tables = tuple(Table(**t, access=Zipf(1.05)) for t in merlin[name])
        yield (
            Problem(
                f"merlin-{name}-{8 * hosts}", tables, profile.topology(hosts, 8), 65_536, "exact_adagrad"
            ),
            None,
        )
    given = files.read_problem(inputs / "problems" / "r04-production-1935-tables-96-ranks.json")
    problem = replace(
        given,
        name="production-96",
        tables=tuple(replace(t, precision="fp16") for t in given.tables),
        topology=profile.topology(12, 8),
        # The profile counts 80 GB, 5.1 GiB less than the card reports. With 8 GiB reserved the tables do not
        # fit.
        constraints=replace(given.constraints, reserved_bytes=0),
    )
    yield problem, _published(inputs, problem)


def _published(inputs: Path, problem: Problem) -> Plan:
    """TorchRec's published placements of the production list. The file has the problem's tables, in their order.

    Several shards that it put on one rank are one here, as its kernels need it.
    """
    placements, ranks = [], problem.topology.ranks
    with open(inputs / "torchrec_stats_example_96ranks.csv", encoding="utf-8") as lines:
        for row, table in zip(csv.DictReader(lines), problem.tables, strict=True):
            if row["sharding"] == "RW":
                placements.append(Placement("row", Shard.whole(table), ranks))
                continue
            shards = Counter(int(rank) for rank in row["ranks"].split(","))
            widths = {rank: n * int(row["cw_dim"]) for rank, n in shards.items()}
            placements += [Placement(WHOLE_ROWS.name, s, (rank,)) for rank, s in deal_columns(table, widths)]
    return Plan(tuple(placements))


def show(inputs: Path, only: str = "") -> None:
    """Plans of all arms, and what the default one loses if rates are others.

    only: a word in the names of the problems.
    """
    profile = load_profile(H100)
    rows, lost = [], []
    for problem, theirs in (x for x in problems(inputs, profile) if only in x[0].name):
        rows.append(_arms(problem, theirs, profile))
        common.say(*rows[-1])
        if len(problem.topology) <= 16 and len(problem.tables) < 200:
            lost.append(_regrets(problem, profile))
            common.say(*lost[-1])
    print(
        report.markdown_table(("problem", "tables", *ARMS, "ours below TorchRec's", "band", "seconds"), rows),
        "\n",
    )
    headers = ("problem", "mean regret", "worst regret", "cost of the plan over the draws")
    print(report.markdown_table(headers, lost))


ARMS = (DEFAULT_SHARDER, "torchrec", "size_lookup_greedy", "dim_greedy", "random")


def _arms(problem: Problem, theirs: Plan | None, profile: Profile) -> tuple[str, ...]:
    """Cells: ms of each arm, and how much ours is below TorchRec's."""
    model = profile.model().for_problem(problem)
    cells, costs, band, began = [], {}, 0.0, time.perf_counter()
    for arm in ARMS:
        try:
            if arm == "torchrec" and theirs is not None:
                plan = theirs  # its published placements: to sweep its planner here takes an hour
            else:
                large = len(problem.tables) > 700
                budget = Budget(seconds=_SECONDS) if large else _BUDGETS.get(arm, Budget(evals=_EVALS))
                plan = SHARDERS[arm](problem, model, budget=budget)
            workload = lower(plan, problem)
        except Infeasible:
            cells.append("does not fit")
            continue
        costs[arm] = total_ms(workload, model)
        band = band or model.band(workload)
        cells.append(f"{costs[arm]:.3f}")
    ours, torchrec = costs.get(DEFAULT_SHARDER), costs.get("torchrec")
    gain = f"{1 - ours / torchrec:.1%}" if ours and torchrec else "-"
    took = time.perf_counter() - began
    return (problem.name, str(len(problem.tables)), *cells, gain, f"±{band:.0%}", f"{took:.0f}")


def _regrets(problem: Problem, profile: Profile) -> tuple[str, ...]:
    """Cells: what the default plan costs over the best plan known, if rates are drawn within the band."""
    rng = np.random.default_rng(0)

    def planned(of: Profile) -> Plan:
        model = of.model().for_problem(problem)
        return SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=_EVALS))

    default, draws = planned(profile), [profile.drawn(rng) for _ in range(_DRAWS)]
    plans: Sequence[Plan] = [default, *map(planned, draws)]
    regrets, costs = [], []
    for drawn in draws:
        model = drawn.model().for_problem(problem)
        ms = [total_ms(lower(plan, problem), model) for plan in plans]
        regrets.append(ms[0] / min(ms) - 1)
        costs.append(ms[0])
    spread = f"{min(costs):.2f} to {max(costs):.2f} ms"
    return problem.name, f"{np.mean(regrets):.1%}", f"{max(regrets):.1%}", spread
