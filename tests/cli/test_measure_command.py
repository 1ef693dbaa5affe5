"""`python -m shardcore measure`: it says what a folder lacks, measures it, goes on where it was stopped, and
loses nothing."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from shardcore.cli import main
from shardcore.core.types import Setting
from shardcore.io import dataset, files, replays
from shardcore.io.measurements import CollectiveSample, ComputeSample, TimingSpread
from shardcore.measure.sampling import distinct_requests
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request, reference_request
from shardcore.stages import measure as stage

ROOT = Path(__file__).parents[2]
SETTING = Setting("law", 64)
SHAPE = GroupConfig(max_shards=4, max_shard_bytes=8 << 20)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.mark.parametrize(
    "asked, message",
    [
        (["--max-repeats", "2"], "kernel config has max_repeats 2; it needs its min_repeats, 6, or more"),
        (["--device", "cuda"], "there is no CUDA device here"),
        (["--device", "cuda", "--hardware", "nvidia-h200"], "there is no CUDA device here"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    asked, message, command, folder, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*command, *asked]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    "option, value, right",
    [
        ("--exchanges", "1000000000000", "0 to 1,000,000"),
        ("--steps", "1000000000000", "0 to 1,000,000"),
        ("--ranks", "1000000", "0 to 1,024"),
        ("--hang-s", "1e12", "0.001 to 1,000,000"),
        ("--max-repeats", "1000000000000", "1 to 1,000,000"),
        ("--max-shards", "1000000000000", "1 to 65,536"),
        ("--tolerance", "2", "more than 0 to less than 1"),
    ],
)
def test_a_value_beyond_the_ends_of_its_declaration_is_bad_usage(
    option, value, right, command, folder, capsys
):
    with pytest.raises(SystemExit) as ended:
        main([*command, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: it is {value}; it needs {right}" in capsys.readouterr().err
    assert not folder.exists()


@pytest.fixture
def command(tables, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(stage, "CALIBRATE_S", 0.1)
    files.write_pool(tmp_path / "pool.json", tables)
    return [
        *"measure --device cpu --hardware".split(),
        SETTING.hardware,
        *(
            f"--pool {tmp_path / 'pool.json'} --batch 64 --max-shards 4 --arena-gib 0.0078125 "
            f"--max-repeats 6 --tolerance 0.9 --out {folder}"
        ).split(),
    ]


@pytest.mark.parametrize(
    "asked, message",
    [
        (["--optimizer", "lamb"], "FBGEMM does not train fp32 weights with lamb on cpu (Optimizer lamb is"),
        (["--precision", "bf16"], "FBGEMM does not train bf16 weights with exact_sgd on cpu ("),
    ],
)
def test_what_fbgemm_does_not_train_is_one_line_that_names_what_it_does(
    asked, message, command, folder, capsys
):
    assert main([*command, "--samples", "1", *asked]) == 1
    wanted, *error = capsys.readouterr().err.splitlines()
    assert wanted == "1 compute samples wanted, 1 of them to measure" and len(error) == 1
    assert message in error[0] and "here it trains exact_sgd with fp32 or fp16; " in error[0]
    assert not folder.exists()


@pytest.mark.parametrize("asked", [["--optimizer", "adagrad"], ["--precision", "fp8"]])
def test_an_unknown_optimizer_or_precision_is_bad_usage(asked, command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, *asked])
    assert ended.value.code == 2
    assert f"invalid choice: '{asked[1]}' (choose from " in capsys.readouterr().err


@pytest.fixture
def live(tables):
    return [t for t in tables if t.pooling > 0]


def measured(request, total_ms: float = 1.0, **fields) -> ComputeSample:
    part = TimingSpread(total_ms / 2, total_ms / 2, total_ms / 2, 6)
    return ComputeSample(
        dataset.compute_id(SETTING, request),
        SETTING,
        request,
        part,
        part,
        1.0,
        **{"relative_ci": 0.01, **fields},
    )


def drawn(live, n: int) -> list:
    draws = distinct_requests(
        lambda i: draw_compute_request(live, i, SETTING, 0, SHAPE),
        lambda r: dataset.compute_id(SETTING, r),
        n,
    )
    return [request for _, request in draws]


def test_it_says_what_is_missing_measures_it_and_has_it(command, live, folder, capsys):
    wanted = ["--samples", "6", "--exchanges", "2", "--steps", "2"]
    assert main([*command, *wanted, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output == (
        "groups: 6 of 6 are missing, 1 devices, about 1 s at the usual rate of two CPU cores\n"
        "exchanges: 2 of 2 are missing, 2 devices, about 1 s at the usual rate of two CPU cores\n"
        "steps of plans: 2 of 2 are missing, 2 devices, about 4 s at the usual rate of two CPU cores\n"
    )
    assert not folder.exists()
    assert main([*command, *wanted]) == 0
    output, shown = capsys.readouterr()
    assert f"measuring for {SETTING} into {folder}, 0 samples there already" in output
    assert float(re.search(r"the reference op takes ([\d.e-]+) ms", shown)[1]) > 0
    assert re.search(r"groups: 6 of 6, .* a second, 0 s left, \d+% of the time in kernels\n", shown)
    assert "exchanges: 2 of 2" in shown and "steps of plans: 2 of 2" in shown
    assert output.endswith("already\nmeasured 6 groups, 2 exchanges and 2 steps of plans\n")
    assert len(replays.replay_digests(folder)) == 1 + bool(re.search("steps of .* were disturbed", shown))
    reference = reference_request(live, SETTING, SHAPE)
    assert {s.request for s in dataset.read_compute_samples(folder)} == {reference, *drawn(live, 6)}
    assert all(s.error is None and s.setting == SETTING for s in dataset.read_compute_samples(folder))
    assert {s.request for s in dataset.read_collective_samples(folder)} == {
        draw_collective_request(i, 2, 64) for i in range(2)
    }
    assert len(list(folder.glob("compute-*.parquet"))) == len(list(folder.glob("comm-*.parquet"))) == 1
    assert main(["report", str(folder)]) == 0 and re.search(
        r"steps +2 plans of 1 problems", capsys.readouterr().out
    )


def test_a_rerun_measures_what_was_disturbed_failed_or_is_wanted_again(command, live, folder, tables, capsys):
    """At the folder's slowdown: its reference op usually takes 1,000 s, which no machine is as slow as."""
    requests, reference = drawn(live, 8), reference_request(live, SETTING, SHAPE)
    kept = [measured(r) for r in requests[:6]]
    # Beyond what any noise of this machine gives to the others: only an outlier counts as disturbed.
    kept[3] = dataclasses.replace(kept[3], relative_ci=1e6)
    kept[4] = dataclasses.replace(kept[4], forward=None, backward=None, error="out of memory")
    dataset.write_compute_samples(
        folder, [*kept, measured(reference, 1e6)], dataset.write_pool(folder, tables)
    )
    assert main([*command, "--samples", "7", "--again", "1"]) == 0
    output, shown = capsys.readouterr()
    assert (
        "6 samples there already\n" in output and "1 devices; the reference op takes 1000000.000 ms" in shown
    )
    assert "groups: 3 of 3" in shown and re.search(
        r"\d samples were disturbed and are measured once more\n", shown
    )
    new = {s.request: s for s in dataset.read_compute_timings(folder) if s.measured_at > 1.0}
    assert set(new) - {reference} == {requests[i] for i in (0, 3, 4, 6)}
    assert all(s.slowdown < 1e-3 and s.total_ms > 1e3 for s in new.values())


def test_nothing_starts_where_nothing_is_missing_or_the_machine_lacks_what_is_asked_for(
    command, live, folder, tables, capsys
):
    kept = [measured(r) for r in (*drawn(live, 6), reference_request(live, SETTING, SHAPE))]
    dataset.write_compute_samples(folder, kept, dataset.write_pool(folder, tables))
    dataset.write_compute_samples(
        folder, [dataclasses.replace(kept[0], measured_at=2.0)], dataset.write_pool(folder, tables)
    )
    exchanges = [draw_collective_request(i, 2, 64) for i in range(2)]
    ms = (TimingSpread(1.0, 1.0, 1.0, 7),) * 2
    forward = [None if r.collective == "all_reduce" else ms for r in exchanges]
    dataset.write_collective_samples(
        folder,
        [
            CollectiveSample(dataset.collective_id(SETTING, r), SETTING, r, there, ms, (0.0, 0.0), 1.0)
            for r, there in zip(exchanges, forward, strict=True)
        ],
    )
    assert main([*command, "--samples", "6", "--exchanges", "2"]) == 0
    assert "measured 0 groups, 0 exchanges and 0 steps of plans\n" in capsys.readouterr().out
    assert (
        len(list(folder.glob("compute-*.parquet"))) == 1 and len(dataset.read_compute_timings(folder)) == 8
    )  # merged
    assert main([*command, "--samples", "6", "--ranks", "3", "--exchanges", "4"]) == 1
    assert "--ranks is 3; an exchange needs at least 2, and a number that divides the batch of 64" in (
        capsys.readouterr().err
    )
    assert main([*command, "--samples", "6", "--ranks", "64", "--steps", "4"]) == 1
    there = len(os.sched_getaffinity(0))
    assert f"--ranks is 64; steps of so many need as many cores, here are {there}" in capsys.readouterr().err
    assert (
        main([*command, "--ranks", "0", "--exchanges", "4", "--samples", "6", "--dry-run"]) == 0
    )  # as many as there are
    assert " of 4 are missing" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out == "groups: as many as 10 min have time for\n"


# --- stopped, killed ----------------------------------------------------------------------------------------


@pytest.fixture
def started(command):
    """Starts the command in a session of its own, with twenty lines of progress a second, and ends what is left of
    it."""
    runs, script = (
        [],
        (
            "import sys; from shardcore.cli import progress_line; from shardcore.stages import measure as stage;"
            "stage.CALIBRATE_S = 0.1; progress_line._LINES_S = 0.05;"
            "from shardcore.cli import main; sys.exit(main(sys.argv[1:]))"
        ),
    )

    def start(*options):
        run = subprocess.Popen(
            [sys.executable, "-c", script, *command, *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        runs.append(run)
        return run

    yield start
    for run in runs:
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.communicate()


def wait_for(run, line: str, timeout_s: float = 120.0) -> None:
    """Until the process shows a line that matches; fails with what it showed where it ends before, or in time."""
    ending = threading.Timer(timeout_s, os.killpg, (run.pid, signal.SIGKILL))
    ending.start()
    shown = []
    try:
        while not (shown and re.search(line, shown[-1])):
            shown.append(run.stderr.readline())
            if not shown[-1]:
                pytest.fail(f"it ended without showing {line!r}: {''.join(shown)}")
    finally:
        ending.cancel()


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(started, folder):
    run = started("--chunk", "100000")
    wait_for(run, "s: groups: [1-9]")
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    _, shown = run.communicate(timeout=60)  # its output ends when the last process that could write there has
    assert run.returncode == 130 and all(" s: groups: " in line for line in shown.splitlines()), shown
    assert dataset.read_compute_samples(folder)  # though no chunk was full


@pytest.mark.long
def test_killed_and_resumed_it_has_every_sample_once(started, command, live, folder):
    """SIGKILL while it measures."""
    run = started("--samples", "30", "--chunk", "8")
    wait_for(run, "s: groups: (8|9|1[0-9]) of")  # a part was written
    run.kill()
    run.communicate(timeout=60)  # its measuring process sees that it is alone
    kept = dataset.read_timed_ids(folder, "compute")
    assert kept
    unfinished = folder / ".compute-cut-short.parquet.1.tmp"
    unfinished.write_bytes(b"half")
    # this one, and what the kill left; no other host can still be writing them
    for left in folder.glob(".*.tmp"):
        os.utime(left, (time.time() - 7200,) * 2)
    assert main([*command, "--samples", "30"]) == 0
    samples, repeats = (
        dataset.read_compute_samples(folder),
        dataset.repeated_samples(dataset.read_compute_timings(folder)),
    )
    assert kept <= {s.id for s in samples} and len(samples) == 31  # with the reference op
    assert not list(folder.glob(".*.tmp"))
    reference = dataset.compute_id(SETTING, reference_request(live, SETTING, SHAPE))
    # Others were measured twice only if they were disturbed, which half may be on a busy machine.
    twice = [sorted(each, key=lambda s: s.measured_at) for each in repeats if each[0].id != reference]
    assert all(len(each) == 2 and each[0].relative_ci > 2 * 0.9 for each in twice)
