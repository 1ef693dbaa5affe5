"""The commands on published plans."""

from dataclasses import replace

from shardcore import files
from shardcore.cli import main
from shardcore.publish import store
from shardcore.publish.decisions import Decision
from shardcore.types import Placement, Plan, Shard
from shardcore.workload import lower


def test_history_diff_and_drift(problem, now, model, tmp_path, capsys):
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    plans = tmp_path / "plans"
    version = store.add(plans, problem, plan, {})
    store.record(plans, Decision("shifting", "first", "a test's", version, version,
                                 files.problem_digest(problem), 1.0))
    files.write_pool(tmp_path / "pool.json", now.tables)
    files.write_problem(tmp_path / "now.json", now)
    asked = ["drift", str(plans), "shifting", "--model", str(model), "--budget-evals", "5000",
             "--max-moved-tables", "2", "--fresh"]
    said = []
    for fresh in ("pool.json", "now.json"):
        assert main([*asked, str(tmp_path / fresh), "--out", str(tmp_path / "replan")]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "behind" in said[0]
    read = files.read_plan(tmp_path / "replan/plan.json",
                           files.read_problem(tmp_path / "replan/problem.json"))
    assert lower(read, now)
    assert main(["diff", str(plans / "shifting/versions" / version / "plan.json"),
                 str(tmp_path / "replan/plan.json")]) == 0
    assert "to move" in capsys.readouterr().out
    page = tmp_path / "page.html"
    given = ["diff", str(plans / "shifting/versions" / version / "plan.json"),
             str(tmp_path / "replan/plan.json"), "--page", str(page)]
    assert main(given) == 1
    assert "diff was given --page alone; it needs --page and --model" in capsys.readouterr().err
    assert main([*given, "--model", str(model)]) == 0
    assert "only what differs from" in page.read_text() and "shifting: " in page.read_text()
    assert main(["history", str(plans), "shifting"]) == 0
    assert "a test's" in capsys.readouterr().out
    assert (main(["history", str(plans), "other"]) == 1 and "no plan is published for "
            "problem 'other'" in capsys.readouterr().err)
    files.write_problem(tmp_path / "less.json", replace(now, tables=now.tables[1:]))
    assert main([*asked, str(tmp_path / "less.json")]) == 1 and "lacks table 't0'" in capsys.readouterr().err
