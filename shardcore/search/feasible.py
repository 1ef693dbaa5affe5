"""Feasibility: what every sharder begins with.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardcore.amounts import run_batches
from shardcore.constraints import Constraints
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.inputs import sample_bytes
from shardcore.layouts import WHOLE_ROWS, device_names, run_of, shards_on
from shardcore.memory import gib, held_bytes, require_fits, resident_bytes
from shardcore.op_limits import require_ops
from shardcore.phases import IDS_ALIVE
from shardcore.search.host_room import dealt
from shardcore.search.packing import roomiest
from shardcore.search.shards import (
    Bundle,
    bundles,
    division,
    equal_parts,
    fixed_placements,
    halve_columns,
    searched_tables,
    why_not,
)
from shardcore.step.memory_account import Account, account_of
from shardcore.topology import DEFAULT_RESERVE, default_reserve
from shardcore.types import Placement, Plan, Problem, Shard, Table

MOST_DEVICES = 256
"""The largest number of further devices that a remedy suggests."""


class DoesNotFit(Infeasible):
    """No plan was found that fits."""


def feasible_shards(problem: Problem) -> list[Shard]:
    """The shards to start from. Every table is whole, unless no device where it may live can hold it.

    Such a table is halved by columns until its shards fit.
    If its narrowest columns are still too large, its rows are divided (`division`).
    Sequences are divided by rows at once where that is possible, and else cut into equal parts.
    Tables in problem.whole are never cut. Those of `fixed_placements` are not among them.

    Raises Infeasible if that is not possible, or takes more memory than there is, and no other plan fits
    either (`fitting`).
    """
    _require_widths(problem)
    return _Cuts(problem).shards()


def fitting(problem: Problem) -> Plan:
    """A plan that fits, for a sharder whose own placing failed. Raises DoesNotFit if none is found."""
    plan, lacks = roomiest(problem)
    if plan is not None and lacks <= 0:
        try:
            require_fits(plan, problem)
            require_ops(plan, problem)
            return plan
        except Infeasible:
            # Hosts may hold more or less. So tables there are dealt to hosts first.
            pinned = dealt(problem)
            if pinned is None:
                raise
            return fitting(pinned)
    raise DoesNotFit(f"{_reason(problem, lacks)}. {remedy(problem)}")


class _Cuts:
    """How far tables have to be cut to fit on devices, each alone with the local batch.

    account: of plans with all tables whole, but those of `fixed_placements`. cut: the same, cut by columns.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.fixed = problem, fixed_placements(problem)
        self.bundles = bundles(map(Shard.whole, searched_tables(problem)), problem)
        whole = [Placement(WHOLE_ROWS.name, s, (0,)) for bundle in self.bundles for s in bundle
                 if why_not(WHOLE_ROWS, s.table, problem) is None]
        self.batches = run_batches([*whole, *self.fixed], problem)
        if self.batches:
            self.account = Account.of(self.batches, problem)
            self.cut = Account.of({run: replace(batch, cut=not run.local_batch)
                                   for run, batch in self.batches.items()}, problem)

    def shards(self) -> list[Shard]:
        problem, found, possible, total = self.problem, [], True, 0.0
        room = self._room(self.account) if self.batches else np.zeros((len(problem.topology), 1))
        for bundle in self.bundles:
            table, lacks = bundle[0].table, math.inf
            if all(why_not(WHOLE_ROWS, s.table, problem) is None for s in bundle):
                vector = sum(self.account.vector(run_of(WHOLE_ROWS.name, s.table), s) for s in bundle)
                at = problem.pinned.get(table.name)
                lacks = (vector - (room if at is None else room[list(at)])).max(1).min()
                total = total + vector
            if lacks <= 0 and table.dim <= problem.topology.most_columns:
                found += bundle
            elif (parts := self._cut(bundle)) is not None:
                found += parts
            else:
                possible = False
        # However shards are placed, all devices together hold their sum.
        if not possible or np.any(total > np.maximum(room, 0).sum(0) * (1 + 1e-9)):
            return self._shards_of(fitting(problem))
        return found

    def _room(self, account: Account) -> np.ndarray:
        """[D, P] bytes that devices have for shards."""
        return account.limits - account.base - account.loads(self.fixed)

    def _cut(self, bundle: Bundle) -> list[Shard] | None:
        """A table in shards of which each fits on some device. None if there are none."""
        problem, table = self.problem, bundle[0].table
        if len(bundle) > 1 or table.name in problem.whole:
            return None
        divided, by_columns = division(table, problem), why_not(WHOLE_ROWS, table, problem) is None
        ranges = [s for _, s in shards_on(divided)] if divided and self._fits_divided(divided) else None
        if not by_columns or (table.sequence and ranges):
            return ranges
        if table.sequence:
            # TorchRec needs the columns of a sequence equally wide.
            unit = problem.unit_width(table)
            equal = (equal_parts(table, n) for n in range(2, len(problem.allowed_devices(table.name)) + 1)
                     if table.dim % n == 0 and table.dim // n % unit == 0)
            return next(filter(self._fits, equal), None)
        parts = [Shard.whole(table)]
        while parts[0].width > problem.most_width(table) or not self._fits(parts):
            halves = [halve_columns(shard, problem.unit_width(table)) for shard in parts]
            if None in halves:
                return ranges
            parts = [half for both in halves for half in both]
        return parts

    def _fits(self, parts: Sequence[Shard]) -> bool:
        """Tell if each of some parts of a table fits on a device."""
        table, widest = parts[0].table, max(parts, key=lambda s: s.width)
        ids = (len(parts) - 1) * sample_bytes(table, self.problem.job) * self.problem.local_batch * IDS_ALIVE
        needs = self.cut.vector(run_of(WHOLE_ROWS.name, table), widest) + ids
        return bool((needs <= self._room(self.cut)[list(self.problem.allowed_devices(table.name))]
                     ).all(1).any())

    def _fits_divided(self, divided: Placement) -> bool:
        """Tell if each row range fits on its device. It counts the table's outputs twice."""
        batches = self.batches | run_batches([divided], self.problem)
        account, devices = Account.of(batches, self.problem), list(divided.devices)
        return bool((account.loads([divided]) <= self._room(account))[devices].all())

    def _shards_of(self, plan: Plan) -> list[Shard]:
        """The shards of a plan. Tables that it has on several devices are whole, or divided by rows."""
        fixed = {p.shard.table.name for p in self.fixed}
        found = []
        for placement in plan.placements:
            if placement.shard.table.name in fixed:
                continue
            divided = division(placement.shard.table, self.problem) if len(placement.devices) > 1 else None
            if divided is not None and divided.kind == placement.kind:
                found += [s for _, s in shards_on(divided)]
            else:
                found.append(placement.shard)
        return found


def _require_widths(problem: Problem) -> None:
    """Raise ShardCoreError for a table with more columns than FBGEMM runs where it may live."""
    most = problem.topology.most_columns
    for table in (t for t in problem.tables if t.dim > most):
        if why := why_not(WHOLE_ROWS, table, problem):
            raise ShardCoreError(f"problem {problem.name!r} cannot place table {table.name!r}: {why}")
        if -(-table.dim // problem.most_width(table)) > len(problem.allowed_devices(table.name)):
            raise ShardCoreError(
                f"problem {problem.name!r} cannot place table {table.name!r}: it has {table.dim} columns, "
                f"and FBGEMM's CUDA op runs at most {most} in a shard; it needs "
                f"{-(-table.dim // problem.most_width(table))} devices, and it may live on "
                f"{len(problem.allowed_devices(table.name))} (a CPU, by topology.hardware, has no limit)")


def _reason(problem: Problem, lacks: int) -> str:
    """Why a problem does not fit: the first thing that is too large by itself, or the gaps of a packing."""
    may_hold, reserved = held_bytes(problem), problem.constraints.reserved_bytes
    kept = f" ({gib(reserved)} of each stays free: constraints.reserved_bytes)" if reserved else ""
    reason = _too_large(problem, may_hold) or (
        f"no way was found to pack it: its tables, {gib(sum(t.bytes for t in problem.tables))} of weights, "
        f"leave gaps that are too small on {len(may_hold)} devices, or their outputs and ids take too much")
    return f"problem {problem.name!r} does not fit: {reason}{kept}"


def _too_large(problem: Problem, may_hold: Sequence[int]) -> str:
    """What takes more memory than there is, whatever else is placed, and by how much. "": nothing does."""
    resident = {t.name: _resident(t, problem) for t in problem.tables}
    needed, available = sum(resident.values()), sum(max(0, n) for n in may_hold)
    if needed > available:
        return (f"its {len(problem.tables)} tables take {gib(needed)} of weights and optimizer state; its "
                f"{len(may_hold)} devices may hold {gib(available)} together, {gib(needed - available)} too "
                "little")
    for bundle in bundles((Shard.whole(t) for t in problem.tables if t.name in problem.whole), problem):
        account = account_of([Placement(WHOLE_ROWS.name, s, (0,)) for s in bundle], problem)
        vector = sum(account.vector(run_of(WHOLE_ROWS.name, s.table), s) for s in bundle) + account.base
        limits = account.limits[list(problem.allowed_devices(bundle[0].table.name))]
        if (lacks := (vector - limits).max(1).min()) > 0:
            where = " where it may live" if bundle[0].table.name in problem.pinned else ""
            return (f"{_describe(bundle, problem)} takes {gib(vector.max())} with outputs; the largest "
                    f"device{where} may hold {gib(limits.max())}, {gib(lacks)} too little")
    return _pins_too_large(problem, resident, may_hold)


def _resident(table: Table, problem: Problem) -> int:
    return sum(resident_bytes(run_of(WHOLE_ROWS.name, table), Shard.whole(table), problem))


def _describe(bundle: Bundle, problem: Problem) -> str:
    """A bundle in the words of an error message."""
    name = bundle[0].table.name
    if len(bundle) > 1:
        return f"the group {shown(s.table.name for s in bundle)}, kept on one device (constraints.together),"
    return f"table {name!r}, which must stay whole ({problem.kept_whole_by(name)}),"


def _pins_too_large(problem: Problem, resident: Mapping[str, int], may_hold: Sequence[int]) -> str:
    """Tables pinned to some devices that take more memory than these have. "": none do.

    This is Hall's condition, for each set of devices that some table is pinned to.
    """
    pinned: dict[frozenset[int], list[str]] = {}
    for name in (t.name for t in problem.tables if t.name in problem.pinned):
        pinned.setdefault(frozenset(problem.pinned[name]), []).append(name)
    for devices in sorted(pinned, key=len):
        # All tables whose devices lie within this set compete for its memory.
        names = [name for within, of in pinned.items() if within <= devices for name in of]
        needed, available = sum(resident[n] for n in names), sum(max(0, may_hold[d]) for d in devices)
        if needed > available:
            return (f"the tables pinned to {device_names(sorted(devices))} (constraints.pinned), "
                    f"{shown(names)}, take {gib(needed)}; {'it' if len(devices) == 1 else 'they'} may hold "
                    f"{gib(available)}, {gib(needed - available)} too little")
    return ""


def shown(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def remedy(problem: Problem) -> str:
    """How much more memory per device, or how many more devices, would be enough, by the exact count.

    The problem must not fit.
    """
    lacks = roomiest(problem)[1]
    reserved_by_default = problem.constraints.reserved_bytes == default_reserve(problem.topology.devices)
    # Of more memory, more is kept free.
    more = round(lacks / (1 - DEFAULT_RESERVE)) if reserved_by_default else lacks
    remedies = [f"{_enough(more)} more per device"]
    if n := _more_devices(problem):
        remedies.append(f"{n} more device{'s' * (n > 1)} like the largest")
    # Would it fit without pins and bundles?
    loose = replace(problem, job=replace(problem.job, tower_ratio=None),
                    constraints=Constraints(problem.constraints.reserved_bytes, problem.constraints.unsplit))
    eased = loose.constraints != problem.constraints and _fits(loose)
    return (f"By the exact count {_enough(lacks)} are lacking. It would fit with {' or '.join(remedies)}, "
            "or with less in the tables" + ", or without its pins and groups" * eased
            + ", or with rows in host memory (python -m shardcore tiers)"
            * (not any(t.in_host_memory for t in problem.tables)))


def _fits(problem: Problem) -> bool:
    plan, lacks = roomiest(problem, quick=True)
    return plan is not None and lacks <= 0


def _more_devices(problem: Problem) -> int | None:
    """How many more devices like the largest are enough. As many as divide the batch. None if too many."""
    devices = problem.topology.devices
    largest = replace(max(devices, key=lambda d: d.memory_bytes), host=devices[-1].host)
    numbers = [n for n in range(1, MOST_DEVICES + 1) if problem.global_batch % (len(devices) + n) == 0]

    def enough(n: int) -> bool:
        return _fits(replace(problem, topology=replace(problem.topology, devices=(*devices, *[largest] * n))))

    # What is enough stays enough with more. Doubling first, for many devices take long to try.
    low, high = 0, 1
    while high <= len(numbers) and not enough(numbers[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(numbers))
    if high <= low or (low and not enough(numbers[high - 1])):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(numbers[middle - 1]) else (middle, high)
    return numbers[high - 1]


def _enough(n_bytes: int) -> str:
    """A size for people that is not less, whatever its digits."""
    if n_bytes < 0.1 * 2**20:
        return gib(n_bytes)
    unit = 2**30 if n_bytes >= 0.1 * 2**30 else 2**20
    return gib(math.ceil(10 * n_bytes / unit) / 10 * unit)
