"""Each row of the table of kinds by hand, and every refusal of a placement."""

from collections import Counter

import pytest
from shapes import (
    ACROSS,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    TO_TOWER,
    WITHIN,
    column,
    host_row,
    on_hosts,
    replica,
    row,
)

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.step import kinds
from shardcore.step.kinds import (
    SHARDING_KINDS,
    device_names,
    possible_groups,
    require_valid_placement,
    sharding_kind_by_name,
    shards_by_device,
)

TABLE, SMALL = Table("t", 10, 16, 2.0), Table("s", 3, 8, 1.0)
ONE_HOST, TWO, MIXED = on_hosts("aaaa"), on_hosts("aabb"), on_hosts("xyxy")
B, W = 48, 16
PROBLEM = Problem("p", (TABLE, SMALL), TWO, B)
UNEQUAL = "it needs several hosts with the same number of devices each"
HOSTS = "such a shard lives on devices 0, 1 or devices 2, 3, in this order"


def on(topology) -> Problem:
    return Problem("p", (TABLE, SMALL), topology, B)


@pytest.mark.parametrize(
    "kind, one_host, two_hosts, mixed, unequal",
    [
        (
            "column",
            [(0,), (1,), (2,), (3,)],
            [(0,), (1,), (2,), (3,)],
            [(0,), (1,), (2,), (3,)],
            [(0,), (1,), (2,)],
        ),
        ("row", [(0, 1, 2, 3)], [(0, 1, 2, 3)], [(0, 2, 1, 3)], [(0, 1, 2)]),
        ("host_row", [], [(0, 1), (2, 3)], [(0, 2), (1, 3)], []),
        ("pod_row", [], [], [], []),
        ("data_parallel", [(0, 1, 2, 3)], [(0, 1, 2, 3)], [(0, 2, 1, 3)], [(0, 1, 2)]),
    ],
)
def test_which_devices_share_a_shard(kind, one_host, two_hosts, mixed, unequal):
    found = [list(SHARDING_KINDS[kind].device_groups(t)) for t in (ONE_HOST, TWO, MIXED, on_hosts("aab"))]
    assert found == [one_host, two_hosts, mixed, unequal]


@pytest.mark.parametrize(
    "kind, channels",
    [
        ("column", {ALL_TO_ALL: B * W * 4}),
        ("row", {REDUCE_SCATTER: B * W * 4}),
        (
            "host_row",
            {WITHIN: B * W * 4, ACROSS: B // 2 * W * 4},
        ),  # two devices a host: each has half of the batch then
        ("data_parallel", {ALL_REDUCE: 5 * W * 4}),
    ],
)
def test_what_a_device_with_5_rows_enters_into_each_channel(kind, channels):
    found = {
        c: entering(5 * W * 4, B * W * 4, PROBLEM) for c, entering in SHARDING_KINDS[kind].channels.items()
    }
    assert found == channels


def test_what_is_left_to_cross_hosts_follows_from_their_size():
    across = SHARDING_KINDS["host_row"].channels[ACROSS]
    assert [across(5 * W * 4, B * W * 4, on(on_hosts(hosts))) for hosts in ("ab", "aabb", "aaaabbbb")] == [
        B * W * 4 / n for n in (1, 2, 4)
    ]


def test_what_is_left_to_cross_pods_follows_from_their_size():
    within, across = SHARDING_KINDS["pod_row"].channels.values()
    pods = on(on_hosts(["p/a", "p/b", "q/c", "q/d"]))
    assert (within(0, B * W * 4, pods), across(0, B * W * 4, pods)) == (B * W * 4, B // 2 * W * 4)


def test_what_each_kind_runs_over_and_keeps():
    assert {k: sharding_kind.op_batch(PROBLEM) for k, sharding_kind in SHARDING_KINDS.items()} == {
        "column": B,
        "row": B,
        "host_row": B,
        "pod_row": B,
        "data_parallel": B // 4,
    }
    assert {k for k, x in SHARDING_KINDS.items() if x.dense_gradient} == {"data_parallel"}
    assert {k for k, x in SHARDING_KINDS.items() if x.divides_rows} == {"row", "host_row", "pod_row"}
    assert {k for k, x in SHARDING_KINDS.items() if x.cuts_columns} == {"column", "host_row", "pod_row"}
    assert kinds.WHOLE_ROWS is SHARDING_KINDS["column"]
    names = {name for x in SHARDING_KINDS.values() for name in x.torchrec}
    assert sorted(names) == [
        "column_wise",
        "data_parallel",
        "grid_shard",
        "row_wise",
        "table_column_wise",
        "table_row_wise",
        "table_wise",
    ]
    assert [x.torchrec[0] for x in SHARDING_KINDS.values()] == [
        "table_wise",
        "row_wise",
        "table_row_wise",
        "table_row_wise",
        "data_parallel",
    ]


def test_sequences_run_by_themselves_and_never_by_sums():
    assert {
        name: x.sequence_kind and set(x.sequence_kind.channels) for name, x in SHARDING_KINDS.items()
    } == {
        "column": {ALL_TO_ALL},
        "row": {ALL_TO_ALL},
        "host_row": None,
        "pod_row": None,
        "data_parallel": {ALL_REDUCE},
    }
    assert kinds.RUNS == (
        *SHARDING_KINDS.values(),
        *(x.sequence_kind for x in SHARDING_KINDS.values() if x.sequence_kind),
    )
    sequence = Table("s", 100, 16, 2.0, sequence=True)
    assert kinds.sharding_kind_for_table("row", sequence) is SHARDING_KINDS["row"].sequence_kind
    with pytest.raises(ShardCoreError, match="'s' by host_row, which TorchRec does not run for a sequence"):
        kinds.sharding_kind_for_table("host_row", sequence)


def test_channels_are_all_that_kinds_have_in_one_order():
    assert kinds.CHANNELS == (
        TO_TOWER,
        kinds.Channel("all_to_all", "pod"),
        ALL_TO_ALL,
        REDUCE_SCATTER,
        WITHIN,
        ACROSS,
        kinds.Channel("reduce_scatter", "pod"),
        kinds.Channel("all_to_all", "cross_pod"),
        ALL_REDUCE,
        kinds.IDS,
        kinds.BUCKETIZED_IDS,
    )
    assert [c.description for c in kinds.CHANNELS] == [
        "all-to-all within a host",
        "all-to-all within a pod",
        "all-to-all",
        "reduce-scatter",
        "reduce-scatter within a host",
        "all-to-all across hosts",
        "reduce-scatter within a pod",
        "all-to-all across pods",
        "all-reduce",
        "all-to-all of ids",
        "all-to-all of ids, bucketized",
    ]


def test_the_kinds_of_a_channel_in_words():
    assert [kinds.kinds_of_channel(c) for c in kinds.CHANNELS] == [
        "column",
        "column",
        "column",
        "row",
        "host_row",
        "host_row",
        "pod_row",
        "pod_row",
        "data_parallel",
        "column",
        "row and host_row and pod_row",
    ]
    assert kinds.kinds_of_channel(ACROSS, towers=True) == "column and host_row"


def test_kinds_that_are_always_on_all_devices():
    everywhere = (SHARDING_KINDS["row"], SHARDING_KINDS["data_parallel"])
    for topology in (ONE_HOST, MIXED, on_hosts("aab")):
        assert kinds.kinds_on_all_devices(topology) == everywhere
    assert kinds.kinds_on_all_devices(on_hosts("a")) == ()  # there, every plan is


@pytest.mark.parametrize(
    "placement",
    [
        column(TABLE, 3),
        column(TABLE, 0, 4, 12),
        row(TABLE, MIXED),
        host_row(TABLE, (1, 3)),
        host_row(TABLE, (0, 2), 8, 16),
        replica(TABLE, MIXED),
        replica(SMALL, MIXED),
    ],
    ids=lambda p: p.kind,
)
def test_shards_cover_each_cell_as_often_as_the_kind_says(placement):
    require_valid_placement(placement, on(MIXED))
    found = list(shards_by_device(placement))
    assert [device for device, _ in found] == list(placement.devices)
    cells = Counter(
        (r, c) for _, s in found for r in range(s.row_lo, s.row_hi) for c in range(s.col_lo, s.col_hi)
    )
    times = 4 if placement.kind == "data_parallel" else 1
    shard = placement.shard
    assert cells == {(r, c): times for r in range(shard.rows) for c in range(shard.col_lo, shard.col_hi)}


def test_row_ranges_are_dealt_out_in_the_order_of_ranks():
    """TorchRec sends id i to rank i // ceil(10 / 4), and ranks are host by host."""
    assert [(d, s.row_lo, s.row_hi) for d, s in shards_by_device(row(TABLE, MIXED))] == [
        (0, 0, 3),
        (2, 3, 6),
        (1, 6, 9),
        (3, 9, 10),
    ]
    assert [(d, s.row_lo, s.row_hi) for d, s in shards_by_device(host_row(TABLE, (1, 3), 4, 8))] == [
        (1, 0, 5),
        (3, 5, 10),
    ]


@pytest.mark.parametrize(
    "rows, n, expected",
    [
        (10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (9, 4, None),
        (3, 4, None),
        (6, 4, None),
        (7, 4, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_rows_in_even_ranges(rows, n, expected):
    """None: the last would have none, as 9 rows in ranges of ceil(9 / 4) = 3."""
    assert kinds.even_row_ranges(rows, n) == expected
    assert kinds.even_row_share(rows, n) == (expected and expected[0][1])


@pytest.mark.parametrize(
    "placement, topology, said",
    [
        (Placement("twin", Shard.whole(TABLE), (0,)), TWO, "a placement or constraint has kind 'twin'"),
        (column(TABLE, 4), TWO, r"plan places t\[0:10, 0:16\] on device 4; problem 'p' has devices 0 to 3"),
        (Placement("row", Shard.whole(TABLE), (0, 1, 2, 4)), TWO, "on device 4; problem 'p' has devices 0"),
        (Placement("column", Shard.whole(TABLE), (0, 1)), TWO, "by column on devices 0, 1; such a shard"),
        (Placement("column", Shard(TABLE, 0, 5, 0, 16), (0,)), TWO, "by column on device 0; it needs all"),
        (Placement("row", Shard.whole(TABLE), (0, 1, 2)), TWO, "by row on devices 0, 1, 2; .* lives on"),
        (Placement("row", Shard.whole(TABLE), (0, 1, 2, 3)), MIXED, "lives on devices 0, 2, 1, 3, in this"),
        (Placement("row", Shard(TABLE, 0, 10, 0, 8), (0, 1, 2, 3)), TWO, "by row .*; it needs all rows and"),
        (Placement("row", Shard(TABLE, 0, 9, 0, 16), (0, 1, 2, 3)), TWO, "by row .*; it needs all rows and"),
        (row(SMALL, TWO), TWO, "by row .*; 3 rows in even ranges would leave the last of 4 devices none"),
        (host_row(TABLE, (0, 1)), ONE_HOST, "by host_row on devices 0, 1; " + UNEQUAL),
        (host_row(TABLE, (0, 1)), on_hosts("aab"), "by host_row .*; " + UNEQUAL),
        (host_row(TABLE, (0, 2)), TWO, "by host_row on devices 0, 2; " + HOSTS),
        (host_row(TABLE, (1, 0)), TWO, HOSTS),
        (Placement("host_row", Shard(TABLE, 0, 5, 0, 16), (0, 1)), TWO, "by host_row .*; it needs all rows"),
        (host_row(Table("t", 1, 16, 1.0), (2, 3)), TWO, "by host_row .*; 1 rows in even ranges would leave"),
        (Placement("data_parallel", Shard.whole(TABLE), (0, 1)), TWO, "by data_parallel on devices 0, 1; "),
        (
            Placement("data_parallel", Shard(TABLE, 0, 10, 0, 8), (0, 1, 2, 3)),
            TWO,
            "it needs all rows and all columns of the table",
        ),
    ],
)
def test_a_placement_that_is_not_as_its_kind_is_refused(placement, topology, said):
    with pytest.raises(ShardCoreError, match=said):
        require_valid_placement(placement, on(topology))


def test_columns_of_a_host_row_may_be_on_several_hosts():
    for placement in (host_row(TABLE, (0, 1), 0, 4), host_row(TABLE, (2, 3), 4, 16)):
        require_valid_placement(placement, PROBLEM)


def test_groups_that_a_table_can_be_on():
    def found(kind, rows, topology, allowed=None):
        return possible_groups(sharding_kind_by_name(kind), rows, topology, allowed)

    assert found("host_row", 10, TWO) == [(0, 1), (2, 3)] and found("host_row", 1, TWO) == []
    assert found("host_row", 10, TWO, (1, 2, 3)) == [(2, 3)] and found("row", 10, TWO, (0, 1, 2)) == []
    assert found("row", 10, MIXED, (0, 1, 2, 3)) == [(0, 2, 1, 3)] and found("row", 9, TWO) == []
    assert found("column", 1, TWO, (2,)) == [(2,)] and found("data_parallel", 1, TWO) == [(0, 1, 2, 3)]


def test_devices_for_people():
    assert device_names([3]) == "device 3" and device_names(range(2)) == "devices 0, 1"
    assert device_names(range(8)) == "devices 0, 1, 2, 3, 4, 5, 6, 7" and device_names(range(10)).endswith(
        "6, 7 and 2 more"
    )
