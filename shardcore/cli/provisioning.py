"""The command provision: `plan` with the choice of a cluster, and with files of all clusters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardcore.cli import decisions as deciding
from shardcore.cli import plans
from shardcore.cli.options import (
    DatasetFolder,
    Output,
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
class ProvisionOptions(SearchOptions, deciding.TargetOptions):
    """Find the cheapest cluster of offered machines that trains a problem fast enough, or the fastest for a
    price. Every number of hosts of every offer is searched, if its devices divide the batch evenly. The
    problem's topology does not count. Short for `plan --offers`.

    offers: types of machines, with devices, memory, links, price and cost model or profile (docs/plan_provision.md)
    algorithm: algorithm that searches plans, any of `plan`; default: portfolio
    out: folder for problem.json and plan.json of the chosen cluster, clusters.json with all clusters, and
      curve.png (with matplotlib); the last two are written even if no cluster meets the target
    """

    EXCLUSIVE = ()
    problem: ProblemFile
    _: KW_ONLY
    offers: Annotated[Path, "OFFERS.json"]
    algorithm: str | None = None
    budget_evals: Positive | None = 20_000
    out: Annotated[DatasetFolder, Output(_CLUSTER_FILES)]


def add_commands(commands: argparse._SubParsersAction) -> None:
    add_command(commands, ProvisionOptions, provision)


def provision(args: ProvisionOptions) -> None:
    from shardcore.search.decisions.provision import read_offers

    # Checked here, as `plan` would name other options in its message.
    require_outputs(args, deciding.offers_files(args.offers, read_offers(args.offers)))
    outcomes: list[Outcome] = []
    written: dict[str, Any] = {"out": args.out / "plan.json", "out_problem": args.out / "problem.json"}
    try:
        found = plans.search(deciding.PlanOptions(**vars(args) | written), outcomes)
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
    # Last, as it needs a package that may not be there.
    print(figures.write_png(out / "curve.png", lambda: decisions_report.clusters_figure(outcomes, chosen)))
