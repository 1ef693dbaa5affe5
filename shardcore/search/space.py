"""Space: what a local search may do with a problem's tables, as arrays.

A strip of the ledger lives on devices that share its columns; or it is everywhere: its rows divided evenly over all devices, in
their order, which is how TorchRec runs a row-wise table (each rank looks up all of them), or copied to each (data-parallel).

Shapes: N probes, S strips, D devices, F features; 2 the kinds of op, or the ways to be everywhere (rows, copies).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.memory import free_bytes, shard_bytes
from shardcore.search.anneal import Fixed
from shardcore.search.ledger import Ledger
from shardcore.search.pieces import divided, even_share, placed
from shardcore.types import MIN_WIDTH, OUTPUT_BYTES, Placement, Plan, Problem, Shard, ShardCoreError, Table
from shardcore.workload import Traffic

ROWS, COPIES = 0, 1
"""The ways to be everywhere."""
_PROBES = 64
LARGE = 1 << 19
"""Strips x devices of a large problem."""
_WORTH = 0.01
"""In a large problem, strips that cost, and take, no more than this share of a device's mean are not cut."""


@dataclass(frozen=True)
class Reshard:
    """Improve a plan that there is: at most so many tables, and bytes of weights, come to devices that did not have them (None:
    any number). A table whose statistics have changed is the same table. Those that the plan lacks, or has where constraints no
    longer allow them, are placed besides and do not count. With a limit no table comes to be everywhere, or leaves from there."""

    plan: Plan
    tables: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tables", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ShardCoreError(f"re-sharding may move at most {value} {name}; it needs 0 or more, or None for any number")

    @property
    def limited(self) -> bool:
        return self.tables is not None or self.bytes is not None

    def sorted(self, problem: Problem) -> Sorted:
        """The problem's tables as the plan has them. Raises ShardCoreError where it does not place all of a table, or has some of
        it on several devices (a whole table on all of them is a copy)."""
        tables, everywhere = {t.name: t for t in problem.tables}, tuple(range(len(problem.topology)))
        had: dict[str, list[Placement]] = {name: [] for name in tables}
        for p in self.plan.placements:
            table = tables.get(p.shard.table.name)
            if table is not None and (table.rows, table.dim) == (p.shard.table.rows, p.shard.table.dim):
                had[table.name].append(replace(p, shard=replace(p.shard, table=table)))
        found = Sorted([], [], [], [])
        for name, placements in had.items():
            self._require_whole(tables[name], placements, everywhere, problem)
            free = name not in problem.whole and name not in problem.pinned
            if not placements or not (free or _allowed_there(placements, problem)):
                found.new.append(tables[name])
            elif len(placements[0].devices) > 1:
                found.copies.append(tables[name])
            elif free and _divided(placements, everywhere):
                found.rows.append(tables[name])
            else:
                found.placed.extend((p.shard, p.devices[0]) for p in placements)
        home: dict[str, int] = {**{t.name: -1 for t in found.new}, **{s.table.name: d for s, d in found.placed}}
        apart = {name for group in problem.constraints.together if len({home[n] for n in group}) > 1 for name in group}
        together = [(s, d) for s, d in found.placed if s.table.name not in apart]
        return replace(found, placed=together, new=[*found.new, *(tables[n] for n in sorted(apart) if home[n] >= 0)])

    def _require_whole(self, table: Table, placements: Sequence[Placement], everywhere: tuple[int, ...],
                       problem: Problem) -> None:
        cells = sum(p.shard.rows * p.shard.width for p in placements)
        if placements and cells != table.rows * table.dim:
            raise ShardCoreError(f"the plan to start from places {cells} of the {table.rows * table.dim} cells of table "
                                 f"{table.name!r}")
        for p in placements:
            copied = p.shard == Shard.whole(table) and tuple(sorted(p.devices)) == everywhere
            if max(p.devices) not in everywhere or (len(p.devices) > 1 and not copied):
                raise ShardCoreError(f"the plan to start from has {p.shard.label} on devices {list(p.devices)}; problem "
                                     f"{problem.name!r} has devices 0 to {everywhere[-1]}; a shard lives on one, a whole table "
                                     "on one or all")


@dataclass(frozen=True)
class Sorted:
    """Tables as a plan has them: shards that are on one device each; those on all devices, in copies or with their rows divided;
    those to be placed."""

    placed: list[tuple[Shard, int]]
    copies: list[Table]
    rows: list[Table]
    new: list[Table]


def _allowed_there(placements: Sequence[Placement], problem: Problem) -> bool:
    name = placements[0].shard.table.name
    on_one = len(placements) == 1 and len(placements[0].devices) == 1
    return (on_one or name not in problem.whole) and all(set(p.devices) <= set(problem.allowed_devices(name)) for p in placements)


def _divided(placements: Sequence[Placement], everywhere: Sequence[int]) -> bool:
    """Whether the rows are divided evenly over all devices, in their order."""
    table = placements[0].shard.table
    return len(everywhere) > 1 and not table.ordered and set(placements) == set(divided(table, everywhere) or ())


@dataclass(frozen=True, eq=False)
class Space:
    """by_rows [N]: strips that are everywhere, by rows, in each of its plans."""

    problem: Problem
    ledger: Ledger
    fixed: Fixed
    by_rows: np.ndarray

    @property
    def as_it_is(self) -> Fixed:
        """The part of the space in which no table comes to be everywhere, or leaves from there."""
        return self.fixed._replace(every=np.zeros_like(self.fixed.every))

    def numbers(self, tables: Iterable[Table]) -> np.ndarray:
        """[N] the strips of whole tables, none of a group."""
        of = {self.ledger.table(s).name: s for s in range(len(self.ledger))}
        return np.array([of[t.name] for t in tables], dtype=np.int64)

    def strips(self, shards: Sequence[Shard]) -> np.ndarray:
        """[N, 2] strips and units of shards; of tables that are kept together all are among them, or none."""
        return np.array(self.ledger.pieces(shards), dtype=np.int64).reshape(-1, 2)

    def placements(self, held: np.ndarray, way: np.ndarray) -> list[Placement]:
        """Of held [S, D] units, and of the strips that are everywhere in some way [S]."""
        strips, devices = np.nonzero(held)
        pieces = list(zip(strips.tolist(), held[strips, devices].tolist(), strict=True))
        found, n = placed(self.ledger.items(pieces), devices.tolist()), held.shape[1]
        for s in np.flatnonzero(way == COPIES):
            found.append(Placement(Shard.whole(self.ledger.table(s)), tuple(range(n))))
        for s in np.flatnonzero(way == ROWS):
            found += divided(self.ledger.table(s), range(n))
        return found


def without_ranges(pieces: Sequence[Shard], problem: Problem) -> tuple[list[Shard], list[Table]]:
    """The pieces, those tables whole whose rows are divided over all devices, and these tables. As one op runs all row ranges, no
    table is taken so where one is pinned, or its rows are ordered: the ranges of all are then pieces like others."""
    tables = list(dict.fromkeys(s.table for s in pieces if not s.full_rows))
    if any(t.ordered or t.name in problem.pinned for t in tables):
        return list(pieces), []
    return [*(s for s in pieces if s.full_rows), *map(Shard.whole, tables)], tables


def space(ledger: Ledger, pieces: Sequence[Shard], everywhere: bool, halves: bool = False,
          by_rows: Sequence[Table] = ()) -> Space:
    """The space of `pieces`, which are all strips of the ledger; whole tables among them may be everywhere if wanted, and some
    always are, by rows."""
    problem, model = ledger.problem, ledger.model
    may_split = np.array([ledger.may_split((s, 2)) for s in range(len(ledger))], dtype=bool)
    if is_large(ledger):
        may_split &= _worth_cutting(ledger, pieces)
    strips = np.repeat(np.arange(len(ledger)), ledger.size)
    units = np.concatenate([np.arange(1, n + 1) for n in ledger.size])
    used = may_split[strips] | (ledger.kind[strips] == 1) | (units == ledger.size[strips])
    ledger.need(strips[used], units[used])
    part = ledger.parts(np.arange(len(ledger))[:, None], np.arange(ledger.size.max() + 1))
    hosts = {h: i for i, h in enumerate(problem.topology.hosts)}
    n_devices, exchange = len(problem.topology), exchange_rates(problem, model)
    number = {ledger.table(s).name: s for s in range(len(ledger))}
    fixed = Fixed(
        part=np.ascontiguousarray(part, dtype=np.int32), codes=np.ascontiguousarray(ledger.codes),
        added_ms=added(ledger.codes, model), part_bytes=ledger.bytes, part_width=ledger.width,
        kind=ledger.kind.astype(np.int64), size=ledger.size.astype(np.int64),
        table=np.array([number[ledger.table(s).name] for s in range(len(ledger))]), may_split=may_split,
        allowed=ledger.allowed[:0] if ledger.allowed.all() else ledger.allowed, free=np.array(free_bytes(problem), np.int64),
        speed=ledger.speed, host=np.array([hosts[d.host] for d in problem.topology.devices], np.int64), **exchange,
        **_everywhere(problem, model, ledger, exchange, everywhere, {t.name for t in by_rows}),
        kept=np.zeros((0, n_devices), np.int16), weight=np.zeros(0, np.int64), most_moved=np.zeros(2, np.int64),
        parameters=model.compiled().parameters, halves=halves)
    return Space(problem, ledger, fixed, np.array([number[t.name] for t in by_rows], dtype=np.int64))


def is_large(ledger: Ledger) -> bool:
    """Whether so much is to be priced that a search has to be choosy."""
    return len(ledger) * len(ledger.speed) > LARGE


def _worth_cutting(ledger: Ledger, pieces: Sequence[Shard]) -> np.ndarray:
    """[S] bool: strips that `pieces` cut already, and those that cost or take enough of a device's mean to be worth a cut. The
    others, whole, fill its gaps; their parts would take most of a large problem's time and memory."""
    n, strips = len(ledger.speed), np.arange(len(ledger))
    ledger.need(strips, ledger.size)
    parts = ledger.parts(strips, ledger.size)
    added_ms, n_bytes = added(ledger.codes[parts], ledger.model), ledger.bytes[parts].astype(float)
    least_bytes = _WORTH * max(0.0, np.mean(free_bytes(ledger.problem)))
    worth = (added_ms * n > _WORTH * added_ms.sum()) | (n_bytes > least_bytes)
    cut = np.array([s for s, units in ledger.pieces(pieces) if units < ledger.size[s]], dtype=np.int64)
    worth[cut] = True
    return worth


def added(codes: np.ndarray, model: CostModel) -> np.ndarray:
    """[N] ms that parts of these codes [N, F] add to an op, without its launch."""
    return np.maximum(0.0, np.asarray(model.head(2 * codes)) - model.head(codes))


def keeping(of: Space, held: np.ndarray, reshard: Reshard, new: Sequence[Table]) -> Space:
    """The space in which only so much may move from held [S, D]; the `new` tables may go anywhere. Row ranges, which TorchRec
    runs on all devices alone, stay where they are."""
    free, ledger = {t.name for t in new}, of.ledger

    def unit_bytes(strip: int) -> int:
        return 0 if ledger.table(strip).name in free else sum(s.bytes for s in ledger.items([(strip, 1)])[0])

    fixed, limits = of.fixed, {}
    if reshard.limited:
        most = [np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)]
        limits = {"kept": held.copy(), "weight": np.array([unit_bytes(s) for s in range(len(ledger))], np.int64),
                  "most_moved": np.array(most, np.int64), "every": np.zeros_like(fixed.every)}
    if fixed.kind.any():
        limits["allowed"] = ledger.allowed & (fixed.kind == 0)[:, None]
    return replace(of, fixed=fixed._replace(**limits))


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


# --- tables everywhere -------------------------------------------------------------------------------------------------


def _everywhere(problem: Problem, model: CostModel, ledger: Ledger, exchange: Mapping[str, np.ndarray],
                wanted: bool, by_rows: Collection[str]) -> dict[str, np.ndarray]:
    """every, every_codes, every_bytes, every_size, every_rate, every_once, see anneal.Fixed. Whole tables that lookups hit and no
    constraint concerns may be copied; and their rows divided, where these are not ordered, all devices get some, and no strip is
    a row range (such ones would run in the same op). by_rows: those that always are."""
    n, topology, batch = len(problem.topology), problem.topology, problem.global_batch
    if not by_rows and (not wanted or n == 1):
        nothing = np.zeros((2, len(ledger)))
        return {"every": nothing > 0, "every_codes": np.zeros((*nothing.shape, ledger.codes.shape[1])),
                "every_bytes": nothing.astype(np.int64), "every_size": nothing,
                "every_rate": np.zeros(2), "every_once": np.zeros(2)}
    whole = [Shard.whole(ledger.table(s)) for s in range(len(ledger))]
    bound = {*problem.pinned, *problem.whole, *by_rows}
    free = np.array([wanted and n > 1 and ledger.kind[s] == 0 and w.width == MIN_WIDTH * ledger.size[s] and w.table.pooling > 0
                     and w.table.name not in bound for s, w in enumerate(whole)], dtype=bool)
    share = [even_share(w.rows, n) for w in whole]
    divides = np.array([not w.table.ordered and rows is not None for w, rows in zip(whole, share, strict=True)], dtype=bool)
    every = np.stack([free & divides & (not ledger.kind.any()), free])
    codes, size = np.zeros((2, len(whole), ledger.codes.shape[1])), np.zeros(every.shape)
    n_bytes = np.zeros(every.shape, np.int64)
    if (wanted and n > 1) or by_rows:
        shares = [replace(w, row_hi=rows or w.rows) for w, rows in zip(whole, share, strict=True)]
        codes[ROWS] = model.encode(shares)
        codes[COPIES] = model.encode(whole, problem.local_batch)
        n_bytes[ROWS] = [shard_bytes(s, batch, problem.optimizer) for s in shares]
        n_bytes[COPIES] = [shard_bytes(w, problem.local_batch, problem.optimizer, replicated=True) for w in whole]
        size[ROWS], size[COPIES] = [w.width // MIN_WIDTH for w in whole], [w.rows * w.width for w in whole]
    most = max(Counter(d.host for d in topology.devices).values())
    times = {"own": 1, "busiest": 1, "host_busiest": most, "total": n}
    rows_rate = sum(exchange[name][1] * k for name, k in times.items())
    low, high = all_reduce_ms(problem, model, np.array([2.0**20, 2.0**22])).max(1)
    copies_rate = max(0.0, high - low) / (2.0**22 - 2.0**20)
    return {"every": every, "every_codes": codes, "every_bytes": n_bytes, "every_size": size,
            "every_rate": np.array([rows_rate, copies_rate]),
            "every_once": np.array([exchange["once"][1], max(0.0, low - copies_rate * 2.0**20)])}


def all_reduce_ms(problem: Problem, model: CostModel, cells: np.ndarray) -> np.ndarray:
    """[N, D] ms of all-reducing the gradients of cells [N]."""
    moved = np.repeat(cells[:, None] * float(OUTPUT_BYTES), len(problem.topology), 1)
    zero = np.zeros_like(moved)
    return np.asarray(model.comm(Traffic(zero, zero, moved), zero, problem.topology).backward_ms)


def worth_copying(space: Space, model: CostModel) -> np.ndarray:
    """[N] the strips that had better be copied to all devices, were all other work divided evenly: by falling gain, as many as
    make the step cheapest and fit."""
    fixed, may = space.fixed, np.flatnonzero(space.fixed.every[COPIES])
    if not len(may):
        return may
    n, speed, slowest = len(fixed.speed), fixed.speed.sum(), fixed.speed.min()
    codes, copies = fixed.codes[fixed.part[np.arange(len(fixed.size)), fixed.size]], fixed.every_codes[COPIES, may]
    total, size = codes.sum(0), fixed.every_size[COPIES, may]
    of_width = (fixed.own + fixed.busiest + fixed.host_busiest * n / len(space.problem.topology.hosts))[0] / n + fixed.total[0]

    def divided_ms(left: np.ndarray) -> np.ndarray:
        return model.head(np.maximum(left, 0) / n) * n / speed

    beside = copies.sum(0)  # what a table costs among the others, not alone
    extra = (model.head(beside[None]) - model.head(np.maximum(beside - copies, 0))) / slowest + fixed.every_rate[COPIES] * size
    saved = divided_ms(total[None]) - divided_ms(total - codes[may]) + of_width * fixed.size[may]
    order = np.argsort(extra - saved, kind="stable")
    room = fixed.free.min() - fixed.every_bytes[ROWS, space.by_rows].sum()
    fits = np.cumsum(fixed.every_bytes[COPIES, may[order]]) <= room
    order = order[:int(fits.argmin()) if not fits.all() else len(order)]
    if not len(order):
        return order
    step = (divided_ms(total - np.cumsum(codes[may[order]], 0)) - of_width * np.cumsum(fixed.size[may[order]])
            + model.head(np.cumsum(copies[order], 0)) / slowest + fixed.every_once[COPIES]
            + fixed.every_rate[COPIES] * np.cumsum(size[order]))
    return may[order[:int(step.argmin()) + 1]] if step.min() < divided_ms(total[None])[0] else may[:0]
