import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.measure import local_ranks


def count(rank, init_method, send, up_to):
    for i in range(up_to):
        send((i, init_method))


def refuse(rank, init_method, send):
    send("here")
    if rank == 1:
        raise ShardCoreError("table 't' is too wide")
    time.sleep(600)


def lose(rank, init_method, send):
    """Rank 0 loses rank 1, which goes on for a while: the others' complaint is not taken for the cause."""
    if rank == 0:
        with local_ranks.report_lost_ranks():
            raise RuntimeError("connection closed")
    time.sleep(600)


def crash(rank, init_method, send):
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def signal_itself(rank, init_method, send, number):
    send("here")
    if rank == 1:
        os.kill(os.getpid(), number)
    time.sleep(600)


def processes():
    return [p for p in multiprocessing.active_children() if p.name.startswith("toy-rank")]


def heard(work, ranks, *arguments, timeout_s=60.0):
    return list(local_ranks.run_ranks("toy", work, ranks, arguments, timeout_s))


def test_each_rank_is_heard_in_its_own_order():
    output = heard(count, 3, 4)
    assert len(output) == 12 and len({method for _, (_, method) in output}) == 1
    assert all([i for r, (i, _) in output if r == rank] == [0, 1, 2, 3] for rank in range(3))
    assert not processes()


@pytest.mark.parametrize(
    "work, arguments, timeout_s, message",
    [
        (refuse, (), 60, "toy: rank 1 of 2 failed: table 't' is too wide"),
        (crash, (), 60, "toy: rank 1 of 2 failed: it ended with exit code 7"),
        (
            signal_itself,
            (signal.SIGKILL,),
            60,
            "toy: rank 1 of 2 failed: it was killed by SIGKILL (out of memory?)",
        ),
        (
            lose,
            (),
            60,
            "toy: rank 1 does not answer the others (60 s are allowed); rank 0: connection closed",
        ),
        (signal_itself, (signal.SIGSTOP,), 1, "toy: no word for 1 s from rank 0, 1: it hangs"),
    ],
    ids=["fails", "crashes", "dies", "lost", "hangs"],
)
def test_the_rank_that_fails_ends_the_gang_and_is_named(work, arguments, timeout_s, message):
    with pytest.raises(ShardCoreError, match=re.escape(message)):
        heard(work, 2, *arguments, timeout_s=timeout_s)
    assert not processes()


def test_who_stops_listening_leaves_no_process():
    with closing(local_ranks.run_ranks("toy", count, 2, (10**9,), 60)) as output:
        next(output)
        assert len(processes()) == 2
    assert not processes()


def test_it_makes_no_files(tmp_path, monkeypatch):
    """A kill would leave them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(local_ranks.run_ranks("toy", count, 1, (10**9,), 60)) as output:
        next(output)
        assert not list(tmp_path.iterdir())


def wait_forever(rank, init_method, send):
    send(os.getpid())
    time.sleep(600)


PARENT = """
import time
from test_local_ranks import local_ranks, wait_forever
if __name__ == "__main__":
    said = local_ranks.run_ranks("toy", wait_forever, 2, (), 600)
    print(*(next(said)[1] for _ in range(2)), flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_ranks_end_with_the_process_that_started_them_though_it_was_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)]),
    }
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"], env=env, stdout=subprocess.PIPE, text=True
    )
    ranks = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(ranks) == 2 and all(map(psutil.pid_exists, ranks))
    parent.kill()
    parent.communicate(timeout=60)  # its output ends when the last process that could write there has
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, ranks)):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.02)
