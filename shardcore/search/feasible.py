"""Fit: what every sharder begins with. Tables that no device can hold are cut; problems that have no plan are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from shardcore.memory import free_bytes, gib
from shardcore.search.packing import NODES, Packing, cut, largest_free, least_bytes, pack, whole_impossible
from shardcore.search.pieces import Item, items
from shardcore.search.room import item_bytes
from shardcore.types import MIN_WIDTH, Constraints, Infeasible, Problem, Shard
from shardcore.workload import device_names

MOST_DEVICES = 256
"""More than this many more devices are not advised."""


def feasible_pieces(problem: Problem) -> list[Shard]:
    """The pieces to start from: every table whole, except that a table too large for every device where it may live is halved
    until its parts are not: by columns down to MIN_WIDTH, then by rows. Tables in problem.whole are never cut.

    Raises Infeasible where it is certain that no plan exists: the tables take more than all devices have, or those pinned to some
    devices more than these, or one that cannot be cut (further), or a bundle, more than the largest device where it may live;
    and where the row ranges of such tables find no packing.
    """
    free = free_bytes(problem)
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    if needed > available:
        raise _infeasible(problem, f"its {len(problem.tables)} tables take {gib(needed)}; its {len(free)} devices may hold "
                                   f"{gib(available)} together, {gib(needed - available)} too little")
    largest = dict(zip((t.name for t in problem.tables), largest_free(problem, free), strict=True))
    uncut = items((Shard.whole(t) for t in problem.tables if t.name in problem.whole), problem)
    for smallest in (*uncut, *((Shard(t, 0, 1, 0, MIN_WIDTH),) for t in problem.tables if t.name not in problem.whole)):
        name = smallest[0].table.name
        short = item_bytes(smallest, problem) - largest[name]
        if short > 0:
            where = "device where it may live" if name in problem.pinned else "device"
            raise _infeasible(problem, f"{_describe(smallest, problem)} takes {gib(item_bytes(smallest, problem))} with its "
                                       f"outputs; the largest {where} may hold {gib(largest[name])}, {gib(short)} too little")
    _require_pins_fit(problem, free)
    return cut(problem, free) or list(pack_or_raise(problem).pieces)


def _describe(smallest: Item, problem: Problem) -> str:
    name = smallest[0].table.name
    if name not in problem.whole:
        return f"one row of {MIN_WIDTH} columns of table {name!r}"
    if len(smallest) > 1:
        return f"the group {shown(s.table.name for s in smallest)}, kept on one device (constraints.together),"
    return f"table {name!r}, which must stay whole ({problem.kept_whole_by(name)}),"


def _require_pins_fit(problem: Problem, free: list[int]) -> None:
    """Raise Infeasible where the tables that may live on some devices alone take more than these have (Hall's condition, for each
    set of devices that some table is pinned to)."""
    pinned: dict[frozenset[int], list[Shard]] = {}
    for table in problem.tables if problem.pinned else ():
        if table.name in problem.pinned:
            pinned.setdefault(frozenset(problem.pinned[table.name]), []).append(Shard.whole(table))
    needs = {devices: item_bytes(shards, problem) for devices, shards in pinned.items()}
    for devices in sorted(pinned, key=len):
        needed, available = sum(n for d, n in needs.items() if d <= devices), sum(max(0, free[d]) for d in devices)
        if needed > available:
            names = [s.table.name for d, shards in pinned.items() if d <= devices for s in shards]
            raise _infeasible(problem, f"the tables pinned to {device_names(sorted(devices))} (constraints.pinned), "
                                       f"{shown(names)}, take {gib(needed)} with their outputs; "
                                       f"{'it' if len(devices) == 1 else 'they'} may hold {gib(available)}, "
                                       f"{gib(needed - available)} too little")


def shown(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def pack_or_raise(problem: Problem) -> Packing:
    """Some plan that fits, for a sharder whose own order of placing found none. Raises Infeasible where none is found."""
    free = free_bytes(problem)
    packing = pack(problem, free)
    if packing is not None:
        return packing
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    total = f"its tables take {needed / available:.1%} of the {gib(available)} that its {len(free)} devices may hold"
    whole = [t.name for t in problem.tables if t.name in problem.whole]
    if whole_impossible(problem, free):
        why = ", ".join(sorted({problem.kept_whole_by(name) for name in whole}))
        raise _infeasible(problem, f"tables {shown(whole)} must stay whole ({why}) and do not fit side by side"
                                   f"{' where they may live' if problem.pinned else ''}; every assignment was tried ({total})")
    raise _infeasible(problem, f"no way was found to pack it: {total}, but the gaps are too small. Tried: best fit with "
                               f"{NODES} steps of backtracking; then the same for the tables that must stay whole "
                               f"({len(whole)}) and the others cut by columns and rows into the gaps"
                               f"{'; then pinned tables first' if problem.pinned else ''}")


def _infeasible(problem: Problem, reason: str) -> Infeasible:
    return Infeasible(f"problem {problem.name!r} does not fit: {reason}. {_remedy(problem)}")


def _remedy(problem: Problem) -> str:
    """How much more memory per device, or how many more devices, would do: found by packing with it."""
    free, steps = free_bytes(problem), 200

    def more_memory(extra: int) -> bool:
        return pack(problem, [f + extra for f in free], steps) is not None

    def more_devices(n: int) -> bool:
        return pack(problem, free + [max(free)] * n, steps) is not None

    memory = _least(more_memory, least_bytes(problem) + max(0, -min(free)))
    remedies = [f"{gib(memory)} more per device"] if memory else []
    n_devices = _least(more_devices, MOST_DEVICES) if least_bytes(problem) <= sum(free) + MOST_DEVICES * max(free) else None
    if n_devices:
        remedies.append(f"{n_devices} more device{'s' * (n_devices > 1)} like the largest")
    loose = replace(problem, constraints=Constraints(problem.constraints.reserved_bytes, problem.constraints.unsplit))
    eased = loose.constraints != problem.constraints and pack(loose, free, steps) is not None
    return (f"It would fit with {' or '.join(remedies)}, or with less in the tables" if remedies else "It needs smaller tables"
            ) + (", or without its pins and groups" if eased else "")


def _least(enough: Callable[[int], bool], limit: int) -> int | None:
    """The least n in 1 .. limit that is enough, to about 1%; None where the limit is not. What is enough stays so with more."""
    low, high = 0, limit
    if not enough(limit):
        return None
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
