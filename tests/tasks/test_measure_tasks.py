"""The tasks that measure, on a Ray cluster: what is missing is measured, once; what was disturbed, once more."""

import logging
from collections import Counter

import pytest
from laws import pool, spread

from shardcore.core.types import Setting
from shardcore.io import dataset, files
from shardcore.io.measurements import ComputeSample
from shardcore.measure.sampling.groups import reference_request
from tasks import measure, replay
from tasks.measure import MeasureConfig, measure_comm, measure_compute, wanted_comm, wanted_compute

SETTING = Setting("test", 64)
CONFIG = MeasureConfig(
    compute_samples=8,
    comm_samples=3,
    chunk=2,
    max_shards=3,
    arena_bytes=1 << 24,
    min_repeats=2,
    max_repeats=2,
    interleave=3,
    comm_repeats=2,
)
TABLES = [t for t in pool() if t.rows < 20_000]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def progress(monkeypatch):
    """Progress reports: [kind, total, done, again]. (The flow's log and pages are for tests/flows.)"""
    told = []

    class Told:
        def __init__(self, kind, total, again=False):
            told.append([kind, total, 0, again])

        def add(self, device, samples, kernel_s=None):
            told[-1][2] += samples

        def show(self):
            pass

    monkeypatch.setattr(measure, "Progress", Told)
    for module in (measure, replay):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("measure"))
    return told


def timed(request, relative_ci, ms=1.0):
    return ComputeSample(
        dataset.compute_id(SETTING, request),
        SETTING,
        request,
        spread(ms),
        spread(ms),
        1.0,
        relative_ci=relative_ci,
    )


def test_what_is_missing_is_measured_and_what_was_disturbed_once_more(tmp_path, progress, caplog):
    files.write_pool(tmp_path / "pool.json", TABLES)
    folder, wanted = tmp_path / "measurements", list(wanted_compute(TABLES, SETTING, CONFIG).values())
    reference = reference_request(TABLES, SETTING, CONFIG.groups())
    there = [timed(reference, 0.01, ms=1.5), timed(wanted[0], 0.9), *(timed(r, 0.01) for r in wanted[1:6])]
    dataset.write_compute(folder, there, dataset.write_pool(folder, TABLES))
    with caplog.at_level(logging.INFO, "measure"):
        assert measure_compute.fn(tmp_path / "pool.json", SETTING, CONFIG, folder) == 2
    assert "8 compute samples wanted, 2 of them to measure" in caplog.text
    # as the dataset has it, not calibrated again
    assert "2 devices; the reference op takes 3.000 ms" in caplog.text
    assert "1 samples were disturbed and are measured once more" in caplog.text
    assert progress == [["compute", 2, 2, False], ["compute", 1, 1, True]]
    times = Counter(s.id for s in dataset.read_timings(folder))
    assert times.pop(dataset.compute_id(SETTING, reference)) > 1
    assert times == {dataset.compute_id(SETTING, r): 2 if r == wanted[0] else 1 for r in wanted}
    assert measure_compute.fn(tmp_path / "pool.json", SETTING, CONFIG, folder) == 0
    assert len(progress) == 2


def test_exchanges_that_are_missing_are_measured_by_one_gang(tmp_path, progress):
    folder, wanted = tmp_path / "measurements", wanted_comm(SETTING, 2, CONFIG)
    assert measure_comm.fn(SETTING, CONFIG, folder) == 3 and progress == [["comm", 3, 3, False]]
    found = dataset.read_comm(folder)
    assert {s.id: s.request for s in found} == wanted
    assert sorted(s.order for s in found) == [0, 1, 2] and all(
        (s.forward or s.backward)[1].repeats == 2 for s in found
    )
    assert [s.id for s in sorted(found, key=lambda s: s.order)] == list(wanted)
    assert measure_comm.fn(SETTING, CONFIG, folder) == 0 and len(progress) == 1


def test_where_no_steps_can_run_none_are_measured_and_a_line_says_why(tmp_path, progress, caplog):
    files.write_pool(tmp_path / "pool.json", TABLES)
    with caplog.at_level(logging.INFO, "measure"):
        assert (
            replay.measure_steps.fn(tmp_path / "pool.json", SETTING, CONFIG, tmp_path / "measurements") == 0
        )
    assert "what exchanges take in steps stays unknown: no host has two devices" in caplog.text
    assert not progress and not (tmp_path / "measurements").exists()
