import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.io import dataset, files
from tasks import estimate
from tasks.estimate import Estimate
from tasks.measure import MeasureConfig, wanted_compute
from tasks.setting import SettingConfig

CONFIG = MeasureConfig(
    compute_samples=30,
    comm_samples=10,
    step_samples=4,
    max_shards=4,
    max_repeats=6,
    min_repeats=3,
    arena_bytes=1 << 27,
)


def test_the_rate_is_that_at_which_the_dataset_grew_pauses_aside():
    stamps = [0.5 * i for i in range(11)] + [1000 + 0.5 * i for i in range(11)]
    found = estimate._time("compute", 100, stamps[::-1])
    assert found == (50.0, "at the 2.0 a second at which the dataset grew")
    assert estimate._time("compute", 100, stamps[1:]) == (
        20.0,
        "at the usual rate of two CPU cores",
    )  # a gap too few


@pytest.mark.parametrize(
    "seconds, message", [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations_are_said_in_a_unit_that_one_can_feel(seconds, message):
    assert str(Estimate("steps", 30, 20, 2, seconds, "why")) == (
        f"steps: 30 samples wanted, 10 there already, 20 missing, 2 devices; about {message} (why)"
    )
    assert str(Estimate("steps", 30, 0, 2, seconds, "why")) == (
        "steps: 30 samples wanted, 30 there already, 0 missing, 2 devices"
    )


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_what_is_missing_is_told_apart_by_kind_from_what_the_cluster_and_the_dataset_have(tmp_path):
    files.write_pool(tmp_path / "pool.json", pool())
    wanted, folder = SettingConfig(SETTING.hardware, SETTING.batch), tmp_path / "measurements"
    compute, comm, steps = estimate.estimate(tmp_path / "pool.json", wanted, CONFIG, folder)
    requests = list(wanted_compute(pool(), SETTING, CONFIG).values())
    assert len(requests) == 30
    assert [(e.kind, e.wanted, e.missing, e.devices) for e in (compute, comm)] == [
        ("compute", 30, 30, 2),
        ("comm", 10, 10, 2),
    ]
    assert compute.seconds == pytest.approx(30 * 0.2)
    # each host of this cluster has one CPU
    assert (steps.kind, steps.wanted, steps.devices) == ("steps", 0, 1)

    there = [
        dataclasses.replace(s, id=dataset.compute_id(SETTING, r), request=r, measured_at=float(i))
        for i, (s, r) in enumerate(zip(compute_samples(linear_law, 25), requests, strict=False))
    ]
    dataset.write_compute(folder, there, dataset.write_pool(folder, pool()))
    dataset.write_comm(folder, comm_samples(20))
    compute, comm, _ = estimate.estimate(tmp_path / "pool.json", wanted, CONFIG, folder)
    assert (compute.wanted, compute.missing, compute.seconds) == (30, 5, pytest.approx(5.0))
    assert comm.missing == 10 and np.isfinite(comm.seconds)  # those there are of other exchanges
