"""Measuring on Ray: one actor a device, many samples a call; and a gang of ranks for exchanges.

One Prefect task owns its actors (a Prefect task a sample would cost more than the sample). Each finished chunk becomes a part of
the dataset at once. An actor that dies or hangs is replaced; its chunk goes on in pieces of one sample, so that the one sample
which kills an actor is found, recorded with its reason, and costs nothing else.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import ray
import torch
from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardcore import dataset, files, sampling
from shardcore.measure import collectives, hardware, kernels
from shardcore.types import CommRequest, ComputeRequest, ComputeSample, Setting, ShardCoreError, Table
from tasks.setting import SettingConfig

_START_S = 300
"""Seconds that a new actor may take to start and to touch its arena."""
_WORKER_BYTES = 1 << 30
"""Memory of a measuring process beside its arena: torch, FBGEMM, the pool's index streams."""


@dataclass(frozen=True)
class MeasureConfig:
    """How much to measure. actors: Ray actors, each measuring one device (0: one for each GPU of the cluster, or each CPU core
    where there is none, as far as memory goes); ranks: processes of an exchange, on one host (0: the most devices of a host that
    divide the batch); chunk: samples an actor call; hang_s: a call that takes this long for each of its samples has hung. The
    rest as in KernelConfig, GroupConfig and CommConfig."""

    compute_samples: int = 400
    comm_samples: int = 200
    seed: int = 0
    actors: int = 0
    ranks: int = 0
    chunk: int = 16
    hang_s: float = 60.0
    arena_bytes: int = 1 << 30
    tolerance: float = 0.05
    min_repeats: int = 6
    max_repeats: int = 8
    max_shards: int = 30
    comm_repeats: int = 9

    def __post_init__(self) -> None:
        if min(self.compute_samples, self.comm_samples, self.actors, self.ranks, self.seed) < 0 or self.chunk < 1:
            raise ShardCoreError(f"measure config {self} needs counts and a seed of 0 or more and a chunk of at least 1")
        self.kernels(), self.groups(), self.comm()

    def kernels(self) -> kernels.KernelConfig:
        return kernels.KernelConfig(self.arena_bytes, self.tolerance, self.min_repeats, self.max_repeats)

    def groups(self) -> sampling.GroupConfig:
        return sampling.GroupConfig(max_shards=self.max_shards, max_shard_bytes=self.arena_bytes)

    def comm(self) -> collectives.CommConfig:
        return collectives.CommConfig(repeats=self.comm_repeats)


@ray.remote(max_restarts=0)
class DeviceWorker:
    """One device of the cluster, measuring compute; with each call it measures the control group once more, so drift shows."""

    def __init__(self, setting: Setting, device: str, config: kernels.KernelConfig, control: ComputeRequest):
        torch.set_num_threads(1)
        self._device, self._control = device, control
        self._bench = kernels.KernelBench(setting, device, config)

    def hardware(self) -> str:
        return hardware.hardware_name(self._device)

    def measure(self, requests: Sequence[ComputeRequest]) -> tuple[list[ComputeSample], float]:
        """Samples, the control's among them, and the seconds spent in kernels."""
        before = self._bench.kernel_s
        return list(self._bench.measure([self._control, *requests])), self._bench.kernel_s - before


@ray.remote(max_restarts=0)
class Exchange:
    """One rank of a gang that measures exchanges."""

    def address(self) -> str:
        return f"tcp://{ray.util.get_node_ip_address()}:{collectives.free_port()}"

    def join(self, rank: int, ranks: int, address: str, device: str, config: collectives.CommConfig) -> None:
        torch.set_num_threads(1)
        self._rank = collectives.Rank(rank, ranks, address, device, config)

    def measure(self, requests: Sequence[CommRequest]) -> list[collectives.RankTimes]:
        return self._rank.measure(requests)


def wanted_compute(pool: Sequence[Table], setting: Setting, config: MeasureConfig) -> dict[str, ComputeRequest]:
    """The first compute_samples different groups of the seed's draws, by id."""
    live = tables_with_lookups(pool)
    return _first_different(config.compute_samples, lambda r: dataset.compute_id(setting, r), lambda i: sampling.compute_request(
        live, i, setting, config.seed, config.groups()))


def tables_with_lookups(pool: Sequence[Table]) -> list[Table]:
    live = [t for t in pool if t.pooling > 0]
    if not live:
        raise ShardCoreError("the pool has no table with lookups; there is nothing to measure")
    return live


def wanted_comm(setting: Setting, ranks: int, config: MeasureConfig) -> dict[str, CommRequest]:
    """The first comm_samples different exchanges of the seed's draws, by id."""
    return _first_different(config.comm_samples, lambda r: dataset.comm_id(setting, r),
                            lambda i: sampling.comm_request(i, ranks, setting.batch, config.seed))


def _first_different(n: int, id_of: Callable[[Any], str], draw: Callable[[int], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i in range(10 * n):  # a tiny pool may not have n different ones
        if len(found) == n:
            break
        request = draw(i)
        found.setdefault(id_of(request), request)
    return found


def cluster_device() -> str:
    """What the connected cluster measures on: "cuda" where it has GPUs, else "cpu"."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def cluster_setting(config: SettingConfig) -> Setting:
    """The setting of the connected cluster's devices: its hardware is theirs, not that of the machine which asks."""
    if config.hardware != hardware.AUTO or not os.environ.get("RAY_ADDRESS"):
        return config.setting()
    device = cluster_device()
    name = ray.remote(hardware.hardware_name).options(num_cpus=1, num_gpus=int(device == "cuda"), name="measure[hardware]")
    return dataclasses.replace(config, hardware=ray.get(name.remote(device), timeout=_START_S)).setting()


def actor_count(config: MeasureConfig, device: str) -> int:
    """Actors to measure compute with: as many as asked for, or as devices and memory allow."""
    resources = ray.cluster_resources()
    if config.actors or device == "cuda":
        return config.actors or int(resources["GPU"])
    room = resources.get("memory", float("inf")) // (config.arena_bytes + _WORKER_BYTES)
    return int(max(1, min(resources.get("CPU", 1), room)))


def rank_count(config: MeasureConfig, device: str, batch: int) -> int:
    """Processes of an exchange: as many as asked for, or the most devices of one host that divide the batch; on CPUs two at
    least, though they may have to share a core. Below 2 there is no exchange."""
    if config.ranks:
        if batch % config.ranks:
            raise ShardCoreError(f"measure.ranks is {config.ranks}, which does not divide the batch of {batch}")
        return config.ranks
    kind = "GPU" if device == "cuda" else "CPU"
    most = max(int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"])
    fits = max((r for r in range(1, most + 1) if batch % r == 0), default=1)
    return fits if device == "cuda" else max(fits, 2)


@task(task_run_name="measure-compute")
def measure_compute(pool_path: Path, setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the groups that the dataset lacks, on all devices of the connected cluster; the number measured."""
    pool = files.read_pool(pool_path)
    known = dataset.read_ids(folder, "compute")
    requests = [r for k, r in wanted_compute(pool, setting, config).items() if k not in known]
    get_run_logger().info("%d compute samples wanted, %d of them to measure", config.compute_samples, len(requests))
    if not requests:
        return 0
    pool_name = dataset.write_pool(folder, pool)
    waiting = deque(list(requests[i:i + config.chunk]) for i in range(0, len(requests), config.chunk))
    device, failed = cluster_device(), 0
    control = sampling.control_request(tables_with_lookups(pool), setting, config.groups())

    def new_worker(slot: int) -> Any:
        return DeviceWorker.options(name=f"measure[compute] device {slot}", num_gpus=int(device == "cuda"), num_cpus=1).remote(
            setting, device, config.kernels(), control)

    workers = [new_worker(i) for i in range(min(actor_count(config, device), len(waiting)))]
    busy: dict[Any, tuple[int, list[ComputeRequest], float]] = {}
    try:
        _require_same_hardware(setting, _when_started([w.hardware.remote() for w in workers]))
        progress = _Progress("compute", len(requests))
        while waiting or busy:
            for slot in sorted(set(range(len(workers))) - {slot for slot, _, _ in busy.values()})[: len(waiting)]:
                chunk = waiting.popleft()
                name = f"measure[compute] {progress.done + len(chunk)}/{len(requests)}"
                busy[workers[slot].measure.options(name=name).remote(chunk)] = (
                    slot, chunk, time.monotonic() + _START_S + config.hang_s * len(chunk))
            finished, _ = ray.wait(list(busy), num_returns=1, timeout=1.0)
            late = [ref for ref, (_, _, due) in busy.items() if ref not in finished and time.monotonic() > due]
            for ref in [*finished, *late]:
                slot, chunk, _ = busy.pop(ref)
                try:
                    samples, kernel_s = ray.get(ref, timeout=0 if ref in late else None)
                except ray.exceptions.RayError as error:  # the worker died, hung, or its device is spoilt
                    ray.kill(workers[slot])
                    workers[slot] = new_worker(slot)
                    _when_started([workers[slot].hardware.remote()])
                    if len(chunk) > 1:
                        waiting.extend([r] for r in chunk)
                        continue
                    reason = "hung" if ref in late else f"ended its worker: {_reason(error)}"
                    samples, kernel_s = [_failed(setting, chunk[0], reason)], 0.0
                dataset.write_compute(folder, samples, pool_name)
                failed += sum(s.error is not None for s in samples)
                progress.add(len(chunk), kernel_s / len(workers))
    finally:
        for worker in workers:
            ray.kill(worker)
    if failed:
        get_run_logger().warning("%d of %d samples failed; their reasons are in the dataset", failed, len(requests))
    return len(requests)


def _when_started(calls: list[Any]) -> list[Any]:
    """Results of the first calls to new actors; raises ShardCoreError where one cannot start (FBGEMM missing, no such device
    free)."""
    try:
        return ray.get(calls, timeout=_START_S)
    except ray.exceptions.GetTimeoutError:
        raise ShardCoreError(f"{len(calls)} measuring actors found no free device in {_START_S} s; the cluster has "
                             f"{ray.cluster_resources()}; set measure.actors or measure.ranks lower") from None
    except ray.exceptions.RayError as error:
        raise ShardCoreError(f"a measuring actor cannot start: {_reason(error)}") from None


def _require_same_hardware(setting: Setting, found: list[str]) -> None:
    """Raise ShardCoreError where devices of different hardware would be measured as one. A setting may carry a name of its own
    for one kind of hardware."""
    if len(set(found)) > 1:
        raise ShardCoreError(f"the cluster's devices are of different hardware, {sorted(set(found))}; measure ({setting}) on "
                             "one kind at a time")


def _reason(error: Exception) -> str:
    """Why an actor failed, in one line, without Ray's frames."""
    return " ".join(str(error).split("ShardCoreError: ")[-1].split())[-300:]


def _failed(setting: Setting, request: ComputeRequest, reason: str) -> ComputeSample:
    return ComputeSample(dataset.compute_id(setting, request), setting, request, None, None, time.time(), reason)


@task(task_run_name="measure-comm")
def measure_comm(setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the exchanges that the dataset lacks, by a gang of ranks in one placement group on one host of the connected
    cluster (their clocks are compared); the number measured."""
    device = cluster_device()
    ranks = rank_count(config, device, setting.batch)
    if ranks < 2:
        get_run_logger().warning("one GPU cannot exchange: no exchanges are measured, and problems need to give their links")
        return 0
    known = dataset.read_ids(folder, "comm")
    requests = [r for k, r in wanted_comm(setting, ranks, config).items() if k not in known]
    if not requests:
        return 0
    cpus = min(1.0, ray.cluster_resources().get("CPU", 1) / ranks)
    bundle = {"CPU": cpus, "GPU": 1} if device == "cuda" else {"CPU": cpus}
    group = placement_group([bundle] * ranks, strategy="STRICT_PACK")
    try:
        if not group.wait(60):
            raise ShardCoreError(f"{ranks} ranks do not fit one host of the Ray cluster with {ray.cluster_resources()}; "
                                 "set measure.ranks lower")
        gang = [Exchange.options(name=f"measure[comm] rank {i}", num_cpus=cpus, num_gpus=int(device == "cuda"),
                                 scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote() for i in range(ranks)]
        [address] = _when_started([gang[0].address.remote()])
        _when_started([a.join.remote(i, ranks, address, device, config.comm()) for i, a in enumerate(gang)])
        progress = _Progress("comm", len(requests))
        for i in range(0, len(requests), config.chunk):
            chunk = requests[i:i + config.chunk]
            calls = [a.measure.options(name=f"measure[comm] {i + len(chunk)}/{len(requests)}").remote(chunk) for a in gang]
            times = _get_all(calls, 60 + config.hang_s * len(chunk))
            dataset.write_comm(folder, [collectives.combine(setting, r, seen)
                                        for r, seen in zip(chunk, zip(*times, strict=True), strict=True)])
            progress.add(len(chunk), 0.0)
    finally:
        remove_placement_group(group)
    return len(requests)


def _get_all(calls: list[Any], timeout_s: float) -> list[list[collectives.RankTimes]]:
    """Results of a gang; the first rank that fails ends the wait."""
    waiting, deadline = list(calls), time.monotonic() + timeout_s
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise ShardCoreError(f"exchanges among {len(calls)} ranks did not end within {timeout_s:.0f} s; "
                                 "what was measured before is kept")
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            raise ShardCoreError(f"a rank of the exchange failed: {_reason(error)}; "
                                 "what was measured before is kept") from None
    return ray.get(calls)


class _Progress:
    """Samples done, rate, time left and share of time in kernels, in the log and as a Prefect progress artifact."""

    def __init__(self, kind: str, total: int):
        self.kind, self.total, self.done, self.kernel_s = kind, total, 0, 0.0
        self._began = time.monotonic()
        self._said = 0.0
        self._logger = get_run_logger()
        self._artifact: UUID = create_progress_artifact(0.0, key=f"measure-{kind}", description=f"{total} {kind} samples")

    def add(self, samples: int, kernel_s: float) -> None:
        self.done += samples
        self.kernel_s += kernel_s
        elapsed = time.monotonic() - self._began
        if elapsed - self._said < 5 and self.done < self.total:
            return
        self._said = elapsed
        rate = self.done / elapsed
        share = f", {100 * self.kernel_s / elapsed:.0f}% of the time in kernels" if self.kernel_s else ""
        self._logger.info("%s: %d of %d samples, %.1f a second, %.0f s left%s", self.kind, self.done, self.total, rate,
                          (self.total - self.done) / rate, share)
        update_progress_artifact(self._artifact, 100.0 * self.done / self.total)


@task
def merge_parts(folder: Path) -> None:
    dataset.merge_parts(folder)
