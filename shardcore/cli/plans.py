"""Commands that make, price and export plans: plan, price, export."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardcore.cli import decisions as deciding
from shardcore.cli.commands import ExportOptions, PlanOptions, PriceOptions
from shardcore.cli.models import load_cost_model, load_model_for_problem, model_source, source_digest
from shardcore.cli.progress_line import showing_progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import clock, report
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require
from shardcore.cost import known_errors
from shardcore.cost.model import CostModel, at_confidence, price_plan
from shardcore.cost.model import price as predicted
from shardcore.io import files, model_files, writing
from shardcore.io.files import is_grouped_plan
from shardcore.plans import one_cut
from shardcore.plans.decisions import PlanVersion
from shardcore.plans.survive import prepare_plans, write_prepared_plan
from shardcore.report import decisions_report, plan_report
from shardcore.report.survive_report import prepared_plans_text
from shardcore.report.text import records_table, rounded_json
from shardcore.search import DEFAULT_SHARDER, require_known_sharder, sharder
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import (
    Decision,
    FoundPlan,
    ProposalOutcome,
    decide,
    ledger_entries,
    ledger_from_provenance,
)
from shardcore.search.decisions.groups import FoundGroups, grouped_cost
from shardcore.search.decisions.provision import Cluster, Provision
from shardcore.search.decisions.towers import with_towers_of_plan
from shardcore.search.explain import explain
from shardcore.search.learned.policy import read_policy
from shardcore.search.sharders import Sharder
from shardcore.step.lower import lower, require_full_cover
from shardcore.step.memory import size_text
from shardcore.step.sharding_groups import describe_grouping
from shardcore.torchrec import baseline as torchrec
from shardcore.torchrec.dmp_collection import to_dmp_collection, write_dmp_collection
from shardcore.torchrec.plan_files import write_torchrec
from shardcore.torchrec.sharding_plan import to_torchrec

# --- plan --------------------------------------------------------------------------------------------------


def plan(args: PlanOptions) -> None:
    require(
        not (args.survive and (args.groups or args.towers)),
        "--survive is for plans without --groups and --towers",
    )
    policy = read_policy(args.policy) if args.policy else None
    default = policy.name if policy else DEFAULT_SHARDER
    args = dataclasses.replace(
        args, algorithm=require_known_sharder(default if args.algorithm is None else args.algorithm)
    )
    sharding = sharder(str(args.algorithm), policy)
    with showing_progress(f"reading {args.problem}"):
        stored = files.read_problem(args.problem)
        problem = (
            deciding.problem_with_host_memory(stored, args.problem, args.host_gib, args.link_gbps)
            if args.tiers
            else stored
        )
    if args.each and args.offers:
        return _plan_each_offer(args, args.offers, problem, sharding)
    decisions = list(deciding.requested_decisions(args, problem, stored))
    for decision in decisions:
        require(
            not (decision.changes and args.out) or args.out_problem is not None,
            f"--out {args.out} needs --out-problem, the problem with the "
            f"{decision.changes} that it is a plan of",
        )
    source = (
        deciding.cost_model_source_of_offer(args.offers, decisions[0].offers[0])
        if args.offers and isinstance(decisions[0], Provision)
        else args.source
    )
    # Searches use the model at the given confidence. Only the plain one shows what is extrapolated.
    loaded, began = load_cost_model(source), clock()
    outcomes: list[ProposalOutcome] = []  # of the outermost decision
    try:
        with showing_progress() as line:

            def show_outcome(outcome: ProposalOutcome) -> None:
                outcomes.append(outcome)
                # A decision with a single proposal has no choice to show.
                if outcome.proposal.more or len(outcomes) > 1:
                    cost = f"{outcome.ms:.3f} ms" if outcome.found else "no plan"
                    line.print_line(f"{outcome.proposal.words}: {cost}")

            report(str(args.algorithm))
            found = decide(
                problem,
                at_confidence(loaded, args.confidence),
                decisions,
                sharding,
                seed=args.seed,
                budget=args.budget(),
                heard=show_outcome,
            )
    except ShardCoreError:
        # What was searched is shown, even if it has no answer.
        if len(outcomes) > 1:
            outermost = min(decisions, key=lambda decision: decision.level)
            print(decisions_report.proposals_table(outermost.name, ledger_entries(outermost, outcomes)))
        if args.clusters and outcomes:
            deciding.write_clusters(args.clusters, outcomes, None)
        raise
    seconds = clock() - began
    if args.offers and isinstance(found.chosen_proposal, Cluster):
        source = deciding.cost_model_source_of_offer(args.offers, found.chosen_proposal.offer)
        loaded = load_cost_model(source)
    provenance = {**found.plan.provenance, **_plan_provenance(args, source)}
    found = dataclasses.replace(found, plan=Plan(found.plan.placements, provenance))
    with showing_progress():
        report(f"writing {args.out}", found.ms)
        deciding.write_plan_and_problem(args, found)
    _print_plan_summary(args, found, decisions, problem, loaded.for_problem(found.problem), seconds)
    if args.survive and args.prepared:
        with showing_progress("preparing for a loss"):
            prepared = list(
                prepare_plans(
                    found.plan,
                    found.problem,
                    at_confidence(loaded, args.confidence),
                    args.survive,
                    args.seed,
                    args.budget(),
                )
            )
        for one in (one for one in prepared if one.plan):
            write_prepared_plan(args.prepared, one)
        print(f"\n{prepared_plans_text(prepared, found.ms)}")
    if args.clusters:
        deciding.write_clusters(args.clusters, outcomes, found.chosen_proposal)


def _plan_each_offer(args: PlanOptions, offers_file: Path, problem: Problem, sharding: Sharder) -> None:
    """Write plans with one cut for all offers, and print what each loses to it, or why it has no plan."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in "budget_s clusters groups hot_rows towers tiers start out_problem explain survive".split()
        if getattr(args, name)
    ]
    require(not given, f"--each was given with {', '.join(given)}; it goes without")
    require(
        args.out is None or not args.out.is_dir() or not any(args.out.iterdir()),
        f"--out {args.out} has files; it needs to be a new or empty folder, for plans of one cut belong together",
    )
    offers, models = deciding.read_offers_and_models(args, offers_file)
    with showing_progress():
        planned = one_cut.plan_each(
            problem, offers, models, partial(sharding, seed=args.seed, budget=args.budget()), str(args.each)
        )
    for i, (outcome, _) in enumerate(planned, 1):
        if args.out and (found := outcome.found):
            of_offer = _plan_provenance(
                args, deciding.cost_model_source_of_offer(offers_file, outcome.proposal)
            )
            # By number, too: names of offers may differ in what no file name has.
            name = f"{i}-{found.problem.name}"
            files.write_problem(args.out / f"{name}.problem.json", found.problem)
            files.write_plan(
                args.out / f"{name}.plan.json",
                Plan(found.plan.placements, {**found.plan.provenance, **of_offer}),
                found.problem,
            )
    print(
        records_table(
            [
                {
                    "offer": outcome.proposal.name,
                    "devices": outcome.proposal.devices * outcome.proposal.most_hosts,
                    "own ms": f"{own_ms:.3f}".replace("inf", "-"),
                    "one cut ms": f"{outcome.ms:.3f}" if outcome.found else "-",
                    "regret": f"{outcome.ms / own_ms - 1:.1%}" if outcome.found else "-",
                    "reserve": size_text(found.problem.constraints.reserved_bytes)
                    if (found := outcome.found)
                    else "-",
                    "why no plan": str(outcome.error or ""),
                }
                for outcome, own_ms in planned
            ]
        )
    )


def _print_plan_summary(
    args: PlanOptions,
    found: FoundPlan,
    decisions: Sequence[Decision],
    original: Problem,
    model: CostModel,
    seconds: float,
) -> None:
    """Print a plan's cost and the decisions of its search. original: the problem before all decisions."""
    groups, cautious = (
        found if isinstance(found, FoundGroups) else None,
        at_confidence(model, args.confidence),
    )
    workload = lower(found.plan, with_towers_of_plan(found.plan, found.problem))
    if (found.ledger and args.explain) or decisions_report.has_several_proposals(found.ledger):
        print(f"{decisions_report.ledger_text(found.ledger)}\n")
    sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
    by = found.plan.provenance["algorithm"] if groups else args.algorithm
    # A plan that is kept says how the search ended that found it.
    within = None if args.start else found.plan.provenance.get("within")
    ended = (
        ""
        if within is None
        else (f", which ended once three quarters of its trials had brought less than {100 * within:.3g}%")
    )
    print(
        f"{args.out or args.out_problem or args.problem}: {f'{groups.description}: ' if groups else ''}"
        f"{found.ms:.3f} ms predicted{sure}{known_errors.error_bands_text(model, workload)}, found in {seconds:.2f} s "
        f"by {by}{ended}"
        f"{deciding.changes_from_start_text(args, found, decisions, original, cautious)}"
    )
    print(f"under {known_errors.model_label(model)}, model {found.plan.provenance['model_digest'][:8]}")
    for decision in decisions:
        for text in filter(
            None, deciding.OUTCOME_TEXTS.get(type(decision), lambda *_: ())(decision, found, original)
        ):
            print(f"\n{text}")
    if args.explain:
        if groups:
            print("\nThe plan of one group:")
        _print_explanation(found.plan, found.problem, cautious, args.budget())
    _print_extrapolations(deciding.extrapolation_sentences(found, model))


def _plan_provenance(args: PlanOptions, source: str | Sequence[Path]) -> dict[str, Any]:
    return (
        {"model_digest": source_digest(source)}
        | ({"profile": known_errors.NOT_MEASURED} if isinstance(source, str) else {})
        | ({"policy_digest": model_files.model_digest(args.policy, "policy")} if args.policy else {})
        | ({"confidence": args.confidence} if args.confidence else {})
    )


def _print_explanation(plan: Plan, problem: Problem, model: CostModel, budget: Budget | None) -> None:
    """Print what bounds a plan's cost. problem: without towers, even if the plan has towers."""
    problem = with_towers_of_plan(plan, problem)
    with showing_progress():
        explained = explain(price_plan(plan, problem, model), problem, model, budget)
    print(f"\n{plan_report.explanation_text(explained)}")


def _print_extrapolations(sentences: Sequence[str]) -> None:
    # Warnings go to standard error, so that programs can read standard output.
    for sentence in sentences:
        print(f"extrapolated: {sentence}", file=sys.stderr)


# --- price -------------------------------------------------------------------------------------------------


def price(args: PriceOptions) -> None:
    whole = files.read_problem(args.problem)
    of_groups = files.read_grouped_plan(args.plan, whole) if files.is_grouped_plan(args.plan) else None
    own = of_groups.problem if of_groups else whole
    found = of_groups.plan if of_groups else files.read_plan(args.plan, own)
    model = load_model_for_problem(model_source(args, args.plan, found), own)
    with files.name_file_in_errors(args.plan):
        if "tower_ratio" in found.provenance:
            require_full_cover(found, own)
        own = with_towers_of_plan(found, own)
        workload, cautious = lower(found, own), at_confidence(model, args.confidence)
    cost, bands = predicted(workload, cautious), known_errors.error_bands(model, workload)
    beyond = (
        deciding.grouped_extrapolation_sentences(of_groups, whole, model)
        if of_groups
        else model.out_of_range(workload)
    )
    body = {
        "total_ms": cost.total_ms,
        **dataclasses.asdict(cost),
        "memory_bytes": workload.memory_bytes,
        "extrapolated": beyond,
        **(dict(zip(("band", "embeddings_band"), bands, strict=True)) if bands else {}),
    }
    if of_groups:
        of_step = grouped_cost(of_groups, whole, cautious)
        body |= {
            "total_ms": of_step.total_ms,
            "groups": dataclasses.asdict(of_groups.grouping),
            "step_ms": of_step.step_ms,
            "sync_ms": of_step.sync_ms,
        }
    if args.json:
        print(rounded_json(body))
    else:
        sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
        of = (
            f"; {describe_grouping(of_groups.grouping, whole)}: {body['step_ms']:.3f} ms in a group, and "
            f"{body['sync_ms']:.3f} ms to synchronise them, once in {of_groups.grouping.sync_every} steps"
            if of_groups
            else ""
        )
        print(
            f"{args.plan}: {body['total_ms']:.3f} ms a step predicted{sure}"
            f"{known_errors.error_bands_text(model, workload)}{of}"
        )
        print(f"under {known_errors.model_label(model)}\n")
        print(
            plan_report.device_costs_text(
                PlanVersion(str(args.plan), found, cost, workload.memory_bytes), own
            )
        )
    if args.out:
        writing.write_atomic(args.out, f"{rounded_json(body)}\n".encode())
        print(f"{args.out}: the cost as JSON", file=sys.stderr)
    if args.explain:
        if decided := decisions_report.ledger_text(ledger_from_provenance(found.provenance)):
            print(f"\n{decided}")
        if of_groups:
            print("\nThe plan of one group:")
        _print_explanation(found, own, cautious, None)
    _print_extrapolations(beyond)


# --- export ------------------------------------------------------------------------------------------------


def export(args: ExportOptions) -> None:
    torchrec.require_torchrec_installed("a file for TorchRec is written with TorchRec")
    problem = files.read_problem(args.problem)
    args = dataclasses.replace(
        args, module=_collection_module_name(problem) if args.module is None else args.module
    )
    if is_grouped_plan(args.plan):
        of_groups = files.read_grouped_plan(args.plan, problem)
        made = to_dmp_collection(of_groups, problem, str(args.module), args.compute_device)
        write_dmp_collection(args.out, made, of_groups.grouping.sync_every)
    else:
        plan = files.read_valid_plan(args.plan, problem)
        with showing_progress("writing TorchRec's plan"):
            write_torchrec(args.out, to_torchrec(plan, problem, str(args.module), args.compute_device))
        if note := deciding.pod_size_note(problem, plan):
            print(f"note: {note}", file=sys.stderr)
    paths = dict.fromkeys(t.collection or str(args.module) for t in problem.tables)
    print(f"{args.out}: {len(problem.tables)} tables of {', '.join(paths)}, for TorchRec")
    if not all(t.collection for t in problem.tables):
        print(
            f"note: nothing here knows whether the model has a module {args.module!r} with these tables; "
            "read_torchrec(FILE, model) checks",
            file=sys.stderr,
        )


def _collection_module_name(problem: Problem) -> str:
    """Module path of a problem's only embedding collection: as its tables name it, or as in TorchRec's DLRM.

    Raises ShardCoreError for several collections, some of them without a name.
    """
    named = {(t.collection, t.sequence) for t in problem.tables}
    if len(named) > 1 and not all(path for path, _ in named):
        unnamed = next(t.name for t in problem.tables if not t.collection)
        raise ShardCoreError(
            f"problem {problem.name!r} has several collections, and table {unnamed!r} names none; give its path in the "
            "model by --module"
        )
    return problem.tables[0].collection or "sparse_arch.embedding_bag_collection"
