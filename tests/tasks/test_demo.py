"""The demo's parameters, and the clone in which it runs."""

import subprocess
from pathlib import Path

import pytest

from flows.refresh import SECTIONS, read_overrides
from shardcore.core.errors import ShardCoreError
from tasks import demo
from tasks.refresh import override_params

ROOT = Path(__file__).parents[2]


def git(folder, *arguments):
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A repository with one commit."""
    monkeypatch.setattr(demo, "copy_compiled_code", lambda *_: None)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "params.yaml").write_text("tables: {}\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        git(folder, *command)
    return folder


def test_the_demo_changes_parameters_that_there_are(tmp_path, monkeypatch):
    for name in ("params.yaml", "demo.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "problems").symlink_to(ROOT / "problems")
    monkeypatch.chdir(tmp_path)
    given = read_overrides(Path("demo.yaml"))
    assert override_params(given, SECTIONS) and not override_params(given, SECTIONS)
    assert all((ROOT / folder).is_dir() for folder in given["train"]["datasets"])
    assert 0 < given["measure"]["compute_samples"]  # a real measurement is part of it


@pytest.mark.parametrize("text", ["", "- 1\n", "measure: 3\n"])
def test_a_parameter_file_without_sections_is_refused(tmp_path, text):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ShardCoreError, match=r"some.yaml holds no sections with keys"):
        read_overrides(path)


def test_a_clone_keeps_its_data_and_follows_commits(source, tmp_path):
    folder = tmp_path / "clone"
    demo.clone(source, folder)
    (folder / "data").write_text("measured")
    (folder / "params.yaml").write_text("tables: {seed: 1}\n")
    demo.clone(source, folder)  # the same commit: it goes on
    assert (folder / "params.yaml").read_text() == "tables: {seed: 1}\n"
    (source / "params.yaml").write_text("tables: {seed: 2}\n")
    git(source, "commit", "-qam", "second")
    demo.clone(source, folder)
    assert (folder / "params.yaml").read_text() == "tables: {seed: 2}\n"
    assert (folder / "data").read_text() == "measured"


def test_a_clone_that_was_killed_is_made_again(source, tmp_path):
    (tmp_path / "clone.part/.git").mkdir(parents=True)
    demo.clone(source, tmp_path / "clone")
    assert (tmp_path / "clone/params.yaml").exists() and not (tmp_path / "clone.part").exists()


def test_a_folder_that_is_no_clone_is_refused_and_kept(source, tmp_path):
    """Git would take it for a part of a repository around it, and check out files there."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/mine").touch()
    with pytest.raises(ShardCoreError, match=r"clone is not a clone for the demo; remove it"):
        demo.clone(source, tmp_path / "clone")
    assert (tmp_path / "clone/mine").exists()


def test_without_a_repository_there_is_no_demo(tmp_path):
    with pytest.raises(ShardCoreError, match=r"git rev-parse failed in .*: fatal: not a git repository"):
        demo.clone(tmp_path, tmp_path / "clone")
