"""The search on docs/neuroshard.md finds plans as cheap as the library's."""

import re
from pathlib import Path

import pytest

import shardcore
from shardcore import Constraints, Problem, Setting, Table, Topology, lower, price
from shardcore.cost.analytic import AnalyticModel
from shardcore.search.neuroshard import NeuroShardConfig
from shardcore.search.neuroshard import search_with_neuroshard as of_library

PAGE = (Path(__file__).parents[2] / "docs/neuroshard.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
SIZES = [
    (9_000_000, 128, 4),
    (4_000_000, 64, 20),
    (800_000, 64, 90),
    (70_000, 32, 9),
    (5_000, 16, 2),
    (900, 12, 1),
]
TABLES = [Table(f"t{i}", rows, dim, pooling) for i, (rows, dim, pooling) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def of_page():
    names = {}
    exec(CODE, names)
    return names["neuroshard"]


@pytest.mark.parametrize(
    "devices, steps", [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.long) for n in (4, 3))]
)
@pytest.mark.parametrize("hardware", ["a profile", "closed form"])
def test_its_plans_cost_as_the_librarys(of_page, hardware, devices, steps):
    topology = Topology.of_hosts(1, devices, memory_gib=80)
    problem = Problem(
        "small", TABLES, topology, 768 * devices, constraints=Constraints(reserved_bytes=1 << 33)
    )
    model = AnalyticModel(Setting("gpu", problem.global_batch)).for_problem(problem)
    if hardware == "a profile":
        model = shardcore.load_profile("nvidia-h100-sxm").cost_model().for_problem(problem)
    here = of_page(problem, model, beam=2, candidates=2, steps=steps)
    there = of_library(problem, model, config=NeuroShardConfig(beam=2, candidates=2, steps=steps))
    costs = [price(lower(plan, problem), model).total_ms for plan in (here, there)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    whole = {t.name for t in TABLES}
    assert {p.shard.table.name for p in here.placements} == whole


def test_without_a_place_there_is_no_plan(of_page):
    problem = Problem("large", TABLES, Topology.of_hosts(1, 2, memory_gib=1), 2048)
    assert of_page(problem, AnalyticModel(Setting("gpu", 2048)), steps=0) is None


def test_it_is_as_long_as_its_title_says():
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert 50 <= len(lines) <= 66
