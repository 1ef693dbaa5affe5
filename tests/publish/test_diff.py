"""What moves between plans: counted cell by cell, and as little of it as equal devices allow."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.publish.diff import diff, rebind_tables, relabel_devices, reorder_columns
from shardcore.report import plan_report
from shardcore.search import SHARDERS, Budget
from shardcore.types import Constraints, Device, Placement, Plan, Setting, Shard, ShardCoreError, Table, Topology, Zipf
from shardcore.workload import lower


def random_plan(problem, seed: int, rows: bool = True) -> Plan:
    """Tables whole, cut by columns or by rows, or copied, anywhere."""
    rng, devices, placements = np.random.default_rng(seed), len(problem.topology), []
    for t in problem.tables:
        kind = rng.integers(4 if rows else 3)
        where = [int(d) for d in rng.permutation(devices)]
        if kind == 1 and t.dim > 4:
            cut = 4 * int(rng.integers(1, t.dim // 4))
            parts = Shard(t, 0, t.rows, 0, cut), Shard(t, 0, t.rows, cut, t.dim)
            placements += [Placement(part, (d,)) for part, d in zip(parts, where, strict=False)]
        elif kind == 3 and t.rows > 1:
            cut = int(rng.integers(1, t.rows))
            parts = Shard(t, 0, cut, 0, t.dim), Shard(t, cut, t.rows, 0, t.dim)
            placements += [Placement(part, (d,)) for part, d in zip(parts, where, strict=False)]
        else:
            placements.append(Placement(Shard.whole(t), where[:2 if kind == 2 else 1]))
    return Plan(tuple(placements))


def counted_bytes(old: Plan, new: Plan, name: str) -> int:
    """Cell by cell."""
    def cells(plan):
        return {(d, row, col) for p in plan.placements if p.shard.table.name == name for d in p.devices
                for row in range(p.shard.row_lo, p.shard.row_hi) for col in range(p.shard.col_lo, p.shard.col_hi)}

    return 4 * len(cells(new) - cells(old))


@pytest.fixture
def small(problem):
    """The same tables with few rows, so that cells can be counted."""
    return replace(problem, tables=tuple(replace(t, rows=min(t.rows, 40)) for t in problem.tables))


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_the_cells_that_devices_get(small, seed):
    old, new = random_plan(small, seed), random_plan(small, seed + 100)
    found = diff(old, new)
    assert {m.table: m.bytes for m in found.moves} == {
        t.name: n for t in small.tables if (n := counted_bytes(old, new, t.name))}
    assert found.bytes == sum(m.bytes for m in found.moves) and not diff(old, old) and bool(found)
    assert [m.bytes for m in found.moves] == sorted((m.bytes for m in found.moves), reverse=True)


def at(device, rows, columns, table):
    return Placement(Shard(table, *rows, *columns), device if isinstance(device, tuple) else (device,))


@pytest.mark.parametrize("old, new, cells", [
    ([(0, (0, 40), (0, 16))], [(1, (0, 40), (0, 16))], 640),
    ([(0, (0, 40), (0, 16))], [((0, 1, 2), (0, 40), (0, 16))], 2 * 640),  # copies
    ([((0, 1), (0, 40), (0, 16))], [(1, (0, 40), (0, 16))], 0),
    ([(0, (0, 40), (0, 8)), (1, (0, 40), (8, 16))], [(0, (0, 40), (0, 12)), (1, (0, 40), (12, 16))], 40 * 4),
    ([(0, (0, 40), (0, 4)), (0, (0, 40), (4, 16))], [(0, (0, 40), (0, 16))], 0),  # in one part what was in two
    ([(0, (0, 10), (0, 4)), (1, (10, 40), (0, 16)), (1, (0, 10), (4, 16))], [(0, (20, 40), (8, 16))], 20 * 8),  # nothing shared
    ([(0, (0, 10), (0, 16)), (1, (10, 40), (0, 16))], [(0, (0, 20), (0, 16)), (1, (20, 40), (0, 16))], 10 * 16),
])
@pytest.mark.parametrize("precision, bytes_a_cell", [("fp32", 4), ("fp16", 2)])
def test_moves_counted_by_hand(old, new, cells, precision, bytes_a_cell):
    table = Table("t", 40, 16, 1.0, precision=precision)
    found = diff(*(Plan(tuple(at(*p, table) for p in plan)) for plan in (old, new)))
    assert found.bytes == cells * bytes_a_cell and len(found.moves) == bool(cells)


def test_devices_are_not_exchanged_where_the_order_of_columns_is_enough(problem):
    wide, small = problem.tables[2], problem.tables[1]
    halves = (0, 32), (32, 64)
    old, new = (Plan((*(at(device, (0, wide.rows), half, wide) for device, half in zip(order, halves, strict=True)),
                      Placement(Shard.whole(small), (0,)))) for order in ((0, 1), (1, 0)))
    assert wide.bytes > small.bytes and diff(old, new).bytes == wide.bytes
    assert not diff(old, relabel_devices(new, old, replace(problem, tables=(wide, small))))


def test_statistics_do_not_move_tables_and_shapes_make_others_of_them(problem):
    old = random_plan(problem, 1)
    livelier = replace(problem, tables=tuple(replace(t, pooling=t.pooling + 1, access=Zipf(0.5)) for t in problem.tables))
    assert not diff(old, rebind_tables(old, livelier)) and lower(rebind_tables(old, livelier), livelier)
    grown = replace(problem, tables=(replace(problem.tables[0], rows=60_000), *problem.tables[1:], Table("new", 10, 4, 1.0)))
    found = diff(old, random_plan(grown, 1))
    assert found.added == ("cold", "new") and found.removed == ("cold",) and "cold" not in {m.table for m in found.moves}
    assert "2 tables new: cold, new; 1 table gone: cold" in plan_report.moves_text(found)
    with pytest.raises(ShardCoreError, match="'cold', which problem 'small' does not have"):
        lower(rebind_tables(old, grown), grown)


@pytest.mark.parametrize("seed", range(6))
def test_equal_devices_are_exchanged_so_that_least_moves_at_the_same_cost(problem, seed):
    model = AnalyticModel(Setting("made-up", 256))
    devices = tuple(Device(16 << 20, 1.0, f"host-{d % 2}") for d in range(4))
    topology = Topology(devices, within_host_gbps=2.0, between_hosts_gbps=0.5, latency_ms=0.01)
    problem = replace(problem, topology=topology)
    old, new = random_plan(problem, seed, rows=False), random_plan(problem, seed + 50, rows=False)
    near = relabel_devices(new, old, problem)
    assert price(lower(near, problem), model).total_ms == pytest.approx(price(lower(new, problem), model).total_ms)
    assert diff(old, near).bytes <= diff(old, reorder_columns(new, old)).bytes
    swapped = Plan(tuple(replace(p, devices=tuple((d + 2) % 4 for d in p.devices)) for p in old.placements))
    assert diff(old, swapped).bytes > 0 and not diff(old, relabel_devices(swapped, old, problem))
    moved_on = Plan(tuple(replace(p, devices=tuple((d + 1) % 4 for d in p.devices)) for p in old.placements))
    back = relabel_devices(moved_on, old, problem)  # hosts are not exchanged
    hosts = [{(p.shard.table.name, p.shard.width, d % 2) for p in x.placements for d in p.devices} for x in (moved_on, back)]
    assert hosts[0] == hosts[1]


def test_pinned_tables_and_row_ranges_stay_where_they_are(problem):
    old = Plan(tuple(Placement(Shard.whole(t), (0,)) for t in problem.tables))
    there = Plan(tuple(Placement(Shard.whole(t), (1,)) for t in problem.tables))
    pinned = replace(problem, constraints=Constraints(pinned=(("hot", (1,)),)))
    assert relabel_devices(there, old, problem) == old and relabel_devices(there, old, pinned) == there
    t = problem.tables[0]
    by_rows = Plan((*(Placement(Shard(t, lo, lo + 12_500, 0, t.dim), (lo // 12_500,)) for lo in range(0, 50_000, 12_500)),
                    *there.placements[1:]))
    assert relabel_devices(by_rows, old, problem) == by_rows


def test_columns_come_in_the_old_order_of_devices(problem):
    wide = problem.tables[2]

    def cut(*parts):
        ends = np.cumsum([0, *(n for n, _ in parts)])
        return Plan(tuple(Placement(Shard(wide, 0, wide.rows, int(lo), int(hi)), (d,))
                          for lo, hi, (_, d) in zip(ends, ends[1:], parts, strict=False)))

    old = cut((24, 3), (16, 1), (24, 0))
    assert not diff(old, reorder_columns(cut((24, 0), (16, 1), (24, 3)), old))
    fewer = reorder_columns(cut((32, 0), (32, 3)), old)
    assert diff(old, fewer).bytes == 4 * wide.rows * (8 + 8)
    old, new = cut((8, 0), (32, 1), (24, 2)), cut((32, 1), (32, 0))
    assert reorder_columns(new, old) == new  # the old order would move more


def test_a_search_afresh_hardly_moves_what_it_finds_again(problem):
    """The devices of two searches have other numbers, their plans are much the same."""
    model = AnalyticModel(Setting("made-up", 256), lookup_ns=30)
    first, second = (SHARDERS["local"](problem, model, seed=seed, budget=Budget(evals=20_000)) for seed in (0, 1))
    near = relabel_devices(second, first, problem)
    assert diff(first, near).bytes <= diff(first, second).bytes
    assert price(lower(near, problem), model).total_ms == pytest.approx(second.provenance["predicted_ms"])


def test_places_are_told_in_words(problem):
    t = problem.tables[2]
    found = diff(Plan((Placement(Shard.whole(t), (0,)),)),
                 Plan((Placement(Shard(t, 0, t.rows, 0, 32), (1,)), Placement(Shard(t, 0, t.rows, 32, 64), (0,)))))
    text = plan_report.diff_text(found)
    assert "1 table, 0.2 MiB of weights to move" in text and "device 1 columns 0:32; device 0 columns 32:64" in text
