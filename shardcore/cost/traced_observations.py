"""ms that traced steps of a running job measured, and those that a model predicts.

A rank's step tells its lookups apart: nothing else runs on the device meanwhile. It does not tell exchanges
apart where they overlap. Over one link, two transfers at once take as long as one after the other. Whose ms
those are, no trace shows. Nor does it show who is waited for: a rank whose data came early waits in its next
collective for those whose data came late. What all exchanges and the waiting take *together* is known well in
both cases.

Shapes: U observed units (a rank in a step), Q quantities.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.cost.composite import Composite
from shardcore.cost.model import CostModel, price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile_model import ProfileModel
from shardcore.io.traced_steps import RankStep, TracedStep
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

COMPUTE, EXCHANGE = "lookups", "exchanges"
"""Families of quantities."""


@dataclass(frozen=True)
class Quantity:
    """One measured quantity of a step.

    channel: channel of an exchange. None: the quantity is of lookups.
    way: "forward" or "backward".
    """

    channel: Channel | None
    way: str

    @property
    def family(self) -> str:
        return COMPUTE if self.channel is None else EXCHANGE

    @property
    def words(self) -> str:
        return f"{self.channel.words if self.channel else 'lookups'} {self.way}"


LOOKUPS = tuple(Quantity(None, way) for way in ("forward", "backward"))
QUANTITIES = (
    *LOOKUPS,
    *(Quantity(channel, way) for channel in CHANNELS for way in channel.row.ways),
)
_FIRST_EXCHANGE = len(LOOKUPS)
ALL_REDUCE = Channel("all_reduce")
"""The collective that dense gradients travel in, with those of replicas."""
REDUCED = QUANTITIES.index(Quantity(ALL_REDUCE, "backward"))
MOST_UNCLEAR = 0.5
"""An exchange is clear whose unclear share is below this."""


class Observations(NamedTuple):
    """Measured and predicted ms of units.

    measured, predicted: [U, Q]. 0 where a trace does not tell.
    unclear: [U, Q] share of the measured ms that other transfers, or waiting, may have taken.
    together: [U] measured ms of all exchanges, and of waiting. 0 where a trace does not tell.
    dense: [U] predicted ms of dense gradients, which are in `together`.
    waiting: [U] predicted ms of waiting.
    """

    measured: np.ndarray
    predicted: np.ndarray
    unclear: np.ndarray
    together: np.ndarray
    dense: np.ndarray
    waiting: np.ndarray

    @property
    def known(self) -> np.ndarray:
        """[U, Q] True where a trace tells a quantity, and the plan has it."""
        return (self.measured > 0) & (self.predicted > 0)

    @property
    def predicted_together(self) -> np.ndarray:
        """[U] predicted ms of `together`."""
        return self.predicted[:, _FIRST_EXCHANGE:].sum(1) + self.dense + self.waiting

    def comparable(self, family: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Measured and predicted ms [U, K] of what units tell (of a family).

        Exchanges that are not clear count together, with waiting.
        """
        lookups = [(self.measured[:, :_FIRST_EXCHANGE], self.predicted[:, :_FIRST_EXCHANGE])]
        measured, predicted = self.measured[:, _FIRST_EXCHANGE:], self.predicted[:, _FIRST_EXCHANGE:]
        clear = (self.unclear[:, _FIRST_EXCHANGE:] < MOST_UNCLEAR) | (self.together[:, None] <= 0)
        others = np.maximum(self.together - (clear * measured).sum(1), 0.0)
        others_predicted = self.predicted_together - (clear * predicted).sum(1)
        exchanges = [(clear * measured, predicted), (others[:, None], others_predicted[:, None])]
        kept = {COMPUTE: lookups, EXCHANGE: exchanges, None: lookups + exchanges}[family]
        measured, predicted = (np.concatenate(each, axis=1) for each in zip(*kept, strict=True))
        return measured, np.where(measured > 0, predicted, 0.0)


def observations(model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]) -> Observations:
    """ms of the ranks of steps, under the plans that ran."""
    units = []
    for workload, step in steps:
        cost = price(workload, model)
        of_devices = _predicted(model, workload, cost)
        dense = _dense_ms(model, workload, step) - np.array(of_devices[QUANTITIES[REDUCED]])
        for rank in step.ranks:
            device = workload.topology.ranks[rank.rank]
            predicted = [of_devices[q][device] for q in QUANTITIES]
            measured, unclear, together = _measured(rank, workload, device, predicted)
            units.append(
                (measured, predicted, unclear, together, max(0.0, dense[device]), cost.waiting_ms[device])
            )
    return Observations(*(np.array(values) for values in zip(*units, strict=True)))


def joined(observed: Sequence[Observations]) -> Observations:
    """The units of several observations."""
    return Observations(*(np.concatenate(each) for each in zip(*observed, strict=True)))


# --- predicted ----------------------------------------------------------------------------------------------


def _predicted(model: CostModel, workload: Workload, cost: Any) -> dict[Quantity, Sequence[float]]:
    """ms of each device by quantity. cost: of the workload, as `price` gives it."""
    collectives = exchange_model(model).collectives(
        workload.traffic, np.array(cost.compute_ms), workload.topology
    )
    idle = (np.zeros(len(workload.ops)),) * 2
    of_devices: dict[Quantity, Sequence[float]] = {
        Quantity(None, "forward"): cost.forward_compute_ms,
        Quantity(None, "backward"): cost.backward_compute_ms,
    }
    for q in QUANTITIES:
        if q.channel:
            of_devices[q] = collectives.get(q.channel, idle)[("forward", "backward").index(q.way)].tolist()
    # Ids that the dense part hides are no part of what a step takes.
    ids = [q for q in QUANTITIES if q.channel in ID_CHANNELS]
    total_ms = np.sum([of_devices[q] for q in ids], axis=0)
    exposed = cost.input_ms if not workload.job.hides_ids_ms else np.zeros_like(total_ms)
    for q in ids:
        share = np.divide(of_devices[q], total_ms, out=np.zeros_like(total_ms), where=total_ms > 0)
        of_devices[q] = (share * exposed).tolist()
    return of_devices


def _dense_ms(model: CostModel, workload: Workload, step: TracedStep) -> np.ndarray:
    """[D] predicted ms of the all-reduces of a step: dense gradients, and those of replicas."""
    traffic = np.zeros((len(CHANNELS), len(workload.ops)))
    traffic[CHANNELS.index(ALL_REDUCE)] = max(_reduced_bytes(rank) for rank in step.ranks)
    both = exchange_model(model).collectives(traffic, np.zeros(len(workload.ops)), workload.topology)
    return both[ALL_REDUCE][1] if ALL_REDUCE in both else np.zeros(len(workload.ops))


def exchange_model(model: Any) -> NeuralModel | ProfileModel:
    """The model that prices exchanges."""
    one = model.exchange_model if isinstance(model, Composite) else model
    if not isinstance(one, NeuralModel | ProfileModel):
        raise ShardCoreError(f"model is a {type(model).__name__}; traces correct trained models and profiles")
    return one


# --- measured -----------------------------------------------------------------------------------------------

_HIDDEN_MS = 1e-3
"""Least ms of an exchange that ran: one that is hidden as a whole was measured, too."""
RUN_AS = {
    ("all_to_all", "outputs"): ("all_to_all", "forward"),
    ("all_to_all", "gradients"): ("all_to_all", "backward"),
    ("reduce_scatter", "outputs"): ("reduce_scatter", "forward"),
    ("all_gather", "gradients"): ("reduce_scatter", "backward"),
    ("all_reduce", "reduce"): ("all_reduce", "backward"),
}
"""Collective and direction of a channel, by the collective of a trace and its role."""


def _reduced_bytes(rank: RankStep) -> int:
    return sum(x.n_bytes for x in rank.exchanges if x.role == "reduce")


def _measured(
    rank: RankStep, workload: Workload, device: int, predicted: Sequence[float]
) -> tuple[list[float], list[float], float]:
    """ms of a rank by quantity, their unclear shares, and ms of all exchanges. 0 where a trace does not tell.

    Work that splits and joins what travels counts in the exchange, in proportion to the ms. Of two kinds of
    ids, a trace tells the sum; each has the share that is predicted.
    """
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    shared: dict[tuple[str, str], float] = defaultdict(float)
    for x in rank.exchanges:
        if key := RUN_AS.get((x.collective, x.role)):
            exposed[key] += max(_HIDDEN_MS, x.exposed_ms)
            shared[key] += x.shared_ms
    for way, part in (("forward", "outputs"), ("backward", "gradients")):
        keys = [key for key in exposed if key[1] == way and key[0] != "all_reduce"]
        total = sum(exposed[key] for key in keys)
        for key in keys:
            exposed[key] += exposed[key] / total * rank.ms.get(part, 0.0)
    replicas = float(
        workload.traffic[[c.collective == "all_reduce" for c in workload.channels], device].sum()
    )
    reduced = _reduced_bytes(rank)
    # The gradients of the dense part travel in the same all-reduces.
    of_replicas = min(1.0, replicas / reduced) if reduced else 0.0
    of_ids = sum(ms for q, ms in zip(QUANTITIES, predicted, strict=True) if q.channel in ID_CHANNELS)
    ids_ms = rank.ms.get("ids", 0.0) + rank.ms.get("ids_transfer", 0.0)
    ids_shared = sum(x.shared_ms for x in rank.exchanges if x.role == "ids")
    measured, unclear = [], []
    for q, ms in zip(QUANTITIES, predicted, strict=True):
        took_ms, shared_ms = 0.0, 0.0
        if q.channel is None:
            took_ms = rank.ms.get(f"lookup_{q.way}", 0.0)
        elif q.channel in ID_CHANNELS:
            share = ms / of_ids if of_ids else 0.0
            took_ms, shared_ms = ids_ms * share, ids_shared * share
        elif workload.traffic[[q.channel == c for c in workload.channels]].any():
            key = (q.channel.collective, q.way)
            share = of_replicas if q.channel.collective == "all_reduce" else 1.0
            took_ms, shared_ms = exposed[key] * share, shared[key] * share
        measured.append(took_ms)
        unclear.append(shared_ms / took_ms if took_ms else 0.0)
    together = _together_ms(rank, bool(of_ids), bool(reduced))
    ran = [q.channel is not None and ms > 0 for q, ms in zip(QUANTITIES, predicted, strict=True)]
    if together <= 0 or any(r and not took_ms for r, took_ms in zip(ran, measured, strict=True)):
        return measured, unclear, 0.0  # the sum would lack what the trace does not show
    waiting = rank.ms.get("waiting", 0.0) / together
    return measured, [share + waiting * r for share, r in zip(unclear, ran, strict=True)], together


def _together_ms(rank: RankStep, with_ids: bool, with_reduced: bool) -> float:
    """ms of exchanges that nothing hides, with their work, and of waiting.

    with_ids: True if the dense part does not hide ids.
    with_reduced: True if the trace has the bytes of all-reduces, so that they are predicted.
    """
    parts = ["outputs", "outputs_transfer", "gradients", "gradients_transfer", "waiting"]
    parts += ["ids", "ids_transfer"] * with_ids + ["reduce_transfer"] * with_reduced
    return sum(rank.ms.get(part, 0.0) for part in parts)
