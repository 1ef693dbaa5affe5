"""measure: run what the dataset lacks on the devices of the Ray cluster."""

from prefect import flow, get_run_logger

from tasks import params, paths, services
from tasks.measure import MeasureConfig, cluster_setting, measure_comm, measure_compute, merge_parts
from tasks.ray_cluster import ray_cluster
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
    merge_parts(paths.MEASUREMENTS)
    get_run_logger().info("measured %d groups and %d exchanges", groups, exchanges)


if __name__ == "__main__":
    services.run_flow(measure)
