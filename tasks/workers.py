"""Ray actors that measure: a worker a device for shardcore.measure.supervise, and the ranks of gangs.

Each actor is a process that imports this module. So nothing here imports Prefect, which takes a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import collectives, local_ranks
from shardcore.measure.device_bench import BenchSpec, Counts, DeviceBench
from shardcore.measure.replay import ReplayConfig, replay_rank
from shardcore.measure.supervise import Ended, Refused
from shardcore.step.lower import Workload
from tasks import actors

_PROBE_S = 5.0
"""Longest wait for a worker's counts."""


# Ray must not restart a worker: the next call would fail, which did nothing wrong.
@actors.remote(max_restarts=0, concurrency_groups={"watch": 1})
class DeviceWorker(DeviceBench):
    @ray.method(concurrency_group="watch")  # so that it answers while the device works
    def look(self) -> Counts:
        return self.counts()


class RayTransport:
    """Actors of the connected cluster, on its "cpu" or "cuda" devices."""

    def __init__(self, spec: BenchSpec):
        self.spec, self._starts = spec, Counter()

    def start(self, name: str, reference_ms: float | None) -> RayWorker:
        self._starts[name] += 1  # part of the name, as Ray may free that of a dead worker late
        again = f", start {self._starts[name]}" if self._starts[name] > 1 else ""
        return RayWorker(f"measure[compute] {name}{again}", self.spec, reference_ms)

    def wait(self, workers: Sequence[RayWorker], timeout_s: float) -> list[RayWorker]:
        calls = [w.ongoing for w in workers]
        ray.wait(calls, num_returns=1, timeout=timeout_s)
        ended = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0])
        return [w for w in workers if w.ongoing in ended]

    def room(self) -> str:
        return actors.room()


class RayWorker:
    def __init__(self, name: str, spec: BenchSpec, reference_ms: float | None):
        self._name = name
        self.counts: Counts = Counts()
        self.ongoing: Any = None
        self._actor = DeviceWorker.options(name=name, num_gpus=int(spec.device == "cuda"), num_cpus=1).remote(
            spec, reference_ms
        )

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        name = f"{self._name}, {label or method}"
        self.ongoing = self._actor.call.options(name=name).remote(method, *arguments)

    def answer(self) -> Any:
        try:
            value, self.counts = ray.get(self.ongoing)
            return value
        except RayError as error:
            raise (Refused if "ShardCoreError: " in str(error) else Ended)(actors.reason(error)) from None

    def look(self) -> None:
        with suppress(RayError):  # it is stuck, or has died, which its call reports
            self.counts = ray.get(self._actor.look.remote(), timeout=_PROBE_S)

    def end(self) -> None:
        ray.kill(self._actor)


# --- ranks of gangs -----------------------------------------------------------------------------------------


@actors.remote(max_restarts=0)
class Exchange(actors.Meeting):
    """One rank of a gang that measures exchanges."""

    def join(
        self, rank: int, ranks: int, address: str, device: str, config: collectives.CollectiveConfig
    ) -> None:
        torch.set_num_threads(1)
        with local_ranks.exchanging():
            self._rank = collectives.Rank(rank, ranks, address, device, config)

    def measure(self, requests: Sequence[CollectiveRequest]) -> list[collectives.RankTimes]:
        return self._rank.measure(requests)


@actors.remote(max_restarts=0, concurrency_groups={"watch": 1})
class ReplayRank(actors.Member):
    """One rank of a gang that replays."""

    def run(
        self,
        rank: int,
        address: str,
        workloads: Sequence[Workload],
        setting: Setting,
        config: ReplayConfig,
        device: str,
        reference: dataset.ReferenceOp | None,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        self.heard()
        return replay_rank(rank, address, workloads, setting, config, device, self.heard, reference)
