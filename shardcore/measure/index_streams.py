"""Random lookup ids of embedding tables, drawn on the device, for measured ops.

Shapes: L lookups, T features, B batch.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shardcore.core.types import MIN_WIDTH, Shard, Table
from shardcore.io.measurements import ComputeRequest
from shardcore.tables import streams

Stream = tuple[torch.Tensor, torch.Tensor]
"""Ids, and offsets of samples in them."""
_Key = tuple[Table, int, int]
"""Table, batch and seed of a stream."""


class IndexStreams:
    """LRU cache of drawn streams of ids.

    place: torch device of the streams.
    most_bytes: limit of all streams that are kept. The ids of ops that are running come on top.
    threads: number of threads that draw ahead of need (`expect`). 0 where they would take the cores that are
      measured.
    drawn: streams drawn so far. It grows while a request is prepared, so a supervisor sees progress.
    """

    def __init__(self, place: str, most_bytes: int, threads: int = 0) -> None:
        self.place, self.most_bytes, self.drawn = place, most_bytes, 0
        self._kept: OrderedDict[_Key, Stream] = OrderedDict()
        self._bytes = 0
        self._threads = ThreadPoolExecutor(threads, "draws-ids") if threads else None
        self._expected: dict[_Key, Future] = {}

    def prefetch(self, requests: Iterable[ComputeRequest], seed: int) -> None:
        """Begin to draw the id streams of requests in background threads, if there are any.

        Streams that only an earlier call expected are dropped: another device measures their requests.
        """
        if not self._threads:
            return
        # One draw for each table and batch, however many shards the table has.
        wanted = dict.fromkeys(_stream_key(s.table, r.batch, seed) for r in requests for s in r.shards)
        for key in [key for key in self._expected if key not in wanted]:
            self._expected.pop(key).cancel()
        for key in wanted:
            if key not in self._kept and key not in self._expected:
                self._expected[key] = self._threads.submit(streams.draw_lookups, *key)

    def lookup_stream(self, request: ComputeRequest, seed: int) -> Stream:
        """Ids [L] and offsets of a request's T features, table after table.

        Offsets have one entry for each distinct value, and a last one. Sequences always have [T × B + 1]; the
        samples after the last distinct value are empty.
        """
        all_ids, all_offsets, start = [], [], 0
        for s in request.shards:
            ids, offsets = self._shard_stream(s, request.batch, seed)
            if s.table.sequence:
                # FBGEMM's op of a sequence wants offsets for all samples.
                empty = request.batch * s.table.features + 1 - len(offsets)
                offsets = torch.cat([offsets, offsets[-1:].expand(empty)])
            all_ids.append(ids)
            all_offsets.append(offsets[:-1] + start)
            start += len(ids)
        return torch.cat(all_ids), torch.cat([*all_offsets, torch.tensor([start], device=self.place)])

    def clear(self) -> None:
        """Drop all cached streams."""
        self._kept.clear()
        self._bytes = 0

    def _shard_stream(self, shard: Shard, batch: int, seed: int) -> Stream:
        """Ids and offsets of a shard's rows."""
        ids, offsets = self._table_stream(shard.table, batch, seed)
        if shard.has_all_rows:
            return ids, offsets
        # A row range looks up only its own ids, counted from its first row.
        inside = (ids >= shard.row_lo) & (ids < shard.row_hi)
        # [L + 1] ids inside before each id. Indexed by an offset in all ids, it gives the offset among those
        # inside.
        kept = torch.nn.functional.pad(inside.cumsum(0), (1, 0))
        return ids[inside] - shard.row_lo, kept[offsets]

    def _table_stream(self, table: Table, batch: int, seed: int) -> Stream:
        """Ids and offsets of a table, from the cache or newly drawn."""
        key = _stream_key(table, batch, seed)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        # An expected stream may still be being drawn. Its result waits for that.
        expected = self._expected.pop(key, None)
        parts = expected.result() if expected else streams.draw_lookups(*key)
        ids, offsets = (torch.from_numpy(part).to(self.place) for part in parts)
        self._kept[key] = drawn = ids, offsets
        self.drawn += 1
        self._bytes += _stream_bytes(drawn)
        # The newest always stays. Else a stream larger than the limit would be drawn again and again.
        while self._bytes > self.most_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _stream_bytes(oldest)
        return drawn


def _stream_key(table: Table, batch: int, seed: int) -> _Key:
    # A table's stream does not depend on its dim.
    """Cache key of a table's stream of ids, which does not depend on the table's dim."""
    return dataclasses.replace(table, dim=MIN_WIDTH), batch, seed


def _stream_bytes(stream: Stream) -> int:
    """Bytes of a stream of ids and offsets."""
    return sum(part.numel() * part.element_size() for part in stream)
