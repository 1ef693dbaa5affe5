"""The command provision: which cluster to rent or buy for a problem."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.cli.options import command, natural, positive, require_outputs
from shardcore.cli.progress_line import shown
from shardcore.errors import ShardCoreError
from shardcore.progress import clock

if TYPE_CHECKING:
    from shardcore.provision import Cluster

_PROVISION = """Find the cheapest cluster, of machines that can be had, that trains a problem fast enough; or
the fastest for a price. Every number of hosts of every offer is searched, if its devices divide the batch
evenly. The problem's own topology does not count."""

_WRITTEN = ("problem.json", "plan.json", "clusters.json", "curve.png")


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(commands, provision, _PROVISION, folders={"out": _WRITTEN})
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--offers", type=Path, required=True, metavar="OFFERS.json", help="types of machines, "
                   "with devices, memory, links, price and cost model (docs/plan.md)")
    target = p.add_mutually_exclusive_group(required=True)
    target.add_argument("--step-ms", type=positive(float), help="the longest step that will do")
    target.add_argument("--samples-per-s", type=positive(float), help="the fewest samples a second")
    target.add_argument("--price-per-hour", type=positive(float), help="what the cluster may cost; the "
                        "fastest that it buys is wanted")
    p.add_argument("--algorithm", help="searches plans; portfolio, the default, or another of `plan`")
    p.add_argument("--budget-evals", type=positive(int), default=20_000, help="plans to price a cluster")
    p.add_argument("--budget-s", type=positive(float), help="seconds to search, for all clusters together "
                   "(none: as long as the plans to price take)")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets problem.json and plan.json "
                   "of the chosen cluster, clusters.json with all of them, and curve.png; the last two even "
                   "if none meets the target")


def provision(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import composite
    from shardcore.provision import Target, best_of_each, read_offers, sweep
    from shardcore.report import provision_report
    from shardcore.search import DEFAULT_SHARDER, Budget, sharder
    from shardcore.workload import lower

    search = sharder(args.algorithm or DEFAULT_SHARDER)
    problem, offers = files.read_problem(args.problem), read_offers(args.offers)
    target = Target(args.step_ms, args.samples_per_s, args.price_per_hour)
    # Folders of models are relative to the file that names them.
    folders = {offer.model: args.offers.parent / offer.model for offer in offers}
    require_outputs(args, folders.values())
    models = {name: composite.load([folder]) for name, folder in folders.items()}
    began = clock()
    with shown():
        found = sweep(problem, offers, models, search, args.seed, Budget(args.budget_evals), args.budget_s)
    args.out.mkdir(parents=True, exist_ok=True)
    # Before the choice: if none meets the target, all that was searched is still there.
    files.write_json(args.out / "clusters.json", [
        {"offer": c.offer.name, "hosts": c.hosts, "devices": len(c.problem.topology),
         "price_per_hour": c.price_per_hour, "watts": c.watts,
         **({"step_ms": c.step_ms, "samples_per_s": c.samples_per_s} if c.cost else {"why": c.why})}
        for c in found])
    try:
        first, *others = best_of_each(found, target)
    except ShardCoreError as error:
        _draw(found, None, args.out)
        raise ShardCoreError(f"{error}. All that were searched are in {args.out}/clusters.json") from None
    files.write_problem(args.out / "problem.json", first.problem)
    files.write_plan(args.out / "plan.json", first.plan, first.problem)
    _draw(found, first, args.out)
    print(f"{args.out}: {first.words}, {first.price_per_hour:,.2f} an hour, {first.step_ms:.3f} ms a step; "
          f"{len(found)} clusters searched in {clock() - began:.0f} s\n")
    print(provision_report.table([first, *others]))
    if left_out := sum(offer.most_hosts for offer in offers) - len(found):
        print(f"\n{left_out} clusters were left out: their devices do not divide the global batch of "
              f"{problem.global_batch:,} evenly")
    if none := [c for c in found if c.cost is None]:
        print(f"\n{len(none)} clusters have no plan, such as {none[0].words}: {none[0].why}")
    model = models[first.offer.model].for_problem(first.problem)
    for line in model.out_of_range(lower(first.plan, first.problem)):
        print(f"extrapolated: {line}", file=sys.stderr)


def _draw(found: Sequence[Cluster], chosen: Cluster | None, out: Path) -> None:
    from shardcore import files
    from shardcore.report import figures, provision_report

    files.write_atomic(out / "curve.png", figures.png(provision_report.figure(found, chosen)))

