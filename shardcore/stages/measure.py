"""Measure the samples that a dataset's folder lacks. A seed draws them, and they are written as they come back.

A rerun goes on where the last one ended. A transport runs them: processes of this machine for the command, Ray actors
for the pipeline. Samples that were disturbed are measured once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, Problem, Setting, Table
from shardcore.io import dataset, replays
from shardcore.io.measurements import CollectiveRequest, ComputeRequest
from shardcore.measure import collectives
from shardcore.measure.device_bench import BenchSpec
from shardcore.measure.replay import replay_all
from shardcore.measure.sampling import Request, distinct_requests
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.groups import draw_compute_request, reference_request
from shardcore.measure.sampling.steps import Plans, draw_plans_of_measured_steps, fitting_tables
from shardcore.measure.supervise import FinishedCall, Supervisor
from shardcore.measure.tally import NAMES, Tally, duration_text
from shardcore.measure.transport import NoRoom, Transport
from shardcore.stages.measure_config import MeasureConfig
from shardcore.stages.progress import Progress
from shardcore.tables.held_out import is_held_out

KEEP_EVERY_S = 5.0
"""Most seconds between two writes, whatever the chunk. A kill loses at most the samples of that time."""
CALIBRATE_S = 5.0
"""Seconds of measuring the reference op's ms, if the folder has no timing of it."""
WORKER_BYTES = 1 << 30
"""Memory of a measuring process in addition to its arena: torch, FBGEMM, streams of ids."""
_LONGEST_END = 0.25
"""Largest share of the time that is left to requests that still run at the end."""
_LATE_S = 5.0
"""Longest wait for results after the time is over. Later ones are dropped."""
_STATES = 4
"""Rows of optimizer state, over the rows of the largest table. The tables of an op that have more share them."""
USUAL_S = {"compute": 0.2, "comm": 0.4, "steps": 2.0}
"""Seconds of a sample by kind, with those that are disturbed and measured once more, on two CPU cores."""
_PAUSE_S = 60.0
"""Gap between two samples beyond which they are of two runs."""
_ENOUGH = 20
"""Fewest gaps between samples that give a rate."""
Event = TypeVar("Event")


# --- what is wanted -----------------------------------------------------------------------------------------


def tables_with_lookups(pool: Sequence[Table]) -> list[Table]:
    # Without lookups an op has nothing to measure.
    """Tables of a pool that have lookups. Raises ShardCoreError if there are none."""
    live = [t for t in pool if t.pooling > 0]
    if not live:
        raise ShardCoreError("the pool has no table with lookups; there is nothing to measure")
    return live


def requests_to_measure(
    wanted: Iterable[tuple[str, Request]], known: Collection[str], again: int = 0
) -> Iterator[Request]:
    """Requests without a sample, and the first `again` in any case, to show how far timings agree."""
    return (r for n, (key, r) in enumerate(wanted) if n < again or key not in known)


@dataclass(frozen=True)
class WantedSamples:
    """Samples that a MeasureConfig asks for, drawn from a pool in a setting, for the devices of a transport."""

    pool: Sequence[Table]
    setting: Setting
    config: MeasureConfig
    transport: Transport

    def draw_groups(self) -> Iterator[tuple[str, ComputeRequest]]:
        """Draw the distinct groups of shards to measure as ops, with their ids."""
        live, config, setting = tables_with_lookups(self.pool), self.config, self.setting
        drawn = [t for t in live if is_held_out(t)] if config.held_out else live
        draw = partial(
            draw_compute_request, drawn, setting=setting, seed=config.seed, config=config.group_config
        )
        return distinct_requests(draw, partial(dataset.compute_id, setting), config.compute_samples)

    def reference_op_request(self) -> ComputeRequest:
        """Request of the reference op."""
        return reference_request(tables_with_lookups(self.pool), self.setting, self.config.group_config)

    def draw_exchanges(self) -> Iterator[tuple[str, CollectiveRequest]]:
        """Draw the distinct exchanges to measure, with their ids; none if there are fewer than two ranks."""
        ranks, config, setting = self.n_ranks, self.config, self.setting
        draw = partial(
            draw_collective_request, ranks=ranks, batch=setting.batch, seed=config.seed, hosts=config.hosts
        )
        most = config.comm_samples if ranks > 1 else 0
        return distinct_requests(draw, partial(dataset.collective_id, setting), most)

    def draw_steps(self) -> list[tuple[Problem, Plans]]:
        """Draw the plans whose steps are measured, by problem."""
        most_bytes, n = self.config.step_config.arena_bytes, self.config.step_samples
        if not n or self.why_no_steps():
            return []
        return draw_plans_of_measured_steps(
            self.pool, n, self.setting, self.n_step_ranks, most_bytes, self.config.seed
        )

    def why_no_steps(self) -> str | None:
        """Reason why training steps with the pool's tables cannot be measured; None if they can."""
        if self.n_step_ranks < 2:
            return (
                "no host has two devices (cores or GPUs) that they could run on, as many as divide the batch"
            )
        most_bytes = self.config.step_config.arena_bytes
        if fitting_tables(self.pool, self.setting, most_bytes):
            return None
        return f"no table of the pool with lookups fits {most_bytes >> 20} MiB at a dim of {MIN_WIDTH}"

    def count_missing(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Number of wanted samples of each kind, and of those missing in a folder. Endless groups count as none."""
        groups = {} if self.config.compute_samples is None else dict(self.draw_groups())
        exchanges, steps = dict(self.draw_exchanges()), self.draw_steps()
        lacking_steps = replays.plans_without_replay(folder, steps, self.setting)
        return {
            "compute": (len(groups), len(groups.keys() - dataset.read_timed_ids(folder, "compute"))),
            "comm": (len(exchanges), len(exchanges.keys() - dataset.read_timed_ids(folder, "comm"))),
            "steps": (_count_plans(steps), _count_plans(lacking_steps)),
        }

    @property
    def n_processes(self) -> int:
        """Number of processes that measure groups: as configured, or as devices and memory allow."""
        hosts, config = self.transport.hosts(), self.config
        devices = sum(host.devices for host in hosts)
        if config.actors or self.transport.device == "cuda":
            return config.actors or devices
        return int(max(1, min(devices, sum(host.memory_bytes for host in hosts) // self._process_bytes)))

    @property
    def n_ranks(self) -> int:
        """Number of ranks of a measured exchange. Below 2 no exchanges are measured.

        It is as configured, or the most devices of `hosts` hosts, equally many on each, that divide the batch. On CPUs
        it is at least two, which may have to share a core.

        Raises ShardCoreError if no such number divides the batch, or there are fewer hosts.
        """
        config, batch = self.config, self.setting.batch
        if config.ranks:
            if batch % config.ranks:
                raise ShardCoreError(
                    f"measure.ranks is {config.ranks}, which does not divide the batch of {batch}"
                )
            return config.ranks
        n, hosts = config.hosts, self.transport.hosts()
        each = hosts[n - 1].devices if n <= len(hosts) else 0
        fits = [r * n for r in range(1, each + 1) if batch % (r * n) == 0]
        if n > 1 and not fits:
            raise ShardCoreError(
                f"no number of ranks, equally many on each of {n} hosts of the {len(hosts)} that are there, "
                f"divides the batch of {batch}; change measure.hosts"
            )
        return max(fits, default=1) if self.transport.device == "cuda" else max([*fits, 2])

    @property
    def n_step_ranks(self) -> int:
        """Number of ranks, on one host, of a measured training step, as far as cores and memory allow."""
        most = self.n_ranks // self.config.hosts
        if self.transport.device == "cpu":
            # As large an arena as for compute, as the reference op has its shards.
            most = int(min(most, self.transport.hosts()[0].memory_bytes // self._process_bytes))
        return replay_device_count(self.transport, most, self.setting.batch)

    @property
    def _process_bytes(self) -> int:
        """Memory of one measuring process."""
        return self.config.kernels.arena_bytes + WORKER_BYTES


def _count_plans(steps: Iterable[tuple[Problem, Plans]]) -> int:
    """Number of plans of all problems."""
    return sum(len(plans) for _, plans in steps)


def replay_device_count(transport: Transport, max_devices: int, batch: int) -> int:
    """Number of devices of one host that replay plans without sharing a core.

    It divides the batch and is at most `max_devices`.
    """
    there = transport.hosts()[0].devices
    return max(n for n in range(1, max(1, min(max_devices, there)) + 1) if batch % n == 0)


# --- the time that it takes ---------------------------------------------------------------------------------


def estimate_measuring_time(wanted_samples: WantedSamples, folder: Path) -> list[str]:
    """Lines of text on each kind of wanted sample: how many a folder lacks, and the estimated time to measure them.

    No device is used. If the folder has samples of the setting, the time follows from the rate at which it grew.
    Else it follows from the usual rate of two CPU cores, and the line says so.
    """
    devices = {
        "compute": wanted_samples.n_processes,
        "comm": wanted_samples.n_ranks,
        "steps": wanted_samples.n_step_ranks,
    }
    measured_at = {
        "compute": [s.measured_at for s in dataset.read_compute_samples(folder, wanted_samples.setting)],
        "comm": [s.measured_at for s in dataset.read_collective_samples(folder, wanted_samples.setting)],
    }
    lines = []
    for kind, (n, missing) in wanted_samples.count_missing(folder).items():
        line = f"{NAMES[kind]}: {missing} of {n} are missing"
        if missing:
            each_s, basis = _seconds_per_sample(kind, measured_at.get(kind, []))
            line += f", {devices[kind]} devices, about {duration_text(missing * each_s)} {basis}"
        lines += [line] if n else []
    return lines


def _seconds_per_sample(kind: str, measured_at: Sequence[float]) -> tuple[float, str]:
    """Estimated seconds per sample of a kind, and the basis of the estimate in words.

    measured_at: times of the known samples, Unix s.
    """
    gaps = np.diff(np.sort(measured_at))
    # Without pauses between runs, which would lower the rate.
    gaps = gaps[gaps < _PAUSE_S]
    if len(gaps) < _ENOUGH:
        return USUAL_S[kind], "at the usual rate of two CPU cores"
    rate = len(gaps) / max(gaps.sum(), 1e-3)
    return 1 / rate, f"at the {rate:.1f} a second at which the dataset grew"


# --- measuring ----------------------------------------------------------------------------------------------


def measure(wanted_samples: WantedSamples, folder: Path, progress: Progress) -> dict[str, int]:
    """Measure the wanted samples that a dataset folder lacks. Returns the number of missing samples of each kind."""
    found = {
        "compute": measure_groups(wanted_samples, folder, progress),
        "comm": measure_exchanges(wanted_samples, folder, progress),
        "steps": measure_steps(wanted_samples, folder, progress),
    }
    # One file of each kind, as DVC and readers handle few files better than many.
    dataset.merge_parts(folder)
    return found


def measure_groups(wanted_samples: WantedSamples, folder: Path, progress: Progress) -> int:
    """Measure the groups of shards that a dataset folder lacks, then once more those that were disturbed.

    Returns the number of groups that were lacking and had time.
    """
    config, setting, transport = wanted_samples.config, wanted_samples.setting, wanted_samples.transport
    until = time.monotonic() + 60 * (math.inf if config.minutes is None else config.minutes)
    known = dataset.read_timed_ids(folder, "compute")
    missing: Iterable[ComputeRequest] = requests_to_measure(wanted_samples.draw_groups(), known, config.again)
    total = None
    if config.compute_samples is not None:
        missing = list(missing)
        total = len(missing)
        progress.info("%d compute samples wanted, %d of them to measure", config.compute_samples, total)

    def disturbed_requests() -> list[ComputeRequest]:
        again = dataset.disturbed_sample_ids(folder, config.kernels.timing_tolerance(transport.device))
        if not again:
            return []
        if config.compute_samples is not None:
            return [r for key, r in wanted_samples.draw_groups() if key in again]
        return [s.request for s in dataset.read_compute_samples(folder, setting) if s.id in again]

    if total == 0 and not disturbed_requests():
        return 0
    reference = wanted_samples.reference_op_request()
    rows = _STATES * max(t.rows for t in tables_with_lookups(wanted_samples.pool))
    kernels = dataclasses.replace(config.kernels, state_rows=config.kernels.state_rows or rows)
    fleet = transport.fleet(BenchSpec(setting, transport.device, kernels, reference), config.hang_s)
    count = wanted_samples.n_processes if total is None else min(wanted_samples.n_processes, total or 1)
    usual_ms = dataset.median_ms(folder, setting, reference)
    # A supervisor draws some calls ahead. With a limit of time these are short, so that what is drawn has time.
    calls_of = config.chunk if config.minutes is None else 1
    with Supervisor(fleet, count, usual_ms, calls_of, config.hang_s, progress.warning) as bench:
        first = itertools.islice(wanted_samples.draw_groups(), config.kernels.interleave)
        reference_ms = bench.calibrate([request for _, request in first], CALIBRATE_S)
        progress.info("%d devices; the reference op takes %.3f ms", count, reference_ms)
        # This makes the folder. The bench has started by now, so no failed start leaves an empty one.
        measured = _Groups(
            bench, folder, dataset.write_pool(folder, wanted_samples.pool), config.chunk, until
        )
        done = measured.measure(missing, Tally("compute", total), progress)
        if time.monotonic() < until and (again := disturbed_requests()):
            progress.info("%d samples were disturbed and are measured once more", len(again))
            measured.measure(again, Tally("compute", len(again), again=True), progress)
    return done


@dataclass(frozen=True)
class _Groups:
    """A calibrated bench that measures groups of shards, and the folder of its samples.

    pool: name of the pool in the folder.
    chunk: samples that are written at once.
    until: time.monotonic() at which to end. Requests that run then are still kept.
    """

    bench: Supervisor
    folder: Path
    pool: str
    chunk: int
    until: float

    def measure(self, requests: Iterable[ComputeRequest], tally: Tally, progress: Progress) -> int:
        """Measure groups of shards, and write samples as they come. Returns the number of groups."""
        began, reasons, until = time.monotonic(), list[str](), self.until

        def has_time(_: ComputeRequest) -> bool:
            """True if a request that starts now is likely to finish before the time limit."""
            # `interleave` requests run in turn, so each takes as long as so many one by one.
            now = time.monotonic()
            each_s = (now - began) / tally.done if tally.done else 0.0
            in_turn_s = self.bench.spec.config.interleave * each_s
            return now + min(in_turn_s, _LONGEST_END * (until - began)) < until

        def report_finished(finished: Sequence[FinishedCall]) -> None:
            for f in finished:
                tally.add(f.device, f.settled, f.kernel_s)
                failed = [s.error for s in f.samples if s.error is not None]
                reasons.extend(failed)
                tally.failed += len(failed)
            progress.show(tally)

        def write_samples(samples: list[Any]) -> None:
            dataset.write_compute_samples(self.folder, samples, self.pool)

        # With a limit of time, requests may be drawn without end.
        some = requests if until == math.inf else itertools.takewhile(has_time, requests)
        in_time = itertools.takewhile(lambda _: time.monotonic() < until + _LATE_S, self.bench.measure(some))
        write_in_chunks(
            in_time,
            lambda finished: [s for f in finished for s in f.samples],
            self.chunk,
            write_samples,
            report_finished,
        )
        if reasons:
            progress.warning(
                "%d of %d samples failed, the first as %s; the dataset has all reasons",
                len(reasons),
                tally.done,
                reasons[0],
            )
        return tally.done


def measure_exchanges(wanted_samples: WantedSamples, folder: Path, progress: Progress) -> int:
    """Measure the exchanges that a dataset folder lacks. Returns their number."""
    config, transport = wanted_samples.config, wanted_samples.transport
    if not config.comm_samples:
        return 0
    ranks = wanted_samples.n_ranks
    if ranks < 2:
        progress.warning(
            "one GPU cannot exchange: no exchanges are measured, and problems need to give their links"
        )
    requests = list(
        requests_to_measure(wanted_samples.draw_exchanges(), dataset.read_timed_ids(folder, "comm"))
    )
    if not requests:
        return 0
    tally = Tally("comm", len(requests))

    def report_exchange(_: object) -> None:
        tally.add(f"{ranks} ranks", 1)
        progress.show(tally)

    samples = collectives.measure_collectives(
        requests, ranks, wanted_samples.setting, config.exchange_config, transport, config.hosts
    )
    write = partial(dataset.write_collective_samples, folder)
    write_in_chunks(samples, lambda sample: [sample], config.chunk, write, report_exchange)
    return len(requests)


def measure_steps(wanted_samples: WantedSamples, folder: Path, progress: Progress) -> int:
    """Replay the plans whose steps a dataset folder lacks, and once more those that were disturbed.

    Returns the number of plans. If they cannot be replayed, it is 0, and the progress says why.
    """
    setting, config, steps = (
        wanted_samples.setting,
        wanted_samples.config.step_config,
        wanted_samples.draw_steps(),
    )
    if wanted_samples.config.step_samples and (reason := wanted_samples.why_no_steps()):
        progress.warning("what exchanges take in steps stays unknown: %s", reason)
    total = _count_plans(replays.plans_without_replay(folder, steps, setting))
    if not total:
        return 0
    tally, failures = Tally("steps", total), Failures(progress.warning)
    reference = dataset.reference_op(folder, setting)
    replay = partial(
        replay_all, setting=setting, config=config, transport=wanted_samples.transport, reference=reference
    )
    # The second round repeats replays that were disturbed in the first.
    for again in (False, True):
        for problem, plans in replays.plans_without_replay(folder, steps, setting):
            if problem.name in failures.reasons:
                continue
            if again:
                progress.info("%d steps of %s were disturbed; they run once more", len(plans), problem.name)
            work = partial(replays.add_missing_replays, folder, problem, plans, setting, config, replay)
            if failures.attempt(problem.name, work) and not again:
                tally.add(f"{wanted_samples.n_step_ranks} ranks", len(plans))
                progress.show(tally)
    failures.raise_if_any()
    return total


class Failures:
    """Collector of the problems whose work failed, so that work on the remaining problems goes on.

    warn: called with each reason, as a logger's `warning`.
    reasons: by name of the problem.
    """

    def __init__(self, warn: Callable[..., object]) -> None:
        self.reasons: dict[str, str] = {}
        self._warn = warn

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Run work on a problem, and record its failure. Returns True on success. Raises NoRoom for a lack of
        devices."""
        try:
            work()
        except NoRoom:
            raise
        except Exception as error:
            plain = isinstance(error, ShardCoreError)
            self.reasons[name] = str(ShardCoreError(f"{name}: {error if plain else repr(error)}"))
            self._warn("%s", self.reasons[name], extra={"problem": name}, exc_info=None if plain else error)
            return False
        return True

    def raise_if_any(self) -> None:
        """Raise ShardCoreError naming the problems that failed, if any."""
        if self.reasons:
            first, *others = self.reasons.values()
            more = f" (and {len(others)} more, which the log names)" if others else ""
            raise ShardCoreError(f"{len(self.reasons)} problems could not be replayed: {first}{more}")


def write_in_chunks(
    events: Iterable[Event],
    samples_of: Callable[[Event], Sequence[Any]],
    chunk: int,
    write: Callable[[list[Any]], object],
    progress: Callable[[Event], object],
) -> None:
    """Write samples of events in chunks: once `chunk` samples have come, or KEEP_EVERY_S after the last write.

    The rest is written at the end, also after an error or Ctrl-C.
    """
    waiting: list[Any] = []
    written_s = time.monotonic()
    try:
        for event in events:
            waiting.extend(samples_of(event))
            if waiting and (len(waiting) >= chunk or time.monotonic() - written_s > KEEP_EVERY_S):
                # Taken out first, so that the rest is not written after a write that failed.
                some = list(waiting)
                waiting.clear()
                write(some)
                written_s = time.monotonic()
            # Progress comes after the write, so that it never counts a sample that is lost.
            progress(event)
    finally:
        if waiting:
            write(waiting)
