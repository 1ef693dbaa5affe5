"""The commands hot-rows, tiers and provision, which are short forms of `plan` with one decision, and hot-drift."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardcore.cli import decisions as deciding
from shardcore.cli import plans
from shardcore.cli.models import ModelOptions
from shardcore.cli.options import (
    DatasetFolder,
    Output,
    PlanFile,
    Positive,
    ProblemFile,
    SearchOptions,
    add_command,
    require_outputs,
)
from shardcore.core.errors import ShardCoreError

if TYPE_CHECKING:
    from shardcore.search.decisions.driver import Outcome

_CLUSTER_FILES = ("problem.json", "plan.json", "clusters.json", "curve.png")


@dataclass(frozen=True)
class HotRowsOptions(SearchOptions, ModelOptions):
    """Find how many rows of a problem's sequence tables to have on every device, and write the problem with
    these as separate tables, which `plan` then takes. A plan is searched for each of several thresholds of
    lookups a batch, and the best is taken. Short for `plan --hot-rows`.

    algorithm: algorithm that searches plans, any of `plan`
    out: write the problem with hot rows there
    plan: write the plan that was found there
    """

    problem: ProblemFile
    _: KW_ONLY
    algorithm: str = "anneal"
    out: Annotated[Path, "HOT.json", Output()]
    plan: Annotated[PlanFile, Output()] | None = None


@dataclass(frozen=True)
class HotDriftOptions:
    """Show how hot the hot rows of a job still are, and what other hot ids would save and move.

    problem: problem that hot-rows wrote
    hot_ids: hot ids of the job (write_hot_ids)
    row_counts: lookups of each row in present samples (write_row_counts)
    out: write the present hot ids there
    """

    problem: Annotated[Path, "HOT.json"]
    _: KW_ONLY
    hot_ids: Annotated[Path, "IDS.safetensors"]
    row_counts: Annotated[Path, "COUNTS.safetensors"]
    out: Annotated[Path, "NEW.safetensors", Output()] | None = None


@dataclass(frozen=True)
class TiersOptions(SearchOptions, ModelOptions, deciding.HostMemoryOptions):
    """Decide which rows of a problem's tables are in device memory, and which in the hosts', if not all fit.
    The problem is written with the load factors that were found, and `plan` then takes it. With a model or a
    profile, plans are searched for several shares of the memory, and the best is taken; memory that it leaves
    free on a device goes to the tables there. Short for `plan --tiers`.

    algorithm: with a model or profile: algorithm that searches plans, any of `plan`; default: portfolio
    out: write the problem with load factors there
    plan: with a model or profile: write the plan that was found there
    """

    REQUIRED = ()
    EXCLUSIVE = (*SearchOptions.EXCLUSIVE, *ModelOptions.REQUIRED)
    problem: ProblemFile
    _: KW_ONLY
    algorithm: str | None = None
    out: Annotated[Path, "TIERED.json", Output()] | None = None
    plan: Annotated[PlanFile, Output()] | None = None


@dataclass(frozen=True)
class ProvisionOptions(SearchOptions, deciding.TargetOptions):
    """Find the cheapest cluster of offered machines that trains a problem fast enough, or the fastest for a
    price. Every number of hosts of every offer is searched, if its devices divide the batch evenly. The
    problem's topology does not count. Short for `plan --offers`.

    offers: types of machines, with devices, memory, links, price and cost model or profile (docs/plan_provision.md)
    algorithm: algorithm that searches plans, any of `plan`; default: portfolio
    out: folder for problem.json and plan.json of the chosen cluster, clusters.json with all clusters, and
      curve.png; the last two are written even if no cluster meets the target
    """

    EXCLUSIVE = ()
    problem: ProblemFile
    _: KW_ONLY
    offers: Annotated[Path, "OFFERS.json"]
    algorithm: str | None = None
    budget_evals: Positive | None = 20_000
    out: Annotated[DatasetFolder, Output(_CLUSTER_FILES)]


def add_commands(commands: argparse._SubParsersAction) -> None:
    add_command(commands, HotRowsOptions, hot_rows)
    add_command(commands, HotDriftOptions, hot_drift)
    add_command(commands, TiersOptions, tiers)
    add_command(commands, ProvisionOptions, provision)


def hot_rows(args: HotRowsOptions) -> None:
    plans.plan(deciding.plan_options(args, hot_rows=True, out=args.plan, out_problem=args.out))


def hot_drift(args: HotDriftOptions) -> None:
    from shardcore.io import files
    from shardcore.io.hot_ids import read_hot_ids, write_hot_ids
    from shardcore.io.row_counts import read_row_counts
    from shardcore.plans.hot_drift import hot_drift as drift_of
    from shardcore.report.decisions_report import drift_table

    found = drift_of(
        files.read_problem(args.problem), read_hot_ids(args.hot_ids), read_row_counts(args.row_counts)
    )
    if args.out:
        write_hot_ids(args.out, [one.new for one in found])
    print(drift_table(found))


def tiers(args: TiersOptions) -> None:
    from shardcore.io import files
    from shardcore.report.decisions_report import tiers_report
    from shardcore.search.decisions.memory_tiers import tiered

    for name in ("algorithm", "budget_s", "budget_evals", "plan"):
        if getattr(args, name) is not None and not args.source:
            raise ShardCoreError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is for plans; give --model or --hardware too"
            )
    if args.plan and not args.out:
        raise ShardCoreError(
            f"--plan {args.plan} needs --out, the problem with load factors that it is a plan of"
        )
    if args.source:
        plans.plan(deciding.plan_options(args, tiers=True, out=args.plan, out_problem=args.out))
        return
    stored = files.read_problem(args.problem)
    found = tiered(deciding.with_host_memory(stored, args.problem, args.host_gib, args.link_gbps))
    if args.out:
        files.write_problem(args.out, found)
    print(tiers_report(found))


def provision(args: ProvisionOptions) -> None:
    from shardcore.search.decisions.provision import read_offers

    # Checked here, as `plan` would name other options in its message.
    require_outputs(args, deciding.offers_files(args.offers, read_offers(args.offers)))
    outcomes: list[Outcome] = []
    options = deciding.plan_options(args, out=args.out / "plan.json", out_problem=args.out / "problem.json")
    try:
        found = plans.plan(options, outcomes.append)
    except ShardCoreError as error:
        if not outcomes:
            raise
        # Even if no cluster meets the target, users want to see those that were searched.
        _write_clusters(outcomes, None, args.out)
        raise ShardCoreError(f"{error}. All that were searched are in {args.out}/clusters.json") from None
    _write_clusters(outcomes, next(x for x in outcomes if x.proposal is found.chosen), args.out)


def _write_clusters(outcomes: Sequence[Outcome], chosen: Outcome | None, out: Path) -> None:
    from shardcore.io import writing
    from shardcore.report import decisions_report, figures

    writing.write_json(
        out / "clusters.json",
        [
            {
                "offer": x.proposal.offer.name,
                "hosts": x.proposal.hosts,
                "devices": len(x.proposal.problem.topology),
                "price_per_hour": x.proposal.price_per_hour,
                "watts": x.proposal.watts,
                **(
                    {"step_ms": x.ms, "samples_per_s": x.proposal.samples_per_s(x.ms)}
                    if x.found
                    else {"why": str(x.error)}
                ),
            }
            for x in outcomes
        ],
    )
    writing.write_atomic(out / "curve.png", figures.png(decisions_report.clusters_figure(outcomes, chosen)))
