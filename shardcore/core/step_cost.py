"""Costs of a step, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcore.core.html import first_rows_html

PARTS = (
    "forward_compute_ms",
    "backward_compute_ms",
    "forward_comm_ms",
    "backward_comm_ms",
    "waiting_ms",
    "input_ms",
)
"""Fields of a StepCost that sum to a device's total."""
EQUAL = 1e-9
"""Relative difference below which costs are equal."""


@dataclass(frozen=True)
class StepCost:
    """Cost of one training step on each of D devices.

    A device computes, waits for the last one, transfers, and waits for ids. Its total is their sum.
    The step takes as long as the device with the largest total, and the dense part.

    forward_compute_ms, backward_compute_ms: [D] ms of lookups, and of their gradients with the optimizer.
    forward_comm_ms, backward_comm_ms: [D] ms of transfers of outputs and gradients.
    waiting_ms: [D] ms for the last device, and for rows that caches fetch ahead.
    input_ms: [D] ms that the step takes longer because ids travel. 0 if left out.
    dense_ms: ms of the dense part, on each device.
    """

    forward_compute_ms: tuple[float, ...]
    backward_compute_ms: tuple[float, ...]
    forward_comm_ms: tuple[float, ...]
    backward_comm_ms: tuple[float, ...]
    waiting_ms: tuple[float, ...]
    input_ms: tuple[float, ...] = field(default=(), kw_only=True)
    dense_ms: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.input_ms:
            object.__setattr__(self, "input_ms", (0.0,) * len(self.waiting_ms))

    @property
    def compute_ms(self) -> tuple[float, ...]:
        """[D] ms of lookups and their gradients, forward and backward, on each device."""
        return tuple(f + b for f, b in zip(self.forward_compute_ms, self.backward_compute_ms, strict=True))

    @property
    def device_ms(self) -> tuple[float, ...]:
        """[D] ms of the whole embedding part of a step on each device."""
        return tuple(map(sum, zip(*(getattr(self, name) for name in PARTS), strict=True)))

    @property
    def total_ms(self) -> float:
        """ms of a training step: the slowest device's, plus the dense part."""
        return max(self.device_ms) + self.dense_ms

    def _repr_html_(self) -> str:
        """HTML table for notebooks: ms of each part of the step on each device."""
        columns = (*(getattr(self, name) for name in PARTS), self.device_ms)
        rows = [(d, *(f"{ms:.3f}" for ms in row)) for d, row in enumerate(zip(*columns, strict=True))]
        headers = ("device", *(name.removesuffix("_ms").replace("_", " ") for name in PARTS), "total ms")
        dense = f", {self.dense_ms:.3f} of them in the dense part" if self.dense_ms else ""
        return first_rows_html(f"{self.total_ms:.3f} ms a step{dense}", headers, rows)


@dataclass(frozen=True)
class PredictedCost(StepCost):
    """Cost of one training step as predicted by a model.

    extrapolated: sentences on quantities of the step that the model has not measured (CostModel.out_of_range).
    fetch_wait_ms: [D] ms of waiting_ms for rows that caches fetch ahead (cost.model.fetch_wait_ms).
    link_ms: [D] ms for which the link to host memory is busy before updates, if caches fetch ahead; else 0.
    """

    extrapolated: tuple[str, ...] = field(default=(), kw_only=True)
    fetch_wait_ms: tuple[float, ...] = field(default=(), kw_only=True)
    link_ms: tuple[float, ...] = field(default=(), kw_only=True)
