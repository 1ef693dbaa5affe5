"""Does heat tell what a cache misses, and do tiers by heat move less than the largest tables to the host?

    python -m bench.heat --tables 20 --problems 20

Tables: half of the calibrated pool, half with a power law. Their misses are compared to an LRU cache
simulated on drawn streams, in one set and in sets of 32 ways. Then those with a power law are known by the
histograms of some batches only. Problems: tables of the pool, on devices with
memory for a share of them. Bytes over the slow link follow from the miss ratios. They are not measured, nor
is the link.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np

from bench.memory_tiers import largest_to_host, one_load_factor
from shardcore.core.access_statistics import Zipf
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.search.decisions.memory_tiers import link_ms, tier_bytes, tiered
from shardcore.step.access import reuse_of
from shardcore.tables import streams
from shardcore.tables.generate import generate_pool
from shardcore.tables.heat import heat_of
from shardcore.tables.lru import WAYS, lru_misses

BATCH = 2048
SHARES = (0.02, 0.1, 0.3)
"""Of a table's rows, those of them that recur: what is cached."""
HISTOGRAMS, UNSEEN_SHARES = (1, 2, 4, 8), (0.05, 0.1, 0.2)
HOST = {"memory": (Memory("host", 1 << 50, 25.0),)}


def tables(n: int) -> list[Table]:
    """Of the pool, and as many with a power law."""
    rng = np.random.default_rng(0)
    # The smallest are quick to simulate.
    live = [t for t in generate_pool() if t.pooling >= 0.5 and t.rows >= 20_000]
    small = sorted(live, key=lambda t: t.rows)[:100]
    drawn = [small[i] for i in rng.choice(len(small), n // 2, replace=False)]
    laws = [
        Table(
            f"zipf-{i}",
            int(rng.integers(20_000, 100_000)),
            64,
            float(rng.integers(2, 30)),
            Zipf(float(rng.uniform(0.6, 1.4))),
        )
        for i in range(n - len(drawn))
    ]
    return drawn + laws


def misses(n: int, batches: int) -> None:
    print("| table | rows | rows cached | predicted miss ratio | one set | 32 ways | off by, points |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for table in tables(n):
        drawn = [streams.stream(table, BATCH, seed)[0] for seed in range(batches)]
        (heat,) = heat_of([table], BATCH)
        known = int(heat.rows[heat.lookups > 0].sum())
        for rows in sorted({max(4 * WAYS, int(share * known)) for share in SHARES}):
            predicted = float(heat.miss_ratio(rows))
            one, sets = (
                missed / seen
                for seen, missed in (
                    lru_misses(drawn, table.rows, rows, batches // 2, ways) for ways in (None, WAYS)
                )
            )
            errors.append((predicted - one, predicted - sets))
            print(
                f"| {table.name} | {table.rows} | {rows} | {predicted:.3f} | {one:.3f} | {sets:.3f} | "
                f"{100 * (predicted - one):+.1f}, {100 * (predicted - sets):+.1f} |",
                flush=True,
            )
    off = 100 * np.abs(errors)
    for name, of in zip(("one set", f"{WAYS} ways"), off.T, strict=True):
        print(
            f"\n{name}: mean {of.mean():.2f} points off, worst {of.max():.2f}, within 2 points "
            f"{np.count_nonzero(of <= 2)} of {len(of)}"
        )


def unseen(n: int, batches: int) -> None:
    """Power laws, known by the histograms of some batches only. Caches: shares of all rows."""
    print("\n| rows cached | miss ratio | " + " | ".join(f"histogram of {k}" for k in HISTOGRAMS) + " |")
    print("|---|---|" + "---|" * len(HISTOGRAMS))
    off: dict[tuple[float, int], list[float]] = {}
    ratios: dict[float, list[float]] = {}
    for law in (t for t in tables(2 * n) if isinstance(t.access, Zipf)):
        drawn = [streams.stream(law, BATCH, seed)[0] for seed in range(batches)]
        for share in UNSEEN_SHARES:
            seen, missed = lru_misses(drawn, law.rows, int(share * law.rows), batches // 2)
            ratios.setdefault(share, []).append(missed / seen)
            for k in HISTOGRAMS:
                ids = np.concatenate([streams.stream(law, BATCH, 10**6 + i)[0] for i in range(k)])
                [heat] = heat_of([replace(law, access=reuse_of(ids, k * BATCH))], BATCH, unseen=True)
                off.setdefault((share, k), []).append(
                    100 * abs(float(heat.miss_ratio(int(share * law.rows))) - missed / seen)
                )
    for share, found in ratios.items():
        of = (off[share, k] for k in HISTOGRAMS)
        print(
            f"| {share:.0%} | {np.mean(found):.2f} | "
            + " | ".join(f"{np.mean(x):.1f} ({max(x):.1f})" for x in of)
            + " |",
            flush=True,
        )


def tiers(n: int) -> None:
    print("\n| memory, share of tables | largest to host, ms | one load factor, ms | by heat, ms |")
    print("|---|---|---|---|")
    pool, rng, ratios = [t for t in generate_pool() if t.pooling > 0.01], np.random.default_rng(1), []
    for i in range(n):
        some = tuple(pool[k] for k in rng.choice(len(pool), 60, replace=False))
        share = (0.1, 0.25, 0.5, 0.75)[i % 4]
        rich = Problem(f"heat-{i}", some, Topology((Device(1 << 40),) * 4, **HOST), BATCH)
        beside = sum(d.memory_bytes for d in rich.topology.devices) - tier_bytes(rich)
        memory = int(beside + share * sum(t.bytes for t in some)) // 4
        problem = replace(rich, topology=Topology((Device(memory),) * 4, **HOST))
        arms = [link_ms(how(problem)) for how in (largest_to_host, one_load_factor, tiered)]
        ratios.append(np.array(arms[:2]) / arms[2])
        print(f"| {share:.0%} | {' | '.join(f'{ms:.4f}' for ms in arms)} |", flush=True)
    for name, of in zip(("largest to host", "one load factor"), np.array(ratios).T, strict=True):
        print(f"\n{name}, over by heat: median {np.median(of):.1f}, least {of.min():.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--batches", type=int, default=100)
    args = parser.parse_args()
    if args.tables:
        misses(args.tables, args.batches)
        unseen(args.tables, args.batches)
    if args.problems:
        tiers(args.problems)


if __name__ == "__main__":
    sys.exit(main())
