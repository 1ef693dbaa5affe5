"""The commands that make and price plans."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from laws import SETTING
from shapes import column

from shardcore.cli import main
from shardcore.core.job import Job
from shardcore.core.topology import Device
from shardcore.core.types import Plan
from shardcore.cost.move_rates import MoveRates, write_move_rates
from shardcore.io import files
from shardcore.io.model_files import model_digest
from shardcore.step import memory
from shardcore.step.memory import used_bytes


def test_plan_improves_a_plan_that_there_is(stored, model, capsys):
    problem, old, new = (str(stored / n) for n in ("problem.json", "old.json", "new.json"))
    assert main(["plan", problem, "--model", str(model), "--algorithm", "size_greedy", "--out", old]) == 0
    again = ["plan", problem, "--model", str(model), "--budget-evals", "2000", "--out", new, "--start", old]
    assert main([*again, "--max-moved-tables", "0"]) == 0
    before, after = (files.read_plan(p, files.read_problem(problem)) for p in (old, new))
    output = capsys.readouterr().out
    assert before == after and f"starting from {old}, which cost" in output
    assert f"under {SETTING}, data unknown, model {model_digest(model)[:8]}" in output
    # A move of two hours does not pay back in a second.
    rates = stored / "rates.json"
    write_move_rates(rates, MoveRates(7200.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0))
    assert main([*again, "--moves-pay-back-in", "1s", "--move-rates", str(rates)]) == 0
    assert files.read_plan(new, files.read_problem(problem)).placements == before.placements
    assert "nothing moves" in capsys.readouterr().out
    assert main([*again, "--moves-pay-back-in", "9999h"]) == 0
    output = capsys.readouterr().out
    assert "; the move takes" in output and "and pays back in" in output
    assert main(again) == 0
    assert (
        files.read_plan(new, files.read_problem(problem)).provenance["predicted_ms"]
        < before.provenance["predicted_ms"]
    )
    assert (
        main([*again, "--algorithm", "neuroshard"]) == 1
        and "a plan to start from is for algorithm portfolio" in capsys.readouterr().err
    )
    assert (
        main([*again[:-2], "--max-moved-gib", "1"]) == 1
        and "--max-moved-gib 1.0 needs --start" in capsys.readouterr().err
    )


def test_a_search_without_a_budget_says_why_it_ended(stored, model, capsys, monkeypatch):
    monkeypatch.setattr("shardcore.search.portfolio.FEWEST_EVALS", 20_000)
    asked = f"plan {stored}/problem.json --model {model} --out {stored}/plan.json".split()
    said = "which ended once three quarters of its trials had brought less than"
    assert main([*asked, "--within", "1%"]) == 0 and f"{said} 1%" in capsys.readouterr().out
    assert main([*asked, "--within", "0.02"]) == 0 and f"{said} 2%" in capsys.readouterr().out
    assert main([*asked, "--budget-evals", "500"]) == 0 and said not in capsys.readouterr().out
    for text, message in (
        ("101%", "it is 101%; it needs to be a share from 0% to 100%, such as 1%"),
        ("-1", "it is -1; it needs to be a share"),
        ("nan", "it is nan; it needs to be a share"),
        ("a%", "'a' is not a number"),
        ("", "'' is not a number"),
    ):
        with pytest.raises(SystemExit):
            main([*asked, f"--within={text}"])
        assert f"argument --within: {message}" in capsys.readouterr().err


def test_a_plan_goes_on_where_tables_grew_and_a_device_is_gone(stored, model, problem, capsys):
    """Tables that grew are the same tables, and the device that is gone is one in the middle."""
    old, new, path, now = (stored / n for n in ("old.json", "new.json", "problem.json", "now.json"))
    six = replace(problem, topology=replace(problem.topology, devices=(Device(8 << 20),) * 8))
    files.write_problem(path, six)
    plan = Plan(tuple(column(t, i % 8) for i, t in enumerate(six.tables)))
    files.write_plan(old, plan, six)
    grown = tuple(replace(t, rows=t.rows * 3 // 2) for t in problem.tables)
    files.write_problem(
        now, replace(six, tables=grown, topology=replace(six.topology, devices=six.topology.devices[:4]))
    )
    asked = (
        f"plan {now} --model {model} --budget-evals 2000 --start {old} --start-problem {path} "
        f"--max-moved-tables 1 --out {new}"
    ).split()
    assert main([*asked, "--without", "1", "2", "--without", "5", "6"]) == 0
    output = capsys.readouterr().out
    found = files.read_plan(new, files.read_problem(now))
    moved, homes = found.provenance["moved"], {p.shard.table.name: p.devices for p in found.placements}
    assert moved["forced"]["tables"] and not moved["added"] and len(moved["chosen"]["tables"]) <= 1
    assert set(moved["forced"]["tables"]) == {f"t{i}" for i in range(24) if i % 8 in (1, 2, 5, 6)}
    stays = {
        p.shard.table.name: (0, 3, 4, 7).index(p.devices[0])
        for p in plan.placements
        if p.devices[0] in (0, 3, 4, 7)
    }
    others = {name for name, device in stays.items() if homes[name] != (device,)}
    assert others == set(moved["chosen"]["tables"])
    assert (
        "12 tables," in output
        and "had to (" in output
        and "24 tables of another shape" in output
        and "more than the limit of 1 tables, which does not count what had to move" in output
    )
    assert moved["new_bytes"] == sum(t.bytes for t in grown) - sum(t.bytes for t in problem.tables)
    assert main([*asked, "--without", "9"]) == 1
    assert "device 9 of problem 'shifting' cannot be gone" in capsys.readouterr().err
    assert main([*asked[:6], "--out", str(new), "--without", "3"]) == 1
    assert "--without 3 needs --start" in capsys.readouterr().err


def test_a_plan_that_fits_no_more_is_named_and_can_be_a_start(stored, model, capsys):
    """Like a plan of an earlier version that counted less memory: it was made with a little more than there is now."""
    old, new, path = stored / "old.json", stored / "new.json", stored / "problem.json"
    given = files.read_problem(path)
    plan = Plan(tuple(column(t, i % 2) for i, t in enumerate(given.tables)))
    tight = replace(
        given,
        topology=replace(
            given.topology, devices=(Device(max(used_bytes(plan, given)) - 1000),) * len(given.topology)
        ),
    )
    files.write_problem(path, tight)
    files.write_plan(old, plan, tight)
    asked = ["--problem", str(path), "--model", str(model)]
    for command in (["price", str(old), *asked], ["replay", str(old), *asked[:2]]):
        assert main(command) == 1
        output = capsys.readouterr().err
        assert output.startswith(f"error: {old}: device ") and output.count("\n") == 1
        assert re.search(
            r"would hold .* MiB \(weights .*\); it may hold .*, 1000 bytes too little\. .*"
            r"counted less when the plan was made; .*plan --start PLAN\.json searches one",
            output,
        )
    assert (
        main(["plan", str(path), *asked[2:], "--budget-evals", "500", "--start", str(old), "--out", str(new)])
        == 0
    )
    assert f"starting from {old}, which cost" in capsys.readouterr().out
    assert main(["price", str(new), *asked]) == 0


def test_plan_and_price_explain(stored, model, capsys, short_explanations):
    problem, plan = (str(stored / n) for n in ("problem.json", "plan.json"))
    asked = f"plan {problem} --model {model} --algorithm neuroshard --budget-evals 400 --out {plan}".split()
    assert main([*asked, "--explain"]) == 0
    output = capsys.readouterr().out
    assert "is ready last" in output and "size_greedy" in output
    provenance = files.read_plan(plan, files.read_problem(problem)).provenance
    assert main(["price", plan, "--problem", problem, "--model", str(model), "--explain"]) == 0
    priced = capsys.readouterr().out
    assert "is ready last" in priced and f"{provenance['predicted_ms']:.3f} ms" in priced


def test_a_file_that_is_read_is_not_written_over(stored, model, capsys):
    problem = stored / "problem.json"
    before = problem.read_bytes()
    assert main(["plan", str(problem), "--model", str(model), "--out", str(problem)]) == 1
    assert "problem.json is the problem that is read; it needs to be another file" in capsys.readouterr().err
    assert problem.read_bytes() == before


@pytest.mark.parametrize(
    "asked, message",
    [
        (
            "replay plan.json other.json --problem problem.json --out other.json",
            "--out other.json is the plans that",
        ),
        (
            "plan problem.json --model m --start plan.json --start-problem other.json --out other.json",
            "--out other.json is the start-problem that",
        ),
        ("plan problem.json --model m --start plan.json --out plan.json", "--out plan.json is the start"),
        ("diff plan.json other.json --page other.json", "--page other.json is the new that"),
        (
            "plan problem.json --model m --tiers --out x.json --out-problem problem.json",
            "--out-problem problem.json is the problem",
        ),
        (
            "plan problem.json --model m --tiers --out x.json --out-problem x.json",
            "--out-problem and --out are both x.json",
        ),
        (
            "topology measure problem.json --out found.json --ranks problem.json",
            "--ranks problem.json is the problem that",
        ),
    ],
)
def test_no_file_that_any_command_writes_is_one_that_it_reads(asked, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("problem.json", "plan.json", "other.json"):
        Path(name).write_text("kept")
    assert main(asked.split()) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert {p.read_text() for p in tmp_path.iterdir()} == {"kept"}


@pytest.fixture
def exporting(stored):
    """Arguments that export a plan to torchrec.json, without the module."""
    problem = files.read_problem(stored / "problem.json")
    plan = Plan(tuple(column(t, i % len(problem.topology)) for i, t in enumerate(problem.tables)))
    files.write_plan(stored / "plan.json", plan, problem)
    return (
        f"export {stored / 'plan.json'} --problem {stored / 'problem.json'} --out "
        f"{stored / 'torchrec.json'} --module"
    ).split()


@pytest.mark.parametrize("module", ["", ".", "a..b", "a/b", " m", "m.", "\x1b[1m"])
def test_what_cannot_be_a_path_of_a_module_is_refused(stored, exporting, capsys, module):
    assert main([*exporting, module]) == 1
    assert "error: module is '" in capsys.readouterr().err
    assert not (stored / "torchrec.json").exists()


def test_an_export_of_one_collection_needs_no_module_and_says_what_it_wrote(stored, exporting, capsys):
    out, given = stored / "torchrec.json", files.read_problem(stored / "problem.json")
    assert main(exporting[:-1]) == 0
    said, note = capsys.readouterr()
    path = "sparse_arch.embedding_bag_collection"
    assert said == f"{out}: 24 tables of {path}, for TorchRec\n" and f"has a module {path!r}" in note
    named = replace(given, tables=tuple(replace(t, collection="ebc") for t in given.tables))
    write(stored, named)
    assert main(exporting[:-1]) == 0
    said, note = capsys.readouterr()
    assert said == f"{out}: 24 tables of ebc, for TorchRec\n" and not note
    write(stored, replace(named, tables=(replace(named.tables[0], collection=""), *named.tables[1:])))
    out.unlink()
    assert main(exporting[:-1]) == 1
    said = "has several collections, and table 't0' names none; give its path in the model by --module\n"
    assert capsys.readouterr().err == f"error: problem 'shifting' {said}" and not out.exists()


def write(folder, problem):
    """Write a problem, and a plan of whole tables."""
    plan = Plan(tuple(column(t, i % len(problem.topology)) for i, t in enumerate(problem.tables)))
    files.write_problem(folder / "problem.json", problem)
    files.write_plan(folder / "plan.json", plan, problem)


def test_an_export_says_that_nothing_knows_the_model(exporting, capsys):
    assert main([*exporting, "nonsense.path"]) == 0
    assert "nothing here knows whether the model has a module 'nonsense.path'" in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["65537", "1000000000000"])
def test_a_problem_of_more_devices_than_there_are_is_one_line(tmp_path, capsys, devices):
    made = ["problem", "mlperf-dlrm-dcnv2", "--devices", devices, "--out", str(tmp_path / "p.json")]
    with pytest.raises(SystemExit) as usage:
        main(made)
    assert usage.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument --devices: it is {devices}; it needs 1 to 65,536\n")


def test_a_public_list_has_the_skew_that_is_given(tmp_path, capsys):
    path, folder = tmp_path / "p.json", tmp_path / "reports"
    made = ["problem", "mlperf-dlrmv3", "--devices", "16", "--zipf-alpha", "1.2", "--out", str(path)]
    assert main(made) == 0
    given = files.read_problem(path)
    assert (given.optimizer, given.tables[0].zipf_alpha) == ("rowwise_adagrad", 1.2)
    assert capsys.readouterr().out.startswith(f"{path}: 3 tables, 963.2 GiB in fp16, ")
    folder.mkdir()
    assert main([made[0], str(folder), *made[2:]]) == 1
    assert f"--zipf-alpha 1.2 was given with {folder}, which has measured" in capsys.readouterr().err


def test_a_problem_may_be_of_several_hosts(tmp_path, capsys):
    path = tmp_path / "p.json"
    made = ["problem", "mlperf-dlrm-dcnv2", "--devices", "8", "--hosts", "2", "--out", str(path)]
    assert main(made) == 0
    assert files.read_problem(path).topology.devices_by_host == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert capsys.readouterr().out.endswith(" 8 devices on 2 hosts\n")
    made[5] = "3"
    assert main(made) == 1
    assert capsys.readouterr().err == "error: 8 devices were asked for on 3 hosts; it needs as many on each\n"
    for hardware in ([], ["--hardware", "nvidia-h100-sxm"]):
        assert main([*made[:4], "--hosts", "4", "--pods", "2", *hardware, *made[-2:]]) == 0
        assert files.read_problem(path).topology.hosts[1:3] == ("pod-0/host-1", "pod-1/host-2")
        capsys.readouterr()
        assert main([*made[:4], "--hosts", "4", "--pods", "3", *hardware, *made[-2:]]) == 1
        said = "error: 4 hosts were asked for in 3 pods; it needs as many in each: 1 or 2 or 4 pods\n"
        assert capsys.readouterr().err == said


def test_a_problem_says_how_a_step_runs_and_keeps_memory_for_the_dense_part(tmp_path, capsys):
    path = tmp_path / "p.json"
    made = ["problem", "mlperf-dlrm-dcnv2", "--devices", "8", "--memory-gib", "10", "--out", str(path)]
    assert main([*made, "--pipeline", "none", "--dense-forward-ms", "2", "--dense-backward-ms", "3.5"]) == 0
    found = files.read_problem(path)
    assert found.job == Job("none", 2.0, 3.5)
    assert found.constraints.reserved_bytes == int(0.15 * 10 * 2**30)
    assert main(made) == 0 and files.read_problem(path).job == Job()
    assert main([*made, "--replica-optimizer", "adagrad"]) == 0
    assert files.read_problem(path).job == Job(replica_optimizer="adagrad")
    assert main([*made, "--forward-payload", "fp16", "--backward-payload", "bf16"]) == 0
    assert files.read_problem(path).job == Job(forward_payload="fp16", backward_payload="bf16")
    assert main([*made, "--dense-mflops", "32.06"]) == 0
    assert files.read_problem(path).job == Job(dense_mflops=32.06)
    capsys.readouterr()
    assert main([*made, "--dense-forward-ms", "2"]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: job has dense_forward_ms 2.0 and dense_backward_ms None; it needs both")


@pytest.mark.parametrize(
    "given, gib, setting",
    [
        ("", 80e9 / 2**30, (None, "fp32", "exact_adagrad")),
        ("--optimizer rowwise_adagrad --precision fp16", 80e9 / 2**30, (None, "fp16", "rowwise_adagrad")),
        ("--hardware nvidia-h100-sxm", 80e9 / 2**30, ("nvidia-h100-sxm", "fp32", "exact_adagrad")),
        ("--hardware nvidia-h100-sxm --memory-gib 40", 40, ("nvidia-h100-sxm", "fp32", "exact_adagrad")),
    ],
)
def test_a_problem_is_as_its_reference_trains_on_the_hardware_that_is_given(
    tmp_path, capsys, given, gib, setting
):
    path = tmp_path / "p.json"
    made = ["problem", "mlperf-dlrm-dcnv2", "--devices", "8", "--hosts", "2", "--batch", "65536"]
    assert main([*made, *given.split(), "--out", str(path)]) == 0
    found = files.read_problem(path)
    assert (found.topology.hardware, found.precision, found.optimizer) == setting
    assert {d.memory_bytes / 2**30 for d in found.topology.devices} == {gib} and len(
        found.topology.hosts
    ) == 2
    assert f"{setting[1]}, {setting[2]}, batch 65536, 8 devices" in capsys.readouterr().out


def test_a_problem_of_unknown_hardware_names_the_known(tmp_path, capsys):
    assert main(["problem", "hugectr-180", "--hardware", "h100", "--out", str(tmp_path / "p.json")]) == 1
    assert "error: profile 'h100' is not known; known are " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["price", "export", "replay"])
def test_a_plan_is_validated_once_and_what_is_wrong_names_its_file(
    stored, model, command, capsys, monkeypatch
):
    counted, validated = memory.require_fits, []
    monkeypatch.setattr(memory, "require_fits", lambda *args: validated.append(args) or counted(*args))
    problem = files.read_problem(stored / "problem.json")
    devices = tuple(replace(d, memory_bytes=1 << 10) for d in problem.topology.devices)
    small = replace(problem, topology=replace(problem.topology, devices=devices))
    files.write_problem(stored / "small.json", small)
    files.write_plan(stored / "large.json", Plan(tuple(column(t, 0) for t in small.tables)), small)
    more = {"price": ["--model", str(model)], "export": ["--module", "m"], "replay": ["--device", "cpu"]}
    given = f"{command} {stored}/large.json --problem {stored}/small.json --out {stored}/out.json"
    assert main([*given.split(), *more[command]]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {stored / 'large.json'}: device 0 of problem ") and "plan --start" in err
    assert len(validated) == 1 and not (stored / "out.json").exists()


def test_several_faults_of_a_problem_file_are_named_at_once(stored, capsys):
    path = stored / "problem.json"
    data = json.loads(path.read_text())
    for table in data["tables"][:8]:
        table["rows"] = "many"
    path.write_text(json.dumps(data))
    out = stored / "plan.json"
    assert main(["plan", str(path), "--hardware", "cpu", "--out", str(out)]) == 1 and not out.exists()
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"error: {path}, table 't0': rows is 'many'; it needs to be a whole number"
    assert [line.split(": ")[0] for line in others[:4]] == [f"{path}, table 't{i}'" for i in range(1, 5)]
    assert others[4:] == ["... and 3 more"]


def test_plan_prepares_for_the_loss_of_a_rank(stored, capsys):
    problem, out = stored / "problem.json", stored / "plan.json"
    folder = stored / "lost"
    options = f"--budget-evals 500 --out {out} --prepared {folder} --survive"
    asked = f"plan {problem} --hardware nvidia-h100-sxm {options}".split()
    assert main([*asked, "rank"]) == 0
    output = capsys.readouterr().out
    assert "GiB to read" in output and re.search(r"^rank 0 \(and \d+ like it\) ", output, re.M)
    left = files.read_problem(folder / "without-rank-0.problem.json")
    assert len(left.topology) == len(files.read_problem(problem).topology) - 1
    files.read_valid_plan(folder / "without-rank-0.plan.json", left)
    assert main([*asked, "host"]) == 1
    assert "has one host; a job that loses it has none left" in capsys.readouterr().err
    assert main([*asked, "rank", "--groups", "2"]) == 1
    assert "--groups" in capsys.readouterr().err
    alone = f"plan {problem} --hardware nvidia-h100-sxm --out {out} --survive rank".split()
    assert main(alone) == 1 and "--survive rank needs --prepared" in capsys.readouterr().err
    (stored / "file").write_text("")
    assert main([*alone, "--prepared", str(stored / "file")]) == 1
    assert "file" in capsys.readouterr().err
