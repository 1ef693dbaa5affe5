"""Driver of all decisions made before a search (groups, tiers, towers, ...), and the ledger of what was tried.

A decision proposes problems. The driver has each searched, and gives the decision the outcome:

    found = decide(problem, model, [Groups(sync_every=500), MemoryTiers()], SHARDERS["portfolio"],
                   budget=Budget(seconds=60))
    found.plan, found.problem, found.plan.provenance["decisions"]

Decisions nest, by their level: each proposal of the first is decided on by the next.
The last one's proposals go to the sharder.

Seconds of a budget count for all searches together: each proposal gets an equal share of what is left.
Evaluations count for each search. So the plan of a proposal is the one that its problem alone would get with
the same budget, and a decision that also proposes the unchanged problem never makes a plan dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from shardcore.core import progress
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import Record, require, require_type, short_repr
from shardcore.cost.model import CostModel, require_model
from shardcore.io.schema import build_record
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.search.state.shards import priced_plan
from shardcore.search.ties import min_by_cost
from shardcore.step.memory import plan_fits

ENTRY = "decisions"
"""The ledger's name in a plan's provenance."""
_LEAST_S = 1e-3
"""Seconds of a search that begins when the time is up. It still gives a plan."""


@dataclass(frozen=True)
class LedgerEntry:
    """One proposal of a decision in the ledger, with its cost or failure.

    proposed: the proposal in words.
    ms: predicted cost of its plan. None: it has no plan.
    seconds, evals: time and evaluations of its searches.
    why: reason that it has no plan.
    facts: numbers and texts that the decision knows of it, by name.
    within: ledger of the decisions on this proposal.
    """

    proposed: str
    ms: float | None
    seconds: float
    evals: int
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    within: DecisionLedger | None = None


@dataclass(frozen=True)
class DecisionLedger:
    """The record of one decision, as a plan's provenance has it.

    chosen: words of the proposal that won.
    because: reason that it won.
    """

    decision: str
    chosen: str
    because: str
    entries: tuple[LedgerEntry, ...]

    def __post_init__(self) -> None:
        require(
            any(entry.proposed == self.chosen for entry in self.entries),
            f"ledger of {self.decision} has chosen {self.chosen!r}, which it does not list",
        )

    @property
    def winning_entry(self) -> LedgerEntry:
        """Ledger entry of the proposal that won."""
        return next(entry for entry in self.entries if entry.proposed == self.chosen)


def ledger_from_provenance(provenance: Mapping[str, Any]) -> DecisionLedger | None:
    """Ledger of decisions in a plan's provenance. None if nothing was decided before the plan's search.

    Raises ShardCoreError for an entry that is no ledger.
    """
    return (
        build_record(DecisionLedger, provenance[ENTRY], f"provenance: {ENTRY}")
        if ENTRY in provenance
        else None
    )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A changed problem that a decision proposes to search.

    words: text for people, different for each proposal of a decision.
    problem: the proposed problem. For a refused proposal, it is not searched.
    refused: reason that it is refused. None: it is searched.
    more: proposals that may follow it, at most.
    model: cost model of its devices. None: the one of all.
    search: its sharder. None: the one of all.
    plans: plans that it may have, too, where they fit and no other decision changes the problem.
    """

    words: str
    problem: Problem
    refused: ShardCoreError | None = None
    more: int = 0
    model: CostModel | None = None
    search: Sharder | None = None
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan, and the problem that it is a plan of.

    ms: cost, as the outermost decision counts it.
    evals: evaluations of all searches.
    ledger: ledger of the outermost decision. None: nothing was decided.
    outcomes: outcomes of its proposals.
    """

    problem: Problem
    plan: Plan
    ms: float
    evals: int
    ledger: DecisionLedger | None = None
    outcomes: tuple[ProposalOutcome, ...] = ()

    @property
    def chosen_proposal(self) -> Any:
        """Winning proposal of the outermost decision. Raises ShardCoreError if nothing was decided."""
        if self.ledger is None:
            raise ShardCoreError("nothing was decided before this search, so it has no chosen proposal")
        return next(x.proposal for x in self.outcomes if x.proposal.words == self.ledger.chosen)


@dataclass(frozen=True, kw_only=True)
class ProposalOutcome:
    """The plan of a proposal, or the error that says why there is none."""

    proposal: Any
    found: FoundPlan | None = None
    error: ShardCoreError | None = None
    seconds: float = 0.0

    @property
    def ms(self) -> float:
        """Cost of the outcome's plan in ms; infinite without a plan."""
        return self.found.ms if self.found else float("inf")


class Decision(Record):
    """A choice made before a search, which proposes changed problems and takes the best result.

    name: plural noun for people.
    level: order of nesting. Devices come first, then row domains, then tables, then their rows in device
      memory, then where they may live: each needs what those before it decided.
    against: decisions that it cannot be combined with, by name, and why.
    changes: change of its proposals to the problem that a plan is of. "": nothing.
    searches_all: True if proposals are searched even when time is up.
    """

    name: ClassVar[str]
    level: ClassVar[int]
    against: ClassVar[Mapping[str, str]] = {}
    changes: ClassVar[str] = ""
    searches_all: ClassVar[bool] = False

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, ProposalOutcome, None]:
        """Propose problems to search. Each `yield` gives the outcome of the proposal.

        model: cost model for any problem.
        seconds: time for all proposals together. None: no limit.

        Raises ShardCoreError for a problem that it has no proposals for.
        """
        raise NotImplementedError

    def adopt(self, proposal: Any, found: FoundPlan, problem: Problem, model: CostModel) -> FoundPlan:
        """Adapt a found plan, its problem or its cost to the decision's view.

        problem: the one that proposals were asked for.
        """
        return found

    def winning_outcome(self, outcomes: Sequence[ProposalOutcome]) -> ProposalOutcome:
        """Outcome that wins a decision. At least one outcome has a plan."""
        return min_by_cost(outcomes, lambda outcome: outcome.ms)

    def winning_reason(self, outcomes: Sequence[ProposalOutcome]) -> str:
        """Reason, in words, why the winning outcome of a decision wins."""
        return f"least ms of {sum(outcome.found is not None for outcome in outcomes)} with a plan"

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        """Facts on an outcome, numbers and texts by name, for the ledger."""
        return {}


def decide(
    problem: Problem,
    model: CostModel,
    decisions: Iterable[Decision],
    search: Sharder,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    heard: Callable[[ProposalOutcome], None] | None = None,
) -> FoundPlan:
    """Cheapest plan over the problems that decisions propose, with its problem, its cost, and a record of what was
    tried.

    The plan's provenance has the ledger.

    model: cost model for any problem.
    decisions: such as [Groups(), MemoryTiers()]. Their order does not count.
    search: sharder of the proposals.
    seed: of each search.
    budget: seconds for all searches together, or evaluations of each. None: each sharder's own end.
    heard: called with each outcome of the outermost decision.

    Raises ShardCoreError for decisions that cannot be combined, and as each of them does. If no proposal has
    a plan, it raises the error of the first search, or Infeasible.
    """
    require_type(problem, Problem, "problem", "a Problem")
    require_model(model)
    require_type(decisions, Iterable, "decisions", "a list of decisions, such as [Groups()], or []")
    decisions = list(decisions)
    for decision in decisions:
        require_type(decision, Decision, "a decision", "a Decision, such as Groups()")
    require(
        callable(search),
        f'search is {short_repr(search)}; it needs to be a sharder, such as SHARDERS["portfolio"]',
    )
    # The order of the list does not count: levels say which decision needs which.
    nested = sorted(decisions, key=lambda decision: decision.level)
    # Either of a pair may know why it excludes the other.
    for i, outer in enumerate(nested):
        for inner in nested[i + 1 :]:
            require(outer.name != inner.name, f"{outer.name} were asked for twice; once is enough")
            why = outer.against.get(inner.name) or inner.against.get(outer.name)
            require(not why, f"{outer.name} and {inner.name} were both asked for; {why}, so leave one out")
    found = _Driver(nested, search, model, seed, budget, heard).find_plan(problem)
    if found.ledger is None:
        return found
    # Plain data, as a plan's provenance goes to a file.
    provenance = {**found.plan.provenance, ENTRY: asdict(found.ledger)}
    return replace(found, plan=replace(found.plan, provenance=provenance))


@dataclass(frozen=True)
class _Driver:
    """Decisions on a problem that are left, and its search.

    model: cost model for any problem.
    budget: its seconds are for all that is left.
    heard: called with each outcome of the first decision.
    plans: plans that the problem may have, too.
    """

    decisions: Sequence[Decision]
    search: Sharder
    model: CostModel
    seed: int
    budget: Budget | None
    heard: Callable[[ProposalOutcome], None] | None = None
    plans: tuple[Plan, ...] = ()

    def find_plan(self, problem: Problem) -> FoundPlan:
        """Plan of a problem under the decisions that are left, or the search's plan if none are."""
        if self.decisions:
            # A ledger lists all proposals, so all are searched before one is chosen.
            return _choose_plan(self.decisions[0], list(self._proposal_outcomes(self.decisions[0], problem)))
        # Here no decision is left, so the sharder searches.
        model = self.model.for_problem(problem)
        problem.require_setting(model.setting)
        # Their costs are those of other models.
        plans = [
            priced_plan(p.placements, problem, model, **p.provenance)
            for p in self.plans
            if plan_fits(p, problem)
        ]
        evals = 0
        try:
            searched = self.search(problem, model, seed=self.seed, budget=self.budget)
        except Infeasible:
            if not plans:
                raise
        else:
            plans.insert(0, searched)
            # Sharders without a search count no evaluations.
            evals = searched.provenance.get("evals", 0)
        plan = min_by_cost(plans, lambda plan: plan.provenance["predicted_ms"])
        return FoundPlan(problem=problem, plan=plan, ms=plan.provenance["predicted_ms"], evals=evals)

    def _proposal_outcomes(self, decision: Decision, problem: Problem) -> Iterable[ProposalOutcome]:
        """Outcomes of a decision's proposals, one after the other."""
        budget, seconds, began = self.budget, self.budget and self.budget.seconds, progress.clock()
        # A generator, so that a decision keeps its state in local variables between proposals.
        steps, any_plan = decision.proposals(problem, self.model, seconds), False
        proposal = next(steps, None)
        while proposal is not None:
            left = float("inf")
            if budget and seconds is not None:
                left = seconds - (progress.clock() - began)
                # A search that ends early leaves its time to those that follow.
                budget = replace(budget, seconds=max(left, _LEAST_S) / (1 + proposal.more))
            # The first plan is searched even so: without one there is no answer.
            if left <= 0 and any_plan and not decision.searches_all:
                outcome = ProposalOutcome(proposal=proposal, error=Infeasible("no time was left for it"))
            else:
                outcome = self._outcome_of_proposal(decision, proposal, problem, budget)
            any_plan |= outcome.found is not None
            # Before the next search, so that a listener sees each result when it is there.
            if self.heard:
                self.heard(outcome)
            yield outcome
            try:
                # The decision may choose its next proposal by this outcome.
                proposal = steps.send(outcome)
            except StopIteration:
                return

    def _outcome_of_proposal(
        self, decision: Decision, proposal: Proposal, problem: Problem, budget: Budget | None
    ) -> ProposalOutcome:
        model = proposal.model or self.model
        # Only the outermost decision's outcomes are heard.
        inner = _Driver(
            self.decisions[1:],
            proposal.search or self.search,
            model,
            self.seed,
            budget,
            plans=proposal.plans,
        )
        began, found, error = progress.clock(), None, proposal.refused
        with progress.prefixed_phases(proposal.words):
            # A proposal without a plan is an answer: others may have one.
            try:
                found = None if error else inner.find_plan(proposal.problem)
            except ShardCoreError as refused:
                error = refused
            adopted = found and decision.adopt(proposal, found, problem, model)
        seconds = progress.clock() - began
        return ProposalOutcome(proposal=proposal, found=adopted, error=error, seconds=seconds)


def _choose_plan(decision: Decision, outcomes: Sequence[ProposalOutcome]) -> FoundPlan:
    """Plan that a decision chooses, with the record of all its proposals (ledger).

    Raises ShardCoreError if no proposal has a plan.
    """
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if len(errors) == len(outcomes):  # no plan at all
        if len(outcomes) == 1:
            raise errors[0]
        # A caller that waits for Infeasible needs it to mean that no proposal fits.
        infeasible = all(isinstance(error, Infeasible) for error in errors)
        raise (Infeasible if infeasible else type(errors[0]))(
            f"none of {len(outcomes)} proposals of {decision.name} has a plan; "
            f"{outcomes[0].proposal.words}: {errors[0]}"
        )
    # By the decision: not all choose the least ms.
    best = decision.winning_outcome(outcomes)
    assert best.found is not None
    entries = ledger_entries(decision, outcomes)
    ledger = DecisionLedger(decision.name, best.proposal.words, decision.winning_reason(outcomes), entries)
    # Evaluations of all proposals led to this plan, not only those of the winner.
    evals = sum(entry.evals for entry in entries)
    return replace(best.found, ledger=ledger, outcomes=tuple(outcomes), evals=evals)


def ledger_entries(decision: Decision, outcomes: Iterable[ProposalOutcome]) -> tuple[LedgerEntry, ...]:
    """Ledger entries of a decision's outcomes."""
    return tuple(
        LedgerEntry(
            proposed=outcome.proposal.words,
            ms=outcome.found.ms if outcome.found else None,
            seconds=round(outcome.seconds, 3),
            evals=outcome.found.evals if outcome.found else 0,
            why=str(outcome.error or ""),
            facts=decision.ledger_facts(outcome),
            within=outcome.found.ledger if outcome.found else None,
        )
        for outcome in outcomes
    )
