"""The commands hot-rows and hot-drift: which rows of sequence tables to have on every device, and whether
they are still hot."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardcore.cli.options import command, natural, positive
from shardcore.cli.progress_line import shown

_HOT_ROWS = """Find how many rows of a problem's sequence tables to have on every device, and write the
problem with these as tables of their own. A plan is searched for each of some thresholds of lookups a batch;
the best is taken. `plan` then takes the problem that was written."""


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(commands, hot_rows, _HOT_ROWS, outputs=("out", "plan"))
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help="folder of a trained model")
    p.add_argument("--algorithm", help="searches plans; anneal, the default, or another of `plan`")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=positive(float), help="seconds to search for each threshold")
    budget.add_argument("--budget-evals", type=positive(int), help="plans to price for each threshold")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="HOT.json")
    p.add_argument("--plan", type=Path, metavar="PLAN.json", help="write the plan that was found, too")

    p = command(commands, hot_drift, "Say how hot the hot rows of a job still are, and what other hot ids "
                "would save and move.")
    p.add_argument("problem", type=Path, metavar="HOT.json", help="of hot-rows")
    p.add_argument("--hot-ids", type=Path, required=True, metavar="IDS.safetensors", help="that are hot in "
                   "the job (write_hot_ids)")
    p.add_argument("--row-counts", type=Path, required=True, metavar="COUNTS.safetensors", help="lookups of "
                   "each row in samples of now (write_row_counts)")
    p.add_argument("--out", type=Path, metavar="NEW.safetensors", help="write the hot ids of now")


def hot_rows(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import composite
    from shardcore.report.hot_rows_report import thresholds_line, thresholds_table
    from shardcore.search import Budget, known, sharder
    from shardcore.search.hot_rows import try_thresholds
    from shardcore.search.tried import best_of
    from shardcore.workload import lower

    problem, model = files.read_problem(args.problem), composite.load(args.model)
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    search = sharder(known(args.algorithm or "anneal"))
    with shown() as line:
        tried = try_thresholds(problem, model, search, args.seed, budget,
                               lambda t: line.say(thresholds_line(t)))
    best = best_of(tried)
    files.write_problem(args.out, best.problem)
    if args.plan:
        files.write_plan(args.plan, best.plan, best.problem)
    print(thresholds_table(problem, tried, best))
    for line in model.for_problem(best.problem).out_of_range(lower(best.plan, best.problem)):
        print(f"extrapolated: {line}", file=sys.stderr)


def hot_drift(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.report.hot_rows_report import drift_table
    from shardcore.tables.hot_drift import hot_drift as drift_of
    from shardcore.tables.hot_ids import read_hot_ids, write_hot_ids
    from shardcore.tables.row_counts import read_row_counts

    found = drift_of(files.read_problem(args.problem), read_hot_ids(args.hot_ids),
                     read_row_counts(args.row_counts))
    if args.out:
        write_hot_ids(args.out, [one.new for one in found])
    print(drift_table(found))
