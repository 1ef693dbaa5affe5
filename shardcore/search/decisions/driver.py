"""One driver of all decisions that are made before a search.

A decision proposes problems. The driver has each searched, and gives the decision the outcome:

    found = decide(problem, model, [Groups(sync_every=500), Tiers()], SHARDERS["portfolio"],
                   budget=Budget(seconds=60))
    found.plan, found.problem, found.plan.provenance["decisions"]

Decisions nest, by their level: each proposal of the first is decided on by the next. The last one's proposals
go to the sharder.

Seconds of a budget count for all searches together: each proposal gets an equal share of what is left.
Evaluations count for each search. So the plan of a proposal is the one that its problem gets by itself with
the same budget, and a decision that also proposes the problem as it is never makes a plan dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from shardcore.core import progress
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require, require_type
from shardcore.cost.model import CostModel, require_model
from shardcore.search.budget import Budget
from shardcore.search.decisions.ledger import ENTRY, Entry, Ledger
from shardcore.search.sharders import Sharder

_LEAST_S = 1e-3
"""Seconds of a search that begins when the time is up. It still gives a plan."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A problem that a decision proposes.

    words: for people, different for each proposal of a decision.
    problem: None: the proposal is refused.
    refused: reason.
    more: proposals that may follow it, at most.
    model: of its devices. None: the one of all.
    search: its sharder. None: the one of all.
    """

    words: str
    problem: Problem | None
    refused: ShardCoreError | None = None
    more: int = 0
    model: CostModel | None = None
    search: Sharder | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan, and the problem that it is a plan of.

    ms: cost, as the outermost decision counts it.
    evals: of all searches.
    ledger: of the outermost decision. None: nothing was decided.
    outcomes: of its proposals.
    """

    problem: Problem
    plan: Plan
    ms: float
    evals: int
    ledger: Ledger | None = None
    outcomes: tuple[Outcome, ...] = ()

    @property
    def chosen(self) -> Proposal:
        """The proposal of the outermost decision that won."""
        return next(x.proposal for x in self.outcomes if x.proposal.words == self.ledger.chosen)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan that was found for a proposal, or the error that says why there is none."""

    proposal: Any
    found: Found | None
    error: ShardCoreError | None = None
    seconds: float = 0.0

    @property
    def ms(self) -> float:
        """Infinite without a plan."""
        return self.found.ms if self.found else float("inf")

    @property
    def text(self) -> str:
        """The outcome for people."""
        return f"{self.proposal.words}: " + (f"{self.ms:.3f} ms" if self.found else "no plan")


class Decision:
    """A choice that is made before a search.

    name: for people, of its proposals.
    level: decisions nest by it. Devices come first, then tables, then their rows in device memory, then
      where they may live: each needs what those before it decided.
    against: decisions that it cannot be combined with, by name, and why.
    changes: what its proposals change in the problem that a plan is of. "": nothing.
    searches_all: whether proposals are searched even when time is up.
    """

    name: ClassVar[str]
    level: ClassVar[int]
    against: ClassVar[Mapping[str, str]] = {}
    changes: ClassVar[str] = ""
    searches_all: ClassVar[bool] = False

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, Outcome, None]:
        """Propose problems. Each `yield` gives the outcome of the proposal.

        model: for any problem. seconds: for all proposals together. None: no limit.

        Raises ShardCoreError for a problem that it has no proposals for.
        """
        raise NotImplementedError

    def adopt(self, proposal: Any, found: Found | None, model: CostModel) -> Found | None:
        """Make of a found plan what it is to the decision. None: there is no plan."""
        return found

    def best(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome that wins. At least one has a plan."""
        return min(outcomes, key=lambda outcome: outcome.ms)

    def because(self, outcomes: Sequence[Outcome]) -> str:
        """The reason that it wins."""
        return f"least ms of {sum(outcome.found is not None for outcome in outcomes)} with a plan"

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        """Numbers and texts on an outcome by name, for the ledger."""
        return {}


def decide(
    problem: Problem,
    model: CostModel,
    decisions: Sequence[Decision],
    search: Sharder,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    heard: Callable[[Outcome], None] = lambda outcome: None,
) -> Found:
    """The cheapest plan of all that the decisions propose, and what it is a plan of.

    The plan's provenance has the ledger.

    model: for any problem.
    search: what the proposals are searched with.
    heard: is called with each outcome of the outermost decision.

    Raises ShardCoreError for decisions that cannot be combined, and as each of them does. If no proposal has
    a plan, it raises what the search of the first raised, or Infeasible.
    """
    require_type(problem, Problem, "problem", "a Problem")
    require_model(model)
    require_type(decisions, Iterable, "decisions", "a list of decisions, such as [Groups()], or []")
    decisions = list(decisions)
    for one in decisions:
        require_type(one, Decision, "a decision", "a Decision, such as Groups()")
    require_type(search, Callable, "search", 'a sharder, such as SHARDERS["portfolio"]')
    nested = sorted(decisions, key=lambda decision: decision.level)
    for i, one in enumerate(nested):
        for other in nested[i + 1 :]:
            require(one.name != other.name, f"{one.name} were asked for twice; once is enough")
            why = one.against.get(other.name) or other.against.get(one.name)
            require(not why, f"{one.name} and {other.name} were both asked for; {why}, so leave one out")
    found = _Task(nested, search, model, seed, budget, heard).found(problem)
    if found.ledger is None:
        return found
    provenance = {**found.plan.provenance, ENTRY: asdict(found.ledger)}
    return replace(found, plan=replace(found.plan, provenance=provenance))


@dataclass(frozen=True)
class _Task:
    """Decisions on a problem that are left, and its search.

    model: for any problem.
    budget: its seconds are for all that is left.
    heard: is called with each outcome of the first decision.
    """

    decisions: Sequence[Decision]
    search: Sharder
    model: CostModel
    seed: int
    budget: Budget | None
    heard: Callable[[Outcome], None]

    def found(self, problem: Problem) -> Found:
        if self.decisions:
            return _chosen(self.decisions[0], self._outcomes(self.decisions[0], problem))
        model = self.model.for_problem(problem)
        problem.require_setting(model.setting)
        plan = self.search(problem, model, seed=self.seed, budget=self.budget)
        return Found(
            problem=problem,
            plan=plan,
            ms=plan.provenance["predicted_ms"],
            evals=plan.provenance.get("evals", 0),
        )

    def _outcomes(self, decision: Decision, problem: Problem) -> list[Outcome]:
        """The outcome of each proposal."""
        outcomes: list[Outcome] = []
        seconds, began = self.budget and self.budget.seconds, progress.clock()
        steps = decision.proposals(problem, self.model, seconds)
        proposal = next(steps, None)
        while proposal is not None:
            budget, late = self.budget, False
            if seconds is not None:
                left = seconds - (progress.clock() - began)
                budget = replace(budget, seconds=max(left, _LEAST_S) / (1 + proposal.more))
                late = left <= 0 and not decision.searches_all and any(x.found for x in outcomes)
            outcome = (
                Outcome(proposal=proposal, found=None, error=Infeasible("no time was left for it"))
                if late
                else self._outcome(decision, proposal, budget)
            )
            outcomes.append(outcome)
            self.heard(outcome)
            try:
                proposal = steps.send(outcome)
            except StopIteration:
                break
        return outcomes

    def _outcome(self, decision: Decision, proposal: Proposal, budget: Budget | None) -> Outcome:
        task = _Task(
            self.decisions[1:],
            proposal.search or self.search,
            proposal.model or self.model,
            self.seed,
            budget,
            lambda outcome: None,
        )
        began, found, error = progress.clock(), None, proposal.refused
        with progress.part(proposal.words):
            # That a proposal has no plan is an answer: others may have one.
            try:
                found = None if proposal.problem is None else task.found(proposal.problem)
            except ShardCoreError as refused:
                error = refused
            found = decision.adopt(proposal, found, task.model)
        return Outcome(
            proposal=proposal, found=found, error=None if found else error, seconds=progress.clock() - began
        )


def _chosen(decision: Decision, outcomes: Sequence[Outcome]) -> Found:
    """The choice of a decision, with its ledger. Raises ShardCoreError if no proposal has a plan."""
    if not any(outcome.found for outcome in outcomes):
        first = outcomes[0]
        if len(outcomes) == 1:
            raise first.error
        kind = Infeasible if all(isinstance(x.error, Infeasible) for x in outcomes) else type(first.error)
        raise kind(
            f"none of {len(outcomes)} proposals of {decision.name} has a plan; "
            f"{first.proposal.words}: {first.error}"
        )
    best = decision.best(outcomes)
    entries = tuple(
        Entry(
            outcome.proposal.words,
            outcome.found.ms if outcome.found else None,
            round(outcome.seconds, 3),
            outcome.found.evals if outcome.found else 0,
            str(outcome.error or ""),
            decision.facts(outcome),
            outcome.found.ledger if outcome.found else None,
        )
        for outcome in outcomes
    )
    ledger = Ledger(decision.name, best.proposal.words, decision.because(outcomes), entries)
    return replace(
        best.found, ledger=ledger, outcomes=tuple(outcomes), evals=sum(entry.evals for entry in entries)
    )
