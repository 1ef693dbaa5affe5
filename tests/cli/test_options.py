"""Arguments of all commands: outputs are checked before any work, and never lie on what is read."""

import argparse
import json
import re

import pytest
from offers import LEAST, write_offers

from shardcore import __version__
from shardcore.cli import command_line_parser, main
from shardcore.cli.options import output_options, parse_path
from shardcore.core.types import Placement, Plan, Shard
from shardcore.io import files, writing
from shardcore.plans import store
from shardcore.plans.decisions import Decision

CLUSTER = "plan problem.json --offers offers.json --step-ms 1"


@pytest.fixture
def here(stored, problem, model, monkeypatch):
    """The folder with the problem, a plan, a model, a folder of plans of two versions, and text."""
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)))
    files.write_plan(stored / "plan.json", plan, problem)
    for name in ("old", "new"):
        files.write_problem(stored / name / "problem.json", problem)
        files.write_plan(stored / name / "plan.json", plan, problem)
    for file in model.iterdir():
        writing.write_atomic(stored / "m" / file.name, file.read_bytes())
    (stored / "link").symlink_to("m")
    (stored / "loop").symlink_to("loop")
    monkeypatch.chdir(stored)
    write_offers("offers.json", LEAST | {"model": "m"})
    return stored


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "asked, message",
    [
        ("plan problem.json --model m --out m/model.json", "--out m/model.json is in the model that is read"),
        ("plan problem.json --model m --out m/new.json", "--out m/new.json is in the model that is read"),
        ("plan problem.json --model m --out link/model.json", "--out link/model.json is in the model that"),
        ("plan problem.json --model link --out m/sub/plan.json", "--out m/sub/plan.json is in the model"),
        ("plan problem.json --model m --out .", "--out . is a folder; it needs to be a file"),
        ("plan problem.json --model m --out m", "--out m is a folder; it needs to be a file"),
        ("plan problem.json --model m --out plan.json/x", "--out plan.json/x cannot be written: Not a"),
        ("plan problem.json --model m --out /proc/x", "--out /proc/x cannot be written: No such file"),
        (f"plan problem.json --model m --out {'x' * 250}", "cannot be written: File name too long"),
        (
            "price plan.json --problem problem.json --model m --out m/weights.safetensors",
            "is in the model that",
        ),
        ("replay plan.json --problem problem.json --append plan.json", "--append plan.json is a file"),
        ("replay plan.json --problem problem.json --out plan.json", "--out plan.json is the plans that is"),
        ("drift old problem --fresh problem.json --model m --out plan.json", "--out plan.json is a file"),
        ("drift old problem --fresh problem.json --model m --out .", "--out problem.json is the fresh"),
        ("drift old problem --fresh problem.json --model m --out old", "--out old/problem.json is in the"),
        (
            "drift file://old problem --fresh problem.json --model m --out old/x",
            "is in the plans that is read",
        ),
        ("diff old/plan.json new/plan.json --model m --page new/problem.json", "--page new/problem.json is"),
        ("train datasets --out plan.json", "--out plan.json is a file; it needs to be a folder"),
        ("train m --out m", "--out m/model.json is in the datasets that is read"),
        ("train old --start m --out m", "--out m/model.json is in the start that is read"),
        ("train-policy dreamshard --model m --out m", "--out m/policy.json is in the model that is read"),
        ("report old --out plan.json", "--out plan.json is a file; it needs to be a folder"),
        ("measure --out plan.json", "--out plan.json is a file; it needs to be a folder"),
        (f"{CLUSTER} --out new.json --out-problem x.json --clusters m", "--clusters m/clusters.json is in"),
        (f"{CLUSTER} --out new.json --out-problem problem.json", "--out-problem problem.json is the problem"),
        ("problem old --out old/p.json", "--out old/p.json is in the tables that is read"),
        (
            "plan problem.json --model m --hot-rows --out x.json --out-problem m/p.json",
            "--out-problem m/p.json is in the model",
        ),
        ("topology measure problem.json --out x --ranks problem.json", "--ranks problem.json is the"),
        ("export plan.json --problem problem.json --module x --out plan.json", "--out plan.json is the plan"),
        ("train absent --out x", "absent is no folder; it needs to be one of measurements"),
        ("report absent", "absent is no folder; it needs to be one of measurements"),
        (
            "report old",
            "old holds no compute samples and no traced steps; it needs to be a folder of measurements",
        ),
        ("plan loop --model m --out x", "cannot read loop: Too many levels of symbolic links"),
        ("plan problem.json --model m --out loop/x", "--out loop/x cannot be written: Too many levels of"),
    ],
)
def test_an_output_that_cannot_be_written_or_lies_on_what_is_read_is_refused_first(
    here, capsys, asked, message
):
    before = content(here)
    assert main(asked.split()) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""
    assert content(here) == before


@pytest.mark.parametrize(
    "asked",
    [
        ["plan", "problem.json", "--model", "m", "--out", ""],
        ["plan", "", "--model", "m", "--out", "x.json"],
        ["price", "plan.json", "--problem", "problem.json", "--model", "", "--out", "x.json"],
        ["train", "m", "--out", ""],
        ["plan", "problem.json", "--model", "m", "--out", "a\0b"],
        "plan problem.json --model m --out x.json --start plan.json --max-moved-gib 8589934592".split(),
        "plan problem.json --model m --out x.json --start plan.json --max-moved-gib nan".split(),
        "plan problem.json --model m --out x.json --start plan.json --moves-pay-back-in 10".split(),
        ["plan", "problem.json", "--model", "m", "--out", "x.json", "--seed", "1.5"],
        ["plan", "problem.json", "--model", "m", "--out", "x.json", "--budget-evals", "1e9"],
        ["plan", "problem.json", "--model", "m", "--out", "x.json", "--budget-s", "ten"],
        ["problem", "mlperf-dlrm-dcnv2", "--memory-gib", "1e9", "--out", "x.json"],
        "plan problem.json --model m --tiers --host-gib 1e300 --out x.json --out-problem y.json".split(),
    ],
)
def test_an_empty_path_and_a_number_that_no_machine_has_are_bad_usage(here, capsys, asked):
    before = content(here)
    with pytest.raises(SystemExit) as error:
        main(asked)
    output = capsys.readouterr().err
    assert error.value.code == 2 and ": error: argument " in output and "invalid" not in output
    assert content(here) == before


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"shardcore {__version__}\n"


def test_an_empty_name_of_an_algorithm_is_none_of_the_default(here, capsys):
    assert main(["plan", "problem.json", "--model", "m", "--out", "x.json", "--algorithm", ""]) == 1
    assert "error: algorithm '' is not known" in capsys.readouterr().err


def test_outputs_beside_what_is_read_and_over_an_older_output_are_written(here, capsys):
    for _ in range(2):
        assert main("price plan.json --problem problem.json --model m --out x/cost.json".split()) == 0
        assert json.loads((here / "x/cost.json").read_text())["total_ms"] > 0
    assert main("price plan.json --problem problem.json --model m --out /dev/null".split()) == 0
    assert [p.name for p in here.rglob(".*")] == []


def test_no_control_character_of_a_name_or_text_reaches_the_terminal(here, capsys, monkeypatch):
    """A decision's reason is text of whoever may write to the plans; a file may have any name."""
    problem = files.read_problem("problem.json")
    plan = files.read_plan("plan.json", problem)
    version = store.add_version("plans", problem, plan, {})
    store.record_decision(
        "plans",
        Decision(
            problem.name,
            "first",
            "\x1b[2J\x1b]0;x\x07 none",
            version,
            version,
            files.problem_digest(problem),
            1.0,
            provenance={"model": "\x1b[31m\r"},
        ),
    )
    for asked in (
        ["history", "plans", problem.name],
        ["price", "plan.json", "--problem", "problem.json", "--model", "m"],
        ["plan", "problem.json", "--model", "m", "--budget-evals", "9", "--out", "a\x1b[31m\udcff.json"],
    ):
        assert main(asked) == 0
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in (out + err).split("\n")), asked
    assert "a\\x1b[31m\\udcff.json: " in out


def test_every_path_that_a_command_writes_is_an_output():
    """Its help names such paths. A command without the mark could write over its inputs."""
    parsers = _commands(command_line_parser())
    assert len(parsers) > 15
    writes = {
        (name, a.dest)
        for name, p in parsers.items()
        for a in p._actions
        if a.type is parse_path
        and (a.dest in ("out", "append", "page") or re.search(r"\bwrite\b", a.help or ""))
    }
    assert writes == {
        (name, option) for name, p in parsers.items() for option in output_options(p.get_default("options"))
    }


def _commands(parser):
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                found |= {f"{name} {inner}": p for inner, p in _commands(one).items()} or {name: one}
    return found
