"""The commands on published plans."""

import shutil
import sys
from dataclasses import replace

import pytest

from shardcore.cli import main, published
from shardcore.core.types import Placement, Plan, Shard
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.stages import screen as pages
from shardcore.step.lower import lower


def test_history_diff_and_drift(problem, now, model, tmp_path, capsys):
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    plans = tmp_path / "plans"
    version = store.add_version(plans, problem, plan, {})
    store.record_decision(
        plans, Decision("shifting", "first", "a test's", version, version, files.problem_digest(problem), 1.0)
    )
    files.write_pool(tmp_path / "pool.json", now.tables)
    files.write_problem(tmp_path / "now.json", now)
    asked = f"drift {plans} shifting --model {model} --budget-evals 5000 --max-moved-tables 2 --fresh".split()
    output = []
    for fresh in ("pool.json", "now.json"):
        assert main([*asked, str(tmp_path / fresh), "--out", str(tmp_path / "replan")]) == 0
        output.append(capsys.readouterr().out)
    assert output[0] == output[1] and "behind" in output[0]
    read = files.read_plan(
        tmp_path / "replan/plan.json", files.read_problem(tmp_path / "replan/problem.json")
    )
    assert lower(read, now)
    published, again = plans / "shifting/versions" / version / "plan.json", tmp_path / "replan/plan.json"
    assert main(["diff", str(published), str(again)]) == 0
    assert "to move" in capsys.readouterr().out
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(tmp_path / "replan/plan.json", tmp_path / "alone")
    assert main(["diff", str(alone), str(alone)]) == 1
    assert f"{alone} has no problem.json beside it, its problem; give --problem" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "none.json")]) == 1
    assert f"cannot read {tmp_path / 'none.json'}: No such file" in capsys.readouterr().err
    page = tmp_path / "page.html"
    given = f"diff {published} {again} --page {page}".split()
    assert main(given) == 1
    assert "was not planned with a profile that ships with ShardCore; give --model" in capsys.readouterr().err
    assert main(["diff", str(published), str(again), "--model", str(model)]) == 1
    assert (
        "diff was given --model without --page, whose plans it prices; give both" in capsys.readouterr().err
    )
    assert main([*given, "--model", str(model)]) == 0
    assert "only what differs from" in page.read_text() and "shifting: " in page.read_text()
    assert main(["history", str(plans), "shifting"]) == 0
    assert "a test's" in capsys.readouterr().out
    assert (
        main(["history", str(plans), "other"]) == 1
        and "no plan is published for problem 'other'" in capsys.readouterr().err
    )
    two = replace(now, topology=replace(now.topology, devices=now.topology.devices[:2]))
    for name, other, differ in [
        ("less", replace(now, tables=now.tables[1:]), "name of tables"),
        ("more", replace(now, tables=(*now.tables, replace(now.tables[0], name="x"))), "name of tables"),
        (
            "sequence",
            replace(now, tables=tuple(replace(t, sequence=True) for t in now.tables)),
            "sequence of tables",
        ),
        ("batch", replace(now, global_batch=2 * now.global_batch), "global_batch"),
        ("devices", two, "number of devices"),
    ]:
        files.write_problem(tmp_path / f"{name}.json", other)
        assert main([*asked, str(tmp_path / f"{name}.json")]) == 1
        assert f"differ in {differ}. Re-plan it: plan --start" in capsys.readouterr().err
    turned = replace(now, name="again", tables=tuple(replace(t, dedup=2.0) for t in now.tables[::-1]))
    files.write_problem(tmp_path / "again.json", turned)
    assert main([*asked, str(tmp_path / "again.json"), "--out", str(tmp_path / "deduplicated")]) == 0
    assert {t.dedup for t in files.read_problem(tmp_path / "deduplicated/problem.json").tables} == {2.0}


@pytest.fixture
def planned(problem, model, tmp_path):
    """The options of `view` for a plan that a model priced, in a folder with its problem."""
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    files.write_problem(tmp_path / "problem.json", problem)
    files.write_plan(tmp_path / "plan.json", plan, problem)
    return ["view", str(tmp_path / "plan.json"), "--model", str(model)]


@pytest.mark.parametrize("screen", ["", ":0"])
def test_view_writes_a_page_and_opens_it_where_there_is_a_screen(
    planned, tmp_path, monkeypatch, capsys, screen
):
    opened = []
    monkeypatch.setattr(pages.webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", screen)
    page = tmp_path / "page.html"
    assert main([*planned, "--out", str(page)]) == 0
    assert "What if one table moved?" in page.read_text() and "is the bottleneck" in page.read_text()
    assert opened == ([page.as_uri()] if screen else [])
    assert capsys.readouterr().out == f"{page}: the page, {'in your' if screen else 'for a'} browser\n"


def test_view_shows_the_page_of_a_published_version(planned, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(published.tempfile, "tempdir", None)
    (tmp_path / "report.html").write_text("its page")
    assert main(planned[:2]) == 0
    shown = capsys.readouterr().out.partition(":")[0]
    assert shown.startswith(str(tmp_path)) and open(shown).read() == "its page"


def test_view_of_a_plan_without_page_model_or_profile_is_one_line(planned, capsys):
    assert main(planned[:2]) == 1
    # A busy machine shows progress before it.
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {planned[1]} was not planned with a profile that ships with ShardCore; give --model or --hardware"
    )


@pytest.mark.parametrize(
    "out", ["versions/{}/cost.json", "versions/{}/new.html", "decisions/page.html", "current", "page.html"]
)
@pytest.mark.parametrize("through", ["", "link"])
def test_no_output_lies_among_the_files_of_published_plans(problem, model, tmp_path, capsys, out, through):
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    plans = tmp_path / "plans"
    version = store.add_version(plans, problem, plan, {}, "<html>")
    store.record_decision(
        plans, Decision("shifting", "first", "a test's", version, version, files.problem_digest(problem), 1.0)
    )
    before = {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(plans / "shifting")
    place = (tmp_path / "link" if through else plans / "shifting") / out.format(version)
    plan_file = plans / "shifting/versions" / version / "plan.json"
    for command in (
        f"view {plan_file} --out {place}",
        f"plan {plan_file.with_name('problem.json')} --model {model} --budget-evals 10 --out {place}",
        f"drift {plans} shifting --fresh {plan_file.with_name('problem.json')} --model {model} --out {place.parent}",
    ):
        assert main(command.split()) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and str(place.parent) in error and len(error.splitlines()) == 1
        assert "published plans are kept" in error or "it needs to be" in error
    assert {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()} == before
    assert store.is_version_intact(plans, "shifting", version)
