"""plan --towers, and what it refuses."""

import json
from dataclasses import replace

import pytest

from shardcore.cli import main
from shardcore.core.links import make_links
from shardcore.core.topology import Topology
from shardcore.io import files


@pytest.fixture
def on_two_hosts(problem, tmp_path):
    """The problem's file, on two hosts."""
    devices = tuple(replace(d, host=f"host-{i // 2}") for i, d in enumerate(problem.topology.devices))
    links = {"links": make_links(within_host=50.0, between_hosts=1.0)}
    found = replace(problem, topology=Topology(devices, **links))
    files.write_problem(tmp_path / "problem.json", found)
    return tmp_path


def asked(folder, model, towers) -> list[str]:
    (folder / "towers.json").write_text(json.dumps({"schema": "shardcore/towers", "version": 1, **towers}))
    return (
        f"plan {folder / 'problem.json'} --model {model} --budget-evals 2000 --towers "
        f"{folder / 'towers.json'} --out {folder / 'plan.json'}"
    ).split()


def test_plan_keeps_groups_on_hosts_and_says_what_crosses_them(
    on_two_hosts, model, capsys, short_explanations
):
    groups = [[f"t{i}" for i in range(k, 24, 4)] for k in range(4)]
    command = asked(on_two_hosts, model, {"compression_ratio": 8, "towers": groups})
    assert main([*command, "--explain"]) == 0
    out, err = capsys.readouterr()
    assert out.count("what crosses hosts smaller: without them this plan would take") == 1
    assert "outputs cross hosts 8 times smaller, as given; the compute and memory of the tower modules" in err
    plain = files.read_problem(on_two_hosts / "problem.json")
    plan = files.read_plan(on_two_hosts / "plan.json", plain)
    host_of = {p.shard.table.name: plain.topology.devices[p.devices[0]].host for p in plan.placements}
    assert all(len({host_of[name] for name in group}) == 1 for group in groups)
    assert plan.provenance["tower_ratio"] == 8 and plan.provenance["towers"]["affinity_inside"] == 1
    price = [
        *f"price {on_two_hosts / 'plan.json'} --problem {on_two_hosts / 'problem.json'} --model {model}".split(),
    ]
    assert main([*price, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_ms"] == pytest.approx(plan.provenance["predicted_ms"])
    again = (
        f"plan {on_two_hosts / 'problem.json'} --model {model} --out "
        f"{on_two_hosts / 'again.json'} --start {on_two_hosts / 'plan.json'}"
    ).split()
    assert main(again) == 1
    assert capsys.readouterr().err == "error: the plan to start from has towers; give the towers, too\n"
    assert main([*again, "--towers", str(on_two_hosts / "towers.json"), "--max-moved-tables", "0"]) == 0
    assert "nothing moves" in capsys.readouterr().out
    assert files.read_plan(on_two_hosts / "again.json", plain) == plan


@pytest.mark.parametrize(
    "towers, message",
    [
        ({"compression_ratio": 0.5, "towers": [["t0"]]}, "compression_ratio 0.5; it needs 1 to 1,000,000"),
        ({"compression_ratio": 2, "towers": [["nobody"]]}, "table 'nobody', which problem 'shifting' does"),
    ],
)
def test_towers_that_cannot_be_are_one_line(on_two_hosts, model, capsys, towers, message):
    assert main(asked(on_two_hosts, model, towers)) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (on_two_hosts / "plan.json").exists()


def test_towers_need_hosts_and_no_groups(stored, model, capsys):
    command = asked(stored, model, {"compression_ratio": 2, "towers": [["t0", "t1"]]})
    assert main(command) == 1
    assert "problem 'shifting' has 1 host; towers need 2 or more" in capsys.readouterr().err
    assert main([*command, "--groups"]) == 1
    assert capsys.readouterr().err == (
        "error: sharding groups and towers were both asked for; towers are of "
        "all hosts of a problem, so leave one out\n"
    )
