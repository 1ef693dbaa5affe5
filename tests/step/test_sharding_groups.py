"""Sharding groups: which devices they have, their problem, and what their replicas synchronise."""

from dataclasses import replace

import pytest
from shapes import column, replica, row

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io import files
from shardcore.io.files import read_grouped_plan, write_grouped_plan
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.step.sharding_groups import (
    GroupedPlan,
    Grouping,
    devices_of_groups,
    devices_per_domain,
    parse_group_sizes,
    possible_group_sizes,
    possible_groupings,
    problem_of_group,
    replica_devices,
    replicated_gradient_bytes,
    synced_bytes,
)

GIB = 1 << 30


def problem(hosts=("h0",) * 4 + ("h1",) * 4, optimizer="exact_sgd", **constraints) -> Problem:
    tables = tuple(Table(f"t{i}", 100, 16, 2.0) for i in range(4))
    return Problem(
        "whole",
        tables,
        Topology(tuple(Device(GIB, host=h) for h in hosts)),
        64 * len(hosts),
        optimizer,
        Constraints(**constraints),
    )


def test_groups_are_those_of_torchrec():
    topology = problem().topology
    assert devices_of_groups(topology, Grouping(4, "contiguous")) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert devices_of_groups(topology, Grouping(4, "strided")) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert replica_devices(topology, Grouping(4, "strided")) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert replica_devices(topology, Grouping(2, "contiguous")) == ((0, 2, 4, 6), (1, 3, 5, 7))
    # Ranks go host by host, whatever the order of devices is.
    mixed = problem(("h0", "h1") * 4).topology
    assert devices_of_groups(mixed, Grouping(4, "contiguous")) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_ways_to_divide_are_listed_once():
    assert possible_group_sizes(problem()) == (8, 4, 2, 1)
    found = [(g.size, g.layout) for g in possible_groupings(problem(), 3, possible_group_sizes(problem()))]
    assert found == [
        (8, "contiguous"),
        (4, "contiguous"),
        (4, "strided"),
        (2, "contiguous"),
        (2, "strided"),
        (1, "contiguous"),
    ]
    assert {g.sync_every for g in possible_groupings(problem(), 3, (2,))} == {3}


@pytest.mark.parametrize("layout, hosts, on_each", [("contiguous", ("h0",), 4), ("strided", ("h0", "h1"), 2)])
def test_a_group_has_its_hosts_and_its_share_of_the_batch(layout, hosts, on_each):
    own = problem_of_group(problem(), Grouping(4, layout))
    assert own.topology.hosts == hosts and devices_per_domain(own) == on_each
    assert own.global_batch == 256 and own.local_batch == problem().local_batch
    assert own.tables == problem().tables and own.name == f"whole.{layout}-4"
    assert problem_of_group(problem(), Grouping(8, layout)) == problem()


def test_groups_of_whole_pods_divide_rows_over_them():
    """Four pods of two hosts of one device."""
    pods = problem(tuple(f"p{d // 2}/h{d}" for d in range(8)))
    near, far = (problem_of_group(pods, Grouping(4, layout)) for layout in ("contiguous", "strided"))
    assert near.topology.hosts == ("p0/h0", "p0/h1", "p1/h2", "p1/h3") and devices_per_domain(near) == 1
    over_pods = Placement("pod_row", Shard.whole(near.tables[0]), (0, 1))
    assert devices_per_domain(near, Plan((over_pods,))) == 2
    # Interleaved groups have one device of each pod, so there is no pod to divide rows over.
    assert far.topology.hosts == ("p0/h0", "p1/h2", "p2/h4", "p3/h6") and devices_per_domain(far) == 1
    with pytest.raises(Infeasible, match="group 1 has 2 and 2 devices in its pods, group 0 3 and 1"):
        problem_of_group(problem(tuple(f"p{d // 3}/h{d}" for d in range(8))), Grouping(4, "contiguous"))


def test_tables_that_torchrec_does_not_synchronise_have_no_groups():
    """DMPCollection averages tables of SplitTableBatchedEmbeddingBagsCodegen alone."""
    given = problem(optimizer="rowwise_adagrad")
    memory = Memory("host", 1 << 30, 20.0), Memory("ssd", 1 << 30, 2.0)
    given = replace(given, topology=replace(given.topology, memory=memory))
    assert [m.tier for m in problem_of_group(given, Grouping(4, "strided")).topology.memory] == ["host"]
    on_ssd = replace(given.tables[0], load_factor=0.1, tier="ssd")
    with pytest.raises(ShardCoreError, match="table 't0' with kernel key_value, which TorchRec 1.8 does not"):
        problem_of_group(replace(given, tables=(on_ssd, *given.tables[1:])), Grouping(4, "strided"))


def test_a_device_of_a_group_is_the_least_of_its_replicas():
    given = problem(("h0",) * 4)
    devices = [
        replace(d, memory_bytes=(i + 1) * GIB, speed=2.0 - i / 4)
        for i, d in enumerate(given.topology.devices)
    ]
    given = replace(given, topology=Topology(tuple(devices), links=make_links(within_host=10.0)))
    of = {
        layout: problem_of_group(given, Grouping(2, layout)).topology for layout in ("contiguous", "strided")
    }
    assert [(d.memory_bytes, d.speed) for d in of["contiguous"].devices] == [(GIB, 1.5), (2 * GIB, 1.25)]
    assert [(d.memory_bytes, d.speed) for d in of["strided"].devices] == [(GIB, 1.75), (3 * GIB, 1.25)]
    assert of["strided"].link("within_host").gbps == 10.0


def test_groups_that_one_plan_cannot_serve_are_refused():
    uneven = problem(("h0", "h0", "h0", "h1"))
    with pytest.raises(Infeasible, match="group 1 has 1 and 1 devices on its hosts, group 0 2; one plan"):
        problem_of_group(uneven, Grouping(2, "contiguous"))
    with pytest.raises(ShardCoreError, match="optimizer 'adam'; replicas of groups need one of exact_sgd, "):
        problem_of_group(problem(optimizer="adam"), Grouping(4, "strided"))
    assert problem_of_group(problem(optimizer="adam"), Grouping(8, "strided"))
    with pytest.raises(ShardCoreError, match=r"constraints.pinned \{'t0': \(0,\)\}; groups need none"):
        problem_of_group(problem(pinned=(("t0", (0,)),)), Grouping(4, "strided"))
    with pytest.raises(ShardCoreError, match="size 3, which does not divide 8 devices evenly; it needs one"):
        devices_of_groups(problem().topology, Grouping(3, "strided"))
    for wrong, says in (
        ((0, "strided", 1), "size 0; it needs 1"),
        ((2, "ring", 1), "layout 'ring'; known are"),
        ((2, "strided", 0), "sync_every 0; it needs 1 to"),
    ):
        with pytest.raises(ShardCoreError, match=says):
            Grouping(*wrong)


@pytest.mark.parametrize("text", ["3", "0", "-2", "x", "16", "2.0", "²", ""])
def test_a_size_that_is_none_is_named(text):
    with pytest.raises(ShardCoreError) as error:
        parse_group_sizes(text, problem())
    assert str(error.value) == (
        f"--groups is {text!r}; it needs 'auto' or a size that divides the 8 devices "
        "of problem 'whole' evenly: 1, 2, 4, 8"
    )
    assert parse_group_sizes("auto", problem()) == (8, 4, 2, 1) and parse_group_sizes("2", problem()) == (2,)


def plan_of(own: Problem) -> Plan:
    a, b, c, d = own.tables
    return Plan(
        (
            column(a, 0),
            row(b, own.topology),
            replica(c, own.topology),
            column(d, 1, 0, 4),
            column(d, 0, 4, 16),
        )
    )


def test_weights_and_sums_are_synchronised_replicated_tables_are_not():
    own = problem_of_group(problem(("h0",) * 4), Grouping(2, "strided"))
    weights = [4 * (100 * 16 + 50 * 16 + 100 * 12), 4 * (50 * 16 + 100 * 4)]
    assert synced_bytes(plan_of(own), own) == [(w, 0) for w in weights]
    own = replace(own, optimizer="rowwise_adagrad")
    assert synced_bytes(plan_of(own), own) == [(weights[0], 4 * 250), (weights[1], 4 * 150)]
    assert replicated_gradient_bytes(plan_of(own)) == 4 * 100 * 16
    replica = next(p.shard.table for p in plan_of(own).placements if p.kind == "data_parallel")
    in_host = replace(
        own,
        tables=tuple(
            t if t == replica else replace(t, load_factor=0.0) for t in own.tables
        ),  # all rows are averaged there too
        topology=replace(own.topology, memory=(Memory("host", GIB, 25.0),)),
    )
    assert synced_bytes(rebind_tables(plan_of(own), in_host), in_host) == synced_bytes(plan_of(own), own)


def test_a_grouped_plan_comes_back_and_is_none_of_all_devices(tmp_path):
    given, grouping = problem(("h0",) * 4), Grouping(2, "strided", 5)
    own = problem_of_group(given, grouping)
    path = tmp_path / "grouped.json"
    write_grouped_plan(path, GroupedPlan(grouping, plan_of(own), own), given)
    assert read_grouped_plan(path, given) == GroupedPlan(grouping, plan_of(own), own)
    for wrong in (given, own):
        with pytest.raises(ShardCoreError, match="schema 'shardcore/grouped-plan': it is of one"):
            files.read_plan(path, wrong)
    with pytest.raises(ShardCoreError, match="a grouped plan for problem 'whole' with digest"):
        read_grouped_plan(path, replace(given, global_batch=512))
    files.write_plan(tmp_path / "plan.json", plan_of(own), own)
    with pytest.raises(ShardCoreError, match="schema 'shardcore/plan'; expected 'shardcore/grouped-plan'"):
        read_grouped_plan(tmp_path / "plan.json", given)
    path.write_text(path.read_text().replace('"strided"', '"contiguous"'))
    with pytest.raises(ShardCoreError, match="it was edited"):
        read_grouped_plan(path, given)
