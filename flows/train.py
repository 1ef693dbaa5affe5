"""train: the cost models of the measured setting."""

from prefect import flow, get_run_logger

from tasks import params, paths, services
from tasks.setting import SettingConfig
from tasks.train import TrainConfig, train_model


@flow(name="train")
def train() -> None:
    setting = params.section("setting", SettingConfig)
    config = params.section("train", TrainConfig)
    metrics = train_model(paths.MEASUREMENTS, setting, config, paths.MODEL)
    get_run_logger().info("on the test split: %s", ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))


if __name__ == "__main__":
    services.run_flow(train)
