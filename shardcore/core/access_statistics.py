"""Which rows of a table its lookups hit: nouns of a table (types.py).

Reuse or Zipf says how often rows are hit, RowShares where they lie, ManagedCollision what maps ids to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.core.validation import MOST_BATCH, require, require_types

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
    batch: samples of the batch that it was taken at, without which the bins mean nothing.
    """

    bins: tuple[float, ...]
    batch: int

    def __post_init__(self) -> None:
        require_types(self, "a reuse histogram")
        object.__setattr__(self, "bins", tuple(map(float, self.bins)))
        total = sum(self.bins)
        if (
            len(self.bins) == REUSE_BINS
            and 0 <= min(self.bins)
            and max(self.bins) <= 1 + 1e-6
            and 1 <= self.batch <= MOST_BATCH
            and (total == 0 or abs(total - 1) < 1e-3)
        ):
            return  # pools have many: words only where they are needed
        require(
            len(self.bins) == REUSE_BINS, f"reuse histogram has {len(self.bins)} bins; it needs {REUSE_BINS}"
        )
        require(
            all(0 <= b <= 1 + 1e-6 for b in self.bins),
            f"reuse bins {self.bins} are not fractions within 0 and 1",
        )
        require(
            total == 0 or abs(total - 1) < 1e-3,
            f"reuse bins sum to {total:.6g}; they need to sum to 1 (or be all 0)",
        )
        require(
            1 <= self.batch <= MOST_BATCH,
            f"reuse batch is {self.batch}; it needs to be the samples it was taken at, 1 to {MOST_BATCH}",
        )


@dataclass(frozen=True)
class Zipf:
    """Access statistics as a power law: the row of rank r (from 1) is accessed in proportion to r^-alpha.

    alpha: within 0 and 10; 0 is uniform.
    """

    alpha: float

    def __post_init__(self) -> None:
        require_types(self, "zipf")
        object.__setattr__(self, "alpha", float(self.alpha))
        require(0 <= self.alpha < 10, f"zipf alpha is {self.alpha}; it needs to be within 0 and 10")


@dataclass(frozen=True)
class RowShares:
    """Access statistics by place: what a batch hits in each of N equal ranges of a table's rows, in order.

    lookups: [N] shares of the lookups.
    unique: [N] shares of the unique rows.
    """

    lookups: tuple[float, ...]
    unique: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("lookups", "unique"):
            shares = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, shares)
            require(
                1 <= len(shares) <= MOST_RANGES,
                f"row shares have {len(shares)} {name}; they need one "
                f"for each range of rows, 1 to {MOST_RANGES}",
            )
            require(
                all(0 <= share <= 1 + 1e-6 for share in shares) and abs(sum(shares) - 1) < 1e-3,
                f"row shares have {name} that sum to {sum(shares):.6g}; they need to be fractions that "
                "sum to 1",
            )
        require(
            len(self.lookups) == len(self.unique),
            f"row shares have {len(self.lookups)} lookups and "
            f"{len(self.unique)} unique; they need as many of each",
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
        for name in ("row_bytes", "lookup_bytes"):
            value = getattr(self, name)
            require(
                0 <= value <= MOST_COLLISION_BYTES,
                f"managed collision has {name} {value}; it needs 0 to {MOST_COLLISION_BYTES}",
            )
