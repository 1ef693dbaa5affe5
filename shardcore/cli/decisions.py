"""Options of `plan` for decisions before the search, and texts about these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardcore.cli.models import ModelOptions, load_cost_model
from shardcore.cli.options import (
    DatasetFolder,
    Duration,
    Gib,
    Natural,
    Output,
    PlanFile,
    Positive,
    PositiveFloat,
    PositiveGib,
    ProblemFile,
    SearchOptions,
    require_writable_outputs,
)
from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.types import Plan, Problem

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.plans.replan import Start
    from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
    from shardcore.search.decisions.provision import Offer

_TARGET = ("step_ms", "samples_per_s", "price_per_hour")
_NEEDS = {
    "sync_every": ("groups", "whose replicas it is for"),
    "host_gib": ("tiers", "of which it is the memory"),
    "link_gbps": ("tiers", "whose link it is"),
    **dict.fromkeys(
        (
            "start_problem",
            "without",
            "max_moved_tables",
            "max_moved_gib",
            "max_pause",
            "moves_pay_back_in",
            "move_rates",
        ),
        ("start", "the plan to start from"),
    ),
    **dict.fromkeys((*_TARGET, "clusters"), ("offers", "of which a cluster is chosen")),
}
"""Options that mean nothing without another: the other one, and its description for messages."""


@dataclass(frozen=True)
class PlanOptions(SearchOptions, ModelOptions):
    """Search a plan for a problem under a cost model. Options for decisions before the search can be combined;
    each decision has several problems searched.

    offers: types of machines, with their models or profiles: choose the cluster, too (docs/plan_provision.md); with a
      target and --out-problem
    step_ms: with --offers: longest step that is fast enough; the cheapest cluster is chosen
    samples_per_s: with --offers: fewest samples a second that are fast enough; the cheapest cluster is chosen
    price_per_hour: with --offers: highest price of the cluster; the fastest is chosen
    clusters: with --offers: write clusters.json, all clusters that were searched, and curve.png (with matplotlib)
      into this folder, even if no cluster meets the target
    algorithm: portfolio, the default (the cheapest plan of several searches), anneal, anneal_columns (tables
      whole or cut by columns only), random, size_greedy, dim_greedy, lookup_greedy, size_lookup_greedy,
      neuroshard or torchrec (where installed); with --policy: dreamshard, dreamshard_direct or autoshard
      (tables whole), or these with _columns (also cut by columns)
    policy: folder of a trained policy (train-policy), for a learned algorithm; the default algorithm is then
      the policy's
    start: improve this plan of the problem instead of making a new one (by annealing); with --groups, also a
      plan of groups
    start_problem: problem that --start was made for, if it has changed since: other tables, shapes,
      statistics or devices
    without: with --start: devices of its problem that are gone; default: those with the highest numbers, if
      there are fewer now
    max_moved_tables: with --start: most tables that may move; default: any number
    max_moved_gib: with --start: most GiB of weights that may move, in addition to those that have to;
      default: any number
    max_pause: with --start: longest pause of a job while its tables move, such as 30s
    moves_pay_back_in: with --start: longest time until the gain makes up for that pause, such as 10min; fewer
      tables move, or none, if more would take longer
    move_rates: with --start: measured rates of moving tables on the job's machines (`job rates`); default:
      only bytes on links count
    groups: divide the devices into groups of SIZE, or of the best size, that replicate one plan (TorchRec's
      DMPCollection)
    sync_every: with --groups: steps from one synchronisation of the replicas to the next; default: 1
    hot_rows: have the hottest rows of sequence tables on every device, as separate tables; with --out-problem
    towers: file of tables that belong together on a host, and of the ratio by which a tower module compresses
      what crosses hosts (docs/plan_towers.md)
    tiers: decide which rows are in host memory, if not all fit in that of devices; with --out-problem
    host_gib: with --tiers: memory of each host that tables may take; default: that of the problem
    link_gbps: with --tiers: GB/s between a device and its host's memory, which is not measured; default: that
      of the problem, or 25
    out_problem: write the problem of the plan, if decisions change it
    confidence: take as an op's cost the time that its measurement stays below with this probability, such as
      0.9, instead of the expected time
    explain: show what bounds the plan, what other algorithms find, and what more memory or more devices would
      bring; each is searched with the same budget again
    """

    REQUIRED = (("model", "hardware", "offers"),)
    EXCLUSIVE = (*SearchOptions.EXCLUSIVE, _TARGET)
    problem: ProblemFile
    _: KW_ONLY
    offers: Annotated[Path, "OFFERS.json"] | None = None
    step_ms: PositiveFloat | None = None
    samples_per_s: PositiveFloat | None = None
    price_per_hour: PositiveFloat | None = None
    clusters: Annotated[DatasetFolder, Output(("clusters.json", "curve.png"))] | None = None
    algorithm: str | None = None
    policy: Annotated[Path, "POLICY"] | None = None
    start: Annotated[Path, "PLAN"] | None = None
    start_problem: ProblemFile | None = None
    without: list[Annotated[Natural, "DEVICE"]] | None = field(
        default=None, metadata={"nargs": "+", "action": "extend"}
    )
    max_moved_tables: Annotated[Natural, "N"] | None = None
    max_moved_gib: Annotated[Gib, "G"] | None = None
    max_pause: Duration | None = None
    moves_pay_back_in: Duration | None = None
    move_rates: Annotated[Path, "RATES.json"] | None = None
    groups: Annotated[str, "auto|SIZE"] | None = field(default=None, metadata={"nargs": "?", "const": "auto"})
    sync_every: Annotated[Positive, "N"] | None = None
    hot_rows: bool = False
    towers: Annotated[Path, "TOWERS.json"] | None = None
    tiers: bool = False
    host_gib: PositiveGib | None = None
    link_gbps: PositiveFloat | None = None
    out_problem: Annotated[ProblemFile, Output()] | None = None
    confidence: Annotated[PositiveFloat, "P"] | None = None
    explain: bool = False
    out: Annotated[PlanFile, Output()] | None


def require_needed_options(args: PlanOptions) -> None:
    """Raise ShardCoreError for an option that is given without the option it requires."""
    for name, (other, description) in _NEEDS.items():
        if (given := getattr(args, name)) is not None and not getattr(args, other):
            shown = " ".join(map(str, given)) if isinstance(given, list) else given
            raise ShardCoreError(f"--{name.replace('_', '-')} {shown} needs --{other}, {description}")


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
    from shardcore.cost.model import at_confidence
    from shardcore.io.towers import read_towers
    from shardcore.search.decisions.groups import Groups
    from shardcore.search.decisions.hot_rows import HotRows
    from shardcore.search.decisions.memory_tiers import MemoryTiers
    from shardcore.search.decisions.provision import Provision, Target, read_offers
    from shardcore.search.decisions.row_units import RowUnits
    from shardcore.search.decisions.towers import OnTowers
    from shardcore.step.kinds import row_unit_choices

    if args.offers:
        offers = read_offers(args.offers)
        target = Target(args.step_ms, args.samples_per_s, args.price_per_hour)
        require_writable_outputs(args, source_files_of_offers(args.offers, offers))
        models = {
            offer.model_or_hardware: at_confidence(
                load_cost_model(pricing_source_of_offer(args.offers, offer)), args.confidence
            )
            for offer in offers
        }
        yield Provision(offers, models, target)
    if args.groups is not None:
        yield Groups(args.groups, args.sync_every or 1)
    start = _read_start(args, args.start, problem, stored) if args.start else None
    # Towers are of the model: their number is not chosen here.
    if len(row_unit_choices(problem.topology)) > 1 and not args.towers:
        yield RowUnits(start and start.old)
    if args.hot_rows:
        yield HotRows()
    if args.towers:
        yield OnTowers(
            read_towers(args.towers), start and start.old, not (start and start.config.limits_moves)
        )
    if args.tiers:
        yield MemoryTiers()
    if start:
        yield start


def pricing_source_of_offer(path: Path, offer: Offer) -> str | list[Path]:
    """Name of the profile, or folder of the trained model, that prices an offered cluster.

    path: file of offers, to which paths in the offer are relative.
    """
    file = path.parent / offer.model_or_hardware
    if offer.model:
        return [file]
    return str(file) if file.is_file() else offer.hardware


def source_files_of_offers(path: Path, offers: Iterable[Offer]) -> list[Path]:
    """Model folders and profile files that the offers of a file name."""
    sources = [pricing_source_of_offer(path, offer) for offer in offers]
    return [Path(source) if isinstance(source, str) else source[0] for source in sources]


def _read_start(args: PlanOptions, path: Path, problem: Problem, stored: Problem) -> Start:
    """Read the plan that a search starts from. Raises ShardCoreError if the plan is invalid for its problem."""
    from shardcore.cost.move_rates import read_move_rates
    from shardcore.io import files
    from shardcore.plans.replan import ReplanConfig, Start
    from shardcore.search import DEFAULT_SHARDER
    from shardcore.step.sharding_groups import problem_of_group

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
    args: PlanOptions, found: Found, decisions: Sequence[Decision], original: Problem, model: CostModel
) -> str:
    """Text on how a plan found differs from the plan of --start. "" without --start."""
    from shardcore.cost.model import predicted_total_ms
    from shardcore.plans.replan import Start
    from shardcore.report import plan_report
    from shardcore.search.decisions.towers import with_towers_of_plan
    from shardcore.step.lower import lower

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
    from shardcore.step.kinds import pod_size
    from shardcore.torchrec.topologies import POD_SIZE

    size = pod_size(problem.topology, plan.placements)
    return f"rows are divided over pods of {size} hosts: the job needs {POD_SIZE}={size}" if size > 1 else ""


def decision_texts(decisions: Sequence[Decision], found: Found, original: Problem) -> Iterator[str]:
    """Text on the outcome of each decision of a search. Some texts may be empty."""
    from shardcore.report import decisions_report
    from shardcore.search.decisions.hot_rows import HotRows
    from shardcore.search.decisions.memory_tiers import MemoryTiers
    from shardcore.search.decisions.provision import Provision
    from shardcore.search.decisions.row_units import RowUnits

    for decision in decisions:
        if isinstance(decision, Provision):
            yield from decisions_report.cluster_lines(decision, found)
        if isinstance(decision, HotRows):
            yield decisions_report.hot_rows_table(original, found.problem)
        if isinstance(decision, MemoryTiers):
            yield decisions_report.memory_tiers_text(found.problem)
        if isinstance(decision, RowUnits):
            yield pod_size_note(found.problem, found.plan)


def extrapolation_sentences(found: Found, model: CostModel) -> list[str]:
    """Sentences on where a plan's predicted cost extrapolates beyond measurements. model: model for the problem."""
    from shardcore.cli import grouped
    from shardcore.search.decisions.groups import FoundGroups
    from shardcore.search.decisions.towers import with_towers_of_plan
    from shardcore.step.lower import lower

    if isinstance(found, FoundGroups):
        return grouped.extrapolation_sentences(found.grouped_plan, found.whole, model)
    return model.out_of_range(lower(found.plan, with_towers_of_plan(found.plan, found.problem)))


def error_band_text(found: Found, model: CostModel) -> str:
    """Expected error of a plan's cost under a hardware profile, as " ±N%". "" under a trained model."""
    from shardcore.cost.known_errors import step_error_band
    from shardcore.search.decisions.towers import with_towers_of_plan
    from shardcore.step.lower import lower

    band = step_error_band(model, lower(found.plan, with_towers_of_plan(found.plan, found.problem)))
    return "" if band is None else f" ±{band:.0%}"


def write_plan_and_problem(args: PlanOptions, found: Found) -> None:
    """Write a plan to --out and its problem to --out-problem, where these options are given."""
    from shardcore.io import files
    from shardcore.io.files import write_grouped_plan
    from shardcore.search.decisions.groups import FoundGroups

    grouped = found if isinstance(found, FoundGroups) else None
    whole = grouped.whole if grouped else found.problem
    if args.out_problem:
        files.write_problem(args.out_problem, whole)
    if args.out and grouped and grouped.grouping.size < len(whole.topology):
        write_grouped_plan(args.out, grouped.grouped_plan, whole)
    elif args.out:
        files.write_plan(args.out, found.plan, whole)


def write_clusters(folder: Path, outcomes: Sequence[Outcome], chosen: Proposal | None) -> None:
    """Write and plot all clusters that a search priced. chosen: cheapest that meets the target, or None."""
    from shardcore.io import writing
    from shardcore.report import decisions_report, figures

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
