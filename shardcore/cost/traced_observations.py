"""Measured ms of a running job's traced steps, beside a model's predictions.

A rank's step tells its lookups apart: nothing else runs on the device meanwhile. An exchange takes the time
from its last rank's begin to its end: waiting before is no part of it, however long. Where a rank's trace is
missing, that begin is not known, and the exchange tells nothing.

Exchanges that overlap are not told apart. Over one link, two transfers at once take as long as one after the
other. Whose ms those are, no trace shows. What they take *together* is known well.

Shapes: U observed units (a rank in a step), Q quantities.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardcore.cost.model import COMPUTE, LOOKUPS, QUANTITIES, CostModel, PredictedQuantity, price
from shardcore.io.traced_steps import RankStep, TracedStep
from shardcore.step.exchanges import channel_transfer_ms
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

ALL_REDUCE = Channel("all_reduce")
"""The collective that dense gradients travel in, with those of replicas."""
REDUCED = QUANTITIES.index(PredictedQuantity(ALL_REDUCE, "backward"))


class Observations(NamedTuple):
    """Measured and predicted ms, one observation for each rank and traced step.

    measured, predicted: [U, Q]. 0 where a trace does not tell.
    shared: [U, Q] of the measured ms, those in moments that other transfers share.
    together: [U, Q] measured ms of exchanges that share moments, whose sum is known. That of REDUCED has dense
      gradients, too. 0 for others.
    dense: [U] predicted ms of dense gradients.
    """

    measured: np.ndarray
    predicted: np.ndarray
    shared: np.ndarray
    together: np.ndarray
    dense: np.ndarray

    @property
    def is_measured(self) -> np.ndarray:
        """[U, Q] True where a trace measured a quantity that the plan has."""
        return (self.measured > 0) & (self.predicted > 0)

    @property
    def predicted_overlap_ms(self) -> np.ndarray:
        """[U, Q] predicted ms of the collectives that overlapped in a trace."""
        predicted = self.predicted.copy()
        predicted[:, REDUCED] += self.dense
        return np.where(self.together > 0, predicted, 0.0)

    def measured_and_predicted_ms(self, family: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Measured and predicted ms [U, Q + 1] of the quantities that traces tell, of one family or all.

        Exchanges that overlap count together, as the last one.
        """
        of_family = [family in (None, q.family) for q in QUANTITIES]
        alone = np.where(self.shared > 0, 0.0, self.measured * of_family)
        measured = np.column_stack((alone, self.together.sum(1) * (family != COMPUTE)))
        predicted = np.column_stack((self.predicted, self.predicted_overlap_ms.sum(1)))
        return measured, np.where(measured > 0, predicted, 0.0)


def observe_steps(model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]) -> Observations:
    """Measured and predicted ms of each rank in traced steps, under the plans that ran."""
    units = []
    for workload, step in steps:
        of_devices = _predicted_device_ms(model, workload, price(workload, model))
        dense = _all_reduce_ms(model, workload, step) - np.array(of_devices[QUANTITIES[REDUCED]])
        for rank in step.ranks:
            device = workload.topology.ranks[rank.rank]
            predicted = [of_devices[q][device] for q in QUANTITIES]
            measured, shared, together = _measured_rank_ms(rank, workload, device, predicted)
            units.append((measured, predicted, shared, together, max(0.0, dense[device])))
    return Observations(*(np.array(values) for values in zip(*units, strict=True)))


def joined_observations(observed: Sequence[Observations]) -> Observations:
    """Several observations of traced steps as one."""
    return Observations(*(np.concatenate(each) for each in zip(*observed, strict=True)))


# --- predicted ----------------------------------------------------------------------------------------------


def _predicted_device_ms(
    model: CostModel, workload: Workload, cost: Any
) -> dict[PredictedQuantity, Sequence[float]]:
    """Predicted ms of lookups and each collective, by device."""
    exchanged = channel_transfer_ms(model, workload.traffic, np.array(cost.compute_ms), workload.topology)
    idle = np.zeros(len(workload.ops))
    of_devices: dict[PredictedQuantity, Sequence[float]] = {
        PredictedQuantity(None, "forward"): cost.forward_compute_ms,
        PredictedQuantity(None, "backward"): cost.backward_compute_ms,
    }
    for q in QUANTITIES:
        if q.channel:
            of_devices[q] = exchanged.get(q.channel, {}).get(q.direction, idle).tolist()
    # Ids that the dense part hides are no part of what a step takes.
    ids = [q for q in QUANTITIES if q.channel in ID_CHANNELS]
    total_ms = np.sum([of_devices[q] for q in ids], axis=0)
    exposed = cost.input_ms if not workload.job.id_overlap_ms else np.zeros_like(total_ms)
    for q in ids:
        share = np.divide(of_devices[q], total_ms, out=np.zeros_like(total_ms), where=total_ms > 0)
        of_devices[q] = (share * exposed).tolist()
    return of_devices


def _all_reduce_ms(model: CostModel, workload: Workload, step: TracedStep) -> np.ndarray:
    """[D] predicted ms of a traced step's all-reduces: gradients of the dense part and of replicas."""
    traffic = np.zeros((len(CHANNELS), len(workload.ops)))
    traffic[CHANNELS.index(ALL_REDUCE)] = max(_all_reduced_bytes(rank) for rank in step.ranks)
    exchanged = channel_transfer_ms(model, traffic, np.zeros(len(workload.ops)), workload.topology)
    return exchanged[ALL_REDUCE]["backward"]


# --- measured -----------------------------------------------------------------------------------------------

_HIDDEN_MS = 1e-3
"""Least ms of an exchange that ran: one that is hidden as a whole was measured, too."""
_MOST_FOREIGN = 0.5
"""Share of the ms of overlapping exchanges, up to which transfers that no plan has may share moments with them."""
RUN_AS = {
    ("all_to_all", "outputs"): ("all_to_all", "forward"),
    ("all_to_all", "gradients"): ("all_to_all", "backward"),
    ("reduce_scatter", "outputs"): ("reduce_scatter", "forward"),
    ("all_gather", "gradients"): ("reduce_scatter", "backward"),
    ("all_reduce", "reduce"): ("all_reduce", "backward"),
}
"""Collective and direction of a channel, by the collective of a trace and its role."""
_REDUCE = RUN_AS["all_reduce", "reduce"]
_IDS = ("ids", "")
_KEYS = tuple(
    _IDS if q.channel in ID_CHANNELS else (q.channel.collective if q.channel else COMPUTE, q.direction)
    for q in QUANTITIES
)
"""For each of QUANTITIES, the collective and direction that a trace has. Those of one key share its ms as predicted."""


def _all_reduced_bytes(rank: RankStep) -> int:
    return sum(x.n_bytes for x in rank.exchanges if x.role == "reduce")


def _measured_rank_ms(
    rank: RankStep, workload: Workload, device: int, predicted: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[Q] a rank's measured ms, those that overlap, and those known only as a sum (see Observations).

    Work that splits and joins what travels counts in the exchange, in proportion to the ms.
    """
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    shared: dict[tuple[str, str], float] = defaultdict(float)
    for x in rank.exchanges:
        if x.is_aligned:
            key = RUN_AS.get((x.collective, x.role), (x.role, ""))
            exposed[key] += max(_HIDDEN_MS, x.exposed_ms)
            shared[key] += x.shared_ms
    for direction, part in (("forward", "outputs"), ("backward", "gradients")):
        keys = [key for key in exposed if key[1] == direction and key != _REDUCE]
        total = sum(exposed[key] for key in keys)
        for key in keys:
            exposed[key] += exposed[key] / total * rank.ms.get(part, 0.0)
    replicas = float(
        workload.traffic[[c.collective == "all_reduce" for c in workload.channels], device].sum()
    )
    reduced = _all_reduced_bytes(rank)
    # The gradients of the dense part travel in the same all-reduces.
    of_replicas = min(1.0, replicas / reduced) if reduced else 0.0
    exposed[_IDS] = (rank.ms.get("ids", 0.0) + rank.ms.get("ids_transfer", 0.0)) * all(
        x.is_aligned for x in rank.exchanges if x.role == "ids"
    )
    # Ops without ids take time, which tells nothing of those with some.
    has_ids = any(shard.table.pooling for op in workload.ops[device] for shard in op.shards)
    for q in LOOKUPS:
        exposed[COMPUTE, q.direction] = has_ids * rank.ms.get(f"lookup_{q.direction}", 0.0)
    of_key: dict[tuple[str, str], float] = defaultdict(float)
    for key, ms in zip(_KEYS, predicted, strict=True):
        of_key[key] += ms
    share = np.array(
        [
            ms / of_key[key] * (of_replicas if key == _REDUCE else 1.0) if ms else 0.0
            for key, ms in zip(_KEYS, predicted, strict=True)
        ]
    )
    measured, shared_ms = (np.array([of[key] for key in _KEYS]) * share for of in (exposed, shared))
    together = np.where(shared_ms > 0, measured, 0.0)
    dense_ms = 0.0
    if reduced and shared[_REDUCE]:
        together[REDUCED] = exposed[_REDUCE]
        dense_ms = shared[_REDUCE] - shared_ms[REDUCED]
    foreign_ms = sum(x.shared_ms for x in rank.exchanges) - shared_ms.sum() - dense_ms
    if foreign_ms > _MOST_FOREIGN * together.sum():
        together = np.zeros_like(together)
    return measured, shared_ms, together
