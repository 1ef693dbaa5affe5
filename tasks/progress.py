"""Progress of measuring: at the terminal, in the log, as a Prefect artifact, and as Ray metrics.

Ray serves the metrics for Prometheus at the metrics port of the flow's node, and adds the prefix "ray_" to their names.
Label `run` is the flow run's name. monitoring/grafana.json shows them.
"""

from __future__ import annotations

import time

from prefect import get_run_logger
from prefect.runtime import flow_run
from ray.util.metrics import Counter, Gauge

from tasks import console
from tasks.artifacts import create_progress_artifact, update_progress_artifact

_EVERY_S = 5.0
_NAMES = {"compute": "groups", "comm": "exchanges", "steps": "steps of plans"}


class Progress:
    """Samples done, rate, time left, and the share of time in kernels.

    kind: "compute", "comm" or "steps".
    total: number of samples to measure.
    again: True for samples that were disturbed and are measured once more.
    """

    def __init__(self, kind: str, total: int, again: bool = False):
        self._name = f"{_NAMES[kind]} that were disturbed" if again else _NAMES[kind]
        self._kind, self._total, self._done, self._kernel_s = kind, total, 0, {}
        self._began, self._shown_s = time.monotonic(), 0.0
        self._logger = get_run_logger()
        self._artifact = create_progress_artifact(
            0.0, key=f"measure-{kind}", description=f"{total} {kind} samples"
        )
        self._tags = {"run": flow_run.name or "", "kind": kind}
        of_run, of_device = {"tag_keys": ("run", "kind")}, {"tag_keys": ("run", "kind", "device")}
        self._samples_total = Counter(
            "shardcore_measure_samples_total", "Samples measured or failed", **of_device
        )
        self._kernel_share = Gauge(
            "shardcore_measure_kernel_share", "Share of a device's time in kernels", **of_device
        )
        self._wanted = Gauge("shardcore_measure_wanted", "Samples that the run has to measure", **of_run)
        self._rate = Gauge(
            "shardcore_measure_samples_per_s", "Samples a second, all devices together", **of_run
        )
        self._left_s = Gauge("shardcore_measure_left_s", "Estimated seconds to the end", **of_run)
        self._wanted.set(total, self._tags)

    def add(self, device: str, samples: int, kernel_s: float | None = None) -> None:
        """Count samples of a device, and its seconds in kernels if they are known."""
        self._done += samples
        tags = {**self._tags, "device": device}
        if samples:
            self._samples_total.inc(samples, tags)
        if kernel_s is not None:
            self._kernel_s[device] = self._kernel_s.get(device, 0.0) + kernel_s
            self._kernel_share.set(self._kernel_s[device] / self._elapsed_s, tags)

    def show(self) -> None:
        """Show the progress. Every few seconds, and at the end, also log and publish it."""
        elapsed = self._elapsed_s
        rate = self._done / elapsed
        line = f"{self._name}: {console.pace(self._done, self._total, elapsed)}"
        if self._kernel_s:
            line += (
                f", {100 * sum(self._kernel_s.values()) / len(self._kernel_s) / elapsed:.0f}% "
                "of the time in kernels"
            )
        console.progress(self._done / self._total, line)
        if elapsed - self._shown_s < _EVERY_S and self._done < self._total:
            return
        self._shown_s = elapsed
        self._logger.info("%s", line)
        update_progress_artifact(self._artifact, 100.0 * self._done / self._total, description=line)
        # All are set each time, as Ray forgets a gauge that was not set for 20 s.
        self._wanted.set(self._total, self._tags)
        self._rate.set(rate, self._tags)
        if rate:
            self._left_s.set((self._total - self._done) / rate, self._tags)

    @property
    def _elapsed_s(self) -> float:
        return max(1e-6, time.monotonic() - self._began)
