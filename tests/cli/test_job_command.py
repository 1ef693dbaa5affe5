"""The commands job read and job watch, on the folder that a job's profiler leaves."""

import json
import re
from dataclasses import replace

import job_folders
import numpy as np
import pytest
from job_folders import UNEVEN, traced_step
from kineto_traces import event, gloo_step, ranks_of, write
from laws import comm_samples, compute_samples, linear_law, pool
from sealing import edit
from shapes import column

from shardcore.cli import main
from shardcore.core.access_statistics import Reuse
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Plan
from shardcore.cost import composite
from shardcore.cost.profile import load_profile
from shardcore.io import dataset, files, job_folder
from shardcore.plans.gain import PlanGain
from shardcore.search.anneal.reshard import rebind_tables


@pytest.fixture
def folder(tmp_path):
    traced_step(tmp_path / "job")
    return tmp_path / "job"


def output_of(capsys, *argv):
    code = main([str(a) for a in argv])
    return code, *capsys.readouterr()


def test_read_says_what_the_step_spends_and_why(folder, capsys):
    code, out, err = output_of(capsys, "job", "read", folder)
    assert code == 0
    for words in ("lookups forward", "waiting for the last rank", "named"):
        assert words in out
    assert "Ranks wait up to 3.0 ms of 20.0 for rank 1: its lookups forward took 3.0 ms more" in out
    assert "not recognised: " in err and "mylib::secret 0.30 ms" in err


def test_read_compares_with_a_model_and_writes_the_corrected_one(folder, model, tmp_path, capsys):
    code, out, _ = output_of(capsys, "job", "read", folder, "--model", model, "--out", tmp_path / "corrected")
    assert code == 0 and "step 18.0 ms measured" in out and "exchange of outputs" in out
    lineage = composite.load_models(tmp_path / "corrected").meta["provenance"]["job"]
    name = f"{folder.name}-00001000"
    assert lineage["job"] == "step-00001000" and lineage["steps"] == [name]
    assert lineage["traces"][name].keys() == {"0", "1"}
    # What the job takes is what its corrected model says.
    problem = tmp_path / "problem.json"
    assert output_of(capsys, "job", "read", folder, "--model", model, "--out-problem", problem)[0] == 0
    plan = tmp_path / "plan.json"
    given = files.read_problem(problem)
    files.write_plan(plan, rebind_tables(UNEVEN, given), given)
    asked = ("price", plan, "--problem", problem, "--model", tmp_path / "corrected", "--json")
    code, out, _ = output_of(capsys, *asked)
    assert code == 0 and json.loads(out)["total_ms"] == pytest.approx(18.0, rel=0.01)


def test_a_folder_without_one_rank_is_read_with_its_plan_and_says_what_is_missing(model, tmp_path, capsys):
    traced_step(tmp_path / "job", ranks=(0,))
    out = tmp_path / "corrected"
    code, text, err = output_of(capsys, "job", "read", tmp_path / "job", "--model", model, "--out", out)
    missing = "Rank 1 is missing: exchanges hold the waiting for them, uncorrected."
    # Below both tables, and in the sentence.
    assert code == 0 and text.count(missing) == 3
    assert "traces of 1 of 2 ranks: rank 1 is missing" in err
    assert "lookups of 1 of 2 ranks: step-00001000 has no rank-1.lookups.npz" in err
    assert "use ShardCoreProfiler" not in err
    job = composite.load_models(out).meta["provenance"]["job"]
    assert any(
        "traces of rank 1 is missing; such steps correct no exchange" in line for line in job["refused"]
    )
    assert {name.split()[0] for name in job["factors"]} == {"lookups"}


def test_a_whole_step_is_read_before_a_newer_one_without_a_rank(folder, capsys):
    traced_step(folder, 2000, ranks=(0,))
    code, out, err = output_of(capsys, "job", "read", folder)
    assert code == 0 and "rank 1" in out and "missing" not in out + err


def test_the_table_shows_the_rank_whose_waiting_the_sentence_quotes(tmp_path, capsys):
    waits_ms = (9.0, 1.0, 1.2, 0.0, 1.1, 1.3, 1.4, 1.5)
    for rank, events in ranks_of(8, 0.4, waits_ms).items():
        write(tmp_path / "traces", rank, events, 8)
    code, out, _ = output_of(capsys, "job", "read", tmp_path / "traces")
    assert code == 0 and "Ranks wait up to 9.0 ms of 20.0 for rank 3" in out
    headers, waiting = (
        next(line for line in out.splitlines() if line.startswith(words)).split()
        for words in ("ms ", "waiting for")
    )
    shown = [int(word) for word in headers if word.isdigit()]
    assert {0, 3} < set(shown) and waiting[-len(shown)] == "9.00" and "and 4 more ranks" in out


def test_a_gain_within_its_error_is_not_worth_it(folder, model, capsys, monkeypatch):
    options = ("--model", model, "--propose", "--budget-evals", 300)
    worth = output_of(capsys, "job", "read", folder, *options)[1]
    gain, margin = map(float, re.search(r"gain ([\d.]+)% ± ([\d.]+)%", worth).groups())
    assert ("not worth it" in worth) == (gain <= margin)
    monkeypatch.setattr(PlanGain, "exceeds_margin", lambda self: False)
    doubtful = output_of(capsys, "job", "read", folder, *options)[1]
    assert ", not worth it: within the error" in doubtful


def test_a_packed_file_of_lookups_is_refused(folder):
    path = job_folder.complete_step_folders(folder)[-1] / "rank-0.lookups.npz"
    with np.load(path) as arrays:
        np.savez_compressed(path, **{name: np.zeros(1 << 20, int) for name in arrays.files})
    with pytest.raises(ShardCoreError, match=r"rank-0.lookups.npz has [\d,]+ bytes, and has packed"):
        job_folder.read_step(path.parent)


def test_a_trace_of_another_plan_is_read_and_corrects_nothing(model, tmp_path, capsys):
    traced_step(tmp_path / "job", entered=2.0)
    options = ("--model", model, "--out", tmp_path / "corrected")
    code, out, err = output_of(capsys, "job", "read", tmp_path / "job", *options)
    assert code == 1 and "Ranks wait up to 3.0 ms" in out and not (tmp_path / "corrected").exists()
    assert "the trace is of another plan or job: nothing is corrected by it" in err.splitlines()[-1]


def test_propose_says_what_a_better_plan_brings(folder, model, tmp_path, capsys):
    out_plan, out_problem = tmp_path / "plan.json", tmp_path / "problem.json"
    code, out, _ = output_of(
        capsys, "job", "read", folder, "--model", model, "--propose", "--budget-evals", 300, "--out-plan", out_plan,
        "--out-problem", out_problem,
    )  # fmt: skip
    assert code == 0
    assert "with the proposed plan" in out and "tables move" in out and "bytes, about" in out
    plan = files.read_plan(out_plan, files.read_problem(out_problem))
    assert len({d for p in plan.placements for d in p.devices}) == 2


def test_a_profile_is_corrected_as_a_model_is(folder, tmp_path, capsys):
    out = tmp_path / "profile.json"
    code, text, _ = output_of(
        capsys, "job", "read", folder, "--hardware", "nvidia-h100-sxm", "--out-profile", out
    )
    assert code == 0 and "step 18.0 ms measured" in text
    assert "corrected by traces of step-00001000" in load_profile(out).rates["read_gbps"].source


def test_watch_says_each_step_once(folder, capsys):
    traced_step(folder, 2000)
    traced_step(folder, 3000, ranks=(0,))  # not all ranks wrote theirs yet
    code, out, _ = output_of(capsys, "job", "watch", folder, "--steps", 2, "--seconds", 0.01)
    assert code == 0 and [line.split(":")[0] for line in out.splitlines()] == [
        "step-00001000",
        "step-00002000",
    ]


def test_watch_names_a_damaged_step_and_goes_on(folder, capsys):
    (traced_step(folder, 2000) / job_folder.JOB_JSON).write_text("{")
    traced_step(folder, 3000)
    code, out, err = output_of(capsys, "job", "watch", folder, "--steps", 3, "--seconds", 0.01)
    assert code == 0 and "step-00003000: Ranks wait" in out
    assert "step-00002000: " in err and "job.json is not whole JSON" in err


def test_watch_says_that_it_waits(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "later").mkdir()
    monkeypatch.setattr("time.sleep", lambda _: traced_step(tmp_path / "later"))
    code, _, err = output_of(capsys, "job", "watch", tmp_path / "later", "--steps", 1)
    assert code == 0 and "later has no traced step of all ranks yet; waiting for one" in err


def test_watch_refuses_a_model_that_cannot_be_read_at_once(folder, tmp_path, capsys):
    code, out, err = output_of(capsys, "job", "watch", folder, "--model", tmp_path / "typo")
    assert code == 1 and "typo" in err and not out


def test_a_problem_of_other_ranks_is_refused(folder, model, problem, tmp_path, capsys):
    plan, other = (
        tmp_path / "plan.json",
        replace(problem, topology=Topology(problem.topology.devices[:1] * 4)),
    )
    files.write_problem(tmp_path / "problem.json", other)
    files.write_plan(plan, Plan(tuple(column(t, 0) for t in other.tables)), other)
    code, _, err = output_of(
        capsys,
        "job",
        "read",
        folder,
        "--model",
        model,
        "--problem",
        tmp_path / "problem.json",
        "--plan",
        plan,
    )
    assert code == 1 and "traces of jobs of 2 and 4 ranks" in err


@pytest.mark.parametrize(
    "options, words",
    [
        (("--propose",), "--propose needs --model or --hardware"),
        (("--out", "x"), "--out x needs --model or"),
        (("--problem", "p.json"), "--problem and --plan belong together"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, options, words, capsys):
    code, _, err = output_of(capsys, "job", "read", folder, *options)
    assert code == 1 and words in err


def test_traces_without_a_plan_are_read_and_not_compared(tmp_path, model, capsys):
    write(tmp_path / "traces", 0, gloo_step(), 1)
    assert output_of(capsys, "job", "read", tmp_path / "traces")[0] == 0
    code, _, err = output_of(capsys, "job", "read", tmp_path / "traces", "--model", model)
    assert code == 1 and "without a problem and a plan" in err


def test_lookups_of_all_ranks_make_the_problem(folder):
    step = job_folder.read_step(job_folder.complete_step_folders(folder)[-1])
    assert [t.pooling for t in step.problem.tables] == [3.0] * 6
    assert all(isinstance(t.access, Reuse) for t in step.problem.tables)
    assert {p.shard.table for p in step.plan.placements} == set(step.problem.tables)
    assert step.total_ms == 18.0 and step.remarks == ()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda f: (f / "rank-0.lookups.npz").unlink(), "lookups of 1 of 2 ranks"),
        (
            lambda f: [(f / f"rank-{r}.steps.json").unlink() for r in (0, 1)],
            "no steps without tracing were timed",
        ),
    ],
)
def test_what_is_missing_in_a_step_is_a_remark(folder, spoil, words):
    where = job_folder.complete_step_folders(folder)[-1]
    spoil(where)
    assert any(words in remark for remark in job_folder.read_step(where).remarks)


@pytest.mark.parametrize(
    "name, content",
    [
        ("job.json", b"{}"),
        ("rank-0.lookups.npz", b"PK\x03\x04 cut"),
        ("rank-1.steps.json", b'{"median_ms": -1, "q1_ms": 1, "q3_ms": 1, "repeats": 1}'),
        ("plan.json", b"{"),
    ],
)
def test_a_damaged_file_of_a_step_is_named(folder, name, content):
    where = job_folder.complete_step_folders(folder)[-1]
    (where / name).write_bytes(content)
    with pytest.raises(ShardCoreError, match=name.replace(".", r"\.")):
        job_folder.read_step(where)


def test_a_table_without_features_is_refused(folder):
    where = job_folder.complete_step_folders(folder)[-1]
    edit(where / "job.json", lambda facts: facts["features"].update(t0=[]))
    with pytest.raises(ShardCoreError, match=r"job.json and problem.json differ in tables \['t0'\]"):
        job_folder.read_step(where)


@pytest.mark.parametrize("lengths", [[2**40] * 3, [-1, 4], [2**63 - 1, 2**63 - 1, 5]])
def test_lengths_that_are_not_of_the_ids_are_refused(folder, lengths):
    path = job_folder.complete_step_folders(folder)[-1] / "rank-0.lookups.npz"
    with np.load(path) as arrays:
        np.savez(path, **{**arrays, "ids:f-t0": np.arange(3), "lengths:f-t0": np.array(lengths)})
    with pytest.raises(
        ShardCoreError, match=r"rank-0.lookups.npz has no lookups: ids:f-t0 has 3 ids, and lengths"
    ):
        job_folder.read_step(path.parent)


def test_names_in_traces_control_no_terminal(tmp_path, capsys):
    write(tmp_path / "t", 0, [*gloo_step(), event("evil\x1b[31m\r\nname", 19, 0.2)], 1)
    code, out, err = output_of(capsys, "job", "read", tmp_path / "t")
    assert code == 0 and r"evil\x1b[31m\r" in err
    assert all(line.isprintable() for line in (out + err).split("\n"))


@pytest.mark.usefixtures("few_epochs")
def test_a_traced_step_joins_a_dataset_and_training_on_it(folder, model, tmp_path, capsys):
    data = tmp_path / "data"
    compute = compute_samples(linear_law, 60)
    dataset.write_compute_samples(data, compute, dataset.write_pool(data, pool()))
    dataset.write_collective_samples(data, comm_samples(20))
    code, _, err = output_of(capsys, "job", "read", folder, "--model", model, "--append", data)
    assert code == 0 and f"a traced step, which `train {data}` joins" in err
    code, _, err = output_of(capsys, "train", data, "--out", tmp_path / "joined")
    assert code == 0 and "1 traced steps of" in err and "error on held-out traces" in err
    code, out, _ = output_of(capsys, "report", data)
    assert code == 0 and "traced steps" in out and "1 of job" in out


def test_appending_needs_a_model_which_names_the_hardware(folder, tmp_path, capsys):
    code, _, err = output_of(capsys, "job", "read", folder, "--append", tmp_path)
    assert code == 1 and f"--append {tmp_path} needs --model or --hardware" in err


def test_tables_without_ids_in_the_traced_batches_are_named(tmp_path, model, monkeypatch, capsys):
    draw = job_folders.lookups

    def without_some(rank, rng):
        none = np.zeros(0, int), np.zeros(job_folders.PROBLEM.local_batch, int)
        return draw(rank, rng) | {"f-t1": none, "f-t4": none}

    monkeypatch.setattr(job_folders, "lookups", without_some)
    traced_step(tmp_path / "job")
    code, _, err = output_of(capsys, "job", "read", tmp_path / "job", "--model", model)
    assert code == 0
    assert "tables ['t1', 't4'] have no ids in the traced batches: they count as never looked up" in err
