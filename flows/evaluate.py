"""evaluate: judge models on held-out samples, sharders on held-out problems, and both by replays of plans."""

import argparse
from contextlib import nullcontext

from prefect import flow, get_run_logger

from shardcore.cost.accuracy import summary
from shardcore.cost.replay_metrics import verdict
from tasks import console, params, paths, services
from tasks.evaluate import EvaluateConfig, compare_sharders, evaluate_model, replay_plans, write_metrics
from tasks.ray_cluster import ray_cluster


@flow(name="evaluate")
def evaluate() -> None:
    config = params.section("evaluate", EvaluateConfig)
    accuracy = evaluate_model(paths.MODEL, paths.MEASUREMENTS, paths.EVALUATION)
    sharders = compare_sharders(paths.MODEL, paths.POOL, config, paths.EVALUATION)
    # Only replays need devices.
    with ray_cluster() if config.replay_problems else nullcontext():
        replayed = replay_plans(paths.MODEL, paths.POOL, paths.MEASUREMENTS, config, paths.REPLAYS)
    write_metrics(paths.EVALUATION, accuracy, sharders, replayed)
    steps = f"; replayed plans: {verdict(replayed)}" if replayed else ""
    get_run_logger().info("%s%s", summary(accuracy), steps, extra=console.RESULT)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.evaluate", description=__doc__).parse_args()
    services.run_flow(evaluate)
