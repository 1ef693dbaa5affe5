"""measure: measure the samples that the dataset lacks, on the devices of the Ray cluster."""

import argparse

from prefect import flow, get_run_logger

from tasks import console, params, paths, services
from tasks.estimate import estimate
from tasks.measure import MeasureConfig, cluster_setting, measure_comm, measure_compute, merge_parts
from tasks.ray_cluster import ray_cluster
from tasks.replay import measure_steps
from tasks.setting import SettingConfig


@flow(name="measure")
def measure() -> None:
    wanted = params.section("setting", SettingConfig)
    config = params.section("measure", MeasureConfig)
    with ray_cluster():
        setting = cluster_setting(wanted)
        get_run_logger().info("setting: %s", setting)
        groups = measure_compute(paths.POOL, setting, config, paths.MEASUREMENTS)
        exchanges = measure_comm(setting, config, paths.MEASUREMENTS)
        steps = measure_steps(paths.POOL, setting, config, paths.MEASUREMENTS) if config.step_samples else 0
    # One file of each kind, as DVC and readers handle few files better than many.
    merge_parts(paths.MEASUREMENTS)
    get_run_logger().info(
        "measured %d groups, %d exchanges and %d steps of plans",
        groups,
        exchanges,
        steps,
        extra=console.RESULT,
    )


def dry_run() -> None:
    wanted = params.section("setting", SettingConfig)
    config = params.section("measure", MeasureConfig)
    with ray_cluster():
        for kind in estimate(paths.POOL, wanted, config, paths.MEASUREMENTS):
            console.show("text", str(kind))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.measure",
        description="Measure the samples that params.yaml asks "
        "for and the dataset lacks, on this machine or the Ray cluster at "
        "RAY_ADDRESS.",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only show what is missing and how long it would take, without using a device",
    )
    if parser.parse_args().dry_run:
        services.run_flow(dry_run, needs_prefect=False)
    else:
        services.run_flow(measure)


if __name__ == "__main__":
    main()
