"""hot-rows, and what it refuses."""

from dataclasses import replace

from shardcore import files
from shardcore.cli import main
from shardcore.types import Zipf
from shardcore.workload import lower


def asked(folder, model) -> list[str]:
    return ["hot-rows", str(folder / "problem.json"), "--model", str(model), "--budget-evals", "200",
            "--out", str(folder / "hot.json"), "--plan", str(folder / "plan.json")]


def test_it_writes_a_problem_with_hot_rows_and_its_plan(problem, model, tmp_path, capsys):
    tables = tuple(replace(t, sequence=True, access=Zipf(1.3)) if i < 3 else t
                   for i, t in enumerate(problem.tables))
    links = replace(problem.topology, within_host_gbps=0.2, latency_ms=0.01)
    files.write_problem(tmp_path / "problem.json", replace(problem, tables=tables, topology=links))
    assert main(asked(tmp_path, model)) == 0
    out, err = capsys.readouterr()
    assert out.count("(best)") == 1 and "rows are hot from" in out
    assert err.startswith("never: ")
    found = files.read_problem(tmp_path / "hot.json")
    lower(files.read_plan(tmp_path / "plan.json", found), found)


def test_pooled_tables_have_none(stored, model, capsys):
    assert main(asked(stored, model)) == 1
    assert "has no sequence tables that are looked up" in capsys.readouterr().err
