"""Traced steps of a job correct a model by a few factors, and say what they do not tell."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING
from traced_jobs import (
    ALL_TO_ALL,
    AROUND_MS,
    REDUCE_SCATTER,
    by_columns,
    by_rows,
    factors_of,
    problem,
    traced,
)

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.cost import composite, traced_factors
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile, write_profile
from shardcore.cost.traced_factors import (
    COMPUTE,
    EXCHANGE,
    QUANTITIES,
    CorrectionFactor,
    PredictedQuantity,
    fit_correction,
    with_dense_ms,
)
from shardcore.io.traced_steps import RankStep, TracedExchange, TracedStep
from shardcore.step.lower import lower


def fitted(model, compute, exchange, **more):
    given = problem()
    workload = lower(by_columns(given), given)
    truth = model.corrected_by(factors_of(compute, exchange))
    step = traced(workload, truth, **more)
    return fit_correction(model, [(workload, step)], price(workload, truth).total_ms), truth


@pytest.mark.parametrize("compute, exchange", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (0.6, 0.4)])
def test_one_traced_step_corrects_the_steps_of_other_plans(model, compute, exchange):
    found, truth = fitted(model, compute, exchange)
    ours = model.corrected_by(found.factors)
    for plan_of in (by_columns, by_rows, lambda p: by_columns(p, 1)):
        given = with_dense_ms(problem(), found.around_ms)
        workload = lower(plan_of(given), given)
        assert price(workload, ours).total_ms == pytest.approx(price(workload, truth).total_ms, rel=0.05)
    wrong = {family for family, factor in ((COMPUTE, compute), (EXCHANGE, exchange)) if factor != 1}
    left = {line.split(":")[0] for line in found.refused if line.endswith("left as they are")}
    assert left == {COMPUTE, EXCHANGE} - wrong


def test_factors_are_shrunk_towards_one_and_have_an_uncertainty(model):
    found, _ = fitted(model, 2.0, 1.0)
    forward = found.factors[PredictedQuantity(None, "forward")]
    assert (
        1.8 < forward.value < 2.0
        and forward.units == 2
        and 0 < forward.sd < traced_factors.FAMILIES[COMPUTE].common
    )
    logs = np.log(
        [
            found.sample_factors(np.random.default_rng(i))[PredictedQuantity(None, "forward")].value
            for i in range(300)
        ]
    )
    assert logs.std() == pytest.approx(forward.sd, rel=0.25)


def later(step, ms):
    """The step, with exchanges of outputs and gradients that take longer."""

    def slow(rank):
        parts = {p: rank.ms[p] + ms * (p in ("outputs_transfer", "gradients_transfer")) for p in rank.ms}
        exchanges = tuple(dataclasses.replace(x, exposed_ms=x.exposed_ms + ms) for x in rank.exchanges)
        return dataclasses.replace(rank, total_ms=sum(parts.values()), ms=parts, exchanges=exchanges)

    return dataclasses.replace(step, ranks=tuple(map(slow, step.ranks)))


@pytest.mark.parametrize("added_ms, latency_ms", [(3.0, 2.0), (60.0, traced_factors.MOST_LATENCY_MS)])
def test_what_no_factor_explains_is_a_latency_up_to_a_tick_of_the_scheduler(model, added_ms, latency_ms):
    given = problem()
    workload = lower(by_columns(given), given)
    found = fit_correction(model, [(workload, later(traced(workload, model), added_ms))])
    ours = model.corrected_by(found.factors)
    for direction in ("forward", "backward"):
        factor = found.factors[PredictedQuantity(ALL_TO_ALL, direction)]
        assert factor.latency_ms == pytest.approx(latency_ms, rel=0.2)
        # Other collectives are waited for, too.
        assert found.factors[PredictedQuantity(REDUCE_SCATTER, direction)].latency_ms == factor.latency_ms
    before, after = (price(workload, m).forward_comm_ms for m in (model, ours))
    assert np.subtract(after, before) == pytest.approx([added_ms] * 2, rel=0.2)


def overlapping(step, shared):
    """The step with 80% of the ms of exchanges forward, and 20% backward. shared: share of moments of both."""

    def mixed(rank):
        both = rank.ms["outputs_transfer"] + rank.ms["gradients_transfer"]
        ms = {**rank.ms, "outputs_transfer": 0.8 * both, "gradients_transfer": 0.2 * both}
        exchanges = tuple(
            dataclasses.replace(x, exposed_ms=ms[part], shared_ms=shared * ms[part])
            for x, part in zip(rank.exchanges, ("outputs_transfer", "gradients_transfer"), strict=True)
        )
        return dataclasses.replace(rank, ms=ms, exchanges=exchanges)

    return dataclasses.replace(step, ranks=tuple(map(mixed, step.ranks)))


@pytest.mark.parametrize(
    "exchange, shared, forward, backward", [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 2.0, 2.0), (2.0, 0.0, 2.7, 1.0)]
)
def test_overlapping_exchanges_are_corrected_by_their_sum(model, exchange, shared, forward, backward):
    """A trace gives one of two exchanges that share all moments too much, and the other too little."""
    given = problem()
    workload = lower(by_columns(given), given)
    step = overlapping(traced(workload, model.corrected_by(factors_of(1.5, exchange))), shared)
    found = fit_correction(model, [(workload, step)])
    factors = [
        found.factors[PredictedQuantity(ALL_TO_ALL, direction)].value for direction in ("forward", "backward")
    ]
    assert factors == pytest.approx([forward, backward], rel=0.2)


def waiting(step, ms):
    """The step, in which one rank waits so long before its exchanges."""
    first, *others = step.ranks
    parts = first.ms | {"waiting": first.ms["waiting"] + ms}
    exchanges = tuple(dataclasses.replace(x, waiting_ms=ms / 2) for x in first.exchanges)
    late = dataclasses.replace(first, total_ms=first.total_ms + ms, ms=parts, exchanges=exchanges)
    return dataclasses.replace(step, ranks=(late, *others))


@pytest.mark.parametrize("exchange", [1.0, 2.0])
def test_waiting_is_not_learned_as_slow_exchanges(model, exchange):
    """A rank waits ten times as long as its exchanges take."""
    given = problem()
    workload = lower(by_columns(given), given)
    step = traced(workload, model.corrected_by(factors_of(1.0, exchange)))
    waits_ms = 10 * sum(x.exposed_ms for x in step.ranks[0].exchanges)
    quiet, late = (fit_correction(model, [(workload, one)]) for one in (step, waiting(step, waits_ms)))
    for direction in ("forward", "backward"):
        factor = late.factors[PredictedQuantity(ALL_TO_ALL, direction)]
        assert factor.value == pytest.approx(exchange, rel=0.1)
        assert factor == quiet.factors[PredictedQuantity(ALL_TO_ALL, direction)]


def of_some_ranks(step, world_size):
    """The step of a job of more ranks, whose traces are missing."""
    ranks = tuple(
        dataclasses.replace(r, exchanges=tuple(dataclasses.replace(x, is_aligned=False) for x in r.exchanges))
        for r in step.ranks
    )
    return dataclasses.replace(step, ranks=ranks, world_size=world_size)


def test_steps_without_some_ranks_correct_lookups_and_no_exchange(model):
    given = problem()
    workload = lower(by_columns(given), given)
    step = of_some_ranks(traced(workload, model.corrected_by(factors_of(2.0, 4.0))), 5)
    found = fit_correction(model, [(workload, step)])
    assert found.factors[PredictedQuantity(None, "forward")].value == pytest.approx(2.0, rel=0.1)
    for q in QUANTITIES:
        if q.family == EXCHANGE:
            assert (found.factors[q].value, found.factors[q].units, found.factors[q].latency_ms) == (
                1.0,
                0,
                0.0,
            )
    words = "exchanges: traces of ranks 2, 3, 4 are missing; such steps correct no exchange"
    assert words in found.refused and words in found.to_json()["refused"]
    assert any(line.endswith("all-to-all backward: not corrected") for line in found.refused)


def test_moments_shared_with_transfers_that_no_plan_has_tell_no_sum(model):
    """A trace says little about an exchange that always overlaps another library's."""
    given = problem()
    workload = lower(by_columns(given), given)
    step = overlapping(traced(workload, model.corrected_by(factors_of(1.0, 3.0))), 1.0)
    other = TracedExchange("all_gather", "other", 0, 0.0, 99.0, 99.0, 99.0)
    ranks = tuple(dataclasses.replace(r, exchanges=(*r.exchanges, other)) for r in step.ranks)
    beside, alone = (
        fit_correction(model, [(workload, one)]) for one in (dataclasses.replace(step, ranks=ranks), step)
    )
    q = PredictedQuantity(ALL_TO_ALL, "forward")
    assert beside.factors[q].sd > 2 * alone.factors[q].sd


def test_a_collective_that_did_not_run_is_corrected_as_its_family_with_more_doubt(model):
    found, _ = fitted(model, 1.0, 3.0)
    ran, other = (found.factors[PredictedQuantity(c, "forward")] for c in (ALL_TO_ALL, REDUCE_SCATTER))
    assert ran.value == pytest.approx(3.0, rel=0.1) and ran.units == 2
    assert 1.5 < other.value < ran.value and other.units == 0 and other.sd > ran.sd


def test_factors_that_do_not_hold_for_other_ranks_are_left_at_one(model):
    found, _ = fitted(model, 1.0, 1.0, noise=(3.0, 1 / 3))
    assert found.factors[PredictedQuantity(None, "forward")].value == 1.0
    assert any(line.startswith("lookups: a correction by some ranks") for line in found.refused)


def test_all_else_of_a_step_is_around_the_embeddings(model):
    found, _ = fitted(model, 1.0, 1.0)
    assert found.around_ms == pytest.approx(AROUND_MS, rel=0.1)


def test_traced_ms_take_the_place_of_a_dense_part_s_operations():
    given = dataclasses.replace(problem(), job=Job(dense_mflops=32.06))
    assert with_dense_ms(given, 3.0).job == Job(dense_forward_ms=1.0, dense_backward_ms=2.0)


def test_traces_without_lookups_are_refused(model):
    given = problem()
    workload = lower(by_columns(given), given)
    ranks = tuple(RankStep(d, 5.0, {"dense_forward": 5.0}, 0.0, ()) for d in range(2))
    with pytest.raises(ShardCoreError, match="nothing of lookups"):
        fit_correction(model, [(workload, TracedStep(1, ranks, 2))])


def test_a_model_without_weights_is_refused():
    with pytest.raises(ShardCoreError, match="AnalyticModel; traces correct trained models and"):
        AnalyticModel(SETTING).corrected_by(factors_of())


def test_bytes_of_another_plan_are_named(model):
    given = problem()
    step = traced(lower(by_columns(given), given), model)
    assert traced_factors.describe_mismatches(lower(by_columns(given), given), step) == []
    [line, *_] = traced_factors.describe_mismatches(lower(by_rows(given), given), step)
    assert "the trace is of another plan or job" in line


def test_bytes_of_a_smaller_payload_are_those_of_the_plan(model):
    given = problem()
    half = dataclasses.replace(given, job=dataclasses.replace(given.job, forward_payload="fp16"))
    step = traced(lower(by_columns(given), given), model)
    ranks = tuple(
        dataclasses.replace(
            r, exchanges=tuple(dataclasses.replace(x, n_bytes=x.n_bytes // 2) for x in r.exchanges)
        )
        for r in step.ranks
    )
    step = dataclasses.replace(step, ranks=ranks)
    assert traced_factors.describe_mismatches(lower(by_columns(half), half), step) == []
    assert traced_factors.describe_mismatches(lower(by_columns(given), given), step)


def test_a_corrected_model_is_a_model_with_its_lineage(model, tmp_path):
    lineage = {"job": "step-00001000", "steps": [1], "traces": {"0": "0123456789abcdef"}}
    ours = model.corrected_by(factors_of(1.5, 0.5), lineage)
    composite.save_models(ours, tmp_path)
    loaded = composite.load_models(tmp_path)
    assert loaded.meta["provenance"]["job"] == lineage
    given = problem()
    workload = lower(by_rows(given), given)
    assert price(workload, loaded) == price(workload, ours)
    before, after = price(workload, model), price(workload, loaded)
    assert np.divide(after.compute_ms, before.compute_ms) == pytest.approx([1.5, 1.5])
    assert np.divide(after.forward_comm_ms, before.forward_comm_ms) == pytest.approx([0.5, 0.5], rel=0.05)


def test_several_precisions_are_corrected_together(model, tmp_path):
    other = dataclasses.replace(model, setting=dataclasses.replace(model.setting, precision="fp16"))
    both = composite.Composite((other, model)).corrected_by(factors_of(2.0))
    assert [one.launch_ms() for one in both.models] == pytest.approx([2 * model.launch_ms()] * 2)
    composite.save_models(both, tmp_path)
    assert composite.load_models(tmp_path).setting == both.setting


def test_families_share_no_terms():
    assert {q.family for q in QUANTITIES} == {COMPUTE, EXCHANGE}


def test_a_profile_is_corrected_in_its_rates(tmp_path):
    profile = load_profile("nvidia-h100-sxm")
    given = problem()
    ours = profile.cost_model().for_problem(given)
    truth = ours.corrected_by(
        {q: CorrectionFactor(1.6 if q.family == COMPUTE else 2.0, 0.0, 1) for q in QUANTITIES}
    )
    workload = lower(by_columns(given), given)
    found = fit_correction(ours, [(workload, traced(workload, truth))], price(workload, truth).total_ms)
    fixed = ours.corrected_by(found.factors, {"job": "step-00001000"})
    for plan_of in (by_columns, by_rows):
        other = lower(plan_of(given), with_dense_ms(given, found.around_ms))
        assert price(other, fixed).total_ms == pytest.approx(price(other, truth).total_ms, rel=0.05)
    write_profile(tmp_path / "profile.json", fixed.profile)
    kept = load_profile(tmp_path / "profile.json")
    assert kept == fixed.profile
    rate, before = kept.rates["read_gbps"], profile.rates["read_gbps"]
    assert rate.value == pytest.approx(before.value / 1.6, rel=0.15)
    assert rate.uncertainty <= before.uncertainty and rate.source.endswith(
        "corrected by traces of step-00001000"
    )


@pytest.mark.parametrize("slowness, speed", [(2.0, 0.5), (1.2, 1.0)])
def test_a_slow_rank_has_a_slow_device(model, slowness, speed):
    given = problem()
    workload = lower(by_columns(given), given)
    steps = [(workload, traced(workload, model, (1.0, slowness))) for _ in range(3)]
    found, words = traced_factors.with_traced_speeds(given, model, steps)
    assert [d.speed for d in found.topology.devices] == pytest.approx([1.0, speed])
    assert [w.split(" of ")[0] for w in words] == ["device 1 looks up at 50%"] * (speed < 1)


def test_lookups_without_ids_correct_nothing(model):
    """A batch without ids still takes a launch of each op, which tells nothing of a batch with some."""
    given = problem()
    idle = dataclasses.replace(given, tables=tuple(dataclasses.replace(t, pooling=0.0) for t in given.tables))
    workload = lower(by_columns(idle), idle)
    with pytest.raises(traced_factors.TracesTellNothing, match="tell nothing of lookups; .* and with ids"):
        fit_correction(model, [(workload, traced(workload, model))], 20.0)
    # One device with ids is enough, and the other one is left out.
    half = dataclasses.replace(
        given,
        tables=tuple(dataclasses.replace(t, pooling=t.pooling * (i % 2)) for i, t in enumerate(given.tables)),
    )
    workload = lower(by_columns(half), half)
    seen = traced_factors.observe_steps(model, [(workload, traced(workload, model))])
    lookups = [i for i, q in enumerate(QUANTITIES) if q.family == COMPUTE]
    assert seen.is_measured[:, lookups].any(1).tolist() == [False, True]
