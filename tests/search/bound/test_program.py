"""The linear program's bound against all plans of tiny problems that had no proof before, and its parts."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize
from shapes import on_hosts
from test_contention import run_of
from test_lower_bound import contended, crowded

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.search.bound.contention import SlowdownCurve, op_slowdown_curve
from shardcore.search.bound.lower_bound import dual_feasible_functions, prove_lower_bound
from shardcore.search.bound.options import RunShards, bundles_and_runs
from shardcore.step.lower import Workload, lower
from shardcore.testing.plans import all_plans
from shardcore.testing.problems import BATCH, MIB, draw_random_tables, small_problem_model

SHAPES = ("sequences", "collections", "collections with sequences")


def drawn(shape: str, seed: int, memory_bytes: int = 1 << 40, n_tables: int = 2, **fields) -> Problem:
    """Two tables on four devices of two hosts, or more of them on two devices, every third time of other speeds."""
    rng = np.random.default_rng([seed, 31])
    tables = draw_random_tables(rng, n_tables, dims=(4, 8))
    tables = tuple(
        replace(
            t,
            rows=t.rows * 10 + 8,
            pooling=max(1.0, t.pooling),
            sequence=shape == "sequences" or (shape.endswith("with sequences") and i % 2 == 0),
            collection="" if shape in ("sequences", "pooled") else "ab"[i % 2],
        )
        for i, t in enumerate(tables)
    )
    links = make_links(0.001, within_host=2.0, between_hosts=0.5) if seed % 2 else ()
    where = on_hosts("aabb" if n_tables == 2 else "aa", memory_bytes, links=links if n_tables == 2 else ())
    speeds = rng.choice([0.5, 1.0, 2.0], len(where)) if seed % 3 == 2 else np.ones(len(where))
    devices = tuple(replace(d, speed=float(s)) for d, s in zip(where.devices, speeds, strict=True))
    return Problem("drawn", tables, replace(where, devices=devices), BATCH, **fields)


def models_of(problem: Problem, seed: int) -> list:
    return [
        small_problem_model(problem),
        contended(seed),
        load_profile("nvidia-h100-sxm").cost_model().for_problem(problem),
    ]


def workloads_of(problem: Problem) -> list[Workload]:
    """Those of every plan that fits and that TorchRec runs."""
    workloads = []
    for plan in all_plans(problem):
        with suppress(ShardCoreError):
            workloads.append(lower(plan, problem))
    return workloads


def optima_ms(problem: Problem, models: list) -> np.ndarray:
    """The least ms of any plan, by each model."""
    workloads = workloads_of(problem)
    return np.array([min(price(w, model).total_ms for w in workloads) for model in models])


@pytest.mark.parametrize(
    "shape, n_tables, seeds",
    [
        ("collections with sequences", 2, (1,)),
        *(pytest.param(shape, n, (1, 2), marks=pytest.mark.long) for shape in SHAPES for n in (2, 3)),
    ],
)
def test_no_plan_of_sequences_or_of_several_collections_is_cheaper(shape, n_tables, seeds):
    ratios = []
    for seed in seeds:
        jobs = {"job": Job(dense_forward_ms=0.01, dense_backward_ms=0.01)} if seed % 2 else {}
        problem = drawn(shape, seed, n_tables=n_tables, **jobs)
        models = models_of(problem, seed)
        ratios.append([prove_lower_bound(problem, m).proved_ms for m in models] / optima_ms(problem, models))
    assert np.max(ratios) <= 1 and np.mean(ratios) > 0.7, ratios


@pytest.mark.parametrize(
    "shape, seeds",
    [
        ("pooled", (0,)),
        *(pytest.param(x, (0, 1, 2), marks=pytest.mark.long) for x in ("pooled", *SHAPES)),
    ],
)
def test_too_little_memory_for_the_best_plan_raises_the_bound(shape, seeds):
    raised = []
    for seed in seeds:
        ample = drawn(shape, seed, n_tables=3)
        models = models_of(ample, seed)
        # Just enough for the plan whose fullest device has least.
        most = min(max(w.memory_bytes) for w in workloads_of(ample))
        devices = tuple(replace(d, memory_bytes=most) for d in ample.topology.devices)
        tight = replace(ample, topology=replace(ample.topology, devices=devices))
        before, after = ([prove_lower_bound(p, m).proved_ms for m in models] for p in (ample, tight))
        assert (np.array(after) <= optima_ms(tight, models)).all()
        assert (np.array(after) >= np.array(before) * (1 - 2e-3)).all()
        raised.append(np.array(after) > np.array(before) * 1.01)
    assert np.any(raised)


def test_more_tables_than_devices_that_hold_one_each_have_no_cheap_plan():
    """Three whole tables on two devices that hold one each: nothing fits, so the bound may be anything."""
    problem = drawn("pooled", 0, n_tables=3)
    large = tuple(replace(t, rows=50_000, dim=8) for t in problem.tables)
    names = tuple(t.name for t in large)
    kinds = Constraints(unsplit=names, kinds=tuple((name, ("column",)) for name in names))
    found = []
    for memory in (1.5, 4.0):
        devices = tuple(Device(int(memory * large[0].bytes)) for _ in range(2))
        asked = replace(problem, tables=large, topology=Topology(devices), constraints=kinds)
        found.append(prove_lower_bound(asked, small_problem_model(asked)).proved_ms)
    assert found[0] > 1.4 * found[1]


def test_kinds_that_constraints_leave_out_do_not_count():
    problem = drawn("sequences", 0)
    model = small_problem_model(problem)
    name = max(problem.tables, key=lambda t: t.pooling).name
    given = replace(problem, constraints=Constraints(kinds=((name, ("data_parallel",)),)))
    assert prove_lower_bound(given, model).proved_ms >= prove_lower_bound(problem, model).proved_ms * (
        1 - 2e-3
    )
    assert prove_lower_bound(given, model).proved_ms <= optima_ms(given, [model])[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_prices_of_a_solver_that_is_wrong_prove_less_but_nothing_false(seed, monkeypatch):
    problem = drawn("collections", seed, n_tables=3)
    model, solve, rng = small_problem_model(problem), optimize.linprog, np.random.default_rng(seed)
    right, best_ms = prove_lower_bound(problem, model).proved_ms, optima_ms(problem, [model])[0]

    def wrong(*args, **options):
        result = solve(*args, **options)
        noise = rng.normal(0, 0.05, len(result.ineqlin.marginals))
        marginals = result.ineqlin.marginals * (1 + noise) + 0.02 * noise
        return SimpleNamespace(status=result.status, ineqlin=SimpleNamespace(marginals=marginals))

    monkeypatch.setattr(optimize, "linprog", wrong)
    assert prove_lower_bound(problem, model).proved_ms < right <= best_ms
    # Nothing is proved where the solver gives up.
    monkeypatch.setattr(optimize, "linprog", lambda *args, **options: SimpleNamespace(status=4))
    assert prove_lower_bound(problem, model).proved_ms == 0


def test_sums_of_dual_feasible_functions_are_at_most_1():
    rng, most = np.random.default_rng(0), 0.0
    for n in range(1, 12):
        for _ in range(300):
            size = rng.dirichlet(rng.uniform(0.1, 3, n)) * rng.choice([1.0, rng.random()])
            # Sizes that are shares of a device, too.
            size = np.full(n, 1 / n) if rng.random() < 0.1 else size
            sums = [f.sum() for f in dual_feasible_functions(size)]
            assert max(sums) <= 1 + 1e-9
            most = max(most, sums[1])
    assert most == 1


def curve_of(run: RunShards, model) -> SlowdownCurve:
    """The curve of ops of two devices."""
    return op_slowdown_curve(run.codes, run.bundle, run.codes[run.part == 1].sum(0) / 2, model)


@pytest.mark.parametrize(
    "model", [contended(1), crowded(0.3), crowded()], ids=["contended", "crowded", "steep"]
)
def test_lines_are_below_all_ops(model):
    rng, run = np.random.default_rng(0), run_of(model)
    curve, whole = curve_of(run, model), run.codes[run.part == 1]
    most_ms = float(model.op_ms(whole.sum(0)[None])[0])
    lines = curve.lines_below_op_ms(most_ms, model.launch_ms())
    near = []
    for _ in range(300):
        tables = rng.permutation(8)[: rng.integers(1, 9)]
        op = [int(rng.choice(np.flatnonzero(run.bundle == t))) for t in tables]
        ms = float(model.op_ms(run.codes[op].sum(0)[None])[0])
        if ms - model.launch_ms() <= most_ms:
            below = max(slope * curve.load[op].sum() + once for slope, once in lines)
            assert below <= ms * (1 + 1e-9)
            near.append(below / ms)
    assert max(near) > 0.8
    assert curve.lines_below_op_ms(0.0, model.launch_ms()) == []


@pytest.mark.parametrize(
    "made",
    [pytest.param(lambda seed: contended(seed), marks=pytest.mark.long), lambda seed: crowded(0.3)],
    ids=["contended", "crowded"],
)
def test_no_op_takes_less_than_its_load_does(made):
    """Drawn ops have one shard of some tables each. Among them are the least contending of a load."""
    for seed in range(3):
        rng, model = np.random.default_rng(seed), made(seed)
        given = Problem(
            "ops", draw_random_tables(rng, 8, dims=(4, 8, 12)), Topology((Device(MIB),) * 2), BATCH
        )
        _, [run] = bundles_and_runs(given, model, ())
        curve = curve_of(run, model)
        for _ in range(300):
            tables = rng.permutation(8)[: rng.integers(1, 9)]
            op = [int(rng.choice(np.flatnonzero(run.bundle == t))) for t in tables]
            ms = float(model.op_ms(run.codes[op].sum(0)[None])[0]) - model.launch_ms()
            load = curve.load[op].sum()
            slowdown = curve.slowdown[np.searchsorted(curve.ends, load, side="right") - 1]
            assert slowdown * load <= ms * (1 + 1e-9)
            assert curve.alone_ms[op].sum() <= ms * (1 + 1e-9)


def test_a_table_that_must_stay_on_slow_devices_takes_longer():
    where = Topology(tuple(Device(64 * MIB, speed) for speed in (1.0, 0.1)))
    free = Problem("pins", draw_random_tables(np.random.default_rng(4), 3, dims=(8,)), where, BATCH)
    model = small_problem_model(free)
    pins = tuple((t.name, (1,)) for t in free.tables)
    pinned = replace(free, constraints=Constraints(pinned=pins))
    ms = [prove_lower_bound(p, model, shared=()).proved_ms for p in (free, pinned)]
    assert ms[1] > 3 * ms[0]
