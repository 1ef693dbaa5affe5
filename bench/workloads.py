"""Plans of public workloads on GPU profiles: the default search against other planners, in equal seconds.

    python -m bench.workloads --out rows.jsonl [--inputs FOLDER] [--only WORD] [--seconds 30]

Prints a table of the rows that the file then has; README shows some of them. A run goes on where one before it ended.
All costs are predicted: of the embeddings' part of a step, by the card's profile. --inputs: the folder with a
production list of 1,935 tables and TorchRec's plan of it (see docs/benchmarks/2026-12-01-workloads.md).
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import common
from shardcore import report
from shardcore.core.job import Job
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.cost.model import predicted_total_ms
from shardcore.cost.profile import Profile, load_profile
from shardcore.io import files
from shardcore.measure.sampling.placements import cut_columns
from shardcore.search import BASELINES, DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import lower
from shardcore.tables.public import public_optimizer, public_pool

H100, A100 = "nvidia-h100-sxm", "nvidia-a100-80"
LISTS = (
    ("mlperf-dlrm-dcnv2", H100, 1, 65_536),
    ("mlperf-dlrm-dcnv2", H100, 8, 135_168),
    ("mlperf-dlrmv3", H100, 8, 4_096),
    ("yambda-5b", H100, 1, 16_384),
    ("merlin-tiny", A100, 1, 65_536),
    ("merlin-small", A100, 1, 65_536),
    ("merlin-medium", A100, 2, 65_536),
    ("merlin-large", A100, 4, 65_536),
    ("hugectr-180", H100, 2, 65_536),
    ("hugectr-7", H100, 14, 57_344),
)
"""Public lists of tables, each with its card, hosts of eight cards, and global batch."""
FP16 = Job(forward_payload="fp16", backward_payload="fp16")
_OTHERS = {"neuroshard": "NeuroShard's search", "torchrec": "TorchRec's planner"}
"""Other searches, and what the table calls them. The best of BASELINES is a column of its own."""


def public_workloads() -> Iterator[tuple[Problem, Profile]]:
    """Problem of each public table list, with its card's hardware profile."""
    for name, card, hosts, batch in LISTS:
        profile = load_profile(card)
        problem = Problem(
            f"{name}-{8 * hosts}-{card}",
            public_pool(name),
            profile.topology(hosts, 8),
            batch,
            public_optimizer(name),
            job=FP16,
        )
        yield problem, profile


def production_workload(inputs: Path) -> tuple[Problem, Profile, Plan]:
    """Production problem of 1,935 tables on 96 cards, its hardware profile, and TorchRec's published plan.

    The file of the plan has the problem's tables, in their order. Several shards that it put on one rank are one here,
    as its kernels need it.
    """
    profile = load_profile(H100)
    given = files.read_problem(inputs / "problems" / "r04-production-1935-tables-96-ranks.json")
    problem = replace(
        given,
        name=f"production-96-{profile.name}",
        tables=tuple(replace(t, precision="fp16") for t in given.tables),
        topology=profile.topology(12, 8),
        # The profile counts 80 GB, 5.1 GiB less than the card reports. With 8 GiB reserved the tables do not fit.
        constraints=replace(given.constraints, reserved_bytes=0),
    )
    placements, ranks = [], problem.topology.ranks
    with open(inputs / "torchrec_stats_example_96ranks.csv", encoding="utf-8") as lines:
        for row, table in zip(csv.DictReader(lines), problem.tables, strict=True):
            if row["sharding"] == "RW":
                placements.append(Placement("row", Shard.whole(table), ranks))
                continue
            shards = Counter(int(rank) for rank in row["ranks"].split(","))
            widths = {rank: n * int(row["cw_dim"]) for rank, n in shards.items()}
            placements += [Placement(WHOLE_ROWS.name, s, (rank,)) for rank, s in cut_columns(table, widths)]
    return problem, profile, Plan(tuple(placements))


def arm_costs(problem: Problem, profile: Profile, seconds: float, published: Plan | None) -> dict[str, Any]:
    """Predicted ms of each sharding arm's plan; None if infeasible.

    published: TorchRec's plan where it is known, in place of a search.
    """
    model, budget = profile.cost_model().for_problem(problem), Budget(seconds=seconds)
    found: dict[str, Any] = {"problem": problem.name, "tables": len(problem.tables)}
    arms: dict[str, common.Arm] = {
        name: partial(SHARDERS[name], model=model, budget=budget)
        for name in (DEFAULT_SHARDER, *_OTHERS, *BASELINES)
    }
    if published:
        arms["torchrec"] = lambda problem: published
    for name, arm in arms.items():
        plan, took_s = common.timed_plan(arm, problem, time.perf_counter)
        found[name] = predicted_total_ms(lower(plan, problem), model) if plan else None
        common.print_progress(problem.name, name, found[name], "ms", round(took_s), "s")
        if name == DEFAULT_SHARDER and plan:
            found["band"] = model.step_error_band(lower(plan, problem))
    return found


def costs_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Table with a row per problem: ms of our plan, and costs of rivals' plans relative to ours."""
    cells = []
    for row in (row for row in found if row[DEFAULT_SHARDER]):
        ours = row[DEFAULT_SHARDER]
        greedy = min((row[name] for name in BASELINES if row[name]), default=None)
        others = (*(row[arm] for arm in _OTHERS), greedy)
        relative = [f"{ms / ours:.3f}" if ms else "none fits" for ms in others]
        cells.append((row["problem"], str(row["tables"]), f"{ours:.3f} ±{row['band']:.0%}", *relative))
    return report.markdown_table(("workload", "tables", "ours, ms", *_OTHERS.values(), "best greedy"), cells)


def main() -> None:
    args = common.bench_parser(
        __doc__,
        out=(..., "file of rows, one a problem"),
        inputs=(Path, "folder with the production list"),
        only=("", "a word in the names of the problems"),
        seconds=(30.0, "seconds of each search"),
    ).parse_args()
    found = common.read_rows_of_settings(args.out, {"seconds": args.seconds})
    problems: list[tuple[Problem, Profile, Plan | None]] = [(*one, None) for one in public_workloads()]
    if args.inputs:
        problems.append(production_workload(args.inputs))
    for problem, profile, published in problems:
        if args.only in problem.name and all(row["problem"] != problem.name for row in found):
            found.append({"seconds": args.seconds, **arm_costs(problem, profile, args.seconds, published)})
            common.write_rows(args.out, found)
    print(costs_table(found))


if __name__ == "__main__":
    main()
