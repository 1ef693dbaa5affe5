"""RowCounts: number of lookups of each row of some tables, and its file.

Shapes: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_BATCH, number_within, require, short_repr
from shardcore.io.model_files import read_tensors, write_tensors
from shardcore.io.schema import MOST_INT, build_record

_SCHEMA = "row-counts"


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Number of lookups of each row, by table.

    samples: number of samples in which lookups were counted.
    counts: [R] int64 lookups of each row, by table (see `heat.row_counts`).
    """

    samples: int
    counts: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        number_within(1, MOST_BATCH)(self.samples, "row counts", "samples")
        for name, counts in self.counts.items():
            require(
                counts.ndim == 1 and counts.dtype == np.int64 and bool((counts >= 0).all()),
                f"row counts of table {short_repr(name)} are {counts.dtype} "
                f"{list(counts.shape)}; they need to be int64, one for each row, 0 or "
                "more",
            )
            # Summed as floats, as integers may overflow.
            if (total := counts.sum(dtype=float)) > MOST_INT:
                raise ShardCoreError(
                    f"row counts of table {short_repr(name)} are {total:.3g} together; they need "
                    f"to be {MOST_INT:,} at most"
                )

    def table_counts(self, table: str, rows: int) -> np.ndarray:
        """[rows] lookup counts of a table's rows. Raises ShardCoreError if there are none, or not one for each row."""
        require(
            table in self.counts,
            f"there are no row counts of table {table!r}; there are of {sorted(self.counts)[:5]}",
        )
        require(
            len(self.counts[table]) == rows,
            f"table {table!r} has {rows} rows, its row counts {len(self.counts[table])}; it needs one for each row",
        )
        return self.counts[table]


def write_row_counts(path: str | Path, counts: RowCounts) -> None:
    """Write the lookup counts of tables' rows to a file."""
    write_tensors(path, _SCHEMA, {"samples": counts.samples}, counts.counts)


def read_row_counts(path: str | Path) -> RowCounts:
    """Read the lookup counts of tables' rows from a file. Raises ShardCoreError for a file of another kind."""
    meta, counts = read_tensors(path, _SCHEMA)
    return build_record(RowCounts, meta, str(path), counts=counts)
