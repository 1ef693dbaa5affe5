"""A running job, read: its traced step against the model, the model corrected by it, and a better plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem, Setting
from shardcore.cost import traced_factors
from shardcore.cost.model import CostModel, PricedPlan, predicted_total_ms, price_plan
from shardcore.cost.traced_factors import TracedCorrection
from shardcore.io import job_folder
from shardcore.io.traced_samples import TracedSample
from shardcore.io.traced_steps import TracedJob
from shardcore.measure.traces.job import read_traced_job
from shardcore.plans.diff import PlanDiff, diff_plans
from shardcore.plans.gain import PlanGain, plan_gain
from shardcore.plans.move_price import price_move
from shardcore.plans.replan import ReplanConfig, replan
from shardcore.step.lower import lower

DRAWS = 60
INTERVAL = (0.05, 0.95)
"""Quantiles of the interval around a predicted step."""


@dataclass(frozen=True)
class ReadJob:
    """A job's traced steps, with its plan if that is known.

    job: name of the job's folder.
    name: name of the traced step's folder.
    problem, plan: None for traces of a job without ShardCoreProfiler.
    step_ms: ms of steps without tracing. None: not timed.
    features: of each table of the problem, by its name.
    lookups: of each rank, ids and lengths of each feature of a batch. Some or all ranks may have none.
    """

    job: str
    name: str
    traced: TracedJob
    problem: Problem | None
    plan: Plan | None
    step_ms: float | None
    remarks: tuple[str, ...]
    features: Mapping[str, Sequence[str]]
    lookups: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]

    @property
    def total_ms(self) -> float:
        """ms of a step of the job: timed without tracing where available, else the median of the traced steps."""
        return self.step_ms or float(np.median([step.total_ms for step in self.traced.steps]))


@dataclass(frozen=True)
class CheckedJob:
    """A job's plan against its traces, before and after the correction.

    before: under the model as it was, with the dense part of the trace.
    after: under the corrected model.
    problem: with all that the job does around its embeddings as the dense part.
    interval_ms: interval of the corrected step.
    """

    before: PricedPlan
    after: PricedPlan
    problem: Problem
    model: Any
    correction: TracedCorrection
    interval_ms: tuple[float, float]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """A better plan that is proposed for a traced job.

    interval_ms: interval of its step.
    moved: from the plan in use.
    seconds: to move weights and optimizer state, at the model's rates of links.
    """

    now: PricedPlan
    interval_ms: tuple[float, float]
    gain: PlanGain
    moved: PlanDiff
    seconds: float


def read_job_traces(folder: str | Path, problem: Problem | None = None, plan: Plan | None = None) -> ReadJob:
    """Newest traced step of a job's folder, or the traces in any folder.

    problem, plan: problem and plan of traces in a folder that names none.

    Raises ShardCoreError where no trace can be read.
    """
    # A folder of a job has a folder for each traced step. The newest counts.
    folder = job_folder.newest_step_folder(Path(folder))
    of_job, remarks = None, ()
    if (folder / job_folder.JOB_JSON).exists():
        of_job = job_folder.read_step(folder)
        # What the caller gives takes precedence over what the job wrote.
        problem, plan, remarks = problem or of_job.problem, plan or of_job.plan, of_job.remarks
    elif not plan:
        # Traces can be read without a plan, but not compared with one.
        remarks = ("the folder has no plan: give --problem and --plan, or use ShardCoreProfiler",)
    traced = read_traced_job(folder, len(problem.topology) if problem else None)
    where = folder.resolve()
    job = where.parent.name if job_folder.is_step_folder_name(where.name) else where.name
    return ReadJob(
        job,
        where.name,
        traced,
        problem,
        plan,
        of_job and of_job.total_ms,
        remarks,
        of_job.facts.features if of_job else {},
        [job_folder.read_lookups(path) for path in sorted(folder.glob("rank-*.lookups.npz"))]
        if of_job
        else [],
    )


def traced_sample(job: ReadJob, hardware: str) -> TracedSample:
    """Job's traced steps as a sample of a dataset.

    Raises ShardCoreError for a job whose plan is not known.
    """
    problem, plan = _require_problem_and_plan(job)
    number = (
        job_folder.step_number(Path(job.name))
        if job_folder.is_step_folder_name(job.name)
        else job.traced.steps[0].number
    )
    return TracedSample(
        Setting(hardware, problem.global_batch, problem.precision, problem.optimizer),
        job.job,
        number,
        problem,
        plan,
        job.traced.steps,
        job.total_ms,
        {str(rank): digest for rank, digest in job.traced.digests.items()},
    )


def _require_problem_and_plan(job: ReadJob) -> tuple[Problem, Plan]:
    if job.problem is None or job.plan is None:
        raise ShardCoreError(f"traces in {job.name} come without a problem and a plan; give both")
    return job.problem, job.plan


def check_traced_job(job: ReadJob, model: CostModel) -> CheckedJob:
    """Job's plan priced under a cost model, and under the model corrected by the job's traces.

    Raises ShardCoreError for a job whose plan is not known, a model of another setting, and traces that tell
    nothing or are of another plan.
    """
    given, plan = _require_problem_and_plan(job)
    given.require_setting(model.for_problem(given).setting)
    traced = [step.with_untraced_ms(job.step_ms) for step in job.traced.steps]
    # What a rank does around its embeddings, in every traced step.
    problem = traced_factors.with_traced_dense(given, traced)
    ours = model.for_problem(problem)
    # fits=False: the job runs, whatever our count of memory says.
    before = price_plan(plan, problem, ours, fits=False)
    workload = before.workload
    for step in traced:
        if wrong := traced_factors.describe_mismatches(workload, step):
            raise ShardCoreError(f"{wrong[0]}: nothing is corrected by it")
    with_slow, slow = traced_factors.with_traced_speeds(given, ours, [(workload, step) for step in traced])
    if slow:  # factors are those of all ranks, and a slow one is no part of them
        workload = lower(plan, replace(problem, topology=with_slow.topology), fits=False)
    correction = traced_factors.fit_correction(ours, [(workload, step) for step in traced], job.step_ms)
    # Which traces it was corrected by, as cost/traced_training.py has it: they correct it once.
    of = traced_sample(job, model.setting.hardware)
    lineage = {
        "job": job.name,
        "steps": [of.name],
        "traces": {of.name: dict(of.traces)},
        "around_ms": correction.around_ms,
        **correction.to_json(),
    }
    corrected = model.corrected_by(correction.factors, lineage)
    # The correction may find another dense part than the trace shows.
    problem = traced_factors.with_dense_ms(with_slow, correction.around_ms)
    after = price_plan(plan, problem, corrected.for_problem(problem), fits=False)
    return CheckedJob(
        before,
        after,
        problem,
        corrected,
        correction,
        step_interval_ms(plan, problem, model, correction),
        (*slow, *correction.refused),
    )


def step_interval_ms(
    plan: Plan, problem: Problem, model: Any, correction: TracedCorrection
) -> tuple[float, float]:
    """Interval of a step's predicted ms, with correction factors drawn from their posterior."""
    # A fixed seed, so that the same traces give the same interval.
    rng, workload = np.random.default_rng(0), lower(plan, problem, fits=False)
    models = (model.corrected_by(correction.sample_factors(rng)) for _ in range(DRAWS))
    totals = [predicted_total_ms(workload, drawn.for_problem(problem)) for drawn in models]
    low, high = np.quantile(totals, INTERVAL).tolist()
    return low, high


def propose_plan(checked: CheckedJob, model: CostModel, config: ReplanConfig) -> Proposal | None:
    """Plan that is cheaper for a job under the corrected cost model; None if none is found.

    model: the one before its correction.
    """
    ours = checked.model.for_problem(checked.problem)
    # Under the corrected model, which is the one that the job's steps agree with.
    plan = replan(checked.after.plan, checked.problem, ours, config)
    now = price_plan(plan, checked.problem, ours)
    moved = diff_plans(checked.after.plan, plan, checked.problem)
    # No move, or no gain under the model: nothing to propose.
    if not moved or now.cost.total_ms >= checked.after.cost.total_ms:
        return None
    return Proposal(
        now,
        step_interval_ms(plan, checked.problem, model, checked.correction),
        plan_gain(checked.after, now, checked.problem, ours),
        moved,
        price_move(checked.after.plan, plan, checked.problem, ours).pause_s,
    )
