"""The page that links what a store of plans has."""

from pathlib import Path

from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.report.published_report import store_index_page

DECISION = Decision(
    problem="p",
    outcome="first",
    reason="the first",
    current="c" * 16,
    candidate="c" * 16,
    problem_digest="d" * 16,
    candidate_ms=12.3456,
    decided_at=1.7e9,
    provenance={"model_version": "3"},
)


def test_each_problem_is_linked_to_its_current_plan_and_beside_them_the_models():
    made = store_index_page({"p": DECISION, "<damaged>": None})
    assert f'<a href="p/versions/{"c" * 16}/report.html">p</a>' in made
    assert "<td>12.35</td>" in made
    assert "version 3" in made and "2023-11-14 22:13:20 UTC" in made and "first" in made
    assert "&lt;damaged&gt;" in made and "cannot be read" in made and "default-src 'none'" in made
    for name in (store.MODELS, store.REPORT):
        assert f'href="{name}"' in made
    assert Path(store.INDEX).suffix == ".html"


def test_a_store_without_plans_has_a_page_too():
    assert "<tbody></tbody>" in store_index_page({})
