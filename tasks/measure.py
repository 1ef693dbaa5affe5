"""Measuring on Ray: one actor a device, many samples a call; and a gang of ranks for exchanges.

One Prefect task owns its actors (a Prefect task a sample would cost more than the sample). Each finished chunk becomes a part of
the dataset at once. An actor that dies or hangs is replaced; its chunk goes on in pieces of one sample, so that the one sample
which kills an actor is found, recorded with its reason, and costs nothing else.
"""

from __future__ import annotations

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
from tasks.ray_cluster import ray_cluster


@dataclass(frozen=True)
class MeasureConfig:
    """How much to measure. devices: Ray actors (0: one for each GPU of the cluster, or each CPU core where there is none);
    ranks: processes of an exchange (0: as many as devices, at least 2); chunk: samples an actor call; hang_s: a call that takes
    this long for each of its samples has hung. The rest as in KernelConfig, GroupConfig and CommConfig."""

    compute_samples: int = 600
    comm_samples: int = 100
    seed: int = 0
    devices: int = 0
    ranks: int = 0
    chunk: int = 16
    hang_s: float = 60.0
    arena_bytes: int = 1 << 30
    precision: float = 0.05
    min_repeats: int = 6
    max_repeats: int = 12
    max_shards: int = 30
    comm_repeats: int = 9

    def __post_init__(self) -> None:
        if min(self.compute_samples, self.comm_samples, self.devices, self.ranks) < 0 or self.chunk < 1:
            raise ShardCoreError(f"measure config {self} needs counts of 0 or more and a chunk of at least 1")

    def kernels(self) -> kernels.KernelConfig:
        return kernels.KernelConfig(self.arena_bytes, self.precision, self.min_repeats, self.max_repeats)

    def groups(self) -> sampling.GroupConfig:
        return sampling.GroupConfig(max_shards=self.max_shards, max_shard_bytes=self.arena_bytes)


@ray.remote(max_restarts=0)
class Device:
    """One device of the cluster, measuring compute."""

    def __init__(self, setting: Setting, device: str, config: kernels.KernelConfig):
        torch.set_num_threads(1)
        self._bench = kernels.KernelBench(setting, device, config)

    def ready(self) -> bool:
        return True

    def measure(self, requests: Sequence[ComputeRequest]) -> tuple[list[ComputeSample], float]:
        """Samples, and the seconds spent in kernels."""
        before = self._bench.kernel_s
        return list(self._bench.measure(requests)), self._bench.kernel_s - before


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
    live = [t for t in pool if t.pooling > 0]
    if not live:
        raise ShardCoreError("the pool has no table with lookups; there is nothing to measure")
    return _first_different(config.compute_samples, lambda r: dataset.compute_id(setting, r), lambda i: sampling.compute_request(
        live, i, setting.batch, config.seed, config.groups()))


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


def n_devices(config: MeasureConfig) -> int:
    """Devices of the connected cluster to measure on."""
    resources = ray.cluster_resources()
    return config.devices or int(resources.get("GPU", 0) or resources.get("CPU", 1))


@task(task_run_name="measure-compute")
def measure_compute(pool_path: Path, setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the groups that the dataset lacks, on all devices; the number measured."""
    device = hardware.detect_device()
    pool = files.read_pool(pool_path)
    known = dataset.read_ids(folder, "compute")
    requests = [r for k, r in wanted_compute(pool, setting, config).items() if k not in known]
    get_run_logger().info("%d compute samples wanted, %d of them to measure", config.compute_samples, len(requests))
    if not requests:
        return 0
    pool_name = dataset.write_pool(folder, pool)
    waiting = deque(list(requests[i:i + config.chunk]) for i in range(0, len(requests), config.chunk))
    failed = 0
    with ray_cluster():
        n = min(n_devices(config), len(waiting))

        def new_actor(slot: int) -> Any:
            return Device.options(name=f"measure[compute] device {slot}", num_gpus=int(device == "cuda"), num_cpus=1).remote(
                setting, device, config.kernels())

        actors = [new_actor(i) for i in range(n)]
        _all_ready([a.ready.remote() for a in actors])
        progress = _Progress("compute", len(requests))
        busy: dict[Any, tuple[int, list[ComputeRequest], float]] = {}
        try:
            while waiting or busy:
                idle = set(range(n)) - {slot for slot, _, _ in busy.values()}
                for slot in sorted(idle):
                    if waiting:
                        chunk = waiting.popleft()
                        ref = actors[slot].measure.options(
                            name=f"measure[compute] {progress.done + len(chunk)}/{len(requests)}").remote(chunk)
                        busy[ref] = (slot, chunk, time.monotonic() + 60 + config.hang_s * len(chunk))
                finished, _ = ray.wait(list(busy), num_returns=1, timeout=1.0)
                late = [ref for ref, (_, _, due) in busy.items() if ref not in finished and time.monotonic() > due]
                for ref in [*finished, *late]:
                    slot, chunk, _ = busy.pop(ref)
                    try:
                        samples, kernel_s = ray.get(ref, timeout=0 if ref in late else None)
                    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                        ray.kill(actors[slot])
                        actors[slot] = new_actor(slot)
                        reason = "hung" if ref in late else f"killed its actor: {_reason(error)}"
                        if len(chunk) > 1:
                            waiting.extend([r] for r in chunk)
                            continue
                        samples, kernel_s = [_failed(setting, chunk[0], reason)], 0.0
                    except ray.exceptions.RayTaskError as error:
                        raise _cause(error) from None
                    dataset.write_compute(folder, samples, pool_name)
                    failed += sum(s.error is not None for s in samples)
                    progress.add(len(samples), kernel_s / n)
        finally:
            for actor in actors:
                ray.kill(actor)
    if failed:
        get_run_logger().warning("%d of %d samples failed; their reasons are in the dataset", failed, len(requests))
    return len(requests)


def _all_ready(calls: list[Any]) -> None:
    """Wait until actors are up; raises ShardCoreError where one cannot start (FBGEMM missing, no such device free)."""
    try:
        ray.get(calls, timeout=300)
    except ray.exceptions.RayActorError as error:
        raise ShardCoreError(f"a measuring actor cannot start: {_reason(error)}") from None
    except ray.exceptions.GetTimeoutError:
        raise ShardCoreError(f"{len(calls)} measuring actors found no free device in 300 s; the cluster has "
                             f"{ray.cluster_resources()}; set measure.devices lower") from None


def _reason(error: Exception) -> str:
    """Why an actor failed, in one line, without Ray's frames."""
    return " ".join(str(error).split("ShardCoreError: ")[-1].split())[-300:]


def _failed(setting: Setting, request: ComputeRequest, reason: str) -> ComputeSample:
    return ComputeSample(dataset.compute_id(setting, request), setting, request, None, None, time.time(), reason)


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, ShardCoreError) else error


@task(task_run_name="measure-comm")
def measure_comm(setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the exchanges that the dataset lacks, by a gang of ranks in one placement group; the number measured."""
    device = hardware.detect_device()
    with ray_cluster():
        ranks = config.ranks or max(2, n_devices(config))
        known = dataset.read_ids(folder, "comm")
        requests = [r for k, r in wanted_comm(setting, ranks, config).items() if k not in known]
        if not requests:
            return 0
        bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        group = placement_group([bundle] * ranks, strategy="PACK")
        try:
            if not group.wait(60):
                raise ShardCoreError(f"{ranks} ranks do not fit the Ray cluster with {ray.cluster_resources()}; "
                                     "set measure.ranks lower")
            gang = [Exchange.options(name=f"measure[comm] rank {i}", num_cpus=1, num_gpus=int(device == "cuda"),
                                     scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote() for i in range(ranks)]
            address = ray.get(gang[0].address.remote(), timeout=120)
            comm = collectives.CommConfig(repeats=config.comm_repeats)
            _all_ready([a.join.remote(i, ranks, address, device, comm) for i, a in enumerate(gang)])
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
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
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
