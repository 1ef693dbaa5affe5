"""Options of `plan` for decisions before the search, and texts on them.

The commands hot-rows, tiers and provision are short forms of `plan` with these options.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.cli.options import gib, natural, positive, positive_gib, require_outputs
from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.types import Problem

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.plans.replan import Start
    from shardcore.search.decisions.driver import Decision, Found

_NEEDS = {
    "sync_every": "groups, whose replicas it is for",
    "host_gib": "tiers, of which it is the memory",
    "link_gbps": "tiers, whose link it is",
    **dict.fromkeys(
        ("start_problem", "without", "max_moved_tables", "max_moved_gib"), "start, the plan to start from"
    ),
    **dict.fromkeys(("step_ms", "samples_per_s", "price_per_hour"), "offers, of which a cluster is chosen"),
}
"""Options that mean nothing without another."""


def add_options(p: argparse.ArgumentParser) -> None:
    """Options of the decisions of `plan`."""
    p.add_argument(
        "--start",
        type=Path,
        metavar="PLAN",
        help="improve this plan of the problem instead of "
        "planning afresh (annealing); with --groups, also one of groups",
    )
    p.add_argument(
        "--start-problem",
        type=Path,
        metavar="PROBLEM.json",
        help="the problem that --start was "
        "made for, where it has changed since: tables new, gone, of another shape or with other "
        "statistics, or other devices",
    )
    p.add_argument(
        "--without",
        type=natural,
        nargs="+",
        action="extend",
        metavar="DEVICE",
        help="with "
        "--start: devices of its problem that are gone; default: those with the highest numbers, "
        "where there are fewer now",
    )
    p.add_argument(
        "--max-moved-tables",
        type=natural,
        metavar="N",
        help="with --start: most tables that may move; default: any number",
    )
    p.add_argument(
        "--max-moved-gib",
        type=gib,
        metavar="G",
        help="with --start: most GiB of weights that may move, beyond what has to; default: any number",
    )
    p.add_argument(
        "--groups",
        nargs="?",
        const="auto",
        metavar="auto|SIZE",
        help="divide the devices into "
        "groups of SIZE, or of the best size, that replicate one plan (TorchRec's DMPCollection)",
    )
    p.add_argument(
        "--sync-every",
        type=positive(int),
        metavar="N",
        help="with --groups: steps from one synchronisation of the replicas to the next; default: 1",
    )
    p.add_argument(
        "--hot-rows",
        action="store_true",
        help="have the hottest rows of sequence tables on "
        "every device, as tables of their own; with --out-problem",
    )
    p.add_argument(
        "--towers",
        type=Path,
        metavar="TOWERS.json",
        help="tables that belong together on a "
        "host, and how many times smaller a tower module makes what crosses hosts (docs/plan.md)",
    )
    p.add_argument(
        "--tiers",
        action="store_true",
        help="decide which rows lie in host memory, where not all fit in that of devices; with --out-problem",
    )
    add_host_memory(p, "with --tiers: ")
    p.add_argument(
        "--out-problem",
        type=Path,
        metavar="PROBLEM.json",
        help="write the problem that the plan is of, where decisions change it",
    )


def add_host_memory(p: argparse.ArgumentParser, given: str = "") -> None:
    p.add_argument(
        "--host-gib",
        type=positive_gib,
        help=f"{given}memory of each host that tables may take; left out, the problem says it",
    )
    p.add_argument(
        "--link-gbps",
        type=positive(float),
        help=f"{given}GB/s between a device and its host's "
        "memory, given, not measured; left out, the problem says it, or 25",
    )


def add_target(p: argparse.ArgumentParser, required: bool = True) -> None:
    target = p.add_mutually_exclusive_group(required=required)
    target.add_argument("--step-ms", type=positive(float), help="the longest step that will do")
    target.add_argument("--samples-per-s", type=positive(float), help="the fewest samples a second")
    target.add_argument(
        "--price-per-hour",
        type=positive(float),
        help="what the cluster may cost; the fastest that it buys is wanted",
    )


def require_agreeing(args: argparse.Namespace) -> None:
    """Raise ShardCoreError for an option that needs another one."""
    for name, needs in _NEEDS.items():
        if (given := getattr(args, name)) is not None and not getattr(args, needs.split(",")[0]):
            shown = " ".join(map(str, given)) if isinstance(given, list) else given
            raise ShardCoreError(f"--{name.replace('_', '-')} {shown} needs --{needs}")


def with_host_memory(problem: Problem, args: argparse.Namespace) -> Problem:
    """The problem with what --host-gib and --link-gbps say of hosts."""
    known = next(iter(problem.topology.memory), None)
    if not known and not args.host_gib:
        raise ShardCoreError(
            f"{args.problem} does not say how much memory hosts have for tables; give "
            "--host-gib, or memory in its topology"
        )
    memory = Memory(
        known.tier if known else BELOW[0],
        int(args.host_gib * 2**30) if args.host_gib else known.bytes,
        args.link_gbps or (known.gbps if known else 25.0),
    )
    own = dataclasses.replace(problem.topology, memory=(memory, *problem.topology.memory[1:]))
    return dataclasses.replace(problem, topology=own)


def decisions(args: argparse.Namespace, problem: Problem, stored: Problem) -> Iterator[Decision]:
    """The decisions that options ask for. stored: the problem as its file has it."""
    from shardcore.io.towers import read_towers
    from shardcore.search.decisions.groups import Groups
    from shardcore.search.decisions.hot_rows import HotRows
    from shardcore.search.decisions.memory_tiers import MemoryTiers
    from shardcore.search.decisions.provision import Provision, Target, read_offers
    from shardcore.search.decisions.towers import OnTowers

    if args.offers:
        offers = read_offers(args.offers)
        target = Target(args.step_ms, args.samples_per_s, args.price_per_hour)
        yield Provision(offers, _models(args, [offer.model for offer in offers]), target)
    if args.groups is not None:
        yield Groups(args.groups, args.sync_every or 1)
    if args.hot_rows:
        yield HotRows()
    start = _start(args, problem, stored) if args.start else None
    if args.towers:
        yield OnTowers(read_towers(args.towers), start and start.old, not (start and start.config.limited))
    if args.tiers:
        yield MemoryTiers()
    if start:
        yield start


def _models(args: argparse.Namespace, names: list[str]) -> dict[str, CostModel]:
    """The models of offers. Their folders are relative to the file that names them."""
    from shardcore.cost import composite
    from shardcore.cost.model import at_confidence

    folders = {name: args.offers.parent / name for name in names}
    require_outputs(args, folders.values())
    return {
        name: at_confidence(composite.load([folder]), args.confidence) for name, folder in folders.items()
    }


def _start(args: argparse.Namespace, problem: Problem, stored: Problem) -> Start:
    from shardcore.io import files, grouped_plans
    from shardcore.plans.replan import ReplanConfig, Start
    from shardcore.step.lower import require_plan
    from shardcore.step.sharding_groups import problem_of_group

    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    config = ReplanConfig(args.max_moved_tables, most_bytes)
    # A plan's file is checked against the problem that it was made for. Whether it fits is not asked: memory
    # may have been counted otherwise, and what is searched has to fit anyway.
    before, group = files.read_problem(args.start_problem) if args.start_problem else stored, None
    if args.groups is not None and grouped_plans.is_grouped(args.start):
        grouped = grouped_plans.read_grouped(args.start, before)
        old, before, group = grouped.plan, grouped.problem, problem_of_group(problem, grouped.grouping)
        if args.without:
            raise ShardCoreError(
                f"--without {args.without[0]} is a device of all, and --start {args.start} "
                "a plan of groups; leave out one of them"
            )
    else:
        old = files.read_plan(args.start, before)
        with files.validating(args.start):
            require_plan(old, before, fits=False)
        group = problem if args.groups is not None else None
    return Start(old, before, tuple(args.without or ()), args.algorithm, config, group)


def start_text(
    args: argparse.Namespace, found: Found, decisions: Sequence[Decision], asked: Problem, model: CostModel
) -> str:
    """Changes of the new plan to the old one, for people. "": there was none."""
    from shardcore.cost.model import price
    from shardcore.report import plan_report
    from shardcore.search.decisions.towers import as_planned
    from shardcore.step.lower import lower

    start = next((x for x in decisions if x.name == "plan to start from"), None)
    if start is None:
        return ""
    if "moved" not in found.plan.provenance:
        return ", afresh: groups are others"
    moved = start.moved(found.plan, as_planned(found.plan, found.problem))
    # A plan of another problem has no cost in this one.
    cost = (
        f", which cost {price(lower(start.old, asked, fits=False), model).total_ms:.3f} ms"
        if start.before == asked == found.problem
        else ""
    )
    return f", starting from {args.start}{cost}; {plan_report.replan_text(moved, start.config)}"


def texts(decisions: Sequence[Decision], found: Found, asked: Problem) -> Iterator[str]:
    """Texts on what was decided, for people. Some may be empty."""
    from shardcore.report import decisions_report, plan_report
    from shardcore.search.decisions.hot_rows import HotRows
    from shardcore.search.decisions.memory_tiers import MemoryTiers
    from shardcore.search.decisions.provision import Provision
    from shardcore.search.decisions.towers import OnTowers, as_planned, tower_traffic

    for decision in decisions:
        if isinstance(decision, Provision):
            yield from decisions_report.clusters(decision, found)
        if isinstance(decision, HotRows):
            yield decisions_report.hot_rows_table(asked, found.problem)
        if isinstance(decision, OnTowers):
            yield plan_report.towers_text(tower_traffic(found.plan, as_planned(found.plan, found.problem)))
        if isinstance(decision, MemoryTiers):
            yield decisions_report.tiers_report(found.problem)


def extrapolated(found: Found, model: CostModel) -> list[str]:
    """Sentences on what is extrapolated in the price of a plan. model: for its problem."""
    from shardcore.cli import grouped
    from shardcore.search.decisions.groups import FoundGroups
    from shardcore.search.decisions.towers import as_planned
    from shardcore.step.lower import lower

    if isinstance(found, FoundGroups):
        return grouped.extrapolated(found.grouped, found.whole, model)
    return model.out_of_range(lower(found.plan, as_planned(found.plan, found.problem)))


def write(args: argparse.Namespace, found: Found) -> None:
    """Write the plan, and the problem that it is of, where paths are given."""
    from shardcore.io import files
    from shardcore.io.grouped_plans import write_grouped
    from shardcore.search.decisions.groups import FoundGroups

    grouped = found if isinstance(found, FoundGroups) else None
    whole = grouped.whole if grouped else found.problem
    if args.out_problem:
        files.write_problem(args.out_problem, whole)
    if args.out and grouped and grouped.grouping.size < len(whole.topology):
        write_grouped(args.out, grouped.grouped, whole)
    elif args.out:
        files.write_plan(args.out, found.plan, whole)
