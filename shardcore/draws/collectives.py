"""Drawn collectives, with the loads and skews of plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardcore.draws.problems import DIMS
from shardcore.layouts import CROSS, HOST
from shardcore.measurements import CollectiveRequest, EmulatedLinks
from shardcore.types import CAST, PAYLOADS

_PLAIN = 0.5
"""Share of draws that are all-to-alls at the full batch."""
BUSY_MS = 20.0
"""How long ranks compute before a collective. Steps of plans take about as long."""
_VARIED = {"all_to_all": 0.2, "reduce_scatter": 0.5, "all_reduce": 0.3}
"""Shares of collectives among the other draws. Otherwise too few samples would cover divided rows and
data-parallel tables."""
_IDS = 0.1
"""Share of all draws that are exchanges of ids instead."""
_HOT = 1.0
"""How far ranks differ in the ids that they receive (of their logarithms). A few hot tables have most
lookups, so ranks that own equally many columns may receive a hundred times as many ids."""
_BUCKETIZED = 0.07
"""Share of all draws that are exchanges of bucketized ids instead. Ranks receive nearly as much each."""
_GROUPED = {"all_to_all": (CROSS, 0.4), "reduce_scatter": (HOST, 0.5)}
"""The groups of a kind that divides rows within hosts. And the share of draws over hosts that are among them.
"""
_EVEN = 0.25
"""Share of draws over emulated hosts in which all ranks own as much, as in plans of good searches. Links that
are all equally busy are filled less than one that is busier than others."""
_FP32 = 0.75
"""Share of draws in FP32. Others are in FP16 or BF16, as TorchRec can send outputs and gradients."""


def comm_request(index: int, ranks: int, batch: int, seed: int = 0, max_start_ms: float = 20.0,
                 hosts: int = 1) -> CollectiveRequest:
    """Collective `index` among ranks on `hosts` hosts.

    Loads follow NeuroShard: 1 to 30 tables per rank, of random dims. Half of the draws have a log-uniform
    number of tables, because plans have many small exchanges. Each table goes to a random rank with
    probability p, otherwise to the least loaded one. A uniform p varies the balance. Every eighth draw leaves
    some ranks without tables.

    Every other draw has start skews up to max_start_ms. Half of the draws are all-to-alls at the full batch,
    as plans of whole and column-wise tables have. The others vary in collective and batch. Some draws then
    get another payload, and some become exchanges of ids.
    """
    rng = np.random.default_rng([2, seed, index, ranks])
    p, widths = rng.random(), [0] * ranks
    owners = rng.permutation(ranks)[: rng.integers(1, ranks) if rng.random() < 1 / 8 else ranks]
    many = rng.integers(ranks, 30 * ranks + 1)
    for _ in range(many if rng.random() < 0.5 else round(ranks * 30 ** rng.random())):
        rank = rng.choice(owners) if rng.random() < p else min(owners, key=lambda r: widths[r])
        widths[rank] += int(rng.choice(DIMS))
    starts = rng.uniform(0, max_start_ms, ranks) * (index % 2)
    # The first rank starts at 0. Only differences matter.
    starts -= starts.min()
    start_ms = tuple(round(float(s), 3) for s in starts)
    collective, payload = "all_to_all", "fp32"
    if rng.random() >= _PLAIN:
        collective = str(rng.choice(list(_VARIED), p=list(_VARIED.values())))
        rng.random()  # earlier versions drew a payload here
        for _ in range(rng.integers(4)):
            batch = batch // 2 if batch % (2 * ranks) == 0 else batch
    # Drawn apart, so that the other draws are those of earlier versions.
    apart = np.random.default_rng([6, seed, index, ranks])
    if collective in CAST and apart.random() >= _FP32:
        payload = str(apart.choice([p for p in PAYLOADS if p != "fp32"]))
    if (hot := np.random.default_rng([5, seed, index, ranks])).random() < _IDS:
        collective, payload = "all_to_all_ids", "fp32"
        shares = hot.lognormal(0.0, _HOT, ranks)
        widths = [round(sum(widths) * share) for share in shares / shares.sum()]
    elif (own := np.random.default_rng([8, seed, index, ranks])).random() < _BUCKETIZED:
        collective, payload = "all_to_all_ids_bucketized", "fp32"
        widths = [max(1, round(max(widths) * part)) for part in own.uniform(0.5, 1, ranks)]
    if collective == "all_reduce":
        # An all-reduce sums the same tensor on every rank.
        widths = [max(widths)] * ranks
    return CollectiveRequest(tuple(widths), batch, start_ms, collective, payload, hosts, BUSY_MS)


def emulated_request(index: int, ranks_on: tuple[int, int], batch: int, links: EmulatedLinks,
                     seed: int = 0) -> CollectiveRequest:
    """Collective `index` among the ranks of emulated hosts, as comm_request draws them; some within a host or
    across hosts, and some with the same load for all.

    ranks_on: hosts, and ranks of each.

    Nobody computes before it: the ranks share this machine's cores.
    """
    hosts, each = ranks_on
    request = replace(comm_request(index, hosts * each, batch, seed, hosts=hosts), busy_ms=0.0,
                      emulated=links)
    if np.random.default_rng([9, seed, index, hosts * each]).random() < _EVEN:
        request = replace(request, widths=(max(1, round(np.mean(request.widths))),) * (hosts * each))
    group, share = _GROUPED.get(request.collective, ("", 0.0))
    if each == 1 or np.random.default_rng([7, seed, index, hosts * each]).random() >= share:
        return request
    # Across hosts travel the rows that a reduce-scatter within hosts left.
    grouped = {"group": group, "batch": request.batch // each if group == CROSS else request.batch}
    members = replace(request, widths=(1,) * len(request.widths), **grouped).groups
    idle = [ranks[0] for ranks in members if not any(request.widths[r] for r in ranks)]
    widths = tuple(min(DIMS) if r in idle else w for r, w in enumerate(request.widths))
    return replace(request, widths=widths, **grouped)
