"""Space: what a local search may do with a problem's tables, as arrays.

A strip of the search is a strip of the ledger, or a group of tables that are kept together, as one unit. Tables that live on all
devices (data-parallel) are no strips: they add to every device's load and take from its memory.

Shapes: N probes, S strips, D devices, T tables; 2 the kinds of op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.memory import free_bytes, shard_bytes
from shardcore.search.anneal import Fixed
from shardcore.search.ledger import Ledger
from shardcore.types import MIN_WIDTH, OUTPUT_BYTES, PRECISION_BYTES, Plan, Problem, Shard, ShardCoreError, Table
from shardcore.workload import Traffic

ROW_UNITS = 24
"""Shares that a table may be cut into by rows: halves, thirds, quarters, sixths, eighths, ... go evenly."""
_PROBES = 64
_AT_ONCE = 1 << 18
"""Numbers that a model is asked for at once: a bound on memory."""


@dataclass(frozen=True)
class Reshard:
    """Improve a plan that there is: at most so many tables, and bytes of weights, come to devices that did not have them (None:
    any number). Tables that the plan does not have are placed besides; one whose statistics have changed is the same table."""

    plan: Plan
    tables: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tables", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ShardCoreError(f"re-sharding may move at most {value} {name}; it needs 0 or more, or None for any number")

    def shards(self, problem: Problem) -> tuple[list[tuple[Shard, int]], list[Table], list[Table]]:
        """The plan's shards of the problem's tables with their devices; the tables that it has on all devices; those that it does
        not have. Raises ShardCoreError where it does not place all of a table, or some of it on several devices, not on all."""
        tables, n_devices = {t.name: t for t in problem.tables}, len(problem.topology)
        placed, everywhere, cells = [], [], dict.fromkeys(tables, 0)
        for p in self.plan.placements:
            old, table = p.shard.table, tables.get(p.shard.table.name)
            if table is None or (table.rows, table.dim) != (old.rows, old.dim):
                continue
            if max(p.devices) >= n_devices or 1 < len(p.devices) < n_devices:
                raise ShardCoreError(f"the plan to start from has {p.shard.label} on devices {list(p.devices)}; problem "
                                     f"{problem.name!r} has devices 0 to {n_devices - 1}, and a table lives on one or on all")
            cells[table.name] += p.shard.rows * p.shard.width
            if len(p.devices) > 1 and p.shard == Shard.whole(old):
                everywhere.append(table)
            else:
                placed.append((replace(p.shard, table=table), p.devices[0]))
        for name, n in cells.items():
            if n not in (0, tables[name].rows * tables[name].dim):
                whole = tables[name].rows * tables[name].dim
                raise ShardCoreError(f"the plan to start from places {n} of the {whole} cells of table {name!r}")
        return placed, everywhere, [t for name, t in tables.items() if cells[name] == 0]


@dataclass(frozen=True, eq=False)
class Space:
    """members [S]: the strips of the ledger that a strip stands for; everywhere: the tables that live on all devices."""

    problem: Problem
    ledger: Ledger
    members: Sequence[tuple[int, ...]]
    everywhere: Sequence[Table]
    fixed: Fixed

    @property
    def by_columns(self) -> Fixed:
        """The part of the space in which no table is cut by rows that is not already."""
        return self.fixed._replace(twin=np.full_like(self.fixed.twin, -1))

    def strips(self, pieces: Sequence[Shard]) -> np.ndarray:
        """[N, 2] strips and units of pieces; a group, whose tables are all among them, counts once."""
        of = {m: s for s, members in enumerate(self.members) for m in members}
        found: dict[int, None] = {}
        single = []
        for strip, units in map(self.ledger.piece, pieces):
            s = of[strip]
            if len(self.members[s]) == 1:
                single.append((s, units))
            else:
                found[s] = None
        return np.array([*single, *((s, 1) for s in found)], dtype=np.int64).reshape(-1, 2)

    def placed(self, held: np.ndarray) -> tuple[list[Shard], list[tuple[int, ...]]]:
        """The shards of held [S, D] units, and of the tables that live everywhere, each with its devices."""
        strips, devices = np.nonzero(held)
        pieces, where = [], []
        for s, d in zip(strips.tolist(), devices.tolist(), strict=True):
            members = self.members[s]
            pieces += [(m, int(held[s, d]) if len(members) == 1 else int(self.ledger.size[m])) for m in members]
            where += [(d,)] * len(members)
        shards = self.ledger.shards(pieces) + [Shard.whole(t) for t in self.everywhere]
        return shards, where + [tuple(range(held.shape[1]))] * len(self.everywhere)


def space(problem: Problem, model: CostModel, pieces: Sequence[Shard], rows: bool, halves: bool = False,
          everywhere: Sequence[Table] = ()) -> Space:
    """The space of the tables that `pieces` cover, whole tables among them cut by rows if wanted, the others `everywhere`."""
    ledger = Ledger(problem, model, pieces, ROW_UNITS if rows else 0)
    may_split = np.array([ledger.may_split((s, 2)) for s in range(len(ledger))], dtype=bool)
    strips = np.repeat(np.arange(len(ledger)), ledger.size)
    units = np.concatenate([np.arange(1, n + 1) for n in ledger.size])
    used = may_split[strips] | (units == ledger.size[strips])
    ledger.need(strips[used], units[used])
    members = _members(problem, ledger)
    first = np.array([m[0] for m in members])
    alone = np.array([len(m) == 1 for m in members])
    number = np.full(len(ledger), -1)
    number[first[alone]] = np.flatnonzero(alone)
    part = ledger.parts(first[:, None], np.arange(ledger.size.max() + 1))
    codes, n_bytes, width = ledger.codes, ledger.bytes, ledger.width
    groups = [ledger.parts(np.array(m), ledger.size[list(m)]) for m in members if len(m) > 1]
    part[~alone, 1] = len(codes) + np.arange(len(groups))
    codes, n_bytes, width = (np.concatenate([x, *(x[g].sum(0, keepdims=True) for g in groups)]) for x in (codes, n_bytes, width))
    twin = np.where(ledger.twin[first] >= 0, number[ledger.twin[first]], -1)
    column = np.full(len(members), -1)
    column[twin[twin >= 0]] = np.flatnonzero(twin >= 0)
    load_ms, taken = _everywhere(problem, model, everywhere)
    hosts = {h: i for i, h in enumerate(problem.topology.hosts)}
    n_devices = len(problem.topology)
    fixed = Fixed(
        part=np.ascontiguousarray(part, dtype=np.int32), codes=np.ascontiguousarray(codes), part_bytes=n_bytes, part_width=width,
        kind=ledger.kind[first].astype(np.int64), size=np.where(alone, ledger.size[first], 1).astype(np.int64),
        table=np.where(column >= 0, column, np.arange(len(members))), twin=twin, column=column, may_split=may_split[first],
        allowed=_allowed(problem, ledger, first), free=np.array(free_bytes(problem), np.int64) - taken, speed=ledger.speed,
        host=np.array([hosts[d.host] for d in problem.topology.devices], np.int64), base_load=load_ms,
        **exchange_rates(problem, model), kept=np.zeros((0, n_devices), np.int16), weight=np.zeros(0, np.int64),
        most_moved=np.zeros(2, np.int64), parameters=model.compiled().parameters, halves=halves)
    return Space(problem, ledger, members, everywhere, fixed)


def _members(problem: Problem, ledger: Ledger) -> list[tuple[int, ...]]:
    if not problem.bundle_of:
        return [(s,) for s in range(len(ledger))]
    found: dict[tuple[str, ...] | int, list[int]] = {}
    for s in range(len(ledger)):
        found.setdefault(problem.bundle_of.get(ledger.table(s).name, s), []).append(s)
    return [tuple(m) for m in found.values()]


def _allowed(problem: Problem, ledger: Ledger, strips: np.ndarray) -> np.ndarray:
    """[S, D], or without rows where no table is pinned."""
    if not problem.pinned:
        return np.zeros((0, len(problem.topology)), dtype=bool)
    allowed = np.ones((len(strips), len(problem.topology)), dtype=bool)
    for i, s in enumerate(strips):
        devices = problem.pinned.get(ledger.table(s).name)
        if devices is not None:
            allowed[i] = False
            allowed[i, list(devices)] = True
    return allowed


def keeping(of: Space, held: np.ndarray, reshard: Reshard, new: Sequence[Table]) -> Space:
    """The space in which only so much may move from held [S, D]; the `new` tables may go anywhere."""
    free, ledger = {t.name for t in new}, of.ledger
    weight = [0 if ledger.table(m[0]).name in free else sum(
        ledger.table(x).rows * ledger.table(x).dim * PRECISION_BYTES[ledger.table(x).precision] // int(
            ledger.size[x] if len(m) == 1 else 1) for x in m) for m in of.members]
    most = [np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)]
    return replace(of, fixed=of.fixed._replace(kept=held.copy(), weight=np.array(weight, np.int64),
                                               most_moved=np.array(most, np.int64)))


# --- exchanges ---------------------------------------------------------------------------------------------------------


def exchange_rates(problem: Problem, model: CostModel) -> dict[str, np.ndarray]:
    """own, busiest, host_busiest, total, once [2], see anneal.Fixed: what both exchanges of a step cost for each unit of width,
    fitted to what the model says of some divisions of the problem's columns (least squares, none below 0)."""
    from scipy.optimize import nnls

    topology, n = problem.topology, len(problem.topology)
    rates = {name: np.zeros(2) for name in ("own", "busiest", "host_busiest", "total", "once")}
    if n == 1:
        return rates
    rng = np.random.default_rng(0)
    mean = sum(t.dim for t in problem.tables) / MIN_WIDTH / n
    spread = rng.uniform(0.01, 0.5, (_PROBES, 1))
    width = mean * np.exp(rng.normal(0, 0.3, (_PROBES, 1)) + rng.normal(0, 1, (_PROBES, n)) * spread)
    number = {h: i for i, h in enumerate(topology.hosts)}
    on_host = np.eye(len(number))[[number[d.host] for d in topology.devices]]
    busiest_host = (width @ on_host).max(1, keepdims=True) if len(number) > 1 else np.zeros((_PROBES, 1))
    terms = np.stack(np.broadcast_arrays(width, width.max(1, keepdims=True), busiest_host, width.sum(1, keepdims=True), 1.0), -1)
    terms = terms.reshape(-1, len(rates))
    scale = np.maximum(terms.max(0), 1e-300)
    for kind in (0, 1):
        pooled = np.zeros((2, *width.shape))
        pooled[kind] = width * float(problem.global_batch * OUTPUT_BYTES * MIN_WIDTH)
        cost = model.comm(Traffic(pooled[0], pooled[1], np.zeros(width.shape)), np.zeros(width.shape), topology)
        ms = cost.backward_ms + cost.forward_ms.max(1, keepdims=True)
        for name, rate in zip(rates, nnls(terms / scale, ms.ravel())[0] / scale, strict=True):
            rates[name][kind] = rate
    return rates


# --- data-parallel tables ----------------------------------------------------------------------------------------------


def _everywhere(problem: Problem, model: CostModel, tables: Sequence[Table]) -> tuple[np.ndarray, int]:
    """What tables that live on all devices add to each: ms [D], their all-reduce among it, and bytes."""
    speed = np.array([d.speed for d in problem.topology.devices])
    if not tables:
        return np.zeros(len(speed)), 0
    shards = [Shard.whole(t) for t in tables]
    compute = float(model.head(model.encode(shards, problem.local_batch).sum(0, keepdims=True))[0]) / speed
    taken = sum(shard_bytes(s, problem.local_batch, problem.optimizer, replicated=True) for s in shards)
    return compute + _all_reduce_ms(problem, model, np.array([[s.rows * s.width for s in shards]]).sum(1))[0], taken


def _all_reduce_ms(problem: Problem, model: CostModel, cells: np.ndarray) -> np.ndarray:
    """[N, D] ms of all-reducing the gradients of cells [N]."""
    found = []
    for some in np.array_split(cells, max(1, len(cells) * len(problem.topology) // _AT_ONCE)):
        moved = np.repeat(some[:, None] * float(OUTPUT_BYTES), len(problem.topology), 1)
        zero = np.zeros_like(moved)
        found.append(np.asarray(model.comm(Traffic(zero, zero, moved), zero, problem.topology).backward_ms))
    return np.concatenate(found)


def worth_everywhere(problem: Problem, model: CostModel) -> list[Table]:
    """The tables that had better live on all devices, were all other work divided evenly: by falling gain, as many as make the
    step cheapest and fit."""
    topology, n = problem.topology, len(problem.topology)
    tables = [t for t in problem.tables if t.pooling > 0 and t.name not in problem.pinned and t.name not in problem.whole]
    if n == 1 or not tables:
        return []
    speed = sum(d.speed for d in topology.devices)
    slowest = min(d.speed for d in topology.devices)
    shards, rates = [Shard.whole(t) for t in tables], exchange_rates(problem, model)
    of_width = (rates["own"] + rates["busiest"] + rates["host_busiest"] * n / len(topology.hosts))[0] / n + rates["total"][0]
    codes, local = model.encode(shards), model.encode(shards, problem.local_batch)
    total = model.encode([Shard.whole(t) for t in problem.tables]).sum(0)
    width = np.array([t.dim // MIN_WIDTH for t in tables])
    cells = np.array([t.rows * t.dim for t in tables])
    launch = 2 * np.asarray(model.head(local)) - model.head(2 * local)  # about what an op costs before its shards
    alone = model.head(local) / slowest + _all_reduce_ms(problem, model, cells).max(1)
    rest = (model.head(total / n) - model.head(np.maximum(total - codes, 0) / n)) * n / speed + of_width * width
    order = np.argsort(alone - np.clip(launch, 0, None) / slowest - rest, kind="stable")[:4096]
    bytes_each = np.array([shard_bytes(s, problem.local_batch, problem.optimizer, replicated=True) for s in shards])
    fits = np.cumsum(bytes_each[order]) <= min(free_bytes(problem))
    order = order[:int(fits.argmin()) if not fits.all() else len(order)]
    left = np.maximum(total - np.cumsum(codes[order], 0), 0)
    step = (model.head(left / n) * n / speed - of_width * np.cumsum(width[order])
            + model.head(np.cumsum(local[order], 0)) / slowest + _all_reduce_ms(problem, model, np.cumsum(cells[order])).max(1))
    if not len(step) or step.min() >= float(model.head(total[None] / n)[0]) * n / speed:
        return []
    return [tables[i] for i in order[:int(step.argmin()) + 1]]
