"""What a published plan says that it comes from."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from laws import SETTING, by_hand, pool

from shardcore import files
from shardcore.cost.neural import NeuralModel
from shardcore.errors import SettingMismatch
from shardcore.publish.publisher import PublishConfig, Publisher
from shardcore.search import DEFAULT_SHARDER
from shardcore.topology import Device, Topology
from shardcore.types import Problem
from tasks.publish import _provenance, _publish

VERSION = SimpleNamespace(name="shardcore-cost-law", version=3)


@pytest.mark.parametrize("limit", [None, 3])
def test_a_plan_names_its_model_the_data_and_the_search(limit):
    model = SimpleNamespace(setting=SETTING, meta={"provenance": {
        "data_version": "d1", "git_commit": "c1", "seed": 5, "data": "0123456789abcdef",
        "datasets": {"datasets/x": "digest"}}})
    found = _provenance(model, VERSION, PublishConfig(budget_evals=2_000, max_moved_tables=limit))
    assert len(found.pop("git_commit")) >= 40
    assert found == {"model": "shardcore-cost-law", "model_version": "3", "setting": str(SETTING),
                     "data_version": "d1", "data": "0123456789abcdef",
                     "model_git_commit": "c1", "model_seed": 5, "datasets": {"datasets/x": "digest"},
                     "algorithm": DEFAULT_SHARDER, "budget_evals": 2_000, "seed": 0,
                     **({} if limit is None else {"max_moved_tables": limit})}


def test_a_model_without_provenance_says_so():
    found = _provenance(SimpleNamespace(setting=SETTING, meta={"provenance": {}}), VERSION, PublishConfig())
    assert (found["data_version"] == "unversioned" and found["model_git_commit"] == "no git"
            and "datasets" not in found)


def test_a_problem_of_several_precisions_is_refused_by_name_before_any_search(tmp_path):
    """A champion is a model of one precision."""
    first, second = pool()[:2]
    problem = Problem("both", (first, replace(second, precision="fp16")), Topology((Device(1 << 30),) * 2),
                      SETTING.batch)
    files.write_problem(tmp_path / "both.json", problem)
    model = NeuralModel(SETTING, by_hand().weights, {"ranges": {}, "provenance": {}})
    publisher = Publisher(model, tmp_path / "plans", PublishConfig(), {})
    with pytest.raises(SettingMismatch, match="problem 'both' is for .*fp16.fp32.*publish takes a single"):
        _publish(publisher, tmp_path / "both.json", [])
    assert not (tmp_path / "plans").exists()
