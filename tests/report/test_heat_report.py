import json
import re
from dataclasses import replace

from shardcore import files
from shardcore.cli import main
from shardcore.report.heat_report import heat_table
from shardcore.topology import Device, Topology
from shardcore.types import Table, Zipf


def test_the_table_has_hot_rows_and_misses_of_each_table(problem):
    said = heat_table(problem, 0.1)
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert {t.name for t in problem.tables} <= lines.keys()
    touched, fetched = (int(x.replace(",", "")) for x in re.search(
        r"touches ([\d,]+) rows.* has to fetch ([\d,]+) of them", said).groups())
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


def test_the_command_decides_which_rows_lie_in_device_memory(problem, tmp_path, capsys):
    tables = tuple(Table(f"t{i}", 50_000, 64, 5.0, Zipf(0.6 + 0.2 * i)) for i in range(3))
    small = replace(problem, tables=tables, topology=Topology((Device(15 << 20),) * 2))
    path, out = tmp_path / "p.json", tmp_path / "tiers.json"
    files.write_problem(path, small)
    assert main(["tiers", str(path), "--host-gib", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    kernels = {name: found["compute_kernel"] for name, found in json.loads(out.read_text())["tables"].items()}
    cached = [name for name, kernel in kernels.items() if kernel == "fused_uvm_caching"]
    assert cached and all(re.search(rf"{name} +fused_uvm_caching", said) for name in cached)
    saved = [float(x) for x in re.findall(r"^\d+ GiB +([\d.]+)", said, re.MULTILINE)]
    assert saved == sorted(saved) and saved[0] > 0
    assert main(["tiers", str(path), "--host-gib", "0.001"]) == 1
    assert "of tables in host memory, which may hold 1.0 MiB" in capsys.readouterr().err
    files.write_problem(path, replace(small, topology=Topology((Device(1 << 30),) * 2)))
    assert main(["tiers", str(path), "--host-gib", "1"]) == 0
    assert "All rows fit in device memory." in capsys.readouterr().out
