"""A gang: one local process a rank, started together, heard while they work, and ended together.

Ranks that exchange wait for each other, so one that dies or hangs would hold up all. A process's death ends
its pipe and is noticed at once; a rank that has nothing to say for the allowed time hangs. Of several
complaints, the rank that failed is named, not those that lost it.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.measure import processes
from shardcore.measure.hosts import Place

MOST_RANKS = 128
"""Processes of a gang on one machine. Each loads torch, which takes some 200 MB."""
_LOOPBACK = "127.0.0.1"
_GRACE_S = 1.0
"""How long a rank that lost another waits to be told why: the other's own report comes first if there is
one."""


class Lost(ShardCoreError):
    """An exchange broke: another rank is the one that failed."""


@contextmanager
def exchanging() -> Iterator[None]:
    """Around collectives: what breaks them is Lost, for torch does not tell a lost rank from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(_line(error)) from None


def run(
    name: str,
    work: Callable[..., None],
    ranks: int,
    arguments: Sequence[Any],
    timeout_s: float,
    places: Sequence[Place] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run work(rank, init_method, say, *arguments) in one process a rank; yields (rank, value) for each
    say(value) as it comes.

    init_method: for collectives.Rank, one for all: a port of this machine's loopback, or of the first place.
    places: of each rank, see hosts.box_of. None: this machine. Processes are named "<name>-rank-<rank>".
    `work` and `arguments` need to be picklable.
    Raises ShardCoreError for more than MOST_RANKS, and where a rank fails (with the ShardCoreError or
    RuntimeError it raised), dies, or none says anything for timeout_s: it names the rank and the reason.
    No process is left when the iterator ends, raises or is closed.
    """
    if ranks > MOST_RANKS:
        raise ShardCoreError(
            f"{name}: {ranks:,} devices need as many processes on this machine, and at most "
            f"{MOST_RANKS} are started; take a problem of fewer devices, or a job with a "
            "rank on each device where the command allows it"
        )
    pipes, running = [], []
    address = places[0].address if places else _LOOPBACK
    with _reserved_port(address, places[0] if places else None) as port:
        try:
            for rank in range(ranks):
                pipe, theirs = processes.context().Pipe(duplex=False)
                process = processes.made(
                    f"{name}-rank-{rank}",
                    _rank_process,
                    (theirs, places and places[rank], work, rank, f"tcp://{address}:{port}", arguments),
                )
                process.start()
                theirs.close()  # so that the pipe ends when the process does
                pipes.append(pipe)
                running.append(process)
            yield from _heard(name, pipes, running, timeout_s)
        finally:
            for pipe, process in zip(pipes, running, strict=True):
                process.kill()
                process.join()
                pipe.close()


@contextmanager
def _reserved_port(address: str, place: Place | None) -> Iterator[int]:
    """A free port of an address. It is taken, without listening, until rank 0 listens there; both allow that
    (SO_REUSEADDR)."""
    with _socket_at(place) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        yield held.getsockname()[1]


def _socket_at(place: Place | None) -> socket.socket:
    """A socket on a host of a box (None: of this machine), where it stays."""
    if place is None:
        return socket.socket()

    def made() -> socket.socket:
        place.enter()
        return socket.socket()

    # Only a thread of its own moves, and then it ends.
    with ThreadPoolExecutor(1) as mover:
        return mover.submit(made).result()


def _rank_process(
    pipe: Connection,
    place: Place | None,
    work: Callable[..., None],
    rank: int,
    init_method: str,
    arguments: Sequence[Any],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the gang
    try:
        if place:
            place.settle()
        work(rank, init_method, lambda value: pipe.send(("said", value)), *arguments)
        pipe.send(("done", None))
    except Lost as error:
        pipe.send(("lost", _line(error)))
    # any other is a bug: it prints its traceback and ends the process
    except (ShardCoreError, RuntimeError) as error:
        pipe.send(("failed", _line(error)))


def _heard(
    name: str, pipes: Sequence[Connection], processes: Sequence[Any], timeout_s: float
) -> Iterator[tuple[int, Any]]:
    done: set[int] = set()
    lost: dict[int, str] = {}
    # a rank that waits in an exchange speaks up after timeout_s
    deadline = time.monotonic() + timeout_s + _GRACE_S
    while len(done) < len(pipes):
        running = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in done and rank not in lost}
        ready = wait(list(running), max(0.0, deadline - time.monotonic())) if running else []
        if not ready:
            raise ShardCoreError(_why(name, running.values(), lost, timeout_s))
        for rank, pipe in ((running[p], p) for p in ready):
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):  # at once, or in the middle of a message
                kind, value = "failed", end_of(processes[rank])
            if kind == "said":
                yield rank, value
            elif kind == "done":
                done.add(rank)
            elif kind == "failed":
                raise ShardCoreError(f"{name}: rank {rank} of {len(pipes)} failed: {value}")
            else:
                lost[rank] = value
            now = time.monotonic()
            deadline = min(deadline, now + _GRACE_S) if lost else now + timeout_s + _GRACE_S


def _why(name: str, silent: Iterable[int], lost: dict[int, str], timeout_s: float) -> str:
    silent = ", ".join(map(str, silent))
    if not lost:
        return (
            f"{name}: no word for {timeout_s:g} s from rank {silent}: it hangs, "
            "or its work needs a longer timeout_s"
        )
    rank, said = next(iter(lost.items()))
    return (
        f"{name}: rank {silent or rank} does not answer the others ({timeout_s:g} s are allowed); "
        f"rank {rank}: {said}"
    )


def end_of(process: Any) -> str:
    """Why a process that ended did."""
    process.join(_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"it was killed by {signal.Signals(-code).name}" + (
            " (out of memory?)" if -code == signal.SIGKILL else ""
        )
    return f"it ended with exit code {code}; what it wrote to standard error says why"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
