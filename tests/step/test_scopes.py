"""Groups of scopes by hand, and what their rows say of them. Everything else takes its groups from there."""

from dataclasses import replace

import pytest
from shapes import on_hosts

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import host_names
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io.measurements import CollectiveRequest
from shardcore.step.kinds import SHARDING_KINDS, Channel, pod_size, row_domain_choices, row_domain_of
from shardcore.step.lower import lower
from shardcore.step.scopes import SCOPES, WORLD, group_members, groups_among_hosts

UNEVEN = on_hosts("aab")


PODS = on_hosts(["p/a", "p/a", "p/b", "p/b", "q/c", "q/c", "q/d", "q/d"])
"""Two pods of two hosts of two devices."""


@pytest.mark.parametrize(
    "topology, groups",
    [
        (
            on_hosts("aaaa"),
            {"world": [(0, 1, 2, 3)], "host": [(0, 1, 2, 3)], "cross": [(0,), (1,), (2,), (3,)]},
        ),
        (on_hosts("xyxy"), {"world": [(0, 2, 1, 3)], "host": [(0, 2), (1, 3)], "cross": [(0, 1), (2, 3)]}),
        (UNEVEN, {"world": [(0, 1, 2)], "host": [], "cross": []}),
        (
            PODS,
            {
                "world": [tuple(range(8))],
                "host": [(0, 1), (2, 3), (4, 5), (6, 7)],
                "cross": [(0, 2, 4, 6), (1, 3, 5, 7)],
                "pod": [(0, 1, 2, 3), (4, 5, 6, 7)],
                "cross_pod": [(0, 4), (1, 5), (2, 6), (3, 7)],
            },
        ),
        # TorchRec's pods have consecutive ranks.
        (
            on_hosts(["p/a", "q/b", "p/c", "q/d"]),
            {"world": [(0, 2, 1, 3)], "pod": [(0, 2), (1, 3)], "cross_pod": [(0, 1), (2, 3)]},
        ),
    ],
)
def test_groups_by_hand(topology, groups):
    for name, expected in groups.items():
        assert group_members(name, topology).tolist() == list(map(list, expected))


@pytest.mark.parametrize("row", SCOPES.values(), ids=SCOPES)
def test_a_row_says_where_its_groups_lie(row):
    """On two pods: no device is twice in the groups, which are of one size. They cross the links that the row names."""
    groups = group_members(row.name, PODS)
    assert sorted(groups.flat) == list(range(8))
    assert all(
        PODS.outermost_link(PODS.domain_numbers[:, group]).level == row.outermost_level for group in groups
    )
    assert len(group_members(row.name, UNEVEN)) == (1 if row.name == WORLD else 0) or row.name.endswith("pod")


def test_measured_ranks_and_kinds_form_the_same_groups():
    two = on_hosts("aaaabbbb")
    for name in SCOPES:
        asked = CollectiveRequest((8,) * 8, 16, (0.0,) * 8, hosts=2, group=name).rank_groups
        assert (
            asked == groups_among_hosts(host_names(8, 2), name) == tuple(map(tuple, group_members(name, two)))
        )
    assert SHARDING_KINDS["host_row"].device_groups(two) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert SHARDING_KINDS["row"].device_groups(two) == (tuple(range(8)),)


def test_rows_are_divided_over_pods_or_over_hosts_never_both():
    """TorchRec runs table_row_wise over one of them, by TORCHREC_RESOLVED_POD_SIZE."""
    over = [PODS, *(replace(PODS, rows_over=domain) for domain in ("host", "pod"))]
    groups = {
        k: [len(x.device_groups(on)) for on in over] for k, x in SHARDING_KINDS.items() if x.divides_rows
    }
    # Hosts, if it is left open. A plan may have either then.
    assert groups == {"row": [1, 1, 1], "host_row": [4, 4, 0], "pod_row": [0, 0, 2]}
    assert [len(SHARDING_KINDS["pod_row"].possible_groups(on)) for on in over] == [2, 0, 2]
    assert [row_domain_choices(on) for on in over] == [("host", "pod"), ("host",), ("pod",)]
    assert row_domain_choices(on_hosts(["p/a", "p/b", "q/c", "q/d"])) == ("host", "pod")
    # One pod is all devices, and so is one host.
    assert not SHARDING_KINDS["pod_row"].possible_groups(on_hosts(["p/a", "p/b"]))
    assert not SHARDING_KINDS["pod_row"].possible_groups(on_hosts(["p/a", "p/a", "q/b", "q/b"]))
    # Hosts without a neighbour make no pods, and TorchRec needs pods of one size.
    for hosts in (["p/a", "p/a", "q/b", "q/b"], ["p/a", "p/a", "p/b", "p/b", "q/c", "q/c"]):
        on = on_hosts(hosts)
        assert SHARDING_KINDS["host_row"].device_groups(on) and not SHARDING_KINDS["pod_row"].possible_groups(
            on
        )
        assert row_domain_choices(on) == ("host",)


def test_a_plan_tells_over_which_domains_its_job_divides_rows():
    tables = tuple(Table(name, 64, 8, 1.0) for name in "ab")
    given = Problem("pods", tables, PODS, 8)
    (host, *_), (pod, *_) = (SHARDING_KINDS[kind].possible_groups(PODS) for kind in ("host_row", "pod_row"))
    over_hosts, over_pods = (
        tuple(Placement(kind, Shard.whole(t), group) for t in tables)
        for kind, group in (("host_row", host), ("pod_row", pod))
    )
    for placements, domain, size in ((over_hosts, "host", 1), (over_pods, "pod", 2), ((), "host", 1)):
        assert row_domain_of(PODS, placements) == domain and pod_size(PODS, placements) == size
    for placements in (over_hosts, over_pods):
        lower(Plan(placements), given)
    with pytest.raises(
        ShardCoreError, match="rows of 'a' over hosts and of 'b' over pods; .* over one of both"
    ):
        lower(Plan((over_hosts[0], over_pods[1])), given)
    decided = replace(given, topology=replace(PODS, rows_over="host"))
    with pytest.raises(
        ShardCoreError, match="by pod_row on .*; topology.rows_over is 'host': it needs to be 'pod'"
    ):
        lower(Plan(over_pods), decided)


def test_an_unknown_scope_is_named():
    for ask in (lambda: group_members("galaxy", UNEVEN), lambda: Channel("all_to_all", "galaxy").description):
        with pytest.raises(ShardCoreError, match="scope 'galaxy' is not known; known are world, host, cross"):
            ask()
