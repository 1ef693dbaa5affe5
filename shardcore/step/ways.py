"""Ways to run tables under a problem's constraints: how they are cut, where shards may go, and how they become a plan.

Words used in all of search/, too:

bundle: shards that one device holds together. Mostly a single shard, else tables of constraints.together.
row range: all columns of some rows of a table.

The columns of a row range are exchangeable: only their number on a device matters.
So shards of one row range on the same device count as one, in memory, cost and plan.
TorchRec's fused kernel requires this: it fails on two shards of unequal width of one table on one rank.

Each problem divides the rows of a table in one way, `row_division`. Sharders weigh others as problems of their
own, `alternative_row_divisions`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import iterate_with_progress
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.step.kinds import (
    SHARDING_KINDS,
    Group,
    ShardingKind,
    kind_on_one_device,
    kinds_on_all_devices,
    possible_groups,
    sharding_kind_by_name,
    sharding_kind_for_table,
    shards_by_device,
)
from shardcore.step.memory import memory_account

RowRange = tuple[Table, int, int]
ShardBundle = tuple[Shard, ...]
"""Shards that one device holds together."""
IMPOSSIBLE = 1 << 51
"""Bytes of shards that may not be on a device at all: more than any has."""
_KINDS = tuple(SHARDING_KINDS)
"""The order of kinds in canonical plans."""


def row_range_of_shard(shard: Shard) -> RowRange:
    """The key of shards with the same rows of a table: table, row_lo, row_hi."""
    return shard.table, shard.row_lo, shard.row_hi


def bundle_shards(shards: Iterable[Shard], problem: Problem) -> list[ShardBundle]:
    """Group shards into bundles: tables that constraints keep together; other shards alone."""
    bundle_of = problem.group_by_table
    # A shard that is in no group has its own number as key, so it stays alone.
    grouped: dict[tuple[str, ...] | int, list[Shard]] = defaultdict(list)
    for i, shard in enumerate(shards):
        grouped[bundle_of.get(shard.table.name, i)].append(shard)
    return list(map(tuple, grouped.values()))


def row_division(table: Table, problem: Problem) -> Placement | None:
    """The placement of a table with its rows divided over a group of devices. None if that is impossible.

    The first kind that constraints and the number of rows allow. `_assigned_division_groups` chooses among several
    groups, such as hosts.
    """
    for sharding_kind in SHARDING_KINDS.values():
        if sharding_kind.divides_rows and reason_not_runnable(sharding_kind, table, problem) is None:
            groups = sharing_groups(sharding_kind, table, problem)
            group = groups[0] if len(groups) == 1 else _assigned_division_groups(problem)[table.name]
            return Placement(sharding_kind.name, Shard.whole(table), group)
    return None


def required_row_division(table: Table, problem: Problem) -> Placement:
    """The placement of a table with its rows divided. Raises ShardCoreError if that is impossible."""
    placement = row_division(table, problem)
    if placement is None:
        raise ShardCoreError(f"problem {problem.name!r} cannot divide the rows of table {table.name!r}")
    return placement


def alternative_row_divisions(problem: Problem) -> Iterator[Problem]:
    """Problems in which rows are divided by another kind of sharding than by default, one problem for each such kind.

    Tables that the kind cannot run keep theirs. Every plan of these problems is a plan of the problem.
    """
    for sharding_kind in (
        sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_kind.divides_rows
    ):
        # Without the other kinds that divide rows, `row_division` comes to this one.
        kinds = {
            table.name: tuple(
                kind
                for kind in problem.restricted_kinds_by_table.get(table.name, SHARDING_KINDS)
                if kind == sharding_kind.name or not SHARDING_KINDS[kind].divides_rows
            )
            for table in searched_tables(problem)
            if reason_not_runnable(sharding_kind, table, problem) is None
            and required_row_division(table, problem).kind != sharding_kind.name
        }
        if kinds:
            narrowed = tuple({**problem.restricted_kinds_by_table, **kinds}.items())
            yield replace(problem, constraints=replace(problem.constraints, kinds=narrowed))


@lru_cache(1 << 4)
def _assigned_division_groups(problem: Problem) -> Mapping[str, Group]:
    """The group of devices that divides each table's rows, where there are several groups: largest table to the
    emptiest.

    Tables that have to be divided go before others.
    """
    n_bytes: dict[Group, int] = defaultdict(int)
    dealt = {}
    for table in sorted(
        problem.tables, key=lambda t: (problem.can_run_table(kind_on_one_device(t), t), -t.bytes)
    ):
        kinds = (
            k
            for k in SHARDING_KINDS.values()
            if k.divides_rows and reason_not_runnable(k, table, problem) is None
        )
        # A single group leaves no choice, so only kinds with several are dealt.
        several = (groups for k in kinds if len(groups := sharing_groups(k, table, problem)) > 1)
        if groups := next(several, None):
            dealt[table.name] = min(groups, key=n_bytes.__getitem__)
            n_bytes[dealt[table.name]] += table.bytes
    return dealt


def reason_not_runnable(sharding_kind: ShardingKind, table: Table, problem: Problem) -> str | None:
    """The reason why a kind of sharding cannot run a table. None if it can."""
    try:
        # Some kinds do not run sequences, or rows in host memory.
        sharding_kind_for_table(sharding_kind.name, table)
    except ShardCoreError as error:
        return str(error)
    most = problem.topology.max_shard_columns
    if not problem.can_run_table(sharding_kind, table):
        if sharding_kind.name not in problem.restricted_kinds_by_table.get(table.name, (sharding_kind.name,)):
            return f"constraints.kinds do not have {sharding_kind.name}"
        if reason := problem.why_replicas_fail(sharding_kind) or problem.why_codec_fails(
            sharding_kind, table
        ):
            return reason
        return f"{sharding_kind.name} has all {table.dim} columns in a shard; FBGEMM's CUDA op runs at most {most}"
    if sharding_kind.divides_rows or sharding_kind.local_batch:
        if sharding_kind.divides_rows and table.name in problem.uncut_tables:
            return (
                f"{sharding_kind.name} cuts it, and it must stay whole "
                f"({problem.constraint_against_cuts(table.name)})"
            )
        if sharing_groups(sharding_kind, table, problem):
            return None
        return f"no devices share a table of {table.rows} rows by {sharding_kind.name}, where it may live" + (
            " (TorchRec divides rows evenly over all devices, or a whole host, and each has some)"
            * sharding_kind.divides_rows
        )
    # By columns, the narrowest cut into shards that FBGEMM runs has to exist.
    width = table.dim if table.name in problem.uncut_tables else problem.max_shard_width(table)
    if not 0 < width <= most:
        return f"no cut of its {table.dim} columns into shards of at most {most}, which FBGEMM's CUDA op runs"
    return None


@lru_cache(1 << 12)
def sharing_groups(sharding_kind: ShardingKind, table: Table, problem: Problem) -> tuple[Group, ...]:
    """The groups of several devices that may share a table by a kind of sharding, cached."""
    groups = possible_groups(
        sharding_kind, table.rows, problem.topology, problem.pinned_devices.get(table.name)
    )
    # A group of one device divides nothing.
    return tuple(group for group in groups if len(group) > 1)


def must_be_on_all_devices(table: Table, problem: Problem) -> bool:
    """Tell if constraints allow a table only kinds of sharding that use all devices."""
    allowed = map(sharding_kind_by_name, problem.restricted_kinds_by_table.get(table.name, ()))
    # Kinds that cannot run the table anyway do not count.
    kinds = [
        sharding_kind
        for sharding_kind in allowed
        if reason_not_runnable(sharding_kind, table, problem) is None
    ]
    everywhere = (problem.topology.ranks,)
    return bool(kinds) and all(
        sharing_groups(sharding_kind, table, problem) == everywhere for sharding_kind in kinds
    )


def fixed_placements(problem: Problem) -> tuple[Placement, ...]:
    """Placements of tables that constraints put on all devices, by the kind with the least memory.

    There is nothing to search: every plan has them.

    Raises ShardCoreError for a table that none of its kinds can run, and for one on all devices that other
    constraints keep on some devices or whole.
    """
    # Most problems have no such tables, and a look into the cache hashes the whole problem.
    return _cached_fixed_placements(problem) if problem.restricted_kinds_by_table else ()


@lru_cache(16)
def _cached_fixed_placements(problem: Problem) -> tuple[Placement, ...]:
    """Placements of tables that constraints put on all devices, cached by problem."""
    fixed = []
    for table in (t for t in problem.tables if t.name in problem.restricted_kinds_by_table):
        _require_runnable(table, problem)
        if must_be_on_all_devices(table, problem):
            placements = [
                Placement(kind, Shard.whole(table), problem.topology.ranks)
                for kind in problem.restricted_kinds_by_table[table.name]
                if reason_not_runnable(sharding_kind_by_name(kind), table, problem) is None
            ]
            fixed.append(min(placements, key=lambda p: memory_account([p], problem).device_loads([p]).max()))
    return tuple(fixed)


def searched_tables(problem: Problem) -> tuple[Table, ...]:
    """The tables that a search places: all but those that constraints put on all devices."""
    fixed = {placement.shard.table.name for placement in fixed_placements(problem)}
    return tuple(t for t in problem.tables if t.name not in fixed) if fixed else problem.tables


def _require_runnable(table: Table, problem: Problem) -> None:
    """Raise ShardCoreError unless one of a table's allowed kinds can run it."""
    kinds, constraints = problem.restricted_kinds_by_table[table.name], problem.constraints
    # A table that is on all devices cannot be kept on some, or with others on one.
    for constraint, names in (
        ("pinned", dict(constraints.pinned)),
        ("together", sum(constraints.together, ())),
        ("unsplit", constraints.unsplit),
    ):
        if (
            table.name in names
            and {sharding_kind_by_name(kind) for kind in kinds} <= set(kinds_on_all_devices(problem.topology))
            and (constraint != "unsplit" or all(sharding_kind_by_name(kind).divides_rows for kind in kinds))
        ):
            raise ShardCoreError(
                f"problem {problem.name!r} has table {table.name!r} in constraints.kinds "
                f"({', '.join(kinds)}, on all devices) and in constraints.{constraint}; it "
                "needs to be in one of them"
            )
    reasons = [
        reason
        for kind in kinds
        if (reason := reason_not_runnable(sharding_kind_by_name(kind), table, problem))
    ]
    if len(reasons) < len(kinds):
        return
    # The message names the kinds that would do without this constraint.
    free = replace(problem, constraints=replace(constraints, kinds=()))
    others = [
        name
        for name, sharding_kind in SHARDING_KINDS.items()
        # TorchRec maps raw ids to rows only where these are divided.
        if (sharding_kind.divides_rows or not table.managed_collision)
        and reason_not_runnable(sharding_kind, table, free) is None
    ]
    raise ShardCoreError(
        f"problem {problem.name!r} runs table {table.name!r} by {' or '.join(kinds)} "
        f"(constraints.kinds): {'; '.join(dict.fromkeys(reasons))}. It needs "
        f"{' or '.join(others) or 'other rows, devices or constraints'}"
    )


def sharding_kind_of_shard(shard: Shard, problem: Problem) -> ShardingKind:
    """The sharding kind of the fused op that runs a shard."""
    return (
        kind_on_one_device(shard.table)
        if shard.has_all_rows
        else sharding_kind_for_table(required_row_division(shard.table, problem).kind, shard.table)
    )


def allowed_devices_of_shard(shard: Shard, problem: Problem) -> tuple[int, ...]:
    """The devices that may hold a shard. A row range has a single one."""
    if shard.has_all_rows:
        return problem.allowed_devices(shard.table.name)
    devices = required_row_division(shard.table, problem).devices
    # All ranges have ceil(rows / n) rows, except the last (kinds.even_row_share).
    return (devices[shard.row_lo // -(-shard.table.rows // len(devices))],)


def fits_single_device_by_width(shard: Shard, problem: Problem) -> bool:
    """Tell if one device may hold a shard this wide. Any row range is allowed."""
    table = shard.table
    if not shard.has_all_rows:
        return True
    # Only tables wider than FBGEMM runs need a look at the shard's width.
    if table.dim > problem.topology.max_shard_columns and shard.width > problem.max_shard_width(table):
        return False
    return not (problem.restricted_kinds_by_table or problem.codecs_may_fail) or problem.can_run_table(
        kind_on_one_device(table), table
    )


def cut_into_equal_parts(shard: Shard, n: int, block: int = 1) -> list[Shard]:
    """Cut a shard by columns into n parts, whose widths are multiples of `block` and differ by one block at most.

    The last one is as wide as any: in blocks of 4, 12 columns become 4 and 8.
    """
    ends = [shard.col_lo + shard.width // block * i // n * block for i in range(n + 1)]
    return [replace(shard, col_lo=lo, col_hi=hi) for lo, hi in pairwise(ends)]


def join_columns(shards: Iterable[Shard]) -> list[Shard]:
    """Join shards with the same rows and neighbouring columns into wider shards."""
    joined: list[Shard] = []
    # Sorted, neighbours of a row range follow each other.
    for shard in sorted(shards, key=_shard_sort_key):
        if (
            joined
            and row_range_of_shard(joined[-1]) == row_range_of_shard(shard)
            and joined[-1].col_hi == shard.col_lo
        ):
            joined[-1] = replace(joined[-1], col_hi=shard.col_hi)
        else:
            joined.append(shard)
    return joined


def consolidate_placements(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Placements in canonical form: one shard for each table, kind and group of devices.

    Columns are dealt out in the order of kinds and groups. Shards are sorted by table name, rows and columns.
    Each group keeps the number of columns it had.
    Cells that were placed twice or not at all stay so, for `lower` to refuse.
    If a table's columns have a gap, a group may keep a shard on each side.
    """
    # A plan is the same whichever columns a device has, so equal plans get equal placements.
    groups: dict[RowRange, list[Placement]] = defaultdict(list)
    for placement in iterate_with_progress(placements):
        groups[row_range_of_shard(placement.shard)].append(placement)
    result: list[Placement] = []
    for group in groups.values():
        if len(group) == 1:  # the most common case by far
            result += group
            continue
        # Columns of each owner: merging them loses nothing, as columns are exchangeable.
        widths: dict[tuple[int, Group], int] = defaultdict(int)
        for placement in group:
            widths[_KINDS.index(placement.kind), placement.devices] += placement.shard.width
        result += _deal_columns(join_columns(p.shard for p in group), sorted(widths.items()))
    return tuple(sorted(result, key=lambda p: (*_shard_sort_key(p.shard), p.devices)))


def _deal_columns(
    shards: Iterable[Shard], widths: Iterable[tuple[tuple[int, Group], int]]
) -> Iterator[Placement]:
    """Deal columns to owners (number of a kind, group of devices) by their widths, from left to right."""
    waiting = iter(shards)
    shard = next(waiting)
    for (kind, devices), width in widths:
        while width:
            # A gap in the columns ends a shard, so an owner may get several.
            middle = shard.col_lo + min(width, shard.width)
            yield Placement(_KINDS[kind], replace(shard, col_hi=middle), devices)
            width -= middle - shard.col_lo
            shard = replace(shard, col_lo=middle) if middle < shard.col_hi else next(waiting, shard)


def _shard_sort_key(shard: Shard) -> tuple[str, int, int, int, int]:
    """Sort key of a shard: table name, rows, columns."""
    return shard.table.name, shard.row_lo, shard.row_hi, shard.col_lo, shard.col_hi


def placements_of_bundles(
    bundles: Sequence[ShardBundle], devices: Sequence[int], problem: Problem
) -> list[Placement]:
    """Placements of bundles of shards on devices: bundles[i] on devices[i].

    The row ranges of a divided table become one placement. All of them have to be there.
    """
    # Row ranges are collected by table, as a placement has all of them.
    placements, ranges = [], defaultdict(list)
    for bundle, device in iterate_with_progress(zip(bundles, devices, strict=True)):
        for shard in bundle:
            if shard.has_all_rows:
                placements.append(Placement(kind_on_one_device(shard.table).name, shard, (int(device),)))
            else:
                ranges[shard.table].append((int(device), shard))
    for table, shards in ranges.items():
        whole = required_row_division(table, problem)
        # A bug in a search, not in the user's input: hence RuntimeError.
        if sorted(shards, key=lambda p: p[1].row_lo) != list(shards_by_device(whole)):
            raise RuntimeError(
                f"a search placed rows of table {table.name!r} as {shards[:3]}; they are divided as {whole}"
            )
        placements.append(whole)
    return placements
