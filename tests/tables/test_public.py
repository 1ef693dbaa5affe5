import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.tables.public import DEFAULT_ACCESS, public_pool, public_pool_sources


@pytest.mark.parametrize(
    "name, tables, gib",
    [
        ("mlperf-dlrm-dcnv2", 26, 97),
        ("hugectr-180", 177, None),
        ("hugectr-7", 7, 1662),
        ("merlin-tiny", 55, 4.2),
        ("merlin-small", 107, 26.3),
        ("merlin-medium", 311, 206.2),
        ("merlin-large", 612, 773.8),
    ],
)
def test_public_lists(name, tables, gib):
    pool = public_pool(name)
    assert len(pool) == tables and len({t.name for t in pool}) == tables
    assert pool[0].access == (Zipf(1.1) if name.startswith("hugectr") else DEFAULT_ACCESS)
    assert gib is None or sum(t.bytes for t in pool) / 2**30 == pytest.approx(gib, abs=1)


def test_every_public_list_can_be_read():
    assert all(public_pool(name) for name in public_pool_sources())
    assert [t.name for t in public_pool("criteo-kaggle")][:2] == ["c00", "c01"]


def test_dlrmv3_has_one_table_of_a_terabyte_and_sequences():
    item, category, user = public_pool("mlperf-dlrmv3", zipf_alpha=1.2)
    assert (item.name, item.bytes, item.features, item.access) == ("item_id", 1_024 * 10**9, 2, Zipf(1.2))
    assert item.sequence and category.sequence and user.sequence
    assert public_pool("mlperf-dlrmv3")[0].access == Zipf(0.0)


def test_unknown_list_names_the_known():
    with pytest.raises(ShardCoreError, match="'criteo'; known are mlperf-dlrm-dcnv2, mlperf-dlrmv3"):
        public_pool("criteo")
