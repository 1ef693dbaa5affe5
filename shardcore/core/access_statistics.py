"""Access statistics of a table: the rows that its lookups hit.

Reuse or Zipf: how often rows are hit. RowShares: where they lie. ManagedCollision: the map from ids to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_BATCH, require, require_types, require_within, shown

MOST_COLLISION_BYTES = 1 << 20
"""Most bytes that managed collision keeps for a row or a lookup."""
MOST_RANGES = 1 << 12
"""Ranges of a RowShares, at most."""
REUSE_BINS = 17
"""Bins of a reuse histogram: bin k holds unique rows seen (2^(k-1), 2^k] times, bin 0 once, bin 16 more than
2^15 times."""


@dataclass(frozen=True)
class Reuse:
    """Access statistics as a reuse histogram, as in the dlrm_datasets release and NeuroShard.

    bins: [REUSE_BINS] fractions of a batch's unique rows, by how often each is seen. They sum to 1, or are
        all 0 for a table that is never accessed.
    batch: samples of the batch that was counted. The bins mean nothing without it.
    """

    bins: tuple[float, ...]
    batch: int

    def __repr__(self) -> str:
        return f"Reuse({len(self.bins)} bins, batch={self.batch})"

    def __post_init__(self) -> None:
        require_types(self, "a reuse histogram")
        total = sum(self.bins)
        fractions = len(self.bins) == REUSE_BINS and min(self.bins) >= 0 and max(self.bins) <= 1 + 1e-6
        if not (fractions and (total == 0 or abs(total - 1) < 1e-3)):
            raise ShardCoreError(
                f"reuse histogram has {len(self.bins)} bins {shown(self.bins)} that sum to {total:.6g}; "
                f"it needs {REUSE_BINS} fractions that sum to 1 (or are all 0)"
            )
        require_within(self, "reuse histogram", batch=(1, MOST_BATCH))


@dataclass(frozen=True)
class Zipf:
    """Access statistics as a power law: the row of rank r (from 1) is accessed in proportion to r^-alpha.

    alpha: within 0 and 10; 0 is uniform.
    """

    alpha: float

    def __post_init__(self) -> None:
        require_types(self, "zipf")
        require(0 <= self.alpha < 10, f"zipf alpha is {self.alpha}; it needs to be within 0 and 10")


@dataclass(frozen=True)
class RowShares:
    """Access statistics by place: shares of a batch in each of N equal ranges of a table's rows, in order.

    lookups: [N] shares of the lookups.
    unique: [N] shares of the unique rows.
    """

    lookups: tuple[float, ...]
    unique: tuple[float, ...]

    def __repr__(self) -> str:
        return f"RowShares({len(self.lookups)} ranges)"

    def __post_init__(self) -> None:
        require_types(self, "row shares")
        for name in ("lookups", "unique"):
            shares, total = getattr(self, name), sum(getattr(self, name))
            fractions = all(0 <= share <= 1 + 1e-6 for share in shares) and abs(total - 1) < 1e-3
            require(
                fractions and len(shares) <= MOST_RANGES,
                f"row shares have {len(shares)} {name} that sum to {total:.6g}; they need to be fractions that "
                f"sum to 1, one for each range of rows, 1 to {MOST_RANGES}",
            )
        require(
            len(self.lookups) == len(self.unique),
            f"row shares have {len(self.lookups)} lookups and {len(self.unique)} unique; they need as many of each",
        )


@dataclass(frozen=True)
class ManagedCollision:
    """Managed collision maps raw ids to rows. This is the device memory of TorchRec's module that does.

    row_bytes: for each row: the raw id, the row that it has, and when it was seen.
    lookup_bytes: for each lookup of a step: the ids seen since rows were last evicted.
    """

    row_bytes: int
    lookup_bytes: int = 0

    def __post_init__(self) -> None:
        require_types(self, "managed collision")
        ends = (0, MOST_COLLISION_BYTES)
        require_within(self, "managed collision", row_bytes=ends, lookup_bytes=ends)
