import dataclasses

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.io import dataset, files
from shardcore.stages.measure import MeasureConfig, Wanted
from tasks import estimate
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
    assert estimate._each_s("compute", stamps[::-1]) == (0.5, "at the 2.0 a second at which the dataset grew")
    # A gap too few.
    assert estimate._each_s("compute", stamps[1:]) == (0.2, "at the usual rate of two CPU cores")


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_what_is_missing_is_told_apart_by_kind_from_what_the_cluster_and_the_dataset_have(tmp_path):
    files.write_pool(tmp_path / "pool.json", pool())
    setting, folder = SettingConfig(SETTING.hardware, SETTING.batch), tmp_path / "measurements"
    lines = estimate.estimate(tmp_path / "pool.json", setting, CONFIG, folder)
    usual = "(at the usual rate of two CPU cores)"
    assert lines == [
        f"compute: 30 samples wanted, 0 there already, 30 missing, 2 devices; about 6 s {usual}",
        f"comm: 10 samples wanted, 0 there already, 10 missing, 2 devices; about 4 s {usual}",
        # Each host of this cluster has one CPU.
        "steps: 0 samples wanted, 0 there already, 0 missing, 1 devices",
    ]
    requests = [r for _, r in Wanted(pool(), SETTING, CONFIG, None).groups()]
    there = [
        dataclasses.replace(s, id=dataset.compute_id(SETTING, r), request=r, measured_at=float(i))
        for i, (s, r) in enumerate(zip(compute_samples(linear_law, 25), requests, strict=False))
    ]
    dataset.write_compute(folder, there, dataset.write_pool(folder, pool()))
    dataset.write_comm(folder, comm_samples(20))
    compute, comm, _ = estimate.estimate(tmp_path / "pool.json", setting, CONFIG, folder)
    assert compute == (
        "compute: 30 samples wanted, 25 there already, 5 missing, 2 devices; about 5 s (at the 1.0 a second at which "
        "the dataset grew)"
    )
    assert "10 missing" in comm  # those there are of other exchanges
