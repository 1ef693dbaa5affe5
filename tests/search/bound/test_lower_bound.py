"""Bounds against all plans of tiny problems."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from shapes import column, host_row, on_hosts, sends

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import SettingMismatch
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost import features
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.collective_model import EXCHANGE_TERMS, FAR
from shardcore.cost.model import at_confidence, price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile import load_profile, profile_names
from shardcore.search import SHARDERS, Budget
from shardcore.search.bound import lower_bound, options
from shardcore.step.exchange_lines import has_equal_transfers, is_even_division_cheapest
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.step.lower import Workload, lower
from shardcore.testing.plans import all_plans
from shardcore.testing.problems import BATCH, MIB, draw_random_tables, small_problem_model


def tiny(seed: int, n_devices: int = 2, **topology) -> Problem:
    rng = np.random.default_rng(seed)
    speeds = rng.choice([0.5, 1.0, 2.0], n_devices) if seed % 3 == 2 else np.ones(n_devices)
    tables = draw_random_tables(rng, 3 if n_devices == 2 else 2, dims=(4, 8, 12))
    return Problem("tiny", tables, Topology(tuple(Device(MIB, s) for s in speeds), **topology), BATCH)


@cache
def every_workload(problem: Problem, columns_alone: bool) -> list[Workload]:
    """The workload of every plan, which is the same for all models."""
    return [lower(plan, problem) for plan in all_plans(problem, columns_alone)]


def optimum_ms(problem: Problem, model, columns_alone: bool = False) -> float:
    return min(price(workload, model).total_ms for workload in every_workload(problem, columns_alone))


def contended(seed: int) -> NeuralModel:
    """A model with the trained one's formulas and made-up weights: contention that matters, no correction."""
    rng = np.random.default_rng(seed)
    k, c = len(features.DRIVERS), len(features.CONDITIONS)
    exchange = np.zeros(len(EXCHANGE_TERMS))
    exchange[[0, 3, 4, 5]] = 0.02, 0.05, 2e-6, 3e-6
    rates = np.zeros((k, 1))
    rates[:7, 0] = 1e-3, 1e-5, 1e-6, 2e-5, 5e-6, 1e-4, 1e-5
    weights = {
        "rates": rng.uniform(0, 1, (k, 2)) * rates,
        "launch": rng.uniform(0.001, 0.02, 2),
        "load_typical": rng.uniform(1, 1e4, k),
        "contention.0.weight": rng.uniform(0, 0.5, (k, 4)),
        "contention.0.bias": rng.normal(size=4),
        "contention.1.weight": rng.uniform(0, 0.3, (4, 2)),
        "condition_low": np.full(c, -9.0),
        "condition_high": np.full(c, 30.0),
        "condition_mean": np.zeros(c),
        "condition_sd": np.ones(c),
        "network.0.weight": 0.03 * rng.normal(size=(c, 2)),
        "network.0.bias": np.zeros(2),
        "exchange_all_to_all_forward": exchange,
        "exchange_all_to_all_backward": exchange,
    }
    return NeuralModel(Setting("made-up", BATCH), weights, {"ranges": {}})


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda p, seed: small_problem_model(p), id="linear"),
        pytest.param(lambda p, seed: contended(seed), id="contended", marks=pytest.mark.long),
    ],
)
def test_no_plan_is_cheaper_than_the_proved_bound_and_it_is_near(made):
    ratios = []
    for seed in (2, 3):
        hosts = {"links": make_links(within_host=2.0, latency_ms=0.001)} if seed % 3 == 2 else {}
        problem = tiny(seed, 4 if seed % 4 == 3 else 2, **hosts)
        model = made(problem, seed)
        result = lower_bound.prove_lower_bound(problem, model)
        ratios.append(result.proved_ms / optimum_ms(problem, model))
        columns = lower_bound.prove_lower_bound(problem, model, shared=())
        ratios.append(columns.proved_ms / optimum_ms(problem, model, columns_alone=True))
        assert result.proved_ms <= columns.proved_ms * (1 + 1e-3)
    assert max(ratios) <= 1 and np.mean(ratios) > 0.75, ratios


def test_the_bound_is_near_good_plans_of_many_tables():
    problem = Problem(
        "many", draw_random_tables(np.random.default_rng(1), 60), Topology((Device(64 * MIB),) * 4), BATCH
    )
    ms = SHARDERS["neuroshard"](problem, small_problem_model(problem)).provenance["predicted_ms"]
    result = lower_bound.prove_lower_bound(problem, small_problem_model(problem), shared=())
    assert 0.95 < result.proved_ms / ms <= 1 and result.limit == "the work of all tables, divided evenly"
    assert result.space == "each table whole or cut by columns (multiples of 4)"


@pytest.mark.parametrize(
    "shape, seeds",
    [
        ("hosts", (1,)),
        *(
            pytest.param(shape, (0, 1), marks=pytest.mark.long)
            for shape in ("hosts", "unequal", "unequal hosts", "three")
        ),
    ],
)
def test_no_plan_of_drawn_problems_of_other_shapes_is_cheaper(shape, seeds):
    """With links and without, where a device's own bytes may count; several speeds; rows over one host.

    Where even exchanges are not the cheapest they are left out, and the bound is as low as 0.31 of the optimum."""
    ratios = []
    for seed in seeds:
        rng = np.random.default_rng([seed, 5])
        gbps = float(rng.choice([0.5, 2.0, 8.0]))
        if "hosts" in shape:
            where = on_hosts("aabb", MIB, links=make_links(0.001, within_host=gbps, between_hosts=0.5))
        else:
            where = Topology(
                (Device(MIB),) * (3 if shape == "three" else 2),
                links=make_links(0.001, within_host=gbps) if seed else (),
            )
        if "unequal" in shape:
            where = replace(
                where,
                devices=tuple(replace(d, speed=float(rng.choice([0.5, 1.0, 2.0]))) for d in where.devices),
            )
        problem = Problem(
            "p", draw_random_tables(rng, 2 if "hosts" in shape else 3, dims=(4, 8)), where, BATCH
        )
        for model in (small_problem_model(problem), contended(seed)):
            result = lower_bound.prove_lower_bound(problem, model)
            assert ("rows divided over one host" in result.space) == ("hosts" in shape)
            ratios.append(result.proved_ms / optimum_ms(problem, model))
    assert max(ratios) <= 1 and np.mean(ratios) > 0.75, ratios


LINKED = make_links(within_host=8.0, between_hosts=0.5)


@pytest.mark.parametrize(
    "hosts, scale, links, every",
    [
        ("ab", 1, make_links(between_hosts=0.5), 4),
        *(
            pytest.param(*case, 1, marks=pytest.mark.long)
            for case in (
                ("aabb", 1, LINKED),
                ("aabb", 100, ()),
                ("abc", 1000, ()),
                ("ab", 1, ()),
                ("aa", 100, ()),
                ("aabb", 10, ()),
            )
        ),
    ],
)
def test_no_plan_is_cheaper_under_any_hardware_profile(hosts, scale, links, every):
    """Exchanges of profiles ramp up: the law is concave, and plans of few bytes pay little of it."""
    tables = draw_random_tables(np.random.default_rng(scale), 2, dims=(4, 8))
    problem = Problem("p", tables, on_hosts(hosts, 1 << 40, links=links), BATCH * scale)
    models = [load_profile(name).cost_model().for_problem(problem) for name in profile_names()[::every]]
    least_ms = np.min([models[0].steps_ms(w, models) for w in every_workload(problem, False)], axis=0)
    ratios = [lower_bound.prove_lower_bound(problem, m).proved_ms for m in models] / least_ms
    assert max(ratios) <= 1 and np.mean(ratios) > 0.8, ratios


def test_no_device_waits_for_rows_of_another_host_backward():
    """Rows of a hot table on one host, and of wide ones on three: backward the first does not wait for these.

    All-to-alls among all devices take long here, so that other kinds are no way out.
    """
    where = on_hosts("".join(h * 8 for h in "abcd"), 1 << 40)
    hot, *wide = (
        Table("hot", 40_000, 4, 1000.0, Zipf(0.0)),
        *(Table(f"wide{i}", 400, 192, 0.01) for i in range(3)),
    )
    problem = Problem("rows", (hot, *wide), where, 2304)
    given = load_profile("nvidia-h100-sxm")
    slow = {"all_to_all_round_us": 50.0, "forward_lookup_ns": 4.0}
    slow |= dict.fromkeys(("bucketize_gbps", "order_gbps"), 1e5)
    slow |= dict.fromkeys((n for n in given.rate_values if n.endswith("ramp_us")), 1e-6)
    slow |= dict.fromkeys((n for n in given.rate_values if n.endswith("latency_us")), 1e-3)
    slow |= {f"all_to_all_{level}_gbps": 1000.0 for level in ("within_host", "between_hosts")}
    slow |= {f"{ring}_within_host_gbps": 1.0 for ring in ("reduce_scatter", "all_gather")}
    model = given.with_values({**given.rate_values, **slow}).cost_model().for_problem(problem)
    plan = Plan(
        tuple(
            host_row(t, group)
            for t, group in zip(problem.tables, SHARDING_KINDS["host_row"].device_groups(where), strict=True)
        )
    )
    proved_ms = lower_bound.prove_lower_bound(problem, model, shared=[SHARDING_KINDS["host_row"]]).proved_ms
    assert 0.8 < proved_ms / price(lower(plan, problem), model).total_ms <= 1


def test_hot_tables_that_do_not_fit_side_by_side_raise_the_bound():
    """Each of five fits on one of four devices, by itself. Two of them share a device in every plan."""
    hot = tuple(Table(f"hot{i}", 300 + i, 16, 200.0) for i in range(5))
    where = Topology((Device(64 * MIB),) * 4, links=make_links(0.001, within_host=8.0))
    problem = Problem("hot", hot, where, BATCH, constraints=Constraints(unsplit=tuple(t.name for t in hot)))
    model = small_problem_model(problem)
    ms = SHARDERS["anneal_columns"](problem, model, budget=Budget(evals=20_000)).provenance["predicted_ms"]
    assert 0.97 < lower_bound.prove_lower_bound(problem, model, shared=()).proved_ms / ms <= 1


def test_a_mix_of_kinds_contends_too():
    """Many tables: what is proved of all kinds is near what is proved of columns."""
    problem = Problem(
        "many",
        draw_random_tables(np.random.default_rng(1), 30),
        Topology((Device(64 * MIB),) * 4, links=make_links(0.0001, within_host=30.0)),
        BATCH,
    )
    model = contended(3)
    every, columns = (
        lower_bound.prove_lower_bound(problem, model),
        lower_bound.prove_lower_bound(problem, model, shared=()),
    )
    assert 0.96 < every.proved_ms / columns.proved_ms <= 1, (every, columns)


def test_a_table_that_must_stay_whole_or_tables_kept_together_are_in_the_way():
    free = tiny(0)
    names = tuple(t.name for t in free.tables)
    model = small_problem_model(free)
    largest = max(free.tables, key=lambda t: model.op_ms(model.encode([Shard.whole(t)]))[0])
    whole = replace(
        free,
        tables=(replace(largest, pooling=50.0), *(t for t in free.tables if t != largest)),
        constraints=Constraints(unsplit=names),
    )
    limit = lower_bound.prove_lower_bound(whole, model, shared=[SHARDING_KINDS["row"]]).limit
    words = "whole on a device it takes more than an even share of all, and its parts together cost more"
    assert limit == f"table {largest.name!r}: {words}"
    together = replace(free, constraints=Constraints(together=(names,)))
    result = lower_bound.prove_lower_bound(together, model, shared=[SHARDING_KINDS["row"]])
    assert "kept together on one device" in result.limit
    shards = [Shard.whole(t) for t in free.tables]
    assert result.proved_ms >= model.op_ms(model.encode(shards).sum(0, keepdims=True))[0] * (1 - 1e-9)


def test_what_cannot_be_proved_is_left_out():
    problem = tiny(1)
    unequal = replace(problem, topology=Topology((Device(MIB), Device(MIB), Device(MIB, host="b"))))
    pods = on_hosts(["p/a", "p/b", "p/c", "q/d"], MIB, links=make_links(shared=True, between_hosts=3.0))
    for of_unequal in (unequal, replace(problem, topology=pods)):
        # Exchanges of unequal hosts are left out of the proof.
        proved_ms = lower_bound.prove_lower_bound(of_unequal, small_problem_model(of_unequal)).proved_ms
        assert 0 < proved_ms < optimum_ms(of_unequal, small_problem_model(of_unequal))
    model = contended(0)
    band = {
        "band.log_ms": np.zeros(1),
        "band.width": np.full(1, 0.1),
        "band.level": np.arange(2.0),
        "band.error": np.array([-1.0, 1.0]),
    }
    below, above = (
        at_confidence(replace(model, weights={**model.weights, **band}), level) for level in (0.2, 0.9)
    )
    assert lower_bound.prove_lower_bound(problem, below) is None
    # what its model proves of itself holds for what is never cheaper
    result = lower_bound.prove_lower_bound(problem, above)
    assert result.proved_ms == pytest.approx(
        lower_bound.prove_lower_bound(problem, model).proved_ms, rel=2e-3
    )
    assert result.proved_ms < optimum_ms(problem, above)


def test_the_last_rows_may_be_few_and_their_device_slow():
    devices = tuple(Device(64 * MIB, speed) for speed in (1.0,) * 7 + (0.3,))
    problem = Problem("few", (Table("t", 61, 4, 1000.0, Zipf(0.0)),), Topology(devices), BATCH)
    model = AnalyticModel(
        Setting("made-up", BATCH),
        launch_us=0.001,
        table_us=0.001,
        lookup_ns=10,
        exchange_latency_ms=1e-6,
        exchange_gbps=1000,
    )
    plan = SHARDERS["anneal"](problem, model, budget=Budget(evals=5000))
    assert lower_bound.prove_lower_bound(problem, model).proved_ms <= plan.provenance["predicted_ms"]


def test_a_large_problem_is_bounded_in_a_smaller_space_and_says_so(monkeypatch):
    problem = Problem(
        "many", draw_random_tables(np.random.default_rng(1), 8), Topology((Device(64 * MIB),) * 2), BATCH
    )
    spaces = []
    for most in (10_000, 20):
        monkeypatch.setattr(options, "MOST_SHARDS", most)
        spaces.append(lower_bound.prove_lower_bound(problem, small_problem_model(problem)).space)
    assert "multiples of 4" in spaces[0] and "powers of two" in spaces[1]


def test_a_model_for_another_setting_is_refused():
    with pytest.raises(SettingMismatch):
        lower_bound.prove_lower_bound(tiny(0), AnalyticModel(Setting("made-up", 2 * BATCH)))


@pytest.mark.parametrize(
    "made", [lambda seed: small_problem_model(tiny(0)), contended], ids=["linear", "contended"]
)
def test_the_properties_that_models_declare_hold(made):
    rng, model_is_linear = np.random.default_rng(0), made is not contended
    shards = [Shard.whole(t) for t in draw_random_tables(rng, 30)]
    hosts = [Device(MIB, host=f"host-{i // 2}") for i in range(4)]
    topologies = [
        Topology(tuple(hosts), links=make_links(0.1, within_host=2.0, between_hosts=0.5)),
        Topology((Device(MIB),) * 3),
        Topology((Device(MIB, 2.0), Device(MIB)), links=make_links(within_host=1.0)),
    ]
    for seed in range(5):
        model = made(seed)
        codes = model.encode(shards)
        groups = rng.random((50, 2, 30)) < 0.3
        groups[..., 0] = True
        groups = groups @ codes
        for few, more in zip(groups[:, 0], groups.sum(1), strict=True):
            assert (model.rate_lower_bounds(few) <= model.rate_lower_bounds(more)).all()
            assert model.op_ms(more) >= (model.launch_ms() + model.rate_lower_bounds(few) @ more) * (
                1 - 1e-12
            )
        for topology in topologies:
            assert is_even_division_cheapest(model, topology)
            assert has_equal_transfers(model, topology) == (bool(topology.links) or model_is_linear)
            n, speed = len(topology), np.array([d.speed for d in topology.devices])
            for name in ("all_to_all", "reduce_scatter"):  # replicas are alike on all devices
                traffic = sends(**{name: rng.dirichlet(np.ones(n), 40) * 1e6})
                some = model.comm_cost(traffic, np.zeros((40, n)), topology)
                even = model.comm_cost(
                    traffic.mean(-1, keepdims=True) + 0 * traffic, np.zeros((40, n)), topology
                )
                assert (some.forward_ms.max(-1) >= even.forward_ms.max(-1) - 1e-12).all()
                assert (some.backward_ms @ speed >= even.backward_ms @ speed - 1e-9).all()
    assert not is_even_division_cheapest(made(0), Topology((*hosts, Device(MIB, host="host-2"))))


@pytest.mark.parametrize("dense_ms", [0.05, pytest.param(1000.0, marks=pytest.mark.long)])
def test_ids_that_the_dense_part_hides_raise_no_bound(dense_ms):
    drawn = Problem("p", draw_random_tables(np.random.default_rng(5), 6), on_hosts("aaa"), BATCH)
    given = replace(drawn, job=Job(dense_forward_ms=dense_ms, dense_backward_ms=0.0))
    model = small_problem_model(given)
    result = lower_bound.prove_lower_bound(given, model)
    step_ms = SHARDERS["anneal"](given, model, budget=Budget(evals=5_000)).provenance["predicted_ms"]
    assert dense_ms < result.proved_ms <= step_ms
    without = lower_bound.prove_lower_bound(drawn, model).proved_ms
    assert result.proved_ms <= without + dense_ms


# --- contention ---------------------------------------------------------------------------------------------


def crowded(steep: float = 6.0) -> NeuralModel:
    """Two shards in an op take seven times as long, each, as one by itself. Less where it is less steep."""
    model = contended(0)
    k, weights = len(features.DRIVERS), dict(model.weights)
    weights["load_typical"] = np.append(1.4, np.ones(k - 1))
    weights["contention.0.weight"] = np.zeros((k, 4))
    weights["contention.0.weight"][[0, 3], [0, 1]] = steep
    weights["contention.0.bias"], weights["contention.1.weight"] = np.zeros(4), np.zeros((4, 2))
    weights["contention.1.weight"][0] = 1.0
    # Lookups contend too where it is less steep.
    weights["contention.1.weight"][1] = float(steep < 1)
    return replace(model, weights=weights)


def hot_and_light() -> Problem:
    """Two hot tables whose rows the devices of a host can share, and a light one that stays whole."""
    where = on_hosts("aabb", 64 * MIB, links=make_links(0.0001, within_host=64.0, between_hosts=64.0))
    hot = [Table(f"hot{i}", 400, 4, 200.0, Zipf(0.3)) for i in range(2)]
    return Problem(
        "hosts",
        (*hot, Table("light", 400, 4, 1.0)),
        where,
        BATCH,
        constraints=Constraints(unsplit=("light",)),
    )


@pytest.mark.parametrize(
    "seed, gbps",
    [
        (0, 1.0),
        *(
            pytest.param(seed, gbps, marks=pytest.mark.long)
            for seed, gbps in ((0, 0.001), (1, 0.001), (1, 1.0))
        ),
    ],
)
def test_no_plan_is_cheaper_if_caches_fetch_ahead(seed, gbps):
    """Fetches are left out of the bound, hidden or not."""
    drawn = tiny(seed, memory=(Memory("host", MIB, gbps),))
    tables = tuple(replace(t, load_factor=x) for t, x in zip(drawn.tables, (0.5, 0.0, 1.0), strict=True))
    for pipeline in ("prefetch", "sparse_dist"):
        problem = replace(
            drawn, tables=tables, job=Job(pipeline, dense_forward_ms=0.1, dense_backward_ms=0.1)
        )
        for model in (small_problem_model(problem), contended(seed)):
            own = model.for_problem(problem)
            proved_ms = lower_bound.prove_lower_bound(problem, own, ()).proved_ms
            assert proved_ms and 0 < proved_ms <= optimum_ms(problem, own, columns_alone=True)


@pytest.mark.parametrize(
    "factors", [(0.02, 0.6), *(pytest.param(x, marks=pytest.mark.long) for x in ((0.3, 0.3), (0.6, 0.02)))]
)
def test_no_plan_is_cheaper_where_tables_share_a_cache(factors):
    """One cache may miss less than two, in which rows of one table stay longer than those of the other."""
    tables = tuple(
        Table(name, 2000, 8, 10.0, Zipf(alpha), load_factor=x)
        for (name, alpha), x in zip((("hot", 1.2), ("flat", 0.1)), factors, strict=True)
    )
    topology = Topology((Device(MIB),), memory=(Memory("host", MIB, 0.01),))
    problem = Problem("p", tables, topology, BATCH)
    model = small_problem_model(problem).for_problem(problem)
    proved_ms = lower_bound.prove_lower_bound(problem, model, ()).proved_ms
    assert proved_ms and 0 < proved_ms <= optimum_ms(problem, model, columns_alone=True)
    # Caches of one memory miss no less together.
    alike = replace(problem, tables=tuple(replace(t, access=Zipf(1.2), load_factor=0.3) for t in tables))
    proved_ms = lower_bound.prove_lower_bound(alike, model, ()).proved_ms
    assert proved_ms == pytest.approx(optimum_ms(alike, model, columns_alone=True), rel=0.01)


def test_what_one_host_shares_does_not_contend_on_others():
    """Each host shares one of the hot tables. Were both on all devices, they would take far longer."""
    given, model, shared = hot_and_light(), crowded(), SHARDING_KINDS["host_row"]
    ways = [
        [*(column(t, d) for d in range(4)), *(host_row(t, h) for h in ((0, 1), (2, 3)) if t.name != "light")]
        for t in given.tables
    ]
    plans = [Plan(placements) for placements in product(*ways)]
    best = min(plans, key=lambda plan: price(lower(plan, given), model).total_ms)
    assert sorted(p.devices for p in best.placements if p.kind == shared.name) == [(0, 1), (2, 3)]
    proved = lower_bound.prove_lower_bound(given, model, shared=(shared,)).proved_ms
    assert 0.5 < proved / price(lower(best, given), model).total_ms <= 1


def test_links_with_a_head_start_are_bounded():
    """Bytes that a link takes at once are subtracted. So the line below the law of exchanges is negative at 0."""
    where = on_hosts("aabb", MIB)
    problem = Problem("late", draw_random_tables(np.random.default_rng(0), 2, dims=(4, 8)), where, BATCH)
    model = contended(0)
    exchange = model.weights["exchange_all_to_all_forward"].copy()
    exchange[[FAR.start, FAR.stop - 1]] = 2e-5, 0.3
    model.weights.update(
        {
            f"exchange_{c}_{way}": exchange
            for c, way in (
                ("all_to_all", "forward"),
                ("all_to_all", "backward"),
                ("reduce_scatter", "forward"),
                ("reduce_scatter", "backward"),
                ("all_reduce", "backward"),
                ("all_to_all_ids", "forward"),
            )
        }
    )
    assert 0 <= lower_bound.prove_lower_bound(problem, model).proved_ms <= optimum_ms(problem, model)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "rows, dim, pooling, speeds, latency_ms",
    [
        pytest.param(3_000_000, 256, 80.0, (0.25, 4.0, 4.0, 1.0), 0.0, marks=pytest.mark.long),
        (3_000_000, 8, 5.0, (0.25, 4.0, 4.0), 0.2),
    ],
)
def test_worths_that_fall_to_nothing_prove_nothing(rows, dim, pooling, speeds, latency_ms):
    """A step of the subgradient once took all worth from the only table, and every time counted as proved."""
    topology = Topology(
        tuple(Device(10**11, s) for s in speeds), links=make_links(latency_ms, within_host=1.0)
    )
    given = Problem(
        "p",
        (Table("t", rows, dim, pooling, Zipf(0.0)),),
        topology,
        240,
        job=Job(dense_forward_ms=1.0, dense_backward_ms=0.0),
    )
    bounded = [
        lower_bound.prove_lower_bound(
            given, model := AnalyticModel(Setting("made-up", 240), lookup_ns=ns).for_problem(given)
        ).proved_ms
        <= price(lower(SHARDERS["anneal"](given, model, budget=Budget(evals=500)), given), model).total_ms
        for ns in (1.0, 20.0)
    ]
    assert all(bounded)
