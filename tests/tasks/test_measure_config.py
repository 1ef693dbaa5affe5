import dataclasses

import pytest
import ray
from laws import pool

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.measure.collectives import CollectiveConfig
from shardcore.measure.kernels import KernelConfig
from shardcore.measure.sampling.groups import GroupConfig
from tasks.measure import (
    PART_S,
    MeasureConfig,
    actor_count,
    cluster_device,
    next_part,
    rank_count,
    wanted_comm,
    wanted_compute,
    with_room,
)
from tasks.replay import devices_of_a_host, step_devices

ONE_CORE = ({"CPU": 1.0, "memory": 2.0**40},) * 2


def test_devices_and_ranks_follow_from_the_cluster(monkeypatch):
    machines(monkeypatch, *ONE_CORE)
    assert cluster_device() == "cpu"
    assert actor_count(MeasureConfig(), "cpu") == 2 and actor_count(MeasureConfig(actors=5), "cpu") == 5
    assert rank_count(MeasureConfig(), "cpu", 64) == 2  # on one core
    assert rank_count(MeasureConfig(hosts=2), "cpu", 64) == 2  # on one core each
    assert rank_count(MeasureConfig(ranks=4), "cpu", 64) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (MeasureConfig(ranks=3), "ranks is 3, which does not divide the batch of 64"),
        (MeasureConfig(hosts=3), "hosts is 3; the Ray cluster has 2"),
    ],
)
def test_ranks_that_cannot_be_are_named(config, message, monkeypatch):
    machines(monkeypatch, *ONE_CORE)
    with pytest.raises(ShardCoreError, match=message):
        rank_count(config, "cpu", 64)


@pytest.mark.parametrize(
    "values",
    [
        {"chunk": 0},
        {"hosts": 0},
        {"hang_s": 0},
        {"seed": -1},
        {"ranks": 3, "hosts": 2},
        {"compute_samples": -1},
        {"step_samples": -1},
        {"actors": -1},
    ],
)
def test_bad_values_are_refused(values):
    with pytest.raises(ShardCoreError, match="measure"):
        MeasureConfig(**values)


def machines(monkeypatch, *hosts, dead=()):
    """A cluster of other hosts, as Ray tells of them."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": h not in dead, "Resources": h} for h in hosts])
    alive = [h for h in hosts if h not in dead]
    monkeypatch.setattr(
        ray, "cluster_resources", lambda: {k: sum(h.get(k, 0) for h in alive) for h in alive for k in h}
    )


def test_gpus_are_what_a_cluster_with_gpus_measures_on(monkeypatch):
    few, many, gone = {"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 6.0}, {"CPU": 64.0, "GPU": 64.0}
    machines(monkeypatch, few, many, gone, dead=(gone,))
    assert cluster_device() == "cuda" and actor_count(MeasureConfig(), "cuda") == 10
    assert rank_count(MeasureConfig(), "cuda", 60) == 6 and rank_count(MeasureConfig(), "cuda", 64) == 4
    assert (
        rank_count(MeasureConfig(hosts=2), "cuda", 64) == 8
        and rank_count(MeasureConfig(hosts=2), "cuda", 60) == 6
    )
    assert devices_of_a_host(8, 60) == 6 and devices_of_a_host(5, 64) == 4 and devices_of_a_host(0, 64) == 1
    with pytest.raises(
        ShardCoreError, match="no number of ranks, equally many on each of 2 hosts, divides the batch of 63"
    ):
        rank_count(MeasureConfig(hosts=2), "cuda", 63)
    machines(monkeypatch, {"CPU": 8.0, "GPU": 1.0})
    assert rank_count(MeasureConfig(), "cuda", 64) == 1  # one GPU exchanges with nobody
    machines(monkeypatch, {"CPU": 8.0, "GPU": 0.5})
    assert cluster_device() == "cpu"


def test_actors_are_as_many_as_memory_holds(monkeypatch):
    config = MeasureConfig(arena_bytes=1 << 30)  # 2 GiB each
    for gib, count in ((16.0, 8), (8.0, 4), (7.9, 3), (1.0, 1)):
        machines(monkeypatch, {"CPU": 8.0, "memory": gib * 2**30})
        assert actor_count(config, "cpu") == count
    assert with_room({}, 1 << 30) == float("inf")


def test_steps_run_where_an_exchange_would_as_far_as_no_core_or_memory_is_shared(monkeypatch):
    config = MeasureConfig(arena_bytes=1 << 30)
    machines(monkeypatch, {"CPU": 8.0, "memory": 2.0**40}, {"CPU": 2.0, "memory": 2.0**40})
    assert step_devices(config, 64) == 8 and step_devices(config, 60) == 6
    assert step_devices(MeasureConfig(ranks=4), 64) == 4 and step_devices(MeasureConfig(hosts=2), 64) == 2
    machines(monkeypatch, {"CPU": 8.0, "memory": 11.0 * 2**30}, {"CPU": 2.0, "memory": 2.0**40})
    assert step_devices(config, 60) == 5  # of 2 GiB each
    machines(monkeypatch, {"CPU": 8.0, "GPU": 4.0, "memory": 2.0**30})
    assert step_devices(config, 64) == 4


def test_the_first_different_draws_are_wanted_and_each_has_lookups():
    config = MeasureConfig(compute_samples=20, comm_samples=10, max_shards=3, arena_bytes=1 << 24)
    tables, setting = pool(6), Setting("law", 64)
    empty = dataclasses.replace(tables[0], name="empty", pooling=0.0)
    wanted = wanted_compute([*tables, empty], setting, config)
    assert len(wanted) == 20 and all(k == dataset.compute_id(setting, r) for k, r in wanted.items())
    assert max(len(r.shards) for r in wanted.values()) <= 3 and not any(
        s.table.name == "empty" for r in wanted.values() for s in r.shards
    )
    more = wanted_compute(tables, setting, dataclasses.replace(config, compute_samples=30))
    assert list(more)[:20] == list(wanted)
    assert len(set(wanted_compute(tables, setting, dataclasses.replace(config, seed=1))) & set(wanted)) < 10
    exchanges = wanted_comm(setting, 4, config)
    assert len(exchanges) == 10 and {len(r.widths) for r in exchanges.values()} == {4}
    assert {r.hosts for r in wanted_comm(setting, 4, dataclasses.replace(config, hosts=2)).values()} == {2}
    assert len(set(wanted_comm(setting, 4, dataclasses.replace(config, seed=1))) & set(exchanges)) < 5
    with pytest.raises(ShardCoreError, match="the pool has no table with lookups"):
        wanted_compute([empty], setting, config)


def test_each_part_of_the_config_goes_where_it_belongs():
    config = MeasureConfig(
        arena_bytes=1 << 25,
        tolerance=0.2,
        min_repeats=3,
        max_repeats=5,
        interleave=7,
        max_shards=9,
        comm_repeats=4,
        step_repeats=6,
        hang_s=11.0,
    )
    assert config.kernels() == KernelConfig(1 << 25, 0.2, 3, 5, 7)
    assert config.groups() == GroupConfig(max_shards=9, max_shard_bytes=1 << 25)
    assert config.comm() == CollectiveConfig(repeats=4)
    steps = config.steps()
    assert (steps.arena_bytes, steps.timeout_s, steps.repeats) == (1 << 25, 22.0, 6)


@pytest.mark.parametrize(
    "done, took_s, most, found",
    [
        (1, 0.1, 16, 2),
        (8, 0.1, 16, 16),
        (16, 0.1, 16, 16),
        (16, 10.0, 16, 8),
        (4, 100.0, 16, 1),
        (1, 1e-9, 1, 1),
    ],
)
def test_exchanges_are_kept_before_much_is_lost_whatever_the_chunk(done, took_s, most, found):
    assert PART_S == 5.0 and next_part(done, took_s, most) == found
