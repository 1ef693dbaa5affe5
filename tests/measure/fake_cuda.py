"""A stand-in for a GPU, for rehearsals: where Cuda calls CUDA, this calls nothing, or fails as CUDA does.

It proves that the paths of measuring on a GPU run. It proves nothing of timings: FBGEMM's CPU ops run.

FAKE_CUDA is the path of a folder. A file in it makes something happen, once, and is removed:

- out_of_memory: the next op that runs finds no memory.
- fault: the next op that runs ends in an illegal access.
- hang: the next op never ends.

`log` gets a line for each call.
"""

import itertools
import os
import time
from pathlib import Path

import torch

from shardcore.measure.devices import Cuda


class FakeCuda(Cuda):
    place, memory_of, backend = "cpu", "host", "gloo"

    def __init__(self) -> None:
        self.folder = Path(os.environ["FAKE_CUDA"])

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def product_name(self) -> str:
        return "NVIDIA H100 80GB HBM3 rehearsal"

    def _once(self, name: str) -> bool:
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _note(self, what: str) -> None:
        with (self.folder / "log").open("a") as log:
            log.write(f"{what}\n")

    def record_mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, marks: list[float]) -> list[float]:
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def keep_busy(self, ms: float) -> None:
        self._note(f"busy {ms:.3f}")
        if self._once("out_of_memory"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self._once("fault"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self._once("hang"):
            time.sleep(3600)

    def synchronize(self) -> None:
        self._note("synchronize")

    def release_memory(self) -> None:
        self._note("release")

    def cache_evict_bytes(self) -> int:
        return 1 << 20

    def arena_bytes(self, weights_share: float) -> int:
        return int((64 << 20) * weights_share)

    def max_stream_bytes(self) -> int:
        return 1 << 20

    def max_batch_bytes(self) -> int:
        return 1 << 30

    def used_memory_share(self) -> float:
        return 0.5

    def software_versions(self) -> dict[str, str]:
        return {**super(Cuda, self).software_versions(), "driver": "none", "clocks": "none", "cuda": "none"}
