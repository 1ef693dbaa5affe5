"""Feasibility: what every sharder begins with.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardcore.constraints import Constraints
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import WHOLE_ROWS, device_names, even_share, shards_on
from shardcore.memory import free_bytes, gib
from shardcore.search.exact_memory import roomiest
from shardcore.search.free_memory import bundle_bytes, bytes_alone
from shardcore.search.packing import (
    NODES,
    Packing,
    cut,
    largest_free,
    least_bytes,
    pack,
    surely_fits,
    too_tall,
    whole_impossible,
)
from shardcore.search.shards import Bundle, bundles, division, why_not
from shardcore.topology import DEFAULT_RESERVE, default_reserve
from shardcore.types import Problem, Shard, Table

MOST_DEVICES = 256
"""The largest number of further devices that a remedy suggests."""
MOST_PACKED = 1000
"""With more tables, sums estimate what would fit. Packing them repeatedly would take minutes."""
_NEARLY = 0.99
"""Above this share of the memory, gaps may remain that no table fits."""


class DoesNotFit(Infeasible):
    """No plan was found that fits. It may be that a search counts too much (see `roomiest`)."""


def feasible_shards(problem: Problem) -> list[Shard]:
    """The shards to start from. Every table is whole, unless no device where it may live can hold it.

    Such a table is halved by columns until its shards fit.
    If its narrowest columns are still too large, its rows are divided (`division`).
    Sequences are divided by rows at once where that is possible, and else cut into equal parts.
    Tables in problem.whole are never cut.

    Raises Infeasible if TorchRec trains no plan of the problem. Data-parallel tables are not considered.
    The reasons:

    - The tables take more memory than all devices have.
    - The tables pinned to some devices take more than these have.
    - A bundle, or a table that must stay whole, takes more than the largest device where it may live.
    - The narrowest columns of a table take more, and its rows cannot be divided or a row range does not fit.
    - The row ranges of such tables find no packing.
    - More than MOST_PACKED tables take nearly all memory, and no packing is found.
      A search would not fill gaps better, and would take long to find out.
    """
    _require_widths(problem)
    free = free_bytes(problem)
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    if needed > available:
        raise _infeasible(problem, f"its {len(problem.tables)} tables take {gib(needed)}; "
                                   f"its {len(free)} devices may hold "
                                   f"{gib(available)} together, {gib(needed - available)} too little")
    # Bundles and whole tables cannot be cut, so each needs a device that holds it.
    uncut = bundles((Shard.whole(t) for t in problem.tables if t.name in problem.whole), problem)
    limits = largest_free(problem, [bundle[0].table for bundle in uncut], free)
    for bundle, largest in zip(uncut, limits, strict=True):
        if bundle_bytes(bundle, problem) > largest:
            too_much = _too_much(bundle, problem, largest)
            raise _infeasible(problem, f"{_describe(bundle, problem)} takes {too_much}")
    # Too large even as a narrow column: only a division of rows helps.
    for table in too_tall(problem, problem.tables, free):
        if why := _undividable(table, problem, free):
            if not problem.may_run(WHOLE_ROWS, table):
                raise _infeasible(problem, f"table {table.name!r} has to be divided by rows "
                                           f"(constraints.kinds), and {why}")
            [largest], width = largest_free(problem, [table], free), problem.unit_width(table)
            too_much = _too_much((Shard(table, 0, table.rows, 0, width),), problem, largest)
            raise _infeasible(problem, f"{width} columns of table {table.name!r} take {too_much}, and {why}")
    _require_pins_fit(problem, free)
    if len(problem.tables) > MOST_PACKED and needed > _NEARLY * available and not surely_fits(problem)(free):
        pack_or_raise(problem)
    return cut(problem, free) or list(pack_or_raise(problem).shards)


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


def _describe(bundle: Bundle, problem: Problem) -> str:
    """A bundle in the words of an error message."""
    name = bundle[0].table.name
    if len(bundle) > 1:
        return f"the group {shown(s.table.name for s in bundle)}, kept on one device (constraints.together),"
    return f"table {name!r}, which must stay whole ({problem.kept_whole_by(name)}),"


def _too_much(bundle: Bundle, problem: Problem, largest: int) -> str:
    """How much a bundle takes, and by how much that is too much."""
    needed = bundle_bytes(bundle, problem)
    where = " where it may live" if bundle[0].table.name in problem.pinned else ""
    return (f"{gib(needed)} with outputs; the largest device{where} may hold {gib(largest)}, "
            f"{gib(needed - largest)} too little")


def _undividable(table: Table, problem: Problem, free: Sequence[int]) -> str | None:
    """Why the table's rows cannot be divided, even if it were the only table. None if they can."""
    allowed = problem.allowed_devices(table.name)
    whole = division(table, problem)
    if whole is None:
        if len(allowed) == 1:
            return "there is no other device to have some of its rows"
        if set(allowed) >= set(problem.topology.on_hosts[0]) and not even_share(table.rows, len(allowed)):
            return (f"TorchRec cannot divide {table.rows} rows over {len(allowed)} devices: "
                    "the last would have none")
        return ("TorchRec divides rows over all devices, or a whole host, "
                "where it may not be (constraints.pinned)")
    devices = whole.devices
    for d, shard in shards_on(whole):
        needed = bytes_alone(shard, problem)
        if needed > free[d]:
            which = f"{'all' if len(devices) == len(free) else 'its'} {len(devices)} devices"
            return (f"its rows, which TorchRec divides evenly over {which}, "
                    f"take {gib(needed)} on device {d}, which may hold {gib(free[d])}")
    return None


def _require_pins_fit(problem: Problem, free: list[int]) -> None:
    """Raise Infeasible if tables pinned to some devices take more memory than these have.

    This is Hall's condition, for each set of devices that some table is pinned to.
    """
    pinned: dict[frozenset[int], list[Shard]] = {}
    for table in problem.tables if problem.pinned else ():
        if table.name in problem.pinned:
            pinned.setdefault(frozenset(problem.pinned[table.name]), []).append(Shard.whole(table))
    needs = {devices: bundle_bytes(shards, problem) for devices, shards in pinned.items()}
    # A set lies within another only if its first device is there. Few sets share that.
    of_first: dict[int, list[frozenset[int]]] = {}
    for devices in pinned:
        of_first.setdefault(min(devices), []).append(devices)
    for devices in sorted(pinned, key=len):
        # All tables whose devices lie within this set compete for its memory.
        within = [d for first in sorted(devices) for d in of_first.get(first, ()) if d <= devices]
        needed, available = sum(needs[d] for d in within), sum(max(0, free[d]) for d in devices)
        if needed > available:
            names = [s.table.name for d in within for s in pinned[d]]
            raise _infeasible(problem,
                              f"the tables pinned to {device_names(sorted(devices))} (constraints.pinned), "
                                       f"{shown(names)}, take {gib(needed)} with their outputs; "
                                       f"{'it' if len(devices) == 1 else 'they'} may hold {gib(available)}, "
                                       f"{gib(needed - available)} too little")


def shown(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def pack_or_raise(problem: Problem) -> Packing:
    """Some plan that fits, for a sharder whose own placing failed. Raises Infeasible if none is found."""
    free = free_bytes(problem)
    packing = pack(problem, free)
    if packing is not None:
        return packing
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    total = (f"its tables take {needed / available:.1%} of the {gib(available)} that its {len(free)} "
             "devices may hold")
    whole = [t.name for t in problem.tables if t.name in problem.whole]
    if whole_impossible(problem, free):
        why = ", ".join(sorted({problem.kept_whole_by(name) for name in whole}))
        raise _infeasible(problem,
                          f"tables {shown(whole)} must stay whole ({why}) and do not fit side by side"
                                   f"{' where they may live' if problem.pinned else ''}; "
                                   f"every assignment was tried ({total})")
    raise _infeasible(problem, f"no way was found to pack it: {total}, but the gaps are too small. Tried: "
                               "best fit with "
                               f"{NODES} steps of backtracking; then the same for the tables that must "
                               f"stay whole ({len(whole)}) and the others cut by columns into the gaps"
                               f"{'; then pinned tables first' if problem.pinned else ''}; "
                               "and all of that with the rows of "
                               "the tallest tables divided over the devices evenly, as TorchRec trains them")


def _infeasible(problem: Problem, reason: str) -> DoesNotFit:
    """The error with its reason. Its remedy takes long to find, see `remedy`."""
    reserved = problem.constraints.reserved_bytes
    kept = f" ({gib(reserved)} of each stays free: constraints.reserved_bytes)" if reserved else ""
    return DoesNotFit(f"problem {problem.name!r} does not fit: {reason}{kept}")


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
