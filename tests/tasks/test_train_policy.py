"""The policy's stage: off by default, tracked, registered with its cost model's version, and published by."""

from pathlib import Path

import mlflow
import pytest
from laws import SETTING, trained
from prefect.logging import disable_run_logger
from tracking import tracked

from flows.train_policy import TrainPolicyConfig, train_against_cost_model
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.cost import neural
from shardcore.io import files, model_files
from shardcore.plans.publisher import PublishConfig, Publisher
from shardcore.report import plan_page
from shardcore.search.learned.policy import read_policy, write_policy
from tasks import params, paths, policy_registry, registry
from tasks.promote import promote_policy

pytestmark = pytest.mark.usefixtures("short_explanations")

QUICK = {
    "rounds": 2,
    "policy_updates": 2,
    "problems": 3,
    "validation": 2,
    "test": 2,
    "devices": 2,
    "min_tables": 4,
    "max_tables": 6,
    "max_dim": 16,
}
TABLES = tuple(Table(f"t{i}", 500 + 40 * i, 16, 2.0 + i % 5, Zipf(1.0)) for i in range(40))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    with tracked(folder), disable_run_logger():
        neural.save(trained(), paths.MODEL)
        files.write_pool(paths.POOL, TABLES)
        yield folder


def run(**config) -> dict[str, float]:
    return train_against_cost_model.fn(
        paths.MODEL, paths.POOL, TrainPolicyConfig(**QUICK, **config), paths.POLICY
    )


@pytest.fixture(scope="module")
def metrics(place):
    return run(algorithm="dreamshard_direct")


def test_the_run_holds_parameters_curves_and_files(metrics):
    client = mlflow.MlflowClient()
    [found] = client.search_runs([mlflow.get_experiment_by_name("shardcore").experiment_id])
    assert found.data.params["algorithm"] == "dreamshard_direct" and found.data.params["rounds"] == "2"
    assert [m.step for m in client.get_metric_history(found.info.run_id, "validation_cost")] == [1, 2]
    assert found.data.metrics["final_test_cost"] == metrics["test_cost"] > 0
    assert found.data.tags[registry.DIGEST_TAG] == model_files.model_digest(paths.POLICY, "policy")
    assert {a.path for a in client.list_artifacts(found.info.run_id, "policy")} == {
        f"policy/{n}" for n in ("policy.json", "weights.safetensors", "curves.csv")
    }
    provenance = read_policy(paths.POLICY).meta["provenance"]
    assert provenance["model_digest"] == model_files.model_digest(paths.MODEL)


def test_without_a_policy_it_cannot_be_published_by(place):
    with pytest.raises(
        ShardCoreError,
        match="there is no policy 'autoshard' for 'law'.*train_policy.algo"
        "rithm in params.yaml to it.*flows.promote",
    ):
        policy_registry.champion_policy(registry.connect_to_mlflow(), "autoshard", "law")
    with pytest.raises(ShardCoreError, match="'dreamshard' needs a policy 'dreamshard', and none was given"):
        Publisher(
            neural.load(paths.MODEL),
            "plans",
            PublishConfig(algorithm="dreamshard"),
            {},
            plan_page.published_version_page,
        )


def test_it_is_registered_once_its_cost_model_is_and_plans_are_published_by_it(metrics):
    assert promote_policy.fn(paths.POLICY) is None  # its cost model has no version yet
    client = registry.connect_to_mlflow()
    cost = registry.register_model(client, paths.MODEL, None, {})
    assert promote_policy.fn(paths.POLICY) == promote_policy.fn(paths.POLICY) == "1"
    policy, version = policy_registry.champion_policy(client, "dreamshard_direct", "law")
    assert version.name == "shardcore-policy-dreamshard_direct-law"
    assert version.tags["cost_model"] == cost.name and version.tags["cost_model_version"] == str(cost.version)
    problem = Problem("few", TABLES[:8], Topology((Device(1 << 24),) * 2), SETTING.batch)
    config = PublishConfig(algorithm="dreamshard_direct_columns", budget_evals=20)
    provenance = {"model": cost.name, "model_version": "1"}
    made = Publisher(
        neural.load(paths.MODEL), "plans", config, provenance, plan_page.published_version_page, policy
    )
    assert made.publish(problem).decision.outcome == "first"


def test_a_policy_from_elsewhere_is_registered_in_a_run_of_its_own(metrics, tmp_path):
    policy = read_policy(paths.POLICY)
    write_policy(
        tmp_path,
        type(policy)(
            "dreamshard_direct",
            policy.setting,
            policy.weights,
            {**policy.meta, "metrics": {"test_cost": 0.5}},
        ),
    )
    client = registry.connect_to_mlflow()
    registry.register_model(client, paths.MODEL, None, {})
    version = policy_registry.register_policy(client, tmp_path)
    found, _ = policy_registry.champion_policy(client, "dreamshard_direct", "law")
    assert found.meta["metrics"] == {"test_cost": 0.5}
    assert version.tags["cost_model_version"] == "1"


def test_it_is_off_by_default_and_then_leaves_an_empty_folder(metrics):
    params_here = Path(__file__).parents[2] / "params.yaml"
    assert params.read_section("train_policy", TrainPolicyConfig, params_here).algorithm is None
    assert run() == {} and not list(paths.POLICY.iterdir()) and promote_policy.fn(paths.POLICY) is None


def test_an_unknown_policy_is_refused():
    with pytest.raises(ShardCoreError, match="train policy config has algorithm 'alphashard'; known are"):
        TrainPolicyConfig(algorithm="alphashard")
