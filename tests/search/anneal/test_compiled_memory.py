"""Annealing's own count of memory: to the byte what its plans take, of all kinds."""

import numpy as np
import pytest
from cuts import draw_all_kinds, with_memory

from shardcore.cost.analytic import AnalyticModel
from shardcore.memory import fits, used_bytes
from shardcore.search.anneal.sharder import Search, copy_of
from shardcore.search.budget import Budget
from shardcore.search.packing import roomiest
from shardcore.search.shards import priced
from shardcore.types import Problem, Setting


def model_of(problem: Problem) -> AnalyticModel:
    return AnalyticModel(Setting(problem.topology.hardware or "made-up", problem.global_batch,
                                 problem.precision, problem.optimizer))


def annealed(problem: Problem, seed: int = 0) -> Search:
    search = Search(problem, model_of(problem), Budget(evals=2000).start(), seed)
    for _ in search.rounds("all"):
        pass
    return search


def require_exact(search: Search) -> None:
    """The plan that a search found takes, and costs, what annealing counts."""
    problem = search.problem
    plan = priced(search.placements, problem, search.model)
    assert fits(plan, problem)
    # What is left is exact where it is less than nothing.
    none_free = np.full(len(problem.topology), -1e-300)
    state = copy_of(search.best.state)
    search.compiled.refresh(search.head, search.best.fixed._replace(free=none_free), state)
    assert (-state.left).tolist() == used_bytes(plan, problem)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_takes_what_annealing_counts_to_the_byte(seed, caches):
    """Every second problem has just enough memory."""
    problem = draw_all_kinds(seed, caches)
    if seed % 2:
        _, lacks = roomiest(with_memory(problem, (1,) * 4))
        problem = with_memory(problem, (int(1.02 * (lacks + 1)),) * 4)
    require_exact(annealed(problem, seed))
