"""CostModel: what a search needs of a model. QuantileCostModel: one at a wanted confidence. price: what one
says of a Workload.

Shapes: N shards, F features, G groups, C channels, D devices; ... any leading dimensions, for several plans
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shardcore.topology import Topology
from shardcore.types import Setting, Shard, StepCost
from shardcore.workload import Workload


class CostModel(Protocol):
    """Costs of fused ops and collectives, in ms.

    A group's cost is head(sum of its shards' encodings): a search adds and subtracts rows of F numbers
    instead of running a network over all shards again. All are pure.
    """

    setting: Setting

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, F] float64 encodings of shards in an op over `batch` samples (None: the setting's)."""

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[G] ms, forward + backward, of groups from their summed encodings [G, F]; 0 for an empty group (a
        row of 0)."""

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        """[G] the share of forward in a group's ms. A model that does not tell says 0: the backward kernel is
        the costlier."""

    def compiled(self) -> Compiled:
        """`head` for one group at a time, compiled: for searches that price millions of groups."""

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """Costs of the collectives of traffic [C, ..., D] bytes (layouts.CHANNELS), given each device's
        compute ms [..., D] (the skew with which devices arrive)."""

    @property
    def lower(self) -> BoundableCostModel | None:
        """A model that never costs more, of which lower bounds can be proved: most often itself; None:
        nothing can be."""


class Compiled(NamedTuple):
    """head(sums [F], parameters [P]) -> ms of one group, of numba's type float64(float64[::1], float64[::1]).
    """

    head: Callable[[np.ndarray, np.ndarray], float]
    parameters: np.ndarray


@dataclass(frozen=True, eq=False)
class CommCost:
    """Arrays [..., D] in ms: transfer forward and backward, and what a device waits for the last one before
    the forward exchange."""

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    waiting_ms: np.ndarray

    @property
    def total_ms(self) -> np.ndarray:
        return self.forward_ms + self.backward_ms + self.waiting_ms


class ProbabilisticCostModel(CostModel, Protocol):
    """A CostModel that knows how far measurements lie from its predictions."""

    def compiled(self, level: float | None = None) -> Compiled:
        """`head`, or with a level `quantile`, for one group at a time."""

    def quantile(self, sums: np.ndarray, level: float) -> np.ndarray:
        """[G] ms below which a measurement of the group lies with probability `level`."""

    def is_above_head(self, level: float) -> bool:
        """Whether no quantile of a level lies below `head`."""


class BoundableCostModel(CostModel, Protocol):
    """A CostModel that says enough of itself to prove a lower bound. Nothing gets cheaper as something grows,
    and fusing ops saves their launches at most: head(sum of groups) - launch_ms >= sum of (head(group) -
    launch_ms), for non-empty groups."""

    @property
    def launch_ms(self) -> float: ...

    def rates(self, least: np.ndarray) -> np.ndarray:
        """[F] ms, 0 or more: head(sums) >= launch_ms + rates · sums wherever sums >= least [F]; they do not
        fall as it grows."""

    def takes_all_alike(self, topology: Topology) -> bool:
        """Whether a backward exchange takes all devices the same time."""

    def even_is_least(self, topology: Topology) -> bool:
        """Whether no division of a collective's bytes over the devices makes the exchanges of a step cheaper
        than the even one: forward of the last device, and backward of the devices' mean by speed."""


@dataclass(frozen=True, eq=False)
class QuantileCostModel:
    """A CostModel whose ops cost what `model` says they stay below with probability `confidence`.

    A search that sees it is not drawn to ops on which the model may err. Raises ShardCoreError (when asked)
    for a confidence not within the levels that the model knows."""

    model: ProbabilisticCostModel
    confidence: float

    @property
    def setting(self) -> Setting:
        return self.model.setting

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        return self.model.encode(shards, batch)

    def head(self, sums: np.ndarray) -> np.ndarray:
        return self.model.quantile(sums, self.confidence)

    def compiled(self) -> Compiled:
        return self.model.compiled(self.confidence)

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        return self.model.forward_share(sums)

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        return self.model.comm(traffic, compute_ms, topology)

    @property
    def lower(self) -> BoundableCostModel | None:
        return self.model.lower if self.model.is_above_head(self.confidence) else None


def at_confidence(model: CostModel, confidence: float | None) -> CostModel:
    """`model` itself where no confidence is wanted."""
    return QuantileCostModel(model, confidence) if confidence else model


def group_costs(groups: Sequence[Sequence[Shard]], model: CostModel, batch: int | None = None) -> np.ndarray:
    """[G] ms of groups of shards, each run as one fused op; 0 for an empty group."""
    flat = [s for g in groups for s in g]
    if not flat:
        return np.zeros(len(groups))
    codes = model.encode(flat, batch)
    sums = np.zeros((len(groups), codes.shape[1]))
    np.add.at(sums, np.repeat(np.arange(len(groups)), [len(g) for g in groups]), codes)
    costs = np.asarray(model.head(sums), dtype=float)
    return np.where([len(g) > 0 for g in groups], costs, 0.0)


def price(workload: Workload, model: CostModel) -> StepCost:
    """What `model` predicts that one step of `workload` costs. Compute is divided by a device's speed factor.
    """
    n_devices = len(workload.ops)
    forward, backward = np.zeros(n_devices), np.zeros(n_devices)
    known: dict[int, tuple[float, float]] = {}  # replicas are on all devices, and many: their op is priced once
    for device, ops in enumerate(workload.ops):
        for op in ops:
            if id(op) not in known:
                sums = model.encode(op.shards, op.batch).sum(0, keepdims=True)
                share = float(model.forward_share(sums)[0])
                known[id(op)] = float(model.head(sums)[0]), share
            op_ms, share = known[id(op)]
            cost = op_ms / workload.topology.devices[device].speed
            forward[device] += share * cost
            backward[device] += (1 - share) * cost
    comm = model.comm(workload.traffic, forward + backward, workload.topology)
    return StepCost(*(tuple(map(float, x)) for x in (forward, backward, comm.forward_ms, comm.backward_ms, comm.waiting_ms)))
