"""Plans that the CostModel priced, for a cost network to learn from.

Shapes: N shards, F features, D devices of a plan, B of several, L latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcore.search.learned.learner import Prepared
from shardcore.search.learned.rollout import Rollout

KEPT, BATCH = 5_000, 64
"""Plans that a cost network learns from, at most; and those of an update."""


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan that the CostModel priced.

    x: [N, F] features of its shards.
    devices: [N] theirs.
    speed: [D, 1] of the devices.
    parts: [D, PARTS] costs, in units of w["scale_ms"].
    total: of the plan, in the same unit; infinite if it does not fit.
    """

    x: np.ndarray
    devices: np.ndarray
    speed: np.ndarray
    parts: np.ndarray
    total: float

    @classmethod
    def of(cls, prepared: Prepared, rolled: Rollout, scale_ms: np.ndarray) -> PricedPlan:
        """The first plan of a rollout."""
        cache, keys = prepared.cache, prepared.keys[0][rolled.order[0]]
        # Halves of a table may be alike, and may meet on a device.
        units = np.zeros((len(cache), len(cache.speed)), np.int64)
        np.add.at(units, (keys[:, 0], rolled.devices[0, 0]), keys[:, 1])
        strips, devices = np.nonzero(units)
        rows, held = np.nonzero(prepared.bundle[:, None] == cache.numbers(strips, units[strips, devices]))
        return cls(
            prepared.x[rows],
            devices[held],
            cache.speed.astype(np.float32)[:, None],
            (rolled.parts_ms[0, 0] / scale_ms).astype(np.float32),
            float(rolled.total_ms[0, 0] / scale_ms[0]),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """Several plans at once. B devices in all.

    x: [N, F]. device: [N] of each shard. speed: [B, 1]. parts: [B, PARTS]. total: [plans].
    plan, rank: [B] of each device its plan, and its number there.
    """

    x: torch.Tensor
    device: torch.Tensor
    speed: torch.Tensor
    parts: torch.Tensor
    plan: torch.Tensor
    rank: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, plans: Sequence[PricedPlan]) -> Batch:
        sizes = [len(p.speed) for p in plans]
        firsts = np.cumsum([0, *sizes[:-1]])
        joined = [
            np.concatenate(of)
            for of in (
                [p.x for p in plans],
                [p.devices + first for p, first in zip(plans, firsts, strict=True)],
                [p.speed for p in plans],
                [p.parts for p in plans],
            )
        ]
        return cls(
            *map(torch.from_numpy, joined),
            torch.from_numpy(np.repeat(np.arange(len(plans)), sizes)),
            torch.from_numpy(np.concatenate([np.arange(n) for n in sizes])),
            torch.tensor([p.total for p in plans]),
        )

    def sums(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, L] of the devices, from those of the shards [N, L]."""
        zeros = torch.zeros(len(self.speed), latents.shape[1])
        return zeros.index_add(0, self.device, latents) / self.speed

    def by_plan(self, sums: torch.Tensor) -> torch.Tensor:
        """[plans, D, L] sums of devices [B, L]. Plans with fewer devices have zeros, like empty devices."""
        zeros = torch.zeros(len(self.total), int(self.rank.max()) + 1, sums.shape[1])
        return zeros.index_put((self.plan, self.rank), sums)
