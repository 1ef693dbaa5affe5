"""Moves between plans: counted cell by cell, and as few as equal devices allow."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import column, host_row, on_hosts, replica, row

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.plans.diff import diff_plans, relabel_devices, reorder_columns
from shardcore.plans.words import moves_summary
from shardcore.report import plan_report
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.step.kinds import even_row_share, shards_by_device
from shardcore.step.lower import lower


def random_plan(problem, seed: int, rows: bool = True) -> Plan:
    """Tables whole, cut by columns or by rows, or replicated."""
    rng, placements, topology = np.random.default_rng(seed), [], problem.topology
    for t in problem.tables:
        kind = rng.integers(4 if rows else 3)
        first, second = (int(d) for d in rng.permutation(len(topology))[:2])
        if kind == 1 and t.dim > 4:
            cut = 4 * int(rng.integers(1, t.dim // 4))
            placements += [column(t, first, 0, cut), column(t, second, cut)]
        elif kind == 3 and even_row_share(t.rows, len(topology)):
            placements.append(
                row(t, topology)
                if rng.random() < 0.5 or len(topology.hosts) == 1
                else host_row(t, topology.devices_by_host[rng.integers(len(topology.hosts))])
            )
        else:
            placements.append(replica(t, topology) if kind == 2 else column(t, first))
    return Plan(tuple(placements))


def cells(plan: Plan, name: str) -> set[tuple[int, int, int]]:
    """Device, row and column of each cell of a table."""
    return {
        (d, r, c)
        for p in plan.placements
        if p.shard.table.name == name
        for d, s in shards_by_device(p)
        for r in range(s.row_lo, s.row_hi)
        for c in range(s.col_lo, s.col_hi)
    }


def counted_bytes(old: Plan, new: Plan, name: str) -> int:
    """Cell by cell."""
    return 4 * len(cells(new, name) - cells(old, name))


@pytest.fixture
def small(problem):
    """The same tables with few rows, so that cells can be counted."""
    return replace(
        problem, tables=tuple(replace(t, rows=min(t.rows, 40)) for t in problem.tables), topology=TWO
    )


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_the_cells_that_devices_get(small, seed):
    old, new = random_plan(small, seed), random_plan(small, seed + 100)
    found = diff_plans(old, new)
    assert {m.table: m.bytes for m in found.moves if m.bytes} == {
        t.name: n for t in small.tables if (n := counted_bytes(old, new, t.name))
    }
    assert found.bytes == sum(m.bytes for m in found.moves) and not diff_plans(old, old) and bool(found)
    assert [m.bytes for m in found.moves] == sorted((m.bytes for m in found.moves), reverse=True)


TWO = on_hosts("xyxy", 16 << 20)


@pytest.mark.parametrize(
    "old, new, cells",
    [
        (lambda t: [column(t, 0)], lambda t: [column(t, 1)], 640),
        (lambda t: [column(t, 0)], lambda t: [replica(t, TWO)], 3 * 640),
        (lambda t: [replica(t, TWO)], lambda t: [column(t, 1)], 0),
        (
            lambda t: [column(t, 0, 0, 8), column(t, 1, 8)],
            lambda t: [column(t, 0, 0, 12), column(t, 1, 12)],
            40 * 4,
        ),
        # in one part what was in two
        (lambda t: [column(t, 0, 0, 4), column(t, 0, 4)], lambda t: [column(t, 0)], 0),
        (lambda t: [row(t, TWO)], lambda t: [column(t, 1)], 640 - 10 * 16),
        (lambda t: [column(t, 1)], lambda t: [row(t, TWO)], 3 * 10 * 16),
        # 0 has 10 of its 20 rows, 2 none of its
        (lambda t: [row(t, TWO)], lambda t: [host_row(t, (0, 2))], 10 * 16 + 20 * 16),
        (
            lambda t: [host_row(t, (0, 2), 0, 8), host_row(t, (1, 3), 8)],
            lambda t: [host_row(t, (0, 2))],
            40 * 8,
        ),
    ],
)
@pytest.mark.parametrize("precision, bytes_a_cell", [("fp32", 4), ("fp16", 2)])
def test_moves_counted_by_hand(old, new, cells, precision, bytes_a_cell):
    table = Table("t", 40, 16, 1.0, precision=precision)
    before, after = old(table), new(table)
    found = diff_plans(Plan(tuple(before)), Plan(tuple(after)))
    # Copies that are given up move nothing. They count as a change all the same.
    changes = cells or {p.kind for p in before} != {p.kind for p in after}
    assert found.bytes == cells * bytes_a_cell and len(found.moves) == bool(changes)


def test_devices_are_not_exchanged_where_the_order_of_columns_is_enough(problem):
    wide, small = problem.tables[2], problem.tables[1]
    halves = (0, 32), (32, 64)
    old, new = (
        Plan(
            (
                *(column(wide, device, *half) for device, half in zip(order, halves, strict=True)),
                column(small, 0),
            )
        )
        for order in ((0, 1), (1, 0))
    )
    assert wide.bytes > small.bytes and diff_plans(old, new).bytes == wide.bytes
    assert not diff_plans(old, relabel_devices(new, old, replace(problem, tables=(wide, small))))


def test_statistics_do_not_move_tables(problem):
    old = random_plan(problem, 1)
    livelier = replace(
        problem, tables=tuple(replace(t, pooling=t.pooling + 1, access=Zipf(0.5)) for t in problem.tables)
    )
    assert not diff_plans(old, rebind_tables(old, livelier)) and lower(rebind_tables(old, livelier), livelier)
    other = replace(problem, tables=(*problem.tables[1:], Table("new", 10, 4, 1.0)))
    found = diff_plans(old, random_plan(other, 1))
    assert found.added == ("new",) and found.removed == (problem.tables[0].name,)
    assert f"1 table new: new; 1 table gone: {problem.tables[0].name}" in moves_summary(found)
    with pytest.raises(ShardCoreError, match="problem 'small' does not have"):
        lower(rebind_tables(old, other), other)


@pytest.mark.parametrize(
    "old, new, shape, moved, added",
    [
        (lambda t: [column(t, 0)], lambda t: [column(t, 0)], (60, 16), 0, 20 * 16),
        (lambda t: [column(t, 0)], lambda t: [column(t, 1)], (60, 16), 40 * 16, 20 * 16),
        (lambda t: [column(t, 0)], lambda t: [column(t, 1)], (40, 24), 40 * 16, 40 * 8),
        (lambda t: [column(t, 0)], lambda t: [column(t, 1)], (20, 8), 20 * 8, 0),
        (
            lambda t: [column(t, 0, 0, 8), column(t, 1, 8)],
            lambda t: [column(t, 0, 0, 8), column(t, 1, 8)],
            (40, 24),
            0,
            40 * 8,
        ),
        # ranges of 10 rows become ranges of 15: 10 to 15, 20 to 30 and 30 to 40 come from others
        (lambda t: [row(t, TWO)], lambda t: [row(t, TWO)], (60, 16), (0 + 5 + 10 + 10 - 0) * 16, None),
        (lambda t: [column(t, 0)], lambda t: [replica(t, TWO)], (60, 16), 3 * 40 * 16, 4 * 20 * 16),
    ],
)
def test_rows_and_columns_that_were_there_move_and_new_ones_are_told_apart(old, new, shape, moved, added):
    was, now = Table("t", 40, 16, 1.0), Table("t", *shape, 2.0, features=2)
    plans = Plan(tuple(old(was))), Plan(tuple(new(now)))
    found = diff_plans(*plans)
    before, after = (cells(plan, "t") for plan in plans)
    known = {cell for cell in after if cell[1] < 40 and cell[2] < 16}
    assert found.bytes == 4 * len(known - before) and found.new_cell_bytes == 4 * len(after - known)
    assert added is None or (found.bytes, found.new_cell_bytes) == (4 * moved, 4 * added)
    assert found.resized == {"t": found.new_cell_bytes} and not found.added and not found.removed
    assert "1 table of another shape (t)" in moves_summary(found)


def test_a_plan_goes_on_with_tables_of_another_shape(problem):
    old = Plan(tuple(column(t, i % 2) for i, t in enumerate(problem.tables)))
    for change in ({"rows": 7}, {"rows": 70_000}, {"dim": 8}, {"dim": 128}):
        other = replace(problem, tables=tuple(replace(t, **change) for t in problem.tables))
        bound = rebind_tables(old, other)
        assert not diff_plans(old, bound).moves
        assert lower(bound, replace(other, topology=Topology((Device(1 << 40),) * len(problem.topology))))
    wide = Table("w", 40, 32, 1.0)
    cut = Plan((column(wide, 0, 0, 8), column(wide, 1, 8, 16), column(wide, 2, 16)))
    for dim, parts in ((48, [8, 8, 32]), (16, [8, 8]), (12, [8, 4])):
        bound = rebind_tables(cut, replace(problem, tables=(replace(wide, dim=dim),)))
        assert [p.shard.width for p in bound.placements] == parts
    sequence = Table("w", 40, 32, 1.0, sequence=True)
    halves = Plan((column(sequence, 0, 0, 16), column(sequence, 1, 16)))
    assert rebind_tables(halves, replace(problem, tables=(replace(sequence, dim=48),))) == halves


def rotated(placement: Placement, by: int) -> Placement:
    """The placement, moved on by so many of four devices if it has a single one."""
    return (
        replace(placement, devices=((placement.devices[0] + by) % 4,))
        if placement.kind == "column"
        else placement
    )


@pytest.mark.parametrize("seed", range(6))
def test_equal_devices_are_exchanged_so_that_least_moves_at_the_same_cost(problem, seed):
    model = AnalyticModel(Setting("made-up", 256))
    devices = tuple(Device(16 << 20, 1.0, f"host-{d % 2}") for d in range(4))
    topology = Topology(devices, links=make_links(within_host=2.0, between_hosts=0.5, latency_ms=0.01))
    problem = replace(problem, topology=topology)
    old, new = random_plan(problem, seed, rows=False), random_plan(problem, seed + 50, rows=False)
    near = relabel_devices(new, old, problem)
    assert price(lower(near, problem), model).total_ms == pytest.approx(
        price(lower(new, problem), model).total_ms
    )
    assert diff_plans(old, near).bytes <= diff_plans(old, reorder_columns(new, old)).bytes
    swapped = Plan(tuple(rotated(p, 2) for p in old.placements))
    assert diff_plans(old, swapped).bytes > 0 and not diff_plans(old, relabel_devices(swapped, old, problem))
    moved_on = Plan(tuple(rotated(p, 1) for p in old.placements))
    back = relabel_devices(moved_on, old, problem)  # hosts are not exchanged
    hosts = [
        {(p.shard.table.name, p.shard.width, d % 2) for p in x.placements for d in p.devices}
        for x in (moved_on, back)
    ]
    assert hosts[0] == hosts[1]


def test_pinned_tables_and_row_ranges_stay_where_they_are(problem):
    old = Plan(tuple(column(t, 0) for t in problem.tables))
    there = Plan(tuple(column(t, 1) for t in problem.tables))
    pinned = replace(problem, constraints=Constraints(pinned=(("hot", (1,)),)))
    assert relabel_devices(there, old, problem) == old and relabel_devices(there, old, pinned) == there
    t = problem.tables[0]
    by_rows = Plan((row(t, problem.topology), *there.placements[1:]))
    assert relabel_devices(by_rows, old, problem) == by_rows
    two = replace(problem, topology=TWO)
    for devices in ((0, 2), (1, 3)):
        of_host = Plan((host_row(t, devices), *there.placements[1:]))
        assert relabel_devices(of_host, old, two) == of_host and lower(of_host, two)


def test_columns_come_in_the_old_order_of_devices(problem):
    wide = problem.tables[2]

    def cut(*parts):
        ends = np.cumsum([0, *(n for n, _ in parts)])
        return Plan(
            tuple(
                column(wide, d, int(lo), int(hi))
                for lo, hi, (_, d) in zip(ends, ends[1:], parts, strict=False)
            )
        )

    old = cut((24, 3), (16, 1), (24, 0))
    assert not diff_plans(old, reorder_columns(cut((24, 0), (16, 1), (24, 3)), old))
    fewer = reorder_columns(cut((32, 0), (32, 3)), old)
    assert diff_plans(old, fewer).bytes == 4 * wide.rows * (8 + 8)
    old, new = cut((8, 0), (32, 1), (24, 2)), cut((32, 1), (32, 0))
    assert reorder_columns(new, old) == new  # the old order would move more


def test_a_search_afresh_hardly_moves_what_it_finds_again(problem):
    """The devices of two searches have other numbers, their plans are much the same."""
    model = AnalyticModel(Setting("made-up", 256), lookup_ns=30)
    first, second = (
        SHARDERS["anneal"](problem, model, seed=seed, budget=Budget(evals=20_000)) for seed in (0, 1)
    )
    near = relabel_devices(second, first, problem)
    assert diff_plans(first, near).bytes <= diff_plans(first, second).bytes
    assert price(lower(near, problem), model).total_ms == pytest.approx(second.provenance["predicted_ms"])


def test_places_are_told_in_words(problem):
    t = problem.tables[2]
    found = diff_plans(Plan((column(t, 0),)), Plan((column(t, 1, 0, 32), column(t, 0, 32, 64))))
    text = plan_report.moves_by_table_text(found)
    assert (
        "1 table, 0.2 MiB of weights to move" in text
        and "device 1 columns 0:32 of 64; device 0 columns 32:64 of 64" in text
    )
    shared = plan_report.moves_by_table_text(
        diff_plans(Plan((column(t, 0),)), Plan((replica(t, problem.topology),)))
    )
    assert "a replica on every device" in shared and "a replica" not in text
