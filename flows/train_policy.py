"""train_policy: a policy that places tables, trained against the cost model. Off by default (params.yaml)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import mlflow
from mlflow.entities import Metric
from prefect import flow, get_run_logger, task

from flows import program
from shardcore.core.validation import one_of
from shardcore.cost import neural
from shardcore.io import files, model_files, writing
from shardcore.search.learned.policy import NETS, POLICY_JSON, write_policy
from shardcore.search.learned.training import PolicyConfig, PolicyProblems, make_policy
from shardcore.stages.progress import StageWork
from tasks import console, params, paths, policy_registry, registry
from tasks.commit import git_commit
from tasks.progress import RunProgress

CURVES = "curves.csv"


@dataclass(frozen=True)
class TrainPolicyConfig(PolicyConfig, PolicyProblems):
    """Training of a policy: PolicyConfig, PolicyProblems, and which policy is trained.

    algorithm: policy that `dvc repro train_policy` trains (docs/plan_policies.md). null: none
    """

    algorithm: Annotated[str | None, one_of(NETS)] = None

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        PolicyProblems.__post_init__(self)


@task(task_run_name="train-policy")
@registry.one_line_errors()
def train_against_cost_model(
    model_folder: Path, pool: Path, config: TrainPolicyConfig, folder: Path
) -> dict[str, float]:
    """Train a sharding policy against a cost model, and log the run to MLflow. Returns its metrics; {} if disabled.

    Writes the policy's files and curves.csv to `folder`. Without a policy, the folder is empty.
    """
    progress = RunProgress()
    folder.mkdir(parents=True, exist_ok=True)
    # An older policy must not look like the one that is trained now.
    for name in (POLICY_JSON, model_files.MODEL_WEIGHTS, CURVES):
        (folder / name).unlink(missing_ok=True)
    if config.algorithm is None:
        progress.info("no policy is trained: train_policy.algorithm in params.yaml is null")
        return {}
    model, digest = neural.load(model_folder), model_files.model_digest(model_folder)
    client, work = registry.connect_to_mlflow(), StageWork(progress, "rounds", config.rounds)

    def show_round(round_: int, values: dict[str, float]) -> None:
        work.show_done(round_, ", ".join(f"{k} {v:.4g}" for k, v in values.items() if k != "round"))

    with registry.tagged_run(run_name=f"train-policy-{config.algorithm}-{model.setting.hardware}") as run:
        mlflow.log_params({**dataclasses.asdict(config), "setting_hardware": model.setting.hardware})
        mlflow.set_tags({"git_commit": git_commit(), policy_registry.COST_MODEL_TAG: digest})
        trained = make_policy(
            config.algorithm,
            files.read_pool(pool),
            model,
            params.part_of_config(config, PolicyProblems),
            params.part_of_config(config, PolicyConfig),
            progress=show_round,
        )
        policy, metrics = trained.policy, dict(trained.policy.meta["metrics"])
        registry.log_curves(
            client,
            run.info.run_id,
            [
                Metric(k, float(v), 0, int(row["round"]))
                for row in trained.curves
                for k, v in row.items()
                if k != "round"
            ],
        )
        mlflow.log_metrics({f"final_{k}": v for k, v in metrics.items()})
        # Files come last, so that a failed run leaves no policy that looks trained.
        writing.write_csv(folder / CURVES, trained.curves)
        write_policy(
            folder,
            dataclasses.replace(
                policy,
                meta={
                    **policy.meta,
                    "provenance": {"model_digest": digest, "git_commit": git_commit(), "seed": config.seed},
                },
            ),
        )
        mlflow.log_artifacts(str(folder), policy_registry.POLICY)
        mlflow.set_tag(registry.DIGEST_TAG, model_files.model_digest(folder, "policy"))
    return metrics


@flow(name="train_policy")
def train_policy() -> None:
    params.require_section("train_policy")
    config = params.read_section("train_policy", TrainPolicyConfig)
    metrics = train_against_cost_model(paths.MODEL, paths.POOL, config, paths.POLICY)
    if metrics:
        get_run_logger().info(
            "plans cost %.3f of the best greedy order's on unseen tables",
            metrics["test_cost"],
            extra=console.RESULT,
        )


if __name__ == "__main__":
    program.run_as_program(train_policy)
