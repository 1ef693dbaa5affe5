"""train_policy: a policy that places tables, trained against the cost model. Off by default (params.yaml)."""

import argparse

from prefect import flow, get_run_logger

from tasks import console, params, paths, services
from tasks.train_policy import TrainPolicyConfig
from tasks.train_policy import train_policy as train_policy_task


@flow(name="train_policy")
def train_policy() -> None:
    params.require_section("train_policy")
    config = params.section("train_policy", TrainPolicyConfig)
    metrics = train_policy_task(paths.MODEL, paths.POOL, config, paths.POLICY)
    if metrics:
        get_run_logger().info(
            "plans cost %.3f of the best greedy order's on unseen tables",
            metrics["test_cost"],
            extra=console.RESULT,
        )


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.train_policy", description=__doc__).parse_args()
    services.run_flow(train_policy)
