"""tiers: which rows lie in device memory, and a plan for them."""

import json
import re
from dataclasses import replace

import pytest

from shardcore.cli import main
from shardcore.core.access_statistics import Zipf
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Table
from shardcore.io import files
from shardcore.step.lower import lower


@pytest.fixture
def asked(problem, tmp_path):
    """A problem of three tables, larger than device memory."""
    tables = tuple(Table(f"t{i}", 50_000, 64, 5.0, Zipf(0.6 + 0.2 * i)) for i in range(3))
    small = replace(problem, tables=tables, topology=Topology((Device(15 << 20),) * 2))
    files.write_problem(tmp_path / "p.json", small)
    return ["tiers", str(tmp_path / "p.json")]


def test_it_decides_which_rows_lie_in_device_memory(asked, tmp_path, capsys):
    out = tmp_path / "tiered.json"
    assert main([*asked, "--host-gib", "1", "--out", str(out)]) == 0
    output, found = capsys.readouterr().out, files.read_problem(out)
    cached = [table.name for table in found.tables if 0 < table.load_factor < 1]
    assert cached and all(re.search(rf"{name} +fused_uvm_caching", output) for name in cached)
    assert found.topology.memory == (Memory("host", 1 << 30, 25.0),)
    saved = [float(x) for x in re.findall(r"^\d+ GiB +([\d.]+)", output, re.MULTILINE)]
    assert saved == sorted(saved) and saved[0] > 0
    again = tmp_path / "again.json"
    assert main(["tiers", str(out), "--out", str(again)]) == 0  # the problem says what hosts have
    assert again.read_text() == out.read_text()


def test_a_problem_may_have_an_ssd_beside_host_memory_or_alone(asked, tmp_path, capsys):
    path, out = tmp_path / "p.json", tmp_path / "tiered.json"
    given = files.read_problem(path)
    on_ssd = replace(given.topology, memory=(Memory("ssd", 1 << 40, 1.0),))
    files.write_problem(path, replace(given, topology=on_ssd, optimizer="rowwise_adagrad"))
    assert main([*asked, "--out", str(out)]) == 0
    assert re.search(r"t\d +key_value", capsys.readouterr().out)
    assert files.read_problem(out).topology == on_ssd
    # A table of 12.2 MiB, and some of another's rows, fit into host memory.
    assert main([*asked, "--host-gib", "0.02", "--out", str(out)]) == 0
    assert files.read_problem(out).topology.memory == (Memory("host", 21474836, 25.0), *on_ssd.memory)
    assert main([*asked, "--link-gbps", "3"]) == 1
    assert "give --host-gib, or memory in its topology" in capsys.readouterr().err


def test_with_a_model_it_writes_a_plan_that_fits(asked, model, tmp_path, capsys):
    out, plan = tmp_path / "tiered.json", tmp_path / "plan.json"
    given = [*asked, "--host-gib", "1", "--model", str(model), "--budget-evals", "200"]
    assert main([*given, "--out", str(out), "--plan", str(plan)]) == 0
    output, progress = capsys.readouterr()
    assert output.count("(best)") == 1 and "of the memory for rows shared out first: " in progress
    found = files.read_problem(out)
    assert max(lower(files.read_plan(plan, found), found).memory_bytes) <= 15 << 20
    priced = tmp_path / "cost.json"
    assert main(["price", str(plan), "--problem", str(out), "--model", str(model), "--out", str(priced)]) == 0
    assert json.loads(priced.read_text())["total_ms"] > 0


def test_a_plan_without_its_problem_is_refused_before_any_search(asked, model, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main([*asked, "--host-gib", "1", "--model", str(model), "--plan", str(plan)]) == 1
    assert "--plan " in (output := capsys.readouterr().err) and "needs --out" in output and not plan.exists()


def test_what_fits_is_left_alone(asked, problem, tmp_path, capsys):
    files.write_problem(tmp_path / "p.json", problem)
    assert main([*asked, "--host-gib", "1"]) == 0
    assert "All rows fit in device memory." in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, words",
    [
        (["--host-gib", "0.001"], "of tables in host memory, which may hold 1.0 MiB"),
        ([], "does not say how much memory hosts have for tables; give --host-gib"),
        (["--host-gib", "1", "--budget-s", "3"], "--budget-s 3.0 is for plans; give --model or --hardware"),
    ],
)
def test_what_it_refuses(asked, given, words, capsys):
    assert main([*asked, *given]) == 1
    assert words in capsys.readouterr().err
