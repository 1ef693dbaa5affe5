"""Publish a plan for a problem: search one, and decide whether it replaces the published one."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from shardcore.core.errors import Infeasible, ShardCoreError, Unreachable
from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_COUNT, Count, Record, Rule, Seed, number_within, require
from shardcore.cost.model import CostModel, PricedPlan, is_less, price_plan
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import ROLLED_BACK, Decision, PlanVersion, version_name
from shardcore.plans.diff import PlanDiff, diff_plans, relabel_devices
from shardcore.plans.gain import CONFIDENCE, PlanGain, plan_gain
from shardcore.plans.replan import ReplanConfig, replan, tables_forced_to_move
from shardcore.plans.what_if import price_single_moves
from shardcore.plans.words import moves_summary, threshold_text, time_text
from shardcore.search import (
    BASELINES,
    DEFAULT_SHARDER,
    SHARDERS,
    SPACE_OF,
    compare,
    require_known_sharder,
    sharder,
)
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.budget import Budget, usable_cores
from shardcore.search.explain import Explanation, explain
from shardcore.search.learned.policy import Policy
from shardcore.search.state.shards import CONCESSION

_logger = logging.getLogger(__name__)

_FOR_TORCHREC = 4_096
"""The most tables times devices for which TorchRec's planner runs: it takes about a second for these."""
_EXPLAIN = Budget(evals=10_000)
"""Budget of each search for the alternatives on a report page."""
_EARLIER = 12
"""Earlier decisions that a page is handed."""

Page = Callable[
    [PlanVersion, Problem, Explanation, Sequence[Decision], PlanDiff | None, PlanVersion | None], str
]
"""Renderer of a plan's page: report.plan_page.published_version_page."""


def _is_folder_or_url(text: str) -> bool:
    return bool(text) and text.isprintable()


@dataclass(frozen=True)
class PublishConfig(Record):
    """Settings of the search, and of the choice between plans.

    algorithm: sharder of the published plans (docs/plan.md#search). Baselines are other sharders.
    seed: seed of the search.
    budget_evals: plans that the search may price. null: until more would bring less than 0.1%.
    threshold: least share by which a new plan must be cheaper to replace the published one. In any case its
      gain has to exceed the model's error of the difference (plans/gain.py).
    keep_versions: number of decisions per problem that keep their versions.
    max_moved_tables: tables that may move from a published plan that still fits. null: any number. Needs an
      algorithm that anneals.
    plans: the folder or object-store URL to publish in.
    torchrec_s: seconds for TorchRec's planner as a baseline, where it is installed and problems are small. 0:
      leave it out.
    processes: problems that are searched at once, each in a process of some 740 MB. null: as many as this process may
      use cores.
    """

    algorithm: str = DEFAULT_SHARDER
    seed: Seed = 0
    budget_evals: Count | None = None
    threshold: Annotated[float, number_within(0, 1, such_as="0.01")] = 0.0
    keep_versions: Annotated[int, number_within(store.FEWEST_KEPT, MOST_COUNT)] = 20
    max_moved_tables: Annotated[int | None, number_within(0, MOST_COUNT)] = None
    plans: Annotated[str, Rule(_is_folder_or_url, "it needs a folder or URL, such as 'plans'")] = "plans"
    torchrec_s: Annotated[float, number_within(0, MOST_COUNT)] = 10.0
    processes: Count | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known_sharder(self.algorithm)
        require(
            # Other sharders cannot start from a plan, so they cannot limit moves either.
            self.max_moved_tables is None or self.algorithm in SPACE_OF,
            f"publish config has max_moved_tables {self.max_moved_tables} and algorithm {self.algorithm!r}; it "
            f"needs 0 or more, and one of {', '.join(SPACE_OF)}",
        )

    @property
    def budget(self) -> Budget:
        """Budget of each search. Processes that search at once share the cores."""
        return Budget(self.budget_evals, threads=max(1, usable_cores() // (self.processes or usable_cores())))


@dataclass(frozen=True)
class PublishedPlan:
    """A problem's current plan after a decision.

    problem: the problem.
    decision: the decision.
    cost: the plan's cost under the current model.
    baselines: total ms by sharder, or its error.
    """

    problem: Problem
    decision: Decision
    cost: PredictedCost
    baselines: Mapping[str, float | str]


@dataclass(frozen=True)
class _PreviousPlan:
    """The last published plan of a problem.

    decision: the last decision.
    published: its plan, with the tables of that time. None: its files are damaged.
    plan: its plan, with the problem's current tables.
    priced: that plan under the current model. None: it is no longer valid for the problem.
    reason: the reason why it is not valid.
    """

    decision: Decision
    published: Plan | None
    plan: Plan | None
    priced: PricedPlan | None
    reason: str = ""

    def moves_to_plan(self, plan: Plan, problem: Problem) -> PlanDiff | None:
        """Moves from the previous plan to a new plan. None if the previous plan's files are damaged."""
        if self.published is None:
            return None
        return diff_plans(self.published, plan, problem, tables_forced_to_move(self.published, problem))


@dataclass(frozen=True)
class Publisher:
    """Publishes one problem after another under one model.

    model: the cost model.
    plans: the folder or URL to publish in.
    config: see PublishConfig.
    provenance: origin of model and plans. It is written into every decision.
    page: renderer of the report page.
    policy: policy of a learned algorithm.
    """

    model: CostModel
    plans: str | Path
    config: PublishConfig
    provenance: Mapping[str, Any]
    page: Page
    policy: Policy | None = None

    def __post_init__(self) -> None:
        sharder(self.config.algorithm, self.policy)  # refused here, not at the first problem

    def publish(self, problem: Problem) -> PublishedPlan:
        """Decide on the plan of one problem, and publish it. Raises Infeasible if no plan is found."""
        # Another publisher must not decide between our read and our write.
        with store.publishing_lock(self.plans, problem.name):
            previous, others = self._previous_plan(problem), self._baseline_outcomes(problem)
            restored = self._restored_decision(problem, previous)
            decision, cost = restored or self._searched_decision(problem, previous, others)
            # A run that changes nothing leaves no decision, so history stays short.
            if not decision.is_repeat_of(previous and previous.decision):
                store.record_decision(self.plans, decision)
            try:
                store.prune_versions(self.plans, problem.name, self.config.keep_versions)
            except ShardCoreError as error:
                # The decision stands. Versions that are not needed harm nobody.
                _logger.warning("problem %r: old versions stay for now: %s", problem.name, error)
        return PublishedPlan(problem, decision, cost, _total_ms_by_sharder(others))

    def _previous_plan(self, problem: Problem) -> _PreviousPlan | None:
        """Last published plan of a problem, priced under the current model; None if nothing was published."""
        decision = store.last_decision(self.plans, problem.name)
        if decision is None:
            return None
        # A plan that no longer fits is loaded too: the decision says why it is replaced.
        published = plan = None
        try:
            published = store.read_plan(self.plans, problem.name)[0]
            plan = rebind_tables(published, problem)
            return _PreviousPlan(decision, published, plan, price_plan(plan, problem, self.model))
        # A store that is not reached says nothing of the plan, so publishing stops.
        except Unreachable:
            raise
        except ShardCoreError as error:
            return _PreviousPlan(decision, published, plan, None, str(error))

    def _make_decision(self, problem: Problem, previous: _PreviousPlan | None, **fields: Any) -> Decision:
        """Decision from `fields` and from those fields that all decisions of this publisher share."""
        return Decision(
            problem=problem.name,
            problem_digest=files.problem_digest(problem),
            previous_ms=previous.priced.cost.total_ms if previous and previous.priced else None,
            threshold=self.config.threshold,
            decided_at=time.time(),
            parent=previous.decision.id if previous else None,
            provenance=dict(self.provenance),
            **fields,
        )

    # --- the earlier plan under this model ----------------------------------------------------------------

    def _restored_decision(
        self, problem: Problem, previous: _PreviousPlan | None
    ) -> tuple[Decision, PredictedCost] | None:
        """Decision to restore the plan that was current under the same model version before, with its cost; None
        without one.

        It must be of the same problem, and its version must still be stored.
        """
        now = _model_identity(self.provenance), files.problem_digest(problem)
        # Same model as last time: nothing to roll back to.
        if previous is None or _model_identity(previous.decision.provenance) == now[0]:
            return None
        # A rollback of the champion brings back its plan instead of a new search.
        recent = islice(store.decision_history(self.plans, problem.name), self.config.keep_versions)
        then = next((x for x in recent if (_model_identity(x.provenance), x.problem_digest) == now), None)
        if then is None:
            return None
        # The version may have been pruned, or be invalid for today's problem: search then.
        try:
            plan, _ = store.read_plan(self.plans, problem.name, then.current)
            cost = price_plan(rebind_tables(plan, problem), problem, self.model).cost
        except ShardCoreError:
            return None
        decision = self._make_decision(
            problem,
            previous,
            outcome="restored",
            reason=f"the model is version {self.provenance['model_version']} again, under which this plan was "
            f"current on {time_text(then.decided_at)}",
            current=then.current,
            candidate=then.current,
            candidate_ms=cost.total_ms,
        )
        return decision, cost

    # --- a new plan --------------------------------------------------------------------------------------

    def _searched_decision(
        self, problem: Problem, previous: _PreviousPlan | None, others: Mapping[str, compare.SharderOutcome]
    ) -> tuple[Decision, PredictedCost]:
        """Decision between a newly searched plan and the published one, and the cost of the chosen plan."""
        candidate = self._candidate_plan(problem, previous, others)
        outcome, reason, gained, chosen = "first", "no plan was published for this problem", None, candidate
        if previous and previous.priced:
            # The gain counts only against a plan that is still valid.
            gained = plan_gain(previous.priced, candidate, problem, self.model)
            outcome, reason = self._judge_candidate(candidate.plan, previous, gained, problem)
            if outcome == "better" and (why := self._rollback_reason(candidate.plan, problem)):
                outcome, reason = "kept", f"the plan that the search finds was rolled back: {why}"
            chosen = previous.priced if outcome == "kept" else candidate
        elif previous:
            outcome, reason = "no longer fits", f"of the plan before: {previous.reason}"
        decision = self._make_decision(
            problem,
            previous,
            outcome=outcome,
            reason=reason,
            # The old plan for the problem as it is now: the same version where that has not changed.
            current=store.plan_version(chosen.plan, problem),
            candidate=store.plan_version(candidate.plan, problem),
            candidate_ms=candidate.cost.total_ms,
            margin_ms=gained and gained.margin_ms,
        )
        # Versions before the decision: a decision must not name what is not stored.
        for version, plan in {decision.candidate: candidate, decision.current: chosen}.items():
            self._store_version(problem, plan, version, decision, previous, others)
        return decision, chosen.cost

    def _baseline_outcomes(self, problem: Problem) -> dict[str, compare.SharderOutcome]:
        """Plans to compare with, by sharder: of BASELINES, NeuroShard's beam, and TorchRec's planner if it may run."""
        budgets: dict[str, Budget | None] = {
            **dict.fromkeys(BASELINES),
            "neuroshard": self.config.budget,
        }
        # Its enumeration grows with tables times devices.
        if (
            "torchrec" in SHARDERS
            and self.config.torchrec_s
            and len(problem.tables) * len(problem.topology) <= _FOR_TORCHREC
        ):
            budgets["torchrec"] = Budget(seconds=self.config.torchrec_s)
        # Our own algorithm is no baseline of itself.
        budgets.pop(self.config.algorithm, None)
        outcomes = {}
        for name, budget in budgets.items():
            try:
                outcomes[name] = compare.run_sharder(name, problem, self.model, self.config.seed, budget)
            except ShardCoreError as error:
                # A failure of a baseline must not keep our plan from being published.
                outcomes[name] = compare.SharderOutcome(name, 0.0, error=str(error))
        return outcomes

    def _candidate_plan(
        self, problem: Problem, previous: _PreviousPlan | None, others: Mapping[str, compare.SharderOutcome]
    ) -> PricedPlan:
        """Plan by the config's algorithm, with the publisher's provenance; or the published plan if no other is found.

        A baseline's plan is taken where it is cheaper by more than CONCESSION, unless moves are limited.

        Annealing starts from the published plan, if there is one. So noise of the search does not look like
        an improvement, and few tables move when some are new.
        """
        config = self.config
        old, replanned, space = previous and previous.plan, None, SPACE_OF.get(config.algorithm)
        if previous and old and space:
            try:
                replanned = replan(
                    old,
                    problem,
                    self.model,
                    ReplanConfig(
                        config.max_moved_tables,
                        space=space,
                        seed=config.seed,
                        budget=config.budget,
                    ),
                )
            except ShardCoreError:
                # A limit on moves from a plan that no longer fits means nothing.
                if previous.priced or config.max_moved_tables is None:
                    raise

        def price_or_previous(plan: Plan) -> PricedPlan:
            # The same placements keep their provenance, hence their version.
            if previous and previous.priced and set(plan.placements) == set(previous.priced.plan.placements):
                return previous.priced
            return price_plan(plan, problem, self.model)

        algorithm = config.algorithm
        if replanned:
            found = price_or_previous(replanned)
        else:
            outcome = compare.run_sharder(
                algorithm, problem, self.model, config.seed, config.budget, self.policy
            )
            if outcome.priced is None:
                raise Infeasible(outcome.error or f"{algorithm} finds no plan")
            found = outcome.priced
        # A greedy order or another baseline that is asked for by name is published as it is.
        may_take_baseline = space and not (old and config.max_moved_tables is not None)
        for name, other in others.items() if may_take_baseline else ():
            # The search gave up as much for a simpler plan.
            if other.priced and is_less(other.priced.cost.total_ms, found.cost.total_ms, CONCESSION):
                found, algorithm = other.priced, name
        if old and not (replanned and algorithm == config.algorithm):
            # A fresh search ignores where tables were, so devices are renumbered to move less.
            found = price_or_previous(relabel_devices(found.plan, old, problem))
        if found.plan is old:
            return found
        # Signed with the origin of model and data, which is part of the version.
        origin = {**found.plan.provenance, **self.provenance, "algorithm": algorithm}
        return dataclasses.replace(found, plan=Plan(found.plan.placements, origin))

    def _judge_candidate(
        self, plan: Plan, previous: _PreviousPlan, gained: PlanGain, problem: Problem
    ) -> tuple[str, str]:
        """Outcome of a candidate plan, "better" or "kept", with the reason. gained: over a plan that is still valid."""
        if plan is previous.plan:
            return "kept", "the search finds no other plan"
        moves, is_better = previous.moves_to_plan(plan, problem), gained.exceeds_margin(self.config.threshold)
        return "better" if is_better else "kept", (
            f"{gained} at {CONFIDENCE:.0%} confidence{threshold_text(self.config.threshold)}: "
            f"{'replaced' if is_better else 'kept'}; {gained.before_ms - gained.ms:.3f} ms instead of "
            f"{gained.before_ms:.3f} ms; {moves_summary(moves) if moves else ''}"
        )

    def _rollback_reason(self, plan: Plan, problem: Problem) -> str:
        """Reason why a job rolled back a plan with the same placements; "" if no job did."""
        for decision in (
            x for x in store.decision_history(self.plans, problem.name) if x.outcome == ROLLED_BACK
        ):
            try:
                measured, _ = store.read_plan(self.plans, problem.name, decision.candidate)
            except ShardCoreError:  # pruned
                continue
            # Placements only: the same plan may come from another search.
            if set(measured.placements) == set(plan.placements):
                return decision.reason
        return ""

    def _store_version(
        self,
        problem: Problem,
        priced: PricedPlan,
        version: str,
        decision: Decision,
        previous: _PreviousPlan | None,
        others: Mapping[str, compare.SharderOutcome],
    ) -> None:
        """Store a plan as a version with its report page, unless the version is stored already."""
        # Immutable versions: one that is whole is never written again.
        if store.is_version_intact(self.plans, problem.name, version):
            return
        cost = priced.cost
        page = self.page(
            dataclasses.replace(
                _stored_version(version, priced), what_if=price_single_moves(priced, problem, self.model)
            ),
            problem,
            # Explaining searches alternatives, so it runs only for a new version.
            explain(priced, problem, self.model, _EXPLAIN, others),
            [decision, *islice(store.decision_history(self.plans, problem.name), _EARLIER)],
            previous.moves_to_plan(priced.plan, problem) if previous else None,
            _stored_version(previous.decision.current, previous.priced)
            if previous and previous.priced
            else None,
        )
        numbers = {
            "predicted": dataclasses.asdict(cost),
            "total_ms": cost.total_ms,
            "memory_bytes": list(priced.workload.memory_bytes),
            "baselines": _total_ms_by_sharder(others),
            "extrapolated": list(cost.extrapolated),
        }
        store.add_version(self.plans, problem, priced.plan, numbers, page)


def _stored_version(version: str, priced: PricedPlan) -> PlanVersion:
    return PlanVersion(version_name(version), priced.plan, priced.cost, priced.workload.memory_bytes)


def _model_identity(provenance: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identity of a cost model in a provenance: name, version and data. Each registry counts versions from 1."""
    return tuple(provenance.get(key) for key in ("model", "model_version", "data"))


def _total_ms_by_sharder(outcomes: Mapping[str, compare.SharderOutcome]) -> dict[str, float | str]:
    return {name: o.cost.total_ms if o.cost else o.error or "" for name, o in outcomes.items()}
