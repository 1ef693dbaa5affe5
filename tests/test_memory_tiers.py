"""Memory tiers keep within memory, save most bytes of the slow link, and reach TorchRec."""

from dataclasses import replace

import pytest

from shardcore.errors import Infeasible, ShardCoreError
from shardcore.memory_tiers import (
    SlowLink,
    Tier,
    decide,
    gains_ms,
    largest_to_host,
    one_load_factor,
    tier_bytes,
    water_filled,
)
from shardcore.topology import Device, Topology
from shardcore.types import Problem, Reuse, Table, Zipf

LINK = SlowLink(25.0, 1 << 34)


def problem(memory, optimizer="exact_sgd", **fields):
    tables = (Table("hot", 100_000, 64, 20.0, Zipf(1.2)), Table("flat", 100_000, 64, 2.0, Zipf(0.2)),
              Table("small", 1_000, 64, 1.0), Table("idle", 50_000, 64, 0.0))
    return Problem("p", tables, Topology((Device(memory),) * 2), 256, optimizer, **fields)


def test_all_rows_are_in_device_memory_where_they_fit():
    found = decide(problem(1 << 30), LINK)
    assert {tier.kernel for tier in found.tiers} == {"fused"}
    assert found.slow_ms == 0


@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad"])
def test_what_does_not_fit_is_cached_within_memory(optimizer):
    asked = problem(18 << 20, optimizer)
    found = decide(asked, LINK)
    assert 0 < found.device_bytes <= tier_bytes(asked)
    assert {tier.table.name: tier.kernel for tier in found.tiers}["idle"] == "fused_uvm"
    assert any(tier.kernel == "fused_uvm_caching" for tier in found.tiers)
    for other in (largest_to_host(asked, LINK), one_load_factor(asked, LINK)):
        assert other.device_bytes <= tier_bytes(asked)
        assert found.slow_bytes < other.slow_bytes


def test_state_of_rows_stays_in_device_memory():
    """As FBGEMM has it: so it leaves less for rows, and nothing of it crosses the link."""
    plain, rowwise = (problem(18 << 20, optimizer) for optimizer in ("exact_sgd", "rowwise_adagrad"))
    assert tier_bytes(plain) - tier_bytes(rowwise) == 4 * sum(t.rows for t in plain.tables)
    tables = [decide(asked, LINK).tiers[1] for asked in (plain, rowwise)]  # the flat one is not all there
    assert all(tier.host_bytes == tier.table.bytes for tier in tables)


def test_more_memory_never_crosses_more():
    slow = [decide(problem(mib << 20), LINK).slow_ms for mib in range(12, 60, 4)]
    assert slow == sorted(slow, reverse=True)
    assert slow[-1] == 0


def test_gains_are_what_more_memory_saves():
    asked = problem(18 << 20)
    none, some, all_of_it = gains_ms(asked, LINK, [0, 0.005, 1])
    assert none == 0 < some < all_of_it == decide(asked, LINK).slow_ms


def test_a_link_twice_as_fast_takes_half_the_time():
    asked = problem(18 << 20)
    fast = decide(asked, replace(LINK, gbps=50.0))
    assert fast.slow_ms == pytest.approx(decide(asked, LINK).slow_ms / 2)


def test_water_filling_finds_the_best_of_all_choices():
    tables = problem(1 << 30).tables
    # Falling and convex, as misses are.
    choices = [[Tier(t, i, 10 * i, 0, float((6 - i) ** 2 * (k + 1))) for i in range(7)]
               for k, t in enumerate(tables[:2])]
    for budget in range(0, 121, 10):
        found = sum(tier.slow_bytes for tier in water_filled(choices, budget))
        best = min(a.slow_bytes + b.slow_bytes for a in choices[0] for b in choices[1]
                   if a.device_bytes + b.device_bytes <= budget)
        assert found == best


def test_tiers_reach_torchrec():
    pytest.importorskip("torchrec")
    from shardcore.export.torchrec_settings import settings_of_tiers, with_settings

    found = decide(problem(18 << 20), LINK)
    settings = settings_of_tiers(found.tiers)
    cached = [tier for tier in found.tiers if tier.kernel == "fused_uvm_caching"]
    assert cached
    for tier in cached:
        theirs = with_settings(settings[tier.table.name], "it")
        assert (theirs.compute_kernel, theirs.cache_params.load_factor) == (tier.kernel, tier.load_factor)
    assert settings["idle"] == {"compute_kernel": "fused_uvm"}
    assert not {tier.table.name for tier in found.tiers if tier.kernel == "fused"} & set(settings)


@pytest.mark.parametrize(("do", "error", "words"), [
    (lambda: SlowLink(0.0, 1), ShardCoreError, "gbps 0.0; it needs GB/s above 0"),
    (lambda: SlowLink(1.0, float("nan")), ShardCoreError, "host_bytes nan"),
    (lambda: decide(problem(18 << 20), replace(LINK, host_bytes=1 << 20)), Infeasible, "in host memory"),
    (lambda: decide(problem(1 << 16), LINK), Infeasible, "lacks at least .* of device memory for rows"),
    (lambda: one_load_factor(problem(1 << 16), LINK), Infeasible, "lacks at least"),
    *((lambda how=how: how(problem(18 << 20), replace(LINK, host_bytes=1 << 20)), Infeasible,
       "it needs .* more of it") for how in (largest_to_host, one_load_factor)),
    (lambda: decide(replace(problem(18 << 20), tables=(
        Table("r", 10**6, 64, 1.0, Reuse((1.0,) + (0.0,) * 16, 64)),)), LINK), ShardCoreError, "of batch 64"),
])
def test_what_cannot_be_decided_is_refused(do, error, words):
    with pytest.raises(error, match=words):
        do()
