"""PlacementState: plans under construction, kept up to date while shards are placed and removed.

It holds one plan, or a batch of plans in lockstep.
Sharders build plans on it. Annealing has a compiled form (anneal/compiled/).

Shapes: ... the batch (nothing for one plan), S strips, D devices, K runs of a plan, F features, P phases,
C counts.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shardcore.core.types import Plan
from shardcore.search.state.shard_cost_cache import Integers, ShardCostCache
from shardcore.search.state.shards import fixed_placements, placed, priced
from shardcore.step.kinds import run_of, shards_on
from shardcore.step.memory import held_bytes
from shardcore.step.memory_account import Sums, sums_of

_ON_HOST = Sums._fields.index("on_host")
"""The column of ShardCostCache.sums with bytes in host memory."""


class PlacementState:
    """Strips of a cache on devices, with the memory and cost that follow.

    A shard is a strip and a number of units (see ShardCostCache).
    Methods take one shard for each plan of the batch.
    `strip`, `units` and `device` are integers, or arrays that broadcast to [...].

    held: [..., S, D] units of each strip on each device.
    load: [..., D, P + C] bytes of the shards in each phase of a step (step/memory_account.py), and counts of
        their caches (memory.Caches).
    used: [..., D] sum of the peak memory of the shards, in bytes. At least the device's own peak.
    outputs: [..., D, K] bytes of outputs of each run (cache.runs_of_plan), `fixed_placements` included.
    id_bytes: [..., D, K] bytes of ids and lengths that devices receive for each run.
    sums: [..., D, K, F] summed encodings, which the model's head reads.
    op_ms: [..., D, K] cost of the fused ops, at speed 1.
    free: [D] bytes that a local batch leaves.
    priced: whether to keep sums and op_ms. Without them there is no cost.

    keys: [..., N, 2] all shards that will be placed. The memory of the local batch depends on them.

    Private:

    _cut: [..., K] strips of each kind that are cut by columns. Kinds with any have more buffers.
    _ids: [...] bytes that the ids of a local batch take beyond one copy for each strip.
    _on_host: [..., D] bytes of each device's shards in the memory of its host.
    _coefficients: [K, F of memory_account, P] bytes in a phase for each of a shard's sums.
    _known: [R, P + C] bytes and counts of each shard of the cache, as far as they were needed.
    """

    def __init__(
        self, cache: ShardCostCache, keys: ArrayLike, batch: tuple[int, ...] = (), priced: bool = True
    ) -> None:
        n_devices = len(cache.speed)
        self.cache, problem = cache, cache.problem
        self.held = np.zeros((*batch, len(cache), n_devices), dtype=np.int32)
        self.used = np.zeros((*batch, n_devices), dtype=np.int64)
        self.outputs, self.id_bytes = (np.tile(fixed, (*batch, 1, 1)) for fixed in cache.fixed_bytes)
        self.priced = priced
        # No features without a cost: all that follows from `sums` is then empty.
        codes = cache.fixed_codes if priced else np.zeros((*self.outputs.shape[-2:], 0))
        self.sums, op_ms = np.tile(codes, (*batch, 1, 1, 1)), np.zeros(codes.shape[:2])
        if codes.any():
            op_ms = cache.model.head(codes.reshape(-1, codes.shape[-1])).reshape(op_ms.shape)
        self.op_ms = np.tile(op_ms, (*batch, 1, 1))
        # Index arrays of the batch: with a strip and a device for each plan they pick one cell for each.
        self._plans = tuple(np.ogrid[tuple(map(slice, batch))]) if batch else ()

        # The local batch counts every shard from the start, so that a plan never outgrows it later.
        states = np.asarray(keys).reshape(-1, *np.shape(keys)[-2:])  # [states of a batch, N, 2]
        self._account, caches = cache.account, cache.caches
        # Caches have counts of their own, after the phases.
        widened = (0, 0), (0, len(caches))
        fixed = fixed_placements(problem)
        before = np.pad(self._account.loads(fixed), widened)
        for device, run, shard in ((d, run_of(p.kind, s.table), s) for p in fixed for d, s in shards_on(p)):
            before[device, len(self._account.base) :] += caches.total([(run, shard)])
        self.load = np.tile(before, (*batch, 1, 1))

        def of_plans(of_states: np.ndarray) -> np.ndarray:
            """[..., *] of each plan, from [states, *]: plans of a state begin with the same local batch."""
            beyond = of_states.shape[1:]
            shape = (len(states), *(1 for _ in batch[1:]), *beyond) if batch else beyond
            return np.broadcast_to(of_states.reshape(shape), (*batch, *beyond)).copy()

        self._cut = of_plans(cache.cut_strips(states))
        # The ids of a local batch exist once more for each shard but the first of a strip.
        self._ids = of_plans(cache.local_ids[states[..., 0]].sum(1) - cache.local_ids.sum())
        self._coefficients = self._account.coefficients[[self._account.runs[run] for run in cache.kinds]]
        self._known = np.zeros((0, before.shape[1]))
        # Limits of ops, and caches, have no bytes of shards that add up.
        self._always_exact = self._account.phases < before.shape[1]
        # Shards that meet may leave a kind without cut tables, which takes more in some phases.
        most = (self._account.base + (self._cut > 0) @ np.maximum(cache.cut_bytes, 0)).max()
        self.free = np.array(held_bytes(problem)) - math.ceil(most)
        self.used += before[:, : self._account.phases].max(1).astype(np.int64)
        self._on_host = np.zeros((*batch, n_devices))

    @cached_property
    def _same_host(self) -> np.ndarray:
        """[D, D] 1 where two devices are on one host."""
        host = np.array([d.host for d in self.cache.problem.topology.devices])
        return (host[:, None] == host).astype(float)

    def fits(self, strip: Integers, units: Integers) -> np.ndarray:
        """[..., D] bool: devices that may hold the shard and have the memory, in each phase of a step."""
        cache = self.cache
        held = self.held[(*self._plans, strip)]  # [..., D]
        strips, more = np.asarray(strip)[..., None], np.asarray(units)[..., None]
        # Numbers of what each device has of the strip, and would have.
        before, after = cache.numbers(strips, held), cache.numbers(strips, held + more)
        # Shards that meet become one, whose ids of a local batch exist once.
        ids = np.asarray(self._ids)[..., None] - cache.local_ids[strips] * (held > 0)
        becomes_whole = (held > 0) & (held + more == cache.size[strips])
        of_kind = cache.kind[strips][..., None] == np.arange(self._cut.shape[-1])
        cut = self._cut[..., None, :] - becomes_whole[..., None] * of_kind  # [..., D, K]
        # Quick and safe: the sum of the shards' peaks is at least the device's peak.
        # A wider shard shares its rows' optimizer state, so it adds what it has beyond the one before.
        fits = (
            self.used + cache.bytes[after] - cache.bytes[before] + ids * self._account.sent.max() <= self.free
        )
        if not fits.all() or self._always_exact:
            # The sum of peaks was too much, or means nothing: count phase by phase.
            at = np.nonzero(np.ones_like(fits) if self._always_exact else ~fits)
            old, new = (self._vectors(np.broadcast_to(number, fits.shape)[at]) for number in (before, after))
            fits[at] = self._within_limits(self.load[at] + (new - old), cut[at], ids[at], at[-1])
        for *plan, device in np.argwhere(fits & becomes_whole & ((cut == 0) & of_kind).any(-1)):
            # The kind has no cut tables any more, which changes the local batch of all devices.
            loads, at = self.load[(*plan,)], (*plan, device)
            others = np.flatnonzero(loads.any(-1) & (np.arange(len(loads)) != device))
            fits[at] = self._within_limits(loads[others], cut[at], ids[at], others).all()
        if memory := cache.problem.topology.memory:
            # Devices of a host share its memory. The other limits are each device's own.
            more_on_host = cache.sums[after, _ON_HOST] - cache.sums[before, _ON_HOST]
            fits &= self._on_host @ self._same_host + more_on_host <= memory[0].bytes
        return fits & cache.allowed[strip]

    def _within_limits(
        self, load: np.ndarray, cut: np.ndarray, ids: np.ndarray, devices: np.ndarray
    ) -> np.ndarray:
        """[...] bool: loads [..., P + C] that these devices may have. Others as in `_bytes`."""
        return np.asarray((self._bytes(load, cut, ids) <= self._account.limits[devices]).all(-1))

    def _bytes(self, load: np.ndarray, cut: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """[..., P] bytes of devices with loads [..., P + C].

        cut: [..., K] number of cut strips of each kind.
        ids: [...] bytes of ids of a local batch, as they are sent.
        """
        n_limits, n_phases, caches = len(self._account.base), self._account.phases, self.cache.caches
        # A kind's buffers for cut tables exist once, however many of its tables are cut.
        n_bytes = load[..., :n_limits] + self._account.base + (cut > 0) @ self.cache.cut_bytes
        # Counts of caches follow the limits in `load`. Their bytes are there in all phases.
        padding = caches.padding(load[..., n_limits:])[..., None] if len(caches) else 0.0
        n_bytes[..., :n_phases] = np.rint(
            n_bytes[..., :n_phases] + ids[..., None] * self._account.sent[:n_phases] + padding
        )
        return n_bytes

    def _vectors(self, number: np.ndarray) -> np.ndarray:
        """[..., P + C] bytes of the shards of these numbers in each phase, and counts of their caches."""
        # Each shard's vector is computed once, when the cache has new shards.
        known = len(self._known)
        if known < len(self.cache.sums):
            kinds = self.cache.kind[self.cache.strip_of[known:]]
            new = np.einsum("rf,rfp->rp", self.cache.sums[known:], self._coefficients[kinds])
            new = np.pad(new, ((0, 0), (0, len(self.cache.caches))))
            if len(self.cache.caches) or self.cache.problem.bundle_of:
                for i in range(max(known, 1), len(self.cache.sums)):  # number 0 is nothing
                    new[i - known] += self._correction(i)
            self._known = np.concatenate([self._known, new])
        return self._known[number]

    def _correction(self, number: int) -> np.ndarray:
        """[P + C] what a shard's vector has beyond that of its summed bytes in the first table's run.

        Tables of a bundle may run differently. Counts of caches do not follow from sums at all.
        """
        cache, account = self.cache, self._account
        runs = [run for run, _ in cache.parts[cache.strip_of[number]]]
        parts = list(zip(runs, cache.made[number], strict=True))
        # The cache adds up a bundle's sums, as if all its tables ran like the first.
        n_bytes, first = np.zeros(len(account.base)), account.coefficients[account.runs[runs[0]]]
        for run, shard in parts:
            if run is not runs[0]:
                sums = np.array(sums_of(run, shard, cache.problem))
                n_bytes += sums @ (account.coefficients[account.runs[run]] - first)
        return np.append(n_bytes, cache.caches.total(parts))

    def place(self, strip: Integers, units: Integers, device: Integers) -> None:
        """Add a shard. It has to fit: the caller checks."""
        cache = self.cache
        # Index tuples into [..., S, D], [..., D] and [..., D, K].
        at, here = (*self._plans, strip, device), (*self._plans, device)
        of_kind = (*here, cache.kind[strip])
        # Units of the strip on the device, and numbers of the shards that they are.
        held = self.held[at]
        then = held + units
        before, after = cache.numbers(strip, held), cache.numbers(strip, then)
        self.held[at] = then
        # By what the strip's shard becomes: bytes of two parts are more than those of the shard they form.
        self.used[here] += cache.bytes[after] - cache.bytes[before]
        self.load[here] += self._vectors(after) - self._vectors(before)
        self._on_host[here] += cache.sums[after, _ON_HOST] - cache.sums[before, _ON_HOST]
        # Shards that meet become one, and their strip may be whole. Removing a part undoes both.
        kind = *self._plans, cache.kind[strip]
        self._cut[kind] += (held == cache.size[strip]) & (then > 0) & (then < held)
        self._cut[kind] -= (then == cache.size[strip]) & (held > 0) & (held < then)
        self._ids -= cache.local_ids[strip] * ((held > 0) & (then > held))
        self._ids += cache.local_ids[strip] * ((then > 0) & (then < held))
        self.outputs[of_kind] += cache.outputs[after] - cache.outputs[before]
        self.id_bytes[of_kind] += cache.id_bytes[after] - cache.id_bytes[before]
        if not self.priced:
            return
        sums = self.sums[of_kind] + (cache.codes[after] - cache.codes[before])
        # An empty op is exactly 0: adding and subtracting encodings leaves rounding errors.
        sums *= (self.outputs[of_kind] > 0)[..., None]
        self.sums[of_kind] = sums
        self.op_ms[of_kind] = cache.model.head(sums.reshape(-1, sums.shape[-1])).reshape(sums.shape[:-1])

    def remove(self, strip: Integers, units: Integers, device: Integers) -> None:
        """Undo a `place`."""
        self.place(strip, -units, device)

    @property
    def device_ms(self) -> np.ndarray:
        """[..., D] ms of compute, at each device's speed."""
        return self.op_ms.sum(-1) / self.cache.speed

    def cost_ms(self) -> np.ndarray:
        """[...] predicted ms of a step. Equal to price(lower(plan, problem), model).total_ms."""
        fetched_ms = self.cache.fetched_ms(self.sums, self.op_ms)
        return self.cache.total_ms(self.device_ms, self.outputs, self.id_bytes, fetched_ms)

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
        return priced(placed(bundles, devices.tolist(), problem), problem, self.cache.model, **provenance)
