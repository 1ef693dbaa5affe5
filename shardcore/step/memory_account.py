"""The memory of devices as sums over shards, so that searches keep it exactly while shards come and go.

The memory timeline (memory_timeline.py) is linear. In each phase a device holds its shards' resident bytes, and
multiples of a few sums over its shards: ids that arrived, outputs (or gradients of replicas), and lookups.
The largest phase counts. Buffers for the local batch are the same on all devices.

Shapes: D devices, R runs, P phases, T stages of a step. F sums of a shard, see `Sums`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardcore.core.job import PIPELINES
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.step.id_bytes import received_bytes, sample_bytes
from shardcore.step.kinds import WHOLE_ROWS, Layout, run_of, shards_on
from shardcore.step.memory import held_bytes, host_bytes, resident_bytes
from shardcore.step.memory_timeline import needed_times, stages_under
from shardcore.step.op_limits import MOST_IDS, may_bind, most_features, op_ids
from shardcore.step.output_bytes import output_bytes
from shardcore.step.shard_memory import (
    RunBatch,
    bucketized_bytes,
    exchange_buffers,
    local_buffers,
    offset_bytes,
    output_buffers,
    run_batches,
    sorting_bytes,
)

OF_OP = 1024.0
"""Bytes that stand for a feature or an id beyond what an op may have."""


class Sums(NamedTuple):
    """A shard's contribution to a device's sums.

    resident: bytes of weights, optimizer state, ids and offsets that are always there, and a replica's gradient.
    arrived: bytes of ids that the device receives. More copies exist at times.
    entered: bytes of outputs, or of a replica's gradient. They enter collectives.
    lookups: in a step.
    features: with pooled outputs.
    on_host: bytes in the fastest tier of the memory of the device's host. Plans are checked for slower ones.
    """

    resident: float
    arrived: int
    entered: int
    lookups: float
    features: int
    on_host: int


def sums_of(run: Layout, shard: Shard, problem: Problem) -> Sums:
    """Sums of a device's rows of a shard."""
    table = shard.table
    resident = sum(resident_bytes(run, shard, problem)) + offset_bytes(run, shard, problem)
    # Sequences do not count: FBGEMM's limit packs the feature number of pooled outputs (op_limits).
    lookups, features = op_ids(run, shard, problem), 0 if run.sequence else table.features
    # A replica looks up its own samples. No ids arrive, and its gradient lives all step in DDP's bucket.
    if run.local_batch:
        gradient = shard.bytes * run.dense_gradient
        return Sums(resident + gradient, 0, gradient, lookups, features, 0)
    # Ids that are alive at all times count as resident.
    arrived, memory = received_bytes(shard, problem), problem.topology.memory
    return Sums(
        resident + PIPELINES[problem.job.pipeline].least_arrived * arrived,
        arrived,
        output_bytes(shard, problem.global_batch),
        lookups,
        features,
        host_bytes(shard, problem) * (not memory or table.tier == memory[0].tier),
    )


@dataclass(frozen=True, eq=False)
class Account:
    """Memory of plans with the same runs and the same local batch.

    runs: [R] in the order in which TorchRec runs them.
    base: [P] bytes of a local batch.
    coefficients: [R, F, P] bytes in a phase for each of a run's sums.
    sent: [P] batches of which ids for a local batch are in a phase.
    limits: [D, P] bytes that a device may have, with its local batch.
    phases: number of the first columns of P that are phases. Others are lookups and features of each run's op,
      which FBGEMM limits. They exist only where a plan may have too many.
    """

    problem: Problem
    runs: Mapping[Layout, int]
    base: np.ndarray
    coefficients: np.ndarray
    sent: np.ndarray
    limits: np.ndarray
    phases: int

    @classmethod
    def of(cls, batches: Mapping[Layout, RunBatch], problem: Problem) -> Account:
        """The account of plans with these runs.

        batches: share of each run in a local batch, in the order of runs.
        """
        # The timeline needs only the memory stages of each run, so it is cached by them.
        pipeline = PIPELINES[problem.job.pipeline]
        keys = tuple(stages_under(run.stages, pipeline) for run in batches)
        # Only phases that can be the peak: each one is a column of every vector of a search.
        names, times = needed_times(keys, pipeline, any(run.local_batch for run in batches))
        rows = {name: i for i, name in enumerate(names)}
        sent = times[rows[0, "permuted"]]
        base = np.zeros(times.shape[1])
        coefficients = np.zeros((len(keys), len(Sums._fields), len(base)))
        # Bytes of the local batch are a constant, whatever the devices hold.
        for r, (run, buffers) in enumerate(local_buffers(batches, problem).items()):
            base += sum(n * times[rows[r, name]] for name, n in buffers.items() if (r, name) in rows)
            # Resident bytes are in every phase once.
            coefficients[r, 0] = 1.0
            # A coefficient is how many bytes a phase has for one byte (or lookup) of a sum.
            for f, unit in enumerate(_units(run, problem), start=1):
                # Buffers that no remaining phase has are left out of `rows`.
                coefficients[r, f] = sum(
                    n * times[rows[r, name]] for name, n in unit.items() if (r, name) in rows
                )
            # They are resident, too (see Sums).
            coefficients[r, 1] -= pipeline.least_arrived * (not run.local_batch)
            coefficients[r, 2] -= run.local_batch
        # One limit a device, repeated for all phases: the peak is the largest of them.
        limits = np.tile(np.array(held_bytes(problem), dtype=float)[:, None], len(base))
        phases = len(base)
        # FBGEMM's limits are extra columns: searches then check them by the same comparison as memory.
        if may_bind(problem):
            # Load and limit are both scaled by OF_OP, so an excess of one id reads as 1 KiB too much.
            of_op = np.array([(MOST_IDS, most_features(run.batch(problem))) for run in batches], float)
            base, sent = (np.append(x, np.zeros(of_op.size)) for x in (base, sent))
            limits = np.append(limits, np.tile(of_op.ravel() * OF_OP, (len(limits), 1)), axis=1)
            of_ops = np.zeros((len(keys), len(Sums._fields), len(keys), 2))
            for r in range(len(keys)):
                # Each op counts its own run's lookups and features only.
                of_ops[r, 3:5, r] = OF_OP * np.eye(2)
            coefficients = np.append(coefficients, of_ops.reshape(*coefficients.shape[:2], -1), axis=2)
        runs = {run: r for r, run in enumerate(batches)}
        return cls(problem, runs, base, coefficients, sent, limits, phases)

    def vector(self, run: Layout, shard: Shard, sums: Sums | None = None) -> np.ndarray:
        """[P] bytes that a device has of a shard in each phase. sums: those of the shard, if known."""
        # One dot product [F] by [F, P]: the cost of memory in a search's trial.
        return np.array(sums or sums_of(run, shard, self.problem), float) @ self.coefficients[self.runs[run]]

    def loads(self, placements: Iterable[Placement]) -> np.ndarray:
        """[D, P] bytes that devices have of these placements in each phase, without the local batch."""
        load = np.zeros(self.limits.shape)
        for placement in placements:
            for device, shard in shards_on(placement):
                load[device] += self.vector(run_of(placement.kind, shard.table), shard)
        return load


def own_peaks(problem: Problem) -> Callable[[Layout, Shard], int]:
    """A function of a run and a shard: bytes that a device has of it in its own largest phase.

    The ids of a local batch that a cut or a division adds to all devices are included.
    """
    accounts: dict[Layout, Account] = {}

    def bytes_of(run: Layout, shard: Shard) -> int:
        # An account without a local batch: only what the shard itself adds.
        if run not in accounts:
            accounts[run] = Account.of({run: RunBatch(0, False, 0.0, 0.0, 0)}, problem)
        account, ids = accounts[run], 0.0
        # Cutting a table sends its ids once more, so every device permutes one more copy.
        if shard.width < shard.table.dim and not run.local_batch:
            ids += sample_bytes(shard.table, problem.job)
        # Bucketized ids are an extra copy, with lengths for each range.
        if run.divides_rows:
            ids += bucketized_bytes(shard.table, problem.job, len(run.shared_by(problem.topology)[0]))
        # Columns beyond `phases` are op limits, not bytes.
        vector = account.vector(run, shard) + problem.local_batch * ids * account.sent
        return math.ceil(vector[: account.phases].max())

    return bytes_of


def table_bytes(table: Table, problem: Problem, width: int | None = None) -> int:
    """Bytes of a table on a device, or of some of its columns, in its own largest phase."""
    shard = Shard(table, 0, table.rows, 0, width or table.dim)
    return own_peaks(problem)(run_of(WHOLE_ROWS.name, table), shard)


def local_batch_bytes(problem: Problem) -> int:
    """Bytes of a local batch on a device with half of an even share of all tables, which are whole.

    The largest phase counts. So with more shards, the local batch adds less.
    """
    whole = [Placement(WHOLE_ROWS.name, Shard.whole(t), (0,)) for t in problem.tables]
    account = account_of(whole, problem)
    # All tables on device 0, then half of what an even share would be.
    load = account.loads(whole)[0, : account.phases] / (2 * len(problem.topology))
    # Resident bytes are in all phases.
    return math.ceil((account.base[: account.phases] + load).max() - load.max())


def account_of(placements: Iterable[Placement], problem: Problem) -> Account:
    """The account of a plan, complete or not."""
    return Account.of(run_batches(placements, problem), problem)


@dataclass(frozen=True, eq=False)
class StageCoefficients:
    """Coefficients of runs' memory, for searches in which runs come and go (engine/memory.py).

    Slots of a stage are the fields of memory_timeline.StageBuffers: before, after, freed_late, and each phase.

    sums: [R, T, slots, 2] multiples of bytes that entered, and of lookups.
    batch: [R, T, slots, 6] multiples of a run's bytes for a local batch: its outputs; these if it is cut, if
      outputs of several runs are joined, and if either; its gradient; and that if it is not cut.
    phases: [R, T] number of phases.
    most: [R, 2] the largest of the multiples `sums`.
    """

    sums: np.ndarray
    batch: np.ndarray
    phases: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Layout], problem: Problem) -> StageCoefficients:
        pipeline = PIPELINES[problem.job.pipeline]
        stages = [stages_under(run.stages, pipeline) for run in runs]
        n_phases = np.array([[len(buffers.phases) for buffers in of] for of in stages], dtype=np.int64)
        # Runs with fewer phases keep zeros in the slots that they lack.
        n_slots = 3 + int(n_phases.max())
        sums, batch = (np.zeros((len(runs), 4, n_slots, n)) for n in (2, 6))
        for r, run in enumerate(runs):
            local = _local_units(run, problem)
            _, entered, sorting = _units(run, problem)
            for t, held in enumerate(stages[r]):
                # The order of slots is a contract with engine/memory.py.
                slots = (held.before, held.after, held.freed_late, *held.phases.values())
                for slot, alive in enumerate(slots):
                    # Parts do not matter here, only bytes: their buffers are added up.
                    for name, n in ((name, n) for of in alive.values() for name, n in of.items()):
                        sums[r, t, slot] += n * np.array([entered.get(name, 0), sorting.get(name, 0)])
                        batch[r, t, slot] += n * local.get(name, np.zeros(6))
        # Buffers freed late exist together with those of `after`, so the largest slot adds both.
        after = np.zeros_like(sums)
        after[:, :, 1] = sums[:, :, 2]
        return cls(sums, batch, n_phases, (sums + after).max((1, 2)))


def _local_units(run: Layout, problem: Problem) -> dict[str, np.ndarray]:
    """[6] multiples of the bytes in `StageCoefficients.batch`, for each buffer of a run's outputs."""
    # Unit vectors: each buffer becomes a row of multiples of the six quantities.
    outputs, cut, together, either, gradient, uncut = np.eye(6)
    # Both cases are linear in outputs. Their difference counts only if runs are joined.
    plain, joined = (output_buffers(run, 1.0, problem.job, False, together) for together in (False, True))
    units = {name: n * outputs for name, n in plain.items()}
    return units | {
        "cut": cut,
        "together": together,
        "joined": either,
        "gradient": gradient,
        "uncut": uncut,
        "local copied": plain["local copied"] * outputs
        + (joined["local copied"] - plain["local copied"]) * together,
    }


def _units(run: Layout, problem: Problem) -> tuple[dict[str, float], ...]:
    """Bytes of each buffer for a byte that arrived, for one that entered, and for a lookup."""
    if run.local_batch:
        return {}, {"dense": 1.0}, {}
    entered: dict[str, float] = {}
    # Channels without towers, as Layout.stages has them.
    for channel, entering in run.channels.items():
        entered |= exchange_buffers(channel, entering(0, 1.0, problem), problem.job)
    return {"arrived": 1.0}, entered, {"sorting": float(sorting_bytes(problem))}
