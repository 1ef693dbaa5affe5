"""A plan under construction: memory and cost as of the finished plan, whatever was placed and removed before."""

from dataclasses import replace

import numpy as np
import pytest
from cuts import (
    BATCH,
    MODEL,
    draw_all_kinds,
    draw_cuts,
    draw_devices,
    draw_problem,
    draw_two_cuts,
    on_two_hosts,
    plan_of,
    total_ms,
    with_memory,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import with_room

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.types import Setting, Shard
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search.state.placement_state import PlacementState
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.state.shards import bundles, devices_of
from shardcore.step.lower import lower
from shardcore.step.memory import used_bytes


def state_of(problem, shards, batch=()):
    """An empty state, and the keys of the shards."""
    cache = ShardCostCache(problem, MODEL, shards)
    keys = cache.keys(shards)
    cache.add(keys)
    return PlacementState(cache, keys, batch), keys


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), rows=st.booleans())
def test_it_costs_what_its_plan_does_also_after_shards_were_elsewhere(seed, rows):
    rng = np.random.default_rng(seed)
    problem = on_two_hosts(draw_problem(seed, n_tables=6, memory=2**24))
    problem = replace(
        problem, tables=tuple(replace(t, features=1 + i % 3) for i, t in enumerate(problem.tables))
    )
    shards = draw_cuts(rng, problem, rows)
    state, keys = state_of(problem, shards)
    for last in (False, False, True):
        devices = [int(rng.choice(devices_of(s, problem))) for s in shards]
        for i in rng.permutation(len(keys)):
            state.place(*keys[i], devices[i])
        for i in () if last else rng.permutation(len(keys)):
            state.remove(*keys[i], devices[i])
        kept = (state.used, state.outputs, state.id_bytes, state.op_ms, state.cost_ms(), np.rint(state.load))
        assert last or not any(np.any(x) for x in kept)
    assert state.cost_ms() == pytest.approx(total_ms(shards, devices, problem), rel=1e-9)
    plan = state.plan(algorithm="drawn")
    assert plan.provenance["predicted_ms"] == pytest.approx(float(state.cost_ms()), rel=1e-9)
    assert plan.provenance["algorithm"] == "drawn"


@pytest.mark.parametrize("seed", range(6))
def test_it_costs_what_its_plan_does_with_tables_of_fixed_kinds(seed):
    """Without bundles: in a search's cost they run as their first table."""
    rng, drawn = np.random.default_rng(seed), draw_all_kinds(seed, caches=seed % 2)
    problem = replace(
        drawn,
        constraints=replace(drawn.constraints, together=()),
        topology=replace(drawn.topology, hardware=None),
    )
    shards = draw_two_cuts(rng, problem)[0]
    devices = draw_devices(rng, shards, problem)
    model = AnalyticModel(Setting("made-up", BATCH, problem.precision, problem.optimizer))
    cache = ShardCostCache(problem, model, shards)
    keys = cache.keys(shards)
    cache.add(keys)
    state = PlacementState(cache, keys)
    for key, device in zip(keys, devices, strict=True):
        state.place(*key, device)
    ms = price(lower(plan_of(shards, devices, problem), problem), model).total_ms
    assert state.cost_ms() == pytest.approx(ms, rel=1e-9)


@pytest.mark.parametrize("gbps", [0.001, 25.0])
def test_it_costs_what_its_plan_does_if_caches_fetch_ahead(gbps):
    """One cached table a device: others of an op would change what its cache holds."""
    drawn = draw_problem(5, n_tables=12)
    factors = [0.2, 0.3, 0.4, 0.5, *[1.0] * 4, 0.0, *[1.0] * 3]
    problem = replace(
        drawn,
        tables=tuple(
            replace(t, pooling=5.0, rows=1000, load_factor=x)
            for t, x in zip(drawn.tables, factors, strict=True)
        ),
        constraints=Constraints(),
        topology=replace(drawn.topology, memory=(Memory("host", 1 << 30, gbps),)),
        job=Job("prefetch", dense_forward_ms=1.0, dense_backward_ms=1.0),
    )
    problem, shards = with_room(problem), list(map(Shard.whole, problem.tables))
    model = MODEL.for_problem(problem)
    cache = ShardCostCache(problem, model, shards)
    keys = cache.keys(shards)
    cache.add(keys)
    state = PlacementState(cache, keys)
    devices = [i % 4 for i in range(len(keys))]
    for key, device in zip(keys, devices, strict=True):
        state.place(*key, device)
    cost = price(lower(plan_of(shards, devices, problem), problem), model)
    assert state.cost_ms() == pytest.approx(cost.total_ms, rel=1e-9)
    assert any(cost.fetch_wait_ms) == (gbps < 1)


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
        assert both.cost_ms()[c, k] == pytest.approx(one.cost_ms())
        assert both.used[c, k].tolist() == one.used.tolist()
        assert both.device_ms[c, k].tolist() == pytest.approx(one.device_ms.tolist())


def devices_that_fit(problem, cuts, devices, c, batch) -> set[int]:
    """The devices whose last shard fits when all others are placed, in the c-th way to cut tables.

    batch: whether one state keeps plans of both ways.
    """
    cache = ShardCostCache(problem, MODEL, cuts[c])
    keys, homes = [], []
    for shards, at in zip(cuts, devices, strict=True):
        keys.append(cache.keys(shards))
        cache.add(keys[-1])
        device_of = dict(zip(shards, at, strict=True))
        homes.append([device_of[bundle[0]] for bundle in bundles(shards, problem)])
    keys, homes = np.array(keys), np.array(homes)
    that_fit = set()
    for device in set(homes[c].tolist()):
        last = int(np.flatnonzero(homes[c] == device)[-1])
        state = PlacementState(cache, *((keys, (2, 3)) if batch else (keys[c],)), priced=False)

        def at(i):
            return (keys[:, i, 0, None], keys[:, i, 1, None]) if batch else keys[c, i]

        for i in set(range(len(homes[c]))) - {last}:
            state.place(*at(i), np.repeat(homes[:, i, None], 3, 1) if batch else homes[c, i])
        fits = state.fits(*at(last))
        if (fits[c, :, device] if batch else fits[device]).all():
            that_fit.add(device)
    return that_fit


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))]
)
def test_what_it_counts_is_what_the_finished_plan_takes_to_the_byte(seed, batch, caches):
    """Tables of all kinds. Plans that cut them differently are kept one by one, or in one batch."""
    rng, problem = np.random.default_rng(seed), draw_all_kinds(seed, caches)
    cuts = draw_two_cuts(rng, problem)
    devices = [draw_devices(rng, shards, problem) for shards in cuts]
    for c in (0, 1):
        used = used_bytes(plan_of(cuts[c], devices[c], problem), problem)
        enough, less = (with_memory(problem, [n - k for n in used]) for k in (0, 1))
        assert devices_that_fit(enough, cuts, devices, c, batch) == set(devices[c])
        assert devices_that_fit(less, cuts, devices, c, batch) == set()


def test_a_plan_that_lacks_a_table_is_refused():
    problem = draw_problem(2, n_tables=3)
    state, keys = state_of(problem, list(map(Shard.whole, problem.tables)))
    state.place(*keys[0], 0)
    with pytest.raises(ShardCoreError, match="'t1'"):
        state.plan()


def test_what_is_not_to_be_priced_is_not_encoded():
    problem = draw_problem(4, n_tables=3)
    shards = list(map(Shard.whole, problem.tables))
    problem = with_memory(problem, used_bytes(plan_of(shards, (0, 0, 0), problem), problem))

    class Silent:
        def encode(self, shards, batch=None):
            raise AssertionError("it was asked for")

    cache = ShardCostCache(problem, Silent(), shards)
    keys = cache.keys(shards)
    cache.add(keys)
    state = PlacementState(cache, keys, priced=False)
    for key in keys:
        assert state.fits(*key)[0]
        state.place(*key, 0)
