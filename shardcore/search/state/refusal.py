"""Refusal: why a problem does not fit, and how much more memory, or how many more devices, would do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from shardcore.core.constraints import Constraints
from shardcore.core.topology import DEFAULT_RESERVE, default_reserve
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.search.state.packing import packings_of, roomiest
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, device_names, even_share, run_of
from shardcore.step.memory import Account, account_of, gib, held_bytes
from shardcore.step.shard_memory import run_batches
from shardcore.step.ways import division, equal_parts, fixed_placements, why_not

MOST_DEVICES = 256
"""The largest number of further devices that a remedy suggests."""


_LARGE = 1 << 16
"""Devices × tables of a large problem, of which no remedy is tried."""


class _Whole:
    """Bytes of tables that are whole and by columns, beside `fixed_placements`.

    packings: with the tables, in bundles that go together.
    may_hold: [D] bytes that devices may hold, without those of fixed placements.
    by_columns: the tables that may run so.
    batches: each run's share of a local batch. Empty if no table may be whole, and none is fixed.
    account: memory of plans with these. Only with batches.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.fixed = problem, fixed_placements(problem)
        self.packings, self.may_hold = packings_of(problem), held_bytes(problem)
        self.bundles = [self.packings.bundles[i] for i in self.packings.searched_bundles]
        self.by_columns = [
            s for bundle in self.bundles for s in bundle if why_not(WHOLE_ROWS, s.table, problem) is None
        ]
        self.batches = run_batches([*map(_on_one, self.by_columns), *self.fixed], problem)
        if self.batches:
            self.account = Account.of(self.batches, problem)
            # Messages compare with what is left in the phase in which fixed tables take most.
            of_fixed = self.account.loads(self.fixed)[:, : self.account.phases].max(1)
            self.may_hold = [n - math.ceil(taken) for n, taken in zip(self.may_hold, of_fixed, strict=True)]

    def bytes_together(self, shards: Sequence[Shard], n_devices: int) -> int:
        """Bytes that tables by columns take on so many devices together, in the largest phase."""
        shards = [s for s in shards if why_not(WHOLE_ROWS, s.table, self.problem) is None]
        if not shards:
            return 0
        # Each device has the local batch.
        n_bytes = self._bytes(shards) + n_devices * self.account.base
        return math.ceil(n_bytes[: self.account.phases].max())

    def excess_of_all(self) -> int:
        """Bytes that all tables lack on all devices together, in the phase in which they lack most."""
        if not self.batches:
            return 0
        room = self.account.limits - self.account.base - self.account.loads(self.fixed)
        # [P] room that is less than nothing on one device does not count against others.
        lacks = self._bytes(self.by_columns) - np.maximum(room, 0).sum(0)
        return math.ceil(lacks[: self.account.phases].max())

    def _bytes(self, shards: Iterable[Shard]) -> np.ndarray:
        """[P] bytes of tables."""
        return self.account.loads(map(_on_one, shards)).sum(0)

    def narrowest(self, table: Table) -> int:
        """Bytes that a device has of a table's narrowest columns, with the local batch, in the largest phase."""
        parts = equal_parts(Shard.whole(table), table.dim // self.problem.unit_width(table))
        others = (s for s in self.by_columns if s.table != table)
        account = account_of([*map(_on_one, (*others, *parts)), *self.fixed], self.problem)
        return math.ceil(
            (account.base + account.vector(run_of(WHOLE_ROWS.name, table), parts[-1]))[: account.phases].max()
        )


def _on_one(shard: Shard) -> Placement:
    return Placement(WHOLE_ROWS.name, shard, (0,))


@lru_cache(maxsize=4)  # several sharders refuse one problem, and remedies take seconds to find
def refusal(problem: Problem, planned_share: float | None = None) -> str:
    """The first thing that is too large, and remedies. The problem must not fit.

    planned_share: share of memory that TorchRec's planner keeps free, which devices do not have. Further devices then
        bring their local batch. None: there is no such planner.
    """
    uncut, reserved = _Whole(problem), problem.constraints.reserved_bytes
    least = min(d.memory_bytes for d in problem.topology.devices)
    reason = _fixed_too_large(uncut)
    notes = {
        f"{gib(reserved)} of each stays free: constraints.reserved_bytes": reserved > 0,
        # Less than 128 KiB was meant in GB or MB.
        f"a device has memory_bytes {least}; it needs to be in bytes, such as 80000000000 for 80 GB": least
        < 1 << 17,
        f"{gib(held_bytes(problem)[0] - uncut.may_hold[0])} of each is for tables on all devices: "
        "constraints.kinds": bool(uncut.fixed) and not reason,
    }
    # From the simplest reason on: the first that holds is the message.
    reason = reason or _sum_too_large(uncut) or _one_too_large(uncut) or _pins_too_large(uncut)
    if not reason:
        whole = [t.name for t in problem.tables if t.name in problem.whole]
        why = ", ".join(sorted({str(problem.kept_whole_by(name)) for name in whole}))
        reason = (
            f"no way was found to pack it: its tables, {gib(sum(t.bytes for t in problem.tables))} of weights, "
            f"leave gaps that are too small on its {len(problem.topology)} devices. "
            + (f"Tables {shown(whole)} must stay whole ({why}). " if whole else "")
            + "Tried: tables whole, cut by columns, divided by rows and on all devices"
        )
    kept = "".join(f" ({note})" for note, holds in notes.items() if holds)
    return f"problem {problem.name!r} does not fit: {reason}{kept}. {_remedy(problem, planned_share)}"


# --- reasons: each says what is too large. "": nothing is ---------------------------------------------------


def _hold(available: int, needed: int) -> str:
    """The end of a reason: how much devices may hold, and how much that is too little."""
    return f"may hold {gib(available)}, {gib(needed - available)} too little"


def _fixed_too_large(uncut: _Whole) -> str:
    """The tables on all devices, if some device does not hold them."""
    if not uncut.fixed:
        return ""
    # Beyond the phases are limits of ops, which are no bytes.
    needs = math.ceil(
        (uncut.account.base + uncut.account.loads(uncut.fixed))[:, : uncut.account.phases].max()
    )
    least = min(held_bytes(uncut.problem))
    if needs <= least:
        return ""
    return (
        f"tables {shown(p.shard.table.name for p in uncut.fixed)}, on all devices (constraints.kinds), take "
        f"{gib(needs)} of each with outputs; the smallest {_hold(least, needs)}"
    )


def _sum_too_large(uncut: _Whole) -> str:
    """All tables, if they take more than all devices have."""
    lacks, available = uncut.excess_of_all(), _available(uncut.may_hold)
    if lacks <= 0:
        return ""
    return (
        f"its {sum(map(len, uncut.bundles))} tables take {gib(available + lacks)} with their outputs; "
        f"its {len(uncut.may_hold)} devices may hold {gib(available)} together, {gib(lacks)} too little"
    )


def _one_too_large(uncut: _Whole) -> str:
    """A table, or several kept on one device, that fit no device in any way."""
    problem = uncut.problem
    for i, bundle in zip(uncut.packings.searched_bundles, uncut.bundles, strict=True):
        if uncut.packings.alone(i):
            continue
        table = bundle[0].table
        # The message is of the device that comes nearest.
        largest = max(uncut.may_hold[d] for d in problem.allowed_devices(table.name))
        where = " where it may live" if table.name in problem.pinned else ""
        if table.name in problem.whole or len(bundle) > 1:
            n_bytes = uncut.bytes_together(bundle, 1)
            what = f"table {table.name!r}, which must stay whole ({problem.kept_whole_by(table.name)}), takes"
            if len(bundle) > 1:
                what = (
                    f"the group {shown(s.table.name for s in bundle)}, kept on one device "
                    "(constraints.together), takes"
                )
            why = ""
        elif why_not(WHOLE_ROWS, table, problem) is not None:
            cause = problem.why_no_codec(WHOLE_ROWS, table) or "constraints.kinds"
            return (
                f"table {table.name!r} has to be divided by rows ({cause}), and {_undividable(uncut, table)}"
            )
        else:
            n_bytes, width = uncut.narrowest(table), problem.unit_width(table)
            what, why = f"{width} columns of table {table.name!r} take", f", and {_undividable(uncut, table)}"
        if n_bytes > largest:
            return f"{what} {gib(n_bytes)} with outputs; the largest device{where} {_hold(largest, n_bytes)}{why}"
    return ""


def _undividable(uncut: _Whole, table: Table) -> str:
    """Reason that the table's rows cannot be divided."""
    problem, allowed = uncut.problem, uncut.problem.allowed_devices(table.name)
    whole = division(table, problem)
    if whole is None:
        dividing = (kind for kind in LAYOUTS.values() if kind.divides_rows)
        if reason := next(filter(None, (problem.why_no_codec(kind, table) for kind in dividing)), ""):
            return reason
        if len(allowed) == 1:
            return "there is no other device to have some of its rows"
        if set(allowed) >= set(problem.topology.on_hosts[0]) and not even_share(table.rows, len(allowed)):
            return (
                f"TorchRec cannot divide {table.rows} rows over {len(allowed)} devices: "
                "the last would have none"
            )
        return (
            "TorchRec divides rows over all devices, or a whole host, "
            "where it may not be (constraints.pinned)"
        )
    # It counts the table's outputs twice: whole, and divided.
    account = Account.of(uncut.batches | run_batches([whole], problem), problem)
    may_hold = held_bytes(problem)
    needs = np.ceil((account.loads([whole]) + account.base)[:, : account.phases].max(1)).astype(int)
    # Of all devices that would have rows, the one that lacks most.
    d = max(whole.devices, key=lambda d: needs[d] - may_hold[d])
    which = f"{'all' if len(whole.devices) == len(may_hold) else 'its'} {len(whole.devices)} devices"
    return (
        f"its rows, which TorchRec divides evenly over {which}, take {gib(needs[d])} on device {d}, "
        f"which may hold {gib(may_hold[d])}"
    )


def _pins_too_large(uncut: _Whole) -> str:
    """Tables pinned to some devices that take more memory than these have.

    This is Hall's condition, for each set of devices that some table is pinned to.
    """
    problem = uncut.problem
    pinned: dict[frozenset[int], list[Table]] = {}
    for table in (t for t in problem.tables if t.name in problem.pinned):
        pinned.setdefault(frozenset(problem.pinned[table.name]), []).append(table)
    # Small sets first: they name fewer tables.
    for devices in sorted(pinned, key=len):
        # All tables whose devices lie within this set compete for its memory.
        tables = [t for within, several in pinned.items() if within <= devices for t in several]
        needed = uncut.bytes_together(list(map(Shard.whole, tables)), len(devices))
        available = _available(uncut.may_hold[d] for d in devices)
        if needed > available:
            return (
                f"the tables pinned to {device_names(sorted(devices))} (constraints.pinned), "
                f"{shown(t.name for t in tables)}, take {gib(needed)} with their outputs; "
                f"{'it' if len(devices) == 1 else 'they'} {_hold(available, needed)}"
            )
    return ""


def _available(may_hold: Iterable[int]) -> int:
    return sum(max(0, n) for n in may_hold)


def shown(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- remedies: each was tried --------------------------------------------------------------------------------


def _remedy(problem: Problem, planned_share: float | None) -> str:
    """The least memory per device, or number of devices, that has to be added, and what else would do."""
    # A default reserve is a share of the memory, so it grows with more memory.
    grows = problem.constraints.reserved_bytes == default_reserve(problem.topology.devices) > 0
    share = DEFAULT_RESERVE if grows else planned_share or 0.0
    plan, excess_bytes = roomiest(problem)
    more = f"{_enough(math.ceil(excess_bytes / (1 - share)) + (share > 0))} more per device"
    remedies = [*[more] * (plan is not None), *_more_devices(problem, planned_share is not None)]
    # Would it fit without constraints? (Towers are pins, too, so their ratio goes with them.)
    kept = Constraints(problem.constraints.reserved_bytes, problem.constraints.unsplit)
    loose = replace(problem, job=replace(problem.job, tower_ratio=None), constraints=kept)
    # TorchRec's planner has constraints that nobody gave.
    if planned_share is None and kept != problem.constraints and _fits(loose):
        given = [
            f.name for f in fields(kept) if getattr(kept, f.name) != getattr(problem.constraints, f.name)
        ]
        remedies.append(f"without constraints.{' and constraints.'.join(given)}")
    return f"It would fit with {', or '.join(remedies) or 'other constraints or tables'}" + (
        ""
        if any(t.in_host_memory for t in problem.tables)
        else "; `python -m shardcore plan --tiers` tries host memory"
    )


def _fits(problem: Problem) -> bool:
    on_devices, may_hold = [t for t in problem.tables if not t.in_host_memory], held_bytes(problem)
    # Quick to tell: each weight is on some device, and all of a table that stays whole is on one.
    if sum(t.bytes for t in on_devices) > sum(max(0, n) for n in may_hold) or any(
        t.bytes > max(may_hold) for t in on_devices if t.name in problem.whole
    ):
        return False
    plan, lacks = roomiest(problem, quick=True)
    return plan is not None and lacks <= 0


def _more_devices(problem: Problem, grows: bool) -> list[str]:
    """The least number of further devices like the largest, in words. Empty if none was found.

    The global batch has to divide evenly. If it does not grow, a number may need the next smaller batch.

    grows: whether further devices keep the local batch and come in whole hosts.
    """
    topology, devices = problem.topology, problem.topology.devices
    each = len(devices) // len(topology.hosts) if grows else 1
    largest = max(devices, key=lambda d: d.memory_bytes)

    def with_more(n: int) -> Problem:
        # Otherwise on an existing host, so that no further link between hosts comes in.
        names = (
            f"more-{i // each}" if grows and len(topology.hosts) > 1 else devices[-1].host for i in range(n)
        )
        every = (*devices, *(replace(largest, host=name) for name in names))
        local = problem.local_batch if grows else problem.global_batch // len(every)
        return replace(problem, topology=topology.of_devices(every), global_batch=local * len(every))

    # Tries of a large problem take long.
    most = min(
        MOST_DEVICES, _LARGE // len(problem.tables) - len(devices), problem.global_batch - len(devices)
    )
    # Each number about 10% larger than the one before.
    numbers = sorted({each * round(1.1**k) for k in range(60)})
    found = next((n for n in numbers if n <= most and _fits(with_more(n))), None)
    if found is None:
        return []
    words = f"{found} more device{'s' * (found > 1)} like the largest"
    if grows or problem.global_batch % (len(devices) + found) == 0:
        return [words]
    words += f" at a batch of {with_more(found).global_batch:,}, which they divide"
    even = (
        n
        for n in range(found, most + 1)
        if problem.global_batch % (len(devices) + n) == 0 and _fits(with_more(n))
    )
    return [words, *(f"{n} at this batch" for n in islice(even, 1))]


def _enough(n_bytes: int) -> str:
    """A size in words, rounded up, so that what a remedy names is enough."""
    if n_bytes < 0.1 * 2**20:
        return gib(n_bytes)
    unit = 2**30 if n_bytes >= 0.1 * 2**30 else 2**20
    return gib(math.ceil(10 * n_bytes / unit) / 10 * unit)
