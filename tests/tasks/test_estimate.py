import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io import dataset, files
from shardcore.io.measurements import CollectiveRequest, ComputeRequest
from shardcore.step.lower import lower
from tasks import estimate
from tasks.estimate import Estimate
from tasks.measure import MeasureConfig, wanted_compute
from tasks.setting import SettingConfig

TABLE = Table("t", 1000, 100, 1000.0, Zipf(1.0))
WHOLE = Shard.whole(TABLE)
HALF = Shard(TABLE, 0, 500, 0, 20)
CONFIG = MeasureConfig(
    compute_samples=30,
    comm_samples=10,
    step_samples=4,
    max_shards=4,
    max_repeats=6,
    min_repeats=3,
    arena_bytes=1 << 27,
)


def test_a_group_takes_its_bytes_at_the_rate_of_the_hardware():
    # 7 million lookups of 100 columns of 4 bytes: 2.8 GB at 0.7 GB/s; half the rows and a fifth of the
    # columns: a tenth
    requests = [ComputeRequest((WHOLE,), 7000), ComputeRequest((WHOLE, HALF), 7000)]
    assert estimate._compute_ms(requests[:1], "cpu") == pytest.approx(4000.3)
    assert estimate._compute_ms(requests[1:], "cpu") == pytest.approx(4400.3)
    assert estimate._compute_ms(requests, "cpu") == pytest.approx(4200.3)
    assert estimate._compute_ms(requests[:1], "cuda") == pytest.approx(2800 / 300 + 0.3)
    assert estimate._compute_ms([], "cpu") == 0.3


def test_an_exchange_takes_its_start_and_the_largest_ranks_bytes_twice():
    exchange = CollectiveRequest((1000, 500), 1000, (0.0, 5.0))  # 4 MB at 1 GB/s
    assert estimate._comm_ms([exchange], "cpu") == pytest.approx(0.6 + 5 + 2 * 4)
    assert estimate._comm_ms(
        [exchange, dataclasses.replace(exchange, start_ms=(0.0, 1.0))], "cpu"
    ) == pytest.approx(11.6)
    assert estimate._comm_ms([exchange], "cuda") == pytest.approx(0.6 + 5 + 2 * 4 / 50)
    assert estimate._comm_ms([], "cpu") == 0.6


def test_a_step_takes_the_slowest_devices_ops_and_a_tenth_more():
    tables = tuple(dataclasses.replace(TABLE, name=f"t{i}") for i in range(3))
    problem = Problem("p", tables, Topology((Device(1 << 32),) * 2), 7000)
    workload = lower(
        Plan(tuple(Placement("column", Shard.whole(t), (i // 2,)) for i, t in enumerate(tables))), problem
    )
    assert estimate._step_ms([workload], "cpu") == pytest.approx(1.1 * 8000.3)  # two tables in one op
    assert estimate._step_ms([], "cpu") == 0.0


def test_the_rate_is_that_at_which_the_dataset_grew_pauses_aside():
    stamps = [0.5 * i for i in range(11)] + [1000 + 0.5 * i for i in range(11)]
    found = estimate._time(100, stamps[::-1], physical_ms=70.0)
    assert found == (50.0, "at the 2.0 a second at which the dataset grew")
    seconds, basis = estimate._time(100, stamps[1:], physical_ms=70.0)  # one gap too few
    assert seconds == 7.0 and basis.startswith("a physical estimate")


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
    assert compute.seconds == pytest.approx(30 * estimate._compute_ms(requests, "cpu") * (1 + 6) / 2 / 1e3)
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
