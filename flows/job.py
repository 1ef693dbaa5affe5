"""job: correct the champion by a running job's new traces; the gate and publishing follow."""

import argparse
import dataclasses
from pathlib import Path

from prefect import flow

from shardcore.io.model_files import model_folders
from tasks import console, params, paths, services
from tasks.artifacts import create_markdown_artifact
from tasks.job import keep_problem, log_steps, profile_of, read_traces
from tasks.promote import PromoteConfig, promote_model
from tasks.publish import PublishConfig, publish_plans
from tasks.setting import SettingConfig


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
    setting = params.section("setting", SettingConfig)
    of_job = Path(folder)
    where = Path(out) if out else paths.JOBS / of_job.resolve().name
    steps = read_traces(of_job, where, setting)
    lines = list(steps.lines)
    if not steps.measured_ms:
        return "\n".join(lines)
    if steps.challenger:
        config = params.section("promote", PromoteConfig)
        model, *others = model_folders(steps.challenger)
        config = dataclasses.replace(config, also=tuple(map(str, others)) or config.also)
        lines.append(promote_model(model, paths.MEASUREMENTS, config, approve).reason)
    problem = keep_problem(of_job, where, setting)
    if plans:
        config = params.section("publish", PublishConfig)
        lines.append(publish_plans([problem], plans, setting, config, profile=profile_of(where)))
    log_steps(of_job, where, steps, lines)
    text = "\n".join(lines)
    create_markdown_artifact(f"```\n{text}\n```", key="job", description=f"traced steps of {where.name}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.job", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="folder of ShardCoreProfiler")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder for the corrected model, the problem and the page; default: data/jobs/NAME",
    )
    parser.add_argument("--plans", metavar="PLANS", help="publish a plan for the job there")
    parser.add_argument(
        "--approve",
        action="store_true",
        help="approve a model that passes, if promote.approval asks for a person",
    )
    args = parser.parse_args()
    services.run_flow(
        lambda: console.show("text", f"\n{job(args.folder, args.out, args.plans, args.approve)}")
    )


if __name__ == "__main__":
    main()
