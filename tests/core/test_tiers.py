"""Tiers of memory: rows that agree, what a topology gives of them, and where a table's rows are."""

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import BELOW, DEVICE, TIERS, Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table

GIB = 1 << 30


def test_kernels_tell_tiers_apart():
    kernels = [kernel for row in TIERS.values() for kernel in (row.kernel, row.cached_kernel) if kernel]
    assert len(set(kernels)) == len(kernels) and TIERS[DEVICE].kernel and not TIERS[DEVICE].cached_kernel
    assert all(TIERS[tier].cached_kernel for tier in BELOW)


@pytest.mark.parametrize("tier", BELOW)
def test_rows_are_all_in_one_tier_and_some_in_a_cache(tier):
    table = Table("t", 100, 8, 1.0, load_factor=0.25, tier=tier)
    assert table.kernel == TIERS[tier].cached_kernel
    assert Table("t", 100, 8, 1.0, tier=tier).kernel == TIERS[DEVICE].kernel
    if TIERS[tier].kernel:
        uncached = Table("t", 100, 8, 1.0, load_factor=0.0, tier=tier)
        assert uncached.kernel == TIERS[tier].kernel
    else:
        with pytest.raises(ShardCoreError, match=f"tier {tier!r}; TorchRec runs no table there"):
            Table("t", 100, 8, 1.0, load_factor=0.0, tier=tier)
    with pytest.raises(ShardCoreError, match=f"table 't' in .* memory of tier {tier!r}"):
        Problem("p", (table,), Topology((Device(GIB),)), 64)
    given = Topology((Device(GIB),) * 2, memory=(Memory(tier, GIB, 2.0),))
    assert given.memory_of(tier).gbps == 2 and given.among((0,)).memory_of(tier).bytes == GIB // 2
    assert Problem("p", (table,), given, 64)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Memory(DEVICE, GIB, 1.0), "tier 'device'; known are host"),
        (lambda: Memory("tape", GIB, 1.0), "tier 'tape'; known are host"),
        (lambda: Memory("host", 0, 1.0), "memory host has bytes 0"),
        (lambda: Memory("host", GIB, 0.0), "memory host has gbps 0.0"),
        (lambda: Topology((Device(GIB),), memory=(Memory("host", GIB, 1.0),) * 2), "memory of host, host"),
        (lambda: Table("t", 100, 8, 1.0, tier="tape"), "table 't' has tier 'tape'; known are host"),
    ],
)
def test_what_no_memory_is_is_refused(make, words):
    with pytest.raises(ShardCoreError, match=words):
        make()
