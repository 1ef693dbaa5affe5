"""Measuring on Ray: a worker a device for compute, a gang of ranks for exchanges.

One Prefect task owns all its actors, as a Prefect task a sample would cost more than the sample. Samples are written to
the dataset as they come, so a run that is killed loses only requests that were running.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import ray
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Table
from shardcore.core.validation import MOST_COUNT, MOST_REPEATS, MOST_SEED, WAITS_S, require_within
from shardcore.io import dataset, files
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, ComputeRequest
from shardcore.measure import collectives, hardware, kernels, run
from shardcore.measure.device_bench import BenchSpec
from shardcore.measure.replay import STEP_REPEATS, ReplayConfig, of_samples
from shardcore.measure.sampling import MOST_DRAWS, MOST_RANKS
from shardcore.measure.sampling.groups import GroupConfig, reference_request
from shardcore.measure.supervise import PART_S, Finished, Supervisor
from tasks import actors
from tasks.progress import Progress
from tasks.setting import SettingConfig
from tasks.workers import Exchange, RayTransport

_WORKER_BYTES = 1 << 30
"""Memory of a measuring process in addition to its arena: torch, FBGEMM, streams of ids."""


@dataclass(frozen=True)
class MeasureConfig:
    """Samples to measure, and the devices to use.

    compute_samples, comm_samples: number of groups and of exchanges.
    step_samples: number of plans of which a step is replayed.
    actors: number of Ray actors, each of which measures one device. 0: one for each GPU of the cluster; without GPUs,
      one for each CPU core, as far as memory allows. Using all cores at once does not disturb medians.
    ranks: number of processes of an exchange. 0: the most devices of `hosts` hosts that divide the batch.
    hosts: number of hosts that the ranks are spread over evenly.
    chunk: most samples of an actor call.
    hang_s: time after which a device on which no op has ended counts as hung.

    Other fields are as in KernelConfig, GroupConfig, CollectiveConfig and, for steps, ReplayConfig.
    """

    compute_samples: int = 200
    comm_samples: int = 150
    step_samples: int = 16
    seed: int = 0
    actors: int = 0
    ranks: int = 0
    hosts: int = 1
    chunk: int = 16
    hang_s: float = 60.0
    arena_bytes: int = 1 << 30
    tolerance: float | None = None
    min_repeats: int = 6
    max_repeats: int = 24
    interleave: int = 16
    max_shards: int = 30
    comm_repeats: int = 7
    step_repeats: int = STEP_REPEATS

    def __post_init__(self) -> None:
        counts, ranks, repeats = (0, MOST_DRAWS), (0, MOST_RANKS), (1, MOST_REPEATS)
        require_within(
            self,
            "measure config",
            compute_samples=counts,
            comm_samples=counts,
            step_samples=counts,
            actors=ranks,
            ranks=ranks,
            hosts=(1, MOST_RANKS),
            chunk=(1, MOST_COUNT),
            hang_s=WAITS_S,
            seed=(0, MOST_SEED),
            comm_repeats=repeats,
            step_repeats=repeats,
        )
        if self.ranks % self.hosts:
            raise ShardCoreError(
                f"measure.ranks is {self.ranks}, which does not spread evenly over {self.hosts} measure.hosts"
            )
        for config in (self.kernels, self.groups, self.comm, self.steps):
            config()  # raises for a wrong value

    def kernels(self) -> kernels.KernelConfig:
        return kernels.KernelConfig(
            self.arena_bytes, self.tolerance, self.min_repeats, self.max_repeats, self.interleave
        )

    def groups(self) -> GroupConfig:
        return GroupConfig(max_shards=self.max_shards, max_shard_bytes=self.arena_bytes)

    def comm(self) -> collectives.CollectiveConfig:
        return collectives.CollectiveConfig(repeats=self.comm_repeats)

    def steps(self) -> ReplayConfig:
        return of_samples(self.arena_bytes, self.hang_s, self.step_repeats)


def wanted_compute(
    pool: Sequence[Table], setting: Setting, config: MeasureConfig
) -> dict[str, ComputeRequest]:
    """The first compute_samples different groups of the seed's draws, by id."""
    live = run.tables_with_lookups(pool)
    return dict(run.wanted_groups(live, setting, config.compute_samples, config.seed, config.groups()))


def wanted_comm(setting: Setting, ranks: int, config: MeasureConfig) -> dict[str, CollectiveRequest]:
    """The first comm_samples different exchanges of the seed's draws, by id."""
    return dict(run.wanted_exchanges(setting, config.comm_samples, ranks, config.seed, config.hosts))


def cluster_device() -> str:
    """Kind of device of the connected cluster: "cuda" if it has GPUs, else "cpu"."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def cluster_setting(config: SettingConfig) -> Setting:
    """The setting of the connected cluster. Its hardware is the cluster's, which may differ from this machine's."""
    if config.hardware != hardware.AUTO or not os.environ.get("RAY_ADDRESS"):
        return config.setting()
    device = cluster_device()
    name = ray.remote(hardware.hardware_name).options(
        num_cpus=1, num_gpus=int(device == "cuda"), name="measure[hardware]"
    )
    [hardware_name] = actors.when_started([name.remote(device)])
    return dataclasses.replace(config, hardware=hardware_name).setting()


def actor_count(config: MeasureConfig, device: str) -> int:
    """Number of actors that measure compute: as configured, or as devices and memory allow."""
    resources = ray.cluster_resources()
    if config.actors or device == "cuda":
        return config.actors or int(resources["GPU"])
    return int(max(1, min(resources.get("CPU", 1), with_room(resources, config.arena_bytes))))


def with_room(resources: Mapping[str, float], arena_bytes: int) -> float:
    """Number of measuring processes for which the memory among Ray's resources is enough."""
    return resources["memory"] // (arena_bytes + _WORKER_BYTES) if "memory" in resources else float("inf")


def rank_count(config: MeasureConfig, device: str, batch: int) -> int:
    """Number of processes of an exchange. Below 2 there are no exchanges.

    It is as configured, or the most devices of `hosts` hosts, equally many on each, that divide the batch. On CPUs it
    is at least two, which may have to share a core.

    Raises ShardCoreError if no such number divides the batch, or the cluster has fewer hosts.
    """
    if config.ranks:
        if batch % config.ranks:
            raise ShardCoreError(
                f"measure.ranks is {config.ranks}, which does not divide the batch of {batch}"
            )
        return config.ranks
    kind = "GPU" if device == "cuda" else "CPU"
    devices = sorted(
        (int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True
    )
    if len(devices) < config.hosts:
        raise ShardCoreError(f"measure.hosts is {config.hosts}; the Ray cluster has {len(devices)}")
    fits = [
        r * config.hosts for r in range(1, devices[config.hosts - 1] + 1) if batch % (r * config.hosts) == 0
    ]
    if config.hosts > 1 and not fits:
        raise ShardCoreError(
            f"no number of ranks, equally many on each of {config.hosts} hosts, "
            f"divides the batch of {batch}; change measure.hosts"
        )
    return max(fits, default=1) if device == "cuda" else max([*fits, 2])


@task(task_run_name="measure-compute")
def measure_compute(pool_path: Path, setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the groups that the dataset lacks, on all devices of the connected cluster.

    Samples that were disturbed are measured once more. Returns the number of groups that were lacking.
    """
    logger = get_run_logger()
    pool = files.read_pool(pool_path)
    wanted = wanted_compute(pool, setting, config)
    missing = list(run.lacking(wanted.items(), dataset.read_ids(folder, "compute")))
    logger.info("%d compute samples wanted, %d of them to measure", config.compute_samples, len(missing))
    device = cluster_device()

    def disturbed() -> list[ComputeRequest]:
        again = dataset.disturbed_ids(folder, config.kernels().tolerance_on(device))
        return [r for k, r in wanted.items() if k in again]

    if not missing and not disturbed():
        return 0
    reference = reference_request(run.tables_with_lookups(pool), setting, config.groups())
    count = min(actor_count(config, device), len(missing) or 1)
    usual_ms = dataset.usual_ms(folder, setting, reference)
    transport = RayTransport(BenchSpec(setting, device, config.kernels(), reference))
    with Supervisor(transport, count, usual_ms, config.chunk, config.hang_s, logger) as workers:
        workers.calibrate(missing or disturbed())
        logger.info("%d devices; the reference op takes %.3f ms", count, workers.reference_ms)
        _measure(workers, missing, folder, pool)
        if again := disturbed():
            logger.info("%d samples were disturbed and are measured once more", len(again))
            _measure(workers, again, folder, pool, again=True)
    return len(missing)


def _measure(
    workers: Supervisor,
    requests: Sequence[ComputeRequest],
    folder: Path,
    pool: Sequence[Table],
    again: bool = False,
) -> None:
    """Measure requests, and write samples as they come."""
    logger, progress, failed = get_run_logger(), Progress("compute", len(requests), again), 0

    def count(finished: Sequence[Finished]) -> None:
        nonlocal failed
        for f in finished:
            failed += sum(s.error is not None for s in f.samples)
            progress.add(f.device, f.settled, f.kernel_s)
        progress.show()

    run.measure_groups(workers, requests, folder, pool, count)
    if failed:
        logger.warning("%d of %d samples failed; their reasons are in the dataset", failed, len(requests))


@task(task_run_name="measure-comm")
def measure_comm(setting: Setting, config: MeasureConfig, folder: Path) -> int:
    """Measure the exchanges that the dataset lacks, by a gang of ranks of the connected cluster.

    Returns the number of exchanges that were measured. A gang on several hosts has not been run here.
    """
    device = cluster_device()
    ranks = rank_count(config, device, setting.batch)
    if ranks < 2:
        get_run_logger().warning(
            "one GPU cannot exchange: no exchanges are measured, and problems need to give their links"
        )
        return 0
    wanted = wanted_comm(setting, ranks, config)
    requests = list(run.lacking(wanted.items(), dataset.read_ids(folder, "comm")))
    if not requests:
        return 0
    progress = Progress("comm", len(requests))

    def count(_: CollectiveSample) -> None:
        progress.add(f"{ranks} ranks", 1)
        progress.show()

    with closing(_exchanges(requests, ranks, setting, device, config)) as samples:
        run.measure_exchanges(samples, folder, count, config.chunk)
    return len(requests)


def _exchanges(
    requests: Sequence[CollectiveRequest], ranks: int, setting: Setting, device: str, config: MeasureConfig
) -> Generator[CollectiveSample]:
    """Samples by a gang of the cluster, chunk by chunk."""
    with actors.gang(Exchange, "measure[comm]", ranks, device, config.hosts) as members:
        [address] = actors.when_started([members[0].address.remote()])
        actors.answers(
            "exchanges",
            [m.join.remote(i, ranks, address, device, config.comm()) for i, m in enumerate(members)],
            actors.START_S,
        )
        done, some = 0, 1
        while chunk := requests[done : done + some]:
            began = time.monotonic()
            name = f"measure[comm] {done + len(chunk)}/{len(requests)}"
            times = actors.answers(
                "exchanges",
                [m.measure.options(name=name).remote(chunk) for m in members],
                config.hang_s * len(chunk),
            )
            took_s = time.monotonic() - began
            for n, seen in enumerate(zip(*times, strict=True)):
                yield collectives.combine(setting, chunk[n], seen, order=done + n)
            done, some = done + len(chunk), next_part(len(chunk), took_s, config.chunk)


def next_part(done: int, took_s: float, most: int) -> int:
    """Number of exchanges of the next chunk, after one of `done` exchanges that took took_s.

    As many as take PART_S, but at most twice as many as before, and `most`.
    """
    return max(1, min(most, 2 * done, int(done * PART_S / took_s)))


@task
def merge_parts(folder: Path) -> None:
    dataset.merge_parts(folder)
