"""The compiled searches: greedy construction and simulated annealing, over the engine (step/engine).

Names, and rules for functions, are those of the engine.
"""

from shardcore.search.anneal.compiled.greedy import place_greedily
from shardcore.search.anneal.compiled.run import anneal, refresh_state
from shardcore.step.engine.arrays import SearchProblem, State, empty_state
from shardcore.step.engine.state import place_shards, share_items
from shardcore.step.engine.trial import find_feasible_devices, prepare_plans, put_shards

__all__ = [
    "SearchProblem",
    "State",
    "anneal",
    "empty_state",
    "find_feasible_devices",
    "place_greedily",
    "place_shards",
    "prepare_plans",
    "put_shards",
    "refresh_state",
    "share_items",
]
