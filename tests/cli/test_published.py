"""The commands on published plans."""

import shutil
from dataclasses import replace

from shardcore.cli import main
from shardcore.core.types import Placement, Plan, Shard
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.step.lower import lower


def test_history_diff_and_drift(problem, now, model, tmp_path, capsys):
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    plans = tmp_path / "plans"
    version = store.add(plans, problem, plan, {})
    store.record(
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
    page = tmp_path / "page.html"
    given = f"diff {published} {again} --page {page}".split()
    assert main(given) == 1
    assert "diff was given --page alone; it needs --page and --model" in capsys.readouterr().err
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
