"""Fit: what every sharder begins with. Tables that no device can hold are cut; problems that have no plan are refused."""

from __future__ import annotations

from collections.abc import Callable

from shardcore.memory import free_bytes, gib
from shardcore.search.packing import NODES, Packing, cut, least_bytes, pack, unsplit_impossible
from shardcore.search.room import piece_bytes
from shardcore.types import MIN_WIDTH, Infeasible, Problem, Shard

MOST_DEVICES = 256
"""More than this many more devices are not advised."""


def feasible_pieces(problem: Problem) -> list[Shard]:
    """The pieces to start from: every table whole, except that a table too large for every device is halved until its parts
    are not: by columns down to MIN_WIDTH, then by rows. Tables in constraints.unsplit are never cut.

    Raises Infeasible where it is certain that no plan exists: the tables take more than all devices have, or one that cannot
    be cut (further) takes more than the largest device has; and where the row ranges of such tables find no packing.
    """
    free = free_bytes(problem)
    largest = max(free)
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    if needed > available:
        raise _infeasible(problem, f"its {len(problem.tables)} tables take {gib(needed)}; its {len(free)} devices may hold "
                                   f"{gib(available)} together, {gib(needed - available)} too little")
    for table in problem.tables:
        smallest, what = Shard(table, 0, 1, 0, MIN_WIDTH), f"one row of {MIN_WIDTH} columns of table {table.name!r}"
        if table.name in problem.constraints.unsplit:
            smallest, what = Shard.whole(table), f"table {table.name!r}, which must stay whole (constraints.unsplit),"
        short = piece_bytes(smallest, problem) - largest
        if short > 0:
            raise _infeasible(problem, f"{what} takes {gib(piece_bytes(smallest, problem))} with its outputs; the largest "
                                       f"device may hold {gib(largest)}, {gib(short)} too little")
    return cut(problem, free) or list(pack_or_raise(problem).pieces)


def pack_or_raise(problem: Problem) -> Packing:
    """Some plan that fits, for a sharder whose own order of placing found none. Raises Infeasible where none is found."""
    free = free_bytes(problem)
    packing = pack(problem, free)
    if packing is not None:
        return packing
    needed, available = least_bytes(problem), sum(max(0, f) for f in free)
    total = f"its tables take {needed / available:.1%} of the {gib(available)} that its {len(free)} devices may hold"
    if unsplit_impossible(problem, free):
        names = problem.constraints.unsplit
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise _infeasible(problem, f"tables {shown} must stay whole (constraints.unsplit) and do not fit side by side; every "
                                   f"assignment was tried ({total})")
    raise _infeasible(problem, f"no way was found to pack it: {total}, but the gaps are too small. Tried: best fit with "
                               f"{NODES} steps of backtracking; then the same for the tables in constraints.unsplit "
                               f"({len(problem.constraints.unsplit)}) and the others cut by columns and rows into the gaps")


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
    return f"It would fit with {' or '.join(remedies)}, or with less in the tables" if remedies else "It needs smaller tables"


def _least(enough: Callable[[int], bool], limit: int) -> int | None:
    """The least n in 1 .. limit that is enough, to about 1%; None where the limit is not. What is enough stays so with more."""
    low, high = 0, limit
    if not enough(limit):
        return None
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
