"""Published plans: what readers see whatever publishers do, wherever the plans are."""

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcore import files
from shardcore.publish import decisions, places, store
from shardcore.publish.decisions import Decision
from shardcore.types import Placement, Plan, Shard, ShardCoreError


def plan(problem, device, **provenance):
    return Plan(tuple(Placement(Shard.whole(t), (device,)) for t in problem.tables), provenance)


def publish(root, problem, device, outcome="better", **fields):
    """A plan with everything on a device becomes current; the decision."""
    with store.turn(root, problem.name):
        version = store.add(root, problem, plan(problem, device), {"total_ms": float(device)}, f"<html>{device}</html>")
        before = store.last(root, problem.name)
        fields = {"reason": "of a test", "current": version, "candidate": version, "candidate_ms": float(device),
                  "problem_digest": files.problem_digest(problem), "parent": before and before.id, **fields}
        decision = Decision(problem.name, outcome, **fields)
        store.record(root, decision)
    return decision


def read_cost(root, version):
    return json.loads((places.place(root) / "small" / "versions" / version / "cost.json").read_bytes())


@pytest.fixture(params=["folder", "file URL", "object store"])
def root(request, tmp_path):
    return {"folder": tmp_path, "file URL": f"file://{tmp_path}/plans",
            "object store": f"memory://{uuid.uuid4()}/plans"}[request.param]


def test_versions_are_kept_and_the_pointer_moves(problem, root):
    first, second = publish(root, problem, 0, "first"), publish(root, problem, 1)
    assert first.current != second.current == store.current(root, "small") and store.names(root) == ["small"]
    assert store.load_plan(root, "small") == (plan(problem, 1), problem)
    assert store.load_plan(root, "small", first.current) == (plan(problem, 0), problem)
    assert read_cost(root, first.current) == {"total_ms": 0.0}
    assert store.load_page(root, "small", second.current) == b"<html>1</html>"
    assert list(store.history(root, "small")) == [second, first] and second.parent == first.id
    with pytest.raises(ShardCoreError, match=f"no version 'other'.*{first.current}"):
        store.load_plan(root, "small", "other")


def test_the_same_plan_is_one_version_and_a_version_never_changes(problem, root):
    version = store.add(root, problem, plan(problem, 0), {"total_ms": 1.0})
    assert store.add(root, problem, plan(problem, 0), {"total_ms": 2.0}, "<html>") == version
    assert read_cost(root, version) == {"total_ms": 1.0} and store.load_page(root, "small", version) is None


def test_a_version_that_no_decision_names_is_not_used(problem, root):
    publish(root, problem, 0, "first")
    store.add(root, problem, plan(problem, 1), {})
    assert store.load_plan(root, "small")[0] == plan(problem, 0)


def test_an_unpublished_problem_is_named(problem, root):
    publish(root, problem, 0, "first")
    store.write(root, "report.md", b"for people")
    with pytest.raises(ShardCoreError, match="'large'.*small"):
        store.load_plan(root, "large")


def test_versions_beyond_the_last_decisions_go_but_not_their_record(problem, root):
    decisions = [publish(root, problem, device) for device in range(4)]
    publish(root, problem, 3, "kept", candidate=decisions[0].current, reason="no better")
    gone = store.prune(root, "small", 3)
    assert gone == [decisions[1].current] and store.prune(root, "small", 3) == []
    assert len(list(store.history(root, "small"))) == 5
    assert store.load_plan(root, "small", decisions[0].current)[0] == plan(problem, 0)  # was considered of late
    assert store.load_plan(root, "small")[0] == plan(problem, 3)
    with pytest.raises(ShardCoreError, match="the last 1 decisions.*2 or more"):
        store.prune(root, "small", 1)


def test_what_cannot_be_decided_is_refused(problem, root):
    first = publish(root, problem, 0, "first")
    with pytest.raises(ShardCoreError, match=f"follows None, but {first.id} is the last one.*publish again"):
        publish(root, problem, 1, parent=None)
    with pytest.raises(ShardCoreError, match="decision has current 'elsewhere'; it needs 16 hex digits"):
        publish(root, problem, 1, current="elsewhere")
    with pytest.raises(ShardCoreError, match="no version 'e15e0000e15e0000'.*to make current"):
        publish(root, problem, 1, current="e15e0000e15e0000")
    with pytest.raises(ShardCoreError, match="outcome 'worse'; known are first, better"):
        publish(root, problem, 1, "worse")
    assert store.last(root, "small") == first


def test_a_decision_that_was_edited_or_is_missing_is_named(problem, tmp_path):
    first, second = publish(tmp_path, problem, 0, "first"), publish(tmp_path, problem, 1)
    path = tmp_path / "small/decisions" / f"{first.id}.json"
    path.write_text(path.read_text().replace("of a test", "of nothing"))
    assert store.last(tmp_path, "small") == second
    with pytest.raises(ShardCoreError, match=f"{first.id}.json does not match its name"):
        list(store.history(tmp_path, "small"))
    path.unlink()
    with pytest.raises(ShardCoreError, match=f"{first.id}.json"):
        list(store.history(tmp_path, "small"))


@pytest.mark.parametrize("name", ["current", "versions/{}/plan.json", "versions/{}/problem.json", "decisions/{}.json"])
@pytest.mark.parametrize("cut", [0, 0.5])
def test_what_was_cut_short_is_named_and_not_taken_for_nothing(problem, tmp_path, name, cut):
    done = publish(tmp_path, problem, 0, "first")
    path = tmp_path / "small" / name.format(done.id if "decisions" in name else done.current)
    path.write_bytes(path.read_bytes()[:int(cut * path.stat().st_size)])
    with pytest.raises(ShardCoreError, match=r"small/\S+ .*(cut short|there is no|No such file|needs 16 hex digits)"):
        store.load_plan(tmp_path, "small")
    if "versions" not in name:
        with pytest.raises(ShardCoreError):
            publish(tmp_path, problem, 1)


def test_what_the_system_refuses_is_named(problem, tmp_path):
    (tmp_path / "a file").write_text("")
    for root in (tmp_path / "a file", tmp_path / "a file/plans"):
        with pytest.raises(ShardCoreError, match="a file"):
            publish(root, problem, 0, "first")
        assert store.names(root) == [] and store.last(root, "small") is None
    (tmp_path / "small/current").mkdir(parents=True)
    with pytest.raises(ShardCoreError, match="cannot use .*small/current: it is a folder"):
        store.last(tmp_path, "small")


def test_a_pointer_to_a_version_is_read_as_the_first_decision(problem, tmp_path):
    """As plans were published before there were decisions."""
    version = store.add(tmp_path, problem, plan(problem, 0, predicted_ms=3.0, model_version="2"), {})
    (tmp_path / "small/current").write_text(f"{version}\n")
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 0)
    then = store.last(tmp_path, "small")
    assert (then.outcome, then.total_ms, then.provenance["model_version"]) == ("first", 3.0, "2")
    now = publish(tmp_path, problem, 1)
    assert list(store.history(tmp_path, "small")) == [now, then]


def test_a_repeated_decision_says_so(problem, tmp_path):
    first = publish(tmp_path, problem, 0, "first", decided_at=1.0)
    again = publish(tmp_path, problem, 0, "first", decided_at=2.0)
    other = publish(tmp_path, problem, 0, "kept", decided_at=2.0)
    assert again.repeats(first) and not other.repeats(first) and not first.repeats(None)


def test_a_plan_has_to_be_cheaper_by_more_than_the_threshold():
    assert decisions.worth_it(97.9, 100.0, 0.02) and not decisions.worth_it(98.1, 100.0, 0.02)
    assert decisions.worth_it(99.9, 100.0, 0.0) and not decisions.worth_it(100.0, 100.0, 0.0)
    assert decisions.worth_it(100.0, None, 0.02)  # of what is no plan any more nothing is kept


def test_a_decision_tells_what_the_version_that_it_chose_costs():
    of = {"problem": "p", "reason": "r", "problem_digest": "d" * 16, "candidate_ms": 1.0, "previous_ms": 2.0}
    assert Decision(outcome="better", current="a" * 16, candidate="a" * 16, **of).total_ms == 1.0
    assert Decision(outcome="kept", current="b" * 16, candidate="a" * 16, **of).total_ms == 2.0


def test_a_url_that_cannot_be_opened_is_named():
    with pytest.raises(ShardCoreError, match="plans are at unheard-of://x/y, which cannot be opened: .*unheard-of"):
        store.load_plan("unheard-of://x/y", "small")


def test_storage_that_does_not_answer_is_named():
    with pytest.raises(ShardCoreError, match="cannot use http://127.0.0.1:9/plans.*: ClientConnector"):
        store.load_plan("http://127.0.0.1:9/plans", "small")
    with pytest.raises(ShardCoreError, match="cannot use http://127.0.0.1:9/plans/report.md: "):
        store.write("http://127.0.0.1:9/plans", "report.md", b"for people")


PUBLISHER = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_store import publish
from shardcore import files
problem = files.read_problem(sys.argv[1])
for i in range(int(sys.argv[2])):
    print(publish(Path(sys.argv[1]).parent, problem, i % 4, decided_at=float(i), reason=sys.argv[2]).id, flush=True)
"""


def start_publisher(problem, folder, times):
    path = folder / "problem.json"
    files.write_problem(path, problem)
    here = Path(__file__).parent
    return subprocess.Popen([sys.executable, "-c", PUBLISHER, str(path), str(times), str(here), str(here.parent)],
                            stdout=subprocess.PIPE, text=True)


def test_two_publishers_at_once_lose_no_decision(problem, tmp_path):
    both = [start_publisher(problem, tmp_path, n) for n in (20, 21)]
    said = [p.communicate(timeout=60)[0].split() for p in both]
    found = [d.id for d in store.history(tmp_path, "small")]
    assert len(found) == 41 and set(found) == {*said[0], *said[1]}


HOLDER = """
import sys, time
from shardcore.publish import store
with store.turn(sys.argv[1], "small"):
    print("mine", flush=True)
    time.sleep(600)
"""


def test_whose_turn_it_is_is_named_where_it_does_not_end(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        with pytest.raises(ShardCoreError, match=rf"'small'.*{tmp_path}/small/.turn .*: process {holder.pid} on \S+ since \d+-"):
            with store.turn(tmp_path, "small", patience_s=0.1):
                pytest.fail("it was the other's turn")
        with store.turn(tmp_path, "another", patience_s=0.1):  # problems wait for each other in no case
            pass
        holder.kill()
    publish(tmp_path, problem, 1)


def test_what_killed_publishers_left_goes_with_the_next_publish(problem, tmp_path):
    done = publish(tmp_path, problem, 0, "first")
    home = tmp_path / "small"
    left = [home / f"versions/{done.current}/.plan.json.77.tmp", home / "decisions/.x.json.77.tmp", home / ".current.77.tmp",
            home / "versions/0123456789abcdef/.problem.json.77.tmp"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("cut sho")
    with store.turn(tmp_path, "small"):
        assert store.prune(tmp_path, "small", 2) == ["0123456789abcdef"]
    assert not list(home.rglob(".*.tmp")) and not (home / "versions/0123456789abcdef").exists()
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 0)


@pytest.mark.parametrize("name", ["latest", "0123456789abcdef"])
def test_pruning_follows_no_link(problem, tmp_path, name):
    """A link to the current version, which a user made, must not cost the plan."""
    done = publish(tmp_path, problem, 0, "first")
    link = tmp_path / "small/versions" / name
    link.symlink_to(done.current)
    assert store.prune(tmp_path, "small", 2) == []
    assert link.is_symlink() and store.load_plan(tmp_path, "small")[0] == plan(problem, 0)


def test_what_belongs_to_another_is_neither_pruned_nor_read(problem, tmp_path):
    other = replace(problem, name="other")
    mine, theirs = publish(tmp_path, problem, 0, "first"), publish(tmp_path, other, 1, "first")
    (tmp_path / "aside").mkdir()
    for moved, link in (("small/versions", "small/versions"), ("other", "other")):
        (tmp_path / moved).rename(tmp_path / "aside" / moved.replace("/", "-"))
        (tmp_path / link).symlink_to(tmp_path / "aside" / moved.replace("/", "-"))
    with pytest.raises(ShardCoreError, match="small/versions is a symbolic link"):
        store.prune(tmp_path, "small", 2)
    with pytest.raises(ShardCoreError, match="other is a symbolic link"):
        store.prune(tmp_path, "other", 2)
    assert (tmp_path / "aside/small-versions" / mine.current).exists()
    assert (tmp_path / "aside/other/versions" / theirs.current).exists()


def test_a_turn_writes_through_no_link(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "small/.turn").unlink()
    (tmp_path / "small/.turn").symlink_to(victim)
    with pytest.raises(ShardCoreError, match="cannot use .*small/.turn"), store.turn(tmp_path, "small"):
        pass
    assert victim.read_text() == "precious"


def test_a_plan_that_counts_as_too_large_today_is_still_known(problem, tmp_path, monkeypatch):
    """As after a release that counts memory otherwise: what is published has to be replaced, not to be in the way."""
    publish(tmp_path, problem, 0, "first")
    monkeypatch.setattr("shardcore.memory.shard_bytes", lambda *_: 1 << 40, raising=True)
    with pytest.raises(ShardCoreError):
        store.load_plan(tmp_path, "small")
    assert store.load_plan(tmp_path, "small", fits=False)[0] == plan(problem, 0)


def sealed_decision(root, name, decision, **changes):
    """Make a changed decision the last one, under the name of its own digest, as an attacker can."""
    document = {**decision.document(), **changes}
    found = files.digest(document)
    files.write_json(root / name / "decisions" / f"{found}.json", document)
    (root / name / "current").write_text(f"{found}\n")


@pytest.mark.parametrize("changes, said", [
    ({"current": "../../other/versions/v"}, "has current '../../other/versions/v'; it needs 16 hex digits"),
    ({"candidate": "x"}, "has candidate 'x'"), ({"parent": "../x"}, "has parent '../x'"),
    ({"problem": "other"}, "on problem 'other'"),
    ({"problem": "../x"}, "has problem '../x'"), ({"candidate_ms": -1.0}, "has candidate_ms -1.0; it needs 0 or more"),
    ({"candidate_ms": "1"}, "candidate_ms is '1'; it needs to be float | None"), ({"decided_at": None}, "decided_at is None"),
    ({"provenance": []}, "provenance is []"), ({"provenance": {"model": 1}}, "provenance: model is 1; it needs to be str"),
    ({"extra": 1}, "unknown key 'extra'"), ({"outcome": "good"}, "outcome 'good'"), ({"version": 2}, "no decision of a version"),
])
def test_a_decision_that_says_nonsense_is_refused(problem, tmp_path, changes, said):
    done = publish(tmp_path, problem, 0, "first")
    sealed_decision(tmp_path, "small", done, **changes)
    with pytest.raises(ShardCoreError) as error:
        store.load_plan(tmp_path, "small")
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"../../other/versions/v\n", b"\xff\xfe", b"x" * 10**6, b"0123456789ABCDEF"])
def test_a_pointer_that_names_no_decision_is_refused(problem, tmp_path, content):
    publish(tmp_path, problem, 0, "first")
    (tmp_path / "small/current").write_bytes(content)
    with pytest.raises(ShardCoreError, match="small/current (names decision .*; it needs 16 hex digits|has 1,000,000 bytes)"):
        store.load_plan(tmp_path, "small")


def test_names_that_are_paths_are_refused(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    for name in ("../small", "small/../small", ".", "..", "", "x" * 101, "a\nb"):
        with pytest.raises(ShardCoreError, match="has no plans in .*; names have letters, digits"):
            store.load_plan(tmp_path, name)
    for version in ("../versions/x", "latest", ""):
        with pytest.raises(ShardCoreError, match="has no version"):
            store.load_plan(tmp_path, "small", version)


def test_a_version_of_another_problem_is_not_read_as_ones_own(problem, tmp_path):
    mine, theirs = publish(tmp_path, problem, 0, "first"), publish(tmp_path, replace(problem, name="other"), 1, "first")
    versions = tmp_path / "small/versions"
    (tmp_path / "other/versions" / theirs.current).rename(versions / theirs.current)
    sealed_decision(tmp_path, "small", mine, current=theirs.current, candidate=theirs.current)
    with pytest.raises(ShardCoreError, match="has the plan of problem 'other'; it needs that of 'small'"):
        store.load_plan(tmp_path, "small")


def test_files_for_people_leave_nothing_behind_but_what_others_write_now(tmp_path):
    left, others = tmp_path / ".report.md.77.tmp", tmp_path / ".report.md.78.tmp"
    for path in (left, others):
        path.write_text("cut sho")
    os.utime(left, (0, 0))
    store.write(tmp_path, "report.md", b"whole")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"report.md": "whole", others.name: "cut sho"}


def test_a_publisher_killed_at_any_moment_leaves_one_whole_state(problem, tmp_path, rng, outcome):
    running = start_publisher(problem, tmp_path, 10_000)
    said = [running.stdout.readline().strip()]
    time.sleep(rng.uniform(0, 0.05))  # whatever it is at then
    outcome.hit = running.poll() is None
    running.send_signal(signal.SIGKILL)
    said += running.communicate(timeout=60)[0].split()
    history = list(store.history(tmp_path, "small"))
    outcome.lost = len(set(said) - {d.id for d in history})
    assert outcome.lost == 0
    assert said[-1] in {d.id for d in history[:2]}  # what it said was done, and at most the one that it was at
    assert store.load_plan(tmp_path, "small")[0] in [plan(problem, d) for d in range(4)]
    outcome.said = f"decision {history[0].id} is the last one"
    last = publish(tmp_path, problem, 2)
    assert store.last(tmp_path, "small") == last and len(list(store.history(tmp_path, "small"))) == len(history) + 1
    outcome.completed = True
    assert json.loads((tmp_path / "small/decisions" / f"{last.id}.json").read_text())["parent"] == history[0].id
    with store.turn(tmp_path, "small"):
        store.prune(tmp_path, "small", 2)
    assert not list((tmp_path / "small").rglob(".*.tmp"))


# --- the model check: every operation of publishing fails, or is a killed publisher's last -------------------------------
#
# Operations are what a folder's publisher asks of the system, and what an object store's asks of fsspec. A write is two, so
# that a half-written file is a state too.

FOLDER = [(builtins, "open"), (io, "open"), (fcntl, "flock"), *((os, name) for name in (
    "fsync", "link", "listdir", "mkdir", "remove", "rename", "replace", "rmdir", "scandir", "stat", "truncate", "unlink"))]
OBJECT_STORE = [(MemoryFileSystem, name) for name in ("cat_file", "info", "ls", "open", "pipe_file", "rm", "rm_file")]
CHANGES = {"link", "mkdir", "remove", "rename", "replace", "rmdir", "truncate", "unlink", "write", "open", "pipe_file", "rm",
           "rm_file"}
ALL = CHANGES | {"cat_file", "flock", "fsync", "info", "listdir", "ls", "read", "scandir", "stat"}


class Killed(BaseException):
    """What no publisher catches: the end of one that has nothing on this machine."""


class HalfWriting:
    """A file whose writes are two operations each, after the first of which half of it is there."""

    def __init__(self, file, act):
        self._file, self._act = file, act

    def write(self, content):
        self._act("write")
        done = self._file.write(content[:len(content) // 2])
        self._file.flush()
        self._act("write")
        return done + self._file.write(content[len(content) // 2:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


@contextlib.contextmanager
def operations(root, act, kinds=ALL, after=False):
    """Calls act(number) before (or after) each operation of these kinds on a folder or an object store; it may raise or kill,
    and its own operations do not count. Nothing waits for a disk: who is killed loses nothing that the system has."""
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
            here = isinstance(file, (int, HalfWriting, MemoryFileSystem)) or "dir_fd" in options or str(root) in str(file)
            writes = name == "open" and not set("wax+").isdisjoint(str(args[0] if args else options.get("mode", "r")))
            kind = name if name != "open" or isinstance(file, MemoryFileSystem) else "write" if writes else "read"
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
    with store.turn(root, problem.name):
        if before := store.last(root, problem.name):
            store.load_plan(root, problem.name)
        version = store.add(root, problem, plan(problem, device), {"total_ms": 1.0}, "<html>")
        store.record(root, Decision(problem.name, "better" if before else "first", "of a test", version, version,
                                    files.problem_digest(problem), decided_at=float(number), parent=before and before.id))
        store.prune(root, problem.name, 2)
    store.write(root, "report.md", b"for people")


class Reader:
    """Reads when called; what it finds is whole, and never older than what it found before."""

    def __init__(self, root, problem):
        self.root, self.problem, self.number = root, problem, 0

    def __call__(self, _=None):
        decision = store.last(self.root, "small")
        assert decision.decided_at >= self.number, f"decision {decision.decided_at} after {self.number}"
        self.number = decision.decided_at
        read, problem = store.load_plan(self.root, "small")
        assert problem == self.problem and store.version_of(read, problem) == decision.current
        assert store.load_page(self.root, "small", decision.current) == b"<html>"


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
    """Whether it completed; what ended it is an error for users."""
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
    """Where plan 1 is published, and plan 0 was before."""
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
    assert numbers == sorted(numbers) and {n: numbers.count(n) > 5 for n in numbers} == {1.0: True, 2.0: True, 3.0: True}


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
@pytest.mark.parametrize("begun, how, kinds, after", [
    ("folder", signal.SIGKILL, CHANGES, False), ("folder", OSError(errno.EIO, "Input/output error"), ALL, False),
    ("object store", Killed(), CHANGES, False), ("object store", OSError("no answer"), ALL, False),
    ("object store", OSError("no answer"), ALL, True),
], ids=["folder, killed", "folder, fails", "object store, killed", "object store, fails", "object store, done and fails"],
    indirect=["begun"])
def test_whatever_ends_a_publisher_readers_find_a_whole_state_and_the_next_one_completes(two, begun, how, kinds, after):
    """At each operation in turn, of a publisher that adds a plan and removes the last but one. The next publisher publishes the
    plan that was only begun to be added, or to be removed."""
    run, reader, ended, unhindered = in_a_process if how == signal.SIGKILL else in_this_process, Reader(begun, two), [], []
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
        assert places.listed(store._home(begun, "small") / "versions") == sorted(
            store.version_of(plan(two, device), two) for device in (before, now))
        assert not isinstance(begun, Path) or not list((begun / "small").rglob(".*.tmp"))
        if at > len(unhindered) and not any(ended[-3:]):  # (some failures hinder nothing)
            break
    else:
        pytest.fail("publishing never ends")


def test_a_turn_empties_no_file_that_a_link_leads_to(problem, tmp_path):
    publish(tmp_path, problem, 0)
    (tmp_path / "precious").write_text("1")
    (tmp_path / problem.name / ".turn").unlink()
    (tmp_path / problem.name / ".turn").symlink_to(tmp_path / "precious")
    with pytest.raises(ShardCoreError, match="cannot use"), store.turn(tmp_path, problem.name):
        pass
    assert (tmp_path / "precious").read_text() == "1"


@pytest.mark.parametrize("name", ["versions", "decisions"])
def test_nothing_is_written_through_a_link(problem, tmp_path, name):
    outside, home = tmp_path / "outside", tmp_path / "plans" / problem.name
    outside.mkdir()
    home.mkdir(parents=True)
    (home / name).symlink_to(outside)
    with pytest.raises(ShardCoreError, match="is a symbolic link"):
        publish(tmp_path / "plans", problem, 0)
    assert not list(outside.iterdir())


def test_pruning_takes_unfinished_files_of_its_own_alone(problem, tmp_path):
    publish(tmp_path, problem, 0)
    (tmp_path / problem.name / ".notes.tmp").write_text("mine")
    (tmp_path / problem.name / ".folder.1.tmp").mkdir()
    (tmp_path / problem.name / ".current.1.tmp").write_text("of a publisher")
    store.prune(tmp_path, problem.name, 2)
    assert {p.name for p in (tmp_path / problem.name).glob(".*.tmp")} == {".notes.tmp", ".folder.1.tmp"}


@pytest.mark.parametrize("what", ["current", "report.html"])
def test_a_pipe_is_not_waited_for(problem, tmp_path, what):
    decision = publish(tmp_path, problem, 0)
    path = tmp_path / problem.name / what
    path = path if path.exists() else path.parent / "versions" / decision.current / what
    path.unlink()
    os.mkfifo(path)
    if what == "report.html":
        assert store.load_page(tmp_path, problem.name, decision.current) is None
    else:
        with pytest.raises(ShardCoreError, match="it is no file"):
            store.current(tmp_path, problem.name)


def test_a_holder_that_says_nothing_readable_is_waited_for(problem, tmp_path):
    publish(tmp_path, problem, 0)
    path = tmp_path / problem.name / ".turn"
    path.write_bytes(b"\xff")
    with open(path) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(ShardCoreError, match="are being published by another"), store.turn(tmp_path, problem.name, 0.0):
            pass


@pytest.mark.parametrize("root", ["a\0b", "github://x", "zip://a::file:///nope.zip", "reference://x"])
def test_plans_that_are_nowhere_are_named(root):
    with pytest.raises(ShardCoreError, match="plans are at"):
        store.names(root)


def test_a_decision_after_the_year_9999_is_refused(problem, tmp_path):
    with pytest.raises(ShardCoreError, match="decided_at"):
        replace(publish(tmp_path, problem, 0), decided_at=1e12)
