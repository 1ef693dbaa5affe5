"""measure: measure the samples that the dataset lacks, on the devices of the Ray cluster."""

import argparse

from prefect import flow, get_run_logger

from shardcore.stages.measure import MeasureConfig
from tasks import console, params, paths, services
from tasks.estimate import estimate
from tasks.measure import measure_lacking
from tasks.ray_cluster import ray_cluster
from tasks.setting import SettingConfig


def given() -> tuple[SettingConfig, MeasureConfig]:
    return params.section("setting", SettingConfig), params.section("measure", MeasureConfig)


@flow(name="measure")
def measure() -> None:
    setting, config = given()
    with ray_cluster():
        found = measure_lacking(paths.POOL, setting, config, paths.MEASUREMENTS)
    get_run_logger().info(
        "measured %d groups, %d exchanges and %d steps of plans", *found.values(), extra=console.RESULT
    )


def dry_run() -> None:
    setting, config = given()
    with ray_cluster():
        for line in estimate(paths.POOL, setting, config, paths.MEASUREMENTS):
            console.show("text", line)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.measure",
        description="Measure the samples that params.yaml asks for and the dataset lacks, on this machine or the Ray "
        "cluster at RAY_ADDRESS.",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only show what is missing and how long it would take, without using a device",
    )
    is_dry = parser.parse_args().dry_run
    services.run_flow(dry_run if is_dry else measure, needs_prefect=not is_dry)


if __name__ == "__main__":
    main()
