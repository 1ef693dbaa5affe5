"""Which rows of a table its lookups hit: a noun of a table (types.py), in one of two forms."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.limits import MOST_BATCH, require, require_types

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
        if (len(self.bins) == REUSE_BINS and 0 <= min(self.bins) and max(self.bins) <= 1 + 1e-6
            and 1 <= self.batch <= MOST_BATCH
                and (total == 0 or abs(total - 1) < 1e-3)):
            return  # pools have many: words only where they are needed
        require(len(self.bins) == REUSE_BINS, f"reuse histogram has {len(self.bins)} bins; it needs "
                f"{REUSE_BINS}")
        require(all(0 <= b <= 1 + 1e-6 for b in self.bins), f"reuse bins {self.bins} are not fractions "
                "within 0 and 1")
        require(total == 0 or abs(total - 1) < 1e-3, f"reuse bins sum to {total:.6g}; they need to sum to 1 "
                "(or be all 0)")
        require(1 <= self.batch <= MOST_BATCH,
                f"reuse batch is {self.batch}; it needs to be the samples it was taken at, 1 to {MOST_BATCH}")


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
