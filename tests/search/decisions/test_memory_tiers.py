"""Memory tiers keep within memory, save most bytes of the slow link, and reach TorchRec."""

from dataclasses import replace

import pytest

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.search.decisions.memory_tiers import (
    Tier,
    decide,
    gains_ms,
    largest_to_host,
    one_load_factor,
    tier_bytes,
    tiers_of,
    water_filled,
    with_load_factors,
)


def problem(memory, optimizer="exact_sgd", gbps=25.0, host_bytes=1 << 34):
    tables = (
        Table("hot", 100_000, 64, 20.0, Zipf(1.2)),
        Table("flat", 100_000, 64, 2.0, Zipf(0.2)),
        Table("small", 1_000, 64, 1.0),
        Table("idle", 50_000, 64, 0.0),
    )
    topology = Topology(
        (Device(memory),) * 2, memory=(Memory("host", host_bytes, gbps),) if gbps is not None else ()
    )
    return Problem("p", tables, topology, 256, optimizer)


def test_all_rows_are_in_device_memory_where_they_fit():
    found = decide(problem(1 << 30))
    assert {table.kernel for table in found.problem.tables} == {"fused"}
    assert found.link_ms == 0


@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad"])
def test_what_does_not_fit_is_cached_within_memory(optimizer):
    asked = problem(18 << 20, optimizer)
    found = decide(asked)
    assert 0 < found.device_bytes <= tier_bytes(asked)
    kernels = {table.name: table.kernel for table in found.problem.tables}
    assert kernels["idle"] == "fused_uvm" and "fused_uvm_caching" in kernels.values()
    for other in (largest_to_host(asked), one_load_factor(asked)):
        assert other.device_bytes <= tier_bytes(asked)
        assert found.link_bytes < other.link_bytes


def test_state_of_rows_stays_in_device_memory():
    """As FBGEMM has it: nothing of it crosses the link."""
    plain, rowwise = (problem(18 << 20, optimizer) for optimizer in ("exact_sgd", "rowwise_adagrad"))
    plain, rowwise = (with_load_factors(p, {"flat": 0.25}) for p in (plain, rowwise))
    without, having = (tiers_of(p).tiers[1] for p in (plain, rowwise))
    assert having.device_bytes - without.device_bytes == 4 * having.table.rows
    assert (having.host_bytes, having.link_bytes) == (without.host_bytes, without.link_bytes)
    assert having.host_bytes == having.table.bytes


def test_more_memory_never_crosses_more():
    slow = [decide(problem(mib << 20)).link_ms for mib in range(12, 60, 4)]
    assert slow == sorted(slow, reverse=True)
    assert slow[-1] == 0


def test_gains_are_what_more_memory_saves():
    asked = problem(18 << 20)
    none, some, all_of_it = gains_ms(asked, [0, 0.005, 1])
    assert none == 0 < some < all_of_it == decide(asked).link_ms


def test_a_link_twice_as_fast_takes_half_the_time():
    asked = problem(18 << 20)
    fast = decide(problem(18 << 20, gbps=50.0))
    assert fast.link_ms == pytest.approx(decide(asked).link_ms / 2)


def test_water_filling_finds_the_best_of_all_choices():
    tables = problem(1 << 30).tables
    # Falling and convex, as misses are.
    choices = [
        [Tier(t, 10 * i, 0, float((6 - i) ** 2 * (k + 1))) for i in range(7)]
        for k, t in enumerate(tables[:2])
    ]
    for budget in range(0, 121, 10):
        found = sum(tier.link_bytes for tier in water_filled(choices, budget))
        best = min(
            a.link_bytes + b.link_bytes
            for a in choices[0]
            for b in choices[1]
            if a.device_bytes + b.device_bytes <= budget
        )
        assert found == best


def test_a_decision_forgets_an_earlier_one():
    asked = problem(18 << 20)
    assert decide(decide(asked).problem).problem == decide(asked).problem
    assert tiers_of(decide(asked).problem).tiers == decide(asked).tiers


@pytest.mark.parametrize(
    "do, error, words",
    [
        (lambda: problem(1 << 20, gbps=0.0), ShardCoreError, "memory host has gbps 0.0; it needs"),
        (lambda: problem(1 << 20, host_bytes=-1), ShardCoreError, "memory host has bytes -1; it needs"),
        (lambda: decide(problem(18 << 20, gbps=None)), ShardCoreError, "needs memory of tier 'host'"),
        (
            lambda: with_load_factors(problem(1 << 30, gbps=None), {"flat": 0.5}),
            ShardCoreError,
            "rows of table 'flat' in host memory; its topology needs memory of tier 'host'",
        ),
        (
            lambda: with_load_factors(problem(1 << 30), {"flat": 1.5}),
            ShardCoreError,
            "load_factor 1.5; it needs",
        ),
        *(
            (lambda how=how: how(problem(1 << 16)), Infeasible, "lacks at least .* of device memory")
            for how in (decide, one_load_factor, largest_to_host)
        ),
        *(
            (lambda how=how: how(problem(18 << 20, host_bytes=1 << 20)), Infeasible, "it needs .* more of it")
            for how in (decide, one_load_factor, largest_to_host)
        ),
        (
            lambda: decide(
                replace(
                    problem(18 << 20), tables=(Table("r", 10**6, 64, 1.0, Reuse((1.0,) + (0.0,) * 16, 64)),)
                )
            ),
            ShardCoreError,
            "of batch 64",
        ),
    ],
)
def test_what_cannot_be_decided_is_refused(do, error, words):
    with pytest.raises(error, match=words):
        do()


def test_a_data_parallel_table_is_on_every_device_as_a_whole():
    """TorchRec caches no such table."""
    asked = problem(36 << 20)
    asked = replace(asked, constraints=Constraints(kinds=(("hot", ("data_parallel",)),)))
    found = decide(asked)
    [hot] = [tier for tier in found.tiers if tier.table.name == "hot"]
    assert (hot.table.load_factor, hot.device_bytes) == (1.0, 2 * hot.table.bytes)
    assert sum(t.table.in_host_memory for t in found.tiers) and found.device_bytes <= tier_bytes(asked)
    for other in (largest_to_host(asked), one_load_factor(asked)):
        assert not next(t for t in other.problem.tables if t.name == "hot").in_host_memory
