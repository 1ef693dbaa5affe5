"""Measuring on Ray, as a Prefect task. One task has all its actors, as a task a sample would cost more than the sample.

Samples are written to the dataset as they come, so a run that is killed loses only requests that were running.
"""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task

from shardcore.io import files
from shardcore.stages import measure as run
from shardcore.stages.measure import MeasureConfig, Wanted
from tasks.progress import RunProgress
from tasks.ray_transport import RayTransport
from tasks.setting import SettingConfig


@task(task_run_name="measure")
def measure_lacking(
    pool: Path, setting: SettingConfig, config: MeasureConfig, folder: Path
) -> dict[str, int]:
    """Measure the samples that the dataset lacks, on the devices of the connected cluster.

    Returns the number of samples of each kind that were lacking.
    """
    with RayTransport() as transport:
        wanted = Wanted(files.read_pool(pool), setting.setting(transport.hardware), config, transport)
        get_run_logger().info("setting: %s", wanted.setting)
        return run.measure(wanted, folder, RunProgress())
