"""Does a plan ever cost more with a larger budget, more memory or more devices?

    python -m bench.rises --problems 200 --out rises.jsonl
    python -m bench.rises --problems 20 --model MODEL --out model.jsonl

Random problems of pooled tables, of sequences, and of both, on 4 to 64 devices. Each is searched

- with 1%, 10% and 100% of the default budget;
- with 1.02 to 4 times the memory that its whole tables take in turn, evenly;
- on twice and four times the devices.

A rise is a cost of more than 0.1% above that with less. Each search runs by itself: no plan of another one is
given to it. `best other` compares with every other search of ours, under the same budget of evaluations.
Costs are predicted, by AnalyticModel or a trained model.

A line of --out is a problem. Run again, it goes on from there. --jobs problems are searched at once. After
--minutes no further one begins, and those that are done are shown.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from bench import common
from bench.common import say
from bench.kept import with_memory
from shardcore import report
from shardcore.core.errors import Infeasible
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost import composite
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.search.portfolio import DEFAULT
from shardcore.tables.generate import generate_pool

RISE = 1e-3
KINDS = ("pooled", "sequences", "both")
BUDGETS = (0.01, 0.1, 1.0)
MEMORY = (1.02, 1.1, 1.5, 2.0, 4.0)
DEVICES = (1, 2, 4)
PART = 0.2
"""Share of the default budget for searches of other memory and devices."""


def drawn(i: int, seed: int) -> tuple[Problem, str]:
    """Problem i with ample memory, and its kind."""
    rng, kind = np.random.default_rng([seed, i]), KINDS[i % len(KINDS)]
    n = int(rng.choice([4, 8, 16]))
    live = [t for t in generate_pool() if t.pooling > 0]
    tables = []
    for j, k in enumerate(rng.choice(len(live), n * int(rng.integers(1, 8)))):
        sequence = kind == "sequences" or (kind == "both" and rng.random() < 0.3)
        pooling = (
            float(rng.choice([1, 10, 50, 200, 500], p=[0.4, 0.3, 0.15, 0.1, 0.05]))
            if sequence
            else live[k].pooling
        )
        rows = int(rng.choice([2, 10, 1000])) if rng.random() < 0.1 else live[k].rows
        tables.append(
            replace(
                live[k],
                name=f"t{j}",
                rows=rows,
                dim=int(rng.choice([16, 32, 64, 128])),
                pooling=pooling,
                sequence=sequence,
            )
        )
    batch = int(rng.choice([2048, 8192] if kind != "pooled" else [2048, 8192, 65_536]))
    return on(tables, f"{kind}-{i}", n, batch, bool(rng.random() < 0.5)), kind


def on(tables: Sequence[Table], name: str, n: int, batch: int, hosts: bool) -> Problem:
    """Tables on n devices with ample memory, in hosts of 8 or on one."""
    devices = tuple(Device(1 << 50, host=f"host-{d // 8 if hosts else 0}") for d in range(n))
    links = links_of(within_host=200.0, between_hosts=25.0 if hosts and n > 8 else None)
    return Problem(name, tuple(tables), Topology(devices, links=links), batch)


def cost(problem: Problem, model: CostModel, algorithm: str, budget: Budget) -> float:
    """Cost of the plan that a search finds; infinite without one."""
    try:
        found = SHARDERS[algorithm](problem, model.for_problem(problem), budget=budget)
    except Infeasible:
        return np.inf
    return found.provenance["predicted_ms"]


def rises(costs: Sequence[float]) -> list[float]:
    """Each cost over the least of those before, less 1."""
    least = np.minimum.accumulate(costs)
    return [b / a - 1 for a, b in zip(least[:-1], costs[1:], strict=True) if np.isfinite(a)]


def searched(i: int, seed: int, folder: str | None) -> dict[str, object]:
    """Costs of problem i, by what there is more of. folder: of a trained model."""
    ample, kind = drawn(i, seed)
    loaded = composite.load([folder]) if folder else None
    if loaded:
        ample = replace(ample, global_batch=loaded.setting.batch)
    model = loaded or AnalyticModel(Setting("gpu", ample.global_batch))
    problem = with_memory(ample, float(np.random.default_rng([seed, i, 1]).choice(MEMORY)))
    n, batch, hosts = len(ample.topology), ample.global_batch, len(ample.topology.hosts) > 1
    part = Budget(evals=int(PART * DEFAULT.evals))
    budget = [
        cost(problem, model, DEFAULT_SHARDER, Budget(evals=int(share * DEFAULT.evals))) for share in BUDGETS
    ]
    memory = [cost(with_memory(ample, slack), model, DEFAULT_SHARDER, part) for slack in MEMORY]
    devices = [
        cost(on(ample.tables, ample.name, n * k, batch, hosts), model, DEFAULT_SHARDER, part) for k in DEVICES
    ]
    other = min(
        cost(problem, model, name, DEFAULT) for name in SHARDERS if name not in (DEFAULT_SHARDER, "torchrec")
    )
    return {
        "problem": ample.name,
        "tables": len(ample.tables),
        "devices": n,
        "kind": kind,
        "seed": seed,
        "costs": {"budget": budget, "memory": memory, "devices": devices, "best other": [other, budget[-1]]},
    }


def summary(rows: Sequence[dict]) -> str:
    """A row for each axis: pairs, rises, and the largest rise."""
    shown = []
    for axis in rows[0]["costs"]:
        found = [(rise, row["problem"]) for row in rows for rise in rises(row["costs"][axis])]
        largest, where = max(found)
        shown.append(
            (axis, str(len(found)), str(sum(rise > RISE for rise, _ in found)), f"{largest:.2%}", where)
        )
    return report.text_table(("more of", "pairs", f"rises above {RISE:.1%}", "largest", "problem"), shown)


def results(waiting: Sequence[int], args: argparse.Namespace) -> Iterator[dict]:
    """Results of each problem in turn, until the time is over. A job has at most one waiting."""
    ends = time.monotonic() + 60 * args.minutes
    with ProcessPoolExecutor(args.jobs, initializer=_end_with_parent) as pool:
        left, running = list(waiting), []
        while left or running:
            while left and len(running) < args.jobs and time.monotonic() < ends:
                running.append(pool.submit(searched, left.pop(0), args.seed, args.model))
            if not running:
                return
            yield running.pop(0).result()


def _end_with_parent() -> None:
    """Let Linux end this process if its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    parser = common.parser(
        __doc__,
        problems=200,
        seed=38,
        model=(str, "folder of a trained model; default: AnalyticModel"),
        out=(..., "a line of JSON for each problem"),
        jobs=2,
        minutes=np.inf,
    )
    args = parser.parse_args()
    rows = common.lines_of(args.out)
    for row in results(range(len(rows), args.problems), args):
        rows.append(row)
        common.write_lines(args.out, rows)
        costs = "; ".join(
            f"{axis} {' '.join(f'{c:.4g}' for c in costs)}" for axis, costs in row["costs"].items()
        )
        say(f"{len(rows)} of {args.problems}, {row['problem']}: {row['tables']} x {row['devices']}, {costs}")
    print(summary(rows[: args.problems]))


if __name__ == "__main__":
    main()
