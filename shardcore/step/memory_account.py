"""The memory of devices as sums over shards, so that searches keep it exactly while shards come and go.

The memory timeline (phases.py) is linear. In each phase a device holds its shards' resident bytes, and
multiples of four sums over its shards: ids that arrived, outputs (or gradients of replicas), and what is
sorted. The largest phase counts. What a device has of the local batch is the same on all devices.

Shapes: D devices, R runs, P phases, T turns (stages of a step). F sums of a shard, see `Sums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardcore.amounts import (
    RunBatch,
    local_amounts,
    outputs_amounts,
    run_batches,
    sorting_bytes,
    travelling,
)
from shardcore.inputs import received_bytes
from shardcore.layouts import Layout, run_of, shards_on
from shardcore.memory import held_bytes, resident_bytes
from shardcore.op_limits import MOST_IDS, may_bind, most_features, op_ids
from shardcore.outputs import output_bytes
from shardcore.phases import IDS_ALIVE, RUNS, needed_times, run_key
from shardcore.tables.access import access_share
from shardcore.types import Placement, Problem, Shard

_OF_OP = 1024.0
"""Bytes as which a feature or an id counts that is too many in an op."""


class Sums(NamedTuple):
    """What a shard adds to a device's sums, in bytes.

    resident: weights, optimizer state, ids while they wait, and a replica's gradient. Always there.
    arrived: ids that the device receives. They are once more in the phase in which they arrive.
    entered: outputs, or the gradient of a replica. They enter collectives.
    sorted: buffers of FBGEMM's backward.
    """

    resident: int
    arrived: int
    entered: int
    sorted: float


def sums_of(run: Layout, shard: Shard, problem: Problem) -> Sums:
    """The sums of a device's part of a shard."""
    resident = sum(resident_bytes(run, shard, problem))
    if run.local_batch:
        gradient = shard.bytes * run.dense_gradient
        return Sums(resident + gradient, 0, gradient, 0)
    arrived = received_bytes(shard, problem)
    lookups = problem.global_batch * shard.table.looked_up * access_share(shard)
    return Sums(resident + IDS_ALIVE * arrived, arrived, output_bytes(shard, problem.global_batch),
                lookups * sorting_bytes(problem))


@dataclass(frozen=True, eq=False)
class Account:
    """The memory of plans whose runs, and whose local batch, are the same.

    runs: [R] in the order in which TorchRec runs them.
    base: [P] bytes of a local batch.
    coefficients: [R, F, P] bytes in a phase for each byte of a run's sums.
    limits: [D, P] bytes that a device may have, with its local batch.
    in_ops: whether phases are followed by what ops may have: for each run its features, and its ids. Only
      where they may be too many.
    """

    problem: Problem
    runs: Mapping[Layout, int]
    base: np.ndarray
    coefficients: np.ndarray
    limits: np.ndarray
    in_ops: bool

    @classmethod
    def of(cls, batches: Mapping[Layout, RunBatch], problem: Problem) -> Account:
        """The account of plans with these runs.

        batches: what each has of a local batch, in the order of runs.
        """
        keys = tuple(_key(run) for run in batches)
        names, times = needed_times(keys)
        rows = {name: i for i, name in enumerate(names)}
        base = np.zeros(times.shape[1])
        coefficients = np.zeros((len(keys), 4, len(base)))
        for r, (run, amounts) in enumerate(local_amounts(batches, problem).items()):
            base += sum(n * times[rows[r, name]] for name, n in amounts.items() if (r, name) in rows)
            coefficients[r, 0] = 1.0
            for f, unit in enumerate(_units(run, problem), start=1):
                coefficients[r, f] = sum(n * times[rows[r, name]] for name, n in unit.items()
                                         if (r, name) in rows)
            # They are resident, too (see Sums).
            coefficients[r, 1] -= IDS_ALIVE * (not run.local_batch)
            coefficients[r, 2] -= run.local_batch
        limits = np.tile(np.array(held_bytes(problem), dtype=float)[:, None], len(base))
        if in_ops := may_bind(problem):
            of_op = np.array([(most_features(run.batch(problem)), MOST_IDS) for run in batches], float)
            base = np.append(base, np.zeros(of_op.size))
            limits = np.append(limits, np.tile(of_op.ravel() * _OF_OP, (len(limits), 1)), axis=1)
        return cls(problem, {run: r for r, run in enumerate(batches)}, base, coefficients, limits, in_ops)

    def vector(self, run: Layout, shard: Shard, sums: Sums | None = None) -> np.ndarray:
        """[P] bytes that a device has of a shard in each phase. sums: those of the shard, if known."""
        r = self.runs[run]
        in_phases = np.array(sums or sums_of(run, shard, self.problem), dtype=float) @ self.coefficients[r]
        if not self.in_ops:
            return in_phases
        in_op = np.zeros((len(self.runs), 2))
        in_op[r] = 0 if run.sequence else shard.table.features, op_ids(run, shard, self.problem)
        return np.append(in_phases, in_op.ravel() * _OF_OP)

    def loads(self, placements: Iterable[Placement]) -> np.ndarray:
        """[D, P] bytes that devices have of these placements in each phase, without the local batch."""
        load = np.zeros(self.limits.shape)
        for placement in placements:
            for device, shard in shards_on(placement):
                load[device] += self.vector(run_of(placement.kind, shard.table), shard)
        return load

    def over(self, load: np.ndarray) -> np.ndarray:
        """[..., D] the most bytes that devices have more than they may, of loads [..., D, P]."""
        return np.rint((load + self.base - self.limits).max(-1))


def account_of(placements: Iterable[Placement], problem: Problem) -> Account:
    """The account of a plan, complete or not."""
    return Account.of(run_batches(placements, problem), problem)


@dataclass(frozen=True, eq=False)
class Turns:
    """What runs hold in their turns, for searches in which runs come and go (anneal/compiled/memory.py).

    Slots of a turn: before it, after it, in the first phase of the next run's turn, and its own phases.

    sums: [R, T, slots, 2] multiples of what entered, and of what is sorted.
    batch: [R, T, slots, 6] multiples of what a run has of a local batch: its outputs; these if it is cut, if
      outputs of several runs are joined, and if either; its gradient; and that if it is not cut.
    phases: [R, T] number of phases.
    most: [R, 2] the largest of the multiples `sums`.
    """

    sums: np.ndarray
    batch: np.ndarray
    phases: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Layout], problem: Problem) -> Turns:
        stages = [RUNS[_key(run)] for run in runs]
        n_phases = np.array([[len(turn.phases) for turn in of] for of in stages], dtype=np.int64)
        n_slots = 3 + int(n_phases.max())
        sums, batch = (np.zeros((len(runs), 4, n_slots, n)) for n in (2, 6))
        local = _local_units(problem)
        for r, run in enumerate(runs):
            _, entered, to_sort = _units(run, problem)
            for t, turn in enumerate(stages[r]):
                for slot, alive in enumerate((turn.before, turn.after, turn.lingers, *turn.phases.values())):
                    for name, n in ((name, n) for of in alive.values() for name, n in of.items()):
                        sums[r, t, slot] += n * np.array([entered.get(name, 0), to_sort.get(name, 0)])
                        batch[r, t, slot] += n * local.get(name, np.zeros(6))
        after = np.zeros_like(sums)
        after[:, :, 1] = sums[:, :, 2]
        return cls(sums, batch, n_phases, (sums + after).max((1, 2)))


def _local_units(problem: Problem) -> dict[str, np.ndarray]:
    """Each amount of a run's outputs for a local batch, as multiples of what `Turns.batch` names."""
    outputs, cut, together, either, gradient, uncut = np.eye(6)
    plain, joined = (outputs_amounts(1.0, problem, False, together) for together in (False, True))
    units = {name: n * outputs for name, n in plain.items()}
    return units | {"cut": cut, "together": together, "joined": either, "gradient": gradient, "uncut": uncut,
                    "local copied": plain["local copied"] * outputs
                    + (joined["local copied"] - plain["local copied"]) * together}


def _key(run: Layout) -> tuple[str, ...]:
    return run_key([channel.name for channel in run.channels], run.sequence)


def _units(run: Layout, problem: Problem) -> tuple[dict[str, float], ...]:
    """The amounts of a byte that arrived, of one that entered, and of one that is sorted."""
    if run.local_batch:
        return {}, {"dense": 1.0}, {}
    entered: dict[str, float] = {}
    for channel, entering in run.channels.items():
        entered |= travelling(channel.name, entering(0, 1.0, problem), problem.job)
    return {"arrived": 1.0}, entered, {"sorting": 1.0}
