"""Rollouts: plans that a policy makes, many at once.

Shards are placed by falling predicted cost (see lockstep). Each goes to the legal device with the highest score.
Noise on the scores makes a random plan of the policy's softmax instead (the Gumbel-max trick).

Shapes: C states searched at once, K plans of each, N shards, D devices, L latents, R numbers of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.learned.nets import PARTS, Net, PolicyInputs, Weights, shard_features
from shardcore.search.lockstep import PlacedPlans, PlanBatch, place_in_order
from shardcore.step.engine.arrays import FREE
from shardcore.step.options import ShardOptions

_EQUAL = 1e-5
"""Relative difference below which scores are equal: they are float32."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """Plans, and the inputs of the policy at each shard. Shards are in the order of placing.

    placed: the plans.
    used: [C, K, N, D] share of the devices' memory before.
    costs: [C, K, N, D, PARTS] ms before, if the policy asks the cost model.
    before, after: [C, K, N] the cache's number of what the device held of the shard's item.
    latents: [C, K, D, L] of the devices in the end.
    """

    placed: PlacedPlans
    used: np.ndarray
    costs: np.ndarray | None
    before: np.ndarray
    after: np.ndarray
    latents: np.ndarray


@dataclass
class Rollouts:
    """An inner search (see beam.InnerSearch) by a policy.

    net: the policy's networks.
    weights: their weights.
    plans: plans of each state.
    rng: makes them random, for training. None: each shard goes where the score is highest.
    """

    net: Net
    weights: Weights
    plans: int = 1
    rng: np.random.Generator | None = None
    _known: tuple[ShardOptions, np.ndarray] | None = None

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> PlacedPlans:
        with np.errstate(over="ignore", invalid="ignore"):  # weights from a file may be anything
            return self.roll_out(space, keys).placed

    def roll_out(self, space: SearchSpace, keys: np.ndarray) -> Rollout:
        """Plans that the policy makes of states with keys [C, N, 2], with the policy's inputs at each shard."""
        cache = space.cache
        latents = self.latents_of_cached_shards(cache)  # [R, L]
        shape = len(keys), self.plans, keys.shape[1], len(cache.speed)
        noise = np.zeros(shape) if self.rng is None else self.rng.gumbel(size=shape)
        sums = np.zeros((*shape[:2], shape[3], latents.shape[1]), np.float32)  # [C, K, D, L]
        speed = cache.speed.astype(np.float32)[:, None]  # [D, 1]
        used = np.zeros(shape, np.float32)
        costs = np.zeros((*shape, PARTS), np.float32) if self.net.asks_model else None
        before, after = np.zeros((2, *shape[:3]), np.int64)
        at = np.ogrid[: shape[0], : shape[1]]
        memory = np.maximum(space.fixed.devices[:, FREE], 1)  # a device may have none at all

        def device_scores(batch: PlanBatch, keys: np.ndarray, devices: np.ndarray) -> Iterator[np.ndarray]:
            """Scores of devices for each shard, as a lockstep.Scorer."""
            context = self.net.next_shard_contexts(
                self.weights, latents[cache.option_numbers(keys[..., 0], keys[..., 1])]
            )
            for i in range(shape[2]):
                used[:, :, i] = batch.used_bytes / memory
                if costs is not None:
                    costs[:, :, i] = batch.device_part_ms()
                inputs = PolicyInputs(
                    sums / speed,
                    used[:, :, i],
                    None if costs is None else costs[:, :, i],
                    None if context is None else context[:, None, i],
                )
                yield -(np.nan_to_num(self.net.device_scores(self.weights, inputs)) + noise[:, :, i])
                item, blocks, device = keys[:, i, 0][:, None], keys[:, i, 1][:, None], devices[:, :, i]
                held = batch.held_blocks[(*at, item, device)]
                before[:, :, i], after[:, :, i] = (
                    cache.option_numbers(item, held - blocks),
                    cache.option_numbers(item, held),
                )
                # Parts of an item that meet become one shard, so its latent replaces that of the part.
                sums[(*at, device)] += latents[after[:, :, i]] - latents[before[:, :, i]]

        numbers = cache.option_numbers(keys[..., 0], keys[..., 1])
        single = (
            cache.single_op_ms[numbers]
            if self.net.asks_model
            else np.nan_to_num(self.net.single_shard_cost(self.weights, latents[numbers]))
        )
        placed = place_in_order(space, keys, single, self.plans, device_scores, _EQUAL)
        return Rollout(placed, used, costs, before, after, sums / speed)

    def latents_of_cached_shards(self, cache: ShardOptions) -> np.ndarray:
        """[R, L] latents of all shards in an options cache. A bundle has the sum of its shards' latents."""
        if self._known is None or self._known[0] is not cache or len(self._known[1]) < len(cache.made):
            shards = [s for bundle in cache.made for s in bundle]
            rows = self.net.shard_latents(self.weights, shard_features(shards, cache.problem.global_batch))
            latents = np.add.reduceat(rows, np.cumsum([0, *map(len, cache.made[:-1])]))
            latents[0] = 0  # number 0 is nothing
            self._known = cache, latents
        return self._known[1]
