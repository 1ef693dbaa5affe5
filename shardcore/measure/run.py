"""Measure the samples that a dataset's folder lacks. A seed draws them, and they are written as they come back.

A rerun goes on where the last one ended. The caller chooses where samples run: processes of this machine for
the command, Ray actors for the pipeline. Both pass a callback for progress.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem, Setting, Table
from shardcore.io import dataset, replays
from shardcore.io.measurements import (
    CollectiveRequest,
    CollectiveSample,
    ComputeRequest,
    ComputeSample,
)
from shardcore.measure.replay import ReplayConfig
from shardcore.measure.sampling import Request, different
from shardcore.measure.sampling.collectives import comm_request
from shardcore.measure.sampling.groups import GroupConfig, compute_request
from shardcore.measure.sampling.steps import Plans
from shardcore.measure.supervise import Finished, Supervisor

KEEP_EVERY_S = 5.0
"""Most seconds between two writes, whatever the chunk. A kill loses at most the samples of that time."""
_LONGEST_END = 0.25
"""Largest share of the time that is left to requests that still run at the end."""
_LATE_S = 5.0
"""Longest wait for results after the time is over. Later ones are dropped."""
Event = TypeVar("Event")
Attempt = Callable[[str, Callable[[replays.Replay], object]], bool]
"""Function of a problem's name, and of work that needs a replay function. False: it failed, and others go on."""


# --- what is wanted -----------------------------------------------------------------------------------------


def tables_with_lookups(pool: Sequence[Table]) -> list[Table]:
    # Without lookups an op has nothing to measure.
    live = [t for t in pool if t.pooling > 0]
    if not live:
        raise ShardCoreError("the pool has no table with lookups; there is nothing to measure")
    return live


def wanted_groups(
    tables: Sequence[Table], setting: Setting, n: int | None, seed: int, groups: GroupConfig
) -> Iterator[tuple[str, ComputeRequest]]:
    """The first n different groups of a seed, with their ids. n None: all."""

    def draw(i: int) -> ComputeRequest:
        return compute_request(tables, i, setting, seed, groups)

    return different(draw, lambda r: dataset.compute_id(setting, r), n)


def wanted_exchanges(
    setting: Setting, n: int, ranks: int, seed: int, hosts: int = 1
) -> Iterator[tuple[str, CollectiveRequest]]:
    """The first n different exchanges of a seed, with their ids."""

    def draw(i: int) -> CollectiveRequest:
        return comm_request(i, ranks, setting.batch, seed, hosts=hosts)

    return different(draw, lambda r: dataset.comm_id(setting, r), n)


def lacking(
    wanted: Iterable[tuple[str, Request]], known: Collection[str], again: int = 0
) -> Iterator[Request]:
    """Requests without a sample, and the first `again` in any case: repeats show how far timings agree."""
    return (r for n, (key, r) in enumerate(wanted) if n < again or key not in known)


# --- measuring ----------------------------------------------------------------------------------------------


def measure_groups(
    bench: Supervisor,
    requests: Iterable[ComputeRequest],
    folder: Path,
    pool: Sequence[Table],
    progress: Callable[[Sequence[Finished]], object],
    chunk: int = 1,
    until: float = math.inf,
) -> None:
    """Measure groups by a calibrated bench, into a folder.

    progress: called with results, which are written within KEEP_EVERY_S.
    chunk: samples that are written at once.
    until: time.monotonic() at which to end. Requests that run then are still kept.
    """
    began, done = time.monotonic(), 0
    # This makes the folder. The bench has started by now, so no failed start leaves an empty one.
    pool_name = dataset.write_pool(folder, pool)

    def has_time(_: ComputeRequest) -> bool:
        """True if a request that starts now is likely to finish in time."""
        # `interleave` requests run in turn, so each takes as long as so many one by one.
        now = time.monotonic()
        each_s = (now - began) / done if done else 0.0
        return now + min(bench.spec.config.interleave * each_s, _LONGEST_END * (until - began)) < until

    def count(finished: Sequence[Finished]) -> None:
        nonlocal done
        done += sum(f.settled for f in finished)
        progress(finished)

    def samples_of(finished: Sequence[Finished]) -> list[ComputeSample]:
        return [s for f in finished for s in f.samples]

    def write(samples: list[ComputeSample]) -> None:
        dataset.write_compute(folder, samples, pool_name)

    # With a limit of time, requests may be drawn without end.
    results = bench.measure(requests if until == math.inf else itertools.takewhile(has_time, requests))
    in_time = itertools.takewhile(lambda _: time.monotonic() < until + _LATE_S, results)
    keep(in_time, samples_of, chunk, write, count)


def measure_exchanges(
    samples: Iterable[CollectiveSample],
    folder: Path,
    progress: Callable[[CollectiveSample], object],
    chunk: int,
) -> None:
    """Keep exchanges in a folder as they are measured."""
    keep(samples, lambda sample: [sample], chunk, lambda some: dataset.write_comm(folder, some), progress)


def attempt_with(replay: replays.Replay) -> Attempt:
    """An attempt of each problem by this replay function. An error ends all."""

    def attempt(_: str, work: Callable[[replays.Replay], object]) -> bool:
        work(replay)
        return True

    return attempt


def measure_steps(
    folder: Path,
    wanted: Sequence[tuple[Problem, Plans]],
    setting: Setting,
    config: ReplayConfig,
    attempt: Attempt,
    progress: Callable[[Problem, int, bool], object],
) -> None:
    """Replay the plans whose steps a folder lacks, and once more those that were disturbed.

    progress: called with each problem, the number of its plans, and True if they were disturbed before.
    """
    failed = set()
    # The second round repeats replays that were disturbed in the first.
    for again in (False, True):
        for problem, plans in replays.missing(folder, wanted, setting):
            if problem.name in failed:
                continue

            # Defaults bind the loop's values, as the work may run later.
            def append(replay: replays.Replay, problem: Problem = problem, plans: Plans = plans) -> None:
                replays.append(folder, problem, plans, setting, config, replay)

            if attempt(problem.name, append):
                progress(problem, len(plans), again)
            else:
                failed.add(problem.name)


def keep(
    events: Iterable[Event],
    samples_of: Callable[[Event], Sequence[Any]],
    chunk: int,
    write: Callable[[list[Any]], object],
    progress: Callable[[Event], object],
) -> None:
    """Write samples once `chunk` of them have come, and every KEEP_EVERY_S those that have.

    The rest is written at the end, also after an error or Ctrl-C.
    """
    waiting: list[Any] = []
    failed: list[Exception] = []
    # The timer and the main thread share the list.
    lock, ended = threading.Lock(), threading.Event()

    def write_waiting(at_least: int = 1) -> None:
        with lock:
            if len(waiting) >= at_least:
                write(list(waiting))
                waiting.clear()

    def write_now_and_then() -> None:
        try:
            while not ended.wait(KEEP_EVERY_S):
                write_waiting()
        # An error in the timer's thread would vanish, so the main thread raises it.
        except Exception as error:
            failed.append(error)

    timer = threading.Thread(target=write_now_and_then, daemon=True)
    timer.start()
    try:
        for event in events:
            if failed:
                raise failed[0]
            with lock:
                waiting.extend(samples_of(event))
            write_waiting(chunk)
            # Progress comes after the write, so that it never counts a sample that is lost.
            progress(event)
    finally:
        ended.set()
        timer.join()
        write_waiting()
