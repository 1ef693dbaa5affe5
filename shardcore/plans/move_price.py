"""Price of moving a running job from one plan to another: bytes on each level of links, and the pause.

A device takes each of its new cells from a device that had it, with the state of its optimizer. Training
stands still meanwhile. All levels of links carry their bytes at once, each as fast as its busiest device:

    pause = overhead + max over levels of (bytes of the busiest device / GB/s of a device)

The rates are the cost model's, of its exchanges. The overhead (building shards, copies within a device,
digests) is not in any cost model: it is what an earlier move of the job reported (`reshard`).

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.links import LEVELS
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.step.kinds import CHANNELS, Channel, layout_of, shards_on
from shardcore.step.memory import gib

_PROBE_BYTES = 1 << 26
"""Bytes of a device in the exchanges that give the rates."""


@dataclass(frozen=True)
class MovePrice:
    """Price of a move.

    bytes: weights and optimizer state that move, by level of links.
    busiest_bytes: those that the busiest device sends, or receives.
    seconds: of these at the level's rate.
    overhead_s: seconds beside them.
    """

    bytes: Mapping[str, int]
    busiest_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    overhead_s: float = 0.0

    @property
    def pause_s(self) -> float:
        return self.overhead_s + max(self.seconds.values(), default=0.0)

    def pays_back_s(self, before_ms: float, now_ms: float) -> float:
        """Seconds after which the job has done as many steps as without the move. Infinite without a gain.

        The new plan has done (t - pause) / now steps by then, the old one t / before.
        """
        if not sum(self.bytes.values()):
            return 0.0
        return self.pause_s * before_ms / (before_ms - now_ms) if before_ms > now_ms else inf

    def document(self) -> dict[str, Any]:
        """The price as JSON, for a plan's provenance."""
        return {**asdict(self), "pause_s": self.pause_s}

    def __str__(self) -> str:
        ways = [f"{gib(n)} {LEVELS[level].words}" for level, n in self.bytes.items() if n]
        return f"the move takes {self.pause_s:.3g} s ({', '.join(ways) or 'nothing on links'}, with optimizer state)"


def price_move(
    old: Plan, new: Plan, problem: Problem, model: CostModel, overhead_s: float = 0.0
) -> MovePrice:
    """The price of a move between two plans of a problem. New tables, rows and columns cost nothing."""
    topology = problem.topology
    sent = moved_bytes(old, new, problem)
    gbps = link_gbps(model, topology)
    total, busiest, seconds = {}, {}, {}
    for level, mask in _levels(topology).items():
        of_level = np.where(mask, sent, 0)
        total[level] = int(of_level.sum())
        busiest[level] = int(max(of_level.sum(0).max(), of_level.sum(1).max()))
        seconds[level] = busiest[level] / (gbps[level] * 1e9) if busiest[level] else 0.0
    return MovePrice(total, busiest, seconds, overhead_s)


def moved_bytes(old: Plan, new: Plan, problem: Problem) -> np.ndarray:
    """[D, D] bytes of weights and optimizer state that device i sends to device j."""
    n, before = len(problem.topology), old.by_table()
    sent = np.zeros((n, n), dtype=np.int64)
    states = OPTIMIZERS[problem.optimizer]
    for name, now in new.by_table().items():
        if before.get(name) == now:
            continue
        sources = defaultdict[int, list[Shard]](list)
        replicas = False
        for placement in before.get(name, ()):
            replicas |= layout_of(placement.kind).dense_gradient
            for device, shard in shards_on(placement):
                if device < n:  # others are gone
                    sources[device].append(shard)
        if replicas:  # each device has all rows
            continue
        for placement in now:
            for device, shard in shards_on(placement):
                for source, shards in sources.items():
                    for had in shards:
                        sent[source, device] += _bytes(shard, had, states) * (source != device)
    return sent


def _bytes(a: Shard, b: Shard, states: Any) -> int:
    """Bytes of the cells of both shards, with their state."""
    rows = min(a.row_hi, b.row_hi) - max(a.row_lo, b.row_lo)
    columns = min(a.col_hi, b.col_hi) - max(a.col_lo, b.col_lo)
    if rows <= 0 or columns <= 0:
        return 0
    weights = Shard(a.table, 0, rows, 0, columns).bytes
    return weights + rows * columns * states.state_bytes("cell") + rows * states.state_bytes("row")


def _levels(topology: Topology) -> dict[str, np.ndarray]:
    """[D, D] by level: True where it joins two devices."""
    hosts = [d.host for d in topology.devices]
    masks, joined = {}, np.eye(len(hosts), dtype=bool)
    for level in LEVELS.values():
        units = np.array([level.unit(h) for h in hosts])
        together = units[:, None] == units[None, :]
        masks[level.name] = together & ~joined
        joined |= together
    return masks


def link_gbps(model: CostModel, topology: Topology) -> dict[str, float]:
    """GB/s of a device on each level, as a cost model prices large exchanges of outputs.

    Of the innermost level it is the rate among devices of one host. Of each further one it is the rate of
    what crosses it in an exchange among all.
    """
    masks = _levels(topology)
    gbps: dict[str, float] = {}
    for level in LEVELS.values():
        # Devices that this level and those within it join.
        unit = level.unit(topology.devices[0].host)
        members = [d for d in topology.devices if level.unit(d.host) == unit]
        n = len(members)
        if n < 2 or not masks[level.name].any():
            continue
        part = replace(topology, devices=tuple(members))
        ms = np.diff([_exchange_ms(model, part, k * _PROBE_BYTES) for k in (1, 2)])[0]
        crossing = _levels(part)[level.name][0].sum() / n
        gbps[level.name] = _PROBE_BYTES * crossing / max(ms, 1e-9) / 1e6
    # A level that no exchange crosses is as fast as the next one out.
    known = list(gbps.values()) or [inf]
    return {name: gbps.get(name, known[-1]) for name in LEVELS}


def _exchange_ms(model: CostModel, topology: Topology, n_bytes: int) -> float:
    """Ms of an all-to-all in which each device has n_bytes of outputs."""
    traffic = np.zeros((len(CHANNELS), len(topology)))
    traffic[CHANNELS.index(Channel("all_to_all"))] = n_bytes
    cost = model.comm(traffic, np.zeros(len(topology)), topology)
    return float(np.max(cost.forward_ms))
