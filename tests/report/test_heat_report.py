import re

from shardcore.cli import main
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
