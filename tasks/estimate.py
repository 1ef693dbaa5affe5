"""Estimate of the time that `measure` will take, made without a device. It tells minutes from days.

If the dataset has samples of the setting, the estimate follows from the rate at which it grew. Otherwise it follows
from bytes and rough hardware rates, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.core.types import OUTPUT_BYTES
from shardcore.io import dataset, files, replays
from shardcore.io.measurements import CollectiveRequest, ComputeRequest
from shardcore.measure import kernels
from shardcore.step.access import access_share, lookups
from shardcore.step.lower import Workload, lower
from tasks import console
from tasks.measure import MeasureConfig, actor_count, cluster_device, rank_count, wanted_comm, wanted_compute
from tasks.replay import step_devices, wanted_steps, why_no_steps
from tasks.setting import SettingConfig

_PAUSE_S = 60.0
"""Gap between two samples beyond which they are of two runs."""
_ENOUGH = 20
"""Fewest gaps between samples that give a rate."""
_COMPUTE_GBPS = {"cpu": 0.7, "cuda": 300.0}
"""Bytes of looked-up rows over the time of forward and backward. cpu: measured on one core of an AMD EPYC (Zen 5).
cuda: the order of magnitude of a data-centre GPU, not measured.
"""
_COMM_GBPS = {"cpu": 1.0, "cuda": 50.0}
"""Rate at which a rank sends: orders of magnitude of gloo and of NCCL within a host, not measured."""
_OVERHEAD_MS = 0.3
"""Time of a launch or a barrier."""
_PHYSICAL = "a physical estimate from bytes and rough bandwidths"


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
        return (
            f"{self.kind}: {self.wanted} samples wanted, {self.wanted - self.missing} there already, "
            f"{self.missing} missing, {self.devices} devices{time}"
        )


def estimate(pool_path: Path, wanted: SettingConfig, config: MeasureConfig, folder: Path) -> list[Estimate]:
    """Estimates for compute, comm and steps. Of the connected cluster, only the list of devices is used.

    If `wanted` does not name the hardware, it is the dataset's, or else this machine's.
    """
    setting, device = wanted.of_dataset_or_local(folder), cluster_device()
    ranks, pool = rank_count(config, device, setting.batch), files.read_pool(pool_path)
    groups = wanted_compute(pool, setting, config)
    exchanges = wanted_comm(setting, ranks, config) if ranks > 1 else {}
    compute = [r for k, r in groups.items() if k not in dataset.read_ids(folder, "compute")]
    comm = [r for k, r in exchanges.items() if k not in dataset.read_ids(folder, "comm")]
    actors, devices = actor_count(config, device), step_devices(config, setting.batch)
    steps = (
        [] if why_no_steps(pool, setting, devices, config) else wanted_steps(pool, setting, devices, config)
    )
    lacking = [
        lower(plan, problem)
        for problem, plans in replays.missing(folder, steps, setting)
        for _, plan in plans
    ]
    # A fifth of the groups is held out, and runs more often.
    runs = 1 + config.max_repeats * (0.8 + 0.2 * kernels.HELD_OUT_TIMES)
    comm_ms = _comm_ms(comm, device) * (config.comm().warmups + config.comm_repeats)
    step_ms = _step_ms(lacking, device) * (config.steps().warmups + config.step_repeats)
    compute_at = [s.measured_at for s in dataset.read_compute(folder, setting)]
    comm_at = [s.measured_at for s in dataset.read_comm(folder, setting)]
    building = f"{_PHYSICAL}, without what it takes to build the ops"
    n_steps = sum(len(plans) for _, plans in steps)
    return [
        Estimate(
            "compute",
            len(groups),
            len(compute),
            actors,
            *_time(len(compute), compute_at, _compute_ms(compute, device) * runs / actors),
        ),
        Estimate("comm", len(exchanges), len(comm), ranks, *_time(len(comm), comm_at, comm_ms)),
        Estimate("steps", n_steps, len(lacking), devices, len(lacking) * step_ms / 1e3, building),
    ]


def _time(missing: int, measured_at: Sequence[float], physical_ms: float) -> tuple[float, str]:
    """Seconds to measure the missing samples, and the basis of that.

    measured_at: times of the known samples, Unix s.
    physical_ms: ms of one sample, by rough hardware rates.
    """
    gaps = np.diff(np.sort(measured_at))
    # Without pauses between runs, which would lower the rate.
    gaps = gaps[gaps < _PAUSE_S]
    if len(gaps) < _ENOUGH:
        few = f"{_PHYSICAL}, for the dataset has too few samples of this setting"
        return missing * physical_ms / 1e3, few
    rate = len(gaps) / max(gaps.sum(), 1e-3)
    return missing / rate, f"at the {rate:.1f} a second at which the dataset grew"


def _compute_ms(requests: Sequence[ComputeRequest], device: str) -> float:
    """Mean ms of one run."""
    gathered = [
        sum(lookups(s.table, r.batch) * access_share(s) * s.width * OUTPUT_BYTES for s in r.shards)
        for r in requests
    ]
    return _OVERHEAD_MS + float(np.mean(gathered or [0])) / (_COMPUTE_GBPS[device] * 1e6)


def _comm_ms(requests: Sequence[CollectiveRequest], device: str) -> float:
    """Mean ms of one exchange, forward and backward."""
    sent = [max(r.widths) * r.batch * OUTPUT_BYTES for r in requests]
    starts = [max(r.start_ms) for r in requests]
    sending_ms = float(np.mean(sent or [0])) / (_COMM_GBPS[device] * 1e6)
    return 2 * _OVERHEAD_MS + float(np.mean(starts or [0])) + 2 * sending_ms


def _step_ms(workloads: Sequence[Workload], device: str) -> float:
    """Mean ms of one step. Exchanges are guessed at a tenth of compute."""
    slowest = [
        max(sum(_compute_ms([ComputeRequest(op.shards, op.batch)], device) for op in ops) for ops in w.ops)
        for w in workloads
    ]
    return 1.1 * float(np.mean(slowest or [0]))
