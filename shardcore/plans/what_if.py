"""Moves of single shards to other devices, each priced as the plan after it.

A move changes an op on two devices, the bytes that these enter into exchanges, and their memory. So many moves are
priced in one call, from the sums of the plan.

Only shards of one device move: of kinds that divide rows or replicate them, each device has its share.

Shapes: K moves, D devices, F numbers of an encoding, P phases (and limits of ops).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardcore.core.types import Problem, Shard, Table
from shardcore.cost.model import CostModel, PricedPlan, step_ms
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import CHANNELS, WHOLE_ROWS, merged, run_of
from shardcore.step.lower import entering_bytes
from shardcore.step.memory import gib
from shardcore.step.memory_account import account_of
from shardcore.step.traffic import row_in, shared_on_units
from shardcore.tables.host_rows import in_one_cache

BEST, OF_TABLE = 20, 3
"""Number of moves that are kept: of all tables, and of each table."""
_WORK = 1 << 25
"""Entries of arrays of traffic over all moves, about. More moves are priced only if a shard had less than OF_TABLE."""
_AT_ONCE = 1 << 21
"""Entries of the array of traffic of one call."""


@dataclass(frozen=True)
class Changed:
    """A device after a move.

    busy_ms: compute and exchanges, without waiting and ids.
    used_bytes: memory in its largest phase.
    """

    device: int
    busy_ms: float
    used_bytes: int


@dataclass(frozen=True)
class Move:
    """A move of one shard, priced.

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
    changed: tuple[Changed, ...]
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

    best: tuple[Move, ...] = ()
    of_table: Mapping[str, tuple[Move, ...]] = field(default_factory=dict)
    stays: Mapping[str, str] = field(default_factory=dict)
    heaviest: tuple[str, float] | None = None


def what_if(priced: PricedPlan, problem: Problem, model: CostModel) -> WhatIf:
    """The best moves of single shards of a plan.

    In very large plans, only moves to the devices that are ready first are priced.

    problem: with the plan's towers, if it has some (decisions.towers.as_planned).
    model: what prices the plan.
    """
    plan = _PlanSums.of(priced, problem, model)
    stays = {s.table.name: why for s in plan.shards if (why := _stays(s.table, problem))}
    moves = plan.moves([i for i, s in enumerate(plan.shards) if s.table.name not in stays])
    # [K, 2] whether a move does not fit, then its ms.
    keys = [(plan.excess(part).max(1) > 0, plan.after(part).total_ms) for part in plan.parts(moves)]
    order = np.lexsort(np.hstack(keys)[::-1]).tolist() if keys else []
    of_table: dict[str, list[int]] = defaultdict(list)
    for k in order:
        of_table[plan.shards[moves[k, 0]].table.name].append(k)
    kept = sorted({*order[:BEST], *(k for ks in of_table.values() for k in ks[:OF_TABLE])})
    known = dict(zip(kept, plan.priced_moves(moves[kept]), strict=True))
    return WhatIf(
        tuple(known[k] for k in order[:BEST] if not known[k].refused),
        {name: tuple(known[k] for k in ks[:OF_TABLE]) for name, ks in of_table.items()},
        stays,
        plan.heaviest(),
    )


def _stays(table: Table, problem: Problem) -> str:
    """Reason why no shard of a table may move alone, or why its moves cannot be priced. "": it may move."""
    others = [name for name in problem.bundle_of.get(table.name, ()) if name != table.name]
    if others:
        return f"it needs to stay together with {others[0]} (constraints.together)"
    # A codec may refuse the columns that are left on a device (lower.require_plan).
    codecs = "the job's codecs carry only some columns of a device" if problem.codecs_fail else ""
    return "some of its rows are not in device memory" if table.in_host_memory else codecs


@dataclass(frozen=True, eq=False)
class _After:
    """Steps after moves. total_ms: [K]. compute_ms, exchange_ms, ready_ms: [K, D]."""

    total_ms: np.ndarray
    compute_ms: np.ndarray
    exchange_ms: np.ndarray
    ready_ms: np.ndarray


@dataclass(frozen=True, eq=False)
class _PlanSums:
    """A plan as sums over its shards, of which a move changes few.

    shards: [N] shards of one device, by runs.
    at: [N] devices of the shards.
    run: [N] numbers of the shards' runs.
    codes: [N, F] encodings of the shards.
    sums: [runs, D, F] summed encodings of the devices' ops.
    counts: [runs, D] shards in the devices' ops.
    entering: [N, L C] bytes that a shard enters into each row of traffic.
    columns: [N, P] bytes of a shard in each phase.
    memory: [D, P] bytes of the devices in each phase.
    limits: [D, P] bytes that a device may have.
    phases: number of the first columns of P that are bytes. Others are limits of ops.
    """

    priced: PricedPlan
    problem: Problem
    model: CostModel
    shards: tuple[Shard, ...]
    at: np.ndarray
    run: np.ndarray
    codes: np.ndarray
    sums: np.ndarray
    counts: np.ndarray
    entering: np.ndarray
    columns: np.ndarray
    memory: np.ndarray
    limits: np.ndarray
    phases: int

    @classmethod
    def of(cls, priced: PricedPlan, problem: Problem, model: CostModel) -> _PlanSums:
        placements, work = merged(priced.plan.placements), priced.workload
        account = account_of(placements, problem)
        runs = [run for run in account.runs if run.name == WHOLE_ROWS.name]
        held = [(run_of(p.kind, p.shard.table), p) for p in placements]
        held = sorted(((runs.index(run), p) for run, p in held if run in runs), key=lambda x: x[0])
        shards = tuple(p.shard for _, p in held)
        run, at = (
            np.array([r for r, _ in held], dtype=int),
            np.array([p.devices[0] for _, p in held], dtype=int),
        )
        entering = np.zeros((len(shards), len(work.traffic)))
        for i, shard in enumerate(shards):
            lane, of = work.lanes[runs[run[i]]], runs[run[i]]
            bytes_of = dict(zip(CHANNELS, entering_bytes(of, (shard,), problem), strict=True))
            bytes_of |= {of.ids: received_bytes(shard, problem)} if of.ids else {}
            for channel, n_bytes in bytes_of.items():
                entering[i, row_in(lane, channel)] += n_bytes
        memory = account.base + account.loads(placements)
        # What caches round up stays, as their tables do.
        memory[:, : account.phases] += (work.memory_bytes - memory[:, : account.phases].max(1))[:, None]
        codes = np.concatenate(
            [
                model.encode([p.shard for i, p in held if i == r], of.batch(problem))
                for r, of in enumerate(runs)
            ]
            or [np.zeros((0, 1))]
        )
        n_runs, n = max(len(runs), 1), len(problem.topology)
        sums, counts = np.zeros((n_runs, n, codes.shape[1])), np.zeros((n_runs, n), dtype=int)
        np.add.at(counts, (run, at), 1)
        for device, ops in enumerate(work.ops):
            for op in ops:
                if op.run in runs:
                    sums[runs.index(op.run), device] = model.encode(
                        in_one_cache(op.shards, op.batch), op.batch
                    ).sum(0)
        return cls(
            priced,
            problem,
            model,
            shards,
            at,
            run,
            codes,
            sums,
            counts,
            entering,
            np.array([account.vector(runs[r], s) for s, r in zip(shards, run, strict=True)]).reshape(
                -1, len(account.base)
            ),
            memory,
            account.limits,
            account.phases,
        )

    def moves(self, free: list[int]) -> np.ndarray:
        """[K, 2] numbers of a shard and of a device that it may move to.

        A device with other columns of the table is none: the two shards would become one.

        free: numbers of shards that may move.
        """
        n, cost = len(self.problem.topology), self.priced.cost
        most = max(OF_TABLE, _WORK // max(1, len(free) * n * len(self.priced.workload.traffic)))
        first = np.argsort(np.array(cost.compute_ms) + cost.backward_comm_ms, kind="stable").tolist()
        taken: dict[str, set[int]] = defaultdict(set)
        for shard, device in zip(self.shards, self.at.tolist(), strict=True):
            taken[shard.table.name].add(device)
        moves = []
        for i in free:
            name = self.shards[i].table.name
            allowed = {*self.problem.allowed_devices(name)} - taken[name]
            moves += [(i, d) for d in [d for d in first if d in allowed][:most]]
        return np.array(moves, dtype=int).reshape(-1, 2)

    def parts(self, moves: np.ndarray) -> Iterator[np.ndarray]:
        """Moves in parts that are small enough for one call."""
        at_once = max(1, _AT_ONCE // (len(self.problem.topology) * len(self.priced.workload.traffic)))
        for k in range(0, len(moves), at_once):
            yield moves[k : k + at_once]

    def after(self, moves: np.ndarray) -> _After:
        """Steps after moves [K, 2]."""
        cost, work, k = self.priced.cost, self.priced.workload, np.arange(len(moves))
        # [3, K, D] forward and backward compute, and time on slower links.
        compute = np.tile(
            np.array([cost.forward_compute_ms, cost.backward_compute_ms, cost.link_ms])[:, None],
            (len(moves), 1),
        )
        change = np.zeros((len(work.traffic), len(moves), len(self.problem.topology)))
        i, code, run = moves[:, 0], self.codes[moves[:, 0]], self.run[moves[:, 0]]
        for sign, device in ((-1, self.at[i]), (1, moves[:, 1])):
            count, sums = self.counts[run, device], self.sums[run, device]
            compute[:, k, device] += self._ops_ms(sums + sign * code, count + sign, device)
            compute[:, k, device] -= self._ops_ms(sums, count, device)
            change[:, k, device] += sign * self.entering[i].T
        traffic = np.maximum(work.traffic[:, None] + shared_on_units(change, self.problem), 0.0)
        forward, backward, link = compute
        comm = self.model.comm(traffic, forward + backward, self.problem.topology)
        total_ms = step_ms(forward + backward, comm, work.job, link + backward)
        exchange_ms = comm.forward_ms + comm.backward_ms
        return _After(total_ms, forward + backward, exchange_ms, forward + backward + comm.backward_ms)

    def _ops_ms(self, sums: np.ndarray, counts: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """[3, K] ms of ops with summed encodings [K, F]: forward, backward, and on slower links."""
        share, ms, link_ms = (
            f(sums) for f in (self.model.forward_share, self.model.head, self.model.link_ms)
        )
        speed = np.array([d.speed for d in self.problem.topology.devices])[devices]
        # An empty op costs nothing. Differences of sums may leave it some rounding.
        return np.where(counts > 0, np.stack([share * ms, (1 - share) * ms, link_ms]) / speed, 0.0)

    def excess(self, moves: np.ndarray) -> np.ndarray:
        """[K, D] the most bytes (or what limits of ops count) that a device has beyond its limit after a move."""
        columns, k = self.columns[moves[:, 0]], np.arange(len(moves))
        excess = np.tile((self.memory - self.limits).max(1), (len(moves), 1))
        for sign, device in ((-1, self.at[moves[:, 0]]), (1, moves[:, 1])):
            excess[k, device] = (self.memory[device] + sign * columns - self.limits[device]).max(1)
        return excess

    def priced_moves(self, moves: np.ndarray) -> Iterator[Move]:
        """Moves [K, 2] with all that a page shows."""
        used, free_bytes = self.memory[:, : self.phases], self.limits[:, 0]
        for part in self.parts(moves):
            after, excess = self.after(part), self.excess(part)
            for k, (i, to) in enumerate(part.tolist()):
                device, last, own = (
                    int(self.at[i]),
                    int(after.ready_ms[k].argmax()),
                    self.columns[i, : self.phases],
                )
                n_bytes = used.max(1)
                n_bytes[device], n_bytes[to] = (used[device] - own).max(), (used[to] + own).max()
                over = np.ceil(n_bytes - free_bytes)
                refused = f"device {over.argmax()} lacks {gib(over.max())}" if over.max() > 0 else ""
                if excess[k].max() > 0 and not refused:
                    refused = "an op would have more ids or features than FBGEMM runs"
                changed = (
                    Changed(d, float(after.compute_ms[k, d] + after.exchange_ms[k, d]), round(n_bytes[d]))
                    for d in dict.fromkeys((device, to, last))
                )
                yield Move(
                    self.shards[i], (device, to), float(after.total_ms[k]), refused, tuple(changed), last
                )

    def heaviest(self) -> tuple[str, float] | None:
        """See WhatIf."""
        ready = np.array(self.priced.cost.compute_ms) + self.priced.cost.backward_comm_ms
        # The encoding of a cached table depends on those that share its cache.
        cached = np.array([s.table.in_host_memory for s in self.shards], dtype=bool)
        own = np.flatnonzero((self.at == ready.argmax()) & ~cached)
        if not len(own):
            return None
        sums, counts, at = (
            self.sums[self.run[own], self.at[own]],
            self.counts[self.run[own], self.at[own]],
            self.at[own],
        )
        with_ms, without_ms = (
            self._ops_ms(x, n, at)[:2].sum(0)
            for x, n in ((sums, counts), (sums - self.codes[own], counts - 1))
        )
        first = int((with_ms - without_ms).argmax())
        return self.shards[own[first]].table.name, float((with_ms - without_ms)[first])
