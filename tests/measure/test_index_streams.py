"""Streams of ids that are kept: those last used, within a number of bytes."""

import dataclasses
import time

import pytest
import torch

from shardcore.core.types import Shard, Table
from shardcore.io.measurements import ComputeRequest
from shardcore.measure.index_streams import IndexStreams
from shardcore.tables import streams

TABLES = [Table(f"t{i}", 1000, 8, 4.0) for i in range(4)]
EACH = sum(part.nbytes for part in streams.draw_lookups(TABLES[0], 64, 0))


def asked(*tables):
    return ComputeRequest(tuple(Shard.whole(t) for t in tables), 64)


def test_a_stream_is_drawn_once_for_all_dims_of_its_table():
    kept = IndexStreams("cpu", 1 << 30)
    first = kept.lookup_stream(asked(TABLES[0]), 0)
    again = kept.lookup_stream(asked(dataclasses.replace(TABLES[0], dim=16)), 0)
    assert kept.drawn == 1 and all(map(torch.equal, first, again))
    kept.lookup_stream(asked(TABLES[0]), 1)
    assert kept.drawn == 2


@pytest.mark.parametrize("order, drawn", [((0, 1, 0, 1), 2), ((0, 1, 2, 0), 4), ((0, 1, 0, 2, 0), 3)])
def test_the_last_used_are_kept(order, drawn):
    kept = IndexStreams("cpu", 2 * EACH + EACH // 2)
    for i in order:
        kept.lookup_stream(asked(TABLES[i]), 0)
    assert kept.drawn == drawn


def test_an_op_of_more_than_is_kept_has_all_its_ids():
    few, all_of = IndexStreams("cpu", 1), IndexStreams("cpu", 1 << 30)
    request = asked(*TABLES, *TABLES)
    assert all(map(torch.equal, few.lookup_stream(request, 0), all_of.lookup_stream(request, 0)))


def test_what_is_cleared_is_drawn_again():
    kept = IndexStreams("cpu", 1 << 30)
    for _ in range(2):
        kept.lookup_stream(asked(TABLES[0]), 0)
        kept.clear()
    assert kept.drawn == 2


def test_expected_streams_are_drawn_ahead_once_and_are_the_same():
    ahead, plain = IndexStreams("cpu", 1 << 30, threads=2), IndexStreams("cpu", 1 << 30)
    request = asked(*TABLES)
    for _ in range(2):
        ahead.prefetch([request], 0)
    began = time.monotonic()
    while any(not future.done() for future in ahead._expected.values()):
        assert time.monotonic() < began + 60, "the threads draw nothing"
        time.sleep(0.01)
    assert len(ahead._expected) == len(TABLES)
    assert all(map(torch.equal, ahead.lookup_stream(request, 0), plain.lookup_stream(request, 0)))
    assert ahead.drawn == plain.drawn == len(TABLES) and not ahead._expected


def test_without_threads_nothing_is_drawn_ahead():
    streams = IndexStreams("cpu", 1 << 30)
    streams.prefetch([asked(*TABLES)], 0)
    assert streams.drawn == 0 and not streams._expected


def test_what_is_not_expected_any_more_is_let_go():
    """Another device took those requests. A stream that stays expected is drawn once."""
    ahead = IndexStreams("cpu", 1 << 30, threads=1)
    ahead.prefetch(map(asked, TABLES[:3]), 0)
    kept = list(ahead._expected.values())[1:]
    ahead.prefetch(map(asked, TABLES[1:]), 0)
    assert len(ahead._expected) == 3 and list(ahead._expected.values())[:2] == kept
    ahead.lookup_stream(asked(TABLES[0]), 0)
    assert len(ahead._expected) == 3
    ahead.prefetch([], 0)
    assert not ahead._expected
