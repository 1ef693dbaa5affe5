"""plan --tiers: which rows lie in device memory, and a plan for them."""

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
    given = f"plan {tmp_path / 'p.json'} --hardware nvidia-h100-sxm --algorithm size_greedy --tiers"
    return given.split()


def test_it_decides_which_rows_lie_in_device_memory(asked, tmp_path, capsys):
    out = tmp_path / "tiered.json"
    assert (
        main([*asked, "--host-gib", "1", "--out", str(tmp_path / "plan.json"), "--out-problem", str(out)])
        == 0
    )
    output, found = capsys.readouterr().out, files.read_problem(out)
    cached = [table.name for table in found.tables if 0 < table.load_factor < 1]
    assert cached and all(re.search(rf"{name} +fused_uvm_caching", output) for name in cached)
    assert found.topology.memory == (Memory("host", 1 << 30, 25.0),)
    saved = [float(x) for x in re.findall(r"^\d+ GiB +([\d.]+)", output, re.MULTILINE)]
    assert saved == sorted(saved) and saved[0] > 0
    again = [word.replace("/p.json", "/tiered.json") for word in asked]  # the problem says what hosts have
    given = ["--out", str(tmp_path / "plan.json"), "--out-problem", str(tmp_path / "again.json")]
    assert main([*again, *given]) == 0
    assert (tmp_path / "again.json").read_text() == out.read_text()


def test_a_problem_may_have_an_ssd_beside_host_memory_or_alone(asked, tmp_path, capsys):
    path, out = tmp_path / "p.json", tmp_path / "tiered.json"
    given = files.read_problem(path)
    on_ssd = replace(given.topology, memory=(Memory("ssd", 1 << 40, 1.0),))
    files.write_problem(path, replace(given, topology=on_ssd, optimizer="rowwise_adagrad"))
    asked += ["--out", str(tmp_path / "plan.json"), "--out-problem", str(out)]
    assert main(asked) == 0
    assert re.search(r"t\d +key_value", capsys.readouterr().out)
    assert files.read_problem(out).topology == on_ssd
    # A table of 12.2 MiB, and some of another's rows, fit into host memory.
    assert main([*asked, "--host-gib", "0.02"]) == 0
    assert files.read_problem(out).topology.memory == (Memory("host", 21474836, 25.0), *on_ssd.memory)
    assert main([*asked, "--link-gbps", "3"]) == 1
    assert "give --host-gib, or memory in its topology" in capsys.readouterr().err


def test_its_plan_fits_and_has_a_price(asked, model, tmp_path, capsys):
    out, plan, priced = (tmp_path / name for name in ("tiered.json", "plan.json", "cost.json"))
    given = f"plan {tmp_path / 'p.json'} --model {model} --tiers --host-gib 1 --budget-evals 200"
    assert main([*given.split(), "--out", str(plan), "--out-problem", str(out)]) == 0
    output, progress = capsys.readouterr()
    assert output.count("(best)") == 1 and "of the memory for rows shared out first: " in progress
    found = files.read_problem(out)
    assert max(lower(files.read_plan(plan, found), found).memory_bytes) <= 15 << 20
    assert main(["price", str(plan), "--problem", str(out), "--model", str(model), "--out", str(priced)]) == 0
    assert json.loads(priced.read_text())["total_ms"] > 0


def test_what_fits_is_left_alone(asked, problem, tmp_path, capsys):
    files.write_problem(tmp_path / "p.json", problem)
    given = [
        "--host-gib",
        "1",
        "--out",
        str(tmp_path / "plan.json"),
        "--out-problem",
        str(tmp_path / "t.json"),
    ]
    assert main([*asked, *given]) == 0
    assert "All rows fit in device memory." in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, words",
    [
        (["--host-gib", "0.001"], "of tables in host memory, which may hold 1.0 MiB"),
        ([], "does not say how much memory hosts have for tables; give --host-gib"),
    ],
)
def test_what_it_refuses(asked, given, words, tmp_path, capsys):
    out = ["--out", str(tmp_path / "plan.json"), "--out-problem", str(tmp_path / "t.json")]
    assert main([*asked, *given, *out]) == 1
    assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"p.json"}
