"""Estimate of the time that `measure` will take, made without a device. It tells minutes from days.

If the dataset has samples of the setting, the estimate follows from the rate at which it grew. Otherwise it follows
from the usual rate of two CPU cores, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardcore.io import dataset, files
from shardcore.measure.tally import duration
from shardcore.stages.measure import USUAL_S, MeasureConfig, Wanted
from tasks.ray_transport import RayTransport
from tasks.setting import SettingConfig

_PAUSE_S = 60.0
"""Gap between two samples beyond which they are of two runs."""
_ENOUGH = 20
"""Fewest gaps between samples that give a rate."""


def estimate(pool: Path, setting: SettingConfig, config: MeasureConfig, folder: Path) -> list[str]:
    """A line for each kind of sample. Of the connected cluster, only the list of devices is used.

    If `setting` does not name the hardware, it is the dataset's, or else this machine's.
    """
    with RayTransport() as transport:
        wanted = Wanted(files.read_pool(pool), setting.of_dataset_or_local(folder), config, transport)
        measured_at = {
            "compute": [s.measured_at for s in dataset.read_compute(folder, wanted.setting)],
            "comm": [s.measured_at for s in dataset.read_comm(folder, wanted.setting)],
        }
        devices = {"compute": wanted.devices, "comm": wanted.ranks, "steps": wanted.step_ranks}
        return [
            line(kind, n, missing, devices[kind], measured_at.get(kind, []))
            for kind, (n, missing) in wanted.counts(folder).items()
        ]


def line(kind: str, wanted: int, missing: int, devices: int, measured_at: Sequence[float]) -> str:
    """A line on one kind of samples: how many are wanted and missing, and about how long these take.

    measured_at: times of the known samples, Unix s.
    """
    each_s, basis = _each_s(kind, measured_at)
    time = f"; about {duration(missing * each_s)} ({basis})" if missing else ""
    there = wanted - missing
    return (
        f"{kind}: {wanted} samples wanted, {there} there already, {missing} missing, {devices} devices{time}"
    )


def _each_s(kind: str, measured_at: Sequence[float]) -> tuple[float, str]:
    """Seconds of a sample, and the basis of that."""
    gaps = np.diff(np.sort(measured_at))
    # Without pauses between runs, which would lower the rate.
    gaps = gaps[gaps < _PAUSE_S]
    if len(gaps) < _ENOUGH:
        return USUAL_S[kind], "at the usual rate of two CPU cores"
    rate = len(gaps) / max(gaps.sum(), 1e-3)
    return 1 / rate, f"at the {rate:.1f} a second at which the dataset grew"
