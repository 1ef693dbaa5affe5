"""Progress of measuring: at the terminal, in the log, as a Prefect artifact, and as Ray metrics.

Ray serves the metrics for Prometheus at the metrics port of the flow's node, and adds the prefix "ray_" to their names.
Label `run` is the flow run's name. monitoring/grafana.json shows them.
"""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run
from ray.util.metrics import Counter, Gauge

from shardcore.measure.tally import Tally
from tasks import console
from tasks.artifacts import create_progress_artifact, update_progress_artifact

_EVERY_S = 5.0
_OF_RUN, _OF_DEVICE = ("run", "kind"), ("run", "kind", "device")


class RunProgress:
    """The progress of a flow run (see shardcore.measure.tally.Progress)."""

    def __init__(self) -> None:
        logger = get_run_logger()
        self.info, self.warning = logger.info, logger.warning
        self._tally: Tally | None = None
        self._artifact: Any = None
        self._shown_s = 0.0
        self._counted: dict[str, int] = {}

        def gauge(name: str, text: str, tags: tuple[str, ...] = _OF_RUN) -> Gauge:
            return Gauge(f"shardcore_measure_{name}", text, tag_keys=tags)

        self._samples = Counter(
            "shardcore_measure_samples_total", "Samples measured or failed", tag_keys=_OF_DEVICE
        )
        self._kernel_share = gauge("kernel_share", "Share of a device's time in kernels", _OF_DEVICE)
        self._wanted = gauge("wanted", "Samples that the run has to measure")
        self._rate = gauge("samples_per_s", "Samples a second, all devices together")
        self._left_s = gauge("left_s", "Estimated seconds to the end")

    def show(self, tally: Tally) -> None:
        """Show the progress. Every few seconds, and at the end, also log and publish it."""
        if tally is not self._tally:
            self._begin(tally)
        console.progress(tally.share, tally.line)
        tags = {"run": flow_run.name or "", "kind": tally.kind}
        for device, samples in tally.by_device.items():
            if new := samples - self._counted.get(device, 0):
                self._samples.inc(new, {**tags, "device": device})
        self._counted = dict(tally.by_device)
        for device, share in tally.kernel_shares.items():
            self._kernel_share.set(share, {**tags, "device": device})
        if tally.elapsed_s - self._shown_s < _EVERY_S and tally.done != tally.total:
            return
        self._shown_s = tally.elapsed_s
        self.info("%s", tally.line)
        update_progress_artifact(self._artifact, 100.0 * tally.share, description=tally.line)
        # All are set each time, as Ray forgets a gauge that was not set for 20 s.
        self._wanted.set(tally.total or 0, tags)
        self._rate.set(tally.rate, tags)
        if tally.left_s is not None:
            self._left_s.set(tally.left_s, tags)

    def _begin(self, tally: Tally) -> None:
        self._tally, self._shown_s, self._counted = tally, 0.0, {}
        self._artifact = create_progress_artifact(
            0.0, key=f"measure-{tally.kind}", description=f"{tally.total} {tally.kind} samples"
        )
