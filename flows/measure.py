"""measure: run what the dataset lacks on the devices of the Ray cluster."""

from prefect import flow, get_run_logger

from shardcore import files
from tasks import paths, services
from tasks.measure import MeasureConfig, measure_comm, measure_compute, merge_parts
from tasks.ray_cluster import ray_cluster
from tasks.setting import SettingConfig


@flow(name="measure")
def measure() -> None:
    setting = files.read_params(paths.PARAMS, "setting", SettingConfig).setting()
    config = files.read_params(paths.PARAMS, "measure", MeasureConfig)
    get_run_logger().info("setting: %s", setting)
    with ray_cluster():
        groups = measure_compute(paths.POOL, setting, config, paths.MEASUREMENTS)
        exchanges = measure_comm(setting, config, paths.MEASUREMENTS)
    merge_parts(paths.MEASUREMENTS)
    get_run_logger().info("measured %d groups and %d exchanges", groups, exchanges)


if __name__ == "__main__":
    services.run_flow(measure)
