"""Traced steps of jobs, as a model of the true machine predicts them."""

import numpy as np
from laws import SETTING, pool
from shapes import column, row

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import price
from shardcore.cost.traced_factors import COMPUTE, QUANTITIES, CorrectionFactor, with_dense_ms
from shardcore.io.traced_samples import TracedSample
from shardcore.io.traced_steps import RankStep, TracedExchange, TracedStep
from shardcore.step.kinds import Channel
from shardcore.step.lower import lower

AROUND_MS = 7.0
ALL_TO_ALL, REDUCE_SCATTER = Channel("all_to_all"), Channel("reduce_scatter")


def problem(seed=0):
    tables = tuple(np.random.default_rng(seed).choice(pool(), 8, replace=False))
    return with_dense_ms(Problem("p", tables, Topology((Device(1 << 34),) * 2), SETTING.batch), AROUND_MS)


def by_columns(given, shift=0):
    return Plan(tuple(column(t, (i + shift) % 2) for i, t in enumerate(given.tables)))


def by_rows(given):
    first, *others = given.tables
    return Plan((row(first, given.topology), *(column(t, i % 2) for i, t in enumerate(others))))


def factors_of(compute=1.0, exchange=1.0):
    return {q: CorrectionFactor(compute if q.family == COMPUTE else exchange, 0.0, 1) for q in QUANTITIES}


def traced(workload, truth, noise=(1.0, 1.0)):
    """The step that a model of the true machine predicts, as a trace has it."""
    cost = price(workload, truth)
    sent = [workload.traffic[[c == channel for c in workload.channels]].sum(0) for channel in (ALL_TO_ALL,)]
    ranks = []
    for d, scale in enumerate(noise):
        ms = {
            "lookup_forward": cost.forward_compute_ms[d] * scale,
            "lookup_backward": cost.backward_compute_ms[d] * scale,
            "outputs_transfer": cost.forward_comm_ms[d],
            "gradients_transfer": cost.backward_comm_ms[d],
            "waiting": cost.waiting_ms[d],
            "ids": cost.input_ms[d],
            "dense_backward": cost.dense_ms,
        }
        exchanges = (
            TracedExchange(
                "all_to_all", "outputs", int(sent[0][d]), 0.0, ms["outputs_transfer"], ms["outputs_transfer"]
            ),
            TracedExchange(
                "all_to_all", "gradients", 0, 0.0, ms["gradients_transfer"], ms["gradients_transfer"]
            ),
        )
        ranks.append(RankStep(d, sum(ms.values()), ms, 0.0, exchanges))
    return TracedStep(1, tuple(ranks), len(ranks))


def sample(truth, number=1000, plan_of=by_columns, noise=(1.0, 1.0), job="dlrm"):
    """A traced step of a job. Tracing slows it to 1.2 times."""
    given = problem()
    workload = lower(plan_of(given), given)
    step_ms = price(workload, truth).total_ms
    step = traced(workload, truth, noise).with_untraced_ms(1.2 * step_ms)
    return TracedSample(SETTING, job, number, given, plan_of(given), (step,), step_ms, {"0": "a", "1": "b"})
