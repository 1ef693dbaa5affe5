"""Commands that make, price, run and export plans: plan, price, export.

Commands import what they need when they run, so that help is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.cli import grouped
from shardcore.cli.options import command, gib, natural, positive
from shardcore.cli.progress_line import shown
from shardcore.errors import ShardCoreError
from shardcore.progress import clock, report
from shardcore.types import Plan, Problem

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.search.budget import Budget
    from shardcore.search.learned.policy import Policy

SECOND_MODEL_IS_GONE = ("--second-model is gone: replayed plans that two models agreed on were no faster "
                        "(docs/log.md); leave it out, or search longer with --budget-s")
_MODEL = ("folder of a trained model; where weights of tables differ in precision, give the option for each "
          "precision")
_CONFIDENCE = ("an op's cost is what its measurement stays below with this probability (0.9, say), rather "
               "than what the model expects")
_EXPLAIN = ("say what bounds the plan, what other algorithms find, and what more memory or more devices "
            "would bring")


def add_commands(commands: argparse._SubParsersAction) -> None:
    _add_plan(commands)
    _add_price(commands)
    _add_export(commands)


# --- plan --------------------------------------------------------------------------------------------------


def _add_plan(commands: argparse._SubParsersAction) -> None:
    p = command(commands, plan, "Search a plan for a problem under a cost model.")
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help=_MODEL)
    p.add_argument("--start", type=Path, metavar="PLAN", help="improve this plan of the problem instead of "
                   "planning afresh (annealing)")
    p.add_argument("--start-problem", type=Path, metavar="PROBLEM.json", help="the problem that --start was "
                   "made for, where it has changed since: tables new, gone, of another shape or with other "
                   "statistics, or other devices")
    p.add_argument("--without", type=natural, nargs="+", action="extend", metavar="DEVICE", help="with "
                   "--start: devices of its problem that are gone; default: those with the highest numbers, "
                   "where there are fewer now")
    p.add_argument("--max-moved-tables", type=natural, metavar="N", help="with --start: most tables that may "
                   "move; default: any number")
    p.add_argument("--max-moved-gib", type=gib, metavar="G", help="with --start: most GiB of weights "
                   "that may move, beyond what has to; default: any number")
    p.add_argument("--towers", type=Path, metavar="TOWERS.json", help="tables that belong together on a "
                   "host, and how many times smaller a tower module makes what crosses hosts (docs/plan.md)")
    p.add_argument("--algorithm", help="portfolio, the default (the cheapest plan of several searches), "
                   "anneal, anneal_columns (tables whole or cut by columns only), random, size_greedy, "
                   "dim_greedy, lookup_greedy, size_lookup_greedy, neuroshard or torchrec "
                   "(where installed); with --policy: dreamshard, dreamshard_direct or autoshard (tables "
                   "whole), or these with _columns (also cut by columns)")
    p.add_argument("--policy", type=Path, metavar="POLICY", help="folder of a trained policy (train-policy), "
                   "for a learned algorithm; default algorithm: the policy's own")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=positive(float), help="seconds to search")
    budget.add_argument("--budget-evals", type=positive(int), help="plans to price; the same seed then gives "
                        "the same plan")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--groups", nargs="?", const="auto", metavar="auto|SIZE", help="divide the devices into "
                   "groups of SIZE, or of the best size, that replicate one plan (TorchRec's DMPCollection); "
                   "each size and layout is searched with the budget")
    p.add_argument("--sync-every", type=positive(int), metavar="N", help="with --groups: steps from one "
                   "synchronisation of the replicas to the next; default: 1")
    p.add_argument("--confidence", type=positive(float), metavar="P", help=_CONFIDENCE)
    p.add_argument("--second-model", help=argparse.SUPPRESS)
    p.add_argument("--explain", action="store_true", help=f"{_EXPLAIN}; each is searched with the same "
                   "budget again")
    p.add_argument("--out", type=Path, required=True, metavar="PLAN.json")


def plan(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import composite, known_errors
    from shardcore.cost.model import at_confidence
    from shardcore.report import plan_report
    from shardcore.search import DEFAULT_SHARDER, known, sharder
    from shardcore.search.learned.policy import read_policy
    from shardcore.search.tower_hosts import tower_traffic
    from shardcore.workload import lower

    policy = read_policy(args.policy) if args.policy else None
    args.algorithm = known(args.algorithm or (policy.name if policy else DEFAULT_SHARDER))
    search = sharder(args.algorithm, policy)
    _require_agreeing(args)
    with shown():
        report(f"reading {args.problem}")
        asked = problem = files.read_problem(args.problem)
    loaded = composite.load(args.model)
    if args.groups is not None:
        _plan_groups(args, problem, loaded, policy)
        return
    model = loaded.for_problem(problem)
    problem.require_setting(model.setting)
    # The search uses the cautious model. The range check below needs the plain one.
    cautious = at_confidence(model, args.confidence)
    provenance, budget = _provenance(args), _budget(args)
    began, why = clock(), ""
    with shown():
        report(args.algorithm)
        if args.towers:
            problem, of_towers = _with_towers(args.towers, problem, cautious, budget)
            provenance |= of_towers
            budget = budget and budget.without(clock() - began)
        if args.start:
            found, why = _replanned(args, problem, cautious, budget)
        else:
            found = search(problem, cautious, seed=args.seed, budget=budget)
        found = Plan(found.placements, {**found.provenance, **provenance})
        seconds, cost = clock() - began, found.provenance["predicted_ms"]
        report(f"writing {args.out}", cost)
        # Towers only narrow where tables may live: a plan with them is one of the problem that was asked.
        files.write_plan(args.out, found, asked)
    named = f"{known_errors.label(model)}, model {provenance['model_digest'][:8]}"
    sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
    print(f"{args.out}: {cost:.3f} ms predicted{sure}, found in {seconds:.2f} s by {args.algorithm}{why}")
    print(f"under {named}")
    if args.towers:
        print(plan_report.towers_text(tower_traffic(found, problem)))
    if args.explain:
        _say_explained(found, problem, cautious, budget)
    # Warnings go to standard error, so that standard output stays readable by programs.
    _say_extrapolated(model.out_of_range(lower(found, problem)))


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    from shardcore import model_files

    return ({"model_digest": "+".join(map(model_files.model_digest, args.model))}
            | ({"policy_digest": model_files.model_digest(args.policy, "policy")} if args.policy else {})
            | ({"confidence": args.confidence} if args.confidence else {}))


def _budget(args: argparse.Namespace) -> Budget | None:
    from shardcore.search.budget import Budget

    return Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None


def _plan_groups(args: argparse.Namespace, problem: Problem, model: CostModel, policy: Policy | None) -> None:
    from shardcore.cost.model import at_confidence

    began, cautious = clock(), at_confidence(model, args.confidence)
    best = grouped.chosen(args, problem, cautious, _budget(args), policy)
    of_groups = grouped.write(args, best, problem, _provenance(args))
    found, own = of_groups.plan, of_groups.problem
    print(f"{args.out}: {grouped.words(best, problem)}: {best.cost.total_ms:.3f} ms predicted, found in "
          f"{clock() - began:.2f} s by {found.provenance['algorithm']}")
    if args.explain:
        print("\nThe plan of one group:")
        _say_explained(found, own, cautious.for_problem(own), _budget(args))
    _say_extrapolated(grouped.extrapolated(of_groups, problem, model.for_problem(own)))


def _require_agreeing(args: argparse.Namespace) -> None:
    """Raise ShardCoreError for options that are gone or contradict each other."""
    from shardcore.search import SPACE_OF

    grouped.require_agreeing(args)

    if args.second_model is not None:
        raise ShardCoreError(SECOND_MODEL_IS_GONE)
    if args.start and args.algorithm not in SPACE_OF:
        raise ShardCoreError(f"--start is for --algorithm {', '.join(SPACE_OF)} only; got "
                             f"{args.algorithm}")
    if args.groups is not None and args.towers:
        raise ShardCoreError(f"--groups {args.groups} and --towers {args.towers} were both given; towers are "
                             "of all hosts of a problem, so leave one out")
    if args.start and args.towers:
        raise ShardCoreError(f"--start {args.start} and --towers {args.towers} were both given; a plan with "
                             "towers is made afresh, so leave one out")
    for name in ("start_problem", "without", "max_moved_tables", "max_moved_gib"):
        if (given := getattr(args, name)) is not None and not args.start:
            shown = " ".join(map(str, given)) if isinstance(given, list) else given
            raise ShardCoreError(f"--{name.replace('_', '-')} {shown} needs --start, the plan to start from")


def _with_towers(path: Path, problem: Problem, model: CostModel,
                 budget: Budget | None) -> tuple[Problem, dict[str, Any]]:
    """The problem with the towers of a file, and what a plan's provenance says of them.

    Hosts are searched for a third of the budget's seconds at most.
    """
    from shardcore.search.tower_hosts import TowerConfig, tower_hosts
    from shardcore.towers import read_towers

    towers = read_towers(path)
    seconds = budget.seconds and budget.seconds / 3 if budget else None
    found = tower_hosts(problem, towers, model, TowerConfig(seconds=seconds))
    return found.problem, {"tower_ratio": towers.compression_ratio,
                           "towers": {"affinity_inside": found.affinity_inside,
                                      "loads": [list(host) for host in found.loads]}}


def _replanned(args: argparse.Namespace, problem: Problem, model: CostModel,
               budget: Budget | None) -> tuple[Plan, str]:
    """A plan improved from --start, and the improvement in words."""
    from shardcore import files
    from shardcore.cost.model import price
    from shardcore.publish.diff import diff
    from shardcore.publish.replan import ReplanConfig, forced_moves, replan, without_devices
    from shardcore.report import plan_report
    from shardcore.search import SPACE_OF
    from shardcore.workload import lower

    # A plan's file is checked against the problem that it was made for. Whether it fits is not asked: memory
    # may have been counted otherwise, and what is searched has to fit anyway.
    before = files.read_problem(args.start_problem) if args.start_problem else problem
    old = files.read_plan(args.start, before, fits=False)
    if "tower_ratio" in old.provenance:
        raise ShardCoreError(f"--start {args.start} is a plan with towers, which is made afresh: give "
                             "--towers instead")
    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    config = ReplanConfig(args.max_moved_tables, most_bytes, space=SPACE_OF[args.algorithm],
                          seed=args.seed, budget=budget)
    was, of = without_devices(old, before, problem, sorted({*(args.without or ())}))
    found = replan(was, of, model, config)
    moved = diff(was, found, problem, forced_moves(was, of))
    found = Plan(found.placements, {**found.provenance, "moved": moved.document()})
    # A plan of another problem has no cost in this one.
    cost = ("" if args.start_problem else
            f", which cost {price(lower(old, problem, fits=False), model).total_ms:.3f} ms")
    return found, f", starting from {args.start}{cost}; {plan_report.replan_text(moved, config)}"


def _say_explained(plan: Plan, problem: Problem, model: CostModel, budget: Budget | None) -> None:
    from shardcore.report import plan_report
    from shardcore.search.explain import explain

    with shown():
        explained = explain(plan, problem, model, budget)
    print(f"\n{plan_report.text(explained)}")


def _say_extrapolated(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"extrapolated: {sentence}", file=sys.stderr)


# --- price -------------------------------------------------------------------------------------------------


def _add_price(commands: argparse._SubParsersAction) -> None:
    p = command(commands, price, "Predict what one training step of a plan costs, per device.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help=_MODEL)
    p.add_argument("--confidence", type=positive(float), metavar="P", help=_CONFIDENCE)
    p.add_argument("--explain", action="store_true", help=f"{_EXPLAIN}, instead of standard output's JSON")
    p.add_argument("--out", type=Path, metavar="COST.json", help="default: standard output")


def price(args: argparse.Namespace) -> None:
    from shardcore import files, grouped_plans
    from shardcore.cost import composite
    from shardcore.cost.model import at_confidence
    from shardcore.cost.model import price as predicted
    from shardcore.search.tower_hosts import as_planned
    from shardcore.workload import lower

    whole = own = files.read_problem(args.problem)
    of_groups = grouped_plans.read_grouped(args.plan, whole) if grouped_plans.is_grouped(args.plan) else None
    if of_groups:
        own = of_groups.problem
    model = composite.load(args.model).for_problem(own)
    own.require_setting(model.setting)
    found = of_groups.plan if of_groups else files.read_plan(args.plan, own)
    own = as_planned(found, own)
    workload, cautious = lower(found, own), at_confidence(model, args.confidence)
    if of_groups:
        body = grouped.price(of_groups, whole, cautious)
        beyond = grouped.extrapolated(of_groups, whole, model)
    else:
        cost, beyond = predicted(workload, cautious), model.out_of_range(workload)
        body = {"total_ms": cost.total_ms, **dataclasses.asdict(cost),
                "memory_bytes": list(workload.memory_bytes)}
    body["extrapolated"] = beyond
    if args.out:
        files.write_json(args.out, body)
    elif not args.explain:
        print(json.dumps(body, indent=1))
    if args.explain:
        print("\nThe plan of one group:" * bool(of_groups))
        _say_explained(found, own, cautious, None)
    _say_extrapolated(beyond)


# --- export ------------------------------------------------------------------------------------------------


def _add_export(commands: argparse._SubParsersAction) -> None:
    p = command(commands, export, "Write a plan as TorchRec's: what "
                "shardcore.export.torchrec_json.read_torchrec reads, DistributedModelParallel takes. One "
                "of groups: what export.dmp_collection.read_dmp_collection reads, DMPCollection takes.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--module", required=True, metavar="PATH", help="of the EmbeddingBagCollection that has "
                   "the tables, in the model's tree of modules, such as sparse_arch.embedding_bag_collection")
    p.add_argument("--compute-device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--uneven-rows", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, required=True, metavar="TORCHREC.json")


def export(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.export.torchrec import to_torchrec
    from shardcore.export.torchrec_json import write_torchrec
    from shardcore.grouped_plans import is_grouped
    from shardcore.search import torchrec

    if args.uneven_rows:
        raise ShardCoreError("--uneven-rows is gone: plans divide rows evenly now, as TorchRec does; "
                             "leave it out")
    torchrec.require_installed("a file for TorchRec is written with TorchRec")
    problem = files.read_problem(args.problem)
    if is_grouped(args.plan):
        grouped.export(args, problem)
    else:
        plan = files.read_plan(args.plan, problem)
        write_torchrec(args.out, to_torchrec(plan, problem, args.module, args.compute_device))
    if not all(t.collection for t in problem.tables):
        print(f"note: nothing here knows whether the model has a module {args.module!r} with these tables; "
              "read_torchrec(FILE, model) checks", file=sys.stderr)
