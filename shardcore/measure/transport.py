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
from shardcore.measure.devices import device_by_name
from shardcore.measure.hosts import EmulatedHost
from shardcore.measure.local_workers import LocalFleet
from shardcore.measure.supervise import Fleet


class NoRoom(ShardCoreError):
    """Raised when there are too few free devices for the ranks. Any work would fail alike."""


@dataclass(frozen=True)
class Host:
    """A host with devices on which ops can be measured.

    devices: number of its devices.
    memory_bytes: memory for measuring processes. Infinite: not known.
    """

    devices: int
    memory_bytes: float = math.inf


class Transport:
    """Starter of measuring processes on this machine. Subclasses start processes elsewhere, as on a Ray cluster.

    device: kind of the devices, "cpu" or "cuda".
    places: emulated host of each rank. Empty: hosts are real.
    """

    def __init__(self, device: str = "cpu", places: Sequence[EmulatedHost] = ()) -> None:
        self.device, self.places = device, places

    def hardware(self) -> str:
        """Hardware name of the transport's devices."""
        return hardware.hardware_name(self.device)

    def hosts(self) -> Sequence[Host]:
        """Hosts with devices for measuring, those with most devices first."""
        return [Host(device_by_name(self.device).device_count())]

    def fleet(self, spec: BenchSpec, hang_s: float) -> Fleet[Any]:
        """Fleet of workers that measure single ops, for a Supervisor."""
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
        """Run work(rank, init_method, send, *arguments) in one process for each rank (see local_ranks.run_ranks).

        hosts: number of hosts, each with equally many ranks. None: as few as have room.

        Raises NoRoom if there are too few devices.
        """
        hardware.require_device(self.device)
        if self.device == "cuda":
            if (there := device_by_name(self.device).device_count()) < ranks:
                raise NoRoom(f"{name}: {ranks} ranks need as many GPUs; here are {there}")
            # A rehearsal's stand-in for GPUs has its place on the CPU.
            work = partial(_run_on_own_gpu, work) if device_by_name(self.device).place == "cuda" else work
        return local_ranks.run_ranks(name, work, ranks, arguments, timeout_s, self.places or None)

    def prepare(self, ranks: int, hosts: int | None = 1) -> None:
        """Start processes of ranks in advance where this saves time; a no-op on this machine."""

    def shares_cores(self, ranks: int) -> bool:
        """Tell if ranks on one host would have to share CPU cores."""
        return ranks > len(os.sched_getaffinity(0))


LOCAL = Transport()


def _run_on_own_gpu(work: Callable[..., None], rank: int, *arguments: Any) -> None:
    """Run work of a rank on the GPU with the rank's number."""
    torch.cuda.set_device(rank)
    work(rank, *arguments)
