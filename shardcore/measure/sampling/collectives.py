"""Drawn collectives, with the loads and skews of plans."""

from __future__ import annotations

import numpy as np

from shardcore.core.payloads import CASTS
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure.sampling.problems import DIMS
from shardcore.step.collectives import COLLECTIVES

_PLAIN = 0.5
"""Share of draws that are all-to-alls at the full batch."""
BUSY_MS = 20.0
"""Time for which ranks compute before a collective: about as long as in steps of plans."""
_VARIED = {name: row.draw.share for name, row in COLLECTIVES.items() if not row.draw.stream}
"""Shares of collectives among the other draws. Collectives with a stream of their own then replace some of all."""
_FP32 = 0.75
"""Share of draws in FP32. Others are in FP16 or BF16, as TorchRec can send outputs and gradients."""


def draw_collective_request(
    index: int, ranks: int, batch: int, seed: int = 0, max_start_ms: float = 20.0, hosts: int = 1
) -> CollectiveRequest:
    """Draw the random collective number `index` among ranks on some hosts, to be measured.

    Loads follow NeuroShard: 1 to 30 tables per rank, of random dims. Half of the draws have a log-uniform
    number of tables, because plans have many small exchanges. Each table goes to a random rank with
    probability p, otherwise to the least loaded one. p is uniform, which varies the balance. One draw in
    eight leaves some ranks without tables.

    Every other draw has start skews up to max_start_ms. Half of the draws are all-to-alls at the full batch,
    as in plans of whole and column-wise tables. The others vary in collective and batch. Some draws then get
    another payload, and some become exchanges of ids.
    """
    rng = np.random.default_rng([2, seed, index, ranks])
    p, widths = rng.random(), [0] * ranks
    owners = rng.permutation(ranks)[: rng.integers(1, ranks) if rng.random() < 1 / 8 else ranks]
    many = rng.integers(ranks, 30 * ranks + 1)
    for _ in range(many if rng.random() < 0.5 else round(ranks * 30 ** rng.random())):
        # p near 1 gives random loads, near 0 even ones.
        rank = rng.choice(owners) if rng.random() < p else min(owners, key=lambda r: widths[r])
        widths[rank] += int(rng.choice(DIMS))
    starts = rng.uniform(0, max_start_ms, ranks) * (index % 2)
    # Only differences matter, so the first rank starts at 0.
    starts -= starts.min()
    start_ms = tuple(round(float(s), 3) for s in starts)
    collective, payload = next(iter(COLLECTIVES)), "fp32"
    if rng.random() >= _PLAIN:
        collective = str(rng.choice(list(_VARIED), p=list(_VARIED.values())))
        rng.random()  # unused: earlier versions drew a payload here
        for _ in range(rng.integers(4)):
            batch = batch // 2 if batch % (2 * ranks) == 0 else batch
    # Later options have streams of their own, so that the other draws stay as they were.
    payloads = np.random.default_rng([6, seed, index, ranks])
    if COLLECTIVES[collective].cast and payloads.random() >= _FP32:
        payload = str(payloads.choice(CASTS))
    for row in (r for r in COLLECTIVES.values() if r.draw.stream):
        stream = np.random.default_rng([row.draw.stream, seed, index, ranks])
        if stream.random() < row.draw.share:
            collective, payload, rng = row.name, "fp32", stream
            break
    widths = COLLECTIVES[collective].draw.loads(widths, rng)
    return CollectiveRequest(tuple(widths), batch, start_ms, collective, payload, hosts, BUSY_MS)
