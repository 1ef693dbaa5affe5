"""A gang: one local process a rank. They start together, send messages while they work, and end together.

Ranks that exchange wait for each other, so one that dies or hangs would hold up all. A process's death ends
its pipe and is noticed at once. A rank that sends no message for the allowed time counts as hung. The error
names the rank that failed, not those that waited for it in vain.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.measure import hardware, hosts, processes
from shardcore.measure.hosts import EmulatedHost

MOST_RANKS = 128
"""Processes of a gang on one machine. Each loads torch, which takes some 200 MB."""
_LOOPBACK = "127.0.0.1"
_GRACE_S = 1.0
"""Wait for the report of the rank that failed, after another rank's exchange broke."""


Message = tuple[int, str, Any]
"""A rank; "message", "done", "lost" or "failed"; and its value or reason."""
Receive = Callable[[Sequence[int], float], Iterable[Message]]
"""Function of ranks that run and of a limit in s: their messages that have come. It waits for the first."""


class RankLost(ShardCoreError):
    """Raised when a collective breaks because another rank failed."""


@contextmanager
def report_lost_ranks() -> Iterator[None]:
    """Context manager: raise Lost where a collective fails, which torch reports as RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(hardware.one_line_message(error)) from None


def run_ranks(
    name: str,
    work: Callable[..., None],
    ranks: int,
    arguments: Sequence[Any],
    timeout_s: float,
    places: Sequence[EmulatedHost] | None = None,
) -> Generator[tuple[int, Any]]:
    """Run work(rank, init_method, send, *arguments) in one process for each rank, on this machine.

    Yields (rank, value) for each send(value) as it comes. Processes are named "<name>-rank-<rank>".
    init_method: address for collectives.Rank, the same for all: on this machine's loopback, or in the first
      place.
    work, arguments: picklable.
    timeout_s: longest time without a message of any rank.
    places: emulated host of each rank. None or empty: this machine.

    Raises ShardCoreError for more than MOST_RANKS ranks, and where a rank fails (with a ShardCoreError or
    RuntimeError), dies or hangs. It names the rank and the reason. No process is left when the iterator ends,
    raises or is closed.
    """
    if ranks > MOST_RANKS:
        raise ShardCoreError(
            f"{name}: {ranks:,} devices need as many processes on this machine, and at most {MOST_RANKS} are started; "
            "take a problem of fewer devices, or a job with a rank on each device where the command allows it"
        )
    pipes: list[Connection] = []
    running: list[BaseProcess] = []
    address = places[0].address if places else _LOOPBACK
    with _reserve_port(address, places[0] if places else None) as port:
        try:
            for rank in range(ranks):
                # One-way pipes: ranks only report.
                pipe, theirs = processes.process_context().Pipe(duplex=False)
                place = places[rank] if places else None
                task = (theirs, place, work, rank, f"tcp://{address}:{port}", arguments)
                process = processes.make_process(f"{name}-rank-{rank}", _run_rank_process, task)
                process.start()
                theirs.close()  # so that the pipe ends when the process does
                pipes.append(pipe)
                running.append(process)
            yield from follow_ranks(name, ranks, partial(_receive_messages, pipes, running), timeout_s)
        finally:
            for pipe, process in zip(pipes, running, strict=True):
                process.kill()
                process.join()
                pipe.close()


@contextmanager
def _reserve_port(address: str, place: EmulatedHost | None) -> Iterator[int]:
    """Context manager: reserve a free port of an address, which rank 0 will listen on."""

    def make_socket() -> socket.socket:
        if place:
            place.enter_network()
        return socket.socket()

    # A socket stays in the network where it was made. Only a thread enters the place's network.
    with hosts.run_in_thread(make_socket) as held:
        # With this option, rank 0 may bind the port while this socket still holds it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        yield held.getsockname()[1]


def _run_rank_process(
    pipe: Connection,
    place: EmulatedHost | None,
    work: Callable[..., None],
    rank: int,
    init_method: str,
    arguments: Sequence[Any],
) -> None:
    """Entry point of a rank's process: run `work`, and report its end or error through a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the gang
    try:
        if place:
            place.move_process()
        work(rank, init_method, lambda value: pipe.send(("message", value)), *arguments)
        pipe.send(("done", None))
    except RankLost as error:
        pipe.send(("lost", hardware.one_line_message(error)))
    # Any other error is a bug: it prints its traceback and ends the process.
    except (ShardCoreError, RuntimeError) as error:
        pipe.send(("failed", hardware.one_line_message(error)))


def _receive_messages(
    pipes: Sequence[Connection], processes: Sequence[BaseProcess], running: Sequence[int], limit_s: float
) -> Iterator[Message]:
    """Messages of running ranks, at most one of each, within a time limit."""
    ready = wait([pipes[rank] for rank in running], limit_s)
    for rank in (rank for rank in running if pipes[rank] in ready):
        try:
            yield rank, *pipes[rank].recv()
        except (EOFError, OSError):  # at once, or in the middle of a message
            yield rank, "failed", exit_reason(processes[rank])


def follow_ranks(name: str, ranks: int, receive: Receive, timeout_s: float) -> Generator[tuple[int, Any]]:
    """Yield messages of ranks until all are done. Raises as `run_ranks`."""
    done: set[int] = set()
    lost: dict[int, str] = {}
    # A rank that waits in an exchange reports it after timeout_s, so this comes a little later.
    deadline = time.monotonic() + timeout_s + _GRACE_S
    while len(done) < ranks:
        running = [rank for rank in range(ranks) if rank not in done and rank not in lost]
        left_s = deadline - time.monotonic()
        if not running or left_s <= 0:
            # Ranks that wait in an exchange would have reported it by now, so one hangs.
            raise ShardCoreError(_silence_message(name, running, lost, timeout_s))
        for rank, kind, value in receive(running, left_s):
            if kind == "message":
                yield rank, value
            elif kind == "done":
                done.add(rank)
            elif kind == "failed":
                raise ShardCoreError(f"{name}: rank {rank} of {ranks} failed: {value}")
            else:
                lost[rank] = value
            now = time.monotonic()
            # Once an exchange has broken, the rank that failed gets a short time to report why.
            deadline = min(deadline, now + _GRACE_S) if lost else now + timeout_s + _GRACE_S


def _silence_message(name: str, silent: Iterable[int], lost: dict[int, str], timeout_s: float) -> str:
    """Error message for ranks that send nothing until a timeout."""
    ranks = ", ".join(map(str, silent))
    if not lost:
        return (
            f"{name}: no word for {timeout_s:g} s from rank {ranks}: it hangs, or its work needs a longer "
            "timeout_s"
        )
    first, reason = next(iter(lost.items()))
    waits = f"rank {ranks or first} does not answer the others ({timeout_s:g} s are allowed)"
    return f"{name}: {waits}; rank {first}: {reason}"


def exit_reason(process: BaseProcess) -> str:
    """Reason why a process ended, from its exit code."""
    # The exit code is known only after the process has been waited for.
    process.join(_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        killer = signal.Signals(-code).name
        return f"it was killed by {killer}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"it ended with exit code {code}; what it wrote to standard error says why"
