"""Views of problems, plans and costs in a notebook, and the picture of a plan."""

import dataclasses
import inspect
import re

import pytest

import shardcore
from shardcore import SHARDERS, Problem, ShardCoreError, Table, Topology, load_profile, lower, price
from shardcore.core.html import MOST_ROWS

TABLES = tuple(Table(f"<t{i}>", 1000 * (i + 1), 64, 5.0) for i in range(20))
PROBLEM = Problem("p", TABLES, Topology.of_hosts(1, 4, memory_gib=80, hardware="nvidia-h100-sxm"), 4096)
MODEL = load_profile("nvidia-h100-sxm").cost_model().for_problem(PROBLEM)
PLAN = SHARDERS["size_greedy"](PROBLEM, MODEL)
COST = price(lower(PLAN, PROBLEM), MODEL)


@pytest.mark.parametrize(
    "noun, first", [(PROBLEM, "Problem("), (PLAN, "Plan("), (COST, f"{COST.total_ms:.3f} ms")]
)
def test_a_notebook_shows_a_line_and_a_table_whose_names_are_escaped(noun, first):
    page = noun._repr_html_()
    assert page.startswith(f"<p>{first}")
    assert "<t1" not in page
    rows = page.count("<tr>") - 1
    assert rows == (4 if noun is COST else MOST_ROWS)
    assert ("and 8 more" in page) == (rows == MOST_ROWS)


def test_the_largest_come_first():
    names = re.findall(r"&lt;t(\d+)&gt;", PROBLEM._repr_html_())
    assert names == [str(i) for i in range(19, 19 - MOST_ROWS, -1)]


def test_a_picture_of_two_plans_has_one_scale_and_names_both(tmp_path):
    other = SHARDERS["random"](PROBLEM, MODEL)
    panels = shardcore.plot(PLAN, PROBLEM, MODEL, before=other).figure.axes
    assert len(panels) == 4
    assert panels[0].get_ylim() == panels[2].get_ylim()
    assert panels[0].texts[0].get_text().startswith("before, by random: ")
    assert f"after, by size_greedy: {COST.total_ms:.2f} ms" in panels[2].texts[0].get_text()


def test_a_picture_is_shown_and_saved(tmp_path):
    picture = shardcore.plot(PLAN, PROBLEM, MODEL)
    assert picture._repr_png_().startswith(b"\x89PNG")
    picture.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    with pytest.raises(ShardCoreError, match=r"path is plan.pdf; it needs to end in .png or .svg"):
        picture.save("plan.pdf")


@pytest.mark.parametrize("name", sorted({*shardcore.__all__} - {"SHARDERS"}))
def test_help_names_each_field_or_argument(name):
    noun = getattr(shardcore, name)
    text = inspect.getdoc(noun) or ""
    arguments = []
    if dataclasses.is_dataclass(noun):
        arguments = [field.name for field in dataclasses.fields(noun) if field.init]
    elif inspect.isfunction(noun):
        arguments = list(inspect.signature(noun).parameters)
    assert len(text) > 30
    assert not [a for a in arguments if not re.search(rf"\b{a}\b", text)], text
