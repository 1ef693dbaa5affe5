"""PlacementState: plans under construction, kept up to date while shards are placed and removed.

It holds one plan, or a batch of plans in lockstep.
Sharders build plans on it. Annealing has a compiled form (anneal/compiled/).

Shapes: ... the batch (nothing for one plan), S strips, D devices, K kinds, F features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardcore.memory import free_bytes
from shardcore.search.shard_cost_cache import ShardCostCache
from shardcore.search.shards import placed, priced
from shardcore.types import Plan


class PlacementState:
    """What devices hold of a cache's strips, with the memory and cost that follow.

    A shard is a strip and a number of units (see ShardCostCache).
    Methods take one shard for each plan of the batch.
    `strip`, `units` and `device` are integers, or arrays that broadcast to [...].

    held: [..., S, D] units of each strip on each device.
    used: [..., D] bytes.
    outputs: [..., D, K] bytes of outputs of each kind.
    id_bytes: [..., D, K] bytes of ids and lengths that devices receive for each kind.
    sums: [..., D, K, F] summed encodings, which the model's head reads.
    op_ms: [..., D, K] of the fused ops, at speed 1.
    free: [D] bytes that embeddings may use.
    priced: whether to keep sums and op_ms. Without them there is no cost.
    """

    def __init__(self, cache: ShardCostCache, batch: tuple[int, ...] = (), priced: bool = True) -> None:
        n_devices, n_kinds = len(cache.speed), len(cache.kinds)
        self.cache = cache
        self.free = np.array(free_bytes(cache.problem), dtype=np.int64)
        self.held = np.zeros((*batch, len(cache), n_devices), dtype=np.int32)
        self.used = np.zeros((*batch, n_devices), dtype=np.int64)
        self.outputs = np.zeros((*batch, n_devices, n_kinds), dtype=np.int64)
        self.id_bytes = np.zeros((*batch, n_devices, n_kinds), dtype=np.int64)
        self.priced = priced
        self.sums = np.zeros((*batch, n_devices, n_kinds, cache.codes.shape[1] if priced else 0))
        self.op_ms = np.zeros((*batch, n_devices, n_kinds))
        self._plans = tuple(np.ogrid[tuple(map(slice, batch))]) if batch else ()

    def fits(self, strip: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[..., D] whether a device may hold the shard and has the memory."""
        return (self.used + self.extra_bytes(strip, units) <= self.free) & self.cache.allowed[strip]

    def extra_bytes(self, strip: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[..., D] bytes that the shard adds. Fewer where it widens a shard that is already there."""
        before = self.held[(*self._plans, strip)]
        strip, units = np.asarray(strip)[..., None], np.asarray(units)[..., None]
        n_bytes, numbers = self.cache.bytes, self.cache.numbers
        # A wider shard shares its rows' optimizer state, so bytes do not simply add up.
        return n_bytes[numbers(strip, before + units)] - n_bytes[numbers(strip, before)]

    def place(self, strip: np.ndarray, units: np.ndarray, device: np.ndarray) -> None:
        """Add a shard. The caller has to ask first whether it fits."""
        cache = self.cache
        # Index tuples into [..., S, D], [..., D] and [..., D, K].
        at, here = (*self._plans, strip, device), (*self._plans, device)
        of_kind = (*here, cache.kind[strip])
        before = self.held[at]
        after = before + units
        was, becomes = cache.numbers(strip, before), cache.numbers(strip, after)
        self.held[at] = after
        self.used[here] += cache.bytes[becomes] - cache.bytes[was]
        self.outputs[of_kind] += cache.outputs[becomes] - cache.outputs[was]
        self.id_bytes[of_kind] += cache.id_bytes[becomes] - cache.id_bytes[was]
        if not self.priced:
            return
        # An empty op is exactly 0: adding and subtracting encodings leaves rounding errors.
        sums = ((self.sums[of_kind] + (cache.codes[becomes] - cache.codes[was]))
                * (self.outputs[of_kind] > 0)[..., None])
        self.sums[of_kind] = sums
        self.op_ms[of_kind] = cache.model.head(sums.reshape(-1, sums.shape[-1])).reshape(sums.shape[:-1])

    def remove(self, strip: np.ndarray, units: np.ndarray, device: np.ndarray) -> None:
        """Undo a `place`."""
        self.place(strip, -units, device)

    @property
    def device_ms(self) -> np.ndarray:
        """[..., D] ms of compute, at each device's speed."""
        return self.op_ms.sum(-1) / self.cache.speed

    def cost_ms(self) -> np.ndarray:
        """[...] predicted ms of a step. Equal to price(lower(plan, problem), model).total_ms."""
        return self.cache.total_ms(self.device_ms, self.outputs, self.id_bytes)

    def parts_ms(self) -> np.ndarray:
        """[..., D, 3] ms of each device: forward compute, backward exchange, backward compute."""
        forward = (self.cache.model.forward_share(self.sums) * self.op_ms).sum(-1) / self.cache.speed
        compute = self.device_ms
        exchange = self.cache.comm(compute, self.outputs, self.id_bytes).backward_ms
        return np.stack([forward, np.broadcast_to(exchange, forward.shape), compute - forward], -1)

    def plan(self, **provenance: Any) -> Plan:
        """The consolidated plan of a state with one plan. Raises what `priced` raises if it is incomplete."""
        strips, devices = np.nonzero(self.held)
        problem, held = self.cache.problem, self.held[strips, devices]
        bundles = self.cache.bundles(list(zip(strips.tolist(), held.tolist(), strict=True)))
        return priced(placed(bundles, devices, problem), problem, self.cache.model, **provenance)
