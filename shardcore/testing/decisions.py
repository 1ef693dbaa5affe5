"""Conformance suite for decisions: what every decision before a search has to fulfil."""

from __future__ import annotations

import json
import math

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search import SHARDERS, Budget, Sharder
from shardcore.search.decisions.driver import ENTRY, Decision, FoundPlan, ProposalOutcome, decide
from shardcore.testing.plans import check_plan
from shardcore.testing.problems import problem_with_slack, small_problem_model
from shardcore.testing.sharders import require_error


class DecisionConformance:
    """Promises of a decision. Subclasses define `decision`, and `problem` if it needs one of some kind.

    proposes_as_is: one proposal is the problem unchanged, so no plan becomes dearer.
    """

    search: Sharder = staticmethod(SHARDERS["size_greedy"])
    proposes_as_is = False

    def decision(self) -> Decision:
        raise NotImplementedError

    def problem(self) -> Problem:
        return problem_with_slack(0, 4, 4.0)

    def model(self) -> CostModel:
        return small_problem_model(self.problem())

    def _decide_and_record(self) -> tuple[FoundPlan, list[ProposalOutcome]]:
        heard: list[ProposalOutcome] = []
        budget = Budget(evals=100)
        found = decide(
            self.problem(), self.model(), [self.decision()], self.search, budget=budget, heard=heard.append
        )
        return found, heard

    def test_the_plan_fits_the_problem_that_comes_with_it(self) -> None:
        found, heard = self._decide_and_record()
        check_plan(found.plan, found.problem)
        assert found.chosen_proposal in [outcome.proposal for outcome in heard]
        assert 0 < found.ms < math.inf

    def test_proposals_have_words_and_refused_ones_a_reason(self) -> None:
        _, heard = self._decide_and_record()
        words = [outcome.proposal.words for outcome in heard]
        assert all(words) and len(set(words)) == len(words)
        for outcome in heard:
            assert outcome.found or outcome.error, outcome.proposal.words
            assert outcome.proposal.problem or outcome.proposal.refused, outcome.proposal.words

    def test_the_ledger_goes_into_the_plan(self) -> None:
        found, heard = self._decide_and_record()
        ledger = found.plan.provenance[ENTRY]
        assert json.loads(json.dumps(ledger, allow_nan=False))["decision"] == self.decision().name
        assert ledger["chosen"] in [outcome.proposal.words for outcome in heard]

    def test_the_same_seed_decides_the_same(self) -> None:
        (first, _), (second, _) = self._decide_and_record(), self._decide_and_record()
        assert (first.plan, first.problem, first.ms) == (second.plan, second.problem, second.ms)

    def test_no_plan_becomes_dearer(self) -> None:
        if self.proposes_as_is:
            as_it_is = decide(self.problem(), self.model(), [], self.search, budget=Budget(evals=100))
            assert self._decide_and_record()[0].ms <= as_it_is.ms

    def test_the_same_decision_twice_is_refused(self) -> None:
        twice = [self.decision(), self.decision()]
        require_error(ShardCoreError, lambda: decide(self.problem(), self.model(), twice, self.search))
