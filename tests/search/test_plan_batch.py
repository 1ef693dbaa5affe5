"""Plans under construction: memory and cost as of the finished plan."""

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
from shardcore.search.lockstep import PlanBatch, search_space_by_columns
from shardcore.step.lower import lower
from shardcore.step.memory import used_bytes
from shardcore.step.ways import allowed_devices_of_shard, bundle_shards, cut_into_equal_parts


def batch_of(problem, shards, plans=1, model=MODEL):
    """A batch with nothing placed, and the keys of the shards."""
    space = search_space_by_columns(problem, model, shards, cut=False)
    keys = space.cache.shard_keys(shards)
    return PlanBatch(space, np.array([keys]), plans), keys


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), rows=st.booleans())
def test_it_costs_what_its_plan_does(seed, rows):
    rng = np.random.default_rng(seed)
    problem = on_two_hosts(draw_problem(seed, n_tables=6, memory=2**24))
    problem = replace(
        problem, tables=tuple(replace(t, features=1 + i % 3) for i, t in enumerate(problem.tables))
    )
    shards = draw_cuts(rng, problem, rows)
    batch, keys = batch_of(problem, shards)
    devices = [int(rng.choice(allowed_devices_of_shard(s, problem))) for s in shards]
    for i in rng.permutation(len(keys)):
        batch.place_shard(*keys[i], devices[i])
    assert batch.cost_ms()[0, 0] == pytest.approx(total_ms(shards, devices, problem), rel=1e-9)
    plan = batch.first_plan(algorithm="drawn")
    assert plan.provenance["predicted_ms"] == pytest.approx(batch.cost_ms()[0, 0], rel=1e-9)
    assert plan.provenance["algorithm"] == "drawn"


@pytest.mark.parametrize("seed", range(6))
def test_it_costs_what_its_plan_does_with_tables_of_fixed_kinds(seed):
    rng, drawn = np.random.default_rng(seed), draw_all_kinds(seed, caches=seed % 2)
    problem = replace(drawn, topology=replace(drawn.topology, hardware=None))
    shards = draw_two_cuts(rng, problem)[0]
    devices = draw_devices(rng, shards, problem)
    model = AnalyticModel(Setting("made-up", BATCH, problem.precision, problem.optimizer))
    batch, keys = batch_of(problem, shards, model=model)
    device_of = dict(zip(shards, devices, strict=True))
    for key, bundle in zip(keys, bundle_shards(shards, problem), strict=True):
        batch.place_shard(*key, device_of[bundle[0]])
    ms = price(lower(plan_of(shards, devices, problem), problem), model).total_ms
    assert batch.cost_ms()[0, 0] == pytest.approx(ms, rel=1e-9)


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
    batch, keys = batch_of(problem, shards, model=model)
    devices = [i % 4 for i in range(len(keys))]
    for key, device in zip(keys, devices, strict=True):
        batch.place_shard(*key, device)
    cost = price(lower(plan_of(shards, devices, problem), problem), model)
    assert batch.cost_ms()[0, 0] == pytest.approx(cost.total_ms, rel=1e-9)
    assert any(cost.fetch_wait_ms) == (gbps < 1)


def test_plans_of_a_batch_are_kept_apart_and_as_single_ones():
    problem = draw_problem(3, n_tables=5)
    shards = list(map(Shard.whole, problem.tables))
    several, keys = batch_of(problem, shards, plans=3)
    devices = np.random.default_rng(0).integers(4, size=(1, 3, len(keys)))
    for i, (item, blocks) in enumerate(keys):
        assert several.fitting_devices(item, blocks).shape == (1, 3, 4)
        several.place_shard(item, blocks, devices[..., i])
    for k in range(3):
        one, _ = batch_of(problem, shards)
        for i, key in enumerate(keys):
            one.place_shard(*key, devices[0, k, i])
        assert several.cost_ms()[0, k] == pytest.approx(one.cost_ms()[0, 0])
        assert several.used_bytes[0, k].tolist() == one.used_bytes[0, 0].tolist()
        assert several.device_ms[0, k].tolist() == pytest.approx(one.device_ms[0, 0].tolist())


def devices_that_fit(problem, cuts, devices, c) -> set[int]:
    """The devices whose last shard fits when all others are placed, in the c-th way to cut tables.

    One batch has plans of all ways.
    """
    space = search_space_by_columns(problem, MODEL, cuts[c], cut=True)
    keys = [space.cache.shard_keys(shards) for shards in cuts]
    homes = []
    for shards, at in zip(cuts, devices, strict=True):
        device_of = dict(zip(shards, at, strict=True))
        homes.append([device_of[bundle[0]] for bundle in bundle_shards(shards, problem)])
    keys, homes = np.array(keys), np.array(homes)
    that_fit = set()
    for device in set(homes[c].tolist()):
        last = int(np.flatnonzero(homes[c] == device)[-1])
        batch = PlanBatch(space, keys, 3)
        for i in set(range(len(homes[c]))) - {last}:
            batch.place_shard(*keys[:, i].T[..., None], homes[:, i, None])
        if batch.fitting_devices(*keys[:, last].T[..., None])[c, :, device].all():
            that_fit.add(device)
    return that_fit


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))]
)
def test_what_it_counts_is_what_the_finished_plan_takes_to_the_byte(seed, caches):
    """Tables of all kinds. Plans that cut them differently are in one batch."""
    rng, problem = np.random.default_rng(seed), draw_all_kinds(seed, caches)
    cuts = draw_two_cuts(rng, problem)
    devices = [draw_devices(rng, shards, problem) for shards in cuts]
    for c in (0, 1):
        used = used_bytes(plan_of(cuts[c], devices[c], problem), problem)
        enough, less = (with_memory(problem, [n - k for n in used]) for k in (0, 1))
        assert devices_that_fit(enough, cuts, devices, c) == set(devices[c])
        assert devices_that_fit(less, cuts, devices, c) == set()


def test_halves_of_a_table_that_meet_take_memory_of_other_devices():
    """Backward copies the gradient of outputs that are cut, so the whole one, of all kinds, can go. With the last
    cut table whole again, it stays."""
    drawn = draw_problem(0, n_tables=4)
    tables = tuple(
        replace(t, rows=1000, dim=dim, pooling=1.0)
        for t, dim in zip(drawn.tables, (16, 64, 64, 64), strict=True)
    )
    problem = replace(
        drawn, tables=tables, constraints=Constraints(kinds=(("t2", ("row",)), ("t3", ("row",))))
    )
    problem = with_memory(problem, [1 << 30] * 4)
    halves = cut_into_equal_parts(Shard.whole(tables[0]), 2)
    shards = [Shard.whole(tables[1]), *halves]
    apart, together = (used_bytes(plan_of(shards, (1, 0, d), problem), problem) for d in (2, 0))
    assert apart[1] < together[1]
    for free, fits in ((together[1], True), (together[1] - 1, False)):
        limited = with_memory(problem, [1 << 30, free, 1 << 30, 1 << 30])
        batch, keys = batch_of(limited, shards)
        for key, device in zip(keys[:2], (1, 0), strict=True):
            batch.place_shard(*key, device)
        assert batch.fitting_devices(*keys[2])[0, 0].tolist() == [fits, False, True, True]


def test_a_plan_that_lacks_a_table_is_refused():
    problem = draw_problem(2, n_tables=3)
    batch, keys = batch_of(problem, list(map(Shard.whole, problem.tables)))
    batch.place_shard(*keys[0], 0)
    with pytest.raises(ShardCoreError, match="'t1'"):
        batch.first_plan()
