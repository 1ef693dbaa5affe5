"""The device that is measured on: its clock, memory and caches. Ops are measured by no other calls of CUDA.

Not exercised: `Cuda` ran in a rehearsal only, with a stand-in for what it calls (tests/measure/fake_cuda.py).
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from shardcore.core.errors import ShardCoreError

REHEARSAL = "SHARDCORE_REHEARSAL"
"""This variable names the class, as module:Class, that stands in for Cuda in a rehearsal."""


class Cpu:
    """One core.

    name: as users say it.
    place: where tensors live.
    memory_of: FBGEMM's word for the memory of weights.
    request_errors: what a request alone may raise. Other errors spoil the process.
    batch: the default global batch.
    backend: of torch.distributed.
    gang_start_s: what the first collective may take longer than others.
    tolerance: the default of kernels.KernelConfig.
    drawing_threads: that draw ids while the device runs. None on a CPU: they would disturb what is measured.
    """

    name = place = "cpu"
    memory_of = "host"
    request_errors: tuple[type[Exception], ...] = (ShardCoreError, RuntimeError)
    batch = 2048
    tolerance = 0.02
    drawing_threads = 0
    backend = "gloo"
    gang_start_s = 0.0

    def is_there(self) -> bool:
        return True

    def mark(self) -> Any:
        """A point in time on this thread."""
        return time.perf_counter()

    def elapsed_ms(self, marks: Sequence[Any]) -> list[float]:
        """ms between marks. Waits for the last."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def keep_busy(self, ms: float) -> None:
        """Give the device work for so long, so that what is launched next does not wait for its launch."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def meet(self) -> None:
        """Wait for all ranks of the process group."""
        torch.distributed.barrier()

    def release(self) -> None:
        """Give back memory that is not used."""

    def evict_bytes(self) -> int:
        """More than the caches hold."""
        return 64 << 20  # an EPYC's L3 slice has 32 MiB

    def arena_bytes(self, weights_share: float) -> int:
        """Bytes of weights to measure in, by default. Opens no context on a GPU.

        weights_share: of the weights in the memory of weights and optimizer state.
        """
        return 1 << 30

    def stream_bytes(self) -> int:
        """Memory for drawn ids, at most."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8

    def batch_bytes(self) -> int:
        """Memory for a batch's ids and outputs, at most. To draw ids takes a few times their memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4

    def used_share(self) -> float:
        """Of its memory, by all processes."""
        raise ShardCoreError("a CPU's memory is not watched")

    def versions(self) -> dict[str, str]:
        """What a timing depends on besides the hardware."""
        from importlib.metadata import PackageNotFoundError, version

        found = {"torch": torch.__version__}
        for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
            try:
                found["fbgemm"] = version(name)
            except PackageNotFoundError:
                continue
        return found


class Cuda(Cpu):
    """The current GPU."""

    name = place = "cuda"
    memory_of = "dev"
    # A CUDA fault other than memory spoils the process for all that follows, so it is not one request's.
    request_errors = (ShardCoreError, torch.OutOfMemoryError)
    batch = 65_536
    tolerance = 0.01
    # The ids of the whole pool take one core a minute or two, in which the GPU would have nothing to do.
    drawing_threads = 4
    backend = "cpu:gloo,cuda:nccl"
    gang_start_s = 300.0  # NCCL connects at the first collective

    def is_there(self) -> bool:
        return torch.cuda.is_available()

    def product(self) -> str:
        """Its name."""
        return _asked("name")

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def keep_busy(self, ms: float) -> None:
        # Counted in cycles. At a lower clock than this it sleeps for longer, which does no harm.
        torch.cuda._sleep(int(ms * 2e6))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def meet(self) -> None:
        self.synchronize()
        # On the CPU, so that no kernel of NCCL waits on the GPU.
        torch.distributed.all_reduce(torch.zeros(1))

    def release(self) -> None:
        torch.cuda.empty_cache()

    def evict_bytes(self) -> int:
        return 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def arena_bytes(self, weights_share: float) -> int:
        # The other half is for streams of ids, outputs and gradients.
        return int(_mib("memory.free") * (1 << 20) / 2 * weights_share)

    def stream_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 8

    def batch_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 4

    def used_share(self) -> float:
        return _mib("memory.used") / _mib("memory.total")

    def versions(self) -> dict[str, str]:
        return {
            **super().versions(),
            "driver": _asked("driver_version"),
            "clocks": _asked("clocks.max.sm"),
            "cuda": str(torch.version.cuda),
        }


def _asked(what: str) -> str:
    """What nvidia-smi says of the first visible GPU. It opens no context, unlike torch."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShardCoreError(
            f"nvidia-smi does not run: {error}; install NVIDIA's driver tools, or give "
            "--arena-gib and --hardware"
        ) from None
    if done.returncode or not done.stdout.strip():
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise ShardCoreError(f"nvidia-smi does not tell {what} of GPU {gpu}: {said}")
    return done.stdout.splitlines()[0].strip()


def _mib(what: str) -> int:
    found = _asked(what)
    if not found.isdigit():
        raise ShardCoreError(f"nvidia-smi says {what} is {found!r}; it needs a number of MiB")
    return int(found)


def device_of(name: str) -> Cpu:
    """The device of a name, "cpu" or "cuda"."""
    if name == "cuda" and (stand_in := os.environ.get(REHEARSAL)):
        module, _, found = stand_in.partition(":")
        return getattr(importlib.import_module(module), found)()
    return {"cpu": Cpu, "cuda": Cuda}[name]()
