"""Searches use the cores that they may, and plans do not depend on how many these are."""

import threading

import pytest
from shapes import on_hosts

from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import report_to_listener
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal import compiled
from shardcore.testing.problems import draw_random_problem, small_problem_model

GIB = 1 << 30


def several() -> Problem:
    """Eight devices on two hosts, and 30 tables, one of them hot."""
    tables = (
        Table("hot", 1_000_000, 64, 300.0),
        *(Table(f"t{i}", 10_000 * (i + 1), 32, 10.0) for i in range(29)),
    )
    return Problem("several", tables, on_hosts("aaaabbbb", GIB), 8192)


def gpu(problem: Problem) -> AnalyticModel:
    return AnalyticModel(Setting("gpu", problem.global_batch))


@pytest.fixture
def cooled(monkeypatch):
    """The thread of each stage of annealing. No two threads may work on one plan at a time."""
    calls, in_work, anneal = [], set(), compiled.anneal

    def noted(head, problem, state, trials, *temperatures):
        # The first word is an address of the plan's arrays.
        plan = int(state[0])
        assert plan not in in_work
        calls.append(threading.get_ident())
        in_work.add(plan)
        found = anneal(head, problem, state, trials, *temperatures)
        in_work.remove(plan)
        return found

    monkeypatch.setattr(compiled, "anneal", noted)
    return calls


@pytest.mark.parametrize("algorithm", ["portfolio", "anneal", "anneal_columns"])
def test_evaluations_give_one_plan_on_any_number_of_threads(algorithm):
    for problem, model in (
        (several(), gpu(several())),
        (tight := draw_random_problem(3, 14, [4 << 20] * 4), small_problem_model(tight)),
    ):
        plans = [
            SHARDERS[algorithm](problem, model, seed=5, budget=Budget(evals=6_000, threads=n))
            for n in (1, 2, 7)
        ]
        assert plans[0] == plans[1] == plans[2]
        assert plans[0].provenance["evals"] <= 6_000


def test_each_thread_anneals_plans_of_its_own_and_none_is_idle(cooled):
    """Eight threads, on however few cores."""
    problem = several()
    SHARDERS["anneal"](problem, gpu(problem), budget=Budget(seconds=4.0, threads=8))
    assert len(set(cooled) - {threading.get_ident()}) >= 8


def test_an_interrupt_ends_all_threads_within_a_stage():
    problem, before = several(), threading.active_count()

    def interrupted(phase, best_ms, left_s):
        if phase == "annealing" and threading.active_count() > before:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), report_to_listener(interrupted):
        SHARDERS["anneal"](problem, gpu(problem), budget=Budget(evals=10**9, threads=2))
    assert threading.active_count() == before


def test_an_error_of_a_thread_reaches_the_caller(monkeypatch):
    problem = several()

    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(compiled, "anneal", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        SHARDERS["anneal"](problem, gpu(problem), budget=Budget(evals=20_000, threads=3))


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2"])
def test_a_number_of_threads_that_makes_no_sense_is_named(threads):
    with pytest.raises(ShardCoreError, match=f"threads.*{threads}"):
        Budget(threads=threads)
