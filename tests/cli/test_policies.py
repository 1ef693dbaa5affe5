"""train-policy, and plan with what it made."""

import functools
import json

import pytest
from laws import SETTING
from policies import untrained

from shardcore.cli import main
from shardcore.core.access_statistics import Zipf
from shardcore.core.types import Table
from shardcore.io import files, model_files
from shardcore.search.learned.policy import read_policy, write_policy
from shardcore.search.learned.training import PolicyProblems

QUICK = "--devices 2 --min-tables 4 --max-tables 6 --max-dim 16 --problems 2 --rounds 2".split()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "pool.json"
    files.write_pool(path, [Table(f"t{i}", 500 + 40 * i, 16, 2.0 + i % 5, Zipf(1.0)) for i in range(40)])
    return path


def test_a_policy_is_trained_and_plans_with_and_without_a_budget(stored, model, pool, capsys, monkeypatch):
    few = functools.partial(PolicyProblems, validation=4, test=4)  # they take longest, and have no option
    monkeypatch.setattr("shardcore.search.learned.training.PolicyProblems", few)
    problem, policy, plan = (str(stored / n) for n in ("problem.json", "policy", "plan.json"))
    given = f"train-policy dreamshard_direct --model {model} --pool {pool} --like {problem} --out {policy}"
    assert main([*given.split(), *QUICK]) == 0
    output = capsys.readouterr()
    assert "round 2: validation_cost" in output.err and json.loads(output.out)["test_solved"] == 1
    meta = read_policy(policy).meta
    assert meta["provenance"] == {"model_digest": model_files.model_digest(model)}
    assert meta["config"]["problems_drawn"]["devices"] == len(files.read_problem(problem).topology)
    ms = []
    for more in ([], ["--budget-evals", "16"], ["--algorithm", "dreamshard_direct_columns"]):
        assert main(["plan", problem, "--model", str(model), "--policy", policy, *more, "--out", plan]) == 0
        ms.append(files.read_plan(plan, files.read_problem(problem)).provenance)
    assert ms[0]["policy_digest"] == model_files.model_digest(policy, "policy")
    assert ms[0]["algorithm"] == ms[0]["policy"] == "dreamshard_direct"
    assert ms[1]["predicted_ms"] <= ms[0]["predicted_ms"]
    assert "by dreamshard_direct_columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--algorithm", "dreamshard"], "algorithm 'dreamshard' needs a policy 'dreamshard', and none was"),
        (["--algorithm", "autoshard_columns"], "algorithm 'autoshard_columns' needs a policy 'autoshard'"),
        (["--policy", "POLICY", "--algorithm", "anneal"], "algorithm 'anneal' takes no policy"),
        (["--policy", "POLICY"], "policy 'autoshard' was trained for hardware 'other'; the cost model is"),
        (
            ["--policy", "nowhere"],
            "nowhere holds no policy.json; give the folder of a trained policy by --policy",
        ),
        (
            ["--policy", "MODEL"],
            "model holds no policy.json; give the folder of a trained policy by --policy",
        ),
    ],
)
def test_a_policy_that_is_missing_or_of_no_use_is_refused_in_one_line(
    arguments, message, stored, model, capsys
):
    write_policy(stored / "policy", untrained("autoshard", hardware="other"))
    named = {"POLICY": str(stored / "policy"), "MODEL": str(model)}
    arguments = [named.get(a, a) for a in arguments]
    asked = ["plan", str(stored / "problem.json"), "--model", str(model), "--out", str(stored / "plan.json")]
    assert main([*asked, *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (stored / "plan.json").exists()


def test_groups_are_planned_by_a_policy_too(stored, model, capsys):
    write_policy(stored / "policy", untrained("dreamshard", hardware=SETTING.hardware))
    problem, policy, plan = (stored / name for name in ("problem.json", "policy", "plan.json"))
    given = f"plan {problem} --model {model} --groups 4 --policy {policy} --out {plan}"
    assert main(given.split()) == 0
    assert "by dreamshard" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, message",
    [
        (["alphashard"], "there is no policy 'alphashard'; known are dreamshard"),
        (
            ["autoshard", "--min-tables", "9", "--max-tables", "6"],
            "has max_tables 6; it needs its min_tables, 9, or more",
        ),
        (["autoshard", "--devices", "7"], "batch 256, which 7 devices do not divide evenly"),
        (["autoshard", "--min-tables", "30", "--max-tables", "60"], "half of the pool is for training"),
    ],
)
def test_training_refuses_what_it_cannot_do(more, message, stored, model, pool, capsys):
    asked = ["train-policy", *more, "--model", str(model), "--pool", str(pool)]
    assert main([*asked, "--out", str(stored / "policy")]) == 1
    assert message in capsys.readouterr().err and not (stored / "policy").exists()


def test_what_is_trained_needs_a_folder_before_it_begins(stored, model, pool, capsys):
    out = str(stored / "problem.json")
    for asked in (
        ["train-policy", "autoshard", "--model", str(model), "--pool", str(pool), *QUICK],
        ["train", str(stored)],
    ):
        assert main([*asked, "--out", out]) == 1
        output = capsys.readouterr().err
        assert output == f"error: --out {out} is a file; it needs to be a folder\n"
