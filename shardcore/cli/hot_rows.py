"""The command hot-rows: which rows of sequence tables to have on every device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardcore.cli.options import command, natural, positive

_HOT_ROWS = """Find how many rows of a problem's sequence tables to have on every device, and write the
problem with these as tables of their own. A plan is searched for each of some thresholds of lookups a batch;
the best is taken. `plan` then takes the problem that was written."""


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(commands, hot_rows, _HOT_ROWS)
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help="folder of a trained model")
    p.add_argument("--algorithm", help="searches plans; anneal, the default, or another of `plan`")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=positive(float), help="seconds to search for each threshold")
    budget.add_argument("--budget-evals", type=positive(int), help="plans to price for each threshold")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="HOT.json")
    p.add_argument("--plan", type=Path, metavar="PLAN.json", help="write the plan that was found, too")


def hot_rows(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import mixed
    from shardcore.report.hot_rows_report import thresholds_line, thresholds_table
    from shardcore.search import Budget, known, sharder
    from shardcore.search.hot_rows import best_of, try_thresholds
    from shardcore.workload import lower

    problem, model = files.read_problem(args.problem), mixed.load(args.model)
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    search = sharder(known(args.algorithm or "anneal"))
    tried = try_thresholds(problem, model, search, args.seed, budget,
                           lambda t: print(thresholds_line(t), file=sys.stderr, flush=True))
    best = best_of(tried)
    files.write_problem(args.out, best.problem)
    if args.plan:
        files.write_plan(args.plan, best.plan, best.problem)
    print(thresholds_table(problem, tried, best))
    for line in mixed.out_of_range(model.for_problem(best.problem), lower(best.plan, best.problem)):
        print(f"extrapolated: {line}", file=sys.stderr)
