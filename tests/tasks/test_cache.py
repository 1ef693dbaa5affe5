"""What DVC has cached is checked before it is used."""

import contextlib
import logging
import shutil
import subprocess
import sys

import pytest

from tasks import cache

STAGES = """
stages:
  make:
    cmd: mkdir -p many && echo 1 > one && echo 2 > many/two && echo 3 > many/three
    outs: [one, many]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    (folder / "dvc.yaml").write_text(STAGES)
    for command in (["init", "--no-scm"], ["repro"]):
        subprocess.run([sys.executable, "-m", "dvc", *command, "--quiet"], cwd=folder, check=True)
    return folder


@pytest.fixture
def copy(repository, tmp_path):
    with contextlib.chdir(shutil.copytree(repository, tmp_path / "copy")):
        yield tmp_path / "copy"


def cached(folder):
    return {p: p.read_bytes() for p in (folder / ".dvc/cache/files").rglob("*") if p.is_file()}


def test_only_damaged_entries_and_their_copies_go(copy, caplog):
    before = cached(copy)
    assert len(before) == 4  # three files, and the list of a folder
    cache.remove_damaged(logging.getLogger())
    assert cached(copy) == before and not caplog.records
    [two] = (p for p, content in before.items() if content == b"2\n")
    for damaged in (two, copy / "many/two"):
        damaged.chmod(0o644)
        damaged.write_bytes(b"9\n")
    cache.remove_damaged(logging.getLogger())
    assert "of many/two was damaged and is removed" in caplog.text
    del before[two]
    assert cached(copy) == before
    assert not (copy / "many/two").exists() and (copy / "many/three").exists() and (copy / "one").exists()


def test_what_somebody_changed_in_the_working_tree_stays(copy):
    [one] = (p for p, content in cached(copy).items() if content == b"1\n")
    one.chmod(0o644)
    one.write_bytes(b"8\n")
    (copy / "one").write_bytes(b"mine\n")
    cache.remove_damaged(logging.getLogger())
    assert not one.exists() and (copy / "one").read_bytes() == b"mine\n"


def test_a_damaged_list_of_a_folder_goes_and_its_files_stay(copy):
    [listed] = (p for p in cached(copy) if p.name.endswith(".dir"))
    listed.chmod(0o644)
    listed.write_bytes(listed.read_bytes()[:-3])
    cache.remove_damaged(logging.getLogger())
    assert not listed.exists() and len(cached(copy)) == 3


def test_without_a_lock_there_is_nothing_to_check(tmp_path):
    with contextlib.chdir(tmp_path):
        cache.remove_damaged(logging.getLogger())
