"""Rows of COLLECTIVES agree with one another, and with what measures them. An unknown collective raises."""

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.step.collectives import COLLECTIVES, collective_by_name, memory_stages
from shardcore.step.kinds import Channel
from shardcore.step.scopes import SCOPES

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

    assert (row.ids or row.call in EXCHANGES) and set(row.ways) <= {"forward", "backward"} and row.ways
    assert 0 < row.draw.share < 1 and (not row.draw.scope or row.draw.scope in SCOPES)
    assert row.ids or not row.work


def test_varied_draws_are_shared_out_and_other_streams_differ():
    streams = [row.draw.stream for row in COLLECTIVES.values() if row.draw.stream]
    assert len(set(streams)) == len(streams)
    assert sum(row.draw.share for row in COLLECTIVES.values() if not row.draw.stream) == pytest.approx(1)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("row", [x for x in COLLECTIVES.values() if not x.ids], ids=lambda x: x.name)
def test_a_row_says_what_a_run_holds_in_each_phase_whatever_its_groups(row, scope):
    channel, moved = f"{row.name} {scope}", "dense" if row.dense else f"{row.name} {scope}"
    for sequence in (False, True):
        stages = memory_stages(row.name, (channel,), sequence)
        held = [buffers for stage in stages for alive in stage.phases.values() for buffers in alive.values()]
        assert len(stages) == 4 and any(buffers.get(moved, 0) >= 1 for buffers in held)
        # All that waits is used up when the step ends.
        assert not stages[0].before and not stages[-1].after
    assert memory_stages(row.name, (channel,), True) is stages


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
