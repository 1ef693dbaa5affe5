"""Published plans: what readers see whatever publishers do, wherever the plans are."""

import json
import os
import uuid
from dataclasses import replace

import pytest
from publishing import plan, publish, sealed_decision
from stored_pages import stored_page

from shardcore.core.errors import ShardCoreError
from shardcore.plans import places, store
from shardcore.plans.followed import StoredPlans


def read_cost(root, version):
    found = json.loads((places.open_place(root) / "small" / "versions" / version / "cost.json").read_bytes())
    return {k: v for k, v in found.items() if k not in ("digest", "page_sha256")}


@pytest.fixture(params=["folder", "file URL", "object store"])
def root(request, tmp_path):
    return {
        "folder": tmp_path,
        "file URL": f"file://{tmp_path}/plans",
        "object store": f"memory://{uuid.uuid4()}/plans",
    }[request.param]


def test_versions_are_kept_and_the_pointer_moves(problem, root):
    first, second = publish(root, problem, 0, "first"), publish(root, problem, 1)
    assert first.current != second.current == store.current_version(
        root, "small"
    ) and store.published_problem_names(root) == ["small"]
    assert store.load_plan(root, "small") == (plan(problem, 1), problem)
    assert store.load_plan(root, "small", first.current) == (plan(problem, 0), problem)
    assert read_cost(root, first.current) == {"total_ms": 0.0}
    assert stored_page(root, "small", second.current) == b"<html>1</html>"
    assert list(store.decision_history(root, "small")) == [second, first] and second.parent == first.id
    with pytest.raises(ShardCoreError, match=f"no version 'other'.*{first.current}"):
        store.load_plan(root, "small", "other")


def test_a_job_that_follows_gets_the_gain_of_the_version_and_not_of_a_later_candidate(problem, root):
    first = publish(root, problem, 0, "first")
    better = publish(root, problem, 1, candidate_ms=8.0, previous_ms=10.0, margin_ms=0.5)
    considered = store.add_version(root, problem, plan(problem, 0, seed=1), {})
    publish(root, problem, 1, "kept", candidate=considered, candidate_ms=7.0, previous_ms=8.5, margin_ms=9.0)
    follows = StoredPlans(root, "small")
    ratios = [follows.read(version).most_ratio for version in (first.current, better.current)]
    assert ratios == [None, pytest.approx(0.85)]
    assert follows.roll_back(better.current, "slow in a job") == follows.version() == first.current
    back = store.last_decision(root, "small")
    assert (back.candidate, back.candidate_ms, back.previous_ms) == (better.current, 8.5, 10.0)


def test_the_same_plan_is_one_version_and_a_version_never_changes(problem, root):
    version = store.add_version(root, problem, plan(problem, 0), {"total_ms": 1.0})
    assert store.add_version(root, problem, plan(problem, 0), {"total_ms": 2.0}, "<html>") == version
    assert read_cost(root, version) == {"total_ms": 1.0} and not places.path_exists(
        places.open_place(root) / "small/versions" / version / store.PAGE
    )


@pytest.mark.parametrize("file", ["report.html", "cost.json", "plan.json", "problem.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut short", "gone"])
def test_a_version_with_any_damaged_file_is_written_anew(problem, root, file, damage):
    given = problem, plan(problem, 0), {"total_ms": 1.0}, "<html>plan</html>"
    version = store.add_version(root, *given)
    assert store.is_version_intact(root, "small", version)
    path = places.open_place(root) / "small" / "versions" / version / file
    content = path.read_bytes()
    if damage == "gone":
        places.remove_file_or_folder(path)
    else:
        at = content.index(b"1" if file == "cost.json" else b"p")
        places.write_file(path, content[:at] + (b"7" + content[at + 1 :] if damage == "flipped" else b""))
    assert not store.is_version_intact(root, "small", version)
    assert store.add_version(root, *given) == version and store.is_version_intact(root, "small", version)
    assert path.read_bytes() == content


def test_a_version_that_no_decision_names_is_not_used(problem, root):
    publish(root, problem, 0, "first")
    store.add_version(root, problem, plan(problem, 1), {})
    assert store.load_plan(root, "small")[0] == plan(problem, 0)


def test_an_unpublished_problem_is_named(problem, root):
    publish(root, problem, 0, "first")
    store.write_store_file(root, "report.md", b"for people")
    with pytest.raises(ShardCoreError, match="'large'.*small"):
        store.load_plan(root, "large")


def test_versions_beyond_the_last_decisions_go_but_not_their_record(problem, root):
    decisions = [publish(root, problem, device) for device in range(4)]
    publish(root, problem, 3, "kept", candidate=decisions[0].current, reason="no better")
    gone = store.prune_versions(root, "small", 3)
    assert gone == [decisions[1].current] and store.prune_versions(root, "small", 3) == []
    assert len(list(store.decision_history(root, "small"))) == 5
    # was considered of late
    assert store.load_plan(root, "small", decisions[0].current)[0] == plan(problem, 0)
    assert store.load_plan(root, "small")[0] == plan(problem, 3)
    with pytest.raises(ShardCoreError, match="the last 1 decisions.*2 or more"):
        store.prune_versions(root, "small", 1)


def test_what_cannot_be_decided_is_refused(problem, root):
    first = publish(root, problem, 0, "first")
    with pytest.raises(ShardCoreError, match=f"follows None, but {first.id} is the last one.*publish again"):
        publish(root, problem, 1, parent=None)
    with pytest.raises(ShardCoreError, match="decision has current 'elsewhere'; it needs 16 hex digits"):
        publish(root, problem, 1, current="elsewhere")
    with pytest.raises(ShardCoreError, match="no version 'e15e0000e15e0000'.*to make current"):
        publish(root, problem, 1, current="e15e0000e15e0000", candidate="e15e0000e15e0000")
    with pytest.raises(ShardCoreError, match="'better' has current e15e0000e15e0000; it takes its candidate"):
        publish(root, problem, 1, current="e15e0000e15e0000")
    with pytest.raises(ShardCoreError, match="outcome 'worse'; known are first, better"):
        publish(root, problem, 1, "worse")
    assert store.last_decision(root, "small") == first


def test_a_decision_that_was_edited_or_is_missing_is_named(problem, tmp_path):
    first, second = publish(tmp_path, problem, 0, "first"), publish(tmp_path, problem, 1)
    path = tmp_path / "small/decisions" / f"{first.id}.json"
    path.write_text(path.read_text().replace("of a test", "of nothing"))
    assert store.last_decision(tmp_path, "small") == second
    with pytest.raises(ShardCoreError, match=f"{first.id}.json does not match its name"):
        list(store.decision_history(tmp_path, "small"))
    path.unlink()
    with pytest.raises(ShardCoreError, match=f"{first.id}.json"):
        list(store.decision_history(tmp_path, "small"))


def test_what_the_system_refuses_is_named(problem, tmp_path):
    (tmp_path / "a file").write_text("")
    for root in (tmp_path / "a file", tmp_path / "a file/plans"):
        with pytest.raises(ShardCoreError, match="a file"):
            publish(root, problem, 0, "first")
        assert store.published_problem_names(root) == [] and store.last_decision(root, "small") is None
    (tmp_path / "small/current").mkdir(parents=True)
    with pytest.raises(ShardCoreError, match="cannot read .*small/current: it is a folder"):
        store.last_decision(tmp_path, "small")


def test_storage_that_does_not_answer_is_named():
    with pytest.raises(ShardCoreError, match="cannot use http://127.0.0.1:9/plans.*: ClientConnector"):
        store.load_plan("http://127.0.0.1:9/plans", "small")
    with pytest.raises(ShardCoreError, match="cannot use http://127.0.0.1:9/plans/report.md: "):
        store.write_store_file("http://127.0.0.1:9/plans", "report.md", b"for people")


def test_a_plan_that_counts_as_too_large_today_is_still_known(problem, tmp_path, monkeypatch):
    """A later release may count memory otherwise. What is published then has to be replaceable."""
    publish(tmp_path, problem, 0, "first")
    monkeypatch.setattr("shardcore.step.memory.usable_bytes", lambda of: [0] * len(of.topology), raising=True)
    with pytest.raises(ShardCoreError):
        store.load_plan(tmp_path, "small")
    assert store.load_plan(tmp_path, "small", fits=False)[0] == plan(problem, 0)


@pytest.mark.parametrize(
    "content", [b"../../other/versions/v\n", b"\xff\xfe", b"x" * 10**6, b"0123456789ABCDEF"]
)
def test_a_pointer_that_names_no_decision_is_refused(problem, tmp_path, content):
    publish(tmp_path, problem, 0, "first")
    (tmp_path / "small/current").write_bytes(content)
    with pytest.raises(
        ShardCoreError, match="small/current (has decision .*; it needs 16 hex digits|has 1,000,000 bytes)"
    ):
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
    mine, theirs = (
        publish(tmp_path, problem, 0, "first"),
        publish(tmp_path, replace(problem, name="other"), 1, "first"),
    )
    versions = tmp_path / "small/versions"
    (tmp_path / "other/versions" / theirs.current).rename(versions / theirs.current)
    sealed_decision(tmp_path, "small", mine, current=theirs.current, candidate=theirs.current)
    with pytest.raises(ShardCoreError, match="has the plan of problem 'other'; it needs that of 'small'"):
        store.load_plan(tmp_path, "small")


@pytest.mark.parametrize(
    "root", ["a\0b", "github://x", "unheard-of://x/y", "zip://a::file:///nope.zip", "reference://x"]
)
def test_plans_that_are_nowhere_are_named(root):
    with pytest.raises(ShardCoreError, match="plans are at"):
        store.published_problem_names(root)


def test_what_is_no_version_stays_and_stops_nobody(problem, tmp_path):
    decisions = [publish(tmp_path, problem, device) for device in range(3)]
    (tmp_path / "small/versions/0000000000000000").write_text("somebody's")
    assert store.prune_versions(tmp_path, "small", 2) == [decisions[0].current]
    assert (tmp_path / "small/versions/0000000000000000").read_text() == "somebody's"


def test_links_in_a_circle_are_no_problems(problem, tmp_path):
    publish(tmp_path, problem, 0, "first")
    (tmp_path / "loop").symlink_to("loop")
    assert store.published_problem_names(tmp_path) == ["small"]
    with pytest.raises(ShardCoreError, match="no plan is published for problem 'nothere'.*small"):
        store.load_plan(tmp_path, "nothere")


@pytest.mark.parametrize(
    "put",
    [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/null"), lambda path: path.mkdir()],
)
@pytest.mark.timeout(30)
def test_only_a_regular_file_is_written_over(tmp_path, put):
    """Writing to a pipe would never end."""
    put(tmp_path / "report.md")
    with pytest.raises(ShardCoreError, match="cannot write .*report.md: it is no regular file; remove it"):
        store.write_store_file(tmp_path, "report.md", b"for people")
