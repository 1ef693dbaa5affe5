"""What is wanted of a config, and on how many devices, as hosts have them."""

import dataclasses

import pytest
from laws import pool

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.measure.config import KernelConfig
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.measure.transport import Host, Transport
from shardcore.stages.measure import WantedSamples, replay_device_count
from shardcore.stages.measure_config import MeasureConfig, SampledStepConfig

GIB = 1 << 30
ONE_CORE = (Host(1), Host(1))
TABLES = pool(6)


class Elsewhere(Transport):
    """Hosts that are given."""

    def __init__(self, *hosts, device="cpu"):
        super().__init__(device)
        self.given = sorted(hosts, key=lambda host: -host.devices)

    def hosts(self):
        return self.given


def wanted(*hosts, batch=64, device="cpu", tables=TABLES, arena_bytes=1 << 30, **config):
    config = MeasureConfig(kernels=KernelConfig(arena_bytes), **config)
    return WantedSamples(tables, Setting("law", batch), config, Elsewhere(*hosts, device=device))


def test_devices_and_ranks_follow_from_the_hosts():
    assert wanted(*ONE_CORE).n_processes == 2 and wanted(*ONE_CORE, actors=5).n_processes == 5
    assert wanted(*ONE_CORE).n_ranks == 2  # on one core
    assert wanted(*ONE_CORE, hosts=2).n_ranks == 2  # on one core each
    assert wanted(*ONE_CORE, ranks=4).n_ranks == 4


@pytest.mark.parametrize(
    "config, message",
    [
        ({"ranks": 3}, "ranks is 3, which does not divide the batch of 64"),
        ({"hosts": 3}, "each of 3 hosts of the 2 that are there, divides the batch of 64"),
    ],
)
def test_ranks_that_cannot_be_are_named(config, message):
    with pytest.raises(ShardCoreError, match=message):
        _ = wanted(*ONE_CORE, **config).n_ranks


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


def test_gpus_are_as_many_as_all_hosts_have():
    few, many = Host(4), Host(6)

    def ranks(batch, *hosts, **config):
        return wanted(*hosts, batch=batch, device="cuda", **config).n_ranks

    assert wanted(few, many, device="cuda").n_processes == 10
    assert ranks(60, few, many) == 6 and ranks(64, few, many) == 4
    assert ranks(64, few, many, hosts=2) == 8 and ranks(60, few, many, hosts=2) == 6
    with pytest.raises(
        ShardCoreError, match="each of 2 hosts of the 2 that are there, divides the batch of 63"
    ):
        ranks(63, few, many, hosts=2)
    assert ranks(64, Host(1)) == 1  # one GPU exchanges with nobody
    on = Elsewhere(few, many, device="cuda")
    assert replay_device_count(on, 8, 60) == 6 and replay_device_count(on, 5, 64) == 4
    assert replay_device_count(on, 0, 64) == 1


def test_devices_are_as_many_as_memory_holds():
    for gib, count in ((16.0, 8), (8.0, 4), (7.9, 3), (1.0, 1)):  # 2 GiB each
        assert wanted(Host(8, gib * GIB)).n_processes == count


def test_steps_run_where_an_exchange_would_as_far_as_no_core_or_memory_is_shared():
    eight, two = Host(8), Host(2)
    assert wanted(eight, two).n_step_ranks == 8 and wanted(eight, two, batch=60).n_step_ranks == 6
    assert wanted(eight, two, ranks=4).n_step_ranks == 4 and wanted(eight, two, hosts=2).n_step_ranks == 2
    assert wanted(Host(8, 11.0 * GIB), two, batch=60).n_step_ranks == 5  # of 2 GiB each
    assert wanted(Host(4, GIB), device="cuda").n_step_ranks == 4


def test_steps_need_two_devices_of_a_host_and_a_table_that_fits():
    assert (
        "no host has two devices" in wanted(*ONE_CORE).why_no_steps() and wanted(*ONE_CORE).draw_steps() == []
    )
    assert wanted(Host(2), arena_bytes=8 << 20).why_no_steps() is None
    large = [dataclasses.replace(t, rows=10**8) for t in TABLES]
    no = wanted(Host(2), tables=large, arena_bytes=8 << 20).why_no_steps()
    assert no == "no table of the pool with lookups fits 8 MiB at a dim of 4"


def test_the_first_different_draws_are_wanted_and_each_has_lookups():
    shape = {
        "compute_samples": 20,
        "comm_samples": 10,
        "groups": GroupConfig(max_shards=3),
        "arena_bytes": 1 << 24,
    }
    empty, setting = dataclasses.replace(TABLES[0], name="empty", pooling=0.0), Setting("law", 64)

    def groups(tables=TABLES, **more):
        return dict(wanted(Host(4), tables=tables, **{**shape, **more}).draw_groups())

    def exchanges(**more):
        return dict(wanted(Host(4), Host(4), **{**shape, **more}).draw_exchanges())

    found = groups([*TABLES, empty])
    assert len(found) == 20 and all(k == dataset.compute_id(setting, r) for k, r in found.items())
    assert max(len(r.shards) for r in found.values()) <= 3
    assert not any(s.table.name == "empty" for r in found.values() for s in r.shards)
    assert list(groups(compute_samples=30))[:20] == list(found)
    assert len(set(groups(seed=1)) & set(found)) < 10
    drawn = exchanges()
    assert len(drawn) == 10 and {len(r.widths) for r in drawn.values()} == {4}
    assert {r.hosts for r in exchanges(hosts=2).values()} == {2}
    assert len(set(exchanges(seed=1)) & set(drawn)) < 5
    with pytest.raises(ShardCoreError, match="the pool has no table with lookups"):
        groups([empty])


def test_no_shard_is_larger_than_the_arena():
    config = MeasureConfig(kernels=KernelConfig(1 << 25), steps=SampledStepConfig(repeats=6))
    assert config.group_config == GroupConfig(max_shard_bytes=1 << 25)
    assert config.step_config == SampledStepConfig(repeats=6, arena_bytes=1 << 25)
    assert MeasureConfig().step_config.arena_bytes == 512 << 20


def test_what_hangs_is_waited_for_as_long_as_the_config_says():
    usual, slow = MeasureConfig(), MeasureConfig(hang_s=600.0)
    assert (usual.exchange_config.timeout_s, usual.step_config.timeout_s) == (60.0, 120.0)
    assert (slow.exchange_config.timeout_s, slow.step_config.timeout_s) == (600.0, 1200.0)


def test_the_most_bytes_of_a_shard_are_the_arenas():
    with pytest.raises(ShardCoreError, match="max_shard_bytes is 4096; kernels.arena_bytes limits shards"):
        MeasureConfig(groups=GroupConfig(max_shard_bytes=4096))
