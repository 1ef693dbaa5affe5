"""Measuring on a Ray cluster: what is missing is measured, once; what was disturbed, once more."""

from collections import Counter

import pytest
from laws import pool, spread

from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import ComputeSample
from shardcore.measure.config import CollectiveConfig, KernelConfig
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.stages import measure
from shardcore.stages.measure import WantedSamples
from shardcore.stages.measure_config import MeasureConfig
from tasks.ray_transport import RayTransport

SETTING = Setting("test", 64)
CONFIG = MeasureConfig(
    compute_samples=8,
    comm_samples=3,
    chunk=2,
    kernels=KernelConfig(arena_bytes=1 << 24, min_repeats=2, max_repeats=2, interleave=3),
    groups=GroupConfig(max_shards=3),
    exchanges=CollectiveConfig(repeats=2),
)
TABLES = [t for t in pool() if t.rows < 20_000]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


class Told:
    """Progress reports: [kind, total, done, again]. (The flow's log and pages are for tests/flows.)"""

    def __init__(self):
        self.said, self.tallies = [], []

    def info(self, text, *values):
        self.said.append(text % values)

    warning = info

    def show(self, tally):
        if tally not in self.tallies:
            self.tallies.append(tally)

    @property
    def shown(self):
        return [[t.kind, t.total, t.done, t.again] for t in self.tallies]


@pytest.fixture
def progress():
    return Told()


@pytest.fixture
def wanted():
    with RayTransport() as transport:
        yield WantedSamples(TABLES, SETTING, CONFIG, transport)


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


def test_what_is_missing_is_measured_and_what_was_disturbed_once_more(tmp_path, progress, wanted):
    folder, groups = tmp_path / "measurements", list(dict(wanted.draw_groups()).values())
    reference = wanted.reference_op_request()
    there = [timed(reference, 0.01, ms=1.5), timed(groups[0], 0.9), *(timed(r, 0.01) for r in groups[1:6])]
    dataset.write_compute_samples(folder, there, dataset.write_pool(folder, TABLES))
    assert measure.measure_groups(wanted, folder, progress) == 2
    # The reference's time is as the dataset has it, not calibrated again.
    assert progress.said == [
        "8 compute samples wanted, 2 of them to measure",
        "2 devices; the reference op takes 3.000 ms",
        "1 samples were disturbed and are measured once more",
    ]
    assert progress.shown == [["compute", 2, 2, False], ["compute", 1, 1, True]]
    times = Counter(s.id for s in dataset.read_compute_timings(folder))
    assert times.pop(dataset.compute_id(SETTING, reference)) > 1
    assert times == {dataset.compute_id(SETTING, r): 2 if r == groups[0] else 1 for r in groups}
    assert measure.measure_groups(wanted, folder, progress) == 0
    assert len(progress.shown) == 2


def test_exchanges_that_are_missing_are_measured_by_one_gang(tmp_path, progress, wanted):
    folder, exchanges = tmp_path / "measurements", dict(wanted.draw_exchanges())
    assert measure.measure_exchanges(wanted, folder, progress) == 3
    assert progress.shown == [["comm", 3, 3, False]]
    found = dataset.read_collective_samples(folder)
    assert {s.id: s.request for s in found} == exchanges
    assert sorted(s.order for s in found) == [0, 1, 2] and all(
        (s.forward or s.backward)[1].repeats == 2 for s in found
    )
    assert [s.id for s in sorted(found, key=lambda s: s.order)] == list(exchanges)
    assert measure.measure_exchanges(wanted, folder, progress) == 0 and len(progress.shown) == 1


def test_where_no_steps_can_run_none_are_measured_and_a_line_says_why(tmp_path, progress, wanted):
    assert measure.measure_steps(wanted, tmp_path / "measurements", progress) == 0
    [line] = progress.said
    assert line.startswith("what exchanges take in steps stays unknown: no host has two devices")
    assert not progress.shown and not (tmp_path / "measurements").exists()
