"""What a cache of a table's rows misses: predicted (shardcore/tables/heat.py) against simulated, on streams.

    python -m bench.heat

20 tables of 2,000 to 50,000 rows, with lookups by power laws of 0.5 to 1.4. Each batch looks up its rows at
once. "LRU" drops the row that was not looked up for longest, but none of the batch. "32 ways" is as FBGEMM's
cache: a row's hash tells its set of 32 rows, and each set is an LRU. Predictions know the law, or only the
reuse histogram of so many batches. The first batches fill the cache, and do not count.

Miss ratios are of a batch's unique rows. Differences are in points of percent.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardcore import report
from shardcore.tables import access
from shardcore.tables.heat import heat_of
from shardcore.tables.streams import stream
from shardcore.types import Table, Zipf

BATCH, BATCHES, FILLING = 512, 160, 120
SHARES = (0.05, 0.1, 0.2, 0.5)
WAYS = 32
SEEN = (0, 8, 1)
"""Batches of the histogram that a prediction knows. 0: it knows the law."""


def miss_ratio(batches: Sequence[np.ndarray], rows: int, ways: int = 0, filling: int | None = None) -> float:
    """Share of a batch's unique rows that a cache of so many rows misses, after it was filled.

    ways: rows of a set. 0: all rows are one set.
    filling: batches that fill it. None: half of all.
    """
    sets = max(1, rows // ways) if ways else 1
    held: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(sets)]  # row: batch of its last lookup
    most, missed, looked_up = rows // sets, 0, 0
    for i, ids in enumerate(batches):
        unique = np.unique(ids)
        hashed = unique.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        placed = [(row, held[at]) for row, at in zip(unique.tolist(), (hashed % np.uint64(sets)).tolist(),
                                                     strict=True)]
        new = [(row, one) for row, one in placed if row not in one]
        for row, one in placed:
            if row in one:
                one[row] = i
                one.move_to_end(row)
        # In any order, as ids are hashed.
        for row, one in (new[k] for k in np.random.default_rng(i).permutation(len(new))):
            if len(one) == most and next(iter(one.values())) < i:
                one.popitem(last=False)
            if len(one) < most:
                one[row] = i
        if i >= (len(batches) // 2 if filling is None else filling):
            missed, looked_up = missed + len(new), looked_up + len(unique)
    return missed / looked_up


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.heat", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(2026)
    off: dict[tuple[float, int, int], list[float]] = {}
    ratios: dict[float, list[float]] = {}
    for n in range(20):
        table = Table(f"t{n}", int(rng.integers(2_000, 50_000)), 16, float(rng.integers(1, 20)),
                      Zipf(float(rng.uniform(0.5, 1.4))))
        batches = [stream(table, BATCH, seed)[0] for seed in range(BATCHES)]
        for share in SHARES:
            rows = int(share * table.rows) // WAYS * WAYS
            if len(np.unique(np.concatenate(batches[:FILLING]))) < rows:
                continue  # it would never fill
            real = {ways: miss_ratio(batches, rows, ways, FILLING) for ways in (0, WAYS)}
            ratios.setdefault(share, []).append(real[0])
            for seen in SEEN:
                given = table if not seen else replace(
                    table, access=access.reuse_of(np.concatenate(batches[:seen]), seen * BATCH))
                heat = heat_of(given)
                predicted = heat.missed(rows, BATCH) / heat.touched(BATCH)
                for ways, found in real.items():
                    off.setdefault((share, seen, ways), []).append(100 * abs(predicted - found))
    rows_of = []
    for share in SHARES:
        for ways in (0, WAYS):
            told = [off[share, seen, ways] for seen in SEEN]
            rows_of.append((f"{share:.0%}", f"{ways} ways" if ways else "LRU", len(told[0]),
                            f"{100 * np.mean(ratios[share]):.0f}",
                            *(f"{np.mean(x):.1f} ({max(x):.1f})" for x in told)))
    print(report.text_table(("rows held", "cache", "tables", "misses, %", "law known: off by (most)",
                             "8 batches seen", "1 batch seen"), rows_of))


if __name__ == "__main__":
    main()
