"""plan --groups, and what reads its plans or refuses them."""

import json
import math
import re

import pytest
from sealing import edit

from shardcore.cli import main
from shardcore.io import files
from shardcore.io.files import read_grouped_plan


@pytest.fixture
def asked(stored, model):
    """The command for the problem of four devices. The range of its model is batches of 64 to 256."""
    return (
        f"plan {stored / 'problem.json'} --model {model} --algorithm size_greedy --out "
        f"{stored / 'grouped.json'}"
    ).split()


@pytest.fixture
def grouped(asked, stored, capsys):
    assert main([*asked, "--groups", "2", "--sync-every", "20"]) == 0
    capsys.readouterr()
    return stored / "grouped.json"


def test_all_sizes_and_layouts_are_shown_and_the_best_is_written(asked, stored, capsys):
    assert main([*asked, "--groups", "--sync-every", "1000000"]) == 0
    table, rest = capsys.readouterr().out.split("\n\n")
    header, _, *lines, because = table.splitlines()
    rows = [re.split("  +", line) for line in lines]
    words = [row[0].removesuffix(" (best)") for row in rows]
    assert words == [
        "all 4 devices as one group",
        "2 contiguous groups of 2 devices",
        "2 strided groups of 2 devices",
        "4 groups of 1 device",
    ]
    assert re.split("  +", header) == [
        "sharding groups",
        "step ms",
        "sync ms a step",
        "fullest device",
        "total ms",
        "s",
        "evaluations",
        "why not",
    ]
    totals = [float(row[4]) if row[4] != "-" else math.inf for row in rows]
    # A device has no room for all tables.
    assert totals[-1] == math.inf > max(totals[:-1]) and "MiB" in lines[-1]
    assert because == f"{words[totals.index(min(totals))]}: least ms of 3 with a plan"
    assert f"{min(totals):.3f} ms predicted" in rest and "synchronised every 1000000 steps" in rest
    found = read_grouped_plan(stored / "grouped.json", files.read_problem(stored / "problem.json"))
    assert found.grouping.size == 2 and "2 groups" not in words[totals.index(min(totals))]
    assert [x["ms"] for x in found.plan.provenance["decisions"]["entries"]][-1] is None
    assert found.grouping.sync_every == 1_000_000 and "model_digest" in found.plan.provenance


def test_groups_are_planned_with_confidence_and_explained(asked, stored, capsys, short_explanations):
    assert main([*asked, "--groups", "2", "--confidence", "0.9", "--explain"]) == 0
    assert "\nThe plan of one group:\n" in capsys.readouterr().out
    found = read_grouped_plan(stored / "grouped.json", files.read_problem(stored / "problem.json"))
    assert found.plan.provenance["confidence"] == 0.9


def test_one_group_of_all_devices_is_a_plain_plan(asked, stored, capsys):
    assert main([*asked, "--groups", "4"]) == 0
    assert "all 4 devices as one group" in capsys.readouterr().out
    problem = files.read_problem(stored / "problem.json")
    plain = files.read_plan(stored / "grouped.json", problem)
    assert main(asked) == 0
    assert files.read_plan(stored / "grouped.json", problem) == plain


def test_price_of_groups_is_what_plan_said(grouped, stored, model, capsys, short_explanations):
    price = ["price", str(grouped), "--problem", str(stored / "problem.json"), "--model", str(model)]
    assert main([*price, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"size": 2, "layout": found["groups"]["layout"], "sync_every": 20}
    assert found["total_ms"] == pytest.approx(found["step_ms"] + found["sync_ms"] / 20, rel=2e-6)
    assert found["sync_ms"] > 0
    assert found["extrapolated"][0].startswith("synchronising: ")
    assert len(found["memory_bytes"]) == len(found["waiting_ms"]) == 2
    assert main(price) == 0
    said = (
        f"{found['total_ms']:.3f} ms a step predicted; 2 {found['groups']['layout']} groups of 2 devices: "
        f"{found['step_ms']:.3f} ms in a group, and {found['sync_ms']:.3f} ms to synchronise them, once in 20 steps\n"
    )
    assert said in capsys.readouterr().out
    assert main([*price, "--explain"]) == 0
    assert re.search(
        r"^sharding groups .*2 strided groups of 2 devices.*^The plan of one group:$",
        capsys.readouterr().out,
        re.MULTILINE | re.DOTALL,
    )


@pytest.mark.parametrize("command", [["replay"], ["diff", "SAME"], ["plan", "--start"]])
def test_other_commands_refuse_a_plan_of_groups_in_one_line(grouped, stored, model, capsys, command):
    problem = str(stored / "problem.json")
    made = {
        "replay": ["replay", str(grouped), "--problem", problem],
        "diff": ["diff", str(grouped), str(grouped), "--problem", problem],
        "plan": [
            "plan",
            problem,
            *f"--model {model} --start {grouped} --out {stored / 'new.json'}".split(),
        ],
    }[command[0]]
    assert main(made) == 1
    assert capsys.readouterr().err == (
        f"error: {grouped} has schema 'shardcore/grouped-plan': it is of one sharding group, which only "
        "price and export read; expected 'shardcore/plan'\n"
    )


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ["--groups", "3"],
            "--groups is '3'; it needs 'auto' or a size that divides the 4 devices of problem "
            "'shifting' evenly: 1, 2, 4",
        ),
        (["--sync-every", "5"], "--sync-every 5 needs --groups, whose replicas it is for"),
        (["--groups", "--sync-every", "2000000"], "groups has sync_every 2000000; it needs 1 to 1,000,000"),
    ],
)
def test_a_wrong_option_is_one_line(asked, stored, capsys, options, says):
    assert main([*asked, *options]) == 1
    assert capsys.readouterr().err == f"error: {says}\n" and not (stored / "grouped.json").exists()


def test_a_plan_of_groups_is_exported_for_dmp_collection(grouped, stored, capsys):
    pytest.importorskip("torchrec")
    from shardcore.core.errors import ShardCoreError
    from shardcore.torchrec.dmp_collection import read_dmp_collection
    from shardcore.torchrec.plan_files import read_torchrec

    out = stored / "torchrec.json"
    given = f"export {grouped} --problem {stored / 'problem.json'} --module ebc --out {out}"
    assert main(given.split()) == 0
    arguments, every = read_dmp_collection(out)
    layout = read_grouped_plan(grouped, files.read_problem(stored / "problem.json")).grouping.layout
    assert every == 20 and {k: v for k, v in arguments.items() if k != "plan"} == {
        "world_size": 4,
        "sharding_group_size": 2,
        "node_group_size": 2,
        "use_inter_host_allreduce": layout == "contiguous",
    }
    assert {rank for s in arguments["plan"].plan["ebc"].values() for rank in s.ranks} == {0, 1}
    with pytest.raises(ShardCoreError, match="schema 'shardcore/dmp-collection'"):
        read_torchrec(out)
    out.write_text(out.read_text().replace('"sync_every": 20', '"sync_every": 21'))
    with pytest.raises(ShardCoreError, match="it was edited"):
        read_dmp_collection(out)


def test_each_fault_of_the_inner_plan_is_a_line_with_the_file(grouped, stored, capsys):
    def change(whole):
        for i, placement in enumerate(whole["plan"]["placements"][:2]):
            placement["kind"] = f"k{i}"

    edit(grouped, change)
    assert main(["export", str(grouped), "--problem", str(stored / "problem.json"), "--out", "t.json"]) == 1
    lines = capsys.readouterr().err.splitlines()
    for i, line in enumerate(lines):
        assert line.removeprefix("error: ").startswith(
            f"{grouped}: its plan: a placement or constraint has kind 'k{i}'"
        )
    assert len(lines) == 2
