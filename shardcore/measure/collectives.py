"""Exchanges of pooled outputs among real processes, as a step of training makes them: gloo between CPUs, NCCL between GPUs.

Each rank runs one Rank; all are given the same requests. Forward: rank d owns widths[d] columns of the global batch and sends
every rank that rank's local batch of them. Backward: the gradients go the way back. A rank's transfer is timed from the last
rank's start to its own end; what lies before, it waited. Starts are compared by the host's monotonic clock, so ranks need to
share one host; NCCL is written for the same interface and has not been run here.

Shapes: D ranks, B global batch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from shardcore import dataset
from shardcore.measure.timing import spread
from shardcore.types import CommRequest, CommSample, Setting, ShardCoreError


@dataclass(frozen=True)
class CommConfig:
    """repeats of each exchange after warmups; timeout_s: a rank that waits longer for another gives up."""

    repeats: int = 9
    warmups: int = 2
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmups < 0 or not self.timeout_s > 0:
            raise ShardCoreError(f"comm config {self} needs repeats of at least 1, warmups of 0 or more, a positive timeout_s")


@dataclass(frozen=True)
class RankTimes:
    """One rank's repeats of one exchange: starts and ends in s of the host's monotonic clock, [repeats] each."""

    forward: tuple[tuple[float, ...], tuple[float, ...]]
    backward: tuple[tuple[float, ...], tuple[float, ...]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Rank:
    """One process of the gang. init_method: such as "tcp://127.0.0.1:PORT", the same on all ranks."""

    def __init__(self, rank: int, ranks: int, init_method: str, device: str = "cpu", config: CommConfig | None = None):
        self.rank, self.ranks, self.config = rank, ranks, config or CommConfig()
        self.device = torch.device(device)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method, rank=rank, world_size=ranks,
                                timeout=timedelta(seconds=self.config.timeout_s))

    def measure(self, requests: Sequence[CommRequest]) -> list[RankTimes]:
        """Times of each request; all ranks must be given the same ones."""
        return [self._measure(r) for r in requests]

    def close(self) -> None:
        dist.destroy_process_group()

    def _measure(self, request: CommRequest) -> RankTimes:
        if len(request.widths) != self.ranks or request.batch % self.ranks:
            raise ShardCoreError(f"exchange of {len(request.widths)} widths over batch {request.batch} does not fit {self.ranks} "
                                 "ranks: it needs one width a rank and a batch that they divide")
        local = request.batch // self.ranks
        mine = [local * request.widths[self.rank]] * self.ranks  # elements exchanged with each rank
        theirs = [local * w for w in request.widths]
        outputs, gathered = (torch.ones(sum(n), device=self.device) for n in (mine, theirs))
        forward, backward = [], []
        for _ in range(self.config.warmups + self.config.repeats):
            forward.append(self._exchange(gathered, outputs, theirs, mine, request.start_ms[self.rank]))
            backward.append(self._exchange(outputs, gathered, mine, theirs, 0.0))
        keep = slice(self.config.warmups, None)
        return RankTimes(*(tuple(zip(*x[keep], strict=True)) for x in (forward, backward)))

    def _exchange(self, into: torch.Tensor, source: torch.Tensor, into_splits: list[int], source_splits: list[int],
                  start_ms: float) -> tuple[float, float]:
        dist.barrier()
        due = time.perf_counter() + start_ms / 1e3
        while time.perf_counter() < due:  # a rank that still computes occupies its device: spin, do not sleep
            pass
        start = time.perf_counter()
        dist.all_to_all_single(into, source, into_splits, source_splits)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return start, time.perf_counter()


def combine(setting: Setting, request: CommRequest, ranks: Sequence[RankTimes]) -> CommSample:
    """One sample from what all ranks saw of a request."""
    forward, backward = ([np.array([getattr(r, way)[k] for r in ranks]) for k in (0, 1)] for way in ("forward", "backward"))

    def transfer_ms(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return (ends - starts.max(0)) * 1e3

    waiting = np.median((forward[0].max(0) - forward[0]) * 1e3, axis=1)
    return CommSample(dataset.comm_id(setting, request), setting, request,
                      tuple(spread(x) for x in transfer_ms(*forward)), tuple(spread(x) for x in transfer_ms(*backward)),
                      tuple(float(w) for w in waiting), time.time())
