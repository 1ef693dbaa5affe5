"""measure: measure the samples that the dataset lacks, on the devices of the Ray cluster.

The progress is also a Prefect artifact, and Ray metrics. Ray serves these for Prometheus at the metrics port of the
flow's node, and adds the prefix "ray_" to their names. Label `run` is the flow run's name. monitoring/grafana.json
shows them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.runtime import flow_run
from ray.util.metrics import Counter, Gauge

from shardcore.io import files
from shardcore.measure.tally import Tally
from shardcore.stages import measure as run
from shardcore.stages.measure import WantedSamples, estimate_measuring_time
from shardcore.stages.measure_config import MeasureConfig
from tasks import console, params, paths, services
from tasks.artifacts import create_progress_artifact, update_progress_artifact
from tasks.progress import RunProgress
from tasks.ray_cluster import ray_cluster
from tasks.ray_transport import RayTransport
from tasks.setting import SettingConfig

_OF_RUN, _OF_DEVICE = ("run", "kind"), ("run", "kind", "device")


class MeasureProgress(RunProgress):
    """Progress of a measuring flow run, on its page and as Ray metrics."""

    every_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self._tally: Tally | None = None
        self._artifact: Any = None
        self._counted: dict[str, int] = {}

        def make_gauge(name: str, text: str, tags: tuple[str, ...] = _OF_RUN) -> Gauge:
            return Gauge(f"shardcore_measure_{name}", text, tag_keys=tags)

        self._samples = Counter(
            "shardcore_measure_samples_total", "Samples measured or failed", tag_keys=_OF_DEVICE
        )
        self._kernel_share = make_gauge("kernel_share", "Share of a device's time in kernels", _OF_DEVICE)
        self._wanted = make_gauge("wanted", "Samples that the run has to measure")
        self._rate = make_gauge("samples_per_s", "Samples a second, all devices together")
        self._left_s = make_gauge("left_s", "Estimated seconds to the end")

    def show(self, tally: Tally) -> None:
        """Show the progress, and count samples for Ray's metrics."""
        if tally is not self._tally:
            self._start_tally(tally)
        tags = self._tags(tally)
        for device, samples in tally.by_device.items():
            if new := samples - self._counted.get(device, 0):
                self._samples.inc(new, {**tags, "device": device})
        self._counted = dict(tally.by_device)
        for device, share in tally.kernel_shares.items():
            self._kernel_share.set(share, {**tags, "device": device})
        super().show(tally)

    def publish(self, tally: Tally) -> None:
        """Log the progress, and show it on the run's page and as Ray metrics."""
        super().publish(tally)
        tags = self._tags(tally)
        update_progress_artifact(self._artifact, 100.0 * tally.done_share, description=tally.progress_line)
        # All are set each time, as Ray forgets a gauge that was not set for 20 s.
        self._wanted.set(tally.total or 0, tags)
        self._rate.set(tally.samples_per_s, tags)
        if tally.remaining_s is not None:
            self._left_s.set(tally.remaining_s, tags)

    @staticmethod
    def _tags(tally: Tally) -> dict[str, str]:
        return {"run": flow_run.name or "", "kind": tally.kind}

    def _start_tally(self, tally: Tally) -> None:
        self._tally, self._counted = tally, {}
        self._artifact = create_progress_artifact(
            0.0, key=f"measure-{tally.kind}", description=f"{tally.total} {tally.kind} samples"
        )


@task(task_run_name="measure")
def measure_missing_samples(
    pool: Path, setting: SettingConfig, config: MeasureConfig, folder: Path
) -> dict[str, int]:
    """Measure the samples that a dataset lacks, on the devices of the connected Ray cluster.

    Returns the number of samples of each kind that were lacking.
    """
    with RayTransport() as transport:
        wanted = WantedSamples(files.read_pool(pool), setting.setting(transport.hardware), config, transport)
        get_run_logger().info("setting: %s", wanted.setting)
        return run.measure(wanted, folder, MeasureProgress())


def read_configs() -> tuple[SettingConfig, MeasureConfig]:
    return params.read_section("setting", SettingConfig), params.read_section("measure", MeasureConfig)


@flow(name="measure")
def measure() -> None:
    setting, config = read_configs()
    with ray_cluster():
        found = measure_missing_samples(paths.POOL, setting, config, paths.MEASUREMENTS)
    get_run_logger().info(
        "measured %d groups, %d exchanges and %d steps of plans", *found.values(), extra=console.RESULT
    )


def dry_run() -> None:
    setting, config = read_configs()
    with ray_cluster(), RayTransport() as transport:
        # Without a device, the hardware is the dataset's, or else this machine's.
        at_hand = setting.dataset_or_local_setting(paths.MEASUREMENTS)
        wanted = WantedSamples(files.read_pool(paths.POOL), at_hand, config, transport)
        for line in estimate_measuring_time(wanted, paths.MEASUREMENTS):
            console.show("text", line)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.measure",
        description="Measure the samples that params.yaml asks for and the dataset lacks, on this machine or the Ray "
        "cluster at RAY_ADDRESS.",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only show what is missing and how long it would take, without using a device",
    )
    is_dry = parser.parse_args().dry_run
    services.run_flow(dry_run if is_dry else measure, needs_prefect=not is_dry)


if __name__ == "__main__":
    main()
