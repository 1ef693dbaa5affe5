"""Replayed plans in words: each as measured and as predicted, and each of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.core.step_cost import StepCost
from shardcore.io.measurements import StepSample
from shardcore.report.text import device_table, percent_change, text_table


def replay_text(
    names: Sequence[str], measured: Sequence[StepSample], predicted: Sequence[StepCost] | None = None
) -> str:
    """Tables of replayed plans for a terminal: measured and predicted step ms, and ms of each device.

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
        parts.append(f"{name}, ms of each device\n{_replayed_devices_table(sample, cost)}")
    return "\n\n".join(parts)


def _replayed_devices_table(sample: StepSample, predicted: StepCost | None) -> str:
    columns = {
        "compute": sample.compute_ms,
        "waiting": sample.waiting_ms,
        "exchange forward": sample.forward_comm_ms,
        "backward": sample.backward_comm_ms,
        "ids": sample.input_ms,
        "total": sample.device_ms,
    }
    if predicted:
        columns |= {"predicted compute": predicted.compute_ms, "predicted total": predicted.device_ms}
    return device_table(columns, sample.device_ms)
