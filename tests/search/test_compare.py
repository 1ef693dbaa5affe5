"""Outcomes of sharders."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from shardcore.core import progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, compare, require_known_sharder


def solvable(tables) -> tuple[Problem, AnalyticModel]:
    problem = Problem("p", tables, Topology((Device(1 << 26),) * 2), 240)
    return problem, AnalyticModel(Setting("test", 240))


def test_an_outcome_has_a_plan_or_says_why_there_is_none(tables):
    problem, model = solvable(tables)
    outcome = compare.run_sharder("random", problem, model)
    assert outcome.plan and outcome.cost and outcome.error is None
    none = compare.run_sharder("size_greedy", replace(problem, topology=Topology((Device(1),) * 2)), model)
    assert none.plan is none.cost is None and "does not fit" in none.error
    with pytest.raises(ShardCoreError, match="'best' is not known; there are portfolio, anneal"):
        compare.run_sharder("best", problem, model)


def test_seconds_of_a_search_are_without_compilation(tables, monkeypatch):
    problem, model = solvable(tables)
    now_s = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def search(*given, **options):
        with progress.stopped_clock():
            now_s[0] += 30
        now_s[0] += 2
        return SHARDERS["random"](*given, **options)

    monkeypatch.setitem(SHARDERS, "compiled", search)
    assert compare.run_sharder("compiled", problem, model).seconds == 2


def test_where_torchrec_is_not_installed_its_planner_says_so(monkeypatch):
    monkeypatch.delitem(SHARDERS, "torchrec", raising=False)
    monkeypatch.setattr("shardcore.torchrec.baseline.find_spec", lambda name: None)
    with pytest.raises(
        ShardCoreError,
        match="'torchrec' runs .*not installed .*: pip install .*torchrec==",
    ):
        require_known_sharder("torchrec")


@pytest.mark.parametrize("name", ["magic", "milp", "local"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(name):
    with pytest.raises(ShardCoreError, match=f"algorithm '{name}' is not known; there are portfolio, anneal"):
        require_known_sharder(name)


def test_balance_is_mean_over_largest_compute():
    assert (
        compare.compute_balance(StepCost((1.0, 0.0), (2.0, 1.0), (9.0, 9.0), (9.0, 9.0), (0.0, 2.0))) == 2 / 3
    )
    assert compare.compute_balance(StepCost(*((0.0, 0.0),) * 5)) == 1.0


def test_replayed_figures_compare_against_the_default_sharder():
    """cost/ imports no search, so it states the name again."""
    from shardcore.cost import replay_metrics

    assert replay_metrics.OURS == DEFAULT_SHARDER
