"""The choice of sharding groups, under links and a model whose costs can be worked out by hand."""

from dataclasses import replace

import pytest
from shapes import column, replica

from shardcore.core.errors import Infeasible
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.groups import Groups, grouped_cost
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import GroupedPlan, Grouping, problem_of_group, synced_bytes

MIB = 1 << 20
MODEL = AnalyticModel(Setting("any", 512))
NEAR, FAR, LATENCY_MS = 40.0, 5.0, 0.2


def problem(memory: int = 512 * MIB, optimizer: str = "exact_sgd", hosts: int = 2) -> Problem:
    tables = tuple(Table(f"t{i}", 40_000 * (1 + i % 3), 32, 2.0 + i) for i in range(12))
    devices = tuple(Device(memory, host=f"h{h}") for h in range(hosts) for _ in range(4))
    links = Topology(devices, links=make_links(LATENCY_MS, within_host=NEAR, between_hosts=FAR))
    return Problem("many", tables, links, 64 * len(devices), optimizer)


def model_of(given: Problem) -> AnalyticModel:
    return AnalyticModel(Setting("any", given.global_batch, given.precision, given.optimizer))


def best(given: Problem, sync_every: int = 1, size="auto", sharder="size_greedy", **limits):
    return decide(given, model_of(given), [Groups(size, sync_every)], SHARDERS[sharder], **limits)


def found(given: Problem, sync_every: int = 1, size="auto", sharder="size_greedy", **limits):
    """The result for each grouping that has a plan."""
    return [x.found for x in best(given, sync_every, size, sharder, **limits).outcomes if x.found]


@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("layout, gbps", [("contiguous", FAR), ("strided", NEAR)])
def test_a_synchronisation_is_a_ring_on_the_replicas_links(layout, gbps, optimizer):
    """Replicas of contiguous groups are on two hosts, those of strided groups are neighbours."""
    given = problem(optimizer=optimizer)
    (one,) = (c for c in found(given, 10, "4") if c.grouping.layout == layout)
    given_ms = 0.0
    for n_bytes in zip(*synced_bytes(one.plan, one.problem), strict=True):
        if max(n_bytes):
            # A ring is two transfers (AnalyticModel): 2 latencies, and 2 (R - 1) / R of the bytes.
            given_ms += 2 * LATENCY_MS + 2 * (1 / 2) * max(n_bytes) / (gbps * 1e6)
    assert one.cost.sync_ms == pytest.approx(given_ms)


def test_a_step_is_that_of_a_group_and_a_share_of_a_synchronisation():
    given = problem()
    for every in (1, 7):
        for c in found(given, every):
            own, plan = c.problem, c.plan
            assert c.cost.step_ms == price(lower(plan, own), model_of(given).for_problem(own)).total_ms
            assert c.ms == c.cost.total_ms == pytest.approx(c.cost.step_ms + c.cost.sync_ms / every)
            assert (c.cost.sync_ms > 0) == (c.grouping.size < 8)
    plain = found(given)[0]
    assert plain.problem == given and plain.cost.sync_ms == 0


def test_the_cheapest_is_chosen_and_synchronising_seldom_makes_groups_smaller():
    chosen = {}
    for every in (1, 1000):
        chosen[every] = best(problem(), every)
        assert chosen[every].ms == min(x.ms for x in chosen[every].outcomes)
    assert chosen[1].grouping.size == 8 > chosen[1000].grouping.size
    near_sync, far_sync = (
        next(c for c in found(problem()) if c.grouping == Grouping(4, layout))
        for layout in ("strided", "contiguous")
    )
    assert near_sync.cost.sync_ms < far_sync.cost.sync_ms and near_sync.cost.step_ms > far_sync.cost.step_ms


def test_memory_bounds_how_small_groups_are():
    """12 tables of 117 MiB in all do not fit on two devices of 48 MiB."""
    given = problem(memory=48 * MIB)
    outcomes = best(given, 1000).outcomes
    assert [x.proposal.grouping.size for x in outcomes if x.found] == [8, 4, 4]
    assert all("MiB" in str(x.error) for x in outcomes if not x.found)
    with pytest.raises(Infeasible, match="none of 2 proposals of .* has a plan; 4 contiguous groups"):
        best(given, size="2")


def test_gradients_of_replicated_tables_travel_among_all_groups():
    given, grouping = problem(), Grouping(4, "contiguous")
    own = problem_of_group(given, grouping)
    first, *others = own.tables
    plan = Plan((replica(first, own.topology), *(column(t, i % 4) for i, t in enumerate(others))))
    cost = grouped_cost(GroupedPlan(grouping, plan, own), given, model_of(given).for_problem(own))
    # A ring over 8 devices of two hosts moves 7 of 8 parts over each link, one over 4 neighbours 3 of 4.
    far, near = 2 * first.bytes * 7 / 8 / (FAR * 1e6), 2 * first.bytes * 3 / 4 / (NEAR * 1e6)
    assert cost.dense_gradients_ms == pytest.approx(far - near)
    assert cost.step_ms == cost.step.total_ms + cost.dense_gradients_ms


def test_rows_in_host_memory_cross_their_link_twice_to_be_averaged():
    given = problem()
    given = replace(given, topology=replace(given.topology, memory=(Memory("host", 1 << 34, 25.0),)))
    hosted = replace(given, tables=(replace(given.tables[0], load_factor=0.5), *given.tables[1:]))
    grouping, costs = Grouping(4, "contiguous"), []
    for of in (given, hosted):
        own = problem_of_group(of, grouping)
        plan = Plan(tuple(column(t, i % 4) for i, t in enumerate(own.tables)))
        costs.append(
            grouped_cost(GroupedPlan(grouping, plan, own), of, model_of(of).for_problem(own)).sync_ms
        )
    assert costs[1] - costs[0] == pytest.approx(2 * given.tables[0].bytes / 25e6)


def test_even_bytes_are_kept_where_synchronising_costs_most():
    """A sharder that makes steps cheap, whatever a device holds."""
    given = problem()
    for every, wanted in ((1, "size_greedy"), (1_000_000, "lookup_greedy")):
        plain, far, *_ = found(given, every, sharder="lookup_greedy")
        assert plain.plan.provenance["algorithm"] == "lookup_greedy"
        assert far.plan.provenance["algorithm"] == wanted
        assert far.ms <= found(given, every, "4")[0].ms
