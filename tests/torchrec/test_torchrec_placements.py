"""TorchRec's plans as ours."""

import pytest
from shapes import column, host_row, on_hosts, replica, row

from shardcore.core.errors import ShardCoreError
from shardcore.core.extras import TORCHREC
from shardcore.core.types import Table
from shardcore.torchrec import baseline as peer
from shardcore.torchrec.placements import placements_from_torchrec

WIDE = Table("a.wide", 1000, 64, 40.0)
installed = pytest.mark.skipif(
    bool(peer.missing_torchrec_message()), reason=f"TorchRec is not installed: {TORCHREC}"
)


def sharding(kind: str, *parts):
    """TorchRec's ParameterSharding: parts are (row, column, rows, columns, rank); None for no
    sharding_spec."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
    from torchrec.distributed.types import ParameterSharding

    spec = (
        EnumerableShardingSpec(
            [
                ShardMetadata([r, c], [rows, columns], f"rank:{rank}/cuda:{rank % 2}")
                for r, c, rows, columns, rank in parts
            ]
        )
        if parts
        else None
    )
    return ParameterSharding(kind, "fused", None, spec)


HOSTS, ONE_HOST = on_hosts("xyxy"), on_hosts("aaa")
"""HOSTS: ranks are devices 0, 2, 1, 3."""


@installed
@pytest.mark.parametrize(
    "on, theirs, ours",
    [
        (HOSTS, lambda: sharding("table_wise", (0, 0, 1000, 64, 1)), [column(WIDE, 2)]),
        (
            HOSTS,
            lambda: sharding("column_wise", (0, 0, 1000, 24, 1), (0, 24, 1000, 40, 0)),
            [column(WIDE, 2, 0, 24), column(WIDE, 0, 24, 64)],
        ),
        (
            HOSTS,
            lambda: sharding("table_column_wise", (0, 0, 1000, 24, 2), (0, 24, 1000, 40, 3)),
            [column(WIDE, 1, 0, 24), column(WIDE, 3, 24, 64)],
        ),
        (
            ONE_HOST,
            lambda: sharding("row_wise", (0, 0, 334, 64, 0), (334, 0, 334, 64, 1), (668, 0, 332, 64, 2)),
            [row(WIDE, ONE_HOST)],
        ),
        (
            HOSTS,
            lambda: sharding("row_wise", *((250 * i, 0, 250, 64, i) for i in range(4))),
            [row(WIDE, HOSTS)],
        ),
        (
            HOSTS,
            lambda: sharding("table_row_wise", (0, 0, 500, 64, 2), (500, 0, 500, 64, 3)),
            [host_row(WIDE, (1, 3))],
        ),
        (
            HOSTS,
            lambda: sharding(
                "grid_shard",
                (0, 0, 500, 32, 0),
                (500, 0, 500, 32, 1),
                (0, 32, 500, 32, 2),
                (500, 32, 500, 32, 3),
            ),
            [host_row(WIDE, (0, 2), 0, 32), host_row(WIDE, (1, 3), 32, 64)],
        ),
        (
            ONE_HOST,
            lambda: sharding(
                "table_row_wise", (0, 0, 334, 64, 0), (334, 0, 334, 64, 1), (668, 0, 332, 64, 2)
            ),
            [row(WIDE, ONE_HOST)],
        ),  # the only host
        (HOSTS, lambda: sharding("data_parallel"), [replica(WIDE, HOSTS)]),
        (on_hosts("a"), lambda: sharding("data_parallel"), [column(WIDE, 0)]),
        (on_hosts("a"), lambda: sharding("row_wise", (0, 0, 1000, 64, 0)), [column(WIDE, 0)]),
    ],
)
def test_a_plan_of_theirs_becomes_ours(on, theirs, ours):
    assert placements_from_torchrec({"t": theirs()}, {"t": WIDE}, on) == ours


@installed
@pytest.mark.parametrize(
    "on, theirs",
    [
        (
            ONE_HOST,
            lambda: sharding("row_wise", (0, 0, 600, 64, 0), (600, 0, 400, 64, 1), (1000, 0, 0, 64, 2)),
        ),
        (
            ONE_HOST,
            lambda: sharding("row_wise", (0, 0, 400, 64, 0), (400, 0, 300, 64, 1), (700, 0, 300, 64, 2)),
        ),
        (
            ONE_HOST,
            lambda: sharding("row_wise", (334, 0, 334, 64, 0), (0, 0, 334, 64, 1), (668, 0, 332, 64, 2)),
        ),
        (HOSTS, lambda: sharding("table_row_wise", (0, 0, 400, 64, 2), (400, 0, 600, 64, 3))),
        (HOSTS, lambda: sharding("table_wise", (0, 0, 500, 64, 2))),
    ],
)
def test_rows_that_torchrec_does_not_divide_so_are_refused(on, theirs):
    with pytest.raises(
        ShardCoreError,
        match="the plan has rows .* of table 't' on ranks; TorchRec runs .* with even ranges only",
    ):
        placements_from_torchrec({"t": theirs()}, {"t": WIDE}, on)


@installed
def test_a_sharding_type_that_is_no_kinds_is_refused():
    with pytest.raises(
        ShardCoreError, match="the plan shards table 't' row_column_wise; known are table_wise, column_wise"
    ):
        placements_from_torchrec({"t": sharding("row_column_wise", (0, 0, 1000, 64, 0))}, {"t": WIDE}, HOSTS)


@installed
@pytest.mark.parametrize(
    "theirs, words",
    [
        (lambda: {"x": sharding("table_wise", (0, 0, 1000, 64, 0))}, "tables.*'x'.*'t'"),
        (lambda: {}, "'t'"),
        (lambda: {"t": sharding("table_wise", (0, 0, 1000, 64, 3))}, "table 't' on rank 3; there are ranks"),
        (lambda: {"t": sharding("row_wise")}, "'t' row_wise without a sharding_spec"),
        (lambda: {"t": sharding("table_wise", (0, 0, 1001, 64, 0))}, r"rows \[\(0, 1001\)\] of table 't'"),
    ],
)
def test_a_plan_that_does_not_fit_the_tables_is_refused(theirs, words):
    with pytest.raises(ShardCoreError, match=words):
        placements_from_torchrec(theirs(), {"t": WIDE}, on_hosts("aaa"))
