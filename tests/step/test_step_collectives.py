"""Rows of COLLECTIVES agree with one another, and with what measures them. An unknown collective raises."""

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.step.collectives import COLLECTIVES, collective_by_name
from shardcore.step.kinds import RUNS, Channel
from shardcore.step.memory_timeline import PARTS
from shardcore.step.scopes import SCOPES
from shardcore.step.shard_memory import buffers_per_term

first, *others = COLLECTIVES.values()


def test_rates_of_the_first_stand_in_for_all():
    assert not first.like
    for row in others:
        seen = [row]
        while seen[-1].like:
            seen.append(COLLECTIVES[seen[-1].like])
        assert seen[-1] is first and len(seen) <= len(COLLECTIVES)


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=COLLECTIVES)
def test_a_row_runs_and_can_be_measured(row):
    from shardcore.measure.exchanges import EXCHANGES

    assert (
        (row.ids or row.call in EXCHANGES)
        and set(row.directions) <= {"forward", "backward"}
        and row.directions
    )
    assert 0 < row.draw.share < 1 and (not row.draw.scope or row.draw.scope in SCOPES)
    assert row.ids or not row.work


def test_varied_draws_are_shared_out_and_other_streams_differ():
    streams = [row.draw.stream for row in COLLECTIVES.values() if row.draw.stream]
    assert len(set(streams)) == len(streams)
    assert sum(row.draw.share for row in COLLECTIVES.values() if not row.draw.stream) == pytest.approx(1)


@pytest.mark.parametrize("kind", RUNS, ids=lambda x: f"{x.name} of sequences" if x.sequence else x.name)
def test_a_run_has_what_it_enters_in_some_phase_and_nothing_before_and_after_a_step(kind):
    stages, entered = kind.memory_stages, "dense" if kind.dense_gradient else "first"
    held = [buffers for stage in stages for alive in stage.phases.values() for buffers in alive.values()]
    assert len(stages) == 4 and any(buffers.get(entered, 0) >= 1 for buffers in held)
    # All that waits is used up when the step ends.
    assert not stages[0].before and not stages[-1].after


def test_parts_and_buffers_of_rows_are_known():
    problem = Problem("p", (Table("t", 100, 8, 1.0),), Topology((Device(1 << 30),) * 2), 64)
    for run in RUNS:
        known = {name for of in buffers_per_term(run, problem) for name in of}
        for stage in run.memory_stages:
            for alive in (stage.before, stage.after, stage.freed_late, *stage.phases.values()):
                assert set(alive) <= set(PARTS)
                assert {name for buffers in alive.values() for name in buffers} <= known


def test_only_ids_hold_the_same_in_all_phases():
    assert [row.name for row in COLLECTIVES.values() if row.memory is None] == [
        row.name for row in COLLECTIVES.values() if row.ids
    ]


def test_an_unknown_collective_is_named():
    for ask in (
        collective_by_name,
        lambda name: Channel(name).definition,
        lambda name: Channel(name).description,
    ):
        with pytest.raises(ShardCoreError, match="'broadcast' is not known; known are all_to_all, "):
            ask("broadcast")
