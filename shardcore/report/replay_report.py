"""Replayed plans in words: each as measured and as predicted, and each of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.core.step_cost import StepCost
from shardcore.io.measurements import StepSample
from shardcore.report.text import device_table, percent_change, records_table


def replay_text(
    names: Sequence[str], measured: Sequence[StepSample], predicted: Sequence[StepCost] | None = None
) -> str:
    """Tables of replayed plans for a terminal: measured and predicted step ms, and ms of each device.

    names: names of the plans.
    predicted: cost that a model predicted for each. None: there is no model.
    """
    replays = list(zip(names, measured, predicted or [None] * len(measured), strict=True))
    rows = [
        {
            "plan": name,
            "measured ms": f"{sample.total_ms:.3f}",
            **(_prediction_cells(sample, cost) if cost else {}),
            "middle half of the steps": f"{sample.step.q1_ms:.3f} to {sample.step.q3_ms:.3f}",
            "slowest device": sample.device_ms.index(max(sample.device_ms)),
        }
        for name, sample, cost in replays
    ]
    devices = (
        f"{name}, ms of each device\n{_replayed_devices_table(sample, cost)}"
        for name, sample, cost in replays
    )
    return "\n\n".join([records_table(rows), *devices])


def _prediction_cells(sample: StepSample, cost: StepCost) -> dict[str, str]:
    return {"predicted ms": f"{cost.total_ms:.3f}", "error": percent_change(cost.total_ms, sample.total_ms)}


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
