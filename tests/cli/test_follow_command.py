"""The command job follow, on reports that jobs leave in a store."""

from dataclasses import replace

import pytest

from shardcore.cli import main
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Plan, Shard
from shardcore.io import files
from shardcore.plans import followed, store
from shardcore.plans.decisions import Decision
from shardcore.plans.followed import StoredPlans

EVENT = {"version": "0" * 16, "outcome": "refused", "reason": "of a test", "step": 7, "at_s": 1.0}


@pytest.fixture
def plans(problem, tmp_path):
    """A store with two versions; the second is current."""
    for devices, ms in ((4, 20.0), (3, 16.0)):
        publish(tmp_path, problem, devices, ms)
    return tmp_path


def publish(root, problem, devices, ms):
    plan = Plan(
        tuple(Placement("column", Shard.whole(t), (i % devices,)) for i, t in enumerate(problem.tables))
    )
    last = store.last_decision(root, problem.name)
    version = store.add_version(root, problem, plan, {"total_ms": ms})
    decision = Decision(
        problem.name, "better" if last else "first", "of a test", version, version, files.problem_digest(problem),
        candidate_ms=ms, previous_ms=last and last.candidate_ms, parent=last and last.id,
    )  # fmt: skip
    store.record_decision(root, decision)
    return version


def versions(plans):
    return [d.current for d in store.decision_history(plans, "shifting")][::-1]


def report(plans, version, *events, job="trainer", step=1000):
    told = {"current": version, "step": step, "at_s": 1e9, "step_ms": 20.5, "events": events}
    StoredPlans(plans, "shifting", job).report(told)


def output_of(capsys, plans, *options):
    code = main(["job", "follow", str(plans), "shifting", "--once", *map(str, options)])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_says_how_a_job_follows_where_none_does(plans, capsys):
    code, out, _ = output_of(capsys, plans)
    assert code == 0 and f"version {versions(plans)[-1]} is current since" in out
    assert "no job has reported yet" in out and "follower.step()" in out
    with pytest.raises(SystemExit):
        main(["job", "follow", "-h"])
    assert "\n        follower.step()\n" in capsys.readouterr().out


def test_jobs_without_a_name_keep_their_reports_apart(plans, monkeypatch):
    told = {"current": versions(plans)[0], "step": 1, "at_s": 1e9, "step_ms": 20.5, "events": ()}
    for process in (7, 8, 8):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        StoredPlans(plans, "shifting").report(told)
    names = [job.job for job in followed.read_reports(plans, "shifting")]
    assert len(names) == 2 and [name.rpartition("-")[2] for name in names] == ["7", "8"]


def test_it_says_what_a_job_does_next(plans, capsys):
    old, new = versions(plans)
    report(plans, old)
    code, out, _ = output_of(capsys, plans)
    assert code == 0 and "job trainer, step 1,000, " in out and f"on version {old}, 20.5 ms a step" in out
    assert f"next: it moves to version {new}\n" in out


def test_it_says_what_was_measured_and_why_a_plan_was_not_taken(plans, capsys):
    old, new = versions(plans)
    moved = {
        **EVENT, "version": old, "outcome": "stayed", "reason": "", "before_ms": 20.0, "after_ms": 15.0,
        "expected_ms": 17.0, "tables": 3, "bytes": {"local": 0, "within_host": 3 << 20}, "pause_s": 1.5,
    }  # fmt: skip
    report(plans, old, moved, EVENT | {"version": new})
    _, out, _ = output_of(capsys, plans)
    assert (
        f"step 7: stayed, version {old}; 3 tables in 1.5 s (3.0 MiB within hosts); 15 ms a step, 20 before (-25.0%), "
        "predicted at most 17"
    ) in out
    assert f"next: nothing, as it cannot move to version {new}: of a test" in out
    report(plans, new)
    assert "next: nothing, until another version is current" in output_of(capsys, plans)[1]
    report(plans, None)
    assert "on a plan of its own" in output_of(capsys, plans)[1]


def test_it_goes_on_and_says_each_thing_once(plans, problem, capsys, monkeypatch):
    old, new = versions(plans)
    looks = [
        lambda: report(plans, old, step=1100),  # no news
        lambda: report(plans, new, EVENT | {"version": new, "outcome": "moved", "reason": ""}),
        lambda: publish(plans, problem, 2, 14.0),
    ]

    def look(_):
        if not looks:
            raise KeyboardInterrupt
        looks.pop(0)()

    report(plans, old)
    monkeypatch.setattr("time.sleep", look)
    code = main(["job", "follow", str(plans), "shifting"])
    lines = capsys.readouterr().out.splitlines()
    assert code != 0
    assert sum("is current since" in x for x in lines) == 2
    assert sum(x.startswith("job trainer, step 1,000") for x in lines) == 2
    assert sum("step 7: moved" in x for x in lines) == 1
    assert [x for x in lines if "next:" in x] == [
        f"  next: it moves to version {new}",
        "  next: nothing, until another version is current",
        f"  next: it moves to version {versions(plans)[-1]}",
    ]


def test_what_it_cannot_read_is_named(plans, problem, capsys):
    report(plans, versions(plans)[0])
    at = plans / "shifting/jobs/trainer.json"
    at.write_text(at.read_text().replace("1000", "1001"))
    assert "trainer.json does not match its digest" in output_of(capsys, plans)[1]
    report(plans, versions(plans)[0])
    assert main(["job", "follow", str(plans), "other", "--once"]) == 1
    assert "no plan is published for problem 'other'" in capsys.readouterr().err
    with pytest.raises(ShardCoreError, match="a job's report has job '../x'; it needs a folder's name"):
        report(plans, None, job="../x")
    found = followed.read_reports(plans, problem.name)
    assert [replace(r, at_s=0.0).step for r in found] == [1000]
    assert main(["job", "rates", "--out", str(plans / "rates.json")]) == 1
    assert "RANK is None; start this with torchrun" in capsys.readouterr().err
