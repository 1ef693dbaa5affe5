"""Rollouts: plans that a policy makes, many at once.

Shards are placed in the order of their predicted cost; those with least freedom go first.
Each goes to the legal device with the highest score.
Noise on the scores makes a random plan of the policy's softmax instead (the Gumbel-max trick).

Shapes: C states searched at once, K plans of each, N shards, D devices, L latents, R numbers of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcore.cost.model import is_least
from shardcore.search.anneal.batch import PlanBatch
from shardcore.search.anneal.compiled.arrays import FREE
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.beam import Placed
from shardcore.search.learned.nets import PARTS, Net, PolicyInputs, Weights, features
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.ties import ranks

_EQUAL = 1e-5
"""Relative difference below which scores are equal: they are float32."""


@dataclass(frozen=True, eq=False)
class Rollout(Placed):
    """Plans, and the inputs of the policy at each shard. Shards are in the order of placing.

    order: [C, N] the shard that came at each step.
    legal: [C, K, N, D] devices that might have the shard.
    used: [C, K, N, D] share of their memory before.
    costs: [C, K, N, D, PARTS] ms before, if the policy asks the cost model.
    latents: [C, K, D, L] of the devices in the end.
    parts_ms: [C, K, D, PARTS] of the devices in the end; 0 if the rollout is not priced.
    before, after: [C, K, N] the cache's number of what the device held of the shard's strip.
    """

    order: np.ndarray
    legal: np.ndarray
    used: np.ndarray
    costs: np.ndarray | None
    latents: np.ndarray
    parts_ms: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def held(self, n_numbers: int) -> np.ndarray:
        """[K, N + 1, D, R] float32: 1 for what devices hold before each shard, and in the end.

        The plans of the first state. Number 0, which is nothing, has no meaning here.
        """
        _, n_plans, n, n_devices = self.legal.shape
        held = np.zeros((n_plans, n + 1, n_devices, n_numbers), np.float32)
        plan, step = np.ogrid[:n_plans, :n]
        # A step replaces the strip's number on one device. Sums over steps tell what is held.
        held[plan, step + 1, self.devices[0], self.before[0]] -= 1
        held[plan, step + 1, self.devices[0], self.after[0]] += 1
        return np.cumsum(held, axis=1, out=held)


@dataclass
class Rollouts:
    """An inner search (see beam.InnerSearch) by a policy.

    net: the policy's networks.
    weights: their weights.
    plans: plans of each state. The first takes the highest scores.
    rng: makes the others random. None: there are no others.
    greedy_first: False if the first is random, too.
    priced: False leaves the plans' costs unknown; 0 then stands for a plan that fits.
    """

    net: Net
    weights: Weights
    plans: int = 1
    rng: np.random.Generator | None = None
    greedy_first: bool = True
    priced: bool = True
    _known: tuple[ShardCostCache, np.ndarray] | None = None

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> Placed:
        with np.errstate(over="ignore", invalid="ignore"):  # weights from a file may be anything
            rollout = self.run(space, keys)
        return rollout.reordered(rollout.order)

    def run(self, space: SearchSpace, keys: np.ndarray) -> Rollout:
        """Plans of the states keys [C, N, 2]."""
        cache = space.cache
        latents = self.latents_of(cache)  # [R, L]
        order = self._order(cache, keys, latents)
        keys = np.take_along_axis(keys, order[..., None], 1)
        (n_states, n, _), n_devices = keys.shape, len(cache.speed)
        context = self.net.context(self.weights, latents[cache.numbers(keys[..., 0], keys[..., 1])])
        batch = PlanBatch(space, keys, self.plans)
        noise = self._noise((n_states, self.plans, n, n_devices))
        sums = np.zeros((n_states, self.plans, n_devices, latents.shape[1]), np.float32)
        speed = cache.speed.astype(np.float32)[:, None]  # [D, 1]
        legal, used = np.zeros(noise.shape, bool), np.zeros(noise.shape, np.float32)
        costs = np.zeros((*noise.shape, PARTS), np.float32) if self.net.asks_model else None
        devices, before, after = (np.zeros(noise.shape[:-1], np.int64) for _ in range(3))
        at = np.ogrid[:n_states, : self.plans]
        memory = np.maximum(space.fixed.devices[:, FREE], 1)  # a device may have none at all

        for i in range(n):
            strip, units = keys[:, i, 0][:, None], keys[:, i, 1][:, None]  # [C, 1]
            legal[:, :, i], used[:, :, i] = batch.fits(strip, units), batch.used_bytes / memory
            if costs is not None:
                costs[:, :, i] = batch.parts_ms()
            inputs = PolicyInputs(
                sums / speed,
                used[:, :, i],
                None if costs is None else costs[:, :, i],
                None if context is None else context[:, None, i],
            )
            scores = np.nan_to_num(self.net.scores(self.weights, inputs)) + noise[:, :, i]
            # Where no device is legal, the least used one shows by how much the plan is too large.
            best = is_least(np.where(legal[:, :, i], -scores.astype(float), np.inf), _EQUAL)
            d = np.where(legal[:, :, i].any(-1), best.argmax(-1), batch.used_bytes.argmin(-1))  # [C, K]
            units_before = batch.held[(*at, strip, d)]
            before[:, :, i] = cache.numbers(strip, units_before)
            after[:, :, i] = cache.numbers(strip, units_before + units)
            # Parts of a strip that meet become one shard, so its latent replaces that of the part.
            sums[(*at, d)] += latents[after[:, :, i]] - latents[before[:, :, i]]
            batch.place(strip, units, d)
            devices[:, :, i] = d

        fits = legal.any(-1).all(-1)
        priced = self.priced or self.net.asks_model
        parts_ms = batch.parts_ms() if priced else np.zeros((*sums.shape[:-1], PARTS))
        return Rollout(
            np.where(fits, batch.cost_ms() if self.priced and fits.any() else 0.0, np.inf),
            batch.lack_bytes.sum(-1),
            devices,
            order,
            legal,
            used,
            costs,
            sums / speed,
            parts_ms,
            before,
            after,
        )

    def latents_of(self, cache: ShardCostCache) -> np.ndarray:
        """[R, L] latents of all shards that the cache knows so far. A bundle has the sum of its shards'."""
        kept = [self._known[1]] if self._known and self._known[0] is cache else []
        new = cache.made[sum(map(len, kept)) :]
        if not new and kept:
            return kept[0]
        shards = [s for bundle in new for s in bundle]
        latents = self.net.latents(self.weights, features(shards, cache.problem.global_batch))
        latents = np.add.reduceat(latents, np.cumsum([0, *map(len, new[:-1])]))
        if not kept:
            latents[0] = 0  # number 0 is nothing
        latents = np.concatenate([*kept, latents])
        self._known = cache, latents
        return latents

    def _order(self, cache: ShardCostCache, keys: np.ndarray, latents: np.ndarray) -> np.ndarray:
        """[C, N]: least freedom first, then the highest predicted cost, then the most bytes."""
        numbers = cache.numbers(keys[..., 0], keys[..., 1])
        single = (
            cache.single_ms[numbers]
            if self.net.asks_model
            else self.net.single(self.weights, latents[numbers])
        )
        return np.lexsort((-cache.bytes[numbers], ranks(-np.nan_to_num(single)), cache.freedom[keys[..., 0]]))

    def _noise(self, shape: tuple[int, int, int, int]) -> np.ndarray:
        if self.rng is None:
            return np.zeros(shape, np.float32)
        noise = self.rng.gumbel(size=shape).astype(np.float32)
        if self.greedy_first:
            noise[:, 0] = 0
        return noise
