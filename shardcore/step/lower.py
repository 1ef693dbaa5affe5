"""Lower a plan to one training step: its ops, traffic and memory.

Devices send each other the ids to look up (see id_bytes.py).
Each device then looks up rows (forward) and exchanges pooled outputs.
After the dense part it exchanges their gradients and updates rows (backward).
As in TorchRec, the shards of a kind and collection run as one fused FBGEMM op with its collectives: a run
(see kinds.py).

Shapes: C channels (kinds.CHANNELS), L traffic slots (`assign_traffic_slots`), D devices.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.progress import iterate_with_progress, tick
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.core.validation import require, require_type
from shardcore.step import memory
from shardcore.step.kinds import (
    CHANNELS,
    Channel,
    ShardingKind,
    device_names,
    merged_placements,
    require_valid_placement,
    sharding_kind_by_name,
    sharding_kind_for_table,
    sharding_kinds_for_tables,
    shards_by_device,
)
from shardcore.step.memory import require_op_limits
from shardcore.step.shard_memory import exchanged_amounts


@dataclass(frozen=True)
class Op:
    """Shards that run as one fused FBGEMM op.

    kind: kind of sharding.
    shards: in the op. Their tables are of one collection, and all pooled or none.
    batch: samples it runs over.
    """

    kind: str
    shards: tuple[Shard, ...]
    batch: int

    @property
    def sharding_kind(self) -> ShardingKind:
        """The sharding kind by which the op's shards run."""
        return sharding_kind_for_table(self.kind, self.shards[0].table)


def is_sequence_op(shards: Sequence[Shard]) -> bool:
    """Tell if lookups of a fused op are not pooled. Raises ShardCoreError for shards of several ops."""
    kinds = {s.table.sequence for s in shards}
    # FBGEMM's op has one pooling mode for all of its tables.
    if len(kinds) > 1:
        raise ShardCoreError("an op has sequences and pooled tables; FBGEMM runs them in separate ops")
    # Lookups of sequences are rows of one output matrix, so all have its width.
    widths = sorted({s.width for s in shards})
    if any(kinds) and len(widths) > 1:
        raise ShardCoreError(
            f"an op has sequences {' and '.join(map(str, widths[:3]))} columns wide; FBGEMM "
            "runs those of one width together"
        )
    return any(kinds)


@dataclass(frozen=True, eq=False)
class Workload:
    """Work of one training step of a plan: fused ops, traffic and memory of all devices.

    ops: (D tuples) of each device, in the order of `sharding_kinds_for_tables`. Devices that run the same shards share
      an Op.
    traffic: [L C, D] bytes that enter each channel; of kinds.ID_CHANNELS, bytes that arrive.
        All 0 along D means that its collective does not run.
    memory_bytes: (D) bytes held on each device.
    topology: the devices and links.
    global_batch: samples of a step.
    job: properties of a step around the embeddings.
    """

    ops: tuple[tuple[Op, ...], ...]
    traffic: np.ndarray
    memory_bytes: tuple[int, ...]
    topology: Topology
    global_batch: int
    job: Job = Job()

    def __repr__(self) -> str:
        # A replicated op is on many devices, but it is one object: counted once.
        ops = {id(op): len(op.shards) for ops in self.ops for op in ops}
        return (
            f"Workload({sum(ops.values())} shards in {len(ops)} ops, {self.topology!r}, global batch "
            f"{self.global_batch})"
        )

    def __getstate__(
        self,
    ) -> dict[str, Any]:  # sharding kinds are compared by identity, so they stay in a process
        return {k: v for k, v in self.__dict__.items() if k != "traffic_slots"}

    @property
    def channels(self) -> tuple[Channel, ...]:
        """[L C] the channel of each row of the step's traffic."""
        return channels_of_traffic(self.traffic)

    @cached_property
    def traffic_slots(self) -> dict[ShardingKind, int]:
        """The sharding kinds of the step's ops in their order, each with its traffic slot in the rows of traffic."""
        # Ordered by first appearance, without duplicates. Traffic slots depend on the runs, not on their devices.
        ops = {id(op): op for ops in self.ops for op in ops}.values()
        return _traffic_slots_among_runs(
            {op.sharding_kind: None for op in ops}, (s.table for op in ops for s in op.shards)
        )

    def entering_bytes(self, sharding_kind: ShardingKind, channel: Channel) -> np.ndarray:
        """[D] bytes that each device sends into one collective of a sharding kind, its channel."""
        return self.traffic[traffic_row(self.traffic_slots[sharding_kind], channel)]


def lower(plan: Plan, problem: Problem, fits: bool = True) -> Workload:
    """Lower a plan to a Workload: the ops, traffic and memory of one training step.

    Raises ShardCoreError if the plan does not cover the problem's tables exactly once.
    Raises it too for a placement that its kind does not allow, and for a broken constraint.
    Raises Infeasible if a device would hold more than it may, or run more in an op than FBGEMM does, unless
    `fits` is False.
    """
    require_type(plan, Plan, "plan", "a Plan, as a sharder gives")
    require_type(problem, Problem, "problem", "a Problem")
    # First: bytes of a plan that lacks a table mean nothing.
    require_valid_plan(plan, problem, fits=False)
    # Memory is needed in either case, for the Workload states it.
    used = (memory.require_fits if fits else memory.used_bytes)(plan, problem)
    if fits:
        require_op_limits(plan, problem)
    n_devices = len(problem.topology)
    # All shards of a run on a device are one fused op, as TorchRec groups them.
    held: dict[tuple[ShardingKind, int], list[Shard]] = defaultdict(list)
    for placement in merged_placements(plan.placements):
        run = sharding_kind_for_table(placement.kind, placement.shard.table)
        for device, shard in shards_by_device(placement):
            held[run, device].append(shard)
    ops: list[list[Op]] = [[] for _ in range(n_devices)]
    # Runs of this plan only, so that most plans have one traffic slot.
    outputs, ids = dict[ShardingKind, np.ndarray](), dict[ShardingKind, np.ndarray]()
    for sharding_kind in _traffic_slots_among_runs(
        {sharding_kind for sharding_kind, _ in held}, problem.tables
    ):
        last = None
        outputs[sharding_kind], ids[sharding_kind] = np.zeros((2, n_devices))
        for device in (d for d in range(n_devices) if (sharding_kind, d) in held):
            shards = tuple(held[sharding_kind, device])
            # Devices of a replicated kind run the same shards. They share an Op, so that it is priced once.
            if last is None or last.shards != shards:
                last = Op(sharding_kind.name, shards, sharding_kind.op_batch(problem))
                amounts = [exchanged_amounts(sharding_kind, shard, problem) for shard in shards]
                arrived, entered, _ = map(sum, zip(*amounts, strict=True))
            ops[device].append(last)
            outputs[sharding_kind][device], ids[sharding_kind][device] = entered, arrived
    tick()
    return Workload(
        tuple(map(tuple, ops)),
        traffic_of_outputs(outputs, problem, ids),
        tuple(used),
        problem.topology,
        problem.global_batch,
        problem.job,
    )


def _traffic_slots_among_runs(
    among: Container[ShardingKind], tables: Iterable[Table]
) -> dict[ShardingKind, int]:
    """Traffic slots of those sharding kinds of some tables that are in `among`, in the order in which they run."""
    return assign_traffic_slots(run for run in sharding_kinds_for_tables(tables) if run in among)


def traffic_of_outputs(
    outputs: Mapping[ShardingKind, np.ndarray],
    problem: Problem,
    id_bytes: Mapping[ShardingKind, np.ndarray] | None = None,
) -> np.ndarray:
    """[L C, ..., D] bytes that devices enter into each channel, from bytes of outputs [..., D] by sharding kind.

    outputs: bytes of outputs; of replicas, bytes of their gradients.
    id_bytes: [..., D] bytes of ids and lengths that devices receive for some of these runs.
    """
    # Any leading dimensions: searches price several candidate plans in one call.
    of_run, shape = assign_traffic_slots(outputs), next(iter(outputs.values())).shape
    traffic = np.zeros(((1 + max(of_run.values())) * len(CHANNELS), *shape))
    for run, n_bytes in (id_bytes or {}).items():
        # Replicas look up their own samples, so no ids travel for them.
        if run.ids:
            traffic[traffic_row(of_run[run], run.ids)] = n_bytes
    for run, n_bytes in outputs.items():
        for channel, entering in run.channels_in_job(problem.job, problem.topology).items():
            # A channel carries gradients of weights, or outputs.
            traffic[traffic_row(of_run[run], channel)] += entering(n_bytes, n_bytes, problem)
    return spread_over_domains(traffic, problem)


def require_valid_plan(plan: Plan, problem: Problem, fits: bool = True) -> None:
    """Raise ShardCoreError for a plan that `lower` would refuse. Memory is checked only with `fits`."""
    require_full_cover(plan, problem)
    # After coverage: constraints assume that placements are valid for their kinds.
    require_constraints(plan, problem)
    if fits:
        memory.require_fits(plan, problem)
        require_op_limits(plan, problem)


def require_full_cover(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError unless a plan places every cell of every table exactly once.

    Placements have to be possible for their kind, on devices that exist.
    """
    by_table: dict[str, list[Shard]] = defaultdict(list)
    over: dict[str, str] = {}
    known = {t.name: t for t in problem.tables}
    for placement in iterate_with_progress(plan.placements):
        shard = placement.shard
        table = known.get(shard.table.name)
        # Plans mostly hold the problem's own tables. Identity saves comparing their statistics.
        if table is not shard.table and table != shard.table:
            raise ShardCoreError(
                f"plan places table {shard.table.name!r}, which problem {problem.name!r} does not have (or not with "
                "this shape and these statistics)"
            )
        require_valid_placement(placement, problem)
        if domain := sharding_kind_by_name(placement.kind).rows_over:
            over.setdefault(domain, shard.table.name)
        by_table[shard.table.name].append(shard)
    if len(over) > 1:
        words = " and of ".join(f"{name!r} over {domain}s" for domain, name in over.items())
        raise ShardCoreError(f"plan divides rows of {words}; a job of TorchRec divides rows over one of both")
    for table in problem.tables:
        # Shards of a table have all rows. So they overlap only if their columns do.
        shards = sorted(by_table[table.name], key=lambda s: s.col_lo)
        for left, right in itertools.pairwise(shards):
            if right.col_lo < left.col_hi:
                raise ShardCoreError(f"plan places cells twice: {left.label} and {right.label}")
        # No cell twice, and the right number of cells: so every cell once.
        placed = sum(s.rows * s.width for s in shards)
        if placed != table.rows * table.dim:
            raise ShardCoreError(
                f"plan places {placed} of the {table.rows * table.dim} cells of table {table.name!r}"
            )
    # FBGEMM sees merged shards, so limits apply to a table's columns on a device, not to each shard.
    most = problem.topology.max_shard_columns
    for placement in merged_placements([p for p in plan.placements if p.shard.table.dim > most]):
        if placement.shard.width > most:
            raise ShardCoreError(
                f"plan places {placement.shard.width} columns of table {placement.shard.table.name!r} by "
                f"{placement.kind} on {device_names(placement.devices)}; FBGEMM's CUDA op "
                f"runs shards of at most {most} (a CPU, by topology.hardware, has no limit)"
            )


def _require_working_codecs(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError if a payload codec of the job fails on an exchange of the plan."""
    columns: Counter[tuple[ShardingKind, int]] = Counter()
    suspects: dict[tuple[ShardingKind, int], tuple[Shard, str]] = {}
    for placement in merged_placements(plan.placements):
        shard, run = placement.shard, sharding_kind_for_table(placement.kind, placement.shard.table)
        reason = problem.why_codec_fails(run, replace(shard.table, dim=shard.width))
        for device in placement.devices:
            columns[run, device] += shard.width * shard.table.features
            if reason:
                suspects[run, device] = shard, reason
    there, back = problem.payload_codecs
    for (run, device), (shard, reason) in suspects.items():
        # Pooled columns of a device travel together, so only all of them have to be whole blocks.
        elements = columns[run, device] * problem.local_batch
        together = run.cuts_columns and not (shard.table.sequence or shard.table.has_variable_batch)
        carried = (there.pads or not elements % there.block) and not elements % back.block
        sums_fail = run.divides_rows and () in (there.summed, back.summed)
        require(
            together and carried and not sums_fail,
            f"plan places {shard.label} on {device_names((device,))}; {reason}",
        )


def require_constraints(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError if a plan breaks a constraint of the problem.

    Tables that must stay whole are whole. All live only where they may. Bundles are on one device. Tables
    are run by kinds that may run them, in shards that are wide enough.
    """
    # Checks go from cheap to dear: merging placements is left for problems that need it.
    kinds = problem.restricted_kinds_by_table
    for placement in plan.placements if kinds else ():
        name = placement.shard.table.name
        if placement.kind not in kinds.get(name, (placement.kind,)):
            raise ShardCoreError(
                f"plan places {placement.shard.label} by {placement.kind}; it needs "
                f"{' or '.join(kinds[name])} (constraints.kinds)"
            )
    for placement in plan.placements:
        if reason := problem.why_replicas_fail(sharding_kind_by_name(placement.kind)):
            raise ShardCoreError(f"plan places {placement.shard.label} by {placement.kind}; {reason}")
    if problem.codecs_may_fail:
        _require_working_codecs(plan, problem)
    # A table that is narrower than its minimum width only has to be whole.
    least = dict(problem.constraints.min_widths)
    for placement in merged_placements([p for p in plan.placements if p.shard.table.name in least]):
        table, width = placement.shard.table, placement.shard.width
        if width < min(table.dim, least[table.name]):
            raise ShardCoreError(
                f"plan places {width} columns of table {table.name!r} on {device_names(placement.devices)}; it needs "
                f"{least[table.name]} or more (constraints.min_widths)"
            )
    # Most problems have no others.
    if not problem.uncut_tables and not problem.pinned_devices:
        return
    homes: dict[tuple[str, ...], tuple[str, tuple[int, ...]]] = {}
    for placement in merged_placements(plan.placements):
        shard, devices, name = placement.shard, placement.devices, placement.shard.table.name
        # A range of rows is a cut as well, unless a single device has all of them.
        divided = sharding_kind_by_name(placement.kind).divides_rows and len(devices) > 1
        # Columns were merged above, so two shards on one device count as whole.
        if name in problem.uncut_tables and (divided or shard != Shard.whole(shard.table)):
            # Name a shard as it runs: for divided rows, one device's range.
            one = next(s for _, s in shards_by_device(placement))
            raise ShardCoreError(
                f"plan cuts table {name!r}, one shard being {one.label}; it must stay whole "
                f"({problem.constraint_against_cuts(name)})"
            )
        # Tables that nothing pins may live anywhere.
        allowed = problem.pinned_devices.get(name, devices)
        for wrong in (d for d in devices if d not in allowed):
            raise ShardCoreError(
                f"plan places {shard.label} on device {wrong}; table {name!r} may only live "
                f"on {device_names(allowed)} (constraints.pinned)"
            )
        # The first table of a bundle sets its device. All others are compared with that.
        if name in problem.group_by_table:
            other, home = homes.setdefault(problem.group_by_table[name], (name, devices))
            if len(devices) > 1 or devices != home:
                raise ShardCoreError(
                    f"plan places table {name!r} on {device_names(devices)} and {other!r} on "
                    f"{device_names(home)}; they need to be together on one (constraints.together)"
                )


# --- arrays of bytes by channel, and where the runs of a plan stand in them ---------------------------------------


def assign_traffic_slots(sharding_kinds: Iterable[ShardingKind]) -> dict[ShardingKind, int]:
    """The traffic slot of each sharding kind: the number of its C rows, one for each channel, in an array of traffic.

    Each run has separate collectives. Runs without a channel in common share a slot, so most plans have one.
    Gradients of replicas are all in the first: DDP reduces them together.
    """
    # Greedy colouring: a run takes the first slot in which none of its channels is in use.
    in_use: list[set[Channel]] = [set()]
    slot_of = {}
    for run in sharding_kinds:
        # Dense channels do not conflict: DDP reduces all gradients in one call, so their bytes add up.
        channels = {c for c in (*run.channels, run.ids) if c and not c.definition.dense}
        slot_of[run] = next((i for i, others in enumerate(in_use) if not channels & others), len(in_use))
        # A run that fits no slot opens the next one.
        in_use += [set()] * (slot_of[run] == len(in_use))
        in_use[slot_of[run]] |= channels
    return slot_of


def traffic_row(slot: int, channel: Channel) -> int:
    """Index of a channel's row in an array of traffic."""
    # Slot-major: [L C, ...] holds the C rows of slot 0, then those of slot 1.
    return slot * len(CHANNELS) + CHANNELS.index(channel)


def channels_of_traffic(traffic: np.ndarray) -> tuple[Channel, ...]:
    """The channel of each row of an array of traffic."""
    return CHANNELS * (len(traffic) // len(CHANNELS))


def spread_over_domains(traffic: np.ndarray, problem: Problem) -> np.ndarray:
    """[L C, ..., D] traffic in which, with towers, bytes across hosts (or pods) are divided evenly over each one's
    devices.

    After the exchange within a tower, all its devices have equally many samples (ShardingKind.channels_in_job).
    """
    if problem.job.tower_ratio is not None:
        on_domains = np.array(problem.topology.row_domains)
        # Only exchanges across them are compressed by towers. Others keep each device's own bytes.
        for row in (i for i, c in enumerate(channels_of_traffic(traffic)) if c.scope.across):
            of_domain = traffic[row][..., on_domains]
            # The mean over a domain keeps its total, which is what its uplink carries.
            traffic[row][..., on_domains] = np.broadcast_to(
                of_domain.mean(-1, keepdims=True), of_domain.shape
            )
    return traffic
