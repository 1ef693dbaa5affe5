"""A plan under construction: what it keeps is what the finished plan takes and costs, whatever was placed and
removed before."""

from dataclasses import replace

import numpy as np
import pytest
from cuts import BATCH, MODEL, draw_cuts, draw_problem, on_two_hosts, total_ms
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import with_room

from shardcore.constraints import Constraints
from shardcore.errors import ShardCoreError
from shardcore.memory import counted_bytes
from shardcore.search.placement_state import PlacementState
from shardcore.search.shard_cost_cache import ShardCostCache
from shardcore.search.shards import devices_of, halve_columns
from shardcore.step.memory_account import table_bytes
from shardcore.topology import Device, Topology
from shardcore.types import Problem, Shard, Table

MIB = 2**20


def state_of(problem, shards, batch=()):
    """An empty state, and the keys of the shards."""
    cache = ShardCostCache(problem, MODEL, shards)
    keys = [cache.key(s) for s in shards]
    cache.add(keys)
    return PlacementState(cache, batch), keys


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.booleans())
def test_it_costs_and_takes_what_its_plan_does_also_after_shards_were_elsewhere(seed, rows):
    rng = np.random.default_rng(seed)
    problem = on_two_hosts(draw_problem(seed, n_tables=6, memory=2**24))
    problem = replace(problem, tables=tuple(replace(t, features=1 + i % 3)
                                            for i, t in enumerate(problem.tables)))
    shards = draw_cuts(rng, problem, rows)
    state, keys = state_of(problem, shards)
    for last in (False, False, True):
        devices = [int(rng.choice(devices_of(s, problem))) for s in shards]
        for i in rng.permutation(len(keys)):
            state.place(*keys[i], devices[i])
        for i in () if last else rng.permutation(len(keys)):
            state.remove(*keys[i], devices[i])
        kept = (state.used, state.outputs, state.id_bytes, state.op_ms, state.cost_ms())
        assert last or not any(np.any(x) for x in kept)
    assert state.cost_ms() == pytest.approx(total_ms(shards, devices, problem), rel=1e-9)
    plan = state.plan(algorithm="drawn")
    assert plan.provenance["predicted_ms"] == pytest.approx(float(state.cost_ms()), rel=1e-9)
    assert state.used.tolist() == counted_bytes(plan, problem) and plan.provenance["algorithm"] == "drawn"


def test_plans_of_a_batch_are_kept_apart_and_as_single_ones():
    problem = draw_problem(3, n_tables=5)
    shards = list(map(Shard.whole, problem.tables))
    both, keys = state_of(problem, shards, batch=(2, 3))
    rng = np.random.default_rng(0)
    devices = rng.integers(4, size=(2, 3, len(keys)))
    for i, (strip, units) in enumerate(keys):
        fits = both.fits(np.full((2, 1), strip), np.full((2, 1), units))
        assert fits.shape == (2, 3, 4)
        both.place(np.full((2, 1), strip), np.full((2, 1), units), devices[..., i])
    for c, k in np.ndindex(2, 3):
        one, _ = state_of(problem, shards)
        for i, key in enumerate(keys):
            one.place(*key, devices[c, k, i])
        assert (both.cost_ms()[c, k] == pytest.approx(one.cost_ms())
                and both.used[c, k].tolist() == one.used.tolist())
        assert both.device_ms[c, k].tolist() == pytest.approx(one.device_ms.tolist())


def test_a_shard_fits_to_the_byte_and_only_where_its_table_may_be():
    table, other = Table("t", 10**4, 4, 1.0), Table("u", 10**4, 4, 1.0)
    ample = Problem("p", (table, other), Topology((Device(MIB),) * 3), BATCH,
                    constraints=Constraints(pinned=(("u", (0, 2)),)))
    needed = table_bytes(table, ample)
    tight = Topology(tuple(map(Device, (needed - 1, needed, 2 * needed - 1))))
    problem = with_room(replace(ample, topology=tight))
    state, [free, pinned] = state_of(problem, [Shard.whole(table), Shard.whole(other)])
    assert state.fits(*free).tolist() == [False, True, True]
    assert state.fits(*pinned).tolist() == [False, False, True]
    state.place(*free, 2)
    assert state.fits(*pinned).tolist() == [False, False, False]
    state.remove(*free, 2)
    state.place(*free, 1)
    assert state.fits(*pinned).tolist() == [False, False, True]


def test_columns_that_join_others_of_their_table_bring_no_optimizer_state():
    problem = Problem("p", (Table("t", 1000, 16, 1.0),), Topology((Device(MIB),) * 2), BATCH,
                      "rowwise_adagrad")
    state, [left, right] = state_of(problem, halve_columns(Shard.whole(problem.tables[0])))
    state.place(*left, 1)
    one, both = (table_bytes(problem.tables[0], problem, width) for width in (8, 16))
    assert state.extra_bytes(*right).tolist() == [one, both - one] and both < 2 * one - 4_000


def test_tables_kept_together_are_one_bundle():
    problem = replace(draw_problem(1, n_tables=4), constraints=Constraints(together=(("t0", "t2", "t3"),)))
    state, keys = state_of(problem, list(map(Shard.whole, problem.tables)))
    for key, device in zip(dict.fromkeys(keys), (3, 1), strict=True):
        state.place(*key, device)
    homes = {p.shard.table.name: p.devices for p in state.plan().placements}
    assert homes == {"t0": (3,), "t1": (1,), "t2": (3,), "t3": (3,)}


def test_a_plan_that_lacks_a_table_is_refused():
    problem = draw_problem(2, n_tables=3)
    state, keys = state_of(problem, list(map(Shard.whole, problem.tables)))
    state.place(*keys[0], 0)
    with pytest.raises(ShardCoreError, match="'t1'"):
        state.plan()


def test_what_is_not_to_be_priced_is_not_encoded():
    problem = draw_problem(4, n_tables=3)

    class Silent:
        def encode(self, shards, batch=None):
            raise AssertionError("it was asked for")

    cache = ShardCostCache(problem, Silent(), list(map(Shard.whole, problem.tables)))
    keys = cache.keys(map(Shard.whole, problem.tables))
    cache.add(keys)
    state = PlacementState(cache, priced=False)
    for key in keys:
        assert state.fits(*key).all()
        state.place(*key, 0)
    assert state.used[0] == sum(table_bytes(t, problem) for t in problem.tables)
