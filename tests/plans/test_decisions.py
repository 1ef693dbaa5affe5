"""Decisions: what they say, and which are refused."""

from dataclasses import replace

import pytest
from publishing import publish, sealed_decision

from shardcore.core.errors import ShardCoreError
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.report import plan_report


def test_history_tells_models_of_one_name_apart_by_their_data(problem, tmp_path):
    made = [
        publish(tmp_path, problem, device, "first", provenance=given)
        for device, given in (
            (0, {"model_version": "3", "data": "0123456789abcdef"}),
            (1, {"model_version": "4"}),
            (2, {}),
        )
    ]
    assert [plan_report.decision_row(x)[5] for x in made] == ["version 3, data 01234567", "version 4", "-"]


def test_a_margin_is_read_back_and_needs_to_be_one(problem, tmp_path):
    made = publish(tmp_path, problem, 0, "first", margin_ms=0.25)
    assert store.last_decision(tmp_path, problem.name) == made and made.margin_ms == 0.25
    with pytest.raises(ShardCoreError, match="margin_ms -1.0"):
        replace(made, margin_ms=-1.0)


def test_a_repeated_decision_says_so(problem, tmp_path):
    first = publish(tmp_path, problem, 0, "first", decided_at=1.0)
    again = publish(tmp_path, problem, 0, "first", decided_at=2.0)
    other = publish(tmp_path, problem, 0, "kept", decided_at=2.0)
    assert again.is_repeat_of(first) and not other.is_repeat_of(first) and not first.is_repeat_of(None)


def test_a_decision_tells_what_the_version_that_it_chose_costs():
    of = {"problem": "p", "reason": "r", "problem_digest": "d" * 16, "candidate_ms": 1.0, "previous_ms": 2.0}
    assert Decision(outcome="better", current="a" * 16, candidate="a" * 16, **of).total_ms == 1.0
    assert Decision(outcome="kept", current="b" * 16, candidate="a" * 16, **of).total_ms == 2.0


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"current": "../../other/versions/v"}, "has current '../../other/versions/v'; it needs 16 hex"),
        ({"candidate": "x"}, "has candidate 'x'"),
        ({"parent": "../x"}, "has parent '../x'"),
        ({"problem": "other"}, "on problem 'other'"),
        ({"problem": "../x"}, "has problem '../x'"),
        ({"candidate_ms": -1.0}, "has candidate_ms -1.0; it needs 0 to 1,000,000,000"),
        ({"candidate_ms": "1"}, "candidate_ms is '1'; it needs to be a number or None"),
        ({"decided_at": None}, "decided_at is None"),
        ({"provenance": []}, "provenance is []"),
        ({"provenance": {"model": 1}}, "provenance: model is 1; it needs to be a text"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"outcome": "good"}, "outcome 'good'"),
        ({"version": 2}, "has version 2 of shardcore/decision; this ShardCore reads 1"),
    ],
)
def test_a_decision_that_says_nonsense_is_refused(problem, tmp_path, changes, said):
    done = publish(tmp_path, problem, 0, "first")
    sealed_decision(tmp_path, "small", done, **changes)
    with pytest.raises(ShardCoreError) as error:
        store.load_plan(tmp_path, "small")
    assert said in str(error.value)


def test_a_decision_after_the_year_9999_is_refused(problem, tmp_path):
    with pytest.raises(ShardCoreError, match="decided_at"):
        replace(publish(tmp_path, problem, 0), decided_at=1e12)
