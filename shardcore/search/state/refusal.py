"""Refusal: why a problem does not fit, and how much more memory, or how many more devices, would do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from shardcore.core.constraints import Constraints
from shardcore.core.topology import DEFAULT_RESERVE, default_reserved_bytes
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.search.state.packing import least_excess_plan, packings_of
from shardcore.step.kinds import SHARDING_KINDS, device_names, kind_on_one_device
from shardcore.step.memory import memory_account, size_text, usable_bytes
from shardcore.step.ways import cut_into_equal_parts, fixed_placements, reason_not_runnable, row_division

MOST_DEVICES = 256
"""The largest number of further devices that a remedy suggests."""


_LARGE = 1 << 16
"""Devices × tables of a large problem, of which no remedy is tried."""


class _WholeTables:
    """Bytes of tables that are whole and by columns, beside `fixed_placements`.

    packings: with the tables, in bundles that go together.
    may_hold: [D] bytes that devices may hold, without those of fixed placements.
    by_columns: the tables that may run so.
    account: memory of plans with these. None if no table may be whole, and none is fixed.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.fixed = problem, fixed_placements(problem)
        self.packings, self.may_hold = packings_of(problem), usable_bytes(problem)
        self.bundles = [self.packings.bundles[i] for i in self.packings.searched_bundles]
        self.by_columns = [
            s
            for bundle in self.bundles
            for s in bundle
            if reason_not_runnable(kind_on_one_device(s.table), s.table, problem) is None
        ]
        placements = [*map(_placement_on_first_device, self.by_columns), *self.fixed]
        self.account = memory_account(placements, problem) if placements else None
        if self.account:
            of_fixed = self.account.device_loads(self.fixed)
            self._room = self.account.limits - self.account.base - of_fixed  # [D, P]
            # Messages compare with what is left in the phase in which fixed tables take most.
            taken = np.ceil(of_fixed[:, : self.account.phases].max(1)).astype(int).tolist()
            self.may_hold = [n - of for n, of in zip(self.may_hold, taken, strict=True)]

    def excess_reason(self, shards: Iterable[Shard], devices: Sequence[int], what: str, where: str) -> str:
        """Reason text that tables by columns need more memory than some devices have together; "" if they do not."""
        shards = [
            s
            for s in shards
            if reason_not_runnable(kind_on_one_device(s.table), s.table, self.problem) is None
        ]
        if not shards or not self.account:
            return ""
        room = self._room[devices]
        # Of several devices, what is less than nothing on one does not count against others.
        room = np.maximum(room, 0).sum(0) if len(devices) > 1 else room[0]
        # In the phase in which they lack most.
        lacks = self.account.device_loads(map(_placement_on_first_device, shards)).sum(0) - room
        available = sum(max(0, self.may_hold[d]) for d in devices)
        return _excess_reason(
            available + math.ceil(lacks[: self.account.phases].max()), available, what, where
        )

    def device_bytes(self, placements: Sequence[Placement], held: Sequence[Placement]) -> np.ndarray:
        """[D] bytes of each device, in its largest phase, if only the placements `held` were on devices.

        The local batch is that of all tables: some by `placements`, the others whole.
        """
        cut = {p.shard.table for p in placements}
        others = (s for s in self.by_columns if s.table not in cut)
        account = memory_account(
            [*map(_placement_on_first_device, others), *placements, *self.fixed], self.problem
        )
        # Beyond the phases are limits of ops, which are no bytes.
        return np.ceil((account.base + account.device_loads(held))[:, : account.phases].max(1)).astype(int)


def _placement_on_first_device(shard: Shard) -> Placement:
    return Placement(kind_on_one_device(shard.table).name, shard, (0,))


@lru_cache(maxsize=4)  # several sharders refuse one problem, and remedies take seconds to find
def refusal_message(problem: Problem, planned_share: float | None = None) -> str:
    """Error message for a problem that does not fit: the first thing that is too large, and remedies.

    planned_share: share of memory that TorchRec's planner keeps free, which devices do not have. Further devices then
        bring their local batch. None: there is no such planner.
    """
    uncut, reserved = _WholeTables(problem), problem.constraints.reserved_bytes
    least = min(d.memory_bytes for d in problem.topology.devices)
    reason = _refusal_of_fixed_tables(uncut)
    notes = {
        f"{size_text(reserved)} of each stays free: constraints.reserved_bytes": reserved > 0,
        # Less than 128 KiB was meant in GB or MB.
        f"a device has memory_bytes {least}; it needs to be in bytes, such as 80000000000 for 80 GB": least
        < 1 << 17,
        f"{size_text(usable_bytes(problem)[0] - uncut.may_hold[0])} of each is for tables on all devices: "
        "constraints.kinds": bool(uncut.fixed) and not reason,
    }
    # From the simplest reason on: the first that holds is the message.
    reason = (
        reason or _total_bytes_reason(uncut) or _largest_table_reason(uncut) or _pinned_tables_reason(uncut)
    )
    if not reason:
        whole = [t.name for t in problem.tables if t.name in problem.uncut_tables]
        why = ", ".join(sorted({str(problem.constraint_against_cuts(name)) for name in whole}))
        reason = (
            f"no way was found to pack it: its tables, {size_text(sum(t.bytes for t in problem.tables))} of weights, "
            f"leave gaps that are too small on its {len(problem.topology)} devices. "
            + (f"Tables {first_names_text(whole)} must stay whole ({why}). " if whole else "")
            + "Tried: tables whole, cut by columns, divided by rows and on all devices"
        )
    kept = "".join(f" ({note})" for note, holds in notes.items() if holds)
    return f"problem {problem.name!r} does not fit: {reason}{kept}. {_remedies_text(problem, planned_share)}"


# --- reasons: each says what is too large. "": nothing is ---------------------------------------------------


def _excess_reason(needed: int, available: int, what: str, where: str) -> str:
    """Reason text that `what` needs more bytes than `where` may hold; "" if it does not."""
    if needed <= available:
        return ""
    return (
        f"{what} {size_text(needed)} with outputs; {where} may hold {size_text(available)}, "
        f"{size_text(needed - available)} too little"
    )


def _refusal_of_fixed_tables(uncut: _WholeTables) -> str:
    """Reason text for tables on all devices that some device cannot hold; "" if all can."""
    if not uncut.fixed:
        return ""
    names = first_names_text(p.shard.table.name for p in uncut.fixed)
    needed = int(uncut.device_bytes((), uncut.fixed).max())
    what = f"tables {names}, on all devices (constraints.kinds), take on each"
    return _excess_reason(needed, min(usable_bytes(uncut.problem)), what, "the smallest")


def _total_bytes_reason(uncut: _WholeTables) -> str:
    """Reason text for tables that need more memory than all devices have together; "" if they do not."""
    n_tables, n_devices = sum(map(len, uncut.bundles)), len(uncut.may_hold)
    what = f"its {n_tables} tables take"
    return uncut.excess_reason(uncut.by_columns, range(n_devices), what, f"its {n_devices} devices")


def _largest_table_reason(uncut: _WholeTables) -> str:
    """Reason text for a table, or tables kept on one device, that fit no device in any way; "" if all fit."""
    problem = uncut.problem
    for i, bundle in zip(uncut.packings.searched_bundles, uncut.bundles, strict=True):
        if uncut.packings.place_bundle_independently(i):
            continue
        table = bundle[0].table
        # The message is of the device that comes nearest.
        largest = max(problem.allowed_devices(table.name), key=lambda d: uncut.may_hold[d])
        where = f"the largest device{' where it may live' * (table.name in problem.pinned_devices)}"
        stays, width = (
            len(bundle) > 1 or table.name in problem.uncut_tables,
            problem.column_block_width(table),
        )
        if reason_not_runnable(kind_on_one_device(table), table, problem) is not None:
            cause = problem.why_codec_fails(kind_on_one_device(table), table) or "constraints.kinds"
            reason = f"table {table.name!r} has to be divided by rows ({cause})"
        else:
            parts = list(
                map(
                    _placement_on_first_device,
                    bundle if stays else cut_into_equal_parts(Shard.whole(table), table.dim // width),
                )
            )
            # All that stay together are on one device. Of a table that is cut, the narrowest columns are.
            needed = int(uncut.device_bytes(parts, parts if stays else parts[-1:])[0])
            what = f"{width} columns of table {table.name!r} take"
            if len(bundle) > 1:
                names = first_names_text(s.table.name for s in bundle)
                what = f"the group {names}, kept on one device (constraints.together), takes"
            elif stays:
                kept = problem.constraint_against_cuts(table.name)
                what = f"table {table.name!r}, which must stay whole ({kept}), takes"
            reason = _excess_reason(needed, uncut.may_hold[largest], what, where)
        if reason:
            return reason if stays else f"{reason}, and {_undividable_rows_reason(uncut, table)}"
    return ""


def _undividable_rows_reason(uncut: _WholeTables, table: Table) -> str:
    """Reason text why a table's rows cannot be divided."""
    problem = uncut.problem
    whole = row_division(table, problem)
    if whole is None:
        dividing = [kind for kind in SHARDING_KINDS.values() if kind.divides_rows]
        # Why its own kinds cannot, if it has some that divide rows.
        own = [
            kind
            for kind in dividing
            if kind.name in problem.restricted_kinds_by_table.get(table.name, SHARDING_KINDS)
        ]
        return str(reason_not_runnable((own or dividing)[0], table, problem))
    needed, may_hold = uncut.device_bytes([whole], [whole]).tolist(), usable_bytes(problem)
    # Of all devices that would have rows, the one that lacks most.
    d = max(whole.devices, key=lambda d: needed[d] - may_hold[d])
    which = f"{'all' if len(whole.devices) == len(may_hold) else 'its'} {len(whole.devices)} devices"
    return (
        f"its rows, which TorchRec divides evenly over {which}, take {size_text(needed[d])} on device {d}, "
        f"which may hold {size_text(may_hold[d])}"
    )


def _pinned_tables_reason(uncut: _WholeTables) -> str:
    """Reason text for tables pinned to devices that have too little memory for them; "" if there are none.

    This is Hall's condition, for each set of devices that some table is pinned to.
    """
    problem = uncut.problem
    pinned: dict[frozenset[int], list[Table]] = {}
    for table in (t for t in problem.tables if t.name in problem.pinned_devices):
        pinned.setdefault(frozenset(problem.pinned_devices[table.name]), []).append(table)
    # Small sets first: they name fewer tables.
    for devices in map(sorted, sorted(pinned, key=len)):
        # All tables whose devices lie within this set compete for its memory.
        tables = [t for within, several in pinned.items() if within <= set(devices) for t in several]
        names = first_names_text(t.name for t in tables)
        what = f"the tables pinned to {device_names(devices)} (constraints.pinned), {names}, take"
        where = "it" if len(devices) == 1 else "they"
        if reason := uncut.excess_reason(map(Shard.whole, tables), devices, what, where):
            return reason
    return ""


def first_names_text(names: Iterable[str]) -> str:
    """Text of the first five names, and of the number of further ones."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- remedies: each was tried --------------------------------------------------------------------------------


def _remedies_text(problem: Problem, planned_share: float | None) -> str:
    """Text on what would make a problem fit: more memory per device, more devices, or fewer constraints."""
    # A default reserve is a share of the memory, so it grows with more memory.
    grows = problem.constraints.reserved_bytes == default_reserved_bytes(problem.topology.devices) > 0
    share = DEFAULT_RESERVE if grows else planned_share or 0.0
    plan, excess_bytes = least_excess_plan(problem)
    more = f"{_rounded_up_size(math.ceil(excess_bytes / (1 - share)) + (share > 0))} more per device"
    remedies = [*[more] * (plan is not None), *_more_devices_remedies(problem, planned_share is not None)]
    # Would it fit without constraints? (Towers are pins, too, so their ratio goes with them.)
    kept = Constraints(problem.constraints.reserved_bytes, problem.constraints.unsplit)
    loose = replace(problem, job=replace(problem.job, tower_ratio=None), constraints=kept)
    # TorchRec's planner has constraints that nobody gave.
    if planned_share is None and kept != problem.constraints and _is_packing_found(loose):
        given = [
            f.name for f in fields(kept) if getattr(kept, f.name) != getattr(problem.constraints, f.name)
        ]
        remedies.append(f"without constraints.{' and constraints.'.join(given)}")
    return f"It would fit with {', or '.join(remedies) or 'other constraints or tables'}" + (
        ""
        if any(t.in_host_memory for t in problem.tables)
        else "; `python -m shardcore plan --tiers` tries host memory"
    )


def _is_packing_found(problem: Problem) -> bool:
    """Tell if packing finds, by a quick search, a plan that fits."""
    on_devices, may_hold = [t for t in problem.tables if not t.in_host_memory], usable_bytes(problem)
    # Quick to tell: each weight is on some device, and all of a table that stays whole is on one.
    if sum(t.bytes for t in on_devices) > sum(max(0, n) for n in may_hold) or any(
        t.bytes > max(may_hold) for t in on_devices if t.name in problem.uncut_tables
    ):
        return False
    plan, lacks = least_excess_plan(problem, quick=True)
    return plan is not None and lacks <= 0


def _more_devices_remedies(problem: Problem, grows: bool) -> list[str]:
    """Remedies by more devices like the largest, in words; empty if no number of devices helps.

    The global batch has to divide evenly. If it does not grow, a number may need the next smaller batch.

    grows: whether further devices keep the local batch and come in whole hosts.
    """
    topology, devices = problem.topology, problem.topology.devices
    each = len(devices) // len(topology.hosts) if grows else 1
    largest = max(devices, key=lambda d: d.memory_bytes)

    def with_more_devices(n: int) -> Problem:
        # Otherwise on an existing host, so that no further link between hosts comes in.
        names = (
            f"more-{i // each}" if grows and len(topology.hosts) > 1 else devices[-1].host for i in range(n)
        )
        every = (*devices, *(replace(largest, host=name) for name in names))
        local = problem.local_batch if grows else problem.global_batch // len(every)
        return replace(problem, topology=topology.with_devices(every), global_batch=local * len(every))

    # Tries of a large problem take long.
    most = min(
        MOST_DEVICES, _LARGE // len(problem.tables) - len(devices), problem.global_batch - len(devices)
    )
    # Each number about 10% larger than the one before.
    numbers = sorted({each * round(1.1**k) for k in range(60)})
    found = next((n for n in numbers if n <= most and _is_packing_found(with_more_devices(n))), None)
    if found is None:
        return []
    words = f"{found} more device{'s' * (found > 1)} like the largest"
    if grows or problem.global_batch % (len(devices) + found) == 0:
        return [words]
    words += f" at a batch of {with_more_devices(found).global_batch:,}, which they divide"
    even = (
        n
        for n in range(found, most + 1)
        if problem.global_batch % (len(devices) + n) == 0 and _is_packing_found(with_more_devices(n))
    )
    return [words, *(f"{n} at this batch" for n in islice(even, 1))]


def _rounded_up_size(n_bytes: int) -> str:
    """Size in words, rounded up, so that a remedy of that size suffices."""
    if n_bytes < 0.1 * 2**20:
        return size_text(n_bytes)
    unit = 2**30 if n_bytes >= 0.1 * 2**30 else 2**20
    return size_text(math.ceil(10 * n_bytes / unit) / 10 * unit)
