"""evaluate: judge models on held-out samples, sharders on held-out problems, and both by replays of plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import flow, get_run_logger, task

from flows import program
from shardcore.cost import neural
from shardcore.cost.accuracy import accuracy_summary
from shardcore.cost.replay_metrics import describe_accuracy
from shardcore.io import files
from shardcore.stages import evaluate as stage
from shardcore.stages.evaluate import CandidateModel, EvaluateConfig
from tasks import console, params, paths
from tasks.progress import RunProgress
from tasks.ray_cluster import ray_cluster
from tasks.ray_transport import RayTransport


@contextmanager
def ray_transport() -> Iterator[RayTransport]:
    """Transport of measuring workers on the Ray cluster, connected while the context lasts."""
    with ray_cluster(), RayTransport() as transport:
        yield transport


@task(task_run_name="evaluate")
def evaluate_model(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """Evaluate the trained cost model. Returns the metrics by section."""
    model, pool = neural.load(paths.MODEL), files.read_pool(paths.POOL)
    candidate = CandidateModel(model, pool, paths.MEASUREMENTS, config, RunProgress())
    return stage.evaluate(candidate, paths.EVALUATION, ray_transport)


@flow(name="evaluate")
def evaluate() -> None:
    found = evaluate_model(params.read_section("evaluate", EvaluateConfig))
    steps = f"; replayed plans: {describe_accuracy(found['replays'])}" if "replays" in found else ""
    get_run_logger().info("%s%s", accuracy_summary(found["accuracy"]), steps, extra=console.RESULT)


if __name__ == "__main__":
    program.run_as_program(evaluate)
