"""The command tiers: which rows of tables lie in device memory, where not all fit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from shardcore.cli.options import command, natural, positive, positive_gib
from shardcore.cli.progress_line import shown
from shardcore.errors import ShardCoreError
from shardcore.step.tiers import BELOW, Memory
from shardcore.types import Problem

_TIERS = """Decide which rows of a problem's tables lie in device memory, and which in the hosts', where not
all fit. It writes the problem with the load factors that it found, which `plan` then takes. With a model,
plans are searched for some shares of the memory, and the best is taken; what it leaves free on a device goes
to the tables there."""


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(commands, tiers, _TIERS, outputs=("out", "plan"))
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--host-gib", type=positive_gib, help="memory of each host that tables may take; left "
                   "out, the problem says it")
    p.add_argument("--link-gbps", type=positive(float), help="GB/s between a device and its host's memory, "
                   "given, not measured; left out, the problem says it, or 25")
    p.add_argument("--model", type=Path, action="append", help="folder of a trained model; give one for each "
                   "precision")
    p.add_argument("--algorithm", help="with --model: searches plans; portfolio, the default, or "
                   "another of `plan`")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=positive(float), help="seconds to search for each share")
    budget.add_argument("--budget-evals", type=positive(int), help="plans to price for each share")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, metavar="TIERED.json", help="write the problem with load factors")
    p.add_argument("--plan", type=Path, metavar="PLAN.json", help="with --model: write the plan that was "
                   "found, too")


def tiers(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.memory_tiers import decide
    from shardcore.report.memory_tiers_report import tiers_report

    for name in ("algorithm", "budget_s", "budget_evals", "plan"):
        if getattr(args, name) is not None and not args.model:
            raise ShardCoreError(f"--{name.replace('_', '-')} {getattr(args, name)} is for plans; give "
                                 "--model too")
    asked = _with_host_memory(files.read_problem(args.problem), args)
    found = _searched(args, asked) if args.model else decide(asked).problem
    if args.out:
        files.write_problem(args.out, found)
    print(tiers_report(found))


def _with_host_memory(problem: Problem, args: argparse.Namespace) -> Problem:
    known = next(iter(problem.topology.memory), None)
    if not known and not args.host_gib:
        raise ShardCoreError(f"{args.problem} does not say how much memory hosts have for tables; give "
                             "--host-gib, or memory in its topology")
    memory = Memory(known.tier if known else BELOW[0],
                    int(args.host_gib * 2**30) if args.host_gib else known.bytes,
                    args.link_gbps or (known.gbps if known else 25.0))
    own = dataclasses.replace(problem.topology, memory=(memory, *problem.topology.memory[1:]))
    return dataclasses.replace(problem, topology=own)


def _searched(args: argparse.Namespace, problem: Problem) -> Problem:
    from shardcore import files
    from shardcore.cost import composite
    from shardcore.report.memory_tiers_report import share_line, shares_table
    from shardcore.search import DEFAULT_SHARDER, Budget, known, sharder
    from shardcore.search.memory_tiers import try_shares
    from shardcore.search.tried import best_of
    from shardcore.workload import lower

    if args.plan and not args.out:
        raise ShardCoreError(f"--plan {args.plan} needs --out, the problem with load factors that it is a "
                             "plan of")
    model = composite.load(args.model)
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    with shown() as line:
        tried = try_shares(problem, model, sharder(known(args.algorithm or DEFAULT_SHARDER)), args.seed,
                           budget, lambda t: line.say(share_line(t)))
    best = best_of(tried)
    if args.plan:
        files.write_plan(args.plan, best.plan, best.problem)
    print(shares_table(tried, best) + "\n")
    for line in model.for_problem(best.problem).out_of_range(lower(best.plan, best.problem)):
        print(f"extrapolated: {line}", file=sys.stderr)
    return best.problem
