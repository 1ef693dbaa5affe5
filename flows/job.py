"""job: correct the champion by a running job's new traces; the gate and publishing follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlflow
from mlflow.entities import Metric
from prefect import flow, get_run_logger, task

from flows import program
from shardcore.core.errors import ShardCoreError
from shardcore.cost import composite, traced_factors, traced_training
from shardcore.cost.known_errors import profile_of_model
from shardcore.cost.model import predicted_total_ms
from shardcore.cost.profile import write_profile
from shardcore.cost.traced_training import CorrectedModel
from shardcore.io import files, job_folder, traced_samples, writing
from shardcore.io.model_files import model_folders
from shardcore.io.traced_samples import TracedSample
from shardcore.plans import traced_job
from shardcore.plans.traced_job import CheckedJob, ReadJob
from shardcore.report import history_pages, job_report
from shardcore.report.history_pages import JobRecord
from shardcore.step.lower import lower
from tasks import params, paths, registry
from tasks.artifacts import create_markdown_artifact
from tasks.pricing import Pricing, choose_pricing
from tasks.promote import PromoteConfig, promote_model
from tasks.publish import PublishConfig, publish_plans
from tasks.setting import SettingConfig

JOB_TAG = "shardcore.job"
MEASURED = "measured_ms"
"""Metric of each step that was read. It is logged last."""
LEAST_GAIN = 1.0
"""Least gain of a correction, in points of error on held-out traces. Publishing all plans anew has to be worth it."""
MOST_STEPS = 8
"""Newest traced steps that correct a model. Older ones do not, as a job changes over weeks."""
_FACTOR = "factor_"
"""Prefix of the metrics of factors."""
MODEL, PROFILE_JSON, PROBLEM_JSON, PAGE = "model", "profile.json", "problem.json", "job.html"


@dataclass(frozen=True)
class JobSteps:
    """Steps of a job that were read.

    measured_ms: measured time by number of the step.
    lines: a line for each step, and one about the correction.
    challenger: folder of a corrected model for the gate. None: the champion stays.
    """

    measured_ms: Mapping[int, float]
    lines: tuple[str, ...]
    challenger: Path | None = None


@task(task_run_name="read-traces")
@registry.one_line_errors()
def read_traces(
    folder: Path, out: Path, setting_config: SettingConfig, traced: Path = paths.TRACED
) -> JobSteps:
    """Read a job's new traced steps, and correct the champion cost model by all its traced steps.

    The steps are added to a dataset of traced steps. The corrected model is written to `out`, or without a champion the
    corrected profile. A profile that the correction does not improve is written as it is.

    Raises ShardCoreError for a folder without traced steps, and if none of them can be read.
    """
    logger, client = get_run_logger(), registry.connect_to_mlflow()
    steps = job_folder.complete_step_folders(folder)
    if not steps:
        raise ShardCoreError(f"{folder} has no traced step of all ranks; ShardCoreProfiler writes them there")
    name = folder.resolve().name
    by = choose_pricing(client, setting_config.dataset_or_local_setting(paths.MEASUREMENTS).hardware)
    new: dict[int, tuple[ReadJob, CheckedJob]] = {}
    errors = []
    with registry.tagged_run(
        run_id=registry.find_run_id(JOB_TAG, str(folder.resolve())), run_name=f"job-{name}"
    ) as run:
        mlflow.set_tags({"stage": "job", JOB_TAG: str(folder.resolve()), "model": by.name})
        known = {m.step for m in client.get_metric_history(run.info.run_id, MEASURED)}
        for step in steps:
            if (number := job_folder.step_number(step)) in known:
                continue
            try:
                job = traced_job.read_job_traces(step)
                new[number] = job, traced_job.check_traced_job(job, by.model)
            except ShardCoreError as error:  # a damaged step must not hide the others
                errors.append(f"{step.name}: {error}")
                logger.warning("%s", errors[-1])
        if not new:
            if errors:
                raise ShardCoreError(errors[0])
            return JobSteps({}, (f"{folder}: no new traced step",))
        for job, _ in new.values():
            traced_samples.add_traced_sample(traced, traced_job.traced_sample(job, by.model.setting.hardware))
        lines = [
            _log_step(
                client,
                job_folder.step_folder(folder, number),
                by,
                _predicted_step_ms(out, by, checked),
                job,
                checked,
            )
            for number, (job, checked) in new.items()
        ]
    corrected = traced_training.correct_model(by.model, _newest_samples(by.model, name, traced))
    lines.append(corrected.words)
    for line in lines:
        logger.info("%s", line)
    measured_ms = {number: job.total_ms for number, (job, _) in new.items()}
    return JobSteps(measured_ms, tuple(lines), _write_corrected_model(out, by, corrected))


def _newest_samples(model: object, name: str, traced: Path) -> list[TracedSample]:
    """A job's newest traced samples for the model's setting, oldest first."""
    samples = [s for s in traced_samples.read_traced_samples([traced]) if s.job == name]
    return [s for s in samples if traced_training.is_model_for(model, s)][-MOST_STEPS:]


def _write_corrected_model(out: Path, pricing: Pricing, corrected: CorrectedModel) -> Path | None:
    """Write a cost model corrected by traces. Returns its folder if the promotion gate should judge the model."""
    if profile := profile_of_model(corrected.model):
        write_profile(out / PROFILE_JSON, profile)
    elif corrected.error_reduction >= LEAST_GAIN:
        composite.save_models(corrected.model, out / MODEL)
        return out / MODEL
    return None


def _log_step(
    client: mlflow.MlflowClient,
    step: Path,
    pricing: Pricing,
    predicted_ms: float,
    job: ReadJob,
    checked: CheckedJob,
) -> str:
    """Log a traced step in the active MLflow run. Returns a line of text on the step."""
    metrics = {
        "predicted_ms": predicted_ms,
        "around_ms": checked.correction.around_ms,
        "named_share": min(rank.recognised_share for step in job.traced.steps for rank in step.ranks),
        **{
            f"{_FACTOR}{q.label.replace(' ', '_').replace(',', '')}": f.value
            for q, f in checked.correction.factors.items()
            if f.units
        },
    }
    if pricing.champion:
        metrics["model_version"] = float(pricing.version)
    _log_metrics(client, metrics, job_folder.step_number(step), _traced_at_ms(step))
    mlflow.log_text(job_report.traced_step_text(job.traced), f"{job.name}/parts.txt")
    correction = {"around_ms": checked.correction.around_ms, **checked.correction.to_json()}
    mlflow.log_dict(correction, f"{job.name}/correction.json")
    headline = job_report.step_headline(job.total_ms, predicted_ms, checked.interval_ms)
    return f"{job.name}: {headline}. {job_report.bottleneck_sentence(job.traced.steps[-1])}"


def _predicted_step_ms(out: Path, pricing: Pricing, checked: CheckedJob) -> float:
    """Predicted ms of a traced step, with the dense part taken from earlier steps if known."""
    if not (out / PROBLEM_JSON).exists():
        return checked.before.cost.total_ms
    around_ms = files.read_problem(out / PROBLEM_JSON).job.dense_ms
    problem = traced_factors.with_dense_ms(checked.problem, around_ms)
    return predicted_total_ms(
        lower(checked.after.plan, problem, fits=False), pricing.model.for_problem(problem)
    )


@task(task_run_name="keep-problem")
@registry.one_line_errors()
def write_job_problem(
    folder: Path, out: Path, setting_config: SettingConfig, traced: Path = paths.TRACED
) -> Path:
    """Write a traced job's problem. The dense part is step time beyond the champion's predicted embedding time.

    Call it after the gate, which may have changed the champion. Returns the file.
    """
    client, name = registry.connect_to_mlflow(), folder.resolve().name
    by = choose_pricing(
        client,
        setting_config.dataset_or_local_setting(paths.MEASUREMENTS).hardware,
        corrected_profile_path(out),
    )
    samples = _newest_samples(by.model, name, traced)
    if not samples:  # the champion has changed meanwhile
        raise ShardCoreError(f"{by.origin_text} is not for the setting of {name}'s traced steps in {traced}")
    problem = traced_training.job_problem(by.model, samples[-1])
    files.write_problem(out / PROBLEM_JSON, replace(problem, name=name))
    return out / PROBLEM_JSON


def corrected_profile_path(out: Path) -> Path | None:
    """File of a job's corrected hardware profile. None if no profile was corrected."""
    return out / PROFILE_JSON if (out / PROFILE_JSON).exists() else None


@task(task_run_name="log-steps")
@registry.one_line_errors()
def log_steps(folder: Path, out: Path, steps: JobSteps, notes: Sequence[str]) -> Path:
    """Record in MLflow what was read from a job's traces, and write the job's HTML page. Returns the page's file.

    Call it last: until then a rerun reads the steps again.
    """
    client, name = registry.connect_to_mlflow(), folder.resolve().name
    with registry.tagged_run(
        run_id=registry.find_run_id(JOB_TAG, str(folder.resolve())), run_name=f"job-{name}"
    ) as run:
        for number, ms in steps.measured_ms.items():
            at_ms = _traced_at_ms(job_folder.step_folder(folder, number))
            _log_metrics(client, {MEASURED: ms}, number, at_ms)
        page = history_pages.traced_job_page(name, job_records(client, run.info.run_id), notes)
        mlflow.log_text(page, PAGE)
        mlflow.set_tag("mlflow.note.content", "\n\n".join(notes))
    writing.write_atomic(out / PAGE, page.encode())
    return out / PAGE


def job_records(client: mlflow.MlflowClient, run_id: str) -> list[JobRecord]:
    """Records of the traced steps in a job's MLflow run. A step that was logged twice counts once."""
    # If a step was logged several times, the last time counts.
    history = {
        name: {m.step: m for m in client.get_metric_history(run_id, name)}
        for name in client.get_run(run_id).data.metrics
    }

    def metric_value(name: str, step: int) -> float:
        return history[name][step].value if step in history.get(name, {}) else float("nan")

    return [
        JobRecord(
            step,
            measured.timestamp / 1000,
            measured.value,
            metric_value("predicted_ms", step),
            metric_value("around_ms", step),
            metric_value("named_share", step),
            f"{metric_value('model_version', step):.0f}" if step in history.get("model_version", {}) else "",
            {
                name.removeprefix(_FACTOR).replace("_", " "): found[step].value
                for name, found in history.items()
                if name.startswith(_FACTOR) and step in found
            },
        )
        for step, measured in sorted(history.get(MEASURED, {}).items())
    ]


def _traced_at_ms(step: Path) -> int:
    """Time at which a step was traced, Unix ms."""
    return int(1000 * (step / job_folder.JOB_JSON).stat().st_mtime)


def _log_metrics(client: mlflow.MlflowClient, metrics: Mapping[str, float], step: int, at_ms: int) -> None:
    run = mlflow.active_run()
    assert run is not None
    client.log_batch(run.info.run_id, [Metric(k, v, at_ms, step) for k, v in metrics.items()])


@flow(name="job")
def job(folder: str, out: str | None = None, plans: str | None = None, approve: bool = False) -> str:
    """Read the steps that a job has traced since the last run, and correct the champion by them.

    A corrected model is a challenger like others, which the gate judges by traced steps that it has not seen. Returns a
    line for each step, and the results of the gate and of publishing. MLflow has a run and a page for the folder.

    Args:
        folder: Folder of ShardCoreProfiler. Its name is that of the job's problem.
        out: Folder for the corrected model, the problem and the page. Default: data/jobs/NAME.
        plans: Folder or object-store URL in which to publish a plan for the job, under the champion. Default: none.
        approve: Approve a model that passes, if promote.approval in params.yaml asks for a person.
    """
    setting = params.read_section("setting", SettingConfig)
    of_job = Path(folder)
    where = Path(out) if out else paths.JOBS / of_job.resolve().name
    steps = read_traces(of_job, where, setting)
    lines = list(steps.lines)
    if not steps.measured_ms:
        return "\n".join(lines)
    if steps.challenger:
        config = params.read_section("promote", PromoteConfig)
        model, *others = model_folders(steps.challenger)
        config = replace(config, also=tuple(map(str, others)) or config.also)
        lines.append(promote_model(model, paths.MEASUREMENTS, config, approve).reason)
    problem = write_job_problem(of_job, where, setting)
    if plans:
        config = params.read_section("publish", PublishConfig)
        lines.append(publish_plans([problem], plans, setting, config, profile=corrected_profile_path(where)))
    log_steps(of_job, where, steps, lines)
    text = "\n".join(lines)
    create_markdown_artifact(f"```\n{text}\n```", key="job", description=f"traced steps of {where.name}")
    return text


if __name__ == "__main__":
    program.run_as_program(job, shows_result=True)
