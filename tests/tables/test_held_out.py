import dataclasses

from shardcore.tables.held_out import is_held_out


def test_a_twentieth_of_tables_is_held_out_by_name(tables):
    named = [dataclasses.replace(tables[0], name=f"t{i}") for i in range(2000)]
    kept = [t for t in named if is_held_out(t)]
    assert 60 <= len(kept) <= 140
    half = [t for t in named if is_held_out(t, one_of=2)]
    assert 900 <= len(half) <= 1100 and set(kept) <= set(half)
    assert all(is_held_out(dataclasses.replace(t, dim=64, rows=5)) for t in kept)
