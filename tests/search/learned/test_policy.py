"""A policy's files: bit for bit, and one line for each thing that can be wrong with them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from policies import untrained

from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.io import model_files
from shardcore.search import LEARNED, SHARDERS, require_known_sharder, sharder
from shardcore.search.learned.policy import NETS, read_policy, write_policy
from shardcore.testing.problems import CASES, small_problem_model

PROBLEM = CASES["unequal speed"]


@pytest.mark.parametrize("name", NETS)
def test_a_policy_is_read_as_it_was_written_and_places_alike(name, tmp_path):
    policy = replace(untrained(name), meta={"metrics": {"test_cost": 0.9}, "provenance": {"seed": 1}})
    write_policy(tmp_path, policy)
    read = read_policy(tmp_path)
    assert (read.name, read.setting, read.meta) == (policy.name, policy.setting, policy.meta)
    assert all((read.weights[k] == v).all() for k, v in policy.weights.items())
    assert len({sharder(name, p)(PROBLEM, small_problem_model(PROBLEM)) for p in (policy, read)}) == 1


def test_files_hold_no_code_and_what_is_damaged_is_refused(tmp_path):
    write_policy(tmp_path, untrained("dreamshard"))
    assert {p.name for p in tmp_path.iterdir()} == {"policy.json", "weights.safetensors"}
    content = (tmp_path / model_files.MODEL_WEIGHTS).read_bytes()
    for bad in (content[:-4], b"\x80\x04.", b""):  # the second: a pickle
        (tmp_path / model_files.MODEL_WEIGHTS).write_bytes(bad)
        with pytest.raises(ShardCoreError, match="weights.safetensors does not match the digest in policy"):
            read_policy(tmp_path)
    (tmp_path / model_files.MODEL_WEIGHTS).unlink()
    with pytest.raises(ShardCoreError, match="cannot read .*weights.safetensors"):
        read_policy(tmp_path)
    (tmp_path / "policy.json").write_text((tmp_path / "policy.json").read_text()[:-9])
    with pytest.raises(ShardCoreError, match="policy.json is not whole JSON"):
        read_policy(tmp_path)


def rewritten(folder, weights=None, **meta):
    """The folder of a policy whose weights, or parts of the description, are replaced."""
    write_policy(folder, untrained("autoshard"))
    description, tensors = model_files.read_model(folder, "policy")
    model_files.write_model(folder, {**description, **meta}, weights or tensors, "policy")
    return folder


@pytest.mark.parametrize(
    "meta, message",
    [
        ({"features": ["dim", "rows"]}, r"on features \['dim', 'rows'\]; this ShardCore computes .*train"),
        ({"name": "alphashard"}, "has the name 'alphashard'; known are dreamshard, dreamshard_direct"),
        ({"name": "dreamshard"}, "weight 'costs.0.weight' is missing"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"setting": {"hardware": "x"}}, "setting lacks the key 'batch'"),
    ],
)
def test_another_description_is_refused_in_one_line(meta, message, tmp_path):
    with pytest.raises(ShardCoreError, match=message) as error:
        read_policy(rewritten(tmp_path, **meta))
    assert "\n" not in str(error.value)


def test_a_cost_model_is_no_policy_and_another_version_is_named(tmp_path):
    model_files.write_model(tmp_path, {}, {"w": np.zeros(1)})
    with pytest.raises(
        ShardCoreError, match="holds no policy.json; give the folder of a trained policy by --policy"
    ):
        read_policy(tmp_path)
    (tmp_path / "policy.json").write_bytes((tmp_path / "model.json").read_bytes())
    with pytest.raises(ShardCoreError, match="schema 'shardcore/model'; expected 'shardcore/policy'"):
        read_policy(tmp_path)
    (tmp_path / "policy.json").write_text(json.dumps({"schema": "shardcore/policy", "version": 2}))
    with pytest.raises(ShardCoreError, match="version 2 of shardcore/policy; this ShardCore reads 1"):
        read_policy(tmp_path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("score.3.weight", None, "weight 'score.3.weight' is missing"),
        ("score.9.weight", np.zeros(1, np.float32), "weight 'score.9.weight' is not known"),
        ("score.3.bias", np.zeros(2, np.float32), r"'score.3.bias' is float32 \[2\]; it needs to be float32"),
        ("score.3.bias", np.zeros(1), r"'score.3.bias' is float64 \[1\]; it needs to be float32"),
        ("score.3.bias", np.full(1, np.nan, np.float32), "'score.3.bias' has nan; it needs -1e.06 to 1e.06"),
        ("sd", np.zeros(21, np.float32), "weight 'sd' has 0; it needs 1e-30 to"),
    ],
)
def test_weights_that_the_formulas_cannot_use_are_refused(name, value, message, tmp_path):
    weights = {**untrained("autoshard").weights, name: value}
    with pytest.raises(ShardCoreError, match=message):
        read_policy(rewritten(tmp_path, {k: v for k, v in weights.items() if v is not None}))


def test_a_policy_of_other_hardware_is_refused():
    policy = untrained("dreamshard", hardware="a-gpu")
    with pytest.raises(
        SettingMismatch,
        match="policy 'dreamshard' was trained for hardware 'a-gpu'; "
        "the cost model is for 'made-up'.*train-policy",
    ):
        sharder("dreamshard", policy)(PROBLEM, small_problem_model(PROBLEM))


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_sharder_needs_its_own_policy(name):
    assert require_known_sharder(name) == name and name not in SHARDERS
    wanted = LEARNED[name][0]
    with pytest.raises(ShardCoreError, match=f"'{name}' needs a policy '{wanted}', and none was given"):
        sharder(name)
    other = next(n for n in NETS if n != wanted)
    with pytest.raises(ShardCoreError, match=f"needs a policy '{wanted}', and '{other}' was given"):
        sharder(name, untrained(other))


def test_other_sharders_take_no_policy():
    with pytest.raises(
        ShardCoreError,
        match="'anneal' takes no policy; the policy 'autoshard' that was "
        "given is for autoshard and autoshard_columns",
    ):
        sharder("anneal", untrained("autoshard"))
