"""The commands of docs/plan.md, as they are written there, with a model of the batch of params.yaml."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from laws import comm_samples, compute_samples, linear_law

from shardcore.cli import main
from shardcore.core.types import Setting
from shardcore.cost import fit, neural
from shardcore.io import files
from shardcore.search import Budget

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/plan.md").read_text()
COMMANDS = list(
    dict.fromkeys(
        re.findall(r"^python -m shardcore ([^#\n]+)", PAGE, re.M)
        + re.findall(r"`python -m shardcore (problem [^`]+)`", PAGE)
    )
)
BATCH = yaml.safe_load((ROOT / "params.yaml").read_text())["setting"]["batch"]
ELSEWHERE = {
    "train-policy": "PAPER",
    "plan PROBLEM.json": "PAPER",
    "provision": "offers",
    "--towers": "several hosts",
    "--groups": "smaller batches",
    "hot-rows": "sequences",
}
"""Commands of the page that need more than its first example, and what."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "model"
    setting = Setting("law", BATCH)
    made = fit.train(
        compute_samples(linear_law, 60, setting),
        comm_samples(20, setting=setting),
        setting,
        fit.FitConfig(epochs=1),
    ).model
    measured = {**made.meta["ranges"], "batch": (BATCH, BATCH)}
    neural.save(replace(made, meta={**made.meta, "ranges": measured}), folder)
    return folder


def run(command: str) -> int:
    return main(shlex.split(command))


@pytest.mark.parametrize("command", [c for c in COMMANDS if not any(word in c for word in ELSEWHERE)])
def test_the_page_runs_as_written(command, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardcore.search.portfolio.DEFAULT", Budget(evals=1000))  # ten seconds less
    for name in ("data/model", "model"):
        shutil.copytree(model, tmp_path / name)
    [problem] = [text for text in re.findall(r"```json\n(.*?)```", PAGE, re.S) if "shardcore/problem" in text]
    Path("p.json").write_text(problem)
    if "old.json" in command:
        assert run("plan p.json --model data/model --algorithm size_greedy --out old.json") == 0
        now = json.loads(problem)
        now["tables"][0]["rows"] *= 2
        Path("now.json").write_text(json.dumps(now))
    assert run(command) == 0, capsys.readouterr().err
    out = re.search(r"--out (\S+)", command)
    if out and "plan.json" in out[1]:
        start = "now.json" if "now.json" in command else "p.json"
        assert files.read_plan(out[1], files.read_problem(start)).placements
    elif out:
        assert files.read_problem(out[1]).tables


def test_the_page_has_these_commands():
    assert {c.split()[0] for c in COMMANDS} >= {"plan", "problem", "heat", "tiers", "hot-rows", "provision"}
    assert all(any(word in c for c in COMMANDS) for word in ELSEWHERE)
