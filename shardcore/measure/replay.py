"""Replay: run one step of plans for real, one process a device, and time its parts. The ground truth of `price`.

A step is timed as it falls in a training loop, from one dense part to the next:

  barrier | ids of the next batch | exchange of gradients | backward | forward of that batch | waiting |
  exchange of outputs

With a pipeline (job.PIPELINES), ids travel during the dense part, for which ranks sleep. Before it, ranks put
ids in buckets and announce their numbers. Between its forward and backward they send the ids. After it, they
put arrived ids in order (id_transfer.py). Without a pipeline all of this comes later in the step, but takes
as long. Time that the dense part hides is not counted.

So a device reaches the forward exchange after its backward transfer and all its compute, and waits there for
the last one. This is the waiting that a CostModel predicts. Ranks compare their marks by the host's monotonic
clock, so they share one host. A transfer lasts from the last rank's start to a rank's own end. The skew with
which ranks leave the barrier counts for none.

Ops run over an arena as in kernels.py; outputs and gradients travel between the ops' buffers. Steps go
through several batches. Before each step the caches are overwritten, as the dense part and other layers
would. Gloo runs on CPUs; NCCL is written for the same interface and has not been run here.

Over the hosts of a box (hosts.py), exchanges are real and hosts are emulated. Their ranks share the cores of
this machine. So the compute of each device is measured first, one device at a time, and a rank sleeps for as
long.

Shapes: D devices (ranks), R repeats, B global batch, W columns of an op.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import numpy as np
import torch

from shardcore.core.errors import SettingMismatch
from shardcore.core.job import Job
from shardcore.core.step_cost import PARTS
from shardcore.core.types import Setting, precision_names
from shardcore.core.validation import describe_differences, require, require_type
from shardcore.io.dataset import ReferenceOp
from shardcore.io.measurements import StepSample
from shardcore.measure import exchanges, id_transfer, local_ranks
from shardcore.measure.collectives import Rank, sleep_until, split_wait_and_transfer
from shardcore.measure.config import CollectiveConfig
from shardcore.measure.devices import device_by_name
from shardcore.measure.hosts import EmulatedHost
from shardcore.measure.step_compute import (
    ComputeTimes,
    RankOps,
    ReferenceRuns,
    ReplayConfig,
    SleepingOps,
    filled_tensor,
    make_benches,
    measure_compute,
    require_arena_room,
)
from shardcore.measure.timing import HardwareCaches, timing_spread
from shardcore.measure.transport import LOCAL, Transport
from shardcore.step.kinds import ShardingKind
from shardcore.step.lower import Workload


def replay(
    workload: Workload, setting: Setting, config: ReplayConfig | None = None, device: str = "cpu"
) -> StepSample:
    """Measure the cost of one training step of a plan's `workload` on this machine's devices.

    setting: hardware, batch, precision and optimizer of the result.
    config: numbers of steps. None: the defaults.
    device: "cpu" (one process a device) or "cuda" (one GPU a device).

    Raises as replay_all.
    """
    require_type(workload, Workload, "workload", "a Workload, as lower(plan, problem) gives")
    require_type(setting, Setting, "setting", "a Setting, as a model's or a problem's")
    require_type(config, (ReplayConfig, NoneType), "config", "a ReplayConfig or None")
    return replay_all([workload], setting, config, Transport(device))[0]


def replay_all(
    workloads: Sequence[Workload],
    setting: Setting,
    config: ReplayConfig | None = None,
    transport: Transport = LOCAL,
    reference: ReferenceOp | None = None,
) -> list[StepSample]:
    """Measure the steps of several plans of one problem, in alternation (A B A B), so that disturbances affect all
    plans.

    transport: where ranks run, on one host. In places of a box, whose hosts are those of the topology, the
        reference op runs while compute is measured. Ranks sleep for the time that compute takes at a slowdown
        of 1, as links do not slow down either.
    reference: a dataset's reference op. It runs on all devices at once, and shows the machine's slowdown.

    Raises SettingMismatch if a workload is for another setting.
    Raises ShardCoreError if workloads differ in their devices, a shard exceeds the arena, the machine lacks
    the GPUs, or a rank dies or hangs. It names the rank and the reason. No process stays behind.
    """
    config, on = config or ReplayConfig(), transport.places
    if not workloads:
        return []
    # Workloads are checked before any process starts, as a gang takes seconds to connect.
    for workload in workloads:
        require_replayable(workload, workloads[0], setting, on)
    require_arena_room(workloads, setting, config, reference)
    ranks, topology, compute_ms = len(workloads[0].ops), workloads[0].topology, None
    if on:
        # One process measures all devices' compute, one after another, so it may take longer.
        task, timeout_s = (workloads, setting, config, reference), config.timeout_s * (1 + len(workloads))
        [(_, (compute_ms, reference_ms))] = local_ranks.run_ranks(
            "compute", measure_compute, 1, task, timeout_s
        )
        slowdown = float(np.median(reference_ms)) / reference[1] if reference else 1.0
        compute_ms = [of_devices / slowdown for of_devices in compute_ms]
        # Ranks of the topology are host by host, as places are.
        places = [place for _, place in sorted(zip(topology.ranks, on, strict=True), key=lambda x: x[0])]
        transport, reference = Transport(places=places), None
    task = (workloads, setting, config, transport.device, reference, compute_ms)
    # A rank's last message is its result. Earlier ones are progress.
    last = dict(transport.run("replay", _run_rank, ranks, task, config.timeout_s))
    costs = combine_workload_costs([last[rank] for rank in range(ranks)], reference, workloads[0].job)
    return [replace(cost, oversubscribed=transport.shares_cores(ranks)) for cost in costs]


def combine_workload_costs(
    ranks: Sequence[tuple[list[np.ndarray], np.ndarray]], reference: ReferenceOp | None, job: Job
) -> list[StepSample]:
    """Measured step cost of each workload, combined from the timings of all ranks.

    ranks: results of replay_rank, of each rank of one host.
    """
    slowdown = 1.0
    if reference:
        # All devices ran the reference op at once, so they have one slowdown: the mean over their medians.
        medians_ms = np.median([reference_ms for _, reference_ms in ranks], axis=1)
        slowdown = float(medians_ms.mean()) / reference[1]
    of_workloads = zip(*(marks for marks, _ in ranks), strict=True)
    return [replace(combine_marks(marks, job), slowdown=slowdown) for marks in of_workloads]


def combine_marks(marks_s: Sequence[np.ndarray], job: Job) -> StepSample:
    """Measured cost of one workload from the time marks of all ranks.

    marks_s: D arrays [R, 6] of replay_rank, of the ranks of one host.
    """
    begin, informed, received, updated, pooled, end = np.moveaxis(np.stack(marks_s), -1, 0) * 1e3  # [D, R]
    _, ids = split_wait_and_transfer(begin, informed)
    # Waiting before the backward exchange does not count: it is skew of the barrier and of ids.
    _, backward_comm = split_wait_and_transfer(informed, received)
    waiting, forward_comm = split_wait_and_transfer(pooled, end)
    # The slowest rank counts for all, as they meet in the exchange that follows.
    input_ms = np.maximum(0.0, ids - job.id_overlap_ms).max(0, keepdims=True) * np.ones_like(ids)
    # In the order of PARTS.
    parts = np.stack([pooled - updated, updated - received, forward_comm, backward_comm, waiting, input_ms])
    medians = zip(PARTS, np.median(parts, axis=2).tolist(), strict=True)
    timed: dict[str, Any] = {name: tuple(of_devices) for name, of_devices in medians}
    return StepSample(
        **timed,
        dense_ms=job.dense_ms,
        # A step takes as long as its slowest device, in each repeat.
        step=timing_spread(parts.sum(0).max(0) + job.dense_ms),
        oversubscribed=False,
    )


def require_replayable(
    workload: Workload, first: Workload, setting: Setting, on: Sequence[EmulatedHost] = ()
) -> None:
    """Raise SettingMismatch or ShardCoreError unless a workload can be measured in `setting` together with `first`.

    on: places of a box to replay it on. Empty: this machine.
    """
    topology, job = workload.topology, workload.job
    tables = {s.table for ops in workload.ops for op in ops for s in op.shards}
    # A workload states some parts of a setting. The others are taken as equal.
    needed = replace(
        setting,
        hardware=topology.hardware or setting.hardware,
        batch=workload.global_batch,
        precision=precision_names(tables) or setting.precision,
    )
    if needed != setting:
        raise SettingMismatch(
            f"the workload has another setting than the replay: {describe_differences(needed, setting)}; "
            "replay it on its own hardware and batch"
        )
    host_table = next((t.name for t in tables if t.in_host_memory), None)
    require(
        host_table is None,
        f"table {host_table!r} has rows below device memory; a replay has all of them on the device, so far",
    )
    require(
        job.tower_ratio is None or len(workload.traffic_slots) <= 1,
        f"the plan has towers, and shards of {', '.join(run.name for run in workload.traffic_slots)}; a replay with "
        "towers needs one kind, so far",
    )
    require(
        job == first.job,
        f"workloads of two jobs cannot be replayed together ({describe_differences(job, first.job)}); "
        "give plans of one problem",
    )
    require(
        topology == first.topology,
        f"workloads of {len(topology)} and {len(first.topology)} devices, or of different topologies, cannot be "
        "replayed together; give plans of one problem",
    )
    counts = list(Counter(place.host for place in on).values()) or [len(topology)]
    speeds = sorted({d.speed for d in topology.devices})
    hosts = f"the box's {len(counts)} hosts of {counts[0]} devices" if on else "one host"
    # All ranks run on this machine, whose devices are equally fast.
    require(
        [len(devices) for devices in topology.devices_by_host] == counts and speeds == [1],
        f"the topology has hosts {', '.join(topology.hosts)} and speeds {speeds}; a replay needs {hosts} and devices "
        "of speed 1",
    )


# --- one rank -----------------------------------------------------------------------------------------------


def replay_rank(
    rank: int,
    init_method: str,
    workloads: Sequence[Workload],
    setting: Setting,
    config: ReplayConfig,
    device: str = "cpu",
    progress: Callable[[], None] = lambda: None,
    reference: ReferenceOp | None = None,
    compute_ms: ComputeTimes | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Measure the steps of workloads as one rank. All ranks need the same arguments.

    Returns marks [R, 6] of each workload, in s of the host's monotonic clock: a step's begin, ids received,
    gradients received, weights updated, the next batch pooled, outputs received. Also returns [R] ms of the
    reference op, which runs once a round (without one: [0]).
    progress: called after each plan whose ops are built, and before each round of steps.
    compute_ms: times for which the rank sleeps instead of computing. None: it computes.
    """
    if device == "cpu":
        # On a CPU, a device is one core.
        torch.set_num_threads(1)
    # Ranks that sleep have no ops, so no arena.
    benches = {} if compute_ms else make_benches(workloads, [rank], setting, config, device, reference)
    reference_runs, steps = ReferenceRuns(benches, reference, config.seed), []
    for i, workload in enumerate(workloads):
        if compute_ms:
            compute = SleepingOps(workload, rank, compute_ms[i][rank], device)
        else:
            compute = RankOps(benches, workload, rank, config, device)
        steps.append(_Step(compute, workload, rank, device))
        # Building ops takes long, so each plan's counts as a sign of life.
        progress()
    caches = HardwareCaches(config.evict_bytes, device_by_name(device).place)
    with local_ranks.report_lost_ranks():
        limits = CollectiveConfig(timeout_s=config.timeout_s)
        member = Rank(rank, len(workloads[0].ops), init_method, device, limits)
        # Groups are made by all ranks together, so all workloads' channels are needed here.
        used = [channel for workload in workloads for channel in exchanges.used_channels(workload)]
        groups = exchanges.make_process_groups(rank, workloads[0].topology, used)
        for step in steps:
            step.connect(groups, member.wait_for_all_ranks)
    marks: list[list[np.ndarray]] = [[] for _ in steps]
    for index in range(config.warmups + config.repeats):
        progress()
        # Plans run in another order each round, the same on all ranks. The first one is disturbed, as the
        # process that reads the progress takes a core.
        for i in np.random.default_rng([config.seed, index]).permutation(len(steps)):
            caches.evict_caches()
            marks[i].append(steps[i].run_once(index % config.batches))
        reference_runs.run_once(caches)
    member.close()
    # The first rounds load code, connect and allocate.
    return [np.array(m[config.warmups :]) for m in marks], np.array(reference_runs.times_ms[config.warmups :])


class _Step:
    """One rank's training step of a workload: its compute, and the exchanges with their buffers."""

    def __init__(self, compute: RankOps | SleepingOps, workload: Workload, rank: int, device: str):
        self._compute, self._workload, self._rank = compute, workload, rank
        self._chains: dict[ShardingKind, list[exchanges.Exchange]] = {}
        self._ids: list[id_transfer.IdTransfer] = []
        self._meet: Callable[[], None] = lambda: None
        self._on, self._device = device_by_name(device), device_by_name(device).place

    def connect(self, groups: exchanges.Groups, meet: Callable[[], None]) -> None:
        """Make the buffers of the step's exchanges, once ranks are connected.

        meet: waits until a step may begin.
        """
        self._meet = meet
        self._chains = exchanges.make_exchange_chains(
            self._workload, self._rank, lambda shape: filled_tensor(shape, self._device), groups
        )
        self._ids = id_transfer.make_step_transfers(self._workload, self._rank, self._device)

    def run_once(self, batch: int) -> np.ndarray:
        """Run one step on a batch number. Returns [6] time marks as in replay_rank."""
        mark = self._on.record_mark
        with local_ranks.report_lost_ranks():
            self._meet()
            began = time.perf_counter()
            # Without ids, both marks are one: their exchange takes no time.
            begin = informed = mark()
            if self._ids:
                self._exchange_ids()
                informed = mark()
            # All ranks run the exchanges in this order, as collectives require.
            for kind in exchanges.backward_order(self._chains):
                exchanges.send_gradients_back(self._chains[kind], self._compute.gradients.get(kind))
            received = mark()
        self._compute.backward()
        updated = mark()
        self._compute.forward(batch)
        pooled = mark()
        with local_ranks.report_lost_ranks():
            # Detached, as autograd ends at an op's outputs here.
            outputs = {kind: output.detach() for kind, output in self._compute.outputs.items()}
            for kind, chain in self._chains.items():
                exchanges.send_outputs(chain, outputs.get(kind))
            # Read only now, as waiting for each mark would make the device idle.
            marks = [begin, informed, received, updated, pooled, mark()]
            return began + np.cumsum([0.0, *self._on.elapsed_ms(marks)]) / 1e3

    def _exchange_ids(self) -> None:
        """Exchange the ids of the next batch, while the dense part's time passes."""
        job = self._workload.job
        hides = job.id_overlap_ms > 0
        for transfer in self._ids:
            transfer.prepare()
            transfer.send_sizes()
        # Sleep for the dense part's forward pass, in which the numbers of ids travel.
        sleep_until(time.perf_counter() + hides * (job.dense_forward_ms or 0.0) / 1e3)
        for transfer in self._ids:
            transfer.send_ids()
        # Sleep for its backward pass, in which ids travel.
        sleep_until(time.perf_counter() + hides * (job.dense_backward_ms or 0.0) / 1e3)
        for transfer in self._ids:
            transfer.wait()
            transfer.order_by_feature()


def _run_rank(
    rank: int,
    init_method: str,
    send: Callable[[Any], None],
    workloads: Sequence[Workload],
    setting: Setting,
    config: ReplayConfig,
    device: str,
    reference: ReferenceOp | None,
    compute_ms: ComputeTimes | None,
) -> None:
    """Entry point of one rank's process: measure the workloads' steps, and send the result."""
    arguments = (rank, init_method, workloads, setting, config, device)
    send(replay_rank(*arguments, progress=lambda: send(None), reference=reference, compute_ms=compute_ms))
