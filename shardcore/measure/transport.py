"""Where measuring runs: in processes of this machine, or as Ray actors (tasks/ray_transport.py)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardcore.core.errors import ShardCoreError
from shardcore.measure import hardware, local_ranks
from shardcore.measure.device_bench import BenchSpec
from shardcore.measure.devices import device_of
from shardcore.measure.hosts import Place
from shardcore.measure.local_workers import LocalFleet
from shardcore.measure.supervise import Fleet


class NoRoom(ShardCoreError):
    """Ranks find no free devices. It would be so for any work."""


@dataclass(frozen=True)
class Host:
    """A host on which measuring may run.

    devices: number of its devices.
    memory_bytes: memory for measuring processes. Infinite: not known.
    """

    devices: int
    memory_bytes: float = math.inf


class Transport:
    """Processes of this machine. Subclasses have them elsewhere.

    device: kind of the devices, "cpu" or "cuda".
    places: emulated host of each rank. Empty: hosts are real.
    """

    def __init__(self, device: str = "cpu", places: Sequence[Place] = ()) -> None:
        self.device, self.places = device, places

    def hardware(self) -> str:
        """Name of the devices' product."""
        return hardware.hardware_name(self.device)

    def hosts(self) -> Sequence[Host]:
        """Hosts, those with most devices first."""
        return [Host(device_of(self.device).count())]

    def fleet(self, spec: BenchSpec, hang_s: float) -> Fleet[Any]:
        """Workers for a Supervisor."""
        return LocalFleet(spec, hang_s)

    def run(
        self,
        name: str,
        work: Callable[..., None],
        ranks: int,
        arguments: Sequence[Any],
        timeout_s: float,
        hosts: int | None = 1,
    ) -> Generator[tuple[int, Any]]:
        """Run work(rank, init_method, send, *arguments) in one process a rank (see local_ranks.run).

        hosts: number of hosts, each with equally many ranks. None: as few as have room.

        Raises NoRoom if there are too few devices.
        """
        hardware.require_device(self.device)
        if self.device == "cuda":
            if (there := device_of(self.device).count()) < ranks:
                raise NoRoom(f"{name}: {ranks} ranks need as many GPUs; here are {there}")
            # A rehearsal's stand-in for GPUs has its place on the CPU.
            work = partial(_on_own_gpu, work) if device_of(self.device).place == "cuda" else work
        return local_ranks.run(name, work, ranks, arguments, timeout_s, self.places or None)

    def prepare(self, ranks: int, hosts: int | None = 1) -> None:
        """Start processes of ranks that are soon needed, as far as that saves time. Here each work starts its own."""

    def shares_cores(self, ranks: int) -> bool:
        """Tell if so many ranks on one host would share cores."""
        return ranks > len(os.sched_getaffinity(0))


LOCAL = Transport()


def _on_own_gpu(work: Callable[..., None], rank: int, *arguments: Any) -> None:
    torch.cuda.set_device(rank)
    work(rank, *arguments)
