"""Overrides of params.yaml, what a refresh that pushes asks for before anything runs, and what it says of
stages."""

import fcntl
import json
import os
import subprocess
import sys

import dvc.lock
import pytest
import yaml

from flows.refresh import parse_override
from flows.tables import TablesConfig
from flows.train import TrainConfig
from shardcore.core.errors import ShardCoreError
from shardcore.stages.evaluate import EvaluateConfig
from shardcore.stages.measure_config import MeasureConfig
from tasks import console, refresh
from tasks.publish import PublishConfig
from tasks.refresh import override_params, require_pushable, stage_heading, stages_of_refresh

PARAMS = """\
# of the stages
tables:
  tables: 40        # of the pool
  seed: 0
"""
SECTIONS = {
    "tables": TablesConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "measure": MeasureConfig,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path


def test_overrides_are_edits_that_keep_all_else(folder):
    assert override_params({"tables": {"tables": 50, "source": "x"}, "train": {"epochs": 4}}, SECTIONS)
    text = (folder / "params.yaml").read_text()
    assert (
        text.startswith("# of the stages\n")
        and "tables: 50        # of the pool\n" in text
        and "seed: 0" in text
    )
    assert "source: x" in text and "train:\n  epochs: 4" in text
    assert not override_params({"tables": {"tables": 50}}, SECTIONS) and not override_params({}, SECTIONS)
    assert (folder / "params.yaml").read_text() == text


def test_an_override_in_a_section_leaves_what_is_beside_it(folder):
    kernels = {"max_repeats": 6, "min_repeats": 3}
    (folder / "params.yaml").write_text(yaml.safe_dump({"measure": {"kernels": kernels}}))
    assert override_params(parse_override("measure.kernels.tolerance=0.1"), SECTIONS)
    assert yaml.safe_load((folder / "params.yaml").read_text())["measure"]["kernels"] == {
        **kernels,
        "tolerance": 0.1,
    }
    for text in ("measure=3", "measure.=3", "measure.seed"):
        with pytest.raises(ShardCoreError, match="needs the form SECTION.KEY=VALUE"):
            parse_override(text)


def test_nulls_and_lines_that_nobody_changes_stay_as_they_are(folder):
    before = PARAMS + "train_policy:\n  algorithm: null   # dreamshard\n  seed: 0\n"
    (folder / "params.yaml").write_text(before)
    assert override_params({"tables": {"tables": 50}}, SECTIONS)
    assert (folder / "params.yaml").read_text() == before.replace("tables: 40", "tables: 50")


@pytest.mark.parametrize(
    "overrides, named",
    [
        ({"tables": {"tables": 50}, "trains": {}}, "unknown section 'trains'; known are tables, train"),
        ({"tables": {"tables": 50}, "train": {"epoch": 4}}, "section 'train' has an unknown key 'epoch'"),
        ({"tables": {"tables": 50}, "train": {"epochs": "many"}}, "epochs is 'many'; it needs to be a "),
        ({"train": 4}, "section 'train' is 4; it needs to be an object"),
        ({"evaluate": {"problems": 0}}, "section 'evaluate' has problems 0; it needs 1 to"),
    ],
)
def test_what_is_wrong_in_one_override_leaves_all_unwritten(folder, overrides, named):
    with pytest.raises(ShardCoreError, match=named):
        override_params(overrides, SECTIONS)
    assert (folder / "params.yaml").read_text() == PARAMS


def test_an_override_has_to_agree_with_what_stands_beside_it(folder):
    """max_moved_tables needs an algorithm that anneals, as the default one is."""
    (folder / "params.yaml").write_text("publish:\n  algorithm: size_greedy\n")
    with pytest.raises(ShardCoreError, match="max_moved_tables 3 and algorithm 'size_greedy'"):
        override_params({"publish": {"max_moved_tables": 3}}, {"publish": PublishConfig})


def test_a_push_needs_a_branch_and_a_remote(folder):
    with pytest.raises(ShardCoreError, match="on no branch of a git repository"):
        require_pushable()
    subprocess.run(["git", "init", "-q"], check=True)
    with pytest.raises(ShardCoreError, match="DVC has no remote to push to; `dvc remote add --default"):
        require_pushable()
    # DVC's folder of a clone.
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text(
        "[core]\n    remote = shipped\n['remote \"shipped\"']\n    url = shipped\n"
    )
    with pytest.raises(ShardCoreError, match="DVC has no remote to push to"):
        require_pushable()


def test_a_refresh_says_which_stage_of_how_many_and_which_had_nothing_to_do():
    assert stages_of_refresh("measure") == ("tables", "measure")
    assert stages_of_refresh("train_policy") == ("tables", "measure", "train", "train_policy")
    assert stages_of_refresh("evaluate") == ("tables", "measure", "train", "evaluate", "promote", "publish")
    assert (
        stage_heading("measure", "evaluate") == "stage 2/6: measure"
        and stage_heading("promote", "evaluate") == "stage 5/6: promote"
    )
    assert stage_heading("tables", "train", runs=False) == "stage 1/3: tables, nothing changed"


def test_what_a_stage_wants_shown_is_shown_and_the_rest_is_for_the_log(monkeypatch):
    shown = []
    monkeypatch.setattr(console, "show", lambda *a: shown.append(a))
    line = "10:51:54.850 | WARNING | Task run 'train-model' - few samples"
    output = f'Running stage \'train\':\n{console._MARK}["warning", "few samples", 0.0]\n{line}\n'
    process = subprocess.Popen(
        [sys.executable, "-c", f"print({output!r})"], stdout=subprocess.PIPE, text=True
    )
    assert list(refresh._log_lines(process)) == ["Running stage 'train':", "few samples", ""]
    assert shown == [("warning", "few samples", 0.0)] and process.wait() == 0


# --- why dvc repro fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_dvc_s_lists_of_who_uses_what_forget_who_has_ended(tmp_path, monkeypatch, held):
    """Though nobody has reaped it; but not who works. One that a kill cut short is begun anew."""
    monkeypatch.chdir(tmp_path)
    refresh.remove_ended_dvc_users()  # there is none
    assert not list(tmp_path.iterdir())
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    users, here = tmp_path / ".dvc/tmp/rwlock", {"pid": os.getpid(), "cmd": "works"}
    dead = {"pid": ended.pid, "cmd": "dvc repro"}
    users.write_text(
        json.dumps({"write": {"/a": dead, "/b": here}, "read": {"/c": [dead], "/d": [dead, here]}})
    )
    with open(users.with_name("rwlock.lock"), "a") as guard:
        if held:
            fcntl.flock(guard, fcntl.LOCK_EX)
        refresh.remove_ended_dvc_users()
    found = json.loads(users.read_text())
    assert found == (
        {"write": {"/b": here}, "read": {"/d": [here]}}
        if not held
        else {"write": {"/a": dead, "/b": here}, "read": {"/c": [dead], "/d": [dead, here]}}
    )
    for cut in ("", '{"write": {"/a": {"pi', "[]", '{"write": {"/a": 3}, "read": {}}'):
        users.write_text(cut)
        refresh.remove_ended_dvc_users()
        assert users.read_text() == "{}"
    ended.wait()


def test_who_holds_dvc_s_locks_is_said(tmp_path, monkeypatch):
    """Both DVC's message on a stage of another process, and that on another DVC."""
    monkeypatch.chdir(tmp_path)
    run = [sys.executable, "-m", "dvc"]
    subprocess.run([*run, "init", "--no-scm", "--quiet"], check=True)
    (tmp_path / "dvc.yaml").write_text("stages:\n  tables:\n    cmd: 'true'\n    outs:\n    - pool\n")
    other = {"write": {str(tmp_path / "pool"): {"pid": os.getpid(), "cmd": "dvc repro of another"}}}
    (tmp_path / ".dvc/tmp").mkdir(exist_ok=True)
    (tmp_path / ".dvc/tmp/rwlock").write_text(json.dumps(other))
    output = subprocess.run(
        [*run, "repro", "tables"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout
    lines = output.splitlines()
    errors = lines[next(i for i, line in enumerate(lines) if line.lower().startswith("error: ")) :]
    reason = refresh.dvc_error_reason(errors)
    assert "pool' is busy" in reason and f"process {os.getpid()} (dvc repro of another); wait until" in reason
    (tmp_path / ".dvc/tmp/lock").write_text(" 4321\n")
    assert refresh.dvc_error_reason([f"ERROR: {dvc.lock.FAILED_TO_LOCK_MESSAGE}"]) == (
        ".dvc/tmp/lock is held by process 4321, another DVC in this folder; wait until that has ended, "
        "or end it"
    )
    assert (
        refresh.dvc_error_reason(["error: 7 is too few", "ERROR: failed to reproduce"]) == "7 is too few"
        and refresh.dvc_error_reason([]) == ""
    )
