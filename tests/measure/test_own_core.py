"""Ranks have a core each while they exchange, and gloo's network threads make room for them."""

import os
from pathlib import Path

import pytest

from shardcore.measure import local_ranks
from shardcore.measure.collectives import Rank

CORES = sorted(os.sched_getaffinity(0))


def _threads():
    """(name, cores, class) of each thread of this process."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        number = int(thread.name)
        found.append(
            (
                (thread / "comm").read_text().strip(),
                tuple(sorted(os.sched_getaffinity(number))),
                os.sched_getscheduler(number),
            )
        )
    return found


def _work(rank, init_method, send):
    member = Rank(rank, 3, init_method)
    during = _threads()
    member.close()
    send((during, _threads()))


@pytest.fixture(scope="module")
def three():
    last = dict(local_ranks.run_ranks("test", _work, 3, (), 60.0))
    return [last[rank] for rank in range(3)]


def test_each_rank_has_a_core_and_shares_it_only_where_there_are_too_few(three):
    for rank, (during, _) in enumerate(three):
        assert {cores for _, cores, _ in during} == {(CORES[rank % len(CORES)],)}


def test_gloos_network_threads_make_room_for_their_rank(three):
    for during, _ in three:
        classes = {name: kind for name, _, kind in during}
        assert classes["gloo_tcp_loop"] == os.SCHED_BATCH and classes["pt_gloo_runloop"] == os.SCHED_OTHER


def test_afterwards_a_process_has_all_its_cores_again(three):
    for _, after in three:
        assert {cores for _, cores, _ in after} == {tuple(CORES)}
