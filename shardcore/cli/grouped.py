"""What `plan --groups`, and `price` and `export` of its plans, do."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardcore.cli.progress_line import shown
from shardcore.errors import ShardCoreError
from shardcore.types import Plan, Problem

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.search.budget import Budget
    from shardcore.search.learned.policy import Policy
    from shardcore.search.sharding_groups import Candidate
    from shardcore.sharding_groups import GroupedPlan


def require_agreeing(args: argparse.Namespace) -> None:
    """Raise ShardCoreError for options of groups that contradict others."""
    if args.sync_every is not None and args.groups is None:
        raise ShardCoreError(f"--sync-every {args.sync_every} needs --groups, whose replicas it is for")
    if args.groups is not None and args.start:
        raise ShardCoreError(f"--groups {args.groups} does not go with --start {args.start}, a plan of all "
                             "devices; leave out one of them")


def chosen(args: argparse.Namespace, problem: Problem, model: CostModel,
           budget: Budget | None, policy: Policy | None = None) -> Candidate:
    """The best groups of those that --groups asks for. Prints all of them.

    model: for any problem that it was measured for.
    """
    from shardcore.report.text import text_table
    from shardcore.search import sharder
    from shardcore.search.sharding_groups import best, candidates
    from shardcore.sharding_groups import require_size

    search = sharder(args.algorithm, policy)
    with shown():
        of = candidates(problem, model, search, require_size(args.groups, problem), args.sync_every or 1,
                        seed=args.seed, budget=budget)
    found = best(of)
    n = len(problem.topology)
    print(text_table(
        ("size", "groups", "layout", "step ms", "sync ms a step", "total ms", "fullest device", "why not"),
        [(c.grouping.size, n // c.grouping.size, _layout(c, problem), *_costs(c), c.why) for c in of]))
    return found


def _layout(candidate: Candidate, problem: Problem) -> str:
    """Of one group, or groups of one device, both layouts are the same."""
    return candidate.grouping.layout if 1 < candidate.grouping.size < len(problem.topology) else "-"


def _costs(candidate: Candidate) -> tuple[str, ...]:
    if candidate.cost is None:
        return ("-",) * 4
    cost, (device, share) = candidate.cost, candidate.fullest
    return (f"{cost.step_ms:.3f}", f"{cost.sync_ms_a_step:.3f}", f"{cost.total_ms:.3f}",
            f"{share:.0%} ({device})")


def write(args: argparse.Namespace, candidate: Candidate, problem: Problem, provenance: Mapping[str, Any]
          ) -> GroupedPlan:
    """Write the best groups' plan, with more provenance. A plain plan where all devices are one group."""
    from shardcore import files
    from shardcore.grouped_plans import write_grouped

    plan = candidate.found.plan
    plan = Plan(plan.placements, {**plan.provenance, **provenance})
    grouped = dataclasses.replace(candidate.found, plan=plan)
    if grouped.grouping.size == len(problem.topology):
        files.write_plan(args.out, plan, problem)
    else:
        write_grouped(args.out, grouped, problem)
    return grouped


def words(candidate: Candidate, problem: Problem) -> str:
    """The chosen groups, for people."""
    size, count = candidate.grouping.size, len(problem.topology) // candidate.grouping.size
    if count == 1:
        return f"all {size} devices as one group"
    layout = f"{candidate.grouping.layout} " * (size > 1)
    every = candidate.grouping.sync_every
    return (f"{count} {layout}groups of {size} device{'s' * (size > 1)}, synchronised every "
            f"{f'{every} steps' if every > 1 else 'step'}")


def price(grouped: GroupedPlan, problem: Problem, model: CostModel) -> dict[str, Any]:
    """What a step costs, as JSON. The parts and the memory are those of one group.

    model: for the problem of a group.
    """
    from shardcore.search.sharding_groups import cost_of
    from shardcore.workload import lower

    cost = cost_of(grouped, problem, model)
    return {"total_ms": cost.total_ms, "groups": dataclasses.asdict(grouped.grouping),
            "step_ms": cost.step_ms, "sync_ms": cost.sync_ms, **dataclasses.asdict(cost.step),
            "memory_bytes": list(lower(grouped.plan, grouped.problem).memory_bytes)}


def extrapolated(grouped: GroupedPlan, problem: Problem, model: CostModel) -> list[str]:
    """As mixed.out_of_range, of a step of one group and of synchronising the replicas.

    model: for the problem of a group.
    """
    from shardcore.search.sharding_groups import synchronisation
    from shardcore.workload import lower

    found = []
    # First, for only the first few are shown: all weights travel at once, much more than steps exchange.
    if grouped.grouping.size < len(problem.topology):
        for works in synchronisation(grouped, problem):
            found += [f"synchronising: {sentence}" for work in works
                      for sentence in model.out_of_range(work)]
    return list(dict.fromkeys((*found, *model.out_of_range(lower(grouped.plan, grouped.problem)))))


def export(args: argparse.Namespace, problem: Problem) -> None:
    """Write a grouped plan as DMPCollection's arguments."""
    from shardcore.export.dmp_collection import to_dmp_collection, write_dmp_collection
    from shardcore.grouped_plans import read_grouped

    grouped = read_grouped(args.plan, problem)
    write_dmp_collection(args.out, to_dmp_collection(grouped, problem, args.module, args.compute_device),
                         grouped.grouping.sync_every)
