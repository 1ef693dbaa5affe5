"""Pipeline prefetch: fetches of caches travel beside the step, and lengthen it only where not hidden."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.job import PIPELINES, Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel, price
from shardcore.cost.profile import load_profile
from shardcore.cost.profile_law import shard_work
from shardcore.search.decisions.memory_tiers import with_load_factors
from shardcore.step.lower import lower
from shardcore.tables.host_rows import link_bytes_of_shard

BATCH, GBPS = 256, 2.0
TABLES = tuple(Table(f"t{i}", 5_000, 16, 3.0, Zipf(0.9)) for i in range(4))
CACHED, UNCACHED = {"t0": 0.1}, {"t1": 0.0, "t3": 0.0}


def problem(
    factors, dense_ms=0.0, pipeline="prefetch", gbps=GBPS, devices=1, optimizer="exact_sgd"
) -> Problem:
    topology = Topology((Device(1 << 30),) * devices, memory=(Memory("host", 1 << 30, gbps),))
    job = Job(pipeline, dense_forward_ms=dense_ms / 3, dense_backward_ms=dense_ms * 2 / 3)
    return with_load_factors(Problem("p", TABLES, topology, BATCH, optimizer, job=job), factors)


def cost(of: Problem, model: CostModel):
    """Tables in turn on the devices: with two, t0 and t2 on the first."""
    n = len(of.topology)
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % n,)) for i, t in enumerate(of.tables)))
    return price(lower(plan, of), model.for_problem(of))


def sent_ms(of: Problem, cached: bool) -> float:
    """ms of forward bytes over the link, of tables with a cache or without, at the link's own GB/s."""
    tables = [t for t in of.tables if t.in_host_memory and (t.load_factor > 0) == cached]
    n_bytes = sum(link_bytes_of_shard(Shard.whole(t), BATCH, of.optimizer)[0] for t in tables)
    return n_bytes / (of.topology.memory[0].gbps * BYTES_PER_MS_PER_GBPS)


@pytest.fixture(params=["analytic", "trained"])
def any_model(request) -> CostModel:
    """The models whose links are those of composite.MemoryLinks."""
    if request.param == "analytic":
        return AnalyticModel(Setting("made-up", BATCH))
    return request.getfixturevalue("model")


@pytest.mark.parametrize("optimizer", ["exact_sgd", "adam"])
@pytest.mark.parametrize("uncached", [{}, UNCACHED])
@pytest.mark.parametrize("gbps, dense_ms", [(0.2, 0.0), (0.2, 0.1), (2.0, 50.0), (200.0, 0.0)])
def test_a_step_is_shorter_by_the_fetch_or_by_what_it_hides_behind(
    any_model, optimizer, uncached, gbps, dense_ms
):
    """One device exchanges nothing: a fetch hides behind lookups in device memory and the dense part."""
    ahead = problem({**CACHED, **uncached}, dense_ms, gbps=gbps, optimizer=optimizer)
    plain = replace(ahead, job=replace(ahead.job, pipeline="sparse_dist"))
    was, now = cost(plain, any_model), cost(ahead, any_model)
    fetch_ms, read_ms = sent_ms(ahead, cached=True), sent_ms(ahead, cached=False)
    room_ms = was.forward_compute_ms[0] - fetch_ms - read_ms + dense_ms
    assert fetch_ms > 0 and (read_ms > 0) == bool(uncached)
    assert was.total_ms - now.total_ms == pytest.approx(min(fetch_ms, room_ms), rel=1e-6, abs=1e-9)
    assert now.fetch_wait_ms[0] == pytest.approx(max(0.0, fetch_ms - room_ms), rel=1e-6, abs=1e-9)
    assert now.link_ms[0] == pytest.approx(fetch_ms + read_ms)
    assert now.backward_compute_ms == pytest.approx(was.backward_compute_ms)


def test_both_regimes_are_among_these():
    model = AnalyticModel(Setting("made-up", BATCH))
    waits = [
        cost(problem(CACHED, ms, gbps=gbps), model).fetch_wait_ms[0] for gbps, ms in ((0.2, 0.1), (2.0, 50.0))
    ]
    assert waits[0] > waits[1] == 0


def test_the_profile_hides_what_its_law_says_of_the_cache():
    model, of = load_profile("nvidia-h100-sxm").cost_model(), problem(CACHED, 5.0)
    of = replace(of, topology=replace(of.topology, hardware="nvidia-h100-sxm"))
    plain = replace(of, job=replace(of.job, pipeline="sparse_dist"))
    own = model.for_problem(of)
    n_bytes = shard_work([Shard.whole(of.tables[0])], BATCH, of.optimizer).cache_bytes[0]
    values = own._rate_values
    fetch_ms = values["compute_factor"] * n_bytes / (values["host_cache_gbps"] * BYTES_PER_MS_PER_GBPS)
    was, now = cost(plain, model), cost(of, model)
    assert 0 < fetch_ms < 5 and now.fetch_wait_ms == (0.0,)
    assert was.total_ms - now.total_ms == pytest.approx(fetch_ms)
    slow = problem(CACHED, gbps=GBPS / 10)
    waits = cost(replace(slow, topology=replace(slow.topology, hardware="nvidia-h100-sxm")), model)
    assert waits.link_ms[0] == pytest.approx(10 * fetch_ms)
    assert waits.total_ms == pytest.approx(10 * fetch_ms + waits.backward_compute_ms[0] + waits.input_ms[0])


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize("factors", [{}, UNCACHED])
def test_without_a_cache_nothing_is_hidden(factors, profile, model):
    for one in (
        AnalyticModel(Setting("made-up", BATCH)),
        load_profile("nvidia-h100-sxm").cost_model() if profile else model,
    ):
        for dense_ms in (0.0, 5.0):
            was, now = (
                cost(problem(factors, dense_ms, pipeline, devices=2), one)
                for pipeline in ("sparse_dist", "prefetch")
            )
            assert now.device_ms == was.device_ms and now.total_ms == was.total_ms
            assert now.fetch_wait_ms == (0.0, 0.0)


def test_other_pipelines_hide_nothing(any_model):
    costs = [
        cost(problem(CACHED, 5.0, name, devices=2), any_model)
        for name in PIPELINES
        if name not in ("none", "prefetch")
    ]
    assert len({x.device_ms for x in costs}) == 1 and not any(any(x.fetch_wait_ms + x.link_ms) for x in costs)


def test_devices_wait_for_the_one_that_fetches_longest(any_model):
    """Its lookups are no longer late, so the others wait less before the exchange, and then for its rows."""
    ahead = problem(CACHED, gbps=0.05, devices=2)
    now = cost(ahead, any_model)
    chain_ms = np.array(now.link_ms) + now.backward_compute_ms
    assert now.link_ms[1] == 0 < now.fetch_wait_ms[0] and now.fetch_wait_ms[1] == 0
    assert now.total_ms == pytest.approx(chain_ms[0] + now.input_ms[0])
    hidden = cost(problem(CACHED, 50.0, gbps=0.05, devices=2), any_model)
    busy_ms = np.array(hidden.device_ms) - hidden.input_ms
    assert chain_ms[0] < 50 and hidden.fetch_wait_ms == (0.0, 0.0)
    assert hidden.total_ms == pytest.approx(max(busy_ms) + 50 + hidden.input_ms[0])
    slow = replace(ahead, topology=replace(ahead.topology, devices=(Device(1 << 30, 0.5), Device(1 << 30))))
    assert cost(slow, any_model).link_ms[0] == pytest.approx(2 * now.link_ms[0])
