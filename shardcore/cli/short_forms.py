"""Commands that are short forms of `plan` with one decision: hot-rows, tiers, provision. And hot-drift."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.cli import decisions, plans
from shardcore.cli.options import add_budget, command, natural, require_outputs
from shardcore.core.errors import ShardCoreError

if TYPE_CHECKING:
    from shardcore.search.decisions.driver import Outcome

_HOT_ROWS = """Find how many rows of a problem's sequence tables to have on every device, and write the
problem with these as tables of their own. A plan is searched for each of some thresholds of lookups a batch;
the best is taken. `plan` then takes the problem that was written. Short for `plan --hot-rows`."""
_TIERS = """Decide which rows of a problem's tables lie in device memory, and which in the hosts', where not
all fit. It writes the problem with the load factors that it found, which `plan` then takes. With a model,
plans are searched for some shares of the memory, and the best is taken; what it leaves free on a device goes
to the tables there. Short for `plan --tiers`."""
_PROVISION = """Find the cheapest cluster, of machines that can be had, that trains a problem fast enough; or
the fastest for a price. Every number of hosts of every offer is searched, if its devices divide the batch
evenly. The problem's own topology does not count. Short for `plan --offers`."""
_CLUSTER_FILES = ("problem.json", "plan.json", "clusters.json", "curve.png")


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(commands, hot_rows, _HOT_ROWS, outputs=("out", "plan"))
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help="folder of a trained model")
    p.add_argument("--algorithm", default="anneal", help="searches plans; any of `plan`")
    _add_search(p)
    p.add_argument("--out", type=Path, required=True, metavar="HOT.json")
    p.add_argument("--plan", type=Path, metavar="PLAN.json", help="write the plan that was found, too")

    p = command(
        commands,
        hot_drift,
        "Say how hot the hot rows of a job still are, and what other hot ids would save and move.",
    )
    p.add_argument("problem", type=Path, metavar="HOT.json", help="of hot-rows")
    p.add_argument(
        "--hot-ids",
        type=Path,
        required=True,
        metavar="IDS.safetensors",
        help="that are hot in the job (write_hot_ids)",
    )
    p.add_argument(
        "--row-counts",
        type=Path,
        required=True,
        metavar="COUNTS.safetensors",
        help="lookups of each row in samples of now (write_row_counts)",
    )
    p.add_argument("--out", type=Path, metavar="NEW.safetensors", help="write the hot ids of now")

    p = command(commands, tiers, _TIERS, outputs=("out", "plan"))
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    decisions.add_host_memory(p)
    p.add_argument(
        "--model", type=Path, action="append", help="folder of a trained model; give one for each precision"
    )
    p.add_argument(
        "--algorithm", help="with --model: searches plans; portfolio, the default, or another of `plan`"
    )
    _add_search(p)
    p.add_argument("--out", type=Path, metavar="TIERED.json", help="write the problem with load factors")
    p.add_argument(
        "--plan", type=Path, metavar="PLAN.json", help="with --model: write the plan that was found, too"
    )

    p = command(commands, provision, _PROVISION, folders={"out": _CLUSTER_FILES})
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument(
        "--offers",
        type=Path,
        required=True,
        metavar="OFFERS.json",
        help="types of machines, with devices, memory, links, price and cost model (docs/plan.md)",
    )
    decisions.add_target(p)
    p.add_argument("--algorithm", help="searches plans; portfolio, the default, or another of `plan`")
    add_budget(p, evals=20_000)
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets problem.json and plan.json "
        "of the chosen cluster, clusters.json with all of them, and curve.png; the last two even "
        "if none meets the target",
    )


def _add_search(p: argparse.ArgumentParser) -> None:
    add_budget(p.add_mutually_exclusive_group())
    p.add_argument("--seed", type=natural, default=0)


def hot_rows(args: argparse.Namespace) -> None:
    plans.plan(
        plans.plan_arguments(**vars(args) | {"hot_rows": True, "out": args.plan, "out_problem": args.out})
    )


def hot_drift(args: argparse.Namespace) -> None:
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


def tiers(args: argparse.Namespace) -> None:
    from shardcore.io import files
    from shardcore.report.decisions_report import tiers_report
    from shardcore.search.decisions.memory_tiers import tiered

    for name in ("algorithm", "budget_s", "budget_evals", "plan"):
        if getattr(args, name) is not None and not args.model:
            raise ShardCoreError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is for plans; give --model too"
            )
    if args.plan and not args.out:
        raise ShardCoreError(
            f"--plan {args.plan} needs --out, the problem with load factors that it is a plan of"
        )
    if args.model:
        plans.plan(
            plans.plan_arguments(**vars(args) | {"tiers": True, "out": args.plan, "out_problem": args.out})
        )
        return
    found = tiered(decisions.with_host_memory(files.read_problem(args.problem), args))
    if args.out:
        files.write_problem(args.out, found)
    print(tiers_report(found))


def provision(args: argparse.Namespace) -> None:
    from shardcore.search.decisions.provision import read_offers

    # Here, for `plan` names other options.
    require_outputs(args, [args.offers.parent / offer.model for offer in read_offers(args.offers)])
    outcomes: list[Outcome] = []
    try:
        found = plans.plan(
            plans.plan_arguments(
                **vars(args) | {"out": args.out / "plan.json", "out_problem": args.out / "problem.json"}
            ),
            outcomes.append,
        )
    except ShardCoreError as error:
        if not outcomes:
            raise
        # If none meets the target, all that was searched is still there.
        _write_clusters(outcomes, None, args.out)
        raise ShardCoreError(f"{error}. All that were searched are in {args.out}/clusters.json") from None
    _write_clusters(outcomes, next(x for x in outcomes if x.proposal is found.chosen), args.out)


def _write_clusters(outcomes: Sequence[Outcome], chosen: Outcome | None, out: Path) -> None:
    from shardcore.io import files
    from shardcore.report import decisions_report, figures

    files.write_json(
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
    files.write_atomic(out / "curve.png", figures.png(decisions_report.clusters_figure(outcomes, chosen)))
