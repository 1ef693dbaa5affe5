"""Replayed plans in words: each as measured and as predicted, and each of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.core.step_cost import StepCost
from shardcore.io.measurements import StepSample
from shardcore.report.text import percent_change, text_table

MOST_DEVICES = 16
"""Devices that are shown: those with the largest totals."""


def replay_text(
    names: Sequence[str], measured: Sequence[StepSample], predicted: Sequence[StepCost] | None = None
) -> str:
    """Tables for a terminal.

    names: names of the plans.
    predicted: cost that a model predicted for each. None: there is no model.
    """
    headers = ["plan", "measured ms", "middle half of the steps", "slowest device"]
    rows = [
        [
            name,
            f"{sample.total_ms:.3f}",
            f"{sample.step.q1_ms:.3f} to {sample.step.q3_ms:.3f}",
            sample.device_ms.index(max(sample.device_ms)),
        ]
        for name, sample in zip(names, measured, strict=True)
    ]
    if predicted:
        headers[2:2] = ["predicted ms", "error"]
        for row, sample, cost in zip(rows, measured, predicted, strict=True):
            row[2:2] = [f"{cost.total_ms:.3f}", percent_change(cost.total_ms, sample.total_ms)]
    parts = [text_table(headers, rows)]
    costs = predicted or [None] * len(measured)
    for name, sample, cost in zip(names, measured, costs, strict=True):
        parts.append(f"{name}, ms of each device\n{_devices(sample, cost)}")
    return "\n\n".join(parts)


def _devices(sample: StepSample, predicted: StepCost | None) -> str:
    headers = ["device", "compute", "waiting", "exchange forward", "backward", "ids", "total"]
    order = sorted(range(len(sample.device_ms)), key=lambda d: -sample.device_ms[d])
    rows = []
    for d in sorted(order[:MOST_DEVICES]):
        parts = (
            sample.compute_ms,
            sample.waiting_ms,
            sample.forward_comm_ms,
            sample.backward_comm_ms,
            sample.input_ms,
            sample.device_ms,
        )
        rows.append([d, *(f"{part[d]:.3f}" for part in parts)])
    if predicted:
        headers += ["predicted compute", "total"]
        for row in rows:
            row += [f"{predicted.compute_ms[row[0]]:.3f}", f"{predicted.device_ms[row[0]]:.3f}"]
    left = len(order) - MOST_DEVICES
    return text_table(headers, rows) + f"\nand {left} faster devices" * (left > 0)
