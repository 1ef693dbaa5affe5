"""Samples labelled by known laws of cost."""

import math

import numpy as np

from shardcore import dataset, streams
from shardcore.types import CommRequest, CommSample, ComputeRequest, ComputeSample, Reuse, Setting, Shard, Spread, Table, Zipf

SETTING = Setting("law", 256)
COLD = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
WIDTHS = (4, 8, 16, 32, 64)


def pool(n: int = 24) -> list[Table]:
    rng = np.random.default_rng(0)
    return [Table(f"t{i}", int(10 ** rng.uniform(2.5, 5)), int(rng.choice(WIDTHS)), round(float(rng.lognormal(1, 1)), 2),
                  COLD if i % 2 else Zipf(0.9)) for i in range(n)]


def linear_law(shards, batch: int) -> tuple[float, float]:
    """A launch, lookups, cells and unique rows, each at its rate."""
    forward, backward = 0.05, 0.03
    for s in shards:
        lookups = s.table.pooling * streams.access_share(s) * batch
        forward += 2e-6 * batch + 1e-5 * lookups + 1e-7 * lookups * s.width
        backward += 2e-5 * lookups + 4e-5 * streams.unique_rows(s, batch) + 1e-6 * streams.unique_rows(s, batch) * s.width
    return forward, backward


def cache_law(shards, batch: int) -> tuple[float, float]:
    """As linear_law, lookups costing up to four times as much where a table outgrows a cache of 256 KiB."""
    forward, backward = linear_law((), batch)
    for s in shards:
        slower = 1 + 3 / (1 + math.exp(-math.log(s.bytes / 2**18)))
        one = linear_law((s,), batch)
        forward, backward = forward + slower * (one[0] - 0.05), backward + slower * (one[1] - 0.03)
    return forward, backward


def spread(ms: float) -> Spread:
    return Spread(ms, ms, ms, 3)


def compute_samples(law, n: int = 240, setting: Setting = SETTING, noise: float = 0.0) -> list[ComputeSample]:
    rng, tables, samples = np.random.default_rng(1), pool(), []
    for _ in range(n):
        batch = int(rng.choice([64, 256]))
        shards = []
        for _ in range(rng.integers(1, 9)):
            table = tables[rng.integers(len(tables))]
            hi = table.rows if rng.random() < 0.8 else table.rows // 2
            shards.append(Shard(table, 0, hi, 0, int(rng.choice([w for w in WIDTHS if w <= table.dim]))))
        request = ComputeRequest(tuple(shards), batch)
        forward, backward = (ms * math.exp(noise * rng.normal()) for ms in law(shards, batch))
        samples.append(ComputeSample(dataset.compute_id(setting, request), setting, request, spread(forward), spread(backward),
                                     0.0))
    return samples


def exchange_law(widths, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """ms per rank: 0.1, 0.02 a peer, 2 GB/s out, 4 GB/s in, and 1 GB/s for the busiest."""
    owned = np.array(widths) * batch * 4.0
    n = len(owned)
    out, into = owned * (n - 1) / n, (owned.sum() - owned) / n
    busiest = max(out.max(), into.max())
    base = 0.1 + 0.02 * (n - 1) + busiest / 1e6
    return base + out / 2e6 + into / 4e6, base + into / 2e6 + out / 4e6


def comm_samples(n: int = 60, ranks=(2, 3, 4), setting: Setting = SETTING) -> list[CommSample]:
    rng, samples = np.random.default_rng(2), []
    for i in range(n):
        widths = tuple(int(w) * 4 for w in rng.integers(0, 200, ranks[i % len(ranks)]))
        if sum(widths):
            request = CommRequest(widths, 252, (0.0,) * len(widths))
            both = [tuple(map(spread, ms)) for ms in exchange_law(widths, 252)]
            samples.append(CommSample(dataset.comm_id(setting, request), setting, request, *both, (0.0,) * len(widths), 0.0))
    return samples
