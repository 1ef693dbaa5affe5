"""Conformance classes as others subclass them: for a sharder, cost models and decisions."""

from dataclasses import replace

import pytest
from laws import by_hand

from shardcore import SHARDERS, Constraints, ShardCoreError
from shardcore.core.links import make_links
from shardcore.cost.profile import load_profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.search.decisions.groups import Groups
from shardcore.search.decisions.memory_tiers import MemoryTiers
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.testing import CostModelConformance, DecisionConformance, SharderConformance
from shardcore.testing.problems import problem_with_slack, small_problem_model


class TestSharder(SharderConformance):
    name = "size_greedy"
    drawn = 2

    def search(self, problem, model, *, seed=0, budget=None):
        return SHARDERS["size_greedy"](problem, model, seed=seed, budget=budget)


class TestAnalyticModel(CostModelConformance):
    def model(self):
        return small_problem_model(self.problem())


class TestNeuralModel(CostModelConformance):
    def model(self):
        return by_hand()

    def problem(self):
        roomy = problem_with_slack(0, 4, 40.0)
        linked = replace(roomy.topology, links=make_links(within_host=100.0))
        return replace(roomy, topology=linked, global_batch=by_hand().setting.batch)


class TestGroups(DecisionConformance):
    def decision(self):
        return Groups(2)


class TestRowDomains(DecisionConformance):
    proposes_as_is = True

    def decision(self):
        return RowDomains()

    def problem(self):
        roomy = problem_with_slack(0, 4, 40.0)
        hosts = ("p/a", "p/b", "q/c", "q/d")
        devices = tuple(replace(d, host=h) for d, h in zip(roomy.topology.devices, hosts, strict=True))
        return replace(roomy, topology=replace(roomy.topology, devices=devices))


class TestTiers(DecisionConformance):
    def decision(self):
        return MemoryTiers()


class Dear(type(small_problem_model(problem_with_slack(0, 2, 4.0)))):
    """A model whose heads of one and of several ops disagree."""

    def op_ms(self, sums):
        return super().op_ms(sums) * len(sums)


def test_a_broken_model_is_noticed():
    class Suite(CostModelConformance):
        def model(self):
            return Dear(small_problem_model(self.problem()).setting)

    with pytest.raises(AssertionError):
        Suite().test_op_times_agree_for_one_op_many_ops_and_compiled_code()


class Cheaper(ProfileModel):
    """A model whose exchanges take less than its terms say."""

    def comm_cost(self, traffic, compute_ms, topology):
        return super().comm_cost(0.9 * traffic, compute_ms, topology)


def test_exchanges_that_are_not_as_their_terms_say_are_noticed():
    class Suite(CostModelConformance):
        def model(self):
            honest = load_profile("cpu").cost_model()
            return Cheaper(honest.profile, honest.setting)

    with pytest.raises(AssertionError, match="all_to_all"):
        Suite().test_exchanges_are_as_the_model_for_bounds_says()


def test_a_sharder_that_ignores_pins_is_noticed():
    class Suite(TestSharder):
        def search(self, problem, model, *, seed=0, budget=None):
            free = replace(problem, constraints=Constraints())
            return super().search(free, model, seed=seed, budget=budget)

    with pytest.raises(ShardCoreError, match="pinned"):
        Suite().test_plans_are_valid_and_say_where_they_come_from()
