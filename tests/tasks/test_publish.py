"""What a published plan says that it comes from."""

from types import SimpleNamespace

import pytest
from laws import SETTING

from shardcore.publish.publisher import PublishConfig
from shardcore.search import DEFAULT_SHARDER
from tasks.publish import _provenance

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
