"""Options of `plan` for decisions before the search, and texts about the decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcore.cli.commands import PlanOptions
from shardcore.cli.models import load_cost_model
from shardcore.cli.options import require_writable_outputs
from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, at_confidence, predicted_total_ms
from shardcore.cost.move_rates import read_move_rates
from shardcore.io import files, writing
from shardcore.io.files import write_grouped_plan
from shardcore.io.towers import read_towers
from shardcore.plans.replan import ReplanConfig, Start
from shardcore.report import decisions_report, figures, plan_report
from shardcore.search import DEFAULT_SHARDER
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.search.decisions.groups import FoundGroups, Groups, synchronisation_workloads
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.search.decisions.memory_tiers import MemoryTiers
from shardcore.search.decisions.provision import Offer, Provision, ProvisionTarget, read_offers
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.search.decisions.towers import OnTowers, with_towers_of_plan
from shardcore.step.kinds import pod_size, row_domain_choices
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import GroupedPlan, problem_of_group
from shardcore.torchrec.topologies import POD_SIZE


def problem_with_host_memory(
    problem: Problem, path: Path, host_gib: float | None, link_gbps: float | None
) -> Problem:
    """Problem with the host memory that --host-gib and --link-gbps give. path: file of the problem.

    Slower tiers are those of the file.
    """
    given = {memory.tier: memory for memory in problem.topology.memory}
    known = given.get(BELOW[0])
    if not (host_gib or known):
        if given and link_gbps is None:
            return problem
        raise ShardCoreError(
            f"{path} does not say how much memory hosts have for tables; give "
            "--host-gib, or memory in its topology"
        )
    n_bytes = int(host_gib * 2**30) if host_gib else known.bytes if known else 0
    given[BELOW[0]] = Memory(BELOW[0], n_bytes, link_gbps or (known.gbps if known else 25.0))
    topology = dataclasses.replace(problem.topology, memory=tuple(given.values()))
    return dataclasses.replace(problem, topology=topology)


def requested_decisions(args: PlanOptions, problem: Problem, stored: Problem) -> Iterator[Decision]:
    """Decisions that the options of `plan` ask for. stored: the problem as in its file."""
    if args.offers:
        target = ProvisionTarget(args.step_ms, args.samples_per_s, args.price_per_hour)
        yield Provision(*read_offers_and_models(args, args.offers), target)
    if args.groups is not None:
        yield Groups(args.groups, args.sync_every or 1)
    start = _read_start(args, args.start, problem, stored) if args.start else None
    # Towers are of the model: their number is not chosen here.
    if len(row_domain_choices(problem.topology)) > 1 and not args.towers:
        yield RowDomains(start and start.old)
    if args.hot_rows:
        yield HotRows()
    if args.towers:
        # With hot rows, towers may name the tables that these are put in.
        yield OnTowers(
            read_towers(args.towers, None if args.hot_rows else problem),
            start and start.old,
            not (start and start.config.limits_moves),
        )
    if args.tiers:
        yield MemoryTiers()
    if start:
        yield start


def read_offers_and_models(args: PlanOptions, path: Path) -> tuple[tuple[Offer, ...], dict[str, CostModel]]:
    """Read a file of offers, and the cost models that they name, by the offers' `model_or_hardware`.

    Raises ShardCoreError for an output that would replace one of these files, too.
    """
    offers = read_offers(path)
    sources = {offer.model_or_hardware: cost_model_source_of_offer(path, offer) for offer in offers}
    require_writable_outputs(args, [Path(x) if isinstance(x, str) else x[0] for x in sources.values()])
    return offers, {
        name: at_confidence(load_cost_model(source), args.confidence) for name, source in sources.items()
    }


def cost_model_source_of_offer(path: Path, offer: Offer) -> str | list[Path]:
    """Name of the profile, or folder of the trained model, that prices an offered cluster.

    path: file of offers, to which paths in the offer are relative.
    """
    file = path.parent / offer.model_or_hardware
    if offer.model:
        return [file]
    return str(file) if file.is_file() else offer.hardware


def _read_start(args: PlanOptions, path: Path, problem: Problem, stored: Problem) -> Start:
    """Read the plan that a search starts from. Raises ShardCoreError if the plan is invalid for its problem."""
    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    config = ReplanConfig(
        args.max_moved_tables,
        most_bytes,
        max_pause_s=args.max_pause,
        pay_back_in_s=args.moves_pay_back_in,
        move_rates=read_move_rates(args.move_rates) if args.move_rates else None,
    )
    # The plan is checked against the problem that it was made for. It need not fit: memory may have been
    # counted otherwise then, and the plan that is found has to fit anyway.
    before, group = files.read_problem(args.start_problem) if args.start_problem else stored, None
    if args.groups is not None and files.is_grouped_plan(path):
        grouped = files.read_grouped_plan(path, before)
        old, before, group = grouped.plan, grouped.problem, problem_of_group(problem, grouped.grouping)
        if args.without:
            raise ShardCoreError(
                f"--without {args.without[0]} is a device of all, and --start {path} "
                "a plan of groups; leave out one of them"
            )
    else:
        old = files.read_valid_plan(path, before, fits=False)
        group = problem if args.groups is not None else None
    return Start(old, before, tuple(args.without or ()), args.algorithm or DEFAULT_SHARDER, config, group)


def changes_from_start_text(
    args: PlanOptions, found: FoundPlan, decisions: Sequence[Decision], original: Problem, model: CostModel
) -> str:
    """Text on how a plan found differs from the plan of --start. "" without --start."""
    start = next((x for x in decisions if isinstance(x, Start)), None)
    if start is None:
        return ""
    if "moved" not in found.plan.provenance:
        return ", afresh: groups are others"
    moved = start.moves_to_plan(found.plan, with_towers_of_plan(found.plan, found.problem))
    # The old plan of another problem has no cost in this one.
    before_ms = (
        predicted_total_ms(lower(start.old, original, fits=False), model)
        if start.before == original == found.problem
        else None
    )
    cost = "" if before_ms is None else f", which cost {before_ms:.3f} ms"
    words = plan_report.replan_text(moved, start.config)
    if moved.moves and "price" in found.plan.provenance["moved"]:
        price = start.move_price(found.plan, found.problem, model)
        words += f"; {price}"
        if before_ms is not None and before_ms > found.ms:
            words += f", and pays back in {price.payback_s(before_ms, found.ms):.3g} s"
    return f", starting from {args.start}{cost}; {words}"


def pod_size_note(problem: Problem, plan: Plan) -> str:
    """Note on the environment variable that a job needs if its plan divides rows over pods. "" if it needs none."""
    size = pod_size(problem.topology, plan.placements)
    return f"rows are divided over pods of {size} hosts: the job needs {POD_SIZE}={size}" if size > 1 else ""


OUTCOME_TEXTS: Mapping[type[Decision], Callable[[Any, FoundPlan, Problem], Iterable[str]]] = {
    Provision: lambda decision, found, _: decisions_report.cluster_lines(decision, found),
    HotRows: lambda _, found, original: [decisions_report.hot_rows_table(original, found.problem)],
    MemoryTiers: lambda _, found, __: [decisions_report.memory_tiers_text(found.problem)],
    RowDomains: lambda _, found, __: [pod_size_note(found.problem, found.plan)],
}
"""Lines on the outcome of each kind of decision, from the decision, what was found and the original problem."""


def extrapolation_sentences(found: FoundPlan, model: CostModel) -> list[str]:
    """Sentences on where a plan's predicted cost extrapolates beyond measurements. model: model for the problem."""
    if isinstance(found, FoundGroups):
        return grouped_extrapolation_sentences(found.grouped_plan, found.whole, model)
    return model.out_of_range(lower(found.plan, with_towers_of_plan(found.plan, found.problem)))


def grouped_extrapolation_sentences(grouped: GroupedPlan, problem: Problem, model: CostModel) -> list[str]:
    """Sentences on what a grouped plan's cost extrapolates: a step of one group, and synchronising replicas.

    model: model for the problem of a group.
    """
    sentences = []
    # These come first, as only a few are shown: all weights travel at once, which is much more than steps
    # exchange.
    if grouped.grouping.size < len(problem.topology):
        for works in synchronisation_workloads(grouped, problem):
            sentences += [f"synchronising: {text}" for work in works for text in model.out_of_range(work)]
    return list(dict.fromkeys((*sentences, *model.out_of_range(lower(grouped.plan, grouped.problem)))))


def write_plan_and_problem(args: PlanOptions, found: FoundPlan) -> None:
    """Write a plan to --out and its problem to --out-problem, where these options are given."""
    grouped = found if isinstance(found, FoundGroups) else None
    whole = grouped.whole if grouped else found.problem
    if args.out_problem:
        files.write_problem(args.out_problem, whole)
    if args.out and grouped and grouped.grouping.size < len(whole.topology):
        write_grouped_plan(args.out, grouped.grouped_plan, whole)
    elif args.out:
        files.write_plan(args.out, found.plan, whole)


def write_clusters(folder: Path, outcomes: Sequence[ProposalOutcome], chosen: Proposal | None) -> None:
    """Write and plot all clusters that a search priced. chosen: cheapest that meets the target, or None."""
    writing.write_json(
        folder / "clusters.json",
        [
            {
                "offer": x.proposal.offer.name,
                "hosts": x.proposal.hosts,
                "devices": len(x.proposal.problem.topology),
                "price_per_hour": x.proposal.price_per_hour,
                **(
                    {"step_ms": x.ms, "samples_per_s": x.proposal.samples_per_s(x.ms)}
                    if x.found
                    else {"why": str(x.error)}
                ),
            }
            for x in outcomes
        ],
    )
    best = next((x for x in outcomes if x.proposal is chosen), None)
    # Last, as it needs a package that may not be there.
    print(figures.write_png(folder / "curve.png", lambda: decisions_report.clusters_figure(outcomes, best)))
