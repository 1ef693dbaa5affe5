"""Publish a plan for a problem: search one, and decide whether it replaces the published one."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardcore.core.errors import Infeasible, ShardCoreError, Unreachable
from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_COUNT, MOST_MS, MOST_SEED, require_within
from shardcore.cost.model import CostModel, PricedPlan, price_plan
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import Decision, Version, version_name
from shardcore.plans.diff import Diff, diff, relabel_devices
from shardcore.plans.gain import CONFIDENCE, Gain, gain
from shardcore.plans.replan import ReplanConfig, forced_moves, replan
from shardcore.plans.words import moves_text, threshold_words, when
from shardcore.search import BASELINES, DEFAULT_SHARDER, SHARDERS, SPACE_OF, compare, known, sharder
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.budget import Budget
from shardcore.search.explain import Explanation, explain
from shardcore.search.learned.policy import Policy

_logger = logging.getLogger(__name__)

_FOR_TORCHREC = 4_096
"""The most tables times devices for which TorchRec's planner runs: it takes about a second for these."""
_EXPLAIN = Budget(evals=10_000)
"""Budget of each search for the alternatives on a report page."""
_EARLIER = 12
"""Earlier decisions that a page is handed."""

Page = Callable[[Version, Problem, Explanation, Sequence[Decision], Diff | None, Version | None], str]
"""Renderer of a plan's page: report.plan_page.page."""


@dataclass(frozen=True)
class PublishConfig:
    """What is searched, and which plans are published.

    algorithm: sharder of the published plans. Baselines are other sharders.
    seed: of the search.
    budget_evals: plans that the search may price.
    threshold: least share by which a new plan must be cheaper to replace the published one. In any case its
      gain has to exceed the model's error of the difference (see gain).
    keep_versions: how many decisions per problem keep their versions.
    max_moved_tables: how many tables may move from a published plan that still fits. null: any number. Needs
      an algorithm that anneals.
    plans: the folder or object-store URL to publish in.
    torchrec_s: seconds for TorchRec's planner as a baseline, where it is installed and problems are small. 0:
      leave it out.
    """

    algorithm: str = DEFAULT_SHARDER
    seed: int = 0
    budget_evals: int = 200_000
    threshold: float = 0.0
    keep_versions: int = 20
    max_moved_tables: int | None = None
    plans: str = "plans"
    torchrec_s: float = 10.0

    def __post_init__(self) -> None:
        known(self.algorithm)
        require_within(
            self,
            "publish config",
            budget_evals=(1, MOST_COUNT),
            seed=(0, MOST_SEED),
            keep_versions=(store.FEWEST_KEPT, MOST_COUNT),
            max_moved_tables=(0, MOST_COUNT),
            torchrec_s=(0, MOST_MS),
        )
        if not self.plans or not self.plans.isprintable():
            raise ShardCoreError(
                f"publish config has plans {self.plans!r}; it needs a folder or URL, such as 'plans'"
            )
        if not 0 <= self.threshold < 1:
            raise ShardCoreError(
                f"publish config has threshold {self.threshold}; it needs a share within 0 and 1, such as 0.01"
            )
        if self.max_moved_tables is not None and not SPACE_OF.get(self.algorithm):
            raise ShardCoreError(
                f"publish config has max_moved_tables {self.max_moved_tables} and algorithm "
                f"{self.algorithm!r}; it needs 0 or more, and one of {', '.join(SPACE_OF)}"
            )


@dataclass(frozen=True)
class Published:
    """A problem's current plan after a decision.

    problem: the problem.
    decision: the decision.
    cost: the plan's cost under the current model.
    baselines: total ms by sharder, or why it found no plan.
    """

    problem: Problem
    decision: Decision
    cost: PredictedCost
    baselines: Mapping[str, float | str]


@dataclass(frozen=True)
class Before:
    """What was published for a problem before.

    decision: the last one.
    published: its plan, with the tables of that time. None: its files are of no use any more.
    plan: its plan, with the problem's current tables.
    priced: the latter under the current model. None: it is no longer valid for the problem.
    why_not: why it is no longer valid, or of no use.
    """

    decision: Decision
    published: Plan | None
    plan: Plan | None
    priced: PricedPlan | None
    why_not: str = ""

    @property
    def total_ms(self) -> float | None:
        return self.priced.cost.total_ms if self.priced else None

    def moves(self, plan: Plan, problem: Problem) -> Diff | None:
        """The moves from it to a plan. None: it is of no use any more."""
        if self.published is None:
            return None
        return diff(self.published, plan, problem, forced_moves(self.published, problem))


@dataclass(frozen=True)
class Publisher:
    """Publishes one problem after another under one model.

    model: the cost model.
    plans: the folder or URL to publish in.
    config: see PublishConfig.
    provenance: where model and plans come from. It is written into every decision.
    page: renderer of the report page.
    policy: what a learned algorithm places with.
    """

    model: CostModel
    plans: str | Path
    config: PublishConfig
    provenance: Mapping[str, Any]
    page: Page
    policy: Policy | None = None

    def __post_init__(self) -> None:
        sharder(self.config.algorithm, self.policy)  # refused here, not at the first problem

    def publish(self, problem: Problem) -> Published:
        """Decide on one problem's plan. Raises Infeasible if no plan is found."""
        # Another publisher must not decide between our read and our write.
        with store.turn(self.plans, problem.name):
            before = self._before(problem)
            published = self._restored(problem, before) or self._searched(problem, before)
            # A run that changes nothing leaves no decision, so history stays short.
            if not published.decision.repeats(before and before.decision):
                store.record(self.plans, published.decision)
            try:
                store.prune(self.plans, problem.name, self.config.keep_versions)
            except ShardCoreError as error:
                # The decision stands. Versions that are not needed harm nobody.
                _logger.warning("problem %r: old versions stay for now: %s", problem.name, error)
        return published

    def _before(self, problem: Problem) -> Before | None:
        decision = store.last(self.plans, problem.name)
        if decision is None:
            return None
        # A plan that no longer fits is loaded too: the decision says why it is replaced.
        published = plan = None
        try:
            published = store.read_plan(self.plans, problem.name)[0]
            plan = rebind_tables(published, problem)
            return Before(decision, published, plan, price_plan(plan, problem, self.model))
        except Unreachable:
            raise
        except ShardCoreError as error:
            return Before(decision, published, plan, None, str(error))

    def _decision(self, problem: Problem, before: Before | None, **made: Any) -> Decision:
        """A decision with the fields that all share. made: the other fields."""
        return Decision(
            problem=problem.name,
            problem_digest=files.problem_digest(problem),
            previous_ms=before and before.total_ms,
            threshold=self.config.threshold,
            decided_at=time.time(),
            parent=before and before.decision.id,
            provenance=dict(self.provenance),
            **made,
        )

    # --- the plan that there was under this model --------------------------------------------------------

    def _restored(self, problem: Problem, before: Before | None) -> Published | None:
        """The plan that was current when this model version was champion before. None: no such plan.

        It must be of the same problem, and its version must still be stored.
        """

        def model_of(x: Decision) -> tuple[Any, Any]:
            return x.provenance.get("model"), x.provenance.get("model_version")

        mine = self.provenance["model"], self.provenance["model_version"]
        # Same model as last time: nothing to roll back to.
        if before is None or model_of(before.decision) == mine:
            return None
        # A rollback of the champion brings back its plan instead of a new search.
        then = next(
            (
                x
                for x in islice(store.history(self.plans, problem.name), self.config.keep_versions)
                if model_of(x) == mine and x.problem_digest == files.problem_digest(problem)
            ),
            None,
        )
        if then is None or not store.has(self.plans, problem.name, then.current):
            return None
        try:
            plan, _ = store.read_plan(self.plans, problem.name, then.current)
            cost = price_plan(rebind_tables(plan, problem), problem, self.model).cost
        except ShardCoreError:
            return None
        reason = f"the model is version {mine[1]} again, under which this plan was current on {when(then.decided_at)}"
        decision = self._decision(
            problem,
            before,
            outcome="restored",
            reason=reason,
            current=then.current,
            candidate=then.current,
            candidate_ms=cost.total_ms,
        )
        return Published(problem, decision, cost, _totals(self._others(problem)))

    # --- a new plan --------------------------------------------------------------------------------------

    def _searched(self, problem: Problem, before: Before | None) -> Published:
        others, found = self._others(problem), self._search(problem, before)
        gained = gain(before.priced, found, problem, self.model) if before and before.priced else None
        outcome, reason = self._judged(found.plan, before, gained, problem)
        candidate = store.version_of(found.plan, problem)
        current = store.version_of(before.plan, problem) if outcome == "kept" else candidate
        decision = self._decision(
            problem,
            before,
            outcome=outcome,
            reason=reason,
            current=current,
            candidate=candidate,
            candidate_ms=found.cost.total_ms,
            margin_ms=gained and gained.margin_ms,
        )
        self._add(problem, found, candidate, decision, before, others)
        if current != candidate:
            # The old plan for the problem as it is now: the same version where that has not changed.
            found = before.priced
            self._add(problem, found, current, decision, before, others)
        return Published(problem, decision, found.cost, _totals(others))

    def _others(self, problem: Problem) -> dict[str, compare.Outcome]:
        """Plans to compare with: by BASELINES, NeuroShard's beam, and TorchRec's planner if it may run."""
        budget = Budget(evals=self.config.budget_evals)
        asked: dict[str, Budget | None] = {**dict.fromkeys(BASELINES), "neuroshard": budget}
        if (
            "torchrec" in SHARDERS
            and self.config.torchrec_s
            and len(problem.tables) * len(problem.topology) <= _FOR_TORCHREC
        ):
            asked["torchrec"] = Budget(seconds=self.config.torchrec_s)
        return {
            name: self._compared(name, problem, budget)
            for name, budget in asked.items()
            if name != self.config.algorithm
        }

    def _compared(self, name: str, problem: Problem, budget: Budget | None) -> compare.Outcome:
        try:
            return compare.run(name, problem, self.model, self.config.seed, budget)
        except ShardCoreError as error:
            # What a baseline cannot plan must not keep ours from being published.
            return compare.Outcome(name, 0.0, error=str(error))

    def _search(self, problem: Problem, before: Before | None) -> PricedPlan:
        """A plan by the config's algorithm, with the publisher's provenance, or the one that there is.

        Annealing starts from the published plan, if there is one.

        So noise of the search does not look like an improvement, and few tables move when some are new.
        """
        config, budget = self.config, Budget(evals=self.config.budget_evals)
        if before and before.plan and (space := SPACE_OF.get(config.algorithm)):
            try:
                plan = replan(
                    before.plan,
                    problem,
                    self.model,
                    ReplanConfig(config.max_moved_tables, space=space, seed=config.seed, budget=budget),
                )
                return self._priced(plan, problem, before)
            except ShardCoreError:
                # What no longer fits gives way to any plan: a limit on what moves from it means nothing.
                if before.priced or config.max_moved_tables is None:
                    raise
        outcome = compare.run(config.algorithm, problem, self.model, config.seed, budget, self.policy)
        if outcome.plan is None:
            raise Infeasible(outcome.error)
        if before and before.plan:
            return self._priced(relabel_devices(outcome.plan, before.plan, problem), problem, before)
        return dataclasses.replace(outcome.priced, plan=self._signed(outcome.plan))

    def _priced(self, plan: Plan, problem: Problem, before: Before) -> PricedPlan:
        """A plan that was searched. The same placements keep their provenance, hence their version."""
        if before.priced and set(plan.placements) == set(before.plan.placements):
            return before.priced
        return price_plan(self._signed(plan), problem, self.model)

    def _signed(self, plan: Plan) -> Plan:
        return Plan(plan.placements, {**plan.provenance, **self.provenance})

    def _judged(
        self, plan: Plan, before: Before | None, gained: Gain | None, problem: Problem
    ) -> tuple[str, str]:
        """The outcome of a candidate, and why. gained: over a plan before that is still valid."""
        if before is None:
            return "first", "no plan was published for this problem"
        if gained is None:
            return "no longer fits", f"of the plan before: {before.why_not}"
        if plan is before.plan:
            return "kept", "the search finds no other plan"
        better, threshold = gained.worth_it(self.config.threshold), self.config.threshold
        return "better" if better else "kept", (
            f"{gained} at {CONFIDENCE:.0%} confidence{threshold_words(threshold)}: "
            f"{'replaced' if better else 'kept'}; {gained.before_ms - gained.ms:.3f} ms instead of "
            f"{gained.before_ms:.3f} ms; {moves_text(before.moves(plan, problem))}"
        )

    def _add(
        self,
        problem: Problem,
        priced: PricedPlan,
        version: str,
        decision: Decision,
        before: Before | None,
        others: Mapping[str, compare.Outcome],
    ) -> None:
        """Store a plan as a version with its report page, unless it is stored already."""
        if store.is_whole(self.plans, problem.name, version):
            return
        plan, cost, memory_bytes = priced.plan, priced.cost, priced.workload.memory_bytes
        decisions = [decision, *islice(store.history(self.plans, problem.name), _EARLIER)]
        # Explaining searches alternatives, so it runs only for a new version.
        explained = explain(priced, problem, self.model, _EXPLAIN, others)
        page = self.page(
            Version(version_name(version), plan, cost, memory_bytes),
            problem,
            explained,
            decisions,
            before and before.moves(plan, problem),
            _version(before),
        )
        store.add(
            self.plans,
            problem,
            plan,
            {
                "predicted": dataclasses.asdict(cost),
                "total_ms": cost.total_ms,
                "memory_bytes": list(memory_bytes),
                "baselines": _totals(others),
                "extrapolated": list(cost.extrapolated),
            },
            page,
        )


def _version(before: Before | None) -> Version | None:
    """What was published before, to compare with. None: it is of no use any more."""
    if before is None or before.priced is None:
        return None
    return Version(
        version_name(before.decision.current),
        before.plan,
        before.priced.cost,
        before.priced.workload.memory_bytes,
    )


def _totals(outcomes: Mapping[str, compare.Outcome]) -> dict[str, float | str]:
    return {name: o.cost.total_ms if o.cost else o.error for name, o in outcomes.items()}
