"""The check of DVC's cache before it is used."""

import contextlib
import hashlib
import json
import logging
import shutil
import subprocess
import sys

import pytest

from shardcore.core.errors import ShardCoreError
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
    cache.remove_damaged_entries(logging.getLogger())
    assert cached(copy) == before and not caplog.records
    [two] = (p for p, content in before.items() if content == b"2\n")
    for damaged in (two, copy / "many/two"):
        damaged.chmod(0o644)
        damaged.write_bytes(b"9\n")
    cache.remove_damaged_entries(logging.getLogger())
    assert "of many/two was damaged and is removed" in caplog.text
    del before[two]
    assert cached(copy) == before
    assert not (copy / "many/two").exists() and (copy / "many/three").exists() and (copy / "one").exists()


def test_what_somebody_changed_in_the_working_tree_stays(copy):
    [one] = (p for p, content in cached(copy).items() if content == b"1\n")
    one.chmod(0o644)
    one.write_bytes(b"8\n")
    (copy / "one").write_bytes(b"mine\n")
    cache.remove_damaged_entries(logging.getLogger())
    assert not one.exists() and (copy / "one").read_bytes() == b"mine\n"


def test_a_damaged_list_of_a_folder_goes_and_its_files_stay(copy):
    [listed] = (p for p in cached(copy) if p.name.endswith(".dir"))
    listed.chmod(0o644)
    listed.write_bytes(listed.read_bytes()[:-3])
    cache.remove_damaged_entries(logging.getLogger())
    assert not listed.exists() and len(cached(copy)) == 3


def test_without_a_lock_there_is_nothing_to_check(tmp_path):
    with contextlib.chdir(tmp_path):
        cache.remove_damaged_entries(logging.getLogger())


LOCKED = (
    "schema: '2.0'\nstages:\n  make:\n    cmd: x\n    outs:\n    - path: {}\n      hash: md5\n      md5: {}\n"
)


@pytest.mark.parametrize(
    "content, message",
    [
        (LOCKED.format("one", "xx/../../../precious"), "has md5 'xx/../../../precious'; it needs 32 hex"),
        (LOCKED.format("one", "a" * 31), "it needs 32 hex digits"),
        (LOCKED.format("one", "A" * 32), "it needs 32 hex digits"),
        (LOCKED.format("../precious", "a" * 32), "has path '../precious'; it needs to be one in the project"),
        (LOCKED.format("/etc/passwd", "a" * 32), "has path '/etc/passwd'"),
        ("<<<<<<< HEAD\n" + LOCKED + "=======\n>>>>>>> other\n", "is not YAML"),
        ("stages: 3", "stages is 3, which DVC did not write"),
        ("stages: {make: {outs: [{path: one}]}}", "has md5 None"),
        ("stages: {make: {outs: [3]}}", "an out is 3"),
        ("", "it is None"),
        ("[]", "it is []"),
        ("a: &x [*x]", "has an alias"),
        (b"\xff\xfe", "no text in UTF-8"),
    ],
)
def test_a_lock_that_dvc_did_not_write_costs_no_file(tmp_path, monkeypatch, content, message):
    """The entry that such a hash names would be removed, as its content has another one."""
    project = tmp_path / "project"
    (project / ".dvc/cache/files/md5/xx").mkdir(parents=True)
    (project / "link").symlink_to(tmp_path)
    for path in (tmp_path / "precious", project / ".dvc/cache/precious", project / ".dvc/precious"):
        path.write_text("precious")
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    monkeypatch.chdir(project)
    cache.LOCK.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ShardCoreError) as error:
        cache.remove_damaged_entries(logging.getLogger())
    assert message in str(error.value) and "dvc.lock" in str(error.value)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.name != "dvc.lock") == before


def test_what_lies_behind_a_link_is_not_removed(copy):
    """Data may lie on another disk. A damaged entry goes, its copy behind the link stays."""
    (copy / "disk").mkdir()
    disk = (copy / "disk").rename(copy.parent / "disk")
    (copy / "many/two").rename(disk / "two")
    shutil.rmtree(copy / "many")
    (copy / "many").symlink_to(disk)
    [two] = (p for p, content in cached(copy).items() if content == b"2\n")
    for damaged in (two, disk / "two"):
        damaged.chmod(0o644)
        damaged.write_bytes(b"9\n")
    cache.remove_damaged_entries(logging.getLogger())
    assert not two.exists() and (disk / "two").read_bytes() == b"9\n"


def test_a_folder_of_dvcs_that_leads_out_costs_no_file(copy):
    """The list of a folder's files is an entry of the cache, which anybody may write to who can write
    there."""
    outside = copy.parent / "precious"
    outside.write_text("precious")
    listed = json.dumps([{"md5": "b" * 32, "relpath": "../../precious"}]).encode()
    md5 = hashlib.md5(listed).hexdigest()
    entry = copy / ".dvc/cache/files/md5" / md5[:2] / f"{md5[2:]}.dir"
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_bytes(listed)
    cache.LOCK.write_text(LOCKED.format("many", f"{md5}.dir"))
    with pytest.raises(ShardCoreError, match="has path .*precious'; it needs to be one in the project"):
        cache.remove_damaged_entries(logging.getLogger())
    assert outside.exists()


def test_a_result_behind_links_in_a_circle_costs_nothing(copy):
    (copy / "loop").symlink_to("loop")
    cache.LOCK.write_text(LOCKED.format("loop/x", "a" * 32))
    before = cached(copy)
    cache.remove_damaged_entries(logging.getLogger())
    assert cached(copy) == before and (copy / "loop").is_symlink()


def test_a_config_that_dvc_refuses_is_named(copy):
    (copy / ".dvc/config").write_text("[cache\n")
    with pytest.raises(ShardCoreError, match="DVC does not say where its cache is: .*; see .dvc/config"):
        cache.remove_damaged_entries(logging.getLogger())


def test_an_entry_behind_a_link_is_not_removed(copy):
    """A link in the cache leads out of it. The file there has another content than the hash says."""
    outside = copy.parent / "elsewhere"
    outside.mkdir()
    (outside / ("c" * 30)).write_text("somebody's")
    (copy / ".dvc/cache/files/md5/cc").symlink_to(outside)
    cache.LOCK.write_text(LOCKED.format("one", "c" * 32))
    cache.remove_damaged_entries(logging.getLogger())
    assert (outside / ("c" * 30)).read_text() == "somebody's"


@pytest.mark.parametrize("path", [".", ".git/config", ".dvc", "./.git/config"])
def test_no_result_is_the_project_itself_or_hidden(copy, path):
    """Such a file would be removed if a damaged entry had its content."""
    (copy / ".git").mkdir()
    (copy / ".git/config").write_text("precious")
    listed = json.dumps([{"md5": "b" * 32, "relpath": ".git/config"}]).encode()
    md5 = hashlib.md5(listed).hexdigest()
    entries = {f"{md5[:2]}/{md5[2:]}.dir": listed, f"bb/{'b' * 30}": b"precious"}
    for name, content in entries.items():
        (copy / ".dvc/cache/files/md5" / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / ".dvc/cache/files/md5" / name).write_bytes(content)
    cache.LOCK.write_text(LOCKED.format(path, f"{md5}.dir" if path == "." else "b" * 32))
    with pytest.raises(ShardCoreError, match="has path .*; it needs to be one in the project"):
        cache.remove_damaged_entries(logging.getLogger())
    assert (copy / ".git/config").read_text() == "precious"
