"""plan --hot-rows and hot-drift, and what they refuse."""

from dataclasses import replace

import numpy as np

from shardcore.cli import main
from shardcore.core.access_statistics import Zipf
from shardcore.core.links import make_links
from shardcore.io import files
from shardcore.io.hot_ids import HotIds, read_hot_ids, write_hot_ids
from shardcore.io.row_counts import RowCounts, write_row_counts
from shardcore.step.lower import lower
from shardcore.tables.hot_rows import with_hot_rows


def asked(folder, model) -> list[str]:
    return (
        f"plan {folder / 'problem.json'} --model {model} --hot-rows --algorithm anneal --budget-evals 200 --out "
        f"{folder / 'plan.json'} --out-problem {folder / 'hot.json'}"
    ).split()


def test_it_writes_a_problem_with_hot_rows_and_its_plan(problem, model, tmp_path, capsys):
    tables = tuple(
        replace(t, sequence=True, access=Zipf(1.3)) if i < 3 else t for i, t in enumerate(problem.tables)
    )
    links = replace(problem.topology, links=make_links(within_host=0.2, latency_ms=0.01))
    files.write_problem(tmp_path / "problem.json", replace(problem, tables=tables, topology=links))
    assert main(asked(tmp_path, model)) == 0
    out, err = capsys.readouterr()
    assert out.count("(best)") == 1 and "rows hot from" in out and "their lookups" in out
    assert "\nno hot rows: " in f"\n{err}"
    found = files.read_problem(tmp_path / "hot.json")
    lower(files.read_plan(tmp_path / "plan.json", found), found)


def test_pooled_tables_have_none(stored, model, capsys):
    assert main(asked(stored, model)) == 1
    assert "has no sequence tables that are looked up" in capsys.readouterr().err


def test_drift_of_hot_rows_is_told_and_new_ids_are_written(problem, tmp_path, capsys):
    tables = tuple(replace(t, sequence=True, access=Zipf(1.3)) for t in problem.tables if t.pooling)
    own = with_hot_rows(replace(problem, tables=tables), {tables[0].name: 3})
    name, rows = tables[0].name, tables[0].rows
    files.write_problem(tmp_path / "hot.json", own)
    write_hot_ids(tmp_path / "ids.safetensors", [HotIds(name, rows, [0, 1, 2])])
    counts = np.ones(rows, np.int64)
    counts[[0, 1, 7]] = 50
    write_row_counts(tmp_path / "counts.safetensors", RowCounts(10, {name: counts}))
    given = (
        f"hot-drift {tmp_path / 'hot.json'} --hot-ids {tmp_path / 'ids.safetensors'} "
        f"--row-counts {tmp_path / 'counts.safetensors'} --out {tmp_path / 'new.safetensors'}"
    ).split()
    assert main(given) == 0
    assert "67%" in capsys.readouterr().out  # of the three rows two are still hot
    assert list(read_hot_ids(tmp_path / "new.safetensors")[name].ids) == [0, 1, 7]
    (tmp_path / "counts.safetensors").write_bytes(b"none")
    assert main(given) == 1
    assert "counts.safetensors is not safetensors: " in capsys.readouterr().err
