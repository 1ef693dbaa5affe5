"""Ranks that are near each other, found from the times of their pairs."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import Link
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.measure.rank_order import (
    MeasuredLinks,
    OutwardLinks,
    find_levels,
    measured_topology,
    order_ranks,
    reorder_problem,
)

LINKS = MeasuredLinks(5.0, (OutwardLinks(0.5),), 0.1)


def times(places, seed=0, noise=0.15, of=(1.0, 10.0, 40.0)):
    """[D, D] ms between ranks at places such as "1a" (rack 1, host a): on a host, in a rack, beyond."""
    rng, n = np.random.default_rng(seed), len(places)
    apart = np.array(
        [
            [sum(a != b for a, b in zip(x, y, strict=True)) if x[0] == y[0] else 2 for y in places]
            for x in places
        ]
    )
    ms = np.take(of, apart) * np.exp(noise * rng.normal(size=(n, n)))
    return ms * (1 - np.eye(n))


def groups(places, part):
    found = {}
    for rank, place in enumerate(places):
        found.setdefault(place[:part], []).append(rank)
    return tuple(map(tuple, found.values()))


@pytest.mark.parametrize("seed", range(20))
def test_hosts_and_racks_of_shuffled_ranks_are_found(seed):
    places = [place for place in ("1a", "1b", "2c", "2d", "2e") for _ in range(3)]
    shuffled = [places[i] for i in np.random.default_rng(seed).permutation(len(places))]
    assert find_levels(times(shuffled, seed)) == [groups(shuffled, 2), groups(shuffled, 1)]


def test_a_few_disturbed_pairs_change_nothing():
    places = list("abab" * 3)
    ms, rng = times(places, of=(1.0, 10.0, 10.0)), np.random.default_rng(1)
    for _ in range(6):
        i, j = rng.choice(12, 2, replace=False)
        ms[i, j] = ms[j, i] = 30 * ms[i, j]
    assert find_levels(ms) == [groups(places, 1)]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_links_make_no_groups(n):
    assert find_levels(times(["a"] * n)) == []
    assert find_levels(times([str(i) for i in range(n)])) == []


def test_one_slow_pair_makes_no_group():
    ms = times(["a"] * 4, noise=0.05)
    ms[0, 1] = ms[1, 0] = 9.0
    assert find_levels(ms) == []


def test_a_disturbed_pair_makes_no_level_below_slow_links():
    ms = times(list("abba"), noise=0.05, of=(1.0, 30.0, 30.0))
    ms[1, 2] = ms[2, 1] = 2.5
    assert find_levels(ms) == [((0, 3), (1, 2))]


def test_a_host_may_have_one_rank():
    assert find_levels(times(list("aab"))) == [((0, 1), (2,))]


@pytest.mark.parametrize(
    "ms, says",
    [
        (np.ones((2, 3)), r"shape \[2, 3\]; they need one of each rank to each"),
        (np.ones((1, 1)), "of 2 or more"),
        (np.zeros((3, 3)), "finite and above 0"),
        (np.full((3, 3), np.nan), "finite and above 0"),
    ],
)
def test_times_that_are_none_are_refused(ms, says):
    with pytest.raises(ShardCoreError, match=says):
        find_levels(ms)


def test_the_order_keeps_hosts_and_racks_together():
    places = ["1a", "2c", "1b", "2d", "1a", "1b", "2c", "2d"]
    found = find_levels(times(places))
    arranged = order_ranks(found, 8)
    assert sorted(arranged) == list(range(8)) and arranged[0] == 0
    assert [places[r] for r in arranged] == ["1a", "1a", "1b", "1b", "2c", "2c", "2d", "2d"]
    assert order_ranks([], 3) == (0, 1, 2)


def test_devices_move_with_their_ranks_and_links_are_those_found():
    places = ["a", "b", "a", "b"]
    before = Topology(tuple(Device((rank + 1) << 30, 1.0 + rank) for rank in range(4)), "cpu")
    found = measured_topology(find_levels(times(places)), LINKS, before)
    assert [d.host for d in found.devices] == ["host-0", "host-0", "host-1", "host-1"]
    assert [d.memory_bytes >> 30 for d in found.devices] == [1, 3, 2, 4]
    assert [d.speed for d in found.devices] == [1.0, 3.0, 2.0, 4.0]
    assert found.links == (
        Link("within_host", 5.0, latency_ms=0.1),
        Link("between_hosts", 0.5, latency_ms=0.1),
    )
    assert found.hardware == "cpu"
    shared = measured_topology(
        find_levels(times(places)), replace(LINKS, outward=(OutwardLinks(0.5, 0.9),)), before
    )
    assert shared.link("between_hosts") == Link("between_hosts", 0.9, shared=True, latency_ms=0.1)
    alone = measured_topology([], MeasuredLinks(5.0, (), 0.1), before)
    assert len(alone.hosts) == 1 and alone.links == (Link("within_host", 5.0, latency_ms=0.1),)
    with pytest.raises(ShardCoreError, match="4 devices and the gang 2 ranks"):
        measured_topology([((0,), (1,))], LINKS, before)


def test_groups_of_a_second_level_are_pods():
    places = ["1a", "2c", "1b", "2d", "1a", "1b", "2c", "2d"]
    found = find_levels(times(places))
    links = MeasuredLinks(5.0, (OutwardLinks(0.5, 0.9), OutwardLinks(0.6)), 0.1)
    topology = measured_topology(found, links, Topology((Device(1 << 30),) * 8, "cpu"))
    assert topology.hosts == ("pod-0/host-0", "pod-0/host-1", "pod-1/host-2", "pod-1/host-3")
    assert topology.devices_by_domain("within_pod") == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Timed links of a rank that grow outward count as equally fast.
    assert topology.links == (
        Link("within_host", 5.0, latency_ms=0.1),
        Link("within_pod", 0.9, shared=True, latency_ms=0.1),
        Link("between_hosts", 0.5, latency_ms=0.1),
    )


def test_pins_stay_with_their_devices():
    """Ranks 0 and 2, and 1 and 3 are near each other: devices 1 and 2 change places."""
    where = Topology(tuple(Device(1 << 30, host=host) for host in "xxyy"), "cpu")
    tables = tuple(Table(name, 100, 8, 1.0) for name in ("on 1", "on y", "anywhere", "with on 1"))
    asked = Constraints(
        pinned=(("on 1", (1,)), ("on y", ("y",)), ("anywhere", (0, 1, 2, 3))),
        together=(("on 1", "with on 1"),),
    )
    before = Problem("p", tables, where, 64, constraints=asked)
    found = reorder_problem(find_levels(times(["a", "b", "a", "b"])), LINKS, before)
    assert found.pinned_devices == {"on 1": (2,), "with on 1": (2,), "on y": (1, 3)}
    assert before.pinned_devices == {"on 1": (1,), "with on 1": (1,), "on y": (2, 3)}
    assert found.topology.hosts == ("host-0", "host-1") and found.tables == tables
