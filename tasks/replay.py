"""Replay on Ray: one step of plans on real devices of the cluster, one actor a device, all on one host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import ray
from prefect import task

from shardcore.measure import collectives
from shardcore.measure.replay import ReplayConfig, Replayed, combine, replay_rank, require_replayable
from shardcore.types import Setting
from shardcore.workload import Workload
from tasks import actors
from tasks.measure import cluster_device

_PROBE_S = 5.0


@ray.remote(max_restarts=0, concurrency_groups={"watch": 1})
class ReplayRank:
    """One rank of a gang that replays."""

    def __init__(self) -> None:
        self._heard = time.monotonic()

    def address(self) -> str:
        return f"tcp://{ray.util.get_node_ip_address()}:{collectives.free_port()}"

    def run(self, rank: int, address: str, workloads: Sequence[Workload], setting: Setting, config: ReplayConfig,
            device: str) -> list[np.ndarray]:
        return replay_rank(rank, address, workloads, setting, config, device, self._progress)

    @ray.method(concurrency_group="watch")  # so that it answers while the rank works
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def _progress(self) -> None:
        self._heard = time.monotonic()


@task(task_run_name="replay")
def replay(workloads: Sequence[Workload], setting: Setting, config: ReplayConfig | None = None) -> list[Replayed]:
    """Replay plans of one problem, as shardcore.measure.replay.replay_all, on one host of the connected cluster: its GPUs where
    it has some, else its CPU cores. (Gloo; NCCL is written for the same interface and has not been run here.)

    Raises as replay_all, and ShardCoreError where the devices find no room.
    """
    config, device = config or ReplayConfig(), cluster_device()
    if not workloads:
        return []
    for workload in workloads:
        require_replayable(workload, workloads[0], setting, "cpu")  # GPUs are the cluster's, not this machine's
    ranks = len(workloads[0].ops)
    shared = actors.rank_cpus(ranks) < 1 and device == "cpu"
    with actors.gang(ReplayRank, "replay", ranks, device) as members:
        [address] = actors.when_started([members[0].address.remote()])
        given = ray.put(list(workloads))
        calls = [m.run.options(name=f"replay {len(workloads)} plans").remote(rank, address, given, setting, config, device)
                 for rank, m in enumerate(members)]
        heard = [time.monotonic()] * ranks

        def silent_s(rank: int) -> float:
            with suppress(ray.exceptions.RayError):  # it died, which its call tells, or is stuck
                heard[rank] = time.monotonic() - ray.get(members[rank].silent_s.remote(), timeout=_PROBE_S)
            return time.monotonic() - heard[rank]

        marks = actors.answers("replay", calls, config.timeout_s + _PROBE_S, silent_s)
    return [dataclasses.replace(combine(seen), oversubscribed=shared) for seen in zip(*marks, strict=True)]
