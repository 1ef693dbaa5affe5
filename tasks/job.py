"""A running job's traces: the champion corrected by each traced step, in one MLflow run for the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlflow
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.cost import composite
from shardcore.cost.profile import write_profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.io import files, job_folder
from shardcore.plans import traced_job
from shardcore.plans.publisher import PublishConfig, Publisher
from shardcore.plans.traced_job import CheckedJob, ReadJob
from shardcore.report import job_report, plan_page, published_report
from tasks import paths, registry
from tasks.pricing import pricing
from tasks.setting import SettingConfig

JOB_TAG = "shardcore.job"
MEASURED = "measured_ms"
"""Metric of each step that was read."""


@task(task_run_name="read-traces")
@registry.plain_errors()
def read_traces(
    folder: Path, out: Path | None, plans: str | None, wanted: SettingConfig, config: PublishConfig
) -> str:
    """Correct the champion, or else a profile, by the traced steps of a job that no run has read.

    Returns a line for each. The model and problem of the newest step lie in `out`. With `plans`, a plan for the job
    is searched under that model, and published if it is worth it.

    Raises ShardCoreError for a folder without traced steps, and where none can be read.
    """
    logger, client = get_run_logger(), registry.connect()
    steps = job_folder.traced_steps(folder)
    if not steps:
        raise ShardCoreError(f"{folder} has no traced step of all ranks; ShardCoreProfiler writes them there")
    name = folder.resolve().name
    by = pricing(client, wanted.of_dataset_or_local(paths.MEASUREMENTS).hardware)
    provenance = {"model": by.name, "model_version": by.version}
    found: dict[int, tuple[ReadJob, CheckedJob]] = {}
    errors = []
    with registry.run(run_id=_run_of(client, folder), run_name=f"job-{name}") as run:
        mlflow.set_tags({"stage": "job", JOB_TAG: str(folder.resolve()), **provenance})
        known = {m.step for m in client.get_metric_history(run.info.run_id, MEASURED)}
        for step in steps:
            if (number := job_folder.step_number(step)) in known:
                continue
            try:
                job = traced_job.read(step)
                found[number] = job, traced_job.check(job, by.model)
            except ShardCoreError as error:  # a damaged step must not hide the others
                errors.append(f"{step.name}: {error}")
                logger.warning("%s", errors[-1])
        if not found:
            if errors:
                raise ShardCoreError(errors[0])
            return f"{folder}: no new traced step"
        _, newest = found[max(found)]
        _keep(out or paths.JOBS / name, newest, name)
        plan = [_publish(newest, name, plans, config, provenance)] if plans else []
        # A step counts as read once it is logged. Until then a rerun keeps and publishes it again.
        lines = [_log(number, *both) for number, both in found.items()] + plan
    for line in lines:
        logger.info("%s", line)
    return "\n".join(lines)


def _run_of(client: mlflow.MlflowClient, folder: Path) -> str | None:
    """The run of a job's folder. None: it has none yet."""
    experiment = client.get_experiment_by_name(registry.EXPERIMENT)
    if experiment is None:
        return None
    wanted = str(folder.resolve()).replace("'", "\\'")
    runs = client.search_runs([experiment.experiment_id], f"tags.`{JOB_TAG}` = '{wanted}'", max_results=1)
    return runs[0].info.run_id if runs else None


def _log(number: int, job: ReadJob, checked: CheckedJob) -> str:
    """Log a step in the active run. Returns a line for people."""
    metrics = {
        MEASURED: job.total_ms,
        "predicted_ms": checked.before.cost.total_ms,
        "around_ms": checked.correction.around_ms,
        "named_share": min(rank.named_share for step in job.traced.steps for rank in step.ranks),
    }
    metrics |= {
        f"factor_{q.words.replace(' ', '_').replace(',', '')}": f.value
        for q, f in checked.correction.factors.items()
        if f.units
    }
    mlflow.log_metrics(metrics, step=number)
    mlflow.log_text(job_report.traced_text(job.traced), f"{job.name}/parts.txt")
    mlflow.log_dict(dict(checked.correction.document()), f"{job.name}/correction.json")
    headline = job_report.headline(job.total_ms, checked.before.cost.total_ms, checked.interval_ms)
    return f"{job.name}: {headline}. {job_report.bottleneck(job.traced.steps[-1])}"


def _keep(out: Path, checked: CheckedJob, name: str) -> None:
    """Write the corrected model, and the job's problem."""
    if isinstance(checked.model, ProfileModel):
        write_profile(out / "profile.json", checked.model.profile)
    else:
        composite.save(checked.model, out / "model")
    files.write_problem(out / "problem.json", replace(checked.problem, name=name))


def _publish(
    checked: CheckedJob, name: str, plans: str, config: PublishConfig, provenance: dict[str, str]
) -> str:
    """Publish a plan for the job, if it is worth it. Returns a line."""
    problem = replace(checked.problem, name=name)
    publisher = Publisher(checked.model, plans, config, {**provenance, "job": name}, plan_page.page)
    published = publisher.publish(problem)
    return f"plan: {' | '.join(map(str, published_report.row(published)))}"
