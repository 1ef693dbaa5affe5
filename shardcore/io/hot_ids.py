"""Hot ids of a table, and the row of each id.

Hot ids are in rising order, and so are all others. So the hot ids alone give the row of each id: the i-th hot
id is hot row i. Any other id is a cold row, whose number is the id less the number of hot ids below it.

Shapes: H hot ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, short_repr
from shardcore.io.model_files import read_tensors, write_tensors
from shardcore.io.schema import build_record

_SCHEMA = "hot-ids"


@dataclass(frozen=True, eq=False)
class HotIds:
    """Hot (most looked up) ids of an embedding table.

    table: name of the table.
    rows: rows of the whole table.
    ids: [H] int64, rising.
    """

    table: str
    rows: int
    ids: np.ndarray

    def __post_init__(self) -> None:
        ids = np.ascontiguousarray(self.ids, dtype=np.int64)
        object.__setattr__(self, "ids", ids)
        require(
            1 <= len(ids) < self.rows,
            f"table {self.table!r} was given {len(ids)} hot ids; it has {self.rows} "
            f"rows, so 1 to {self.rows - 1} would be right",
        )
        require(
            bool(ids[0] >= 0 and ids[-1] < self.rows and (ids[1:] > ids[:-1]).all()),
            f"table {self.table!r} was given hot ids {ids.min()} to {ids.max()}; it "
            f"needs different ones of 0 to {self.rows - 1}, rising",
        )

    @classmethod
    def from_counts(cls, table: str, counts: np.ndarray, hot: int) -> HotIds:
        """The `hot` ids of a table with the most lookups.

        counts: [rows] lookups of each id (see `heat.row_counts`).
        """
        if not 1 <= hot < len(counts := np.asarray(counts)):
            raise ShardCoreError(
                f"table {table!r} was asked for {hot} hot rows; it has {len(counts)} rows, "
                f"so 1 to {len(counts) - 1} would be right"
            )
        return cls(table, len(counts), np.sort(np.argsort(-counts, kind="stable")[:hot]))

    @property
    def cold_rows(self) -> int:
        """Number of rows of the table that are not hot."""
        return self.rows - len(self.ids)

    @cached_property
    def digest(self) -> int:
        """Digest of the table's hot ids, of 63 bits, which fits an int64."""
        sha256 = hashlib.sha256(f"{self.table}\0{self.rows}\0".encode() + self.ids.tobytes()).digest()
        return int.from_bytes(sha256[:8], "big") >> 1

    def cold_ids(self, low: int, high: int) -> np.ndarray:
        """[high - low] ids in the table of the cold rows low to high - 1."""
        rows = np.arange(low, high)
        # Hot id i has ids[i] - i cold ids before it. The id of cold row r is r plus the hot ids that have at
        # most r.
        return rows + np.searchsorted(self.ids - np.arange(len(self.ids)), rows, side="right")


def write_hot_ids(path: str | Path, hot: Iterable[HotIds]) -> None:
    """Write the hot ids of several tables to a file."""
    tables = list(hot)
    write_tensors(
        path, _SCHEMA, {"rows": {h.table: h.rows for h in tables}}, {h.table: h.ids for h in tables}
    )


def read_hot_ids(path: str | Path) -> dict[str, HotIds]:
    """Read hot ids by table from a file. Raises ShardCoreError for a file that `write_hot_ids` did not write."""
    meta, tensors = read_tensors(path, _SCHEMA)
    rows = build_record(_Meta, meta, str(path)).rows
    if differ := sorted(set(rows) ^ set(tensors)):
        raise ShardCoreError(
            f"{path} lacks the hot ids or the number of rows of table {short_repr(differ[0])}"
        )
    by_table = {}
    for name, ids in tensors.items():
        require(
            ids.ndim == 1 and ids.dtype == np.int64,
            f"{path} has hot ids of table {short_repr(name)} that are {ids.dtype} "
            f"{list(ids.shape)}; they need to be int64, in a row",
        )
        by_table[name] = HotIds(name, rows[name], ids)
    return by_table


@dataclass(frozen=True)
class _Meta:
    """JSON header of a file of hot ids."""

    rows: Mapping[str, int]
