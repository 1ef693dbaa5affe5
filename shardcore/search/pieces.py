"""Pieces: how tables are cut for a search, and how its result becomes a plan.

A piece is a Shard that a search places on one device. The columns of a row range are exchangeable: what a device does
depends on how many it holds, not on which. So pieces of one row range that meet on a device count as one shard, everywhere:
in the memory they take, in what they cost, and in the plan. (TorchRec's fused kernel fails on two shards of unequal width of
one table on one rank, so this is a must, not only a saving.)

Rows are divided in one way alone, `divided`: TorchRec trains no other (docs/torchrec.md). Pieces are the row ranges of that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardcore.cost.model import CostModel, price
from shardcore.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table
from shardcore.workload import lower

RowRange = tuple[Table, int, int]
Item = tuple[Shard, ...]
"""Pieces that are placed on one device together."""


def row_range(shard: Shard) -> RowRange:
    """The key of shards whose columns may be exchanged: table, row_lo, row_hi."""
    return shard.table, shard.row_lo, shard.row_hi


def items(shards: Iterable[Shard], problem: Problem) -> list[Item]:
    """The tables of each bundle (constraints.together) as one item, all other pieces as one each."""
    if not problem.bundle_of:
        return [(shard,) for shard in shards]
    found: dict[tuple[str, ...] | int, list[Shard]] = defaultdict(list)
    for i, shard in enumerate(shards):
        found[problem.bundle_of.get(shard.table.name, i)].append(shard)
    return list(map(tuple, found.values()))


def halve_columns(shard: Shard) -> tuple[Shard, Shard] | None:
    """The left and right half, in multiples of MIN_WIDTH (12 columns make 4 and 8); None where it cannot be cut."""
    middle = shard.col_lo + shard.width // (2 * MIN_WIDTH) * MIN_WIDTH
    if middle == shard.col_lo:
        return None
    return replace(shard, col_hi=middle), replace(shard, col_lo=middle)


def even_share(rows: int, n: int) -> int | None:
    """Rows of each device but the last among which TorchRec divides a table over n: ceil(rows / n); None where that leaves the
    last none, with which its kernels fail."""
    each = -(-rows // n)
    return each if each * (n - 1) < rows else None


def even_rows(rows: int, n: int) -> list[tuple[int, int]] | None:
    """The row ranges [lo, hi) by which TorchRec divides a table over n devices, in their order; None as `even_share`."""
    each = even_share(rows, n)
    return each and [(i * each, min((i + 1) * each, rows)) for i in range(n)]


def divided(table: Table, devices: Sequence[int]) -> list[Placement] | None:
    """The table with its rows divided over devices by `even_rows`, the i-th range on the i-th of them."""
    ranges = even_rows(table.rows, len(devices))
    return ranges and [Placement(Shard(table, *rows, 0, table.dim), (d,)) for d, rows in zip(devices, ranges, strict=True)]


def dividing_devices(table: Table, problem: Problem) -> tuple[int, ...]:
    """The devices over which TorchRec can divide a table's rows: all, or those of the host that it is pinned to, where hosts have
    as many each (docs/torchrec.md); none where constraints leave it neither, or it must stay whole."""
    allowed, devices = problem.allowed_devices(table.name), problem.topology.devices
    if table.name in problem.whole or len(allowed) == 1:
        return ()
    if len(allowed) == len(devices):
        return _in_order(allowed, table, problem)
    a_host = len({devices[d].host for d in allowed}) == 1 and set(Counter(d.host for d in devices).values()) == {len(allowed)}
    return allowed if a_host else ()


def _in_order(devices: tuple[int, ...], table: Table, problem: Problem) -> tuple[int, ...]:
    """Devices in the order in which they get rising row ranges: TorchRec numbers them host by host, which matters to ordered rows
    alone, for others are dealt out anew."""
    hosts = problem.topology.hosts
    if not table.ordered or len(hosts) == 1:
        return devices
    number = {host: i for i, host in enumerate(hosts)}
    return tuple(sorted(devices, key=lambda d: (number[problem.topology.devices[d].host], d)))


def devices_of(shard: Shard, problem: Problem) -> tuple[int, ...]:
    """Where a piece may go: a row range, being one of `divided`, to its device alone."""
    allowed = problem.allowed_devices(shard.table.name)
    if shard.full_rows:
        return allowed
    return (_in_order(allowed, shard.table, problem)[shard.row_lo // -(-shard.table.rows // len(allowed))],)


def column_runs(shards: Iterable[Shard]) -> list[Shard]:
    """Neighbours within a row range joined: the rectangles whose columns may be exchanged."""
    runs: list[Shard] = []
    for shard in sorted(shards, key=_position):
        if runs and row_range(runs[-1]) == row_range(shard) and runs[-1].col_hi == shard.col_lo:
            runs[-1] = replace(runs[-1], col_hi=shard.col_hi)
        else:
            runs.append(shard)
    return runs


def consolidate(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """The same plan in canonical form: one shard per row range and device, columns dealt out in the order of the devices,
    sorted by table name, rows and columns.

    Every device (every set of devices, for replicas) keeps the number of columns it had. Cells that were placed twice or not
    at all stay so, for `lower` to refuse. Where the columns of a row range have a gap, a device may keep a shard on each side.
    """
    groups: dict[RowRange, list[Placement]] = defaultdict(list)
    for placement in placements:
        groups[row_range(placement.shard)].append(placement)
    result = []
    for group in groups.values():
        if len(group) == 1 and len(group[0].devices) == 1:
            result += group
            continue
        widths: dict[tuple[int, ...], int] = defaultdict(int)
        for placement in group:
            widths[tuple(sorted(placement.devices))] += placement.shard.width
        result += _deal(column_runs(p.shard for p in group), sorted(widths.items()))
    return tuple(sorted(result, key=lambda p: (*_position(p.shard), p.devices)))


def _deal(runs: list[Shard], widths: list[tuple[tuple[int, ...], int]]) -> Iterator[Placement]:
    """Give each owner its number of columns from the runs, from the left."""
    waiting = iter(runs)
    run = next(waiting)
    for devices, width in widths:
        while width:
            taken = min(width, run.width)
            yield Placement(replace(run, col_hi=run.col_lo + taken), devices)
            width -= taken
            run = replace(run, col_lo=run.col_lo + taken) if taken < run.width else next(waiting, run)


def _position(shard: Shard) -> tuple[str, int, int, int, int]:
    return shard.table.name, shard.row_lo, shard.row_hi, shard.col_lo, shard.col_hi


def to_plan(pieces: Sequence[Shard], devices: Sequence[int | tuple[int, ...]], problem: Problem, model: CostModel,
            **provenance: Any) -> Plan:
    """The consolidated plan that puts pieces[i] on devices[i] (one, or several that replicate it), with its provenance and its
    own predicted cost.

    Raises what `lower` raises: a search that lost or doubled a piece, or overfilled a device, does not get away with it.
    """
    placements = [Placement(s, d if isinstance(d, tuple) else (d,)) for s, d in zip(pieces, devices, strict=True)]
    return priced(placements, problem, model, **provenance)


def placed(items: Sequence[Item], devices: Sequence[int]) -> list[Placement]:
    """items[i] on devices[i]."""
    return [Placement(shard, (int(d),)) for item, d in zip(items, devices, strict=True) for shard in item]


def priced(placements: Iterable[Placement], problem: Problem, model: CostModel, **provenance: Any) -> Plan:
    """The consolidated plan of just these placements, with its provenance and cost; raises as `to_plan`."""
    plan = Plan(consolidate(placements))
    predicted_ms = price(lower(plan, problem), model).total_ms
    return replace(plan, provenance={**provenance, "setting": str(model.setting), "predicted_ms": predicted_ms})
