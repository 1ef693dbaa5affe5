"""Annealing's own count of memory: to the byte what its plans take, of all kinds."""

from dataclasses import replace

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


def in_one_collection(problem: Problem) -> Problem:
    """The problem with the tables of its bundle in one collection: annealing knows bundles as one op."""
    [group] = problem.constraints.together
    return replace(problem, tables=tuple(
        replace(t, sequence=False, collection="left") if t.name in group else t for t in problem.tables))


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_takes_what_annealing_counts_to_the_byte(seed):
    """Every second problem has just enough memory."""
    problem = in_one_collection(draw_all_kinds(seed))
    if seed % 2:
        _, lacks = roomiest(with_memory(problem, (1,) * 4))
        problem = with_memory(problem, (int(1.02 * (lacks + 1)),) * 4)
    model = AnalyticModel(Setting(problem.topology.hardware or "made-up", problem.global_batch,
                                  optimizer=problem.optimizer))
    search = Search(problem, model, Budget(evals=2000).start(), seed)
    for _ in search.rounds("all"):
        pass
    plan = priced(search.placements, problem, model)
    assert fits(plan, problem)
    # What is left is exact where it is less than nothing.
    none_free = np.full(len(problem.topology), -1e-300)
    state = copy_of(search.best.state)
    search.compiled.refresh(search.head, search.best.fixed._replace(free=none_free), state)
    assert (-state.left).tolist() == used_bytes(plan, problem)
