import os

import pytest

from shardcore import store
from shardcore.types import Placement, Plan, Shard, ShardCoreError


def plan(problem, device, **provenance):
    return Plan(tuple(Placement(Shard.whole(t), (device,)) for t in problem.tables), provenance)


def test_versions_are_kept_and_the_pointer_moves(problem, tmp_path):
    first = store.publish(tmp_path, problem, plan(problem, 0), {"total_ms": 2.0})
    second = store.publish(tmp_path, problem, plan(problem, 1), {"total_ms": 1.0})
    assert first != second
    assert store.load_plan(tmp_path, "small") == (plan(problem, 1), problem)
    assert {p.name for p in (tmp_path / "small" / "versions").iterdir()} == {first, second}


def test_publishing_the_same_plan_twice_is_one_version(problem, tmp_path):
    assert store.publish(tmp_path, problem, plan(problem, 0), {}) == store.publish(tmp_path, problem, plan(problem, 0), {})


def test_a_publisher_that_dies_before_the_pointer_leaves_the_old_plan(problem, tmp_path, monkeypatch):
    store.publish(tmp_path, problem, plan(problem, 0), {})
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(KeyboardInterrupt) if str(b).endswith("current")
                        else real(a, b))
    with pytest.raises(KeyboardInterrupt):
        store.publish(tmp_path, problem, plan(problem, 1), {})
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 0)
    monkeypatch.undo()
    store.publish(tmp_path, problem, plan(problem, 1), {})
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 1)


def test_an_unpublished_problem_is_named(problem, tmp_path):
    store.publish(tmp_path, problem, plan(problem, 0), {})
    with pytest.raises(ShardCoreError, match="'large'.*small"):
        store.load_plan(tmp_path, "large")
