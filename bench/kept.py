"""Kept problems: what every search finds on them, to compare two commits.

    python -m bench.kept tight --out tight.jsonl                         100 problems with little memory
    python -m bench.kept ordinary --out costs.jsonl --against OLD.jsonl  100 with enough, and a run of another
                                                                         commit beside

Problems have 1.02 to 1.2 times (ordinary: 1.5 to 4 times) the memory that their whole tables take in turn,
counted exactly. They have pooled tables, sequences or both, on 2 to 16 devices, on one host or two, of one to
three collections. Some tables are replicas or have their rows divided, because constraints say so. Some have
rows in host memory, with or without a cache, or managed collision. Payloads, optimizers and precisions vary.
On most, FBGEMM's GPU kernels sort. Every second tight problem is small: 6 tables on 3 devices at most.
Ordinary ones have pins, tables kept whole or together, and unequal devices too.

Each search has as many evaluations, so costs can be compared to the last digit. Costs are predicted, by
AnalyticModel.

A line of --out is a problem. Run again, it goes on from there. With --against, memory is that of the other
run. Exit code 1 if a plan is dearer by more than 0.1% than there, or refused where that found one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import print_progress
from shardcore import report
from shardcore.core.access_statistics import ManagedCollision
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import host_names, make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS, Budget
from shardcore.step import memory
from shardcore.step.kinds import WHOLE_ROWS, even_row_share
from shardcore.step.lower import lower
from shardcore.tables.generate import generate_pool

DEARER = 1e-3
KINDS = ("pooled", "sequences", "both")
MOSTLY = {
    "weights": ((4, 6.5), (1, 10), 2048),
    "ids": ((2, 4), (20, 60), 8192),
    "outputs": ((2, 4), (1, 2), 8192),
    "all": ((3.5, 5.5), (5, 20), 8192),
}
"""Powers of 10 of rows, pooling, and the batch, by the data that takes most memory."""
SLACK = {"tight": (1.02, 1.2), "ordinary": (1.5, 4.0)}
SMALL = 6
"""The most tables of a small problem."""


def draw_suite_problem(suite: str, i: int, memory_bytes: int | None = None) -> Problem:
    """Draw problem i of a suite. memory_bytes: of each device; None: by SLACK."""
    rng = np.random.default_rng([39, list(SLACK).index(suite), i])
    small, kind, mostly = suite == "tight" and i % 2 == 0, KINDS[i % 3], list(MOSTLY)[i // 2 % 4]
    n = int(rng.choice([2, 3] if small else [2, 4, 8, 16]))
    n_tables = int(rng.integers(n, SMALL + 1) if small else min(40, n * rng.integers(2, 6)))
    (low, high), pooling, batch = MOSTLY[mostly]
    tables, kinds, collections = [], [], int(rng.choice([1, 1, 2, 3]))
    optimizer = str(rng.choice(["exact_sgd", "rowwise_adagrad", "exact_adagrad", "adam"]))
    tiers, precisions = rng.random() < 0.3, ["fp32", "fp16"] if rng.random() < 0.2 else ["fp32"]
    for j in range(n_tables):
        sequence = kind == "sequences" or (kind == "both" and rng.random() < 0.4)
        # A collection of sequences has one dim.
        number = int(rng.integers(collections))
        dim = 16 << (number if sequence else int(rng.integers(4)))
        table = Table(
            f"t{j}",
            int(10 ** rng.uniform(low, high)),
            dim,
            float(rng.integers(*pooling)),
            features=1 + int(rng.random() < 0.2),
            sequence=sequence,
            collection=f"c{number}",
            precision=str(rng.choice(precisions)),
            load_factor=float(rng.choice([0, 0.1, 0.3])) if tiers and rng.random() < 0.4 else 1.0,
            managed_collision=ManagedCollision(32, 8) if rng.random() < 0.05 else None,
        )
        fixed = rng.random()
        if fixed < 0.1 and even_row_share(table.rows, n):
            kinds.append((table.name, ("row",)))
        elif fixed < 0.2 and table.rows < 1e4 and not table.in_host_memory:
            kinds.append((table.name, ("data_parallel",)))
        tables.append(table)
    two, gpu = n > 2 and n % 2 == 0 and rng.random() < 0.3, rng.random() < 0.8
    hosts = [f"host-{2 * d // n if two else 0}" for d in range(n)]
    devices = tuple(Device(memory_bytes or 1 << 50, host=host) for host in hosts)
    topology = Topology(
        devices,
        None if gpu else "cpu",
        links=make_links(within_host=200.0, between_hosts=25.0 if two else None),
        **({"memory": (Memory("host", 1 << 44, 25.0),)} if tiers else {}),
    )
    payloads = [str(p) for p in rng.choice(["fp32", "fp16", "bf16"], 2, p=[0.6, 0.2, 0.2])]
    constraints = Constraints(kinds=tuple(kinds))
    if suite == "ordinary":
        free = [t.name for t in tables if t.name not in dict(kinds)]
        pooled = [t.name for t in tables if t.name in free and not t.sequence][:2]
        more = (
            {},
            {"unsplit": free[:2]},
            {"pinned": [(name, (0, 1)) for name in free[:1]]},
            {"together": [pooled] if pooled[1:] else []},
            {},
        )[i % 5]
        constraints = replace(constraints, **more)
        fast = tuple(replace(d, speed=1.5) if i % 5 == 4 and k % 2 else d for k, d in enumerate(devices))
        topology = replace(topology, devices=fast)
    problem = Problem(
        f"{suite}-{i:03}-{kind}-{mostly}",
        tuple(tables),
        topology,
        batch * n,
        optimizer,
        constraints,
        Job(forward_payload=payloads[0], backward_payload=payloads[1]),
    )
    return problem if memory_bytes else with_memory_times(problem, rng.uniform(*SLACK[suite]))


def with_memory_times(problem: Problem, times: float) -> Problem:
    """Problem with `times` the memory that whole tables dealt in turn need. Devices keep their shares."""
    each, devices = times * mean_device_bytes(problem), problem.topology.devices
    mean = sum(d.memory_bytes for d in devices) / len(devices)
    sized = tuple(replace(d, memory_bytes=int(each * (d.memory_bytes / mean))) for d in devices)
    return replace(problem, topology=replace(problem.topology, devices=sized))


def mean_device_bytes(problem: Problem) -> float:
    """Mean bytes of a device if whole tables are dealt in turn."""
    ranks, placements = problem.topology.ranks, []
    for i, table in enumerate(problem.tables):
        [kind] = problem.restricted_kinds_by_table.get(table.name, (WHOLE_ROWS.name,))
        devices = ranks if table.name in problem.restricted_kinds_by_table else (i % len(ranks),)
        placements.append(Placement(kind, Shard.whole(table), devices))
    return float(np.mean(memory.used_bytes(Plan(tuple(placements)), problem)))


def problem_of_size(n_tables: int, n_devices: int, batch: int, pods: int = 1) -> Problem:
    """Problem of a given size: pool tables of dim 16 to 128 on hosts of 8 devices, with 1.5 times their memory.

    pods: that hosts are divided into evenly. Links have three levels then.
    """
    live, rng = [t for t in generate_pool() if t.pooling > 0], np.random.default_rng(n_tables)
    tables = tuple(
        replace(live[i % len(live)], name=f"t{i}", dim=int(rng.choice([16, 32, 64, 128])))
        for i in range(n_tables)
    )
    devices = tuple(
        Device(1 << 50, host=name) for name in host_names(n_devices, max(1, n_devices // 8), pods)
    )
    rates = {"within_pod": 0.5, "between_hosts": 0.125} if pods > 1 else {"between_hosts": 0.5}
    links = make_links(0.2, within_host=1.0, **rates)
    return with_memory_times(
        Problem(f"size-{n_tables}-{n_devices}", tables, Topology(devices, links=links), batch), 1.5
    )


def search_costs(problem: Problem, names: Sequence[str], budget: Budget) -> dict[str, Any]:
    """Cost of the plan, or reason of failure, and CPU seconds of each search on a problem."""
    model = AnalyticModel(problem.setting(problem.topology.hardware or "gpu")).for_problem(problem)
    found = {}
    for name in names:
        began = time.process_time()
        try:
            plan = SHARDERS[name](problem, model, budget=budget)
        except ShardCoreError as error:
            each = {"refused": str(error)[:200]}
        else:
            memory.require_fits(plan, problem)
            each = {"ms": price(lower(plan, problem), model).total_ms}
        found[name] = each | {"seconds": round(time.process_time() - began, 3)}
    return found


def compare_with_old_run(
    rows: Sequence[dict], old: dict[str, dict], names: Sequence[str]
) -> tuple[str, list[str]]:
    """Table of costs against an earlier run's, and a list of regressions."""
    shown, worse = [], []
    for name in names:
        pairs = [
            (r, old[r["problem"]]["found"][name], r["found"][name])
            for r in rows
            if name in r["found"] and name in old.get(r["problem"], {}).get("found", ())
        ]
        ratios = []
        for row, before, now in pairs:
            if "ms" in before and "ms" in now:
                ratios.append(now["ms"] / before["ms"])
                if ratios[-1] > 1 + DEARER:
                    worse.append(f"{row['problem']}, {name}: {before['ms']:.6g} ms, now {now['ms']:.6g} ms")
            elif "ms" in before:
                worse.append(f"{row['problem']}, {name}: {before['ms']:.6g} ms, now {now['refused']}")
        seconds = [sum(x[k]["seconds"] for x in pairs) for k in (1, 2)]
        ratio = np.array(ratios or [np.nan])
        shown.append(
            (
                name,
                str(len(ratios)),
                str(int((ratio > 1 + DEARER).sum())),
                f"{1 - ratio.mean():.2%}",
                f"{ratio.max() - 1:+.2%}",
                *(str(sum("ms" not in x[k] for x in pairs)) for k in (1, 2)),
                f"{seconds[1] / max(seconds[0], 1e-9):.2f}",
            )
        )
    return report.text_table(
        ("search", "both found", "dearer", "mean gain", "most", "refused before", "now", "processor time"),
        shown,
    ), worse


def search_summary(rows: Sequence[dict], names: Sequence[str]) -> str:
    """Table with a row per search: mean cost relative to the best search, and seconds."""
    shown = []
    for name in names:
        of = [(r, r["found"][name]) for r in rows if name in r["found"]]
        over = [f["ms"] / min(x["ms"] for x in r["found"].values() if "ms" in x) for r, f in of if "ms" in f]
        shown.append(
            (
                name,
                f"{len(over)} of {len(of)}",
                f"{np.mean(over or [np.nan]):.4f}",
                f"{max(over, default=np.nan):.3f}",
                f"{sum(f['seconds'] for _, f in of):.0f}",
            )
        )
    return report.text_table(("search", "found", "cost", "most", "processor s"), shown)


def main() -> int:
    parser = common.bench_parser(
        __doc__,
        problems=100,
        evals=20_000,
        out=(Path, "a line of JSON for each problem"),
        against=(Path, "--out of another commit"),
    )
    parser.add_argument("suite", choices=tuple(SLACK))
    parser.add_argument("--sharders", nargs="*", default=list(SHARDERS))
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out is needed: a file for the results, such as tight.jsonl")
    old = {row["problem"]: row for row in common.read_rows(args.against)}
    memory_bytes = {int(name.split("-")[1]): row["memory_bytes"] for name, row in old.items()}
    rows = common.read_rows(args.out)
    for i in range(len(rows), args.problems):
        problem = draw_suite_problem(args.suite, i, memory_bytes.get(i))
        found = search_costs(problem, args.sharders, Budget(evals=args.evals))
        rows.append(
            {
                "problem": problem.name,
                "tables": len(problem.tables),
                "devices": len(problem.topology),
                "memory_bytes": problem.topology.devices[0].memory_bytes,
                "found": found,
            }
        )
        common.write_rows(args.out, rows)
        print_progress(problem.name, *(f"{n} {f.get('ms', np.nan):.4g}" for n, f in found.items()))
    rows = rows[: args.problems]
    print(search_summary(rows, args.sharders))
    if not old:
        return 0
    table, worse = compare_with_old_run(rows, old, args.sharders)
    print("\n".join(["", table, *(["", "dearer, or not found:", *worse] if worse else [])]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
