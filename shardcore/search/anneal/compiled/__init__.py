"""The compiled searches: greedy construction and simulated annealing, over the engine (step/engine).

Names, and rules for functions, are those of the engine.
"""

from shardcore.search.anneal.compiled.greedy import greedy
from shardcore.search.anneal.compiled.run import anneal, refresh
from shardcore.step.engine.arrays import SearchProblem, State, empty
from shardcore.step.engine.state import place, share
from shardcore.step.engine.trial import expect_all, find_devices, put_all

__all__ = [
    "SearchProblem",
    "State",
    "anneal",
    "empty",
    "expect_all",
    "find_devices",
    "greedy",
    "place",
    "put_all",
    "refresh",
    "share",
]
