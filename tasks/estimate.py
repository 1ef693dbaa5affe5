"""Estimate of the time that `measure` will take, made without a device. It tells minutes from days.

If the dataset has samples of the setting, the estimate follows from the rate at which it grew. Otherwise it follows
from the usual rate of two CPU cores, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.io import dataset, files, replays
from tasks import console
from tasks.measure import MeasureConfig, actor_count, cluster_device, rank_count, wanted_comm, wanted_compute
from tasks.replay import step_devices, wanted_steps, why_no_steps
from tasks.setting import SettingConfig

_PAUSE_S = 60.0
"""Gap between two samples beyond which they are of two runs."""
_ENOUGH = 20
"""Fewest gaps between samples that give a rate."""
USUAL_S = {"compute": 0.2, "comm": 0.4, "steps": 2.0}
"""Seconds of a sample by kind, with those that are disturbed and measured once more (see tasks/usual_time.py)."""


@dataclass(frozen=True)
class Estimate:
    """Time that samples of one kind would take.

    kind: "compute", "comm" or "steps".
    wanted: number of wanted samples.
    missing: number of those not yet measured.
    devices: number of devices that measure.
    seconds: time to measure the missing samples.
    basis: basis of the estimate, in words.
    """

    kind: str
    wanted: int
    missing: int
    devices: int
    seconds: float
    basis: str

    def __str__(self) -> str:
        time = f"; about {console.duration(self.seconds)} ({self.basis})" if self.missing else ""
        there = self.wanted - self.missing
        return (
            f"{self.kind}: {self.wanted} samples wanted, {there} there already, {self.missing} missing, "
            f"{self.devices} devices{time}"
        )


def estimate(pool_path: Path, wanted: SettingConfig, config: MeasureConfig, folder: Path) -> list[Estimate]:
    """Estimates for compute, comm and steps. Of the connected cluster, only the list of devices is used.

    If `wanted` does not name the hardware, it is the dataset's, or else this machine's.
    """
    setting, device = wanted.of_dataset_or_local(folder), cluster_device()
    ranks, pool = rank_count(config, device, setting.batch), files.read_pool(pool_path)
    groups = wanted_compute(pool, setting, config)
    exchanges = wanted_comm(setting, ranks, config) if ranks > 1 else {}
    compute = len(groups.keys() - dataset.read_ids(folder, "compute"))
    comm = len(exchanges.keys() - dataset.read_ids(folder, "comm"))
    actors, devices = actor_count(config, device), step_devices(config, setting.batch)
    steps = (
        [] if why_no_steps(pool, setting, devices, config) else wanted_steps(pool, setting, devices, config)
    )
    lacking = sum(len(plans) for _, plans in replays.missing(folder, steps, setting))
    compute_at = [s.measured_at for s in dataset.read_compute(folder, setting)]
    return [
        Estimate("compute", len(groups), compute, actors, *_time("compute", compute, compute_at)),
        Estimate(
            "comm",
            len(exchanges),
            comm,
            ranks,
            *_time("comm", comm, [s.measured_at for s in dataset.read_comm(folder, setting)]),
        ),
        Estimate(
            "steps", sum(len(plans) for _, plans in steps), lacking, devices, *_time("steps", lacking, [])
        ),
    ]


def _time(kind: str, missing: int, measured_at: Sequence[float]) -> tuple[float, str]:
    """Seconds to measure the missing samples, and the basis of that.

    measured_at: times of the known samples, Unix s.
    """
    gaps = np.diff(np.sort(measured_at))
    # Without pauses between runs, which would lower the rate.
    gaps = gaps[gaps < _PAUSE_S]
    if len(gaps) < _ENOUGH:
        return missing * USUAL_S[kind], "at the usual rate of two CPU cores"
    rate = len(gaps) / max(gaps.sum(), 1e-3)
    return missing / rate, f"at the {rate:.1f} a second at which the dataset grew"
