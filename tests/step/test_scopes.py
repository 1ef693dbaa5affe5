"""Groups of scopes by hand, and what their rows say of them. Everything else takes its groups from there."""

import pytest
from shapes import on_hosts

from shardcore.core.errors import ShardCoreError
from shardcore.io.measurements import CollectiveRequest
from shardcore.step.kinds import LAYOUTS, Channel
from shardcore.step.scopes import SCOPES, WORLD, even_hosts, groups_of

UNEVEN = on_hosts("aab")


@pytest.mark.parametrize(
    "hosts, groups",
    [
        ("aaaa", {"world": [(0, 1, 2, 3)], "host": [(0, 1, 2, 3)], "cross": [(0,), (1,), (2,), (3,)]}),
        ("xyxy", {"world": [(0, 2, 1, 3)], "host": [(0, 2), (1, 3)], "cross": [(0, 1), (2, 3)]}),
        ("aab", {"world": [(0, 1, 2)], "host": [], "cross": []}),
    ],
)
def test_groups_by_hand(hosts, groups):
    topology = on_hosts(hosts)
    for name, expected in groups.items():
        assert list(SCOPES[name].groups(topology.on_hosts)) == expected
        assert groups_of(name, topology).tolist() == list(map(list, expected))


@pytest.mark.parametrize("row", SCOPES.values(), ids=SCOPES)
def test_a_row_says_where_its_groups_lie(row):
    """On two hosts of four: no device is twice in the groups, which are of one size."""
    topology = on_hosts("abababab")
    groups = row.groups(topology.on_hosts)
    hosts = [[topology.devices[d].host for d in group] for group in groups]
    assert sorted(d for group in groups for d in group) == list(range(8)) and len(set(map(len, groups))) == 1
    assert row.within == (row.name != WORLD and all(len(set(of)) == 1 for of in hosts))
    assert row.across == all(sorted(of) == ["a", "b"] for of in hosts)
    assert not row.groups(UNEVEN.on_hosts) or row.name == WORLD


def test_measured_ranks_and_kinds_form_the_same_groups():
    topology = on_hosts("aaaabbbb")
    for name, row in SCOPES.items():
        asked = CollectiveRequest((8,) * 8, 16, (0.0,) * 8, hosts=2, group=name).groups
        assert asked == row.groups(topology.on_hosts) == row.groups(even_hosts(8, 2))
    assert LAYOUTS["host_row"].groups(topology) == SCOPES["host"].groups(topology.on_hosts)
    assert LAYOUTS["row"].groups(topology) == SCOPES["world"].groups(topology.on_hosts)


def test_an_unknown_scope_is_named():
    for ask in (lambda: groups_of("galaxy", UNEVEN), lambda: Channel("all_to_all", "galaxy").words):
        with pytest.raises(ShardCoreError, match="scope 'galaxy' is not known; known are world, host, cross"):
            ask()
