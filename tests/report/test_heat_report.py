import re
from dataclasses import replace

from shardcore.cli import main
from shardcore.core.access_statistics import ManagedCollision, Zipf
from shardcore.core.types import Table
from shardcore.io import files
from shardcore.report.heat_report import heat_table


def test_the_table_has_hot_rows_and_misses_of_each_table(problem):
    said = heat_table(problem, 0.1)
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert {t.name for t in problem.tables} <= lines.keys()
    touched, fetched = (
        int(x.replace(",", ""))
        for x in re.search(r"touches ([\d,]+) rows.* has to fetch ([\d,]+) of them", said).groups()
    )
    assert 0 < fetched <= touched
    assert lines["empty"].split()[-1] == "-"
    everything = heat_table(problem, 1.0)
    assert "has to fetch 0 of them (0%)" in everything


def test_the_command_shows_it_and_refuses_a_share_that_is_none(problem, tmp_path, capsys):
    path = tmp_path / "p.json"
    files.write_problem(path, problem)
    assert main(["heat", str(path), "--held", "0.2"]) == 0
    assert "misses with 20% held" in capsys.readouterr().out
    assert main(["heat", str(path), "--held", "2"]) == 1
    assert "the cache holds a share of 2 of the rows" in capsys.readouterr().err


def test_the_rows_of_hash_tables_for_a_share_of_collisions(problem, tmp_path, capsys):
    path = tmp_path / "p.json"
    files.write_problem(path, problem)
    command = ["collisions", str(path), "--ids", "50000", "--lookups", "20000", "--most", "0.02"]
    assert main(command) == 1
    assert "has no hash tables; it needs tables with managed_collision" in capsys.readouterr().err
    hashed = Table("h", 4_000, 8, 1.0, Zipf(0.9), managed_collision=ManagedCollision(8, buckets=4, probes=16))
    files.write_problem(path, replace(problem, tables=(*problem.tables, hashed)))
    assert main(command) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("h ")]
    rows, needed = (int(line.split()[i].replace(",", "")) for i in (1, 3))
    assert rows == 4_000 < needed < 50_000 and needed % 4 == 0
    assert main([*command[:-1], "2"]) == 1
    assert "it needs to be within 0 and 1" in capsys.readouterr().err
