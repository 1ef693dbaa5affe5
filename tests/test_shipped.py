"""Results that `dvc pull` brings to a clone, and provenance with a changed dvc.lock."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardcore.cost import neural
from shardcore.io import dataset, files
from tasks.commit import git_commit

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / ".dvc/shipped/files/md5"
# The lock as committed, where git has it: a `make run` in the same clone writes its own.
COMMITTED = subprocess.run(["git", "show", "HEAD:dvc.lock"], cwd=ROOT, capture_output=True, text=True)
LOCK = yaml.safe_load(COMMITTED.stdout or (ROOT / "dvc.lock").read_text())["stages"]
OUTS = {out["path"]: out for stage in LOCK.values() for out in stage["outs"]}
MOST_BYTES = 4 << 20


def git(folder, *arguments):
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_shipped_remote_is_small_and_has_all_results_that_dvc_keeps():
    held = {f"{p.parent.name}{p.name}": p for p in SHIPPED.rglob("*") if p.is_file()}
    assert sum(p.stat().st_size for p in held.values()) < MOST_BYTES
    wanted = {out["md5"] for path, out in OUTS.items() if path != "data/evaluation/metrics.json"}
    wanted |= {
        entry["md5"]
        for md5 in wanted
        if md5.endswith(".dir")
        for entry in yaml.safe_load(held[md5].read_text())
    }
    assert wanted <= set(held)


def test_the_lock_names_every_stage_and_result_and_artifacts_are_among_them():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    assert set(LOCK) == set(stages["stages"])
    for name, stage in stages["stages"].items():
        listed = [out for kind in ("outs", "plots", "metrics") for out in stage.get(kind, ())]
        paths = {out if isinstance(out, str) else next(iter(out)) for out in listed}
        assert {out["path"] for out in LOCK[name]["outs"]} == paths
    assert {artifact["path"] for artifact in stages["artifacts"].values()} <= set(OUTS)


@pytest.mark.long
def test_pull_after_a_clone_brings_measurements_and_a_model_that_plans(tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, text=True, check=True, capture_output=True
    ).stdout.split("\0")
    for name in (n for n in listed if n.startswith((".dvc", "dvc.", "params.yaml", "data/"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", "-q")
    pulled = subprocess.run(
        [sys.executable, "-m", "dvc", "pull"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert pulled.returncode == 0, pulled.stderr
    model = neural.load(tmp_path / "data/model")
    measured = dataset.read_compute_samples(tmp_path / "data/measurements", model.setting)
    wanted = yaml.safe_load((ROOT / "params.yaml").read_text())["measure"]["compute_samples"]
    assert len(measured) >= wanted and len(files.read_pool(tmp_path / "data/pool.json")) == 856


def test_a_changed_lock_does_not_make_a_commit_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_commit() == "no git"
    for name in ("dvc.lock", "code.py"):
        (tmp_path / name).write_text("1")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        git(tmp_path, *command)
    (tmp_path / "dvc.lock").write_text("2")
    commit = git_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "code.py").write_text("2")
    assert git_commit() == f"{commit}-dirty"
