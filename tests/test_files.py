import dataclasses
import json

import numpy as np
import pytest

from shardcore import files
from shardcore.types import Constraints, Device, Placement, Plan, Problem, Shard, ShardCoreError, Table, Topology
from tasks.measure import MeasureConfig


@pytest.fixture
def problem_path(problem, tmp_path):
    files.write_problem(tmp_path / "p.json", problem)
    return tmp_path / "p.json"


def whole(problem):
    return Plan(tuple(Placement(Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)), {"algorithm": "by hand"})


def test_problems_round_trip(problem, problem_path, tmp_path):
    assert files.read_problem(problem_path) == problem
    unequal = Problem("u", problem.tables, Topology((Device(1 << 24), Device(1 << 25, 2.0, "b"), Device(1 << 25, 2.0, "b"),
                      Device(1 << 24)), "nvidia-h200", 400.0, 50.0, 0.01), 256, "rowwise_adagrad", Constraints(7, ("hot",)))
    files.write_problem(tmp_path / "u.json", unequal)
    assert files.read_problem(tmp_path / "u.json") == unequal
    pinned = dataclasses.replace(unequal, constraints=Constraints(
        pinned=(("hot", (0, "b")), ("cold", (3,))), together=(("hot", "wide"),)))
    files.write_problem(tmp_path / "c.json", pinned)
    assert files.read_problem(tmp_path / "c.json") == pinned
    data = json.loads((tmp_path / "c.json").read_text())["constraints"]
    assert (data["pinned"], data["together"]) == ({"hot": [0, "b"], "cold": [3]}, [["hot", "wide"]])


def test_constraints_that_a_problem_does_not_have_leave_its_file_and_digest_alone(problem, problem_path):
    data = json.loads(problem_path.read_text())
    assert data["constraints"] == {"reserved_bytes": 0, "unsplit": []}
    assert files.problem_digest(problem) == files.digest(data)
    del data["constraints"]
    problem_path.write_text(json.dumps(data))
    assert files.read_problem(problem_path) == problem


@pytest.mark.parametrize("edit, named", [
    (lambda d: d.update(batchsize=3), ["unknown key 'batchsize'", "global_batch"]),
    (lambda d: d.pop("global_batch"), ["lacks the key 'global_batch'"]),
    (lambda d: d["tables"][0].update(rows="many"), ["'cold'", "rows", "'many'", "int"]),
    (lambda d: d["tables"][0].update(row=3), ["'cold'", "unknown key 'row'"]),
    (lambda d: d["tables"][0].pop("dim"), ["'cold'", "lacks the key 'dim'"]),
    (lambda d: d["tables"][0].update(zipf_alpha=1.0), ["'cold'", "both"]),
    (lambda d: d.update(schema="shardcore/plan"), ["schema 'shardcore/plan'", "shardcore/problem"]),
    (lambda d: d.update(version=99), ["version 99"]),
    (lambda d: d["topology"]["devices"][0].update(count=0), ["count 0"]),
    (lambda d: d["topology"]["devices"][0].update(memory_gb=3), ["unknown key 'memory_gb'", "memory_bytes"]),
    (lambda d: d.pop("topology"), ["topology"]),
    (lambda d: d.update(tables=7), ["tables"]),
    (lambda d: d["tables"].append(7), ["7"]),
    (lambda d: d.update(constraints=[]), ["constraints", "[]", "object"]),
    (lambda d: d["constraints"].update(pin={}), ["unknown key 'pin'", "unsplit", "pinned", "together"]),
    (lambda d: d["constraints"].update(pinned=["hot"]), ["pinned is ['hot']", "object of tables"]),
    (lambda d: d["constraints"].update(pinned={"hot": 0}), ["constraints", "'hot' pinned to 0", "a list"]),
    (lambda d: d["constraints"].update(pinned={"hot": [True]}), ["'hot' pinned to [True]"]),
    (lambda d: d["constraints"].update(pinned={"hot": ["host-9"]}), ["'hot' to 'host-9'", "hosts host-0"]),
    (lambda d: d["constraints"].update(pinned={"hut": [0]}), ["pins ['hut']"]),
    (lambda d: d["constraints"].update(together={}), ["together is {}", "list of groups"]),
    (lambda d: d["constraints"].update(together=["hot"]), ["together 'hot'", "a list"]),
    (lambda d: d["constraints"].update(together=[["hot", "hot"]]), ["'hot' together twice"]),
])
def test_bad_problems_are_refused_by_name(problem_path, edit, named):
    data = json.loads(problem_path.read_text())
    edit(data)
    problem_path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError) as error:
        files.read_problem(problem_path)
    assert all(word in str(error.value) for word in [str(problem_path), *named]), str(error.value)


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_file_cut_short_is_refused(problem_path, cut):
    problem_path.write_bytes(problem_path.read_bytes()[:cut])
    with pytest.raises(ShardCoreError, match="p.json"):
        files.read_problem(problem_path)


def test_plans_round_trip_and_know_their_problem(problem, tmp_path):
    path = tmp_path / "plan.json"
    files.write_plan(path, whole(problem), problem)
    read = files.read_plan(path, problem)
    assert read == whole(problem) and read.provenance == {"algorithm": "by hand"}
    other = Problem("other", problem.tables, problem.topology, 512)
    with pytest.raises(ShardCoreError, match="plan for problem 'small'"):
        files.read_plan(path, other)
    data = json.loads(path.read_text())
    data["placements"][0]["devices"] = [3]
    path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError, match="edited"):
        files.read_plan(path, problem)


def test_pools_round_trip(tables, tmp_path):
    files.write_pool(tmp_path / "pool.json", tables)
    assert files.read_pool(tmp_path / "pool.json") == tables


def test_models_round_trip_and_a_touched_one_is_refused(tmp_path):
    tensors = {"w": np.arange(6.0).reshape(2, 3)}
    files.write_model(tmp_path, {"a": 1}, tensors)
    meta, read = files.read_model(tmp_path)
    assert meta == {"a": 1}
    np.testing.assert_array_equal(read["w"], tensors["w"])
    weights = tmp_path / files.MODEL_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ShardCoreError, match="weights.safetensors"):
        files.read_model(tmp_path)


def test_parameters_name_an_unknown_key(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("measure:\n  compute_sample: 3\n")
    with pytest.raises(ShardCoreError, match="section 'measure' has an unknown key 'compute_sample'"):
        files.read_params(path, "measure", MeasureConfig, ("measure", "train"))
    path.write_text("measure:\n  compute_samples: lots\n")
    with pytest.raises(ShardCoreError, match="compute_samples is 'lots'"):
        files.read_params(path, "measure", MeasureConfig, ("measure", "train"))
    path.write_text("mesure:\n  compute_samples: 3\n")
    with pytest.raises(ShardCoreError, match="unknown section 'mesure'; known are measure, train"):
        files.read_params(path, "measure", MeasureConfig, ("measure", "train"))
    path.write_text("measure: [\n")
    with pytest.raises(ShardCoreError, match="not YAML"):
        files.read_params(path, "measure", MeasureConfig, ("measure", "train"))


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(files.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(ShardCoreError, match="cannot write .*: no space left"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_table_needs_no_access_statistics_but_needs_to_be_an_object():
    with pytest.raises(ShardCoreError, match="needs to be a table"):
        files.table_from_json([], "x.json")
    assert files.table_from_json({"name": "t", "rows": 3, "dim": 4, "pooling": 1}, "x.json") == Table("t", 3, 4, 1)
