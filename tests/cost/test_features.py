"""Features follow from what a shard makes an op do."""

import dataclasses

import numpy as np
import pytest

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.types import Shard, Table
from shardcore.cost.features import CONDITIONS, DRIVERS, WIDTH_CLASSES, shard_features
from shardcore.step import access

TABLE = Table("t", 10_000, 64, 5.0, Zipf(0.9))


def drivers(shard: Shard, batch: int = 256) -> dict[str, float]:
    return dict(zip(DRIVERS, shard_features([shard], batch)[0][0], strict=True))


@pytest.mark.parametrize(
    "width, classes",
    [
        (4, []),
        (32, []),
        (36, [32]),
        (64, [32]),
        (128, [32, 64]),
        (256, [32, 64, 128]),
        (260, [32, 64, 128, 256]),
    ],
)
def test_sums_tell_the_class_of_the_widest_shard(width, classes):
    found = drivers(Shard.whole(dataclasses.replace(TABLE, dim=width)))
    assert [w for w in WIDTH_CLASSES if found[f"wider_than_{w}"]] == classes


def test_a_deduplicated_table_is_one_of_fewer_samples_that_touch_as_many_rows():
    wide = Table("t", 10**6, 64, 8.0, Zipf(0.0))
    found = drivers(Shard.whole(dataclasses.replace(wide, dedup=4.0)), 1024)
    fewer, all_of = drivers(Shard.whole(wide), 256), drivers(Shard.whole(wide), 1024)
    touched = {name: all_of[name] for name in ("unique_rows", "unique_cells")}
    assert found == pytest.approx({**fewer, **touched})


def test_a_sequence_has_drivers_of_its_own():
    """It writes a row for each lookup, and updates distinct rows by another kernel."""
    pooled, sequence = (drivers(Shard.whole(dataclasses.replace(TABLE, sequence=x))) for x in (False, True))
    assert not pooled["unpooled_cells"] and not pooled["unpooled_unique_rows"]
    assert sequence["unpooled_cells"] == sequence["output_cells"] == sequence["lookup_cells"] == 256 * 5 * 64
    assert sequence["unpooled_unique_rows"] == sequence["unique_rows"] == pooled["unique_rows"] > 0


def test_by_hand():
    uniform = Table("u", 10**6, 8, 2.0, Zipf(0.0))
    found = drivers(Shard.whole(uniform), 100)
    assert found.pop("unique_rows") == pytest.approx(200, rel=1e-3)
    assert found.pop("unique_cells") == pytest.approx(1600, rel=1e-3)
    assert not any(found.pop(name) for name in DRIVERS if name.startswith(("wider_than", "unpooled")))
    assert found == {"shards": 1, "bags": 100, "output_cells": 800, "lookups": 200, "lookup_cells": 1600}
    conditions = dict(zip(CONDITIONS, shard_features([Shard.whole(uniform)], 100)[1][0], strict=True))
    assert {name: np.exp(x) for name, x in conditions.items()} == pytest.approx(
        {
            "width": 8,
            "lines": 2,  # 32 bytes in a line of 64
            "pooling": 2.1,
            "unique_share": 1,
            "unique_rows": 201,
            "unique_bytes": 6401,
            "rows": 10**6,
            "bytes": 32e6,
            "batch": 100,
        },
        rel=1e-3,
    )
    few = drivers(Shard.whole(Table("f", 100, 8, 2.0, Zipf(0.0))), 100)  # 200 lookups of 100 rows
    assert few["unique_rows"] == pytest.approx(100 * (1 - np.exp(-2)), rel=0.02)
    assert few["unique_cells"] == 8 * few["unique_rows"] and few["lookup_cells"] == 1600
    wide = Shard(
        Table("w", 1000, 24, 2.0, Zipf(0.0), precision="fp16"), 0, 500, 0, 12
    )  # 24 bytes of 64; half of the lookups
    conditions = dict(zip(CONDITIONS, shard_features([wide], 100)[1][0], strict=True))
    assert np.exp(conditions["lines"]) == pytest.approx(64 / 24) and np.exp(
        conditions["pooling"]
    ) == pytest.approx(1.1)
    assert np.exp(conditions["rows"]) == pytest.approx(500) and np.exp(conditions["bytes"]) == pytest.approx(
        500 * 24
    )


def test_the_rows_that_a_table_touches_are_computed_once(monkeypatch):
    asked = []

    def counted(of, compute=access._unique_rows_by_power_law):
        asked.extend(of)
        return compute(of)

    monkeypatch.setattr(access, "_unique_rows_by_power_law", counted)
    shards = [Shard.whole(TABLE), Shard(TABLE, 0, TABLE.rows, 0, 32), Shard(TABLE, 0, 100, 0, 64)]
    again = [shard_features(shards, 77), shard_features(shards[::-1], 77)]
    assert len(asked) == 1
    np.testing.assert_array_equal(again[0][0], again[1][0][::-1])


def test_column_halves_share_the_cells_and_repeat_the_lookups():
    whole, half = drivers(Shard.whole(TABLE)), drivers(Shard(TABLE, 0, TABLE.rows, 0, 32))
    assert half["lookup_cells"] == whole["lookup_cells"] / 2
    assert half["unique_cells"] == whole["unique_cells"] / 2
    assert half["lookups"] == whole["lookups"]


def test_row_halves_share_the_lookups():
    whole = drivers(Shard.whole(TABLE))
    halves = [drivers(Shard(TABLE, lo, lo + 5000, 0, 64)) for lo in (0, 5000)]
    for name in ("lookups", "lookup_cells", "unique_rows", "unique_cells"):
        assert sum(h[name] for h in halves) == pytest.approx(whole[name])


def test_a_table_that_is_never_accessed_has_finite_features():
    empty = Table("empty", 500, 16, 0.0, Reuse((0.0,) * 17, 256))
    found, conditions = shard_features([Shard.whole(empty)], 256)
    assert found[0, DRIVERS.index("lookups")] == found[0, DRIVERS.index("unique_rows")] == 0
    assert np.isfinite(conditions).all()


def test_each_feature_of_a_table_has_bags_and_outputs_of_its_own():
    one = Table("t", 10**6, 8, 6.0, Zipf(0.0))
    several = dataclasses.replace(one, features=3)
    alone, three = drivers(Shard.whole(one), 100), drivers(Shard.whole(several), 100)
    assert three == {**alone, "bags": 300, "output_cells": 2400}
    pooling = CONDITIONS.index("pooling")
    assert np.exp(shard_features([Shard.whole(several)], 100)[1][0][pooling]) == pytest.approx(2.1)


def test_no_shards():
    assert [x.shape for x in shard_features([], 256)] == [(0, len(DRIVERS)), (0, len(CONDITIONS))]
