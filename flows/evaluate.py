"""evaluate: accuracy on held-out samples; the sharders on held-out problems."""

from prefect import flow, get_run_logger

from tasks import params, paths, services
from tasks.evaluate import EvaluateConfig, compare_sharders, evaluate_model, write_metrics


@flow(name="evaluate")
def evaluate() -> None:
    config = params.section("evaluate", EvaluateConfig)
    accuracy = evaluate_model(paths.MODEL, paths.MEASUREMENTS, paths.EVALUATION)
    sharders = compare_sharders(paths.MODEL, paths.POOL, config, paths.EVALUATION)
    write_metrics(paths.EVALUATION, accuracy, sharders)
    get_run_logger().info("held-out groups: error %.1f%%, Kendall tau %.3f", accuracy["compute_mape"],
                          accuracy["compute_kendall_tau"])


if __name__ == "__main__":
    services.run_flow(evaluate)
