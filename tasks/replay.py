"""Replay on Ray: one step of plans on real devices of the cluster, one actor a device, all on one host.

`evaluate` uses it to judge models. `measure` uses it for samples, which show the times of exchanges in steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ray
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, Plan, Problem, Setting, Table
from shardcore.io import dataset, files, replays
from shardcore.io.measurements import StepSample
from shardcore.measure.replay import ReplayConfig, combine_all, require_replayable
from shardcore.measure.run import measure_steps as measure_lacking
from shardcore.measure.sampling.steps import first_step_plans, step_tables
from shardcore.step.lower import Workload
from tasks import actors
from tasks.measure import MeasureConfig, cluster_device, rank_count, with_room
from tasks.progress import Progress
from tasks.workers import ReplayRank

Run = Callable[[Sequence[Workload]], list[StepSample]]


@contextmanager
def replaying(
    ranks: int, setting: Setting, config: ReplayConfig, reference: dataset.ReferenceOp | None = None
) -> Iterator[Run]:
    """Start a gang on one host of the connected cluster, for as long as the context lasts.

    Yields a function that replays plans of one problem, as shardcore.measure.replay.replay_all does. It runs on GPUs
    if the cluster has some, else on CPU cores. NCCL is written for the same interface as gloo, and has not been run
    here.

    reference: a dataset's reference op, which runs between steps.

    Raises ShardCoreError if no host has enough free devices; the function raises as replay_all.
    """
    device = cluster_device()
    shared = actors.rank_cpus(ranks) < 1 and device == "cpu"
    with actors.gang(ReplayRank, "replay", ranks, device) as members:

        def run(workloads: Sequence[Workload]) -> list[StepSample]:
            for workload in workloads:
                # "cpu", as this machine's GPUs do not count: steps run on those of the cluster.
                require_replayable(workload, workloads[0], setting, "cpu")
            marks = _marks(members, workloads, setting, config, device, reference)
            costs = combine_all(marks, reference, workloads[0].job)
            return [dataclasses.replace(cost, oversubscribed=shared) for cost in costs]

        yield run


class EachProblem:
    """A context manager for replays of several problems, which starts a gang when the first one needs it.

    An error ends the replays of its problem only. The others go on with another gang, as the gang may have lost a rank.
    Leaving the context raises ShardCoreError naming the problems that failed.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Run]]):
        self._begin, self._stack, self._run = begin, ExitStack(), None
        # True while a gang starts, in which an error would meet all problems.
        self._is_starting = False
        self._tried: set[str] = set()
        self.failed: dict[str, str] = {}

    def run(self, name: str, work: Callable[[Run], object]) -> bool:
        """Tell if `work` on a problem succeeded. It gets the function that replays plans."""
        self._tried.add(name)
        try:
            work(lambda workloads: self.start()(workloads))
        except Exception as error:
            if self._is_starting:
                raise ShardCoreError(f"{error}{self._failures()}") from None
            plain = isinstance(error, ShardCoreError)
            self.failed[name] = str(ShardCoreError(f"{name}: {error if plain else repr(error)}"))
            get_run_logger().warning(
                "%s", self.failed[name], extra={"problem": name}, exc_info=None if plain else error
            )
            self._run = None
            try:
                self._stack.close()
            except Exception as lost:  # its ranks may be gone
                get_run_logger().warning("the gang that failed did not end well: %r", lost)
            return False
        return True

    def start(self) -> Run:
        """The function that replays plans. Ranks that are not there yet start beside what the caller does next."""
        if self._run is None:
            self._is_starting = True
            self._run = self._stack.enter_context(self._begin())
            self._is_starting = False
        return self._run

    def __enter__(self) -> EachProblem:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if self.failed and error is None:
            raise ShardCoreError(self._failures().removeprefix("; "))

    def _failures(self) -> str:
        """Failures so far, for the end of a message."""
        if not self.failed:
            return ""
        first, *others = self.failed.values()
        more = f" (and {len(others)} more, which the log names)" if others else ""
        return f"; {len(self.failed)} of {len(self._tried)} problems could not be replayed: {first}{more}"


@task(task_run_name="measure-steps")
def measure_steps(pool_path: Path, setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Replay the plans whose steps the dataset lacks, by a gang on one host of the connected cluster.

    Returns the number of plans. If the cluster cannot replay, it is 0, and the log says why.
    """
    pool, devices = files.read_pool(pool_path), step_devices(config, setting.batch)
    if reason := why_no_steps(pool, setting, devices, config):
        get_run_logger().warning("what exchanges take in steps stays unknown: %s", reason)
        return 0
    lacking = replays.missing(folder, wanted_steps(pool, setting, devices, config), setting)
    total = sum(len(plans) for _, plans in lacking)
    if not total:
        return 0
    progress, reference = Progress("steps", total), dataset.reference_op(folder, setting)

    def count(problem: Problem, n: int, again: bool) -> None:
        if again:
            get_run_logger().info("%d steps of %s were disturbed and replayed once more", n, problem.name)
        else:
            progress.add(f"{devices} ranks", n)
            progress.show()

    with EachProblem(lambda: replaying(devices, setting, config.steps(), reference)) as gang:
        measure_lacking(folder, lacking, setting, config.steps(), gang.run, count)
    return total


def wanted_steps(
    pool: Sequence[Table], setting: Setting, devices: int, config: MeasureConfig
) -> list[tuple[Problem, list[tuple[str, Plan]]]]:
    """The first step_samples plans of the seed's draws, by their problems."""
    return first_step_plans(
        pool, config.step_samples, setting, devices, config.steps().arena_bytes, config.seed
    )


def why_no_steps(pool: Sequence[Table], setting: Setting, devices: int, config: MeasureConfig) -> str | None:
    """The reason why steps of a pool's tables cannot run on so many devices. None if they can."""
    if devices < 2:
        return "no host has two devices (cores or GPUs) that they could run on, as many as divide the batch"
    most = config.steps().arena_bytes
    if step_tables(pool, setting, most):
        return None
    return f"no table of the pool with lookups fits {most >> 20} MiB at a dim of {MIN_WIDTH}"


def step_devices(config: MeasureConfig, batch: int) -> int:
    """Number of devices of one host for steps: those of an exchange, as far as cores and memory allow."""
    device = cluster_device()
    most = rank_count(config, device, batch) // config.hosts
    if device == "cpu":
        largest = max(
            (node["Resources"] for node in ray.nodes() if node["Alive"]), key=lambda r: r.get("CPU", 0)
        )
        # As large an arena as for compute, as the reference op has its shards.
        most = int(min(most, with_room(largest, config.arena_bytes)))
    return devices_of_a_host(most, batch)


def devices_of_a_host(most: int, batch: int) -> int:
    """Number of devices of one host of the connected cluster that replay plans without sharing a core.

    It divides the batch and is at most `most`.
    """
    kind = "GPU" if cluster_device() == "cuda" else "CPU"
    there = max(int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"])
    return max(n for n in range(1, max(1, min(most, there)) + 1) if batch % n == 0)


def _marks(
    members: Sequence[Any],
    workloads: Sequence[Workload],
    setting: Setting,
    config: ReplayConfig,
    device: str,
    reference: dataset.ReferenceOp | None,
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """The result of replay_rank of each rank."""
    [address] = actors.when_started([members[0].address.remote()])
    given = ray.put(list(workloads))
    calls = [
        m.run.options(name=f"replay {len(workloads)} plans").remote(
            rank, address, given, setting, config, device, reference
        )
        for rank, m in enumerate(members)
    ]
    return actors.answers("replay", calls, config.timeout_s, actors.silence(members))
