"""Public workloads: their problems, and the table of what searches found."""

from bench import workloads
from shardcore.search import BASELINES


def test_each_workload_is_a_problem_on_a_card_with_a_profile():
    problems = [problem for problem, _ in workloads.public_workloads()]
    assert len({problem.name for problem in problems}) == len(workloads.LISTS)
    assert {problem.topology.hardware for problem in problems} == {workloads.H100, workloads.A100}


def test_costs_of_others_stand_beside_ours_and_a_search_without_a_plan_says_so():
    row = {"problem": "p", "tables": 3, "portfolio": 2.0, "band": 0.1, "neuroshard": 2.5, "torchrec": None}
    text = workloads.costs_table([row | dict.fromkeys(BASELINES, 6.0) | {"dim_greedy": 3.0, "random": None}])
    assert text.splitlines()[-1] == "| p | 3 | 2.000 ±10% | 1.250 | none fits | 1.500 |"
