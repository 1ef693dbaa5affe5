"""Conformance: what sharders, cost models and decisions have to keep, as classes that a test file subclasses.

    class TestMine(SharderConformance):
        name = "mine"

        def search(self, problem, model, *, seed=0, budget=None):
            return my_sharder(problem, model, seed=seed, budget=budget)

pytest then runs every method whose name begins with `test`. Each raises AssertionError for a broken promise.
Problems are drawn from fixed seeds, so a suite does not turn red by chance.
"""

from shardcore.testing.cost_models import CostModelConformance
from shardcore.testing.decisions import DecisionConformance
from shardcore.testing.plans import check_plan
from shardcore.testing.sharders import SharderConformance

__all__ = ["CostModelConformance", "DecisionConformance", "SharderConformance", "check_plan"]
