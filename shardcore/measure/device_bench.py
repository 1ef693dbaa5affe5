"""A worker's end of supervised measuring (supervise.py): a KernelBench that counts its work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardcore.core.types import Setting
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure import hardware
from shardcore.measure.kernels import KernelBench, KernelConfig


@dataclass(frozen=True)
class BenchSpec:
    """Arguments with which a measuring worker makes its KernelBench."""

    setting: Setting
    device: str = "cpu"
    config: KernelConfig = field(default_factory=KernelConfig)
    reference: ComputeRequest | None = None


class Counts(NamedTuple):
    """Progress counters of a measuring worker.

    kernel_s: seconds inside timed kernels.
    kept_s: seconds of them in runs that entered a median.
    drawn: streams of ids, which take long to draw for large batches.
    """

    kernel_s: float = 0.0
    kept_s: float = 0.0
    drawn: int = 0


class DeviceBench(KernelBench):
    """KernelBench in a worker process that answers calls of a Supervisor."""

    def __init__(self, spec: BenchSpec, reference_ms: float | None):
        torch.set_num_threads(1)  # a device of a CPU is one core
        super().__init__(spec.setting, spec.device, spec.config, spec.reference, reference_ms)

    def call(self, method: str, *arguments: Any) -> tuple[Any, Counts]:
        """Call a method by name. Returns its result, and the worker's counts of progress."""
        # Counts travel with each answer, so that the supervisor sees progress without another call.
        return getattr(self, method)(*arguments), self.counts()

    def counts(self) -> Counts:
        """Counts of the worker's progress so far."""
        return Counts(self.kernel_s, self.kept_s, self.streams.drawn)

    def hardware(self) -> str:
        """Hardware name of the worker's device."""
        return hardware.hardware_name(self.device)

    def set_usual_reference_ms(self, reference_ms: float) -> None:
        """Set the reference op's ms at the usual speed of the devices."""
        self.reference_ms = reference_ms

    def measure_for_seconds(
        self, requests: Sequence[ComputeRequest], last: bool, seconds: float
    ) -> tuple[list[ComputeSample], int]:
        """Start to measure requests until `seconds` have passed, at least one request.

        last: True if nothing follows, so that they are also run to their end.
        Returns finished samples, the reference's among them, and the number of requests taken in.
        """
        began, samples, taken = time.monotonic(), [], 0
        # Ids of all requests of the call can be drawn while the first ones run.
        self.prefetch(requests)
        for request in requests:
            # At least one request is taken in, or a slow device would make no progress.
            if taken and time.monotonic() > began + seconds:
                break
            samples += self.add(request)
            taken += 1
        if last and taken == len(requests):
            samples += self.finish(seconds)
        return samples, taken
