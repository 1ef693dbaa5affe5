"""A real job of 1,935 tables on 96 ranks beside TorchRec's own published placements, and 5,384 tables × 1,024
devices: cost, memory, and seconds against the budget.

    python -m bench.production PUBLIC_INPUTS
    python -m bench.production PUBLIC_INPUTS --processor --only fp16

PUBLIC_INPUTS is a folder with torchrec_stats_example_96ranks.csv (meta-pytorch/torchrec, PR 3773: its
docs/wiki/sharding_stats_example.txt as a table) and problems/r04-production-1935-tables-96-ranks.json, the
same tables as a problem. Several shards that TorchRec put on one rank are one here, as its kernels need it.
Costs are predicted, by AnalyticModel. Memory is that of the fullest device. `silence` is the longest time
without a report of progress. A small problem is planned before, to compile. --processor: budgets and seconds
are the processor's, as on an idle machine.
"""

from __future__ import annotations

import csv
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import common
from bench.kept import model_of, of_size
from shardcore import report
from shardcore.core import progress
from shardcore.core.errors import Infeasible
from shardcore.core.topology import GIB
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.cost.model import price
from shardcore.io import files
from shardcore.measure.sampling.placements import deal_columns
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.step import memory
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import lower, require_plan

PROBLEM = "problems/r04-production-1935-tables-96-ranks.json"
PLACEMENTS = "torchrec_stats_example_96ranks.csv"
RESERVED_GIB = 46 + 62.7
"""GiB of a rank's 184: TorchRec's storage reservation, and the dense part. Ids count with the tables."""


def published(folder: Path, problem: Problem) -> Plan:
    """TorchRec's placements. The file has the problem's tables, in their order."""
    placements, ranks = [], problem.topology.ranks
    with open(folder / PLACEMENTS) as lines:
        for row, table in zip(csv.DictReader(lines), problem.tables, strict=True):
            if row["sharding"] == "RW":
                placements.append(Placement("row", Shard.whole(table), ranks))
                continue
            shards = Counter(int(rank) for rank in row["ranks"].split(","))
            widths = {rank: n * int(row["cw_dim"]) for rank, n in shards.items()}
            placements += [Placement(WHOLE_ROWS.name, s, (rank,)) for rank, s in deal_columns(table, widths)]
    plan = Plan(tuple(placements))
    require_plan(plan, problem)
    return plan


def jobs(folder: Path) -> Iterator[tuple[str, Problem, Plan | None, float]]:
    """Name, problem, published plan if there is one, and seconds to plan in."""
    given = files.read_problem(folder / PROBLEM)
    for name, precision, reserved in (
        ("r04, FP16, its reserve", "fp16", int(RESERVED_GIB * GIB)),
        ("r04, FP32, no reserve", "fp32", 0),
    ):
        problem = replace(
            given,
            tables=tuple(replace(t, precision=precision) for t in given.tables),
            constraints=replace(given.constraints, reserved_bytes=reserved),
        )
        yield name, problem, published(folder, problem), 60.0
    yield "5,384 tables x 1,024 devices", of_size(5384, 1024, 65_536), None, 20.0


@dataclass
class Silence:
    """Hears progress. longest_s: the longest time without a report. phases: those reported."""

    last_s: float = field(default_factory=progress.clock)
    longest_s: float = 0.0
    phases: dict[str, None] = field(default_factory=dict)

    def __call__(self, phase: str, best_ms: float | None, left_s: float | None) -> None:
        now_s = progress.clock()
        self.longest_s, self.last_s = max(self.longest_s, now_s - self.last_s), now_s
        self.phases[phase] = None


def compiled() -> None:
    """Plan a small problem, so that nothing compiles while others are planned."""
    small = of_size(20, 4, 65_536)
    SHARDERS[DEFAULT_SHARDER](small, model_of(small), budget=Budget(evals=1000))


HEADERS = (
    "job",
    "published ms",
    "GiB",
    "ours ms",
    "GiB",
    "may hold",
    "below published",
    "seconds",
    "processor",
    "wall",
    "silence",
    "phases",
    "peak MiB",
)
"""Headings of `row`."""


def row(name: str, problem: Problem, theirs: Plan | None, seconds: float) -> tuple[str, ...]:
    """Plan a job. Cells of HEADERS; the peak is that of the process until now."""
    model, heard = model_of(problem), Silence()
    processor, wall, began = time.process_time(), time.perf_counter(), progress.clock()
    with progress.listening(heard):
        try:
            plan = SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(seconds=seconds))
        except Infeasible as error:
            plan = error
    heard("", None, None)
    took = (
        f"{progress.clock() - began:.1f} of {seconds:g}",
        f"{time.process_time() - processor:.1f}",
        f"{time.perf_counter() - wall:.1f}",
        f"{heard.longest_s:.1f}",
        str(len(heard.phases) - 1),
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
    )
    cells = [name]
    costs = []
    for each in (theirs, plan):
        if not isinstance(each, Plan):
            cells += ["-" if each is None else "refused", "-"]
            continue
        costs.append(price(lower(each, problem), model).total_ms)
        cells += [
            f"{costs[-1]:,.0f}" if costs[-1] > 100 else f"{costs[-1]:.3f}",
            f"{max(memory.used_bytes(each, problem)) / GIB:.1f}",
        ]
    may_hold = f"{max(memory.held_bytes(problem)) / GIB:.1f}"
    gain = f"{1 - costs[1] / costs[0]:.1%}" if len(costs) == 2 else "-"
    return (*cells, may_hold, gain, *took)


def main() -> None:
    parser = common.parser(
        __doc__,
        {"inputs": (Path, "folder of the public inputs")},
        processor=(False, "count the processor's seconds"),
        only=("", "jobs with this word in their name"),
        budget_s=(float, "(60 for r04, 20 for the other)"),
    )
    args = parser.parse_args()
    if args.processor:
        common.count_processor_seconds()
    compiled()
    rows = []
    for name, problem, theirs, seconds in jobs(args.inputs):
        if args.only.lower() in name.lower():
            rows.append(row(name, problem, theirs, args.budget_s or seconds))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(report.text_table(HEADERS, rows))


if __name__ == "__main__":
    main()
