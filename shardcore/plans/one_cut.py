"""One cut for many machines: each table cut in the same way on every offered machine, with a placement on each.

So one checkpoint and one job definition fit all of them, whichever is free. How much has to be the same is a choice
(MUST_MATCH). Column parts always are the same columns, and no two parts of a table are on one device, where they would
become
one: an optimizer with one number a row has one for each part (see diff.py).

The search begins with the best plan of each machine alone. The cuts of these are tried on all others, also without
their cuts by columns. On a machine, the parts of a table take its place (search/state/column_parts.py), so that any
sharder places them. The cut with the least worst regret then takes over blocks of tables from the others, ever smaller
ones, while that lowers the worst regret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardcore.core import progress
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, price_plan
from shardcore.search.decisions.driver import FoundPlan, ProposalOutcome
from shardcore.search.decisions.provision import Offer, cluster_of_offer
from shardcore.search.state.column_parts import ColumnParts, even_cut_columns, with_tables_in_parts
from shardcore.step.kinds import SHARDING_KINDS, ShardingKind, sharding_kind_by_name

MUST_MATCH: Mapping[str, Callable[[ShardingKind], object]] = {
    "columns": lambda sharding_kind: None,
    "replicas": lambda sharding_kind: sharding_kind.dense_gradient,
    "kinds": lambda sharding_kind: sharding_kind.name,
}
"""Part of a table's kind that is the same on all machines, besides its columns, by name.

columns: nothing. A checkpoint of torchrec.moves.checkpoints then loads on every machine, with the optimizer's state.
replicas: whether it is replicated. A checkpoint of DCP alone then loads, too: it has the same tensors, whichever
  devices share rows.
kinds: the kind. One that divides rows over hosts then needs several hosts on every machine.
"""
GOOD_REGRET = 0.02
"""Worst regret at which the search for a better cut ends."""
BLOCKS = (1, 2, 4)
"""Blocks into which the differing tables of two cuts are divided, in turn. Each block is tried in the other's cut."""
Cut = Mapping[str, tuple[object, tuple[int, ...]]]
"""Cut of each table, by name: the part of its kind that stays the same, and the first columns of all parts but the
first."""


def cut_of_plan(plan: Plan, problem: Problem, must_match: str, max_parts: int | None = None) -> Cut:
    """The cut of a plan.

    must_match: a name of MUST_MATCH.
    max_parts: parts of a table, at most. A table in more parts is cut into that many even ones. None: any number.
    """
    return {
        name: (
            MUST_MATCH[must_match](sharding_kind_by_name(placements[0].kind)),
            tuple(sorted({p.shard.col_lo for p in placements} - {0}))
            if len(placements) <= (max_parts or len(placements))
            else tuple(even_cut_columns(placements[0].shard.table, max_parts or 1, problem)),
        )
        for name, placements in sorted(plan.placements_by_table().items())
    }


def _problem_in_parts(problem: Problem, cut: Cut, must_match: str, apart: bool) -> ColumnParts:
    """Problem whose tables are the parts of a cut, which no plan cuts by columns again.

    apart: each part has other devices than the other parts of its table, in the order of their columns.
    """
    columns_of = {name: columns for name, (_, columns) in cut.items() if columns}
    uncut = replace(
        problem.constraints.restricted_to({t.name for t in problem.tables} - columns_of.keys()),
        kinds=(),
        min_widths=(),
    )
    parts = with_tables_in_parts(replace(problem, constraints=uncut), columns_of)
    wholes = {t.name: parts.tables.get(t.name, (t, 0)) for t in parts.problem.tables}
    kinds = {
        name: tuple(
            kind
            for kind in problem.restricted_kinds_by_table.get(whole.name, SHARDING_KINDS)
            if MUST_MATCH[must_match](SHARDING_KINDS[kind]) == cut[whole.name][0]
            and (SHARDING_KINDS[kind].cuts_columns or whole.name not in columns_of)
        )
        for name, (whole, _) in wholes.items()
    }
    # Each part has a range of the devices, in the order of columns: canonical plans deal columns out in that order.
    pins = {
        name: problem.topology.device_indices[
            len(problem.topology) * i // n : len(problem.topology) * (i + 1) // n
        ]
        for name, (whole, column) in (wholes.items() if apart else ())
        if (n := len(columns_of.get(whole.name, ())) + 1) > 1
        for i in [(0, *columns_of[whole.name]).index(column)]
    }
    return replace(
        parts,
        problem=replace(
            parts.problem,
            constraints=replace(
                uncut,
                kinds=tuple(kinds.items()),
                min_widths=tuple((t.name, t.dim) for t in parts.problem.tables),
                pinned=tuple(pins.items()),
            ),
        ),
    )


def plan_with_cut(
    problem: Problem,
    model: CostModel,
    cut: Cut,
    must_match: str,
    search: Callable[[Problem, CostModel], Plan],
) -> Plan:
    """Plan of a problem with a given cut.

    model: cost model for the problem.
    must_match: a name of MUST_MATCH.

    Raises Infeasible where no such plan is found, and ShardCoreError where the devices cannot run the cut.
    """
    most = max(len(columns) + 1 for _, columns in cut.values())
    # Without pins first: they leave good plans out.
    for apart in (False, True) if most <= len(problem.topology) else ():
        parts = _problem_in_parts(problem, cut, must_match, apart)
        found = search(parts.problem, model)
        # Canonical: parts on one device become one, and unequal ones get their columns by the order of devices.
        plan = Plan(parts.with_whole_tables(found.placements))
        if parts.are_runnable(found.placements) and cut_of_plan(plan, problem, must_match) == cut:
            return replace(
                plan,
                provenance={
                    **found.provenance,
                    "predicted_ms": price_plan(plan, problem, model).cost.total_ms,
                },
            )
    raise Infeasible(
        f"tables have up to {most} column parts, and no plan was found that has the parts of each table on different "
        f"ones, in the order of their columns, of {len(problem.topology)} devices"
    )


def plan_each(
    problem: Problem,
    offers: Sequence[Offer],
    models: Mapping[str, CostModel],
    search: Callable[[Problem, CostModel], Plan],
    must_match: str = "columns",
    end_s: float = float("inf"),
) -> list[tuple[ProposalOutcome, float]]:
    """Plans with one cut, that of the least worst regret found, on all hosts of each offer.

    Each is an outcome, whose proposal is the offer, with the predicted ms of the cheapest plan that was found for this
    offer: infinite without any. The regret of an offer is outcome.ms / ms - 1.

    models: cost models by the offers' `model_or_hardware`.
    search: a sharder with its seed and budget. It makes up to n + 14 n² plans for n offers, and seldom half of these.
    must_match: what is the same on all machines, a name of MUST_MATCH.
    end_s: when the search for a better cut ends, by `progress.clock`.

    Raises ShardCoreError if no offer has any plan.
    """
    tried = dict[tuple[Offer, object], ProposalOutcome]()

    def plan_on(offer: Offer, cut: Cut | None = None) -> ProposalOutcome:
        """Plan on an offer with a cut, or with any, or the reason that there is none. Searched once."""
        key = offer, cut and tuple(cut.items())
        if key not in tried:
            try:
                with progress.prefixed_phases(offer.name):
                    on = cluster_of_offer(problem, offer, offer.most_hosts).problem
                    model = models[offer.model_or_hardware].for_problem(on)
                    plan = plan_with_cut(on, model, cut, must_match, search) if cut else search(on, model)
                    found = FoundPlan(problem=on, plan=plan, ms=plan.provenance["predicted_ms"], evals=0)
                    tried[key] = ProposalOutcome(proposal=offer, found=found)
            except ShardCoreError as error:
                tried[key] = ProposalOutcome(proposal=offer, error=error)
        return tried[key]

    own = {x.proposal: x.found for x in map(plan_on, offers) if x.found}
    if not own:
        raise next(x.error for x in tried.values() if x.error)
    # A search with the own cut may find no plan as good again.
    tried |= {
        (offer, tuple(cut_of_plan(found.plan, problem, must_match).items())): ProposalOutcome(
            proposal=offer, found=found
        )
        for offer, found in own.items()
    }

    def rank(cut: Cut, first: Offer, limit: tuple[float, float]) -> tuple[int, float, Offer]:
        """Offers without a plan of a cut, the worst regret of the others, and the offer that it is of.

        first: offer that is looked at first. limit: refused offers and regret at which looking ends.
        """
        refused, worst = 0, (0.0, first)
        for offer in sorted(own, key=lambda offer: offer is not first):
            regret = plan_on(offer, cut).ms / own[offer].ms - 1
            refused += regret == float("inf")
            worst = max(worst, (regret if regret < float("inf") else 0.0, offer), key=lambda found: found[0])
            if (refused, worst[0]) >= limit:
                break
        return refused, *worst

    # A table with more parts than the smallest machine has devices gets fewer.
    sizes = [len(found.problem.topology) for found in own.values()]
    cuts = [cut_of_plan(found.plan, problem, must_match, min(sizes)) for found in own.values()]
    cuts += [{name: (kind, ()) for name, (kind, _) in cut.items()} for cut in cuts]
    best, at = cuts[0], rank(cuts[0], next(iter(own)), (float("inf"), 0.0))
    for goal, blocks in [(goal, blocks) for blocks in BLOCKS for goal in cuts]:
        # Tables of a block are alike: of one change, and with about as many lookups of a row.
        differing = sorted(
            (t for t in problem.tables if best[t.name] != goal[t.name]),
            key=lambda t: (best[t.name][0] == goal[t.name][0], t.pooling / t.rows),
        )
        size = max(1, -(-len(differing) // blocks))
        for low in range(0, len(differing), size):
            if at[:2] > (0, GOOD_REGRET) and progress.clock() < end_s:
                trial = {**best, **{t.name: goal[t.name] for t in differing[low : low + size]}}
                best, at = min(
                    (best, at), (trial, rank(trial, at[2], at[:2])), key=lambda ranked: ranked[1][:2]
                )
    return [
        (
            plan_on(offer, best if offer in own else None),
            min(x.ms for x in tried.values() if x.proposal == offer),
        )
        for offer in offers
    ]
