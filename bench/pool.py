"""How near a generated pool comes to the published statistics of dlrm_datasets: in its specifications, and
measured on streams.

    python -m bench.pool                # every table's stream at the published batch (887M lookups, some
                                        minutes)
    python -m bench.pool --sample 40    # 40 tables, evenly spaced by unique rows, compared with their own
                                        specifications
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from shardcore.core.access_statistics import REUSE_BINS
from shardcore.core.types import Table
from shardcore.step import access
from shardcore.tables import streams
from shardcore.tables.generate import PoolConfig, generate_pool
from shardcore.tables.statistics import pool_statistics, published


class StreamCounts:
    """Counts of the rows that one stream of a table touches at its reference batch; remembers how far, at
    most, a stream's reuse histogram was from its table's."""

    largest_difference = 0.0

    def __call__(self, table: Table) -> np.ndarray:
        counts = np.unique(streams.stream(table, table.access.batch)[0], return_counts=True)[1]
        bins = np.bincount(access.reuse_bin(counts), minlength=REUSE_BINS) / max(len(counts), 1)
        self.largest_difference = max(self.largest_difference, float(np.abs(bins - table.access.bins).max()))
        return counts


def spaced_by_unique_rows(tables: tuple[Table, ...], n: int) -> tuple[Table, ...]:
    """n of the tables, evenly spaced by unique rows, the fewest and the most among them."""
    by_unique = sorted(tables, key=lambda t: len(access.reference_counts(t)))
    return tuple(by_unique[i] for i in np.unique(np.linspace(0, len(by_unique) - 1, n).round().astype(int)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=856, help="tables of the pool (default: 856)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pool (default: 0)")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="measure on streams of N tables only (default: all)"
    )
    args = parser.parse_args()

    start = time.perf_counter()
    pool = generate_pool(PoolConfig(tables=args.tables, seed=args.seed))
    print(
        f"generated {len(pool)} tables in {time.perf_counter() - start:.1f} s, "
        f"{sum(t.pooling == 0 for t in pool)} empty"
    )
    chosen = spaced_by_unique_rows(pool, args.sample) if args.sample else pool
    start = time.perf_counter()
    goal, spec, chosen_spec = published(), pool_statistics(pool), pool_statistics(chosen)
    measured = pool_statistics(chosen, counts := StreamCounts())
    print(f"measured the streams of {len(chosen)} tables in {time.perf_counter() - start:.1f} s")
    print(
        f"largest difference between the bins of a stream and of its table: {counts.largest_difference:.2g}"
    )
    print(
        f"\n{'statistic':24} {'published':>14} {'specified':>14} {'deviation':>9}   {'streams':>14} "
        f"{'from':>9}"
    )
    for name, value in goal.items():
        value *= args.tables / 856 if name in ("lookups", "unique rows") else 1
        baseline = chosen_spec[name] if args.sample else value
        print(
            f"{name:24} {value:14,.6g} {spec[name]:14,.6g} {deviation(spec[name], value):>9}   "
            f"{measured[name]:14,.6g} {deviation(measured[name], baseline):>9}"
        )
    print(
        "\nlast column: deviation of the streams from "
        + ("the same tables' specifications" if args.sample else "the published figures")
    )


def deviation(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.2%}" if reference else f"{value - reference:+.1g}"


if __name__ == "__main__":
    main()
