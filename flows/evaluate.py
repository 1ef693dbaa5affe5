"""evaluate: judge models on held-out samples, sharders on held-out problems, and both by replays of plans."""

import argparse
from contextlib import nullcontext

from prefect import flow, get_run_logger

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
    get_run_logger().info("%s", result(accuracy, replayed), extra=console.RESULT)
    if replayed:
        get_run_logger().info(
            "replayed plans: %s",
            ", ".join(
                f"{k} {replayed[k]:.3g}"
                for k in ("mape", "bias", "kendall_tau", "regret", "torchrec_relative_cost")
                if k in replayed
            ),
        )


def result(accuracy: dict[str, float], replayed: dict[str, float]) -> str:
    """The result in one line: errors of predicted ms in percent, and rank correlations."""
    text = (
        f"held-out groups: error {accuracy['compute_mape']:.1f}%, Kendall tau "
        f"{accuracy['compute_kendall_tau']:.2f}"
    )
    if replayed:
        text += f"; replayed plans: error {replayed['mape']:.1f}%, Kendall tau {replayed['kendall_tau']:.2f}"
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.evaluate", description=__doc__).parse_args()
    services.run_flow(evaluate)
