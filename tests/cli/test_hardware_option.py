"""A profile in place of a model, in every command that prices."""

import json
import re
from dataclasses import replace

import pytest
from offers import LEAST, write_offers

from shardcore.cli import main
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.cost.profile import load_profile, write_profile
from shardcore.io import files

CARD = "nvidia-h100-sxm"
SAID = "profile: published measurements, not of your machine"
PLAN = f"plan problem.json --hardware {CARD} --algorithm size_greedy --out plan.json"


@pytest.fixture
def here(stored, problem, monkeypatch):
    """The folder with the problem, and with a plan."""
    monkeypatch.chdir(stored)
    assert main(PLAN.split()) == 0
    return stored


def changed(problem, **fields):
    files.write_problem("problem.json", replace(problem, **fields))


@pytest.mark.parametrize(
    "precision, fields",
    [
        ("fp32", {"global_batch": 65_536, "optimizer": "exact_adagrad"}),
        ("fp16", {"optimizer": "adam", "job": Job(forward_payload="fp16", backward_payload="bf16")}),
        ("bf16", {"optimizer": "rowwise_adagrad", "global_batch": 16}),
    ],
)
def test_a_profile_prices_any_setting_and_says_what_it_is(here, problem, precision, fields, capsys):
    memory = tuple(replace(d, memory_bytes=1 << 30) for d in problem.topology.devices)
    tables = tuple(replace(t, precision=precision) for t in problem.tables)
    fields = {"tables": tables, "topology": replace(problem.topology, devices=memory), **fields}
    changed(problem, **fields)
    capsys.readouterr()
    assert main(PLAN.split()) == 0
    out, err = capsys.readouterr()
    assert f"{SAID}, model {load_profile(CARD).digest[:8]}" in out and " ms predicted ±" in out
    assert f"extrapolated: {SAID} (band ±" in err
    plan = files.read_plan("plan.json", files.read_problem("problem.json"))
    assert plan.provenance["profile"] == SAID and plan.provenance["model_digest"] == load_profile(CARD).digest
    assert main(f"price plan.json --problem problem.json --hardware {CARD} --out cost.json".split()) == 0
    cost = json.loads((here / "cost.json").read_text())
    assert cost["total_ms"] == pytest.approx(plan.provenance["predicted_ms"])
    assert cost["band"] > 0 and cost["extrapolated"][0].startswith(f"{SAID} (band ±")


def test_the_profile_that_made_a_plan_prices_it_if_none_is_given(here, capsys):
    capsys.readouterr()
    for command in (
        "price plan.json --problem problem.json",
        "diff plan.json plan.json --problem problem.json --page page.html",
        "view plan.json --problem problem.json --out view.html",
    ):
        assert main(command.split()) == 0
        assert (
            f"note: priced by profile {CARD}, with which plan.json was planned\n" in capsys.readouterr().err
        )
    write_profile("mine.json", replace(load_profile(CARD), name="mine"))
    assert main(PLAN.replace(CARD, "mine.json").split()) == 0
    assert main("price plan.json --problem problem.json".split()) == 1
    said = "plan.json was not planned with a profile that ships with ShardCore; give --model or --hardware\n"
    assert capsys.readouterr().err.endswith(f"error: {said}")


def test_a_price_is_a_table_of_devices_their_bottleneck_and_memory(here, problem, capsys):
    changed(problem, job=Job(dense_forward_ms=1.0, dense_backward_ms=2.0))
    assert main(PLAN.split()) == 0
    capsys.readouterr()
    asked = f"price plan.json --problem problem.json --hardware {CARD}".split()
    assert main([*asked, "--json"]) == 0
    cost, (out, _) = json.loads(capsys.readouterr().out), (main(asked), capsys.readouterr())[1]
    first, *_ = out.splitlines()
    embeddings = f"{cost['total_ms'] - 3:.3f} ms ±{cost['embeddings_band']:.0%}"
    whole = f"{cost['total_ms']:.3f} ms a step predicted ±{cost['band']:.0%}"
    assert first == f"plan.json: {whole}, of which the embeddings take {embeddings}"
    assert 0 < cost["band"] < cost["embeddings_band"]
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for d, row in enumerate(rows):
        assert row[1] == f"{cost['forward_compute_ms'][d]:.3f}" and row[-3:-1] == [
            f"{cost['memory_bytes'][d] / 2**20:.1f}",
            "MiB",
        ]
    assert "is the bottleneck, ready last: its compute takes" in out and "dense part adds 3.000 ms" in out


def test_a_plan_says_the_whole_step_beside_the_embeddings_and_how_sure(here, problem, capsys):
    """Of a dense part in operations, too; without one it says how to state it."""
    capsys.readouterr()
    assert main(PLAN.split()) == 0
    alone = r"plan\.json: ([\d.]+) ms predicted ±\d+% \(the embeddings alone; job\.dense_mflops states the dense part\)"
    alone_ms = float(re.match(alone, capsys.readouterr().out)[1])
    changed(problem, job=Job(dense_mflops=3200.0))
    assert main([*PLAN.split(), "--explain"]) == 0
    out = capsys.readouterr().out
    said = (
        r"plan\.json: ([\d.]+) ms predicted ±(\d+)%, of which the embeddings take ([\d.]+) ms ±(\d+)%, found"
    )
    whole_ms, _, embeddings_ms, _ = map(float, re.match(said, out).groups())
    dense_ms = (
        3 * 3200e6 * problem.local_batch / (load_profile(CARD).rate_values["dense_tflops"] * 1e12) * 1e3
    )
    assert whole_ms - embeddings_ms == pytest.approx(dense_ms, abs=2e-3) and embeddings_ms <= alone_ms
    assert f"{dense_ms:.3f} ms of dense part" in out
    # No plan costs less than what is proved, which has the dense part, too.
    assert dense_ms < float(re.search(r"No plan takes less than ([\d.]+) ms", out)[1]) <= whole_ms


def test_numbers_of_a_price_have_seven_digits(here, capsys):
    capsys.readouterr()
    assert main("price plan.json --problem problem.json --json --out cost.json".split()) == 0
    out, _ = capsys.readouterr()
    assert max(len(digits.strip("0")) for digits in re.findall(r"\.(\d+)", out)) <= 10
    assert json.loads(out) == json.loads((here / "cost.json").read_text())


def test_a_profile_s_file_may_be_given(here, capsys):
    write_profile("mine.json", replace(load_profile(CARD), name="mine"))
    assert main(PLAN.replace(CARD, "mine.json").split()) == 0
    assert "under mine, batch" in capsys.readouterr().out


def test_the_other_commands_that_price_take_a_profile(here, problem, capsys):
    host = replace(problem.topology, memory=(Memory("host", 1 << 30, 20.0),))
    changed(problem, topology=host)
    by = f"--hardware {CARD}"
    for command in (
        f"plan problem.json {by} --tiers --algorithm size_greedy --out tiered-plan.json --out-problem tiered.json",
        f"diff tiered-plan.json tiered-plan.json --problem tiered.json {by} --page page.html",
    ):
        assert main(command.split()) == 0, capsys.readouterr().err
    assert f"Beyond what was measured: {SAID}" in (here / "page.html").read_text()


def test_an_offer_may_have_a_profile(here, capsys):
    def planned(**more):
        write_offers("offers.json", LEAST | more)
        given = "plan problem.json --offers offers.json --step-ms 9 --algorithm size_greedy"
        return main(f"{given} --out o/plan.json --out-problem o/problem.json".split())

    assert planned(hardware=CARD) == 0
    out, err = capsys.readouterr()
    assert SAID in out and f"extrapolated: {SAID}" in err
    plan = files.read_plan("o/plan.json", files.read_problem("o/problem.json"))
    assert plan.provenance["profile"] == SAID
    write_profile("mine.json", replace(load_profile(CARD), name="mine"))
    assert planned(hardware="mine.json") == 0 and "under mine, " in capsys.readouterr().out
    for wrong in ({}, {"hardware": CARD, "model": "m"}):
        assert planned(**wrong) == 1
        assert "offer 'box' has model " in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, message",
    [
        ("--hardware gtx-1080", "profile 'gtx-1080' is not known; known are "),
        ("--hardware trained", "or a path of a file; a trained model's folder goes by --model"),
        ("--model trained", "trained holds no model.json; give the folder of a trained model by --model"),
        (
            "--model problem.json",
            "problem.json holds no model.json; give the folder of a trained model by --model",
        ),
        ("--hardware absent.json", "absent.json"),
        (f"--hardware {CARD} --confidence 0.9", "has no quantiles"),
    ],
)
def test_a_profile_or_model_that_cannot_be_used_is_one_line(here, given, message, capsys):
    capsys.readouterr()
    (here / "trained").mkdir(exist_ok=True)
    assert main(f"plan problem.json {given} --out x.json".split()) == 1
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1] and not out and not (here / "x.json").exists()


@pytest.mark.parametrize(
    "hardware, fits", [(CARD, True), ("nvidia-h100-80gb-hbm3", True), ("nvidia-v100", False)]
)
def test_hardware_that_contradicts_the_problem_s_is_refused(here, problem, hardware, fits, capsys):
    changed(problem, topology=replace(problem.topology, hardware=hardware))
    assert main(PLAN.split()) == (0 if fits else 1)
    wanted = f"error: problem 'shifting' is for hardware '{hardware}', the profile for '{CARD}'; give a profile of "
    wanted += "that hardware, or a model trained on it by --model"
    assert (wanted in capsys.readouterr().err) != fits


@pytest.mark.parametrize("given", ["", f"--model m --hardware {CARD}"])
def test_a_model_or_a_profile_is_given_not_both(here, given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(f"plan problem.json {given} --out x.json".split())
    assert ended.value.code == 2 and "--hardware" in capsys.readouterr().err
