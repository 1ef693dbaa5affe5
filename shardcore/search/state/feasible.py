"""Feasibility: what every sharder begins with.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.progress import ticking
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.search.state.host_room import dealt
from shardcore.search.state.packing import roomiest
from shardcore.search.state.remedies import remedy
from shardcore.search.state.shards import (
    Bundle,
    bundles,
    division,
    equal_parts,
    fixed_placements,
    halve_columns,
    searched_tables,
    why_not,
)
from shardcore.step.id_bytes import sample_bytes
from shardcore.step.kinds import WHOLE_ROWS, device_names, even_share, run_of, shards_on
from shardcore.step.memory import fits, gib, held_bytes, require_fits
from shardcore.step.memory_account import Account
from shardcore.step.memory_timeline import IDS_ALIVE
from shardcore.step.op_limits import require_ops
from shardcore.step.shard_memory import run_batches


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
    return list(_feasible_shards(problem))


@lru_cache(maxsize=4)  # several searches of a problem begin with them
def _feasible_shards(problem: Problem) -> tuple[Shard, ...]:
    cuts = _Cuts(problem)  # refuses kinds that cannot run a table, with those that can
    _require_widths(problem)
    return tuple(cuts.shards())


def fitting(problem: Problem) -> Plan:
    """A plan that fits, for a sharder whose own placing failed.

    Raises DoesNotFit if none is found, and TooManyInOneOp if only FBGEMM's limits refuse what is found.
    """
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
    if plan is not None and fits(plan, problem):
        require_ops(plan, problem)
    raise DoesNotFit(f"{_reason(problem)}. {remedy(problem)}")


class _Cuts:
    """How far tables have to be cut to fit on devices, each alone with the local batch.

    account: of plans with all tables whole, but those of `fixed_placements`. cut: the same, cut by columns.
    may_hold: [D] bytes that devices may hold beside the latter.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.fixed = problem, fixed_placements(problem)
        self.may_hold = held_bytes(problem)
        self.bundles = bundles(map(Shard.whole, searched_tables(problem)), problem)
        whole = [
            Placement(WHOLE_ROWS.name, s, (0,))
            for bundle in ticking(self.bundles)
            for s in bundle
            if why_not(WHOLE_ROWS, s.table, problem) is None
        ]
        self.batches = run_batches([*whole, *self.fixed], problem)
        if self.batches:
            self.account = Account.of(self.batches, problem)
            self.cut = Account.of(
                {run: replace(batch, cut=not run.local_batch) for run, batch in self.batches.items()}, problem
            )
            self._at_most = self._room(self.account)
            self._total = np.zeros(self._at_most.shape[1])
            of_fixed = self.account.loads(self.fixed).max(1)
            self.may_hold = [n - math.ceil(taken) for n, taken in zip(self.may_hold, of_fixed, strict=True)]

    def shards(self) -> list[Shard]:
        fit_whole, found = list(map(self.fits_whole, ticking(self.bundles))), []
        fits = not (self.batches and self._too_much())
        for bundle, is_whole in zip(self.bundles, fit_whole, strict=True):
            found.append(bundle if is_whole else fits and self.cut_of(bundle))
            fits = fits and found[-1] is not None
        if not (fits and self._make_equally_wide(found)):
            return self._shards_of(fitting(self.problem))
        return [shard for parts in found for shard in parts]

    def _too_much(self) -> bool:
        """Tell if all tables do not fit, however they are placed."""
        # All devices together hold their sum, and each holds those that are on all devices.
        together = self._total > np.maximum(self._at_most, 0).sum(0) * (1 + 1e-9)
        return bool(together.any() or (self.fixed and (self._at_most < -0.5).any()))

    def _make_equally_wide(self, found: list[Sequence[Shard]]) -> bool:
        """Cut sequences of a collection into parts of one width, as TorchRec needs. Tell if there is one."""
        cut: dict[str, list[int]] = defaultdict(list)
        for i, (first, *_) in enumerate(found):
            if first.table.sequence and first.width < first.table.dim:
                cut[first.table.collection].append(i)
        for at in cut.values():
            tables, narrowest = [found[i][0].table for i in at], min(found[i][0].width for i in at)
            width = next(
                (w for w in range(narrowest, 0, -1) if all(self._fits_equally(t, w) for t in tables)), None
            )
            if width is None:
                return False
            for i, table in zip(at, tables, strict=True):
                found[i] = equal_parts(table, table.dim // width)
        return True

    def _fits_equally(self, table: Table, width: int) -> bool:
        """Tell if a table may be cut into parts of a width that fit."""
        return (
            table.dim % width == 0
            and width % self.problem.unit_width(table) == 0
            and table.dim // width <= len(self.problem.allowed_devices(table.name))
            and self._fits(equal_parts(table, table.dim // width))
        )

    def fits_whole(self, bundle: Bundle) -> bool:
        """Tell if the tables of a bundle, whole, fit on some device."""
        problem, name = self.problem, bundle[0].table.name
        if not all(why_not(WHOLE_ROWS, s.table, problem) is None for s in bundle):
            return False
        vector = sum(self.account.vector(run_of(WHOLE_ROWS.name, s.table), s) for s in bundle)
        self._total += vector
        room = self._at_most[list(problem.pinned[name])] if name in problem.pinned else self._at_most
        return bundle[0].table.dim <= problem.topology.most_columns and bool((vector <= room).all(1).any())

    def lacking_together(self, shards: Iterable[Shard]) -> int:
        """Bytes that shards lack on all devices together, in the phase in which they lack most."""
        vectors = [
            self.account.vector(run_of(WHOLE_ROWS.name, s.table), s)
            for s in shards
            if why_not(WHOLE_ROWS, s.table, self.problem) is None
        ]
        if not vectors:
            return 0
        lacks = sum(vectors) - np.maximum(self._at_most, 0).sum(0)
        return math.ceil(lacks[: self.account.phases].max())

    def _room(self, account: Account) -> np.ndarray:
        """[D, P] bytes that devices have for shards."""
        return account.limits - account.base - account.loads(self.fixed)

    def cut_of(self, bundle: Bundle) -> list[Shard] | None:
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
            most = len(problem.allowed_devices(table.name))
            return next(
                (
                    equal_parts(table, n)
                    for n in range(2, most + 1)
                    if table.dim % n == 0 and self._fits_equally(table, table.dim // n)
                ),
                None,
            )
        parts = [Shard.whole(table)]
        while parts[0].width > problem.most_width(table) or not self._fits(parts):
            halves = [halve_columns(shard, problem.unit_width(table)) for shard in parts]
            if None in halves:
                return ranges
            parts = [half for both in halves for half in both]
        return parts

    def needs(self, parts: Sequence[Shard]) -> np.ndarray:
        """[P] bytes that a device takes of the widest of a table's parts, with the ids of all."""
        table, widest = parts[0].table, max(parts, key=lambda s: s.width)
        ids = (len(parts) - 1) * sample_bytes(table, self.problem.job) * self.problem.local_batch * IDS_ALIVE
        return self.cut.vector(run_of(WHOLE_ROWS.name, table), widest) + ids

    def _fits(self, parts: Sequence[Shard]) -> bool:
        """Tell if each of some parts of a table fits on a device."""
        allowed = list(self.problem.allowed_devices(parts[0].table.name))
        return bool((self.needs(parts) <= self._room(self.cut)[allowed]).all(1).any())

    def with_division(self, divided: Placement) -> Account:
        """The account with a table's rows divided. It counts the table's outputs twice."""
        return Account.of(self.batches | run_batches([divided], self.problem), self.problem)

    def _fits_divided(self, divided: Placement) -> bool:
        """Tell if each row range fits on its device."""
        account, devices = self.with_division(divided), list(divided.devices)
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
                f"{len(problem.allowed_devices(table.name))} (a CPU, by topology.hardware, has no limit)"
            )


def _reason(problem: Problem) -> str:
    """Why a problem does not fit, for people: the first thing that is too large."""
    reserved = problem.constraints.reserved_bytes
    kept = f" ({gib(reserved)} of each stays free: constraints.reserved_bytes)" if reserved else ""
    cuts = _Cuts(problem)
    reason = _fixed_too_large(cuts)
    if cuts.fixed and not reason:
        beside = gib(held_bytes(problem)[0] - cuts.may_hold[0])
        kept += f" ({beside} of each is for tables on all devices: constraints.kinds)"
    reason = (
        reason
        or _sum_too_large(cuts)
        or _one_too_large(cuts)
        or _pins_too_large(cuts)
        or _whole_too_large(cuts)
    )
    return (
        f"problem {problem.name!r} does not fit: "
        + (
            reason
            or (
                f"no way was found to pack it: its tables, {gib(sum(t.bytes for t in problem.tables))} of weights, "
                f"leave gaps that are too small on its {len(problem.topology)} devices. Tried: tables whole, cut by "
                "columns, divided by rows and on all devices"
            )
        )
        + kept
    )


def _fixed_too_large(cuts: _Cuts) -> str:
    """The tables on all devices, if some device does not hold them. "": all do."""
    if not cuts.fixed:
        return ""
    needs = math.ceil((cuts.account.base + cuts.account.loads(cuts.fixed))[:, : cuts.account.phases].max())
    least = min(held_bytes(cuts.problem))
    return (
        ""
        if needs <= least
        else (
            f"tables {shown(p.shard.table.name for p in cuts.fixed)}, on all devices (constraints.kinds), take "
            f"{gib(needs)} of each with outputs; the smallest may hold {gib(least)}, {gib(needs - least)} too "
            "little"
        )
    )


def _sum_too_large(cuts: _Cuts) -> str:
    """All tables, if they take more than all devices have. "": they do not."""
    shards, n_devices = [s for bundle in cuts.bundles for s in bundle], len(cuts.may_hold)
    lacks, available = cuts.lacking_together(shards), _available(cuts.may_hold)
    return (
        ""
        if lacks <= 0
        else (
            f"its {len(shards)} tables take {gib(available + lacks)} with their outputs; its {n_devices} "
            f"devices may hold {gib(available)} together, {gib(lacks)} too little"
        )
    )


def _needed(cuts: _Cuts, shards: Sequence[Shard], devices: Sequence[int]) -> int:
    """Bytes that tables, whole or cut, take on so many devices together, in the largest phase."""
    vectors = [
        cuts.account.vector(run_of(WHOLE_ROWS.name, s.table), s)
        for s in shards
        if why_not(WHOLE_ROWS, s.table, cuts.problem) is None
    ]
    each = cuts.account.base if cuts.batches else 0.0
    return math.ceil(np.max((sum(vectors) + len(devices) * each)[: cuts.account.phases])) if vectors else 0


def _available(may_hold: Iterable[int]) -> int:
    return sum(max(0, n) for n in may_hold)


def _one_too_large(cuts: _Cuts) -> str:
    """A table, or several kept on one device, that fit no device in any way. "": there are none."""
    problem, may_hold = cuts.problem, cuts.may_hold
    for bundle in cuts.bundles:
        table = bundle[0].table
        if cuts.fits_whole(bundle) or cuts.cut_of(bundle) is not None:
            continue
        largest = max(may_hold[d] for d in problem.allowed_devices(table.name))
        where = " where it may live" if table.name in problem.pinned else ""
        if table.name in problem.whole or len(bundle) > 1:
            n_bytes = _needed(cuts, bundle, [0])
            if n_bytes <= largest:
                continue
            return (
                f"{_describe(bundle, problem)} takes {gib(n_bytes)} with outputs; the largest "
                f"device{where} may hold {gib(largest)}, {gib(n_bytes - largest)} too little"
            )
        why = _undividable(cuts, table)
        if why_not(WHOLE_ROWS, table, problem) is not None:
            return f"table {table.name!r} has to be divided by rows (constraints.kinds), and {why}"
        width = problem.unit_width(table)
        narrow = cuts.needs(equal_parts(table, table.dim // width)) + cuts.cut.base
        n_bytes = math.ceil(narrow[: cuts.cut.phases].max())
        if n_bytes <= largest:
            continue
        return (
            f"{width} columns of table {table.name!r} take {gib(n_bytes)} with outputs; the largest "
            f"device{where} may hold {gib(largest)}, {gib(n_bytes - largest)} too little, and {why}"
        )
    return ""


def _undividable(cuts: _Cuts, table: Table) -> str:
    """Why the table's rows cannot be divided."""
    problem, allowed = cuts.problem, cuts.problem.allowed_devices(table.name)
    whole = division(table, problem)
    if whole is None:
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
    account, may_hold = cuts.with_division(whole), held_bytes(problem)
    needs = np.ceil((account.loads([whole]) + account.base)[:, : account.phases].max(1)).astype(int)
    d = max(whole.devices, key=lambda d: needs[d] - may_hold[d])
    which = f"{'all' if len(whole.devices) == len(may_hold) else 'its'} {len(whole.devices)} devices"
    return (
        f"its rows, which TorchRec divides evenly over {which}, take {gib(needs[d])} on device {d}, "
        f"which may hold {gib(may_hold[d])}"
    )


def _pins_too_large(cuts: _Cuts) -> str:
    """Tables pinned to some devices that take more memory than these have. "": none do.

    This is Hall's condition, for each set of devices that some table is pinned to.
    """
    problem, may_hold = cuts.problem, cuts.may_hold
    pinned: dict[frozenset[int], list[Table]] = {}
    for table in (t for t in problem.tables if t.name in problem.pinned):
        pinned.setdefault(frozenset(problem.pinned[table.name]), []).append(table)
    for devices in sorted(pinned, key=len):
        # All tables whose devices lie within this set compete for its memory.
        tables = [t for within, of in pinned.items() if within <= devices for t in of]
        needed = _needed(cuts, list(map(Shard.whole, tables)), list(devices))
        if needed > (available := _available(may_hold[d] for d in devices)):
            return (
                f"the tables pinned to {device_names(sorted(devices))} (constraints.pinned), "
                f"{shown(t.name for t in tables)}, take {gib(needed)} with their outputs; "
                f"{'it' if len(devices) == 1 else 'they'} may hold {gib(available)}, "
                f"{gib(needed - available)} too little"
            )
    return ""


def _whole_too_large(cuts: _Cuts) -> str:
    """Tables that must stay whole, if no packing of them alone is found. "": one is, or there are none."""
    problem = cuts.problem
    names = [t.name for t in problem.tables if t.name in problem.whole]
    if not names or len(names) == len(problem.tables):
        lacks = 1 if names else 0
    else:
        tables = tuple(t for t in problem.tables if t.name in problem.whole)
        alone = replace(problem, tables=tables, constraints=problem.constraints.among(set(names)))
        lacks = roomiest(alone, quick=True)[1]
    if lacks <= 0:
        return ""
    why = ", ".join(sorted({problem.kept_whole_by(name) for name in names}))
    return (
        f"tables {shown(names)} must stay whole ({why}) and no way was found to pack them side by side"
        f"{' where they may live' if problem.pinned else ''}"
    )


def _describe(bundle: Bundle, problem: Problem) -> str:
    """A bundle in the words of an error message."""
    name = bundle[0].table.name
    if len(bundle) > 1:
        return f"the group {shown(s.table.name for s in bundle)}, kept on one device (constraints.together),"
    return f"table {name!r}, which must stay whole ({problem.kept_whole_by(name)}),"


def shown(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
