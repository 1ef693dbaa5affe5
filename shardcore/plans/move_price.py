"""Price of moving a running job from one plan to another: bytes on each level of links, and the pause.

A device takes each of its new cells from a device that had it, with the state of its optimizer. Training
stands still meanwhile. All levels of links carry their bytes at once, each as fast as its busiest device:

    pause = overhead + max over levels of (bytes of the busiest device / GB/s of a device)

The overhead is what a machine's rates say (cost.move_rates): new shards are built, rows copied within a
device, digests computed. A collection of which one table moves is built anew as a whole. Without these rates the
overhead is 0. Links without a rate there are as fast as the cost model prices exchanges.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from shardcore.core.catalog import OPTIMIZERS, Optimizer
from shardcore.core.links import LEVELS
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.cost.move_rates import MoveRates
from shardcore.plans.diff import common_cells, device_shard_pairs
from shardcore.step.exchange_lines import total_linear_cost
from shardcore.step.kinds import Channel, sharding_kind_by_name, shards_by_device
from shardcore.step.memory import size_text

_LARGE_BYTES, _LEAST_BYTE_MS = 2.0**26, 1e-15
"""Bytes of a device in the exchanges that give the rates."""


@dataclass(frozen=True)
class MovePrice:
    """Price of moving a running job to another plan: bytes, pause and payback time.

    bytes: weights and optimizer state that move, by level of links.
    seconds: time of the busiest device's bytes at the level's rate. {}: no rate is known.
    overhead_s: seconds of all other phases, by phase. {}: no rates are known.
    """

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    overhead_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def pause_s(self) -> float:
        """Seconds that a job stands still while its tables move; 0 if nothing moves."""
        if not sum(self.bytes.values()):
            return 0.0
        return sum(self.overhead_s.values()) + max(self.seconds.values(), default=0.0)

    def payback_s(self, before_ms: float, now_ms: float) -> float:
        """Seconds until the job has done as many steps as without the move. Infinite without a gain.

        The new plan has done (t - pause) / now steps by then, the old one t / before.
        """
        if not sum(self.bytes.values()):
            return 0.0
        return self.pause_s * before_ms / (before_ms - now_ms) if before_ms > now_ms else inf

    def to_json(self) -> dict[str, Any]:
        """Price of a move as JSON, for a plan's provenance."""
        return {**asdict(self), "pause_s": self.pause_s}

    def __str__(self) -> str:
        ways = [f"{size_text(n)} {LEVELS[level].words}" for level, n in self.bytes.items() if n]
        what = f"{', '.join(ways) or 'nothing on links'}, with optimizer state"
        if not self.seconds and not self.overhead_s:
            return f"the move takes {what}; its pause is not known without rates"
        return f"the move takes {self.pause_s:.3g} s ({what})"


def price_move(
    old: Plan, new: Plan, problem: Problem, model: CostModel | None = None, rates: MoveRates | None = None
) -> MovePrice:
    """Price of moving a job between two plans of a problem. New tables, rows and columns are not sent.

    Raises ShardCoreError for links that carry bytes, and that neither the rates nor a model knows.
    """
    topology = problem.topology
    sent, levels = moved_bytes(old, new, problem), _link_levels(topology)
    by_level = {
        level: np.where(levels == k, sent, 0) for k, level in enumerate(LEVELS) if (levels == k).any()
    }
    total = {level: int(of.sum()) for level, of in by_level.items()}
    busiest = {level: int(max(of.sum(0).max(), of.sum(1).max())) for level, of in by_level.items()}
    gbps = link_gbps(model, topology) if model else {}
    gbps |= rates.link_gbps if rates else {}
    # A level without a rate is as fast as the next one out.
    for outer, inner in pairwise([*LEVELS][::-1]):
        if outer in gbps:
            gbps.setdefault(inner, gbps[outer])
    overhead_s = {}
    if rates:
        unknown = [level for level, n_bytes in total.items() if n_bytes and level not in gbps]
        require(
            not unknown,
            f"move rates have no link_gbps of {', '.join(unknown)}, where tables move; measure them over all hosts of "
            "the job, or give a model, too",
        )
        overhead_s = _overhead_s(old, new, problem, rates, sent.sum(0))
    seconds = {level: busiest[level] / (gbps[level] * 1e9) for level in total if level in gbps}
    return MovePrice(total, seconds, overhead_s)


def moved_bytes(old: Plan, new: Plan, problem: Problem) -> np.ndarray:
    """[D, D] bytes of weights and optimizer state that device i sends to device j."""
    n, before = len(problem.topology), old.placements_by_table()
    sent = np.zeros((n, n), dtype=np.int64)
    states = OPTIMIZERS[problem.optimizer]
    for name, now in new.placements_by_table().items():
        was = before.get(name, [])
        # Each device has all rows of a replica.
        if was == now or _has_replica(was):
            continue
        for source, device, cells in common_cells(device_shard_pairs(was), device_shard_pairs(now)):
            # Devices beyond the problem's are gone.
            if source != device and source < n:
                sent[source, device] += _bytes_with_optimizer_state(cells, states)
    return sent


def _overhead_s(
    old: Plan, new: Plan, problem: Problem, rates: MoveRates, received: np.ndarray
) -> dict[str, float]:
    """Seconds of each phase of a move other than transfers over links, of the device that takes longest.

    received: [D] bytes that come over links.
    """
    n, states = len(problem.topology), OPTIMIZERS[problem.optimizer]
    before, now = old.placements_by_table(), new.placements_by_table()
    changed = {t.collection for t in problem.tables if before.get(t.name) != now.get(t.name)}
    names = [t.name for t in problem.tables if t.collection in changed]
    # A shard has a tensor of weights, and one of each state of its optimizer.
    per = states.states
    # Of collections that change: [old or new, D] bytes of shards, and [D] ns of their digests.
    held, digest_ns = np.zeros((2, n)), np.zeros(n)
    for i, plan in enumerate((before, now)):
        for placement in (p for name in names for p in plan.get(name, ())):
            for device, shard in shards_by_device(placement):
                if device < n:
                    held[i, device] += _bytes_with_optimizer_state(shard, states)
                    # Of old replicas one device takes the digest.
                    if i or device == 0 or not _has_replica([placement]):
                        numbers = shard.rows * (shard.width * (1 + per.count("cell")) + per.count("row"))
                        digest_ns[device] += numbers * rates.digest_ns
                        digest_ns[device] += shard.rows * (1 + len(per)) * rates.digest_row_ns
    return {
        "move": rates.move_s,
        "collections": rates.collection_s * len(changed),
        "tables": rates.table_s * len(names),
        "build": held[1].max() / (rates.build_gbps * 1e9),
        "copy": (held[1] - received).max() / (rates.copy_gbps * 1e9),
        "digest": digest_ns.max() / 1e9,
        "free": held[0].max() / (rates.free_gbps * 1e9),
    }


def _has_replica(placements: Iterable[Placement]) -> bool:
    return any(sharding_kind_by_name(p.kind).dense_gradient for p in placements)


def _bytes_with_optimizer_state(shard: Shard, states: Optimizer) -> int:
    """Bytes of a shard's weights and optimizer state."""
    cells = shard.rows * shard.width
    return shard.bytes + cells * states.state_bytes("cell") + shard.rows * states.state_bytes("row")


def _link_levels(topology: Topology) -> np.ndarray:
    """[D, D] number in LEVELS of the innermost link level that joins two devices; -1 for the same device."""
    together = topology.domain_numbers[:, :, None] == topology.domain_numbers[:, None, :]
    return np.where(np.eye(len(topology), dtype=bool), -1, together.argmax(0))


def link_gbps(model: CostModel, topology: Topology) -> dict[str, float]:
    """GB/s of a device on each link level, as a cost model prices large exchanges of outputs.

    Of the innermost level it is the rate among devices of one host. Of each further one it is the rate of
    what crosses it in an exchange among all. Levels that no exchange crosses are left out.
    """
    gbps: dict[str, float] = {}
    levels = _link_levels(topology)
    for k, level in enumerate(LEVELS):
        # Devices that this level and those within it join.
        members = np.flatnonzero(topology.domain_numbers[k] == topology.domain_numbers[k, 0])
        crossing = float(np.mean(levels[0, members] == k))
        if not crossing:
            continue
        part = topology.with_devices([topology.devices[d] for d in members])
        # The slope of an even exchange is a rate without latencies.
        line = total_linear_cost(
            model, {Channel("all_to_all"): 1.0}, part, (_LARGE_BYTES, _LARGE_BYTES), ("forward",)
        )
        gbps[level] = crossing / max(line[:-1].sum(), _LEAST_BYTE_MS) / BYTES_PER_MS_PER_GBPS
    return gbps
