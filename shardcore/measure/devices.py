"""The device to measure on: its clock, memory and caches. Code that measures ops calls CUDA only through it.

Not exercised: `Cuda` ran in a rehearsal only, with a stand-in for its calls (tests/measure/fake_cuda.py).
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require

REHEARSAL = "SHARDCORE_REHEARSAL"
"""Environment variable: the class, as module:Class, that stands in for Cuda in a rehearsal."""


class Cpu:
    """Device backend for measuring on one core of a CPU.

    name: the device as users write it.
    place: torch's name of the device.
    memory_of: FBGEMM's name for the memory of weights.
    request_errors: errors that concern one request. After others the process is unusable.
    batch: default global batch.
    tolerance: default of kernels.KernelConfig.
    drawing_threads: threads that draw ids while the device runs. 0 on a CPU, where they would disturb the
      timings.
    backend: torch.distributed's backend.
    gang_start_s: additional time that the first collective may take.
    """

    name = place = "cpu"
    memory_of = "host"
    request_errors: tuple[type[Exception], ...] = (ShardCoreError, RuntimeError)
    batch = 2048
    tolerance = 0.02
    drawing_threads = 0
    backend = "gloo"
    gang_start_s = 0.0

    def is_available(self) -> bool:
        """Tell if this machine has such a device."""
        return True

    def device_count(self) -> int:
        """Number of devices on this machine: CPU cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def record_mark(self) -> Any:
        """Record a time mark (on a GPU: an event on the stream), for `elapsed_ms`."""
        return time.perf_counter()

    def elapsed_ms(self, marks: Sequence[Any]) -> list[float]:
        """ms between consecutive time marks. Waits until the device has passed the last mark."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def time_calls_ms(self, *calls: Callable[[], object]) -> list[float]:
        """Make calls one after another. Returns the ms of each on the device."""
        marks = [self.record_mark()]
        for call in calls:
            call()
            marks.append(self.record_mark())
        # Marks are read at the end, as reading one waits for the device.
        return self.elapsed_ms(marks)

    def keep_busy(self, ms: float) -> None:
        """Occupy the device for `ms`, while the host launches the kernels that follow."""

    def synchronize(self) -> None:
        """Wait for all kernels launched on the device."""

    def barrier(self) -> None:
        """Wait for all ranks of torch's process group."""
        torch.distributed.barrier()

    def release_memory(self) -> None:
        """Release unused device memory that the allocator caches."""

    def cache_evict_bytes(self) -> int:
        """Bytes to overwrite to evict all data from the device's caches."""
        return 64 << 20  # an EPYC's L3 slice has 32 MiB

    def arena_bytes(self, weights_share: float) -> int:
        """Default size of the arena, the memory that all measured ops share for weights.

        weights_share: bytes of weights over those of weights and optimizer state together.
        """
        return 1 << 30

    def max_stream_bytes(self) -> int:
        """Memory limit for cached streams of drawn ids."""
        return self._memory_bytes() // 8

    def max_batch_bytes(self) -> int:
        """Memory limit for the ids and outputs of one batch. Drawing ids takes a few times their size."""
        return self._memory_bytes() // 4

    def _memory_bytes(self) -> int:
        """Bytes of the device's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def used_memory_share(self) -> float:
        """Fraction of the device's memory in use, by any process."""
        raise ShardCoreError("a CPU's memory is not watched")

    def product_name(self) -> str:
        """Product name of the device."""
        try:
            model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        except OSError:
            model = None
        # Without trademarks, clock rates and numbers of cores, which vendors write around the name.
        return re.sub(r"\((R|TM)\)|CPU|@.*|\d+-Core|Processor", " ", model.group(1) if model else "unknown")

    def software_versions(self) -> dict[str, str]:
        """Versions of the software that timings depend on."""
        versions = {"torch": str(torch.__version__)}
        # The CPU build of FBGEMM is another package with the same modules.
        for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
            with suppress(PackageNotFoundError):
                versions["fbgemm"] = version(name)
        return versions


class Cuda(Cpu):
    """Device backend for measuring on the current GPU."""

    name = place = "cuda"
    memory_of = "dev"
    # After a CUDA fault other than a lack of memory, every later call of the process fails.
    request_errors = (ShardCoreError, torch.OutOfMemoryError)
    batch = 65_536
    tolerance = 0.01
    # The ids of the whole pool take one core a minute or two, in which the GPU would have nothing to do.
    drawing_threads = 4
    backend = "cpu:gloo,cuda:nccl"
    gang_start_s = 300.0  # NCCL connects at the first collective

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def product_name(self) -> str:
        return _query_nvidia_smi("name")

    def record_mark(self) -> torch.cuda.Event:
        # An event is recorded by the device when it gets there. The host does not wait.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        # Events can be read only once the device has passed the last one.
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def keep_busy(self, ms: float) -> None:
        # In cycles, at 2 GHz. At a lower clock it sleeps for longer, which does no harm.
        torch.cuda._sleep(int(ms * 2e6))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def barrier(self) -> None:
        self.synchronize()
        # A tensor on the CPU goes through gloo, so no kernel of NCCL waits on the GPU.
        torch.distributed.all_reduce(torch.zeros(1))

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def cache_evict_bytes(self) -> int:
        return 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def arena_bytes(self, weights_share: float) -> int:
        # The other half is for streams of ids, outputs and gradients.
        return int(_query_nvidia_smi_mib("memory.free") * (1 << 20) / 2 * weights_share)

    def _memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def used_memory_share(self) -> float:
        return _query_nvidia_smi_mib("memory.used") / _query_nvidia_smi_mib("memory.total")

    def software_versions(self) -> dict[str, str]:
        return {
            **super().software_versions(),
            "driver": _query_nvidia_smi("driver_version"),
            "clocks": _query_nvidia_smi("clocks.max.sm"),
            "cuda": str(torch.version.cuda),
        }


def _query_nvidia_smi(field: str) -> str:
    """A field of the first visible GPU from nvidia-smi, which opens no CUDA context, unlike torch."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShardCoreError(
            f"nvidia-smi does not run: {error}; install NVIDIA's driver tools, or give --arena-gib and --hardware"
        ) from None
    if done.returncode or not done.stdout.strip():
        message = " ".join((done.stdout + done.stderr).split())[:200]
        raise ShardCoreError(f"nvidia-smi does not tell {field} of GPU {gpu}: {message}")
    return done.stdout.splitlines()[0].strip()


def _query_nvidia_smi_mib(field: str) -> int:
    """A memory field of the first visible GPU from nvidia-smi, in MiB."""
    value = _query_nvidia_smi(field)
    require(value.isdigit(), f"nvidia-smi says {field} is {value!r}; it needs a number of MiB")
    return int(value)


def device_by_name(name: str) -> Cpu:
    """Device (backend of measuring) of a name, "cpu" or "cuda"."""
    if name == "cuda" and (stand_in := os.environ.get(REHEARSAL)):
        module, _, name_of_class = stand_in.partition(":")
        return getattr(importlib.import_module(module), name_of_class)()
    return {"cpu": Cpu, "cuda": Cuda}[name]()
