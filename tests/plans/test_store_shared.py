"""Several publishers of one folder: turns, pruning, links, and leftovers of killed ones."""

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from publishing import plan, publish

from shardcore.core.errors import ShardCoreError
from shardcore.io import files
from shardcore.plans import store

PUBLISHER = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from publishing import publish
from shardcore.io import files
problem = files.read_problem(sys.argv[1])
for i in range(int(sys.argv[2])):
    decided = publish(Path(sys.argv[1]).parent, problem, i % 4, decided_at=float(i), reason=sys.argv[2])
    print(decided.id, flush=True)
"""


def start_publisher(problem, folder, times):
    path = folder / "problem.json"
    files.write_problem(path, problem)
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(path), str(times), str(here), str(here.parent)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_publishers_at_once_lose_no_decision(problem, tmp_path):
    both = [start_publisher(problem, tmp_path, n) for n in (20, 21)]
    said = [p.communicate(timeout=60)[0].split() for p in both]
    found = [d.id for d in store.decision_history(tmp_path, "small")]
    assert len(found) == 41 and set(found) == {*said[0], *said[1]}


HOLDER = """
import sys, time
from shardcore.plans import store
with store.publishing_lock(sys.argv[1], "small"):
    print("mine", flush=True)
    time.sleep(600)
"""


def test_whose_turn_it_is_is_named_where_it_does_not_end(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(
            ShardCoreError,
            match=rf"'small'.*{tmp_path}/small/.turn .*: "
            rf"process {holder.pid} on \S+ since \d+-",
        ):
            with store.publishing_lock(tmp_path, "small", patience_s=0.1):
                pytest.fail("it was the other's turn")
        with store.publishing_lock(
            tmp_path, "another", patience_s=0.1
        ):  # problems wait for each other in no case
            pass
        holder.kill()
    publish(tmp_path, problem, 1)


def test_what_killed_publishers_left_goes_with_the_next_publish(problem, tmp_path):
    done = publish(tmp_path, problem, 0, "first")
    home = tmp_path / "small"
    left = [
        home / f"versions/{done.current}/.plan.json.77.tmp",
        home / "decisions/.x.json.77.tmp",
        home / ".current.77.tmp",
        home / "versions/0123456789abcdef/.problem.json.77.tmp",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("cut sho")
    with store.publishing_lock(tmp_path, "small"):
        assert store.prune_versions(tmp_path, "small", 2) == ["0123456789abcdef"]
    assert not list(home.rglob(".*.tmp")) and not (home / "versions/0123456789abcdef").exists()
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 0)


@pytest.mark.parametrize("name", ["latest", "0123456789abcdef"])
def test_pruning_follows_no_link(problem, tmp_path, name):
    """A link to the current version, which a user made, must not cost the plan."""
    done = publish(tmp_path, problem, 0, "first")
    link = tmp_path / "small/versions" / name
    link.symlink_to(done.current)
    assert store.prune_versions(tmp_path, "small", 2) == []
    assert link.is_symlink() and store.load_plan(tmp_path, "small")[0] == plan(problem, 0)


def test_what_belongs_to_another_is_neither_pruned_nor_read(problem, tmp_path):
    other = replace(problem, name="other")
    mine, theirs = publish(tmp_path, problem, 0, "first"), publish(tmp_path, other, 1, "first")
    (tmp_path / "aside").mkdir()
    for moved, link in (("small/versions", "small/versions"), ("other", "other")):
        (tmp_path / moved).rename(tmp_path / "aside" / moved.replace("/", "-"))
        (tmp_path / link).symlink_to(tmp_path / "aside" / moved.replace("/", "-"))
    with pytest.raises(ShardCoreError, match="small/versions is a symbolic link"):
        store.prune_versions(tmp_path, "small", 2)
    with pytest.raises(ShardCoreError, match="other is a symbolic link"):
        store.prune_versions(tmp_path, "other", 2)
    assert (tmp_path / "aside/small-versions" / mine.current).exists()
    assert (tmp_path / "aside/other/versions" / theirs.current).exists()


def test_a_turn_writes_through_no_link(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "small/.turn").unlink()
    (tmp_path / "small/.turn").symlink_to(victim)
    with (
        pytest.raises(ShardCoreError, match="cannot use .*small/.turn"),
        store.publishing_lock(tmp_path, "small"),
    ):
        pass
    assert victim.read_text() == "precious"


def test_files_for_people_leave_nothing_behind_but_what_others_write_now(tmp_path):
    left, others = tmp_path / ".report.md.77.tmp", tmp_path / ".report.md.78.tmp"
    for path in (left, others):
        path.write_text("cut sho")
    with open(others) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        store.write_store_file(tmp_path, "report.md", b"whole")
        assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
            "report.md": "whole",
            others.name: "cut sho",
        }
    store.write_store_file(tmp_path, "report.md", b"whole")
    assert os.listdir(tmp_path) == ["report.md"]


@pytest.mark.parametrize("name", ["versions", "decisions"])
def test_nothing_is_written_through_a_link(problem, tmp_path, name):
    outside, home = tmp_path / "outside", tmp_path / "plans" / problem.name
    outside.mkdir()
    home.mkdir(parents=True)
    (home / name).symlink_to(outside)
    with pytest.raises(ShardCoreError, match="is a symbolic link"):
        publish(tmp_path / "plans", problem, 0)
    assert not list(outside.iterdir())
