"""Memory tiers keep within memory, save most bytes of the slow link, and give plans that fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.profile import load_profile
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.memory_tiers import (
    MemoryTiers,
    choose_tiers,
    device_bytes_for_tables,
    fill_free_memory,
    least_link_ms,
    link_ms_savings,
    tier_of_each_table,
    tier_options,
    with_fastest_tiers,
    with_load_factors,
)
from shardcore.step.lower import lower
from shardcore.step.memory import require_fits


def device_bytes(of: Problem) -> int:
    return sum(tier.device_bytes for tier in tier_of_each_table(of))


def simpler(of: Problem) -> Iterator[Problem]:
    """The largest tables in host memory until the others fit; then one load factor for all that fits."""
    largest = sorted(of.tables, key=lambda t: -t.bytes)
    out = ({t.name: 0.0 for t in largest[:n]} for n in range(len(largest) + 1))
    one = ({t.name: float(factor) for t in of.tables} for factor in np.linspace(1, 0, 101))
    for factors in (out, one):
        several = (with_load_factors(of, some) for some in factors)
        yield next(x for x in several if device_bytes(x) <= device_bytes_for_tables(of))


def two_devices(memory, optimizer="exact_sgd", gbps=25.0, host_bytes=1 << 34):
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
    found = with_fastest_tiers(two_devices(1 << 30))
    assert {table.kernel for table in found.tables} == {"fused"}
    assert least_link_ms(found) == 0


@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad"])
def test_what_does_not_fit_is_cached_within_memory(optimizer):
    asked = two_devices(18 << 20, optimizer)
    found = with_fastest_tiers(asked)
    assert 0 < device_bytes(found) <= device_bytes_for_tables(asked)
    kernels = {table.name: table.kernel for table in found.tables}
    assert kernels["idle"] == "fused_uvm" and "fused_uvm_caching" in kernels.values()
    for other in simpler(asked):
        assert device_bytes(other) <= device_bytes_for_tables(asked) and least_link_ms(found) < least_link_ms(
            other
        )


def test_state_of_rows_stays_in_device_memory():
    """As FBGEMM has it: nothing of it crosses the link."""
    plain, rowwise = (two_devices(18 << 20, optimizer) for optimizer in ("exact_sgd", "rowwise_adagrad"))
    plain, rowwise = (with_load_factors(p, {"flat": 0.25}) for p in (plain, rowwise))
    without, having = (tier_of_each_table(p)[1] for p in (plain, rowwise))
    assert having.device_bytes - without.device_bytes == 4 * having.table.rows
    assert (having.host_bytes, having.link_bytes) == (without.host_bytes, without.link_bytes)
    assert having.host_bytes == having.table.bytes


def test_more_memory_never_crosses_more():
    slow = [least_link_ms(with_fastest_tiers(two_devices(mib << 20))) for mib in range(12, 60, 4)]
    assert slow == sorted(slow, reverse=True)
    assert slow[-1] == 0


def test_gains_are_what_more_memory_saves():
    asked = two_devices(18 << 20)
    none, some, all_of_it = link_ms_savings(asked, [0, 0.005, 1])
    assert none == 0 < some < all_of_it == least_link_ms(with_fastest_tiers(asked))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_no_other_choice_of_whole_tables_and_caches_of_one_memory_is_faster(share):
    asked = with_load_factors(two_devices(1 << 30), dict.fromkeys(("hot", "flat", "small", "idle"), 0.5))
    room = share * sum(t.bytes for t in asked.tables)
    found = sum(t.link_bytes for t in choose_tiers(asked, asked.tables, room, {"host": 1 << 34}, 2, None))
    for memory in range(64):
        for choice in product(*(tier_options(table, asked, ("host",), memory) for table in asked.tables)):
            if sum(tier.device_bytes for tier in choice) <= room:
                assert found <= sum(tier.link_bytes for tier in choice) * (1 + 1e-3)


def test_a_decision_forgets_an_earlier_one():
    asked = two_devices(18 << 20)
    assert with_fastest_tiers(with_fastest_tiers(asked)) == with_fastest_tiers(asked)


@pytest.mark.parametrize(
    "do, error, words",
    [
        (lambda: two_devices(1 << 20, gbps=0.0), ShardCoreError, "memory 'host' has gbps 0.0; it needs"),
        (lambda: two_devices(1 << 20, host_bytes=-1), ShardCoreError, "memory 'host' has bytes -1; it needs"),
        (
            lambda: with_fastest_tiers(two_devices(18 << 20, gbps=None)),
            ShardCoreError,
            "needs memory of tier 'host'",
        ),
        (
            lambda: with_load_factors(two_devices(1 << 30, gbps=None), {"flat": 0.5}),
            ShardCoreError,
            "rows of table 'flat' in host memory; its topology needs memory of tier 'host'",
        ),
        (
            lambda: with_load_factors(two_devices(1 << 30), {"flat": 1.5}),
            ShardCoreError,
            "load_factor 1.5; it needs",
        ),
        (lambda: with_fastest_tiers(two_devices(1 << 16)), Infeasible, "lacks at least .* of device memory"),
        (
            lambda: with_fastest_tiers(two_devices(18 << 20, host_bytes=1 << 20)),
            Infeasible,
            "it needs .* more of it",
        ),
        (
            lambda: with_fastest_tiers(
                replace(
                    two_devices(18 << 20),
                    tables=(Table("r", 10**6, 64, 1.0, Reuse((1.0,) + (0.0,) * 16, 64)),),
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
    asked = two_devices(36 << 20)
    asked = replace(asked, constraints=Constraints(kinds=(("hot", ("data_parallel",)),)))
    found = with_fastest_tiers(asked)
    [hot] = [tier for tier in tier_of_each_table(found) if tier.table.name == "hot"]
    assert (hot.table.load_factor, hot.device_bytes) == (1.0, 2 * hot.table.bytes)
    assert any(table.in_host_memory for table in found.tables) and device_bytes(
        found
    ) <= device_bytes_for_tables(asked)


@pytest.mark.parametrize("dense_ms, hides", [(0.0, False), (50.0, True)])
def test_caches_are_preferred_where_what_they_fetch_is_hidden(dense_ms, hides):
    """Cold rows are not worth the room in a cache, until reading them there costs nothing."""
    profile = load_profile("nvidia-h100-sxm")
    hot = tuple(Table(f"hot{i}", 200_000, 64, 20.0, Zipf(1.1)) for i in range(4))
    cold = tuple(Table(f"cold{i}", 3_000_000, 64, 1.0, Zipf(0.5)) for i in range(8))
    topology = profile.topology(1, 4, 1 << 40)
    of = Problem("cold", (*hot, *cold), topology, 16_384, "exact_sgd")
    beside = 4 * topology.devices[0].memory_bytes - device_bytes_for_tables(of)
    memory = int(beside + 0.02 * sum(t.bytes for t in of.tables)) // 4
    of = replace(of, topology=replace(topology, devices=(Device(memory),) * 4))
    cached = {}
    for name in ("sparse_dist", "prefetch"):
        job = Job(name, dense_forward_ms=dense_ms / 3, dense_backward_ms=dense_ms * 2 / 3)
        chosen = with_fastest_tiers(replace(of, job=job), model=profile.cost_model())
        assert device_bytes(chosen) <= device_bytes_for_tables(replace(of, job=job))
        cached[name] = sum(0 < t.load_factor < 1 for t in chosen.tables)
        # The same ms as operations at the card's rate.
        flops = Job(
            name, dense_mflops=dense_ms / 3 * profile.rate_values["dense_tflops"] / (of.local_batch * 1e-3)
        )
        assert with_fastest_tiers(replace(of, job=flops), model=profile.cost_model()).tables == chosen.tables
    assert (cached["prefetch"] > cached["sparse_dist"]) == hides


# --- plans --------------------------------------------------------------------------------------------------

MODEL = AnalyticModel(Setting("made-up", 1024))
ROWWISE = AnalyticModel(replace(MODEL.setting, optimizer="rowwise_adagrad"))
TABLES = tuple(Table(f"t{i}", 20_000 + 3_000 * i, 16, 4.0 + i, Zipf(0.6 + 0.1 * i)) for i in range(8))


def problem(memory_bytes: int = 5 << 20, tables=TABLES, host_bytes: int = 1 << 30) -> Problem:
    topology = Topology((Device(memory_bytes),) * 4, memory=(Memory("host", host_bytes, 5.0),))
    return Problem("large", tables, topology, 1024)


def found(of: Problem, algorithm: str = "anneal_columns"):
    return decide(of, MODEL, [MemoryTiers()], SHARDERS[algorithm], budget=Budget(evals=300))


def test_what_does_not_fit_gets_a_plan_within_all_memories():
    asked = problem()
    with pytest.raises(Infeasible):
        SHARDERS["anneal_columns"](asked, MODEL)
    best = found(asked)
    assert max(lower(best.plan, best.problem).memory_bytes) <= 5 << 20
    assert any(table.in_host_memory for table in best.problem.tables)
    assert best.plan.provenance["predicted_ms"] == best.ms


def test_where_host_memory_holds_few_tables_whole_ones_stay_on_devices():
    """Caches of both would leave both in host memory, which holds one: that one is cached."""
    tables = (Table("a", 300_000, 16, 4.0, Zipf(1.0)), Table("b", 299_000, 16, 4.0, Zipf(1.0)))
    topology = Topology((Device(22 << 20),), memory=(Memory("host", 20 << 20, 5.0),))
    found = with_fastest_tiers(Problem("two", tables, topology, 64))
    cached, whole = sorted(t.load_factor for t in found.tables)
    assert 0 < cached < whole == 1.0


def with_ssd(host_bytes: int, ssd_bytes: int = 1 << 34) -> Problem:
    """A problem whose hosts have an SSD. host_bytes: 0 for no host memory."""
    sizes = {"host": (host_bytes, 5.0), "ssd": (ssd_bytes, 0.5)}
    memory = tuple(Memory(tier, n, gbps) for tier, (n, gbps) in sizes.items() if n)
    asked = replace(problem(), optimizer="rowwise_adagrad")
    return replace(asked, topology=replace(asked.topology, memory=memory))


@pytest.mark.parametrize(
    "host_bytes, algorithm",
    [
        (0, "anneal"),
        *((n, "size_greedy") for n in (1 << 30, 0)),
        *(
            pytest.param(n, algorithm, marks=pytest.mark.long)
            for n, algorithm in ((4 << 20, "size_greedy"), (1 << 30, "anneal"), (4 << 20, "anneal"))
        ),
    ],
)
def test_tables_that_host_memory_does_not_hold_go_to_ssd(host_bytes, algorithm):
    asked = with_ssd(host_bytes)
    best = decide(asked, ROWWISE, [MemoryTiers()], SHARDERS[algorithm], budget=Budget(evals=300))
    lower(best.plan, best.problem)
    below = [t for t in best.problem.tables if t.in_host_memory]
    on_ssd = [t for t in below if t.tier == "ssd"]
    assert below and bool(on_ssd) == (host_bytes < 1 << 30)
    assert sum(t.bytes for t in below if t not in on_ssd) <= host_bytes
    assert all(0 < t.load_factor <= 0.2 for t in on_ssd)


def test_equal_tables_fill_host_memory_before_ssd():
    """At a price of host memory all of them leave it together."""
    asked = with_ssd(4 << 20)
    tables = tuple(Table(f"t{i}", 25_000, 16, 4.0, Zipf(0.8)) for i in range(14))
    found = with_fastest_tiers(replace(asked, tables=tables))
    host = [t for t in found.tables if t.in_host_memory and t.tier == "host"]
    assert len(host) == (4 << 20) // tables[0].bytes
    assert any(t.tier == "ssd" for t in found.tables)


def test_what_ssd_cannot_hold_or_run_is_refused():
    with pytest.raises(Infeasible, match="of tables in SSD, which may hold 1.0 MiB"):
        with_fastest_tiers(with_ssd(1 << 20, 1 << 20))
    with pytest.raises(
        ShardCoreError, match="has memory of tier 'ssd', and TorchRec's key_value has no optimizer"
    ):
        with_fastest_tiers(replace(with_ssd(0), optimizer="adam"))
    # Where another tier is left, tables are there.
    adam = replace(with_ssd(1 << 30), optimizer="adam")
    assert {t.tier for t in with_fastest_tiers(adam).tables} == {"host"}
    with pytest.raises(
        Infeasible, match="of tables in host memory, .*; TorchRec's key_value has no optimizer"
    ):
        with_fastest_tiers(replace(with_ssd(4 << 20), optimizer="adam"))


def test_more_memory_never_gains_less_where_few_large_tables_fill_host_memory():
    shapes = ((200_000_000, 64, 1.0, 1.05), (400_000_000, 128, 10.0, 1.2), (600_000_000, 32, 3.0, 0.9))
    tables = tuple(
        Table(f"t{i}", rows, dim, pooling, Zipf(alpha))
        for i, (rows, dim, pooling, alpha) in enumerate(shapes)
    )
    memory = (Memory("host", 200 * 10**9, 25.0), Memory("ssd", 4 * 10**12, 2.0))
    asked = Problem(
        "p", tables, Topology((Device(19 * 10**9),) * 8, memory=memory), 8192, optimizer="rowwise_adagrad"
    )
    some, more = link_ms_savings(asked, (32, 64))
    assert 0 < some <= more


def test_memory_that_is_left_on_a_device_goes_to_its_tables():
    asked = with_load_factors(problem(), {t.name: 0.1 for t in TABLES})
    plan = SHARDERS["size_greedy"](asked, MODEL.for_problem(asked))
    better, now = fill_free_memory(plan, asked, MODEL)
    assert least_link_ms(better) < 0.5 * least_link_ms(asked)
    assert now.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    assert [p.devices for p in now.placements] == [p.devices for p in plan.placements]
    lower(now, better)


@pytest.mark.parametrize("algorithm", sorted(SHARDERS))
def test_every_sharder_takes_load_factors(algorithm):
    asked = with_fastest_tiers(problem(), -(1 << 20))
    found = SHARDERS[algorithm](asked, MODEL.for_problem(asked), budget=Budget(evals=200))
    lower(found, asked)
    held = {t.name for t in asked.tables if t.in_host_memory}
    assert not {p.shard.table.name for p in found.placements if p.kind == "data_parallel"} & held


@pytest.mark.parametrize("load_factor", [1.0, 0.5])
def test_tables_that_replicas_would_suit_are_none_with_rows_in_host_memory(load_factor):
    small = tuple(Table(f"s{i}", 100, 16, 50.0, Zipf(1.0), load_factor=load_factor) for i in range(4))
    slow = replace(problem(1 << 26).topology, links=make_links(within_host=0.01, latency_ms=0.1))
    asked = Problem("small", small, slow, 1024)
    found = SHARDERS["anneal"](asked, MODEL.for_problem(asked), budget=Budget(evals=2_000))
    assert lower(found, asked)
    assert any(p.kind == "data_parallel" for p in found.placements) is (load_factor == 1)


def test_a_replica_has_no_rows_in_host_memory():
    asked = with_load_factors(problem(), {"t0": 0.1})
    plan = Plan(tuple(Placement("data_parallel", Shard.whole(t), (0, 1, 2, 3)) for t in asked.tables))
    with pytest.raises(ShardCoreError, match="by data_parallel, with load_factor 0.1"):
        lower(plan, asked)


def test_what_hosts_cannot_hold_is_refused():
    with pytest.raises(Infeasible, match="in host memory, which may hold 1.0 MiB"):
        found(problem(host_bytes=1 << 20))
    two = replace(
        problem(),
        topology=replace(
            problem().topology,
            memory=(Memory("host", 11 << 20, 5.0),),
            devices=tuple(Device(5 << 20, host=f"host-{i // 2}") for i in range(4)),
        ),
    )
    asked = with_load_factors(two, {t.name: 0.1 for t in TABLES})
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(asked.tables)))
    with pytest.raises(Infeasible, match="host 'host-0' of problem 'large' would hold 14.9 MiB of rows"):
        lower(plan, asked)


@pytest.mark.parametrize("dims", [(4, 128), pytest.param((8, 512), marks=pytest.mark.long)])
def test_tables_of_unlike_widths_share_a_cache_that_fits(dims):
    """A cached row of a narrow table is as wide as the widest of its op, so few narrow ones are cached."""
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(10 ** rng.uniform(4, 5)), int(rng.choice(dims)), 5.0) for i in range(10)
    )
    room = sum(t.bytes for t in tables) // 4
    problem = Problem(
        "p", tables, Topology((Device(room),) * 2, memory=(Memory("host", 1 << 36, 25.0),)), 256
    )
    model = AnalyticModel(Setting("made-up", 256)).for_problem(problem)
    for outcome in decide(problem, model, [MemoryTiers()], SHARDERS["size_greedy"]).outcomes:
        if outcome.found:
            require_fits(outcome.found.plan, outcome.found.problem)
