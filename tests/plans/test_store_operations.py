"""The model check of the store: every operation of publishing fails, or is a killed publisher's last."""

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import os
import signal
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from publishing import plan
from stored_pages import stored_page

from shardcore.core.errors import ShardCoreError
from shardcore.io import files
from shardcore.plans import places, store
from shardcore.plans.decisions import Decision

OF_FOLDERS = ("link", "mkdir", "remove", "rename", "replace", "rmdir", "truncate", "unlink")
FOLDER = [
    (builtins, "open"),
    (io, "open"),
    (fcntl, "flock"),
    *((os, name) for name in (*OF_FOLDERS, "fsync", "listdir", "scandir", "stat")),
]
OBJECT_STORE = [
    (MemoryFileSystem, name) for name in ("cat_file", "info", "ls", "open", "pipe_file", "rm", "rm_file")
]
CHANGES = {*OF_FOLDERS, "write", "open", "pipe_file", "rm", "rm_file"}
ALL = CHANGES | {"cat_file", "flock", "fsync", "info", "listdir", "ls", "read", "scandir", "stat"}


class Killed(BaseException):
    """An end that no publisher catches, as of one that has nothing on this machine."""


class HalfWriting:
    """A file whose writes are two operations each, after the first of which half of it is there."""

    def __init__(self, file, act):
        self._file, self._act = file, act

    def write(self, content):
        self._act("write")
        done = self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._act("write")
        return done + self._file.write(content[len(content) // 2 :])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


@contextlib.contextmanager
def operations(root, act, kinds=ALL, after=False):
    """Calls act(number) before (or after) each operation of these kinds on a folder or an object store; it
    may raise or kill, and its own operations do not count. Nothing waits for a disk: who is killed loses
    nothing that the system has."""
    numbers, mine, busy = itertools.count(1), threading.get_ident(), []

    def acting(kind):
        if kind in kinds and not busy and threading.get_ident() == mine:
            busy.append(1)
            try:
                act(next(numbers))
            finally:
                busy.pop()

    def counted(real, name):
        def call(file, *args, **options):
            here = (
                isinstance(file, (int, HalfWriting, MemoryFileSystem))
                or "dir_fd" in options
                or str(root) in str(file)
            )
            writes = name == "open" and not set("wax+").isdisjoint(
                str(args[0] if args else options.get("mode", "r"))
            )
            kind = (
                name
                if name != "open" or isinstance(file, MemoryFileSystem)
                else "write"
                if writes
                else "read"
            )
            if here and not after:
                acting(kind)
            found = None if name == "fsync" else real(file, *args, **options)
            if here and after:
                acting(kind)
            return HalfWriting(found, acting) if here and kind == "write" else found

        return call

    with contextlib.ExitStack() as patched:
        for owner, name in OBJECT_STORE if str(root).startswith("memory:") else FOLDER:
            patched.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name), name)))
        yield


def publish_all(root, problem, device, number):
    """All that tasks/publish does with the store for a problem, in its order."""
    with store.publishing_lock(root, problem.name):
        if before := store.last_decision(root, problem.name):
            store.load_plan(root, problem.name)
        version = store.add_version(root, problem, plan(problem, device), {"total_ms": 1.0}, "<html>")
        store.record_decision(
            root,
            Decision(
                problem.name,
                "better" if before else "first",
                "of a test",
                version,
                version,
                files.problem_digest(problem),
                decided_at=float(number),
                parent=before and before.id,
            ),
        )
        store.prune_versions(root, problem.name, 2)
    store.write_store_file(root, "report.md", b"for people")


class Reader:
    """Reads when called; what it finds is whole, and never older than what it found before."""

    def __init__(self, root, problem):
        self.root, self.problem, self.number = root, problem, 0

    def __call__(self, _=None):
        decision = store.last_decision(self.root, "small")
        assert decision.decided_at >= self.number, f"decision {decision.decided_at} after {self.number}"
        self.number = decision.decided_at
        read, problem = store.load_plan(self.root, "small")
        assert problem == self.problem and store.plan_version(read, problem) == decision.current
        assert stored_page(self.root, "small", decision.current) == b"<html>"


def ending(number, how):
    """Kills the process or raises at an operation."""

    def act(now):
        if now == number:
            if how == signal.SIGKILL:
                os.kill(os.getpid(), how)
            raise how

    return act


def in_a_process(work):
    """Runs it in a process of its own; whether that completed, or else was killed."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(30)
            work()
            code = 0
        finally:
            os._exit(code)
    return {0: True, -signal.SIGKILL: False}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def in_this_process(work):
    """Tell if it completed. Any failure but a kill has to be a ShardCoreError."""
    try:
        work()
    except (ShardCoreError, Killed):
        return False
    return True


@pytest.fixture
def two(problem):
    """The problem with few tables, which are read fast."""
    return replace(problem, tables=problem.tables[1:3])


@pytest.fixture(params=["folder", "object store"])
def begun(request, two, tmp_path):
    """A store with plan 1 published, after plan 0."""
    root = {"folder": tmp_path / "plans", "object store": f"memory://{uuid.uuid4()}/plans"}[request.param]
    for number, device in enumerate((0, 1)):
        publish_all(root, two, device, number)
    return root


def test_at_each_operation_of_a_publisher_readers_find_the_old_plan_or_the_new_one(two, begun):
    reader, numbers = Reader(begun, two), []

    def read(_):
        reader()
        numbers.append(reader.number)

    for number, device in ((2, 2), (3, 0)):
        with operations(begun, read):
            publish_all(begun, two, device, number)
    assert numbers == sorted(numbers) and {n: numbers.count(n) > 5 for n in numbers} == {
        1.0: True,
        2.0: True,
        3.0: True,
    }


def test_a_reader_that_is_overtaken_at_any_operation_finds_a_plan_of_meanwhile(two, begun):
    """Three versions are published at one of its operations, so the one that it was at is gone."""
    number, devices = 1, itertools.cycle((2, 3, 0, 1))
    for at in range(1, 100):
        before, overtaken = store.load_plan(begun, "small")[0], []

        def publish_three(now, at=at, before=before, overtaken=overtaken):
            nonlocal number
            if now == at:
                overtaken.append(before)
                for device in itertools.islice(devices, 3):
                    number += 1
                    publish_all(begun, two, device, number)
                    overtaken.append(plan(two, device))

        with operations(begun, publish_three):
            found, problem = store.load_plan(begun, "small")
        if not overtaken:
            break
        assert found in (before, overtaken[-1]) and problem == two
    assert 5 < at < 99


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "begun, how, kinds, after",
    [
        pytest.param("folder", signal.SIGKILL, CHANGES, False, marks=pytest.mark.long),
        pytest.param(
            "folder", OSError(errno.EIO, "Input/output error"), CHANGES, False, marks=pytest.mark.long
        ),
        pytest.param("folder", OSError(errno.EIO, "Input/output error"), ALL, False, marks=pytest.mark.long),
        ("object store", Killed(), CHANGES, False),
        pytest.param("object store", OSError("no answer"), ALL, False, marks=pytest.mark.long),
        pytest.param("object store", OSError("no answer"), ALL, True, marks=pytest.mark.long),
    ],
    ids=[
        "folder, killed",
        "folder, a change fails",
        "folder, fails",
        "object store, killed",
        "object store, fails",
        "object store, done and fails",
    ],
    indirect=["begun"],
)
def test_whatever_ends_a_publisher_readers_find_a_whole_state_and_the_next_one_completes(
    two, begun, how, kinds, after
):
    """At each operation in turn, of a publisher that adds a plan and removes the last but one. The next
    publisher publishes the plan that was only begun to be added, or to be removed."""
    run, reader, ended, unhindered = (
        in_a_process if how == signal.SIGKILL else in_this_process,
        Reader(begun, two),
        [],
        [],
    )
    with operations(begun, unhindered.append, kinds, after):
        publish_all(begun, two, 2, 2)
    before, now = 1, 2
    for at in range(1, 500):
        new = min({0, 1, 2} - {before, now})

        def publish(at=at, new=new):
            with operations(begun, ending(at, how), kinds, after):
                publish_all(begun, two, new, 10 * at)

        ended.append(not run(publish))
        reader()
        switched = reader.number == 10 * at
        assert switched or ended[-1]
        before, now = (new, before) if switched else (now, new)
        with operations(begun, reader, {"replace", "rename", "unlink", "rmdir", "pipe_file", "rm_file"}):
            publish_all(begun, two, now, 10 * at + 1)
        reader()
        assert reader.number == 10 * at + 1 and store.load_plan(begun, "small") == (plan(two, now), two)
        assert places.list_names(store._problem_folder(begun, "small") / "versions") == sorted(
            store.plan_version(plan(two, device), two) for device in (before, now)
        )
        assert not isinstance(begun, Path) or not list((begun / "small").rglob(".*.tmp"))
        if at > len(unhindered) and not any(ended[-3:]):  # (some failures hinder nothing)
            break
    else:
        pytest.fail("publishing never ends")
