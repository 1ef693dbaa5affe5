"""TorchRec's planner as a sharder."""

from dataclasses import replace

import pytest
from shapes import row, with_room

from shardcore.core import progress
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.extras import TORCHREC
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import lower
from shardcore.step.memory import table_peak_bytes, usable_bytes
from shardcore.torchrec import baseline as peer
from shardcore.torchrec.baseline import BudgetedProposer, TorchRecConfig

BATCH, MIB = 64, 2**20
WIDE, TINY = Table("a.wide", 1000, 64, 40.0), Table("b", 3, 8, 2.0)
MODEL = AnalyticModel(Setting("made-up", BATCH))
installed = pytest.mark.skipif(
    bool(peer.missing_torchrec_message()), reason=f"TorchRec is not installed: {TORCHREC}"
)


FOUR = (Device(MIB),) * 4


def problem_of(*tables, devices=FOUR, **links) -> Problem:
    return Problem("p", tables, Topology(devices, **links), BATCH)


def test_it_is_listed_where_it_is_installed_and_says_how_to_install_it(monkeypatch):
    assert ("torchrec" in SHARDERS) is not bool(peer.missing_torchrec_message())
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    with pytest.raises(
        ShardCoreError,
        match=r"it is not installed \(No module named 'fbgemm_gpu'\): pip install 'shardcore\[measure",
    ):
        peer.search_with_torchrec_planner(problem_of(WIDE), MODEL)


@installed
def test_it_cuts_columns_where_min_partition_lets_it():
    problem = problem_of(WIDE, devices=(Device(MIB),) * 2, links=make_links(within_host=100.0))
    widths = {
        m: sorted(
            p.shard.width
            for p in peer.search_with_torchrec_planner(
                problem, MODEL, config=TorchRecConfig((m,), (False,))
            ).placements
        )
        for m in (None, 32)
    }
    assert widths == {None: [64], 32: [32, 32]}


@installed
def test_hosts_that_are_not_in_order_and_all_types():
    devices = tuple(Device(MIB, host=h) for h in ("x", "y", "x", "y"))
    problem = problem_of(
        WIDE,
        TINY,
        *(Table(f"t{i}", 900, 16, 5.0) for i in range(6)),
        devices=devices,
        links=make_links(between_hosts=1.0),
    )
    plan = peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((16,), (True,)))
    lower(plan, problem)
    assert not plan.provenance["packed"]


@installed
def test_it_is_told_of_devices_host_by_host_and_of_the_models_rates():
    devices = tuple(Device(MIB + i, host=h) for i, h in enumerate("xyxy"))
    tables = WIDE, TINY, Table("t", 900, 16, 5.0)
    problem = problem_of(*tables, devices=devices, links=make_links(within_host=3.0))
    theirs = peer._TorchRecProblem(problem, MODEL, [])
    assert theirs.ranks == (0, 2, 1, 3) and theirs.per_host == 2
    topology = theirs.planner_topology()
    assert [d.storage.hbm for d in topology.devices] == [usable_bytes(problem)[d] for d in (0, 2, 1, 3)]
    assert topology.intra_host_bw == 3e6  # bytes per ms
    options = theirs.option_enumerator(topology, theirs.parameter_constraints(theirs.types, None)).enumerate(
        theirs.module, theirs.sharders
    )
    whole = [o for o in options if o.sharding_type == "table_wise"]
    ours_ms = MODEL.op_ms(MODEL.encode(list(map(Shard.whole, tables))).sum(0, keepdims=True))[0]
    assert sum(s.perf.fwd_compute + s.perf.bwd_compute for o in whole for s in o.shards) == pytest.approx(
        ours_ms
    )
    bytes_of = {o.name: o.shards[0].storage.hbm for o in whole}
    assert bytes_of == {f"t{i}": table_peak_bytes(t, problem) for i, t in enumerate(tables)}


@installed
def test_a_faster_device_gets_more_and_a_full_one_less():
    same = tuple(Table(f"t{i}", 500, 16, 10.0) for i in range(12))
    fast = problem_of(*same, devices=(*FOUR[:3], Device(MIB, 3.0)), links=make_links(within_host=1000.0))
    small = replace(fast, topology=Topology((*FOUR[:3], Device(50_000))))
    for problem, more in ((fast, True), (small, False)):
        plan = peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((None,), (False,)))
        held = [sum(p.devices == (d,) for p in plan.placements) for d in range(4)]
        assert (held[3] > max(held[:3])) == more, held


@installed
def test_pinned_tables_bundles_and_fixed_kinds_are_placed_first_and_the_others_around_them():
    same = tuple(Table(f"t{i}", 500, 16, 10.0) for i in range(8))
    rules = Constraints(pinned=(("t0", (2,)),), together=(("t1", "t2"),), kinds=(("a.wide", ("row",)),))
    problem = replace(problem_of(WIDE, *same, links=make_links(within_host=1000.0)), constraints=rules)
    plan = peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((None,), (False,)))
    lower(plan, problem)
    devices = {p.shard.table.name: p.devices for p in plan.placements}
    assert devices["t0"] == (2,) and devices["t1"] == devices["t2"]
    assert [p for p in plan.placements if p.shard.table == WIDE] == [row(WIDE, problem.topology)]
    # Equal tables: with the work of those placed first known, each device has two.
    assert [sum(devices[t.name] == (d,) for t in same) for d in range(4)] == [2, 2, 2, 2]
    assert plan.provenance["evals"] > 0 and not plan.provenance["packed"]


@installed
def test_rows_are_cut_as_torchrec_trains_them_on_devices_of_unequal_memory():
    deep, flat = Table("deep", 200_001, 8, 300.0), Table("flat", 9, 8, 30.0)
    # Each takes a range of the rows, but not four columns of all.
    devices = (Device(MIB * 3 // 2), Device(MIB * 5 // 4)) * 4
    problem = with_room(problem_of(deep, flat, TINY, devices=devices))
    plan = peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((None,), (True,)))
    lower(plan, problem)
    assert [p for p in plan.placements if p.shard.table == deep] == [row(deep, problem.topology)]
    assert not plan.provenance["packed"]


@installed
@pytest.mark.parametrize("budget, most", [(Budget(evals=3), 3), (Budget(seconds=1e-9), 1)])
def test_a_budget_ends_the_sweep_with_a_plan(budget, most):
    plan = peer.search_with_torchrec_planner(problem_of(WIDE, TINY), MODEL, budget=budget)
    assert 1 <= plan.provenance["evals"] <= most


@installed
def test_a_budget_in_seconds_ends_a_setting_of_the_sweep_while_its_options_are_listed(monkeypatch):
    """Listing takes a second here: once to compare costs, then for each setting. The second one finds none in time."""
    now_s, listed = [0.0], []
    monkeypatch.setattr(progress, "clock", lambda: now_s[0])
    estimate = peer.PeakStorageEstimator.estimate

    def slow(self, options, sharder_data_map=None):
        now_s[0] += 1
        listed.append(len(options))
        estimate(self, options, sharder_data_map)

    monkeypatch.setattr(peer.PeakStorageEstimator, "estimate", slow)
    problem, config = problem_of(WIDE, TINY), TorchRecConfig((None, 16), (False,))
    first = peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((None,), (False,)))
    now_s[0] = 0.0
    listed.clear()
    plan = peer.search_with_torchrec_planner(problem, MODEL, budget=Budget(seconds=2.5), config=config)
    assert len(listed) == 3 and plan == first
    assert plan.provenance["evals"] == first.provenance["evals"] and not plan.provenance["packed"]
    listed.clear()
    # The first setting always ends with a plan.
    plan = peer.search_with_torchrec_planner(problem, MODEL, budget=Budget(seconds=0.5), config=config)
    assert len(listed) == 2 and not plan.provenance["packed"]


def test_proposals_end_before_the_seconds_that_pricing_needs(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now_s[0])

    class Proposer:
        def propose(self):
            now_s[0] += 1
            return ["an option"]

        def feedback(self, **facts):
            pass

    def proposals(spare_s, placeable):
        now_s[0] = 0.0
        proposer = BudgetedProposer([Proposer()], Budget(seconds=10.0).start(), spare_s)
        for n in range(20):
            if proposer.propose() is None:
                return n
            proposer.feedback(placeable)
        return None

    assert proposals(0.0, True) == 10 and proposals(4.0, True) == 7
    # Without one that can be placed there is no plan yet.
    assert proposals(4.0, False) is None


@pytest.mark.parametrize("fields", [{"min_partition": ()}, {"all_types": ()}])
def test_a_config_that_runs_nothing_is_refused(fields):
    with pytest.raises(ShardCoreError, match="swept"):
        TorchRecConfig(**fields)


@installed
@pytest.mark.parametrize("hosts, sequence", [("xy", False), ("xxyy", True)])
def test_types_over_a_host_are_for_several_devices_and_pooled_tables(hosts, sequence):
    tables = (
        replace(WIDE, sequence=sequence),
        *(Table(f"t{i}", 900, 16, 5.0, sequence=sequence) for i in range(3)),
    )
    problem = problem_of(
        *tables, devices=tuple(Device(4 * MIB, host=h) for h in hosts), links=make_links(between_hosts=1.0)
    )
    lower(peer.search_with_torchrec_planner(problem, MODEL, config=TorchRecConfig((16,), (True,))), problem)
