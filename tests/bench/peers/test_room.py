"""Memory as peers count it, beside tables that constraints put on all devices."""

from dataclasses import replace

import pytest
from shapes import column, replica, row, with_room

from bench.peers import PEERS
from bench.peers.room import Room, free_bytes
from shardcore.core.constraints import Constraints
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.step.lower import lower
from shardcore.step.memory import local_batch_bytes, table_peak_bytes, usable_bytes, used_bytes

BATCH, MIB = 64, 2**20
TABLES = tuple(Table(f"t{i}", 6000 + 10 * i, 8 + 8 * (i % 3), 2.0 + i) for i in range(8))
MODEL = AnalyticModel(Setting("made-up", BATCH))
ASKED = {"t0": "data_parallel", "t2": "row"}


def problem(kinds: dict[str, str] = ASKED, **asked):
    asked = Constraints(kinds=tuple((name, (kind,)) for name, kind in kinds.items()), **asked)
    return with_room(Problem("p", TABLES, Topology((Device(8 * MIB),) * 2), BATCH, constraints=asked))


def test_tables_on_all_devices_leave_less():
    of, free = problem({"t0": "data_parallel"}), free_bytes(problem({}))
    assert free == [n - local_batch_bytes(of) for n in usable_bytes(of)]
    # Its weights, its gradients twice (the kernel's own, and DDP's buckets), and offsets of its lookups.
    taken = 3 * of.tables[0].bytes + 8 * of.local_batch
    assert [n - less for n, less in zip(free, free_bytes(of), strict=True)] == [taken] * 2


def test_a_bundle_takes_what_its_tables_do_and_goes_where_it_may_be():
    of = problem({"t3": "row"}, pinned=(("t1", (1,)), ("t4", (1,))), together=(("t1", "t4"),))
    bundle = tuple(Shard.whole(of.tables[i]) for i in (1, 4))
    room = Room(of)
    before = room.left.copy()
    assert room.fitting_devices(bundle).tolist() == [False, True]
    assert not room.fitting_devices((Shard.whole(of.tables[3]),)).any()  # its rows have to be divided
    room.place_bundle(bundle, 1)
    assert (before - room.left).tolist() == [0, sum(table_peak_bytes(s.table, of) for s in bundle)]
    assert not Room(of, [0, room.bytes_of(bundle) - 1]).fitting_devices(bundle).any()


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("kinds", [ASKED, {f"t{i}": "row" for i in range(8)}], ids=["some", "all"])
def test_a_plan_has_tables_of_given_kinds_beside_those_that_are_searched(name, kinds):
    of = problem(kinds)
    plan = PEERS[name](of, MODEL, budget=Budget(evals=50))
    lower(plan, of)
    made = {"row": row, "data_parallel": replica}
    fixed = {made[kinds[t.name]](t, of.topology) for t in of.tables if t.name in kinds}
    assert fixed == {p for p in plan.placements if p.shard.table.name in kinds}


@pytest.mark.parametrize("name", PEERS)
def test_tables_of_given_kinds_take_room_from_the_others(name):
    """The second device has room for them, and for next to nothing else."""
    of = problem({"t0": "data_parallel"})
    on_first = Plan((replica(TABLES[0], of.topology), *(column(t, 0) for t in TABLES[1:])))
    of = replace(of, topology=Topology((Device(8 * MIB), Device(used_bytes(on_first, of)[1] + 100))))
    plan = PEERS[name](of, MODEL, budget=Budget(evals=50))
    lower(plan, of)
    assert {p.devices for p in plan.placements} == {(0,), (0, 1)} and not plan.provenance["packed"]
