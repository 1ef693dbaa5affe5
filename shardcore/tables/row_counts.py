"""RowCounts: how often some samples look up each row of some tables, and its file.

Shapes: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.errors import ShardCoreError
from shardcore.limits import MOST_BATCH, require_within

_SCHEMA, _VERSION = "shardcore/row_counts", "1"


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Lookups of each row, by table.

    samples: in which they were counted.
    counts: [R] whole numbers of each table (see `heat.row_counts`).
    """

    samples: int
    counts: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        require_within(self, "row counts", samples=(1, MOST_BATCH))
        for name, counts in self.counts.items():
            if counts.ndim != 1 or counts.dtype != np.int64 or (counts < 0).any():
                raise ShardCoreError(f"row counts of table {name!r} are {counts.dtype} {list(counts.shape)}; "
                                     "they need to be int64, one for each row, 0 or more")

    def of(self, table: str, rows: int) -> np.ndarray:
        """[rows] of a table. Raises ShardCoreError if they are of another one, or there are none."""
        if table not in self.counts:
            raise ShardCoreError(f"there are no row counts of table {table!r}; there are of "
                                 f"{sorted(self.counts)[:5]}")
        if len(self.counts[table]) != rows:
            raise ShardCoreError(f"table {table!r} has {rows} rows, its row counts "
                                 f"{len(self.counts[table])}; it needs one for each row")
        return self.counts[table]


def write_row_counts(path: str | Path, counts: RowCounts) -> None:
    from safetensors.numpy import save

    from shardcore.files import write_atomic

    about = {"schema": _SCHEMA, "version": _VERSION, "samples": str(counts.samples)}
    write_atomic(Path(path), save({k: np.ascontiguousarray(v) for k, v in counts.counts.items()}, about))


def read_row_counts(path: str | Path) -> RowCounts:
    """What `write_row_counts` wrote. Raises ShardCoreError for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise ShardCoreError(f"cannot read row counts from {path}: {str(error)[:200]}") from None
    if about.get("schema") != _SCHEMA or about.get("version") != _VERSION:
        raise ShardCoreError(f"{path} has schema {about.get('schema')!r}, version {about.get('version')!r}; "
                             f"row counts have {_SCHEMA!r}, version {_VERSION}")
    samples = about.get("samples", "")
    if not samples.isdecimal():
        raise ShardCoreError(f"{path} says it counted {samples[:20]!r} samples; it needs a number of them")
    try:
        return RowCounts(int(samples), tensors)
    except ShardCoreError as error:
        raise ShardCoreError(f"{path}: {error}") from None
