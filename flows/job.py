"""job: correct the champion by a running job's new traces, and publish a plan for the job."""

import argparse
from pathlib import Path

from prefect import flow

from tasks import console, params, services
from tasks.job import read_traces
from tasks.publish import PublishConfig
from tasks.setting import SettingConfig


@flow(name="job")
def job(folder: str, out: str | None = None, plans: str | None = None) -> str:
    """Read the steps that a job has traced since the last run, and correct the champion by each.

    Returns a line for each step. MLflow has a run for the folder: the step as measured, as predicted and as corrected.

    Args:
        folder: Folder of ShardCoreProfiler. Its name is that of the job's problem.
        out: Folder for the corrected model and the problem. Default: data/jobs/NAME.
        plans: Folder or object-store URL to publish a plan for the job in, under the corrected model. Default: none.
    """
    setting = params.section("setting", SettingConfig)
    config = params.section("publish", PublishConfig)
    return read_traces(Path(folder), Path(out) if out else None, plans, setting, config)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.job", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="of ShardCoreProfiler")
    parser.add_argument(
        "--out", metavar="FOLDER", help="for the corrected model and the problem; default: data/jobs/NAME"
    )
    parser.add_argument("--plans", metavar="PLANS", help="publish a plan for the job there")
    args = parser.parse_args()
    services.run_flow(lambda: console.show("text", f"\n{job(args.folder, args.out, args.plans)}"))


if __name__ == "__main__":
    main()
