"""NeuroShard's search (MLSys 2023, arXiv 2305.01868): a beam over column cuts (`beam`) around greedy passes.

Inner search: place shards by falling cost, each on the device whose fused cost is lowest.
It respects memory, and a cap on the device's columns: scale × the mean.
One pass is made for each of several scales, and the cheapest plan stays.

Differences to the released code:

- One pass has no cap.
- If no pass fits, states that exceed the memory least come first.
- If none ever fits, a second beam starts from a `packing`.
- States that differ only in the order of their cuts count once.
- Halves that meet on a device count as the one shard that they become.
- Only shards that can be cut take a candidate's place.
- On unequal devices, cost is at the device's speed and includes the shard. On equal ones nothing changes.
- Tables whose narrowest columns fit no device have their rows divided (`beam`).
- Bundles are placed as one. Pinned tables go first, whatever the cap.

Shapes: C states searched at once, N their shards, K passes, D devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np

from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_COUNT, entry_count_within
from shardcore.cost.model import CostModel
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.beam import Beam, BeamConfig
from shardcore.search.budget import Budget
from shardcore.search.lockstep import PlacedPlans, PlanBatch, place_in_order


@dataclass(frozen=True)
class NeuroShardConfig(BeamConfig):
    """Parameters of NeuroShard's beam, and of its greedy passes.

    scales: of each pass the cap on a device's columns, relative to the mean. None: it has no cap.
    """

    scales: Annotated[tuple[float | None, ...], entry_count_within(1, MOST_COUNT)] = (
        *(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5),
        None,
    )


def search_with_neuroshard(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: NeuroShardConfig = NeuroShardConfig(),
) -> Plan:
    """Best plan of NeuroShard's beam search. Deterministic: the seed is only recorded.

    Where a budget in seconds does not suffice for a first search, it is some plan that fits.

    One evaluation is one greedy pass priced. Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    return Beam(problem, model, GreedyGrid(config.scales), config, (budget or Budget()).start()).best_plan(
        algorithm="neuroshard", seed=seed, config=asdict(config)
    )


class GreedyGrid:
    """The inner search: one greedy pass for each cap (see beam.InnerSearch)."""

    def __init__(self, scales: Sequence[float | None]) -> None:
        self.plans = len(scales)
        self._caps = np.array([np.inf if scale is None else scale for scale in scales])

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> PlacedPlans:
        cache = space.cache
        single_ms = cache.single_op_ms[cache.option_numbers(keys[..., 0], keys[..., 1])]
        return place_in_order(space, keys, single_ms, self.plans, self.device_scores)

    def device_scores(self, batch: PlanBatch, keys: np.ndarray, devices: np.ndarray) -> Iterator[np.ndarray]:
        """Scores of devices for each shard, as a lockstep.Scorer: ms of a device with the shard; inf beyond the cap."""
        cache, (n_states, n_shards, _) = batch.space.cache, keys.shape
        n_devices = len(cache.speed)
        # [C, K, D] bytes of outputs, which stand for columns.
        placed = np.zeros((n_states, self.plans, n_devices))
        numbers = cache.option_numbers(keys[..., 0], keys[..., 1])  # [C, N]
        # The small constant absorbs rounding: a cap of exactly the mean has to be reachable.
        cap = (
            cache.output_bytes[numbers].sum(1)[:, None, None] / n_devices * self._caps[:, None] + 1e-9
        )  # [C, K, 1]
        # A cap could leave a pinned table none of its few devices.
        pinned = (cache.freedom < n_devices)[keys[..., 0]]
        for i in range(n_shards):
            outputs = cache.output_bytes[numbers[:, i, None]]  # [C, 1]
            narrow = (placed + outputs[..., None] <= cap) | pinned[:, i, None, None]
            # On equal devices single_ms is the same for all, and the published rule is left.
            single_ms = cache.single_op_ms[numbers[:, i, None, None]] / cache.speed
            yield np.where(narrow, batch.device_ms + single_ms, np.inf)
            placed[(*np.ogrid[:n_states, : self.plans], devices[:, :, i])] += outputs
