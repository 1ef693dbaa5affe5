"""The predicted effect of a move of one shard, against the price of the changed plan."""

from dataclasses import replace

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost import fit
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price_plan
from shardcore.cost.profile import load_profile
from shardcore.plans.what_if import what_if
from shardcore.search.anneal.reshard import rebind_tables

MIB = 1 << 20
TABLES = (
    *(Table(f"t{i}", 200 * (i + 1), 16, 1.0 + i % 5, Zipf(1.0)) for i in range(14)),
    *(Table(f"s{i}", 900, 8, 3.0, collection="clicks", sequence=True) for i in range(3)),
    Table("rows", 5000, 16, 2.0),
    Table("copies", 50, 8, 1.0),
)
PROBLEM = Problem(
    "mixed",
    TABLES,
    Topology(tuple(Device(4 * MIB, host=f"h{i // 2}", speed=1.0 + (i == 3)) for i in range(4))),
    SETTING.batch,
    constraints=Constraints(pinned=(("t0", (0, 1)),), together=(("t1", "t2"),)),
)


def mixed_plan() -> Plan:
    """Whole tables in turn, one cut in two, one divided by rows, one replicated; t1 and t2 stay together."""
    placements = [
        Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(TABLES[:17]) if i not in (1, 2, 5)
    ]
    placements += [Placement("column", Shard.whole(TABLES[i]), (1,)) for i in (1, 2)]
    cut = TABLES[5]
    placements += [Placement("column", Shard(cut, 0, cut.rows, 8 * k, 8 * k + 8), (3 * k,)) for k in range(2)]
    placements.append(Placement("row", Shard.whole(TABLES[17]), (0, 1, 2, 3)))
    placements.append(Placement("data_parallel", Shard.whole(TABLES[18]), (0, 1, 2, 3)))
    return Plan(tuple(placements))


@pytest.fixture(scope="session")
def trained():
    return fit.train(
        compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=2)
    ).model


def all_moves(known, problem):
    return [(i, d) for i in range(len(known.shards)) for d in known.targets(i, problem)]


def memory_after(known, i, device):
    """[D] bytes that devices need once shard i is on a device, from what the page is handed."""
    x, memory = known.shards[i], known.memory.copy()
    memory[[x.device, device]] += np.outer([-1, 1], np.array(x.sums, float) @ known.coefficients[x.run])
    return memory[:, : known.phases].max(1)


@pytest.mark.parametrize("name", ["closed form", "profile", "trained"])
def test_all_moves_are_priced_about_as_their_plans_are_and_memory_to_the_byte(name, trained):
    models = {
        "closed form": lambda: AnalyticModel(SETTING),
        "profile": lambda: load_profile("nvidia-h100-sxm").model(),
        "trained": lambda: trained,
    }
    plan, model = mixed_plan(), models[name]().for_problem(PROBLEM)
    known = what_if(price_plan(plan, PROBLEM, model), PROBLEM, model)
    moves = all_moves(known, PROBLEM)
    assert len(moves) > 30 and known.check is not None
    errors = []
    for move, estimate in zip(moves, known.totals_ms(moves), strict=True):
        priced = price_plan(known.moved(*move, plan), PROBLEM, model, fits=False)
        errors.append(abs(estimate - priced.cost.total_ms))
        np.testing.assert_allclose(memory_after(known, *move), priced.workload.memory_bytes, atol=1)
    step_ms = price_plan(plan, PROBLEM, model).cost.total_ms
    assert np.median(errors) < 5e-4 * step_ms and max(errors) < 2e-3 * step_ms
    # The moves that were checked stand for all.
    assert (
        np.median(errors) < 3 * known.check.median_ms + 1e-9 and max(errors) < 5 * known.check.most_ms + 1e-9
    )


def test_a_shard_moves_only_where_its_table_may_and_not_onto_columns_of_its_own():
    model = AnalyticModel(SETTING)
    known = what_if(price_plan(mixed_plan(), PROBLEM, model), PROBLEM, model)
    of = {(x.placement.shard.table.name, x.device): i for i, x in enumerate(known.shards)}
    assert known.targets(of["t0", 0], PROBLEM) == [1]  # pinned
    assert known.targets(of["t5", 0], PROBLEM) == [1, 2]  # device 3 has its other columns
    assert known.targets(of["t1", 1], PROBLEM) == []
    assert known.shards[of["t1", 1]].stays == "it needs to stay together with t2 (constraints.together)"
    assert not {"rows", "copies"} & {x.placement.shard.table.name for x in known.shards}


def test_a_plan_without_shards_of_one_device_has_no_moves():
    problem = replace(PROBLEM, tables=(TABLES[17],), constraints=Constraints())
    plan = Plan((Placement("row", Shard.whole(TABLES[17]), (0, 1, 2, 3)),))
    known = what_if(price_plan(plan, problem, AnalyticModel(SETTING)), problem, AnalyticModel(SETTING))
    assert not known.shards and known.check is None


@pytest.mark.parametrize("gbps", [1e-4, 10.0])
def test_moves_of_other_tables_leave_what_a_cache_fetches(gbps):
    cached = replace(TABLES[13], load_factor=0.1)
    topology = replace(PROBLEM.topology, memory=(Memory("host", 1 << 30, gbps),))
    problem = replace(
        PROBLEM, tables=(*TABLES[:13], cached, *TABLES[14:]), topology=topology, job=Job("prefetch")
    )
    plan = rebind_tables(mixed_plan(), problem)
    model = load_profile("nvidia-h100-sxm").model().for_problem(problem)
    priced = price_plan(plan, problem, model)
    known = what_if(priced, problem, model)
    moves = all_moves(known, problem)
    exact = [price_plan(known.moved(*m, plan), problem, model, fits=False).cost.total_ms for m in moves]
    assert abs(known.totals_ms(moves) - exact).max() < 2e-3 * priced.cost.total_ms
    assert any(priced.cost.fetch_wait_ms) == (gbps < 1)
