"""The time that measuring will take, from what a dataset lacks and the rate at which it grew."""

import dataclasses

from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.io import dataset
from shardcore.measure.config import KernelConfig
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.measure.transport import Host, Transport
from shardcore.stages import measure
from shardcore.stages.measure import WantedSamples
from shardcore.stages.measure_config import MeasureConfig

CONFIG = MeasureConfig(
    compute_samples=30,
    comm_samples=10,
    step_samples=0,
    kernels=KernelConfig(1 << 27),
    groups=GroupConfig(max_shards=4),
)


class TwoHosts(Transport):
    def hosts(self):
        return [Host(1), Host(1)]


def test_the_rate_is_that_at_which_the_dataset_grew_pauses_aside():
    stamps = [0.5 * i for i in range(11)] + [1000 + 0.5 * i for i in range(11)]
    assert measure._seconds_per_sample("compute", stamps[::-1]) == (
        0.5,
        "at the 2.0 a second at which the dataset grew",
    )
    # A gap too few.
    assert measure._seconds_per_sample("compute", stamps[1:]) == (0.2, "at the usual rate of two CPU cores")


def test_what_is_missing_is_told_apart_by_kind_from_what_the_hosts_and_the_dataset_have(tmp_path):
    wanted, folder = WantedSamples(pool(), SETTING, CONFIG, TwoHosts()), tmp_path / "measurements"
    usual = "at the usual rate of two CPU cores"
    assert measure.estimate_measuring_time(wanted, folder) == [
        f"groups: 30 of 30 are missing, 2 devices, about 6 s {usual}",
        f"exchanges: 10 of 10 are missing, 2 devices, about 4 s {usual}",
    ]
    requests = [r for _, r in wanted.draw_groups()]
    there = [
        dataclasses.replace(s, id=dataset.compute_id(SETTING, r), request=r, measured_at=float(i))
        for i, (s, r) in enumerate(zip(compute_samples(linear_law, 25), requests, strict=False))
    ]
    dataset.write_compute_samples(folder, there, dataset.write_pool(folder, pool()))
    dataset.write_collective_samples(folder, comm_samples(20))
    compute, comm = measure.estimate_measuring_time(wanted, folder)
    grew = "at the 1.0 a second at which the dataset grew"
    assert compute == f"groups: 5 of 30 are missing, 2 devices, about 5 s {grew}"
    assert comm.startswith("exchanges: 10 of 10")  # those there are of other exchanges
