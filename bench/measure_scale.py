"""Measuring on a Ray cluster of emulated workers: how busy they are, and whether a sample is lost.

    python -m bench.measure_scale --workers 64 --minutes 4

Emulated: each worker is a Ray actor, a process of this machine that sleeps in place of the kernels. A group takes
--mean-s (log-normal, with a deviation of a quarter). One in a hundred takes ten times as long, and two devices are
three times as slow. Real: the stage that measures, its supervisor and files, Ray, and strikes. At a quarter of the
groups one of four raylets dies with its workers. At a half another one joins. Every 15 s a worker is killed.

Busy is the time that workers slept for groups, of the time that they existed: from their first answer to their end, or
to the end of measuring. What a killed worker was at counts as idle.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from bench import common
from shardcore import report
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample, TimingSpread
from shardcore.measure import supervise
from shardcore.measure.device_bench import BenchSpec, Counts
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.stages.measure import WantedSamples, measure_groups
from shardcore.stages.measure_config import MeasureConfig
from shardcore.tables.generate import PoolConfig, generate_pool
from tasks import owned, ray_cluster, ray_transport
from tasks.ray_transport import RayFleet, RayTransport, RayWorker

SETTING = Setting("emulated", 2048)
NODES = 4
SLOW, SLOW_TIMES = ("device 1", "device 2"), 3.0
"""Stragglers, and how many times as long they take."""
STRAY_SHARE, STRAY_TIMES = 0.01, 10.0
"""Share of groups that take long, and how many times as long they take."""
KILL_EVERY_S = 15.0
TIMED = TimingSpread(0.5, 0.5, 0.5, 6)
"""Timing of each emulated sample."""


# Ray pickles a class of the script by value. So a worker imports nothing of ShardCore, and 64 fit in this machine.
class Sleeper:
    """The process of an emulated worker. Its requests are seconds."""

    slept_s = 0.0

    def pid(self) -> int:
        return os.getpid()

    def measure_for_seconds(self, requests_s: Sequence[float], most_s: float) -> tuple[int, float]:
        """Sleep as long as requests take, up to most_s. Returns the number of requests, and total seconds slept."""
        until, taken = time.monotonic() + most_s, 0
        while taken < len(requests_s) and not (taken and time.monotonic() > until):
            time.sleep(requests_s[taken])
            self.slept_s += requests_s[taken]
            taken += 1
        return taken, self.slept_s


class EmulatedWorker(RayWorker):
    """Emulated measuring worker, which sleeps instead of running ops.

    process: id of its process.
    began_s, ended_s: times of its first answer and its end, on the monotonic clock. 0: not yet.
    answers: answered calls with requests.
    """

    def __init__(self, name: str, actor: Any, mean_s: float):
        super().__init__(name, actor)
        self._mean_s = mean_s * (SLOW_TIMES if name in SLOW else 1.0)
        self._requests: Sequence[ComputeRequest] | None = None
        self.process = self.answers = 0
        self.began_s = self.ended_s = 0.0

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        self._requests = arguments[0] if method == "measure_for_seconds" else None
        if self._requests is None:
            self.ongoing = self._actor.pid.remote()
        else:
            requests_s = [self._seconds(request) for request in self._requests]
            self.ongoing = self._actor.measure_for_seconds.remote(requests_s, arguments[2])

    def _seconds(self, request: ComputeRequest) -> float:
        draw = random.Random(dataset.compute_id(SETTING, request))
        return (
            self._mean_s
            * draw.lognormvariate(0.0, 0.25)
            * (STRAY_TIMES if draw.random() < STRAY_SHARE else 1.0)
        )

    def answer(self) -> Any:
        try:
            answer: Any = ray.get(self.ongoing)
        except RayError as error:
            self.ended_s = time.monotonic()
            raise supervise.WorkerEnded(ray_transport.failure_reason(error)) from None
        if self._requests is None:
            self.process = answer
            self.began_s = self.began_s or time.monotonic()
            return SETTING.hardware
        taken, slept_s = answer
        self.counts = Counts(slept_s)
        self.answers += 1
        return [emulated_sample(request) for request in self._requests[:taken]], taken

    def update_counts(self) -> None:
        """Do nothing: an emulated worker never hangs."""

    def end(self) -> None:
        self.ended_s = self.ended_s or time.monotonic()
        super().end()


class EmulatedFleet(RayFleet):
    def __init__(self, spec: BenchSpec, mean_s: float):
        super().__init__(spec)
        self._mean_s, self.workers = mean_s, list[EmulatedWorker]()

    def start(self, name: str, reference_ms: float | None) -> EmulatedWorker:
        actor = ray_transport.remote(max_restarts=0, num_cpus=1)(Sleeper).remote()
        self.workers.append(EmulatedWorker(name, actor, self._mean_s))
        return self.workers[-1]


class EmulatedTransport(RayTransport):
    def __init__(self, mean_s: float):
        super().__init__()
        self._mean_s = mean_s

    def fleet(self, spec: BenchSpec, hang_s: float) -> EmulatedFleet:
        self.made = EmulatedFleet(spec, self._mean_s)
        return self.made


class Strikes:
    """The progress of measuring, by which it strikes the cluster.

    share: workers of a node.
    killed: workers killed so far.
    """

    def __init__(self, cluster: Cluster, transport: EmulatedTransport, share: int):
        self._cluster, self._transport, self._share = cluster, transport, share
        self._left = {0.25: self._lose_node, 0.5: lambda: add_node(cluster, share)}
        self._next_s = 0.0
        self.killed = 0

    def info(self, text: str, *values: object) -> None:
        common.print_progress(text % values)

    warning = info

    def show(self, tally: Any) -> None:
        now = time.monotonic()
        self._next_s = self._next_s or now + KILL_EVERY_S
        for share in [share for share in self._left if tally.done_share >= share]:
            common.print_progress(tally.progress_line)
            threading.Thread(target=self._left.pop(share)).start()
        if now > self._next_s and tally.done_share < 0.9:
            self._next_s = now + KILL_EVERY_S
            there = [w for w in self._transport.made.workers if w.began_s and not w.ended_s]
            os.kill(random.Random(self.killed).choice(there).process, signal.SIGKILL)
            self.killed += 1

    def _lose_node(self) -> None:
        """Kill a Ray node's raylet and its worker processes."""
        node = self._cluster.list_all_nodes()[-1]
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self.killed += self._share


def emulated_sample(request: ComputeRequest) -> ComputeSample:
    key = dataset.compute_id(SETTING, request)
    return ComputeSample(key, SETTING, request, TIMED, TIMED, time.time(), relative_ci=0.01)


def add_node(cluster: Cluster, cpus: int) -> None:
    """Add a Ray node with a small object store, listening at loopback."""
    cluster.add_node(
        num_cpus=cpus,
        object_store_memory=80 << 20,
        node_ip_address="127.0.0.1",
        include_dashboard=False,
        dashboard_agent_listen_port=None,
    )


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        workers=(64, "emulated workers"),
        minutes=(4.0, "about so long"),
        mean_s=(1.0, "seconds of a group"),
    )
    args = parser.parse_args()
    supervise.START_S = 600.0  # few cores start many processes
    os.environ["RAY_raylet_start_wait_time_s"] = "300"
    with owned.owned_run():
        rows = measured_rows(args.workers, args.minutes, args.mean_s)
    print(report.markdown_table(("quantity", "value"), rows))


def measured_rows(n: int, minutes: float, mean_s: float) -> list[tuple[str, object]]:
    """Rows of quantities and their values, of measuring on a cluster of n emulated workers."""
    share, wanted_n = n // NODES, int(n * 60 * minutes / mean_s)
    ray_cluster.secure_local_ray()
    cluster = Cluster(shutdown_at_exit=False)  # its hooks are for the main thread; `owned` ends the processes
    for _ in range(NODES):
        add_node(cluster, share)
    ray.init(address=cluster.address, log_to_driver=False, namespace="emulated")
    groups = GroupConfig(max_shards=2, planned=0.0)
    config = MeasureConfig(compute_samples=wanted_n, actors=n, groups=groups)
    transport = EmulatedTransport(mean_s)
    wanted = WantedSamples(generate_pool(PoolConfig(40)), SETTING, config, transport)
    strikes = Strikes(cluster, transport, share)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A sample of the reference op, so that it is not calibrated.
        reference = emulated_sample(wanted.reference_op_request())
        dataset.write_compute_samples(folder, [reference], dataset.write_pool(folder, wanted.pool))
        driver_s = time.process_time()
        measure_groups(wanted, folder, strikes)
        ended_s, driver_s = time.monotonic(), time.process_time() - driver_s
        samples = dataset.read_compute_samples(folder, SETTING)
    workers = [w for w in transport.made.workers if w.began_s]
    began_s = sorted(w.began_s for w in workers)[n - 1]
    there_s = sum(min(w.ended_s or ended_s, ended_s) - max(w.began_s, began_s) for w in workers)
    slept_s = sum(w.counts.kernel_s for w in workers)
    rows: list[tuple[str, object]] = [
        ("emulated workers", n),
        ("groups wanted", wanted_n),
        ("groups lost", len({key for key, _ in wanted.draw_groups()} - {s.id for s in samples})),
        ("groups with an error", sum(s.error is not None for s in samples)),
        ("workers killed", strikes.killed),
        ("workers that joined later", len(workers) - n),
        ("s", f"{ended_s - began_s:.0f}"),
        ("busy while there", f"{slept_s / there_s:.1%}"),
        ("busy, of all devices and the whole time", f"{slept_s / n / (ended_s - began_s):.1%}"),
        ("processor ms of the driver a call", f"{1e3 * driver_s / sum(w.answers for w in workers):.1f}"),
    ]
    ray.shutdown()
    cluster.shutdown()
    return rows


if __name__ == "__main__":
    main()
