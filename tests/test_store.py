"""Published plans: what readers see whatever publishers do, wherever the plans are."""

import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from shardcore import files, store
from shardcore.store import Decision
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


@pytest.fixture(params=["folder", "file URL", "object store"])
def root(request, tmp_path):
    return {"folder": tmp_path, "file URL": f"file://{tmp_path}/plans",
            "object store": f"memory://{uuid.uuid4()}/plans"}[request.param]


def test_versions_are_kept_and_the_pointer_moves(problem, root):
    first, second = publish(root, problem, 0, "first"), publish(root, problem, 1)
    assert first.current != second.current == store.current(root, "small") and store.names(root) == ["small"]
    assert store.load_plan(root, "small") == (plan(problem, 1), problem)
    assert store.load_plan(root, "small", first.current) == (plan(problem, 0), problem)
    assert store.load_cost(root, "small", first.current) == {"total_ms": 0.0}
    assert store.load_page(root, "small", second.current) == b"<html>1</html>"
    assert list(store.history(root, "small")) == [second, first] and second.parent == first.id
    with pytest.raises(ShardCoreError, match=f"no version 'other'.*{first.current}"):
        store.load_plan(root, "small", "other")


def test_the_same_plan_is_one_version_and_a_version_never_changes(problem, root):
    version = store.add(root, problem, plan(problem, 0), {"total_ms": 1.0})
    assert store.add(root, problem, plan(problem, 0), {"total_ms": 2.0}, "<html>") == version
    assert store.load_cost(root, "small", version) == {"total_ms": 1.0} and store.load_page(root, "small", version) is None


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
    with pytest.raises(ShardCoreError, match="no version 'elsewhere'.*to make current"):
        publish(root, problem, 1, current="elsewhere")
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


def test_a_url_that_cannot_be_opened_is_named():
    with pytest.raises(ShardCoreError, match="plans are at unheard-of://x/y, which cannot be opened: .*unheard-of"):
        store.load_plan("unheard-of://x/y", "small")


def test_storage_that_does_not_answer_is_named():
    with pytest.raises(ShardCoreError, match="cannot use http://127.0.0.1:9/plans/small/current: ClientConnector"):
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
from shardcore import store
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
            home / "versions/unnamed/.problem.json.77.tmp"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("cut sho")
    with store.turn(tmp_path, "small"):
        assert store.prune(tmp_path, "small", 2) == ["unnamed"]
    assert not list(home.rglob(".*.tmp")) and not (home / "versions/unnamed").exists()
    assert store.load_plan(tmp_path, "small")[0] == plan(problem, 0)


def test_a_publisher_killed_at_any_moment_leaves_one_whole_state(problem, tmp_path, rng, outcome):
    for _ in range(3):
        running = start_publisher(problem, tmp_path, 10_000)
        running.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        outcome.hit = running.poll() is None
        running.send_signal(signal.SIGKILL)
        said = running.communicate()[0].split()
        history = list(store.history(tmp_path, "small"))
        outcome.lost = len(set(said) - {d.id for d in history})
        assert outcome.lost == 0
        if said:
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
