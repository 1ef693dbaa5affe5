"""train: train cost models of the measured setting."""

import argparse

from prefect import flow, get_run_logger

from shardcore.cost import accuracy
from tasks import console, params, paths, services
from tasks.setting import SettingConfig
from tasks.train import TrainConfig, train_model


@flow(name="train")
def train() -> None:
    setting = params.section("setting", SettingConfig)
    config = params.section("train", TrainConfig)
    metrics = train_model(paths.MEASUREMENTS, setting, config, paths.MODEL)
    logger = get_run_logger()
    logger.info("on the test split: %s", ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    logger.info("%s", accuracy.summary(metrics), extra=console.RESULT)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.train", description=__doc__).parse_args()
    services.run_flow(train)
