"""Problems that do not fit are refused with what is too large, by how much, and what would be enough."""

import re
from dataclasses import replace

import pytest
from shapes import column

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology, default_reserved_bytes
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS
from shardcore.search.budget import Budget
from shardcore.search.state import refusal
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.step.memory import plan_fits, table_peak_bytes, used_bytes

BATCH = 48
TABLES = tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(6))
EACH = table_peak_bytes(TABLES[0], Problem("p", TABLES, Topology((Device(1),)), BATCH))
"""Bytes of one of them."""
MODEL = AnalyticModel(Setting("made-up", BATCH))


def problem_of(tables, memory, **constraints) -> Problem:
    topology = Topology(tuple(map(Device, memory)))
    return Problem("p", tuple(tables), topology, BATCH, constraints=Constraints(**constraints))


def needed(*tables: int, of=TABLES) -> int:
    """Bytes that a device takes with some of the tables, by number, and the rest on another."""
    given = problem_of(of, [1, 1])
    return used_bytes(Plan(tuple(column(t, int(i not in tables)) for i, t in enumerate(of))), given)[0]


def test_tables_pinned_to_a_part_of_some_devices_count_against_these_too():
    pinned = (("t0", (0,)), ("t1", (0,)), ("t2", (0, 1)), ("t3", (1, 0)), ("t4", (0, 1)))
    two, three = needed(0, 1), needed(2, 3, 4)
    enough = problem_of(TABLES, [two, three, 2 * three], pinned=pinned)
    assert feasible_shards(enough) == list(map(Shard.whole, TABLES))
    assert plan_fits(SHARDERS["size_greedy"](enough, MODEL), enough)
    with pytest.raises(
        Infeasible,
        match="tables pinned to devices 0, 1 .*'t0', 't1', 't2', 't3', 't4', "
        "take 0.4 MiB .* they may hold 0.3 MiB, .* bytes too little",
    ) as error:
        find_fitting_plan(problem_of(TABLES, [two, two, 2 * three], pinned=pinned))
    lacks = int(re.search(r"with (\d+) bytes more per device", str(error.value))[1])
    for less in (0, 1):
        given = problem_of(TABLES, [two + lacks - less, two + lacks - less, 2 * three], pinned=pinned)
        if less:
            with pytest.raises(Infeasible, match="with 1 byte more per device"):
                find_fitting_plan(given)
        else:
            assert plan_fits(find_fitting_plan(given), given)


def test_a_group_that_fits_no_device_is_named_with_what_it_takes():
    two, group = needed(0, 1, of=TABLES[:2]), (("t0", "t1"),)
    enough = problem_of(TABLES[:2], [two] * 2, together=group)
    assert feasible_shards(enough) == list(map(Shard.whole, TABLES[:2]))
    with pytest.raises(
        Infeasible,
        match="the group 't0', 't1', kept on one device .constraints.together., "
        "takes 0.1 MiB with outputs; the largest device may hold 0.1 MiB, 1 byte too little",
    ):
        feasible_shards(problem_of(TABLES[:2], [two - 1] * 2, together=group))


@pytest.mark.parametrize("times", [0.02, 0.8])
def test_what_many_tables_lack_is_said_and_is_enough(times):
    tables = tuple(Table(f"t{i}", 10 + 7 * (i % 500), 4 * (1 + i % 16), 1.0) for i in range(100))
    dealt = Plan(tuple(column(t, i % 8) for i, t in enumerate(tables)))
    memory = int(times * sum(used_bytes(dealt, problem_of(tables, [1] * 8))) / 8)
    with pytest.raises(Infeasible, match="its 100 tables take .* 8 devices may hold .* too little") as error:
        feasible_shards(problem_of(tables, [memory] * 8))
    more = float(re.search(r"with ([\d.]+) MiB more per device", str(error.value))[1])
    enough = problem_of(tables, [memory + int(more * 2**20)] * 8)
    assert plan_fits(find_fitting_plan(enough), enough)


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


@pytest.mark.parametrize(
    "n, n_tables",
    [(2, 7), (3, 9), *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, 7), (2, 8)))],
)
def test_what_is_said_to_be_enough_is_enough(n, n_tables):
    """More memory keeps more free by default, and devices have to divide the batch."""

    tables = tuple(Table(f"t{i}", 50_000 + i, 64, 5.0) for i in range(n_tables))

    def of(devices: tuple[Device, ...], batch: int = BATCH) -> Problem:
        reserved = Constraints(reserved_bytes=default_reserved_bytes(devices))
        return Problem("tight", tables, Topology(devices), batch, constraints=reserved)

    devices = (Device(20_000_000),) * n
    with pytest.raises(Infeasible) as raised:
        SHARDERS["size_greedy"](of(devices), MODEL)
    remedy = re.search(
        r"with ([\d.]+) MiB more per device, or (\d+) more devices? like the largest"
        r"(?: at a batch of (\d+), which they divide(?:, or (\d+) at this batch)?)?",
        str(raised.value),
    )
    more, (others, batch, at_this) = float(remedy[1]), (int(x or 0) for x in remedy.groups()[1:])
    for enough, n_samples in (
        ((Device(devices[0].memory_bytes + round(more * 2**20)),) * n, BATCH),
        (devices[:1] * (n + others), batch or BATCH),
        (devices[:1] * (n + (at_this or others)), BATCH if at_this else batch or BATCH),
    ):
        model = AnalyticModel(Setting("made-up", n_samples))
        assert SHARDERS["size_greedy"](of(enough, n_samples), model)


def test_memory_that_stays_free_is_told_where_it_is_missed():
    small = problem_of([Table("t", 1000, 64, 1.0)], [500_000], reserved_bytes=300_000)
    with pytest.raises(Infeasible, match=r"\(0.3 MiB of each stays free: constraints.reserved_bytes\). It"):
        SHARDERS["size_greedy"](small, MODEL)


def test_a_large_problem_is_refused_with_memory_that_is_enough():
    tables = [Table(f"t{i}", 1000 + i % 50, 64, 3.0) for i in range(1400)]
    short = problem_of(tables, [EACH] * 48)
    with pytest.raises(Infeasible) as raised:
        find_fitting_plan(short)
    more = float(re.search(r"It would fit with ([\d.]+) MiB more per device", str(raised.value))[1])
    enough = problem_of(tables, [EACH + round(more * 2**20)] * 48)
    assert plan_fits(find_fitting_plan(enough), enough)
    assert more * 2**20 < 1.05 * max(used_bytes(find_fitting_plan(enough), enough))


def test_a_table_that_may_only_be_replicated_has_no_place_under_a_pipeline_that_looks_up_ahead():
    problem = problem_of(TABLES, [1 << 30] * 2, kinds=(("t1", ("data_parallel",)),))
    ahead = replace(problem, job=Job("semi_sync"))
    assert SHARDERS["size_greedy"](problem, MODEL)
    with pytest.raises(ShardCoreError, match="table 't1' by data_parallel .*semi_sync pipeline.*It needs"):
        SHARDERS["size_greedy"](ahead, MODEL)
    free = replace(ahead, constraints=Constraints())
    found = SHARDERS["anneal"](free, MODEL, seed=0, budget=Budget(evals=500))
    assert "data_parallel" not in {p.kind for p in found.placements}


def test_devices_that_lack_memory_together_are_not_packed_for_a_refusal(monkeypatch):
    """A memory of 80 bytes, where 80 GB were meant: packing hundreds of such devices takes minutes."""
    tried, roomiest = [], refusal.least_excess_plan
    monkeypatch.setattr(
        refusal, "least_excess_plan", lambda *a, **k: tried.append(len(a[0].topology)) or roomiest(*a, **k)
    )
    with pytest.raises(Infeasible, match="It would fit with .* more per device"):
        find_fitting_plan(problem_of(TABLES, [80, 80]))
    assert set(tried) == {2}


def test_a_remedy_by_replicas_is_found_where_all_outputs_do_not_fit_together():
    """Of few rows and large outputs, copies take less than shards, whose outputs are of the global batch."""
    tables = tuple(Table(f"t{i}", 50, 64, 5.0) for i in range(3))
    kinds = tuple((t.name, ("column",)) for t in tables)
    problem = Problem(
        "p", tables, Topology((Device(9 << 18),) * 4), 4096, constraints=Constraints(kinds=kinds)
    )
    with pytest.raises(Infeasible, match="or without constraints.kinds"):
        find_fitting_plan(problem)
