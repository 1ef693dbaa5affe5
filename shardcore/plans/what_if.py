"""Moves of single shards to other devices, each priced as the plan after it.

A move changes an op on two devices, the bytes that these enter into exchanges, and their memory. So many moves are
priced in one call, from the sums of the plan.

Only shards of one device move: of kinds that divide rows or replicate them, each device has its share.

Shapes: N shards, K moves, D devices, F numbers of an encoding, R runs, P phases (and limits of ops).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcore.core.types import Problem, Shard, Table
from shardcore.cost.model import CostModel, PricedPlan, step_ms
from shardcore.step.kinds import merged_placements, sharding_kind_by_name
from shardcore.step.lower import traffic_of_outputs
from shardcore.step.memory import memory_account, shard_sums, size_text
from shardcore.tables.host_rows import with_shared_cache_load_factors

BEST, OF_TABLE = 20, 3
"""Number of moves that are kept: of all tables, and of each table."""
_WORK = 1 << 25
"""Entries of arrays of traffic over all moves, about. More moves are priced only if a shard had less than OF_TABLE."""
_AT_ONCE = 1 << 21
"""Entries of the array of traffic of one call."""


@dataclass(frozen=True)
class ChangedDevice:
    """Compute and memory of one device after a hypothetical move.

    busy_ms: compute and exchanges, without waiting and ids.
    used_bytes: memory in its largest phase.
    """

    device: int
    busy_ms: float
    used_bytes: int


@dataclass(frozen=True)
class PricedMove:
    """A hypothetical move of one shard to another device, with its price.

    shard: the shard.
    devices: number of the device before the move, and after it.
    total_ms: time of the step after the move.
    refused: reason why the plan after the move does not fit. "": it fits.
    changed: the two devices, and the device that is ready last after the move.
    last: number of the device that is ready last after the move.
    """

    shard: Shard
    devices: tuple[int, int]
    total_ms: float
    refused: str
    changed: tuple[ChangedDevice, ...]
    last: int


@dataclass(frozen=True)
class WhatIf:
    """Priced moves of single shards of a plan.

    best: moves that fit, the cheapest first.
    of_table: moves of each table: those that fit first, then the cheapest.
    stays: reasons why tables with shards of one device may not move.
    heaviest: on the device that is ready last, the table of the shard that takes most compute, and its ms. None: no
      shard is on that device alone.
    """

    best: tuple[PricedMove, ...] = ()
    of_table: Mapping[str, tuple[PricedMove, ...]] = field(default_factory=dict)
    stays: Mapping[str, str] = field(default_factory=dict)
    heaviest: tuple[str, float] | None = None


def price_single_moves(priced: PricedPlan, problem: Problem, model: CostModel) -> WhatIf:
    """Price moves of single shards of a plan to other devices, and return the best.

    In very large plans, only moves to the devices that are ready first are priced.

    problem: with the plan's towers, if it has some (decisions.towers.with_towers_of_plan).
    model: what prices the plan.
    """
    if not any(op.sharding_kind.is_on_one_device for ops in priced.workload.ops for op in ops):
        return WhatIf()
    plan = _PlanSums(priced, problem, model)
    stays = {s.table.name: why for s in plan.shards if (why := _reason_to_stay(s.table, problem))}
    free = [i for i, shard in enumerate(plan.shards) if shard.table.name not in stays]
    ordered = sorted(
        plan.priced_moves(plan.possible_moves(free)), key=lambda move: (bool(move.refused), move.total_ms)
    )
    of_table: dict[str, list[PricedMove]] = defaultdict(list)
    for move in ordered:
        of_table[move.shard.table.name].append(move)
    return WhatIf(
        tuple(move for move in ordered[:BEST] if not move.refused),
        {name: tuple(moves[:OF_TABLE]) for name, moves in of_table.items()},
        stays,
        plan.heaviest_table(),
    )


def _reason_to_stay(table: Table, problem: Problem) -> str:
    """Reason why no shard of a table may move alone, or why its moves cannot be priced; "" if the table may move."""
    others = [name for name in problem.group_by_table.get(table.name, ()) if name != table.name]
    if others:
        return f"it needs to stay together with {others[0]} (constraints.together)"
    # A codec may refuse the columns that are left on a device (lower.require_valid_plan).
    codecs = "the job's codecs carry only some columns of a device" if problem.codecs_may_fail else ""
    return "some of its rows are not in device memory" if table.in_host_memory else codecs


class _PlanSums:
    """A plan's costs as sums over its shards, so that a hypothetical move changes few terms.

    runs: [R] runs of the plan. An op of run r on device d has number r D + d.
    shards: [N] shards of one device. at: [N] their devices. run: [N] their runs' numbers.
    codes: [N, F] their encodings. carried: [2, N] bytes of their outputs and ids. columns: [N, P] their bytes.
    sums: [R D, F] summed encodings of ops. counts: [R D] their shards. op_ms: [3, R D] see `_ops_ms`.
    saved_ms: [3, N] ms of its op that a device saves without a shard.
    memory: [D, P] bytes of the devices. limits: [D, P] bytes that they may have.
    phases: number of the first columns of P that are bytes. Others are limits of ops.
    """

    def __init__(self, plan: PricedPlan, problem: Problem, model: CostModel) -> None:
        self.plan, self.problem, self.model = plan, problem, model
        work, placements = plan.workload, merged_placements(plan.plan.placements)
        self.runs, n = list(work.traffic_slots), len(problem.topology)
        ops = [(d, op) for d, ops in enumerate(work.ops) for op in ops if op.sharding_kind.is_on_one_device]
        op_of = np.repeat(range(len(ops)), [len(op.shards) for _, op in ops])
        self.shards = [shard for _, op in ops for shard in op.shards]
        self.at = np.array([d for d, _ in ops])[op_of]
        self.run = np.array([self.runs.index(op.sharding_kind) for _, op in ops])[op_of]
        as_cached = [with_shared_cache_load_factors(op.shards, op.batch) for _, op in ops]
        self.codes = model.encode([shard for of_op in as_cached for shard in of_op], problem.global_batch)
        number = self.run * n + self.at
        self.sums = np.zeros((len(self.runs) * n, self.codes.shape[1]))
        np.add.at(self.sums, number, self.codes)
        self.counts = np.bincount(number, minlength=len(self.sums))
        self.op_ms = self._ops_ms(self.sums, self.counts, np.arange(len(self.sums)))
        without_ms = self._ops_ms(self.sums[number] - self.codes, self.counts[number] - 1, number)
        self.saved_ms = self.op_ms[:, number] - without_ms
        account = memory_account(placements, problem)
        amounts = [shard_sums(self.runs[r], s, problem) for r, s in zip(self.run, self.shards, strict=True)]
        self.carried = np.array([(of.entered, of.arrived) for of in amounts], float).T
        self.columns = np.array(
            [account.bytes_by_phase(self.runs[r], of) for r, of in zip(self.run, amounts, strict=True)]
        )
        self.limits, self.phases = account.limits, account.phases
        self.memory = account.base + account.device_loads(placements)
        # What caches round up stays, as their tables do.
        peaks = self.memory[:, : self.phases].max(1)
        self.memory[:, : self.phases] += (work.memory_bytes - peaks)[:, None]

    def _ops_ms(self, sums: np.ndarray, counts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """[3, K] ms of ops with summed encodings [K, F]: forward and backward compute, and time on slower links."""
        devices = self.problem.topology.devices
        speed = np.array([d.speed for d in devices])[numbers % len(devices)]
        # An empty op costs nothing. Differences of sums may leave it some rounding.
        return np.where(counts > 0, self.model.op_part_ms(sums).T / speed, 0.0)

    def possible_moves(self, free: Sequence[int]) -> np.ndarray:
        """[K, 2] possible moves: the number of a shard, and of a device that it may move to.

        A device with other columns of the table is none: the two shards would become one.

        free: numbers of shards that may move.
        """
        cost, traffic = self.plan.cost, self.plan.workload.traffic
        most = max(OF_TABLE, _WORK // max(1, len(free) * traffic.size))
        first = np.argsort(np.array(cost.compute_ms) + cost.backward_comm_ms, kind="stable").tolist()
        placements, moves = self.plan.plan.placements_by_table(), []
        for i in free:
            name = self.shards[i].table.name
            taken = {p.devices[0] for p in placements[name] if sharding_kind_by_name(p.kind).is_on_one_device}
            allowed = {*self.problem.allowed_devices(name)} - taken
            moves += [(i, d) for d in [d for d in first if d in allowed][:most]]
        return np.array(moves, dtype=int).reshape(-1, 2)

    def priced_moves(self, moves: np.ndarray) -> Iterator[PricedMove]:
        """Moves [K, 2] of shards to devices, priced in chunks that bound the memory."""
        at_once = max(1, _AT_ONCE // self.plan.workload.traffic.size)
        for k in range(0, len(moves), at_once):
            yield from self._price_moves_in_one_call(*moves[k : k + at_once].T)

    def _price_moves_in_one_call(self, i: np.ndarray, new_devices: np.ndarray) -> Iterator[PricedMove]:
        """Moves of shards i [K] to devices [K], priced in one call of the cost model."""
        cost, work, topology = self.plan.cost, self.plan.workload, self.problem.topology
        k, at, run = np.arange(len(i)), self.at[i], self.run[i]
        # [3, K, D] forward and backward compute, and time on slower links.
        parts = (cost.forward_compute_ms, cost.backward_compute_ms, cost.link_ms)
        compute = np.repeat(np.array(parts)[:, None], len(i), axis=1)
        number = run * len(topology) + new_devices
        compute[:, k, at] -= self.saved_ms[:, i]
        grown_ms = self._ops_ms(self.sums[number] + self.codes[i], self.counts[number] + 1, number)
        compute[:, k, new_devices] += grown_ms - self.op_ms[:, number]
        forward, backward, link = compute
        # [2, R, K, D] bytes of outputs and ids, and [K, D, P] bytes of memory.
        change = np.zeros((2, len(self.runs), *forward.shape))
        memory = np.repeat(self.memory[None], len(i), axis=0)
        for sign, device in ((-1, at), (1, new_devices)):
            change[:, run, k, device] += sign * self.carried[:, i]
            memory[k, device] += sign * self.columns[i]
        outputs, ids = (dict(zip(self.runs, of, strict=True)) for of in change)
        traffic = work.traffic[:, None] + traffic_of_outputs(outputs, self.problem, ids)
        comm = self.model.comm_cost(np.maximum(traffic, 0.0), forward + backward, topology)
        total_ms = step_ms(forward + backward, comm, work.job, link + backward)
        busy_ms = forward + backward + comm.forward_ms + comm.backward_ms
        last = (forward + backward + comm.backward_ms).argmax(1).tolist()
        used = memory[..., : self.phases].max(2)
        lacks = np.ceil(used - self.limits[:, 0])
        beyond = (memory - self.limits).max((1, 2)) > 0
        for k, (shard, *devices) in enumerate(
            zip(i.tolist(), at.tolist(), new_devices.tolist(), strict=True)
        ):
            refused = "an op would have more ids or features than FBGEMM runs" if beyond[k] else ""
            if lacks[k].max() > 0:
                refused = f"device {lacks[k].argmax()} lacks {size_text(lacks[k].max())}"
            changed = (
                ChangedDevice(d, float(busy_ms[k, d]), round(used[k, d]))
                for d in dict.fromkeys((*devices, last[k]))
            )
            yield PricedMove(
                self.shards[shard],
                (devices[0], devices[1]),
                float(total_ms[k]),
                refused,
                tuple(changed),
                last[k],
            )

    def heaviest_table(self) -> tuple[str, float] | None:
        """Name and ms of the table with the costliest shard on the bottleneck device; None if there is none."""
        ready = np.array(self.plan.cost.compute_ms) + self.plan.cost.backward_comm_ms
        saved_ms = self.saved_ms[:2].sum(0).tolist()
        # The encoding of a cached table depends on those that share its cache.
        own = [
            (shard.table.name, ms)
            for shard, device, ms in zip(self.shards, self.at, saved_ms, strict=True)
            if device == ready.argmax() and not shard.table.in_host_memory
        ]
        return max(own, key=lambda shard: shard[1], default=None)
