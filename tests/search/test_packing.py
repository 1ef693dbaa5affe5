"""Packing and room under constraints: where tables may live, and what is kept together. (Without them:
test_greedy.py.)"""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from shapes import column, host_row, row, with_room
from shardcore.search.best_fit import best_fit
from shardcore.search.exact_memory import roomiest
from shardcore.search.free_memory import FreeMemory, bundle_bytes, bytes_alone

from shardcore.constraints import Constraints
from shardcore.cost.analytic import AnalyticModel
from shardcore.errors import Infeasible
from shardcore.layouts import shards_on
from shardcore.memory import fits, free_bytes
from shardcore.search import SHARDERS, feasible
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.budget import Budget
from shardcore.search.feasible import feasible_shards
from shardcore.search.packing import least_bytes, pack, surely_fits
from shardcore.search.portfolio import annealing as anneal
from shardcore.search.shards import devices_of, division, layout_of_shard, placed
from shardcore.step.memory_account import table_bytes
from shardcore.topology import Device, Topology, default_reserve
from shardcore.types import OPTIMIZERS, Plan, Problem, Setting, Shard, Table
from shardcore.workload import lower

BATCH = 48
TABLES = tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(6))
EACH = table_bytes(TABLES[0], Problem("p", TABLES, Topology((Device(1),)), BATCH))
"""Bytes of one of them."""
MODEL = AnalyticModel(Setting("made-up", BATCH))


def problem_of(tables, memory, hosts=None, **constraints) -> Problem:
    devices = tuple(Device(m, host=h) for m, h in zip(memory, hosts or ["a"] * len(memory), strict=True))
    return with_room(Problem("p", tuple(tables), Topology(devices), BATCH,
                             constraints=Constraints(**constraints)))


def test_best_fit_finds_a_way_or_is_certain_that_there_is_none():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n_items, n_devices = rng.integers(1, 6), rng.integers(1, 5)
        sizes, free = rng.integers(1, 7, n_items).tolist(), rng.integers(0, 12, n_devices).tolist()
        allowed = [tuple(set(rng.integers(n_devices, size=rng.integers(1, 3)).tolist()))
                   if rng.random() < 0.5 else None for _ in sizes]

        def fits(devices, allowed=allowed, sizes=sizes, free=free):
            return (all(a is None or d in a for a, d in zip(allowed, devices, strict=True))
                    and (np.bincount(devices, sizes, len(free)) <= free).all())

        found, certain = best_fit(sizes, free, 10_000, allowed)
        possible = any(fits(devices) for devices in product(range(n_devices), repeat=int(n_items)))
        assert certain and (found is not None) == possible and (found is None or fits(found)), (sizes,
                                                                                                free, allowed)


def test_devices_count_as_equal_for_those_items_alone_that_may_use_them_alike():
    # The first bundle must leave device 0 to the last, though both have the same room.
    # 30 bundles would be hopeless without pruning.
    assert best_fit([5, 5], [5, 5], 100, [None, (0,)]) == ([1, 0], True)
    assert best_fit([5] * 30, [5] * 29, 1000, [None] * 30) == (None, True)
    assert best_fit([5] * 30, [5] * 30, 1000, [None] * 29 + [(3,)])[0][-1] == 3


def test_pinned_tables_are_poured_first_where_others_would_take_their_room():
    # t0 fits device 0 best, but the wide table needs all of host a.
    # It has to be in shards of 16, 16 and 12 columns, not in halves.
    wide = Table("wide", 1000, 44, 1.0)
    given = problem_of([wide, TABLES[0]], [1] * 4, "aaab", unsplit=("t0",), pinned=(("wide", ("a",)),))
    sixteen = table_bytes(wide, given, 16)
    devices = [Device(m, host=h) for m, h in zip([sixteen] * 3 + [2 * EACH], "aaab", strict=True)]
    problem = with_room(replace(given, topology=Topology(devices)))
    packing = pack(problem, free_bytes(problem))
    where = sorted((s.table.name, s.width, d) for s, d in zip(packing.shards, packing.devices, strict=True))
    assert where == [("t0", 16, 3), ("wide", 12, 2), ("wide", 16, 0), ("wide", 16, 1)]


def test_a_bundle_takes_room_as_one():
    problem = problem_of(TABLES, [2 * EACH, 3 * EACH, 3 * EACH], together=(("t0", "t1", "t2"),),
                         pinned=(("t4", (1,)), ("t1", (1, 2))))
    room, shards = FreeMemory(problem), list(map(Shard.whole, TABLES))
    assert bytes_alone(shards[0], problem) == EACH
    assert room.fits(shards[0]).tolist() == [False, True, True] and room.fits(shards[3]).all()
    room.put(shards[1], 1)
    assert room.left.tolist() == [2 * EACH, 0, 3 * EACH]
    assert room.fits(shards[2]).tolist() == [False, True, False]
    room.put(shards[2], 1)
    assert room.left.tolist() == [2 * EACH, 0, 3 * EACH]
    assert not room.fits(shards[4]).any() and room.fits(shards[3]).tolist() == [True, False, True]


def test_what_follows_of_a_bundle_that_is_pinned_nowhere_fits_its_home_alone():
    problem = problem_of(TABLES, [2 * EACH, 3 * EACH, 3 * EACH], together=(("t0", "t1", "t2"),))
    room, shards = FreeMemory(problem), list(map(Shard.whole, TABLES))
    assert bundle_bytes(shards[:3], problem) == 3 * EACH
    assert room.fits(shards[1]).tolist() == [False, True, True] and room.fits(shards[3]).all()
    room.put(shards[1], 2)
    assert room.fits(shards[0]).tolist() == room.fits(shards[2]).tolist() == [False, False, True]
    assert room.left.tolist() == [2 * EACH, 3 * EACH, 0] and room.extra_bytes(shards[2]).tolist() == [0] * 3
    assert room.fits(shards[3]).tolist() == [True, True, False]


def test_there_is_room_to_the_byte():
    table, other = Table("t", 10**6, 4, 1.0), Table("u", 10**6, 4, 1.0)
    needed = table_bytes(table, problem_of([table, other], [1] * 3))
    problem = problem_of([table, other], [needed - 1, needed, 2 * needed - 1])
    room = FreeMemory(problem)
    assert room.fits(Shard.whole(table)).tolist() == [False, True, True]
    assert FreeMemory(problem, [needed + 1, 0]).fits(Shard.whole(table)).tolist() == [True, False]
    room.put(Shard.whole(table), 2)
    assert (room.fits(Shard.whole(other)).tolist() == [False, True, False]
            and room.left.tolist()[2] == needed - 1)
    room.put(Shard.whole(other), 1)
    assert room.left.tolist() == [needed - 1, 0, needed - 1]
    assert best_fit([10**6, 10**6 + 1], [10**6, 10**6 + 1], 10) == ([0, 1], True)
    assert best_fit([10**6, 10**6 + 1], [10**6, 10**6], 10) == (None, True)


def test_tables_pinned_to_a_part_of_some_devices_count_against_these_too():
    pinned = (("t0", (0,)), ("t1", (0,)), ("t2", (0, 1)), ("t3", (1, 0)), ("t4", (0, 1)))
    three = problem_of(TABLES, [2 * EACH, 2 * EACH, 9 * EACH], pinned=pinned)
    with pytest.raises(Infeasible, match="tables pinned to devices 0, 1 .*'t0', 't1', 't2', 't3', 't4', "
                                         "take 0.3 MiB .* they may hold 0.3 MiB, 71296 bytes too little"):
        feasible_shards(three)
    larger = problem_of(TABLES, [2 * EACH, 3 * EACH, 9 * EACH], pinned=pinned)
    assert feasible_shards(larger) == list(map(Shard.whole, TABLES))


def test_a_group_of_two_that_fits_no_device_is_named():
    with pytest.raises(Infeasible, match="the group 't0', 't1', kept on one device .constraints.together."):
        feasible_shards(problem_of(TABLES, [2 * EACH - 1] * 4, together=(("t0", "t1"),)))
    enough = problem_of(TABLES, [2 * EACH] * 3, together=(("t0", "t1"),))
    assert feasible_shards(enough) == list(map(Shard.whole, TABLES))


def test_columns_are_poured_to_the_last_that_fits():
    wide = Table("wide", 1000, 64, 1.0)
    seven, eight, six, three = (table_bytes(wide, problem_of([wide], [1] * 3), 4 * n) for n in (7, 8, 6, 3))
    for memory in ([seven, six, three], [eight - 1, six, three]):
        packing = pack(problem_of([wide], memory), memory)
        where = {d: s.width // 4 for s, d in zip(packing.shards, packing.devices, strict=True)}
        assert where == {0: 7, 1: 6, 2: 3}
    assert pack(problem_of([wide], memory), [seven - 1, six, three]) is None


def test_rows_of_ordered_tables_rise_with_torchrecs_ranks():
    """It numbers devices host by host; rows that are not ordered are dealt out anew, whichever device has
    which."""
    ordered, other = Table("ordered", 10, 4, 1.0, ordered=True), Table("other", 10, 4, 1.0)
    apart = problem_of([ordered, other], [EACH] * 4, "xyxy")
    assert [division(t, apart) for t in (ordered, other)] == [row(t, apart.topology)
                                                              for t in (ordered, other)]
    assert division(ordered, apart).devices == (0, 2, 1, 3)
    assert division(ordered, problem_of([ordered], [EACH] * 4)).devices == (0, 1, 2, 3)
    pinned = problem_of([ordered, other], [EACH] * 4, "xyxy", pinned=(("ordered", ("y",)), ("other", (0, 1))))
    assert [division(t, pinned) for t in (ordered, other)] == [host_row(ordered, (1, 3)), None]
    most = problem_of([ordered], [EACH] * 4, "xyxy", pinned=(("ordered", (1, 2, 3)),))  # a host, and one more
    assert division(ordered, most) == host_row(ordered, (1, 3))
    unequal = problem_of([ordered, other], [EACH] * 3, "xyy", pinned=(("ordered", ("y",)),))
    assert [division(t, unequal) for t in (ordered, other)] == [None, row(other, unequal.topology)]
    assert division(ordered, problem_of([ordered], [EACH] * 2, unsplit=("ordered",))) is None
    assert division(ordered, problem_of([ordered], [EACH] * 2, pinned=(("ordered", (1,)),))) is None
    few = Table("few", 3, 4, 1.0)  # over four devices the last would have none, over two it has one
    assert division(few, problem_of([few], [EACH] * 4, "xyxy")) == host_row(few, (0, 2))
    assert division(replace(few, rows=1), problem_of([few], [EACH] * 4, "xyxy")) is None
    second = Shard(ordered, 3, 6, 0, 4)
    assert [devices_of(Shard.whole(ordered), apart), devices_of(second, apart)] == [(0, 1, 2, 3), (2,)]
    assert devices_of(Shard(other, 3, 6, 0, 4), apart) == (2,)
    assert devices_of(Shard(ordered, 5, 10, 0, 4), pinned) == (3,)
    assert [layout_of_shard(s, apart).name for s in (Shard.whole(ordered), second)] == ["column", "row"]
    assert layout_of_shard(Shard(ordered, 5, 10, 0, 4), pinned).name == "host_row"


def test_shards_become_placements_and_row_ranges_one():
    table = Table("t", 10, 8, 1.0)
    problem = problem_of([table, *TABLES[:1]], [10**6] * 4, "xyxy")
    ranges = [s for _, s in shards_on(row(table, problem.topology))]
    whole = (Shard.whole(TABLES[0]),)
    found = placed([(ranges[3],), whole, *((s,) for s in ranges[:3])], [3, 1, 0, 2, 1], problem)
    assert set(found) == {row(table, problem.topology), column(TABLES[0], 1)}
    for devices in ([3, 1, 0, 1, 2], [3, 1, 0, 2, 2]):
        with pytest.raises(RuntimeError, match="a search placed rows of table 't'"):
            placed([(ranges[3],), whole, *((s,) for s in ranges[:3])], devices, problem)
    with pytest.raises(RuntimeError, match="a search placed rows of table 't'"):
        placed([(s,) for s in ranges[:3]], [0, 2, 1], problem)


@pytest.mark.parametrize("name", ["random", "size_greedy", "lookup_greedy", "neuroshard"])
def test_what_has_few_places_is_placed_first(name):
    """The busiest tables would fill the device that the others are pinned to."""
    busy = tuple(Table(f"busy{i}", 1000, 16, 40.0) for i in range(4))
    each = table_bytes(busy[0], problem_of(busy, [1] * 3))
    assert each < 3 * EACH
    problem = problem_of([*busy, *TABLES[:3]], [3 * each, 3 * each, 3 * EACH], together=(("busy0", "busy1"),),
                         pinned=tuple((f"t{i}", (2,)) for i in range(3)), share=0.0)
    for seed in range(5):
        plan = SHARDERS[name](problem, MODEL, seed=seed)
        assert not plan.provenance["packed"]
        lower(plan, problem)
        assert {p.shard.table.name for p in plan.placements if p.devices == (2,)} == {"t0", "t1", "t2"}


def test_rows_of_a_plan_that_is_to_be_kept_stay_where_they_are():
    table = Table("large", 4_000, 8, 1.0)
    problem = problem_of([table, *TABLES[:2]], [600_000] * 3)
    old = Plan((row(table, problem.topology), *(column(t, 1) for t in TABLES[:2])))
    kept = anneal(problem, MODEL, budget=Budget(evals=2_000), reshard=Reshard(old, 0))
    assert set(kept.placements) == set(old.placements)
    hosts = problem_of([table, *TABLES[:2]], [600_000] * 4, "aabb")
    old = Plan((host_row(table, (2, 3)), *(column(t, 1) for t in TABLES[:2])))
    assert (set(anneal(hosts, MODEL, budget=Budget(evals=2_000), reshard=Reshard(old, 0)).placements)
            == set(old.placements))


@pytest.mark.xfail(strict=True, reason="a table cut by columns and divided over hosts is placed anew, "
                   "whatever the limit")
def test_a_grid_of_a_plan_that_is_to_be_kept_stays_where_it_is():
    """As TorchRec's grid_shard has it."""
    table = Table("large", 4_000, 8, 1.0)
    hosts = problem_of([table, *TABLES[:2]], [600_000] * 4, "aabb")
    old = Plan((host_row(table, (0, 1), 0, 4), host_row(table, (2, 3), 4, 8),
                *(column(t, 1) for t in TABLES[:2])))
    kept = anneal(hosts, MODEL, budget=Budget(evals=2_000), space="halves", reshard=Reshard(old, 0))
    assert set(kept.placements) == set(old.placements)


def test_sums_are_certain_only_of_what_is_then_packed():
    rng, certain, packed = np.random.default_rng(0), 0, 0
    for seed in range(60):
        tables = tuple(Table(f"t{i}", int(10 ** rng.uniform(0.5, 4)), 4 * int(rng.integers(1, 12)), 1.0)
                       for i in range(30))
        devices = tuple(Device(1) for _ in range(int(rng.integers(2, 6))))
        unsplit = tuple(t.name for t in tables if rng.random() < 0.2)
        problem = Problem("p", tables, Topology(devices), 240, str(rng.choice(OPTIMIZERS)),
                          Constraints(0, unsplit))
        each = int(least_bytes(problem) * rng.uniform(0.97, 1.07) / len(devices))
        free = [int(each * rng.uniform(0.9, 1.1)) for _ in devices]
        sure, found = surely_fits(problem)(free), pack(problem, free, 200) is not None
        assert found or not sure, seed
        certain, packed = certain + sure, packed + found
        kept = replace(problem, constraints=Constraints(pinned=(("t0", (0,)),)))
        assert not surely_fits(kept)([10 * f for f in free])
    assert 20 < certain < packed, (certain, packed)


def test_best_fit_takes_as_many_items_as_there_are():
    """Where the first choice leads to the end, the number of steps is no limit."""
    assert best_fit([1] * 500, [100] * 5, 200) == ([0] * 100 + [1] * 100 + [2] * 100 + [3] * 100 + [4] * 100,
                                                   True)
    assert best_fit([2] * 500, [333] * 3, 200) == (None, False)


@pytest.mark.parametrize("times", [0.02, 0.8])
def test_what_many_tables_lack_is_said_without_packing_them(times, monkeypatch):
    tables = tuple(Table(f"t{i}", 10 + 7 * (i % 500), 4 * (1 + i % 16), 1.0) for i in range(2000))
    problem = problem_of(tables, [1] * 8)
    memory = int(times * least_bytes(problem) / 8)
    problem = problem_of(tables, [memory] * 8)
    monkeypatch.setattr(feasible, "pack", None)
    with pytest.raises(Infeasible, match="8 devices may hold .* too little"):
        feasible.feasible_shards(problem)
    said = feasible.remedy(problem)
    monkeypatch.undo()
    more = float(re.search(r"with ([\d.]+) MiB more per device", said)[1])
    devices = (replace(d, memory_bytes=d.memory_bytes + int(more * 2**20)) for d in problem.topology.devices)
    enough = replace(problem, topology=Topology(tuple(devices)))
    assert fits(roomiest(enough)[0], enough)
    assert 8 * more * 2**20 < 1.01 * (least_bytes(problem) - 8 * memory)


@pytest.mark.parametrize("name", SHARDERS)
def test_a_problem_without_a_plan_is_refused_before_anything_is_priced(name):
    class Unasked(AnalyticModel):
        def encode(self, shards, batch=None):
            raise AssertionError(f"{len(shards)} shards are priced")

    short = problem_of(TABLES, [EACH] * 4)
    tall = problem_of((Table("deep", 10**6, 4, 1.0), *TABLES), [4 * EACH] * 2)
    kept = problem_of(TABLES, [EACH // 2] * 16, unsplit=("t3",))
    for problem in (short, tall, kept):
        with pytest.raises(Infeasible, match="does not fit"):
            SHARDERS[name](problem, Unasked(MODEL.setting), budget=Budget(evals=10))


@pytest.mark.parametrize("n, n_tables", [(2, 7), (3, 7), (2, 8), (3, 9)])
def test_what_is_said_to_be_enough_is_enough(n, n_tables):
    """Of more memory more is kept free, where that is the default; devices have to divide the batch."""
    def of(devices: tuple[Device, ...]) -> Problem:
        tables = tuple(Table(f"t{i}", 50_000 + i, 64, 5.0) for i in range(n_tables))
        return Problem("tight", tables, Topology(devices), BATCH,
                       constraints=Constraints(reserved_bytes=default_reserve(devices)))

    devices = (Device(20_000_000),) * n
    with pytest.raises(Infeasible) as raised:
        SHARDERS["size_greedy"](of(devices), MODEL)
    said = re.search(r"with ([\d.]+) MiB more per device or (\d+) more devices", str(raised.value))
    more, others = float(said[1]), int(said[2])
    for enough in ((Device(devices[0].memory_bytes + round(more * 2**20)),) * n,
                   devices * ((n + others) // n) + devices[:(n + others) % n]):
        assert SHARDERS["size_greedy"](of(enough), MODEL)


def test_memory_that_stays_free_is_told_where_it_is_missed():
    small = problem_of([Table("t", 1000, 64, 1.0)], [500_000], reserved_bytes=300_000)
    with pytest.raises(Infeasible, match=r"\(0.3 MiB of each stays free: constraints.reserved_bytes\). By"):
        SHARDERS["size_greedy"](small, MODEL)
