"""Moving one shard to another device: what a step and memory become, from sums that a page can carry.

Memory is exact: in each phase it is a sum over shards (step/memory_account.py). Compute is exact where a cost
model adds ms up. Exchanges follow a linear law in a few sums of bytes, fitted to moves that the model prices.
What all of this is off by is found on other moves, each priced as a plan of its own.

Only shards of one device move: of kinds that divide rows or replicate them, each device has its share.

Shapes: N shards, D devices, P phases (and limits of ops), K moves, Q terms of an exchange.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardcore.core.types import Placement, Plan, Problem, Table
from shardcore.cost.model import CostModel, PricedPlan, exposed_input_ms, total_ms
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import CHANNELS, WHOLE_ROWS, Layout, merged, run_of
from shardcore.step.lower import Workload, entering_bytes, lower
from shardcore.step.memory_account import Sums, account_of, sums_of
from shardcore.step.output_bytes import output_bytes
from shardcore.step.traffic import row_in, shared_on_units

_FITTED, _CHECKED, _PROBES = 200, 24, 64
"""Moves of the fit, moves of the check, and shards that tell a device's pace."""
MOST_SKEW_MS = 10.0
"""Later starts cost an exchange no more (cost/collective_model.py)."""
Move = tuple[int, int]
"""Numbers of a shard and of the device that it moves to."""


@dataclass(frozen=True)
class OneDeviceShard:
    """A shard of a kind that has all rows on one device.

    run: number of its op and collectives.
    saves_ms: compute that its device loses with it.
    adds_ms: compute that it adds to a device of mean load and speed 1, if its op is there.
    alone_ms: compute of an op of it alone, at speed 1.
    output_bytes, id_bytes: it enters into exchanges.
    sums: of its memory (step/memory_account.py).
    stays: reason why it may not move. "": it may.
    """

    placement: Placement
    run: int
    saves_ms: float
    adds_ms: float
    alone_ms: float
    output_bytes: float
    id_bytes: float
    sums: Sums
    stays: str

    @property
    def device(self) -> int:
        return self.placement.devices[0]


@dataclass(frozen=True)
class Check:
    """Differences from prices, over some moves: all in ms.

    moves: their number.
    median_ms, most_ms: of the step.
    change_ms: median change of the step by these moves.
    """

    moves: int
    median_ms: float
    most_ms: float
    change_ms: float


@dataclass(frozen=True, eq=False)
class WhatIf:
    """All that says what a move of one shard does.

    shards: [N] shards of one device.
    pace: [runs, D] ms that a shard adds to a device's op, over its adds_ms.
    compute_ms, forward_ms, backward_ms: [D] of the plan.
    output_bytes, id_bytes: [runs, D] of the plan, which runs exchange one after another.
    input_ms, dense_ms: of the step.
    link_ms, forward_share: [D] see PredictedCost.link_ms; share of forward in compute.
    host: [D] number of a device's host.
    memory, limits: [D, P] bytes; what each may be.
    coefficients: [runs, F, P] bytes for each of a shard's sums.
    phases: the first columns of P that are bytes. Others are limits of ops.
    forward, backward, ids: [Q] ms for each of `terms`.
    """

    shards: tuple[OneDeviceShard, ...]
    pace: np.ndarray
    compute_ms: np.ndarray
    forward_ms: np.ndarray
    backward_ms: np.ndarray
    input_ms: float
    dense_ms: float
    link_ms: np.ndarray
    forward_share: np.ndarray
    output_bytes: np.ndarray
    id_bytes: np.ndarray
    host: np.ndarray
    memory: np.ndarray
    limits: np.ndarray
    coefficients: np.ndarray
    phases: int
    speed: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    ids: np.ndarray
    check: Check | None = None

    @cached_property
    def counts(self) -> np.ndarray:
        """[runs, D] shards of each device's op."""
        counts = np.zeros(self.pace.shape, dtype=int)
        np.add.at(counts, ([x.run for x in self.shards], [x.device for x in self.shards]), 1)
        return counts

    def after(self, moves: Sequence[Move]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[K, D] compute ms, and [K, runs, D] bytes of outputs and of ids, after each of some moves."""
        compute = np.tile(self.compute_ms, (len(moves), 1))
        outputs, ids = (np.tile(x, (len(moves), 1, 1)) for x in (self.output_bytes, self.id_bytes))
        for k, (i, device) in enumerate(moves):
            x = self.shards[i]
            added = x.adds_ms * self.pace[x.run, device] if self.counts[x.run, device] else x.alone_ms
            compute[k, [x.device, device]] += [-x.saves_ms, added / self.speed[device]]
            outputs[k, x.run, [x.device, device]] += [-x.output_bytes, x.output_bytes]
            ids[k, x.run, [x.device, device]] += [-x.id_bytes, x.id_bytes]
        return compute, outputs, ids

    def changes(self, compute: np.ndarray, n_bytes: np.ndarray, before: np.ndarray) -> np.ndarray:
        """[K, D, Q] changes of the terms of exchanges. n_bytes, before: [K, runs, D] and [runs, D]."""
        return terms(n_bytes, compute, self.host) - terms(before, self.compute_ms, self.host)

    def totals_ms(self, moves: Sequence[Move]) -> np.ndarray:
        """[K] ms of the step after each of some moves. The page's script has the same formula."""
        compute, outputs, ids = self.after(moves)
        of_outputs = self.changes(compute, outputs, self.output_bytes)
        forward, backward = (
            self.forward_ms + of_outputs @ self.forward,
            self.backward_ms + of_outputs @ self.backward,
        )
        input_ms = self.input_ms + (self.changes(compute, ids, self.id_bytes) @ self.ids).max(-1)
        # Tables with rows elsewhere stay, so caches fetch as much (cost.model.fetch_wait_ms).
        fetched_ms = self.link_ms + (1 - self.forward_share) * compute - self.dense_ms
        last_ms = np.maximum((compute + backward).max(-1) + forward.max(-1), fetched_ms.max(-1))
        return last_ms + input_ms + self.dense_ms

    def moved(self, i: int, device: int, plan: Plan) -> Plan:
        """The plan with shard i on a device."""
        x, placements = self.shards[i].placement, merged(plan.placements)
        at = next(k for k, p in enumerate(placements) if (p.shard, p.devices) == (x.shard, x.devices))
        return Plan((*placements[:at], replace(x, devices=(device,)), *placements[at + 1 :]))

    @cached_property
    def devices_of(self) -> Mapping[str, set[int]]:
        """Devices that have one of these shards, by table."""
        devices = defaultdict(set)
        for x in self.shards:
            devices[x.placement.shard.table.name].add(x.device)
        return devices

    def targets(self, i: int, problem: Problem) -> list[int]:
        """Devices that a shard may move to, but those with other columns of its table: these would merge."""
        table = self.shards[i].placement.shard.table.name
        if self.shards[i].stays:
            return []
        return [d for d in problem.allowed_devices(table) if d not in self.devices_of[table]]


def terms(n_bytes: np.ndarray, compute_ms: np.ndarray, host: np.ndarray) -> np.ndarray:
    """[..., D, Q] terms of exchanges.

    MB of a device, of the busiest, of its host and of the busiest host, summed over runs; and the skew, ms.
    n_bytes: [..., runs, D]. compute_ms: [..., D].
    """
    mb = n_bytes / 1e6
    of_host = np.stack([mb[..., host == h].sum(-1) for h in range(host.max() + 1)], -1)
    each = mb.sum(-2), of_host[..., host].sum(-2)
    busiest = (
        mb.max(-1).sum(-1),
        of_host.max(-1).sum(-1),
        np.minimum(np.ptp(compute_ms, axis=-1), MOST_SKEW_MS),
    )
    most, most_host, skew = (np.broadcast_to(x[..., None], each[0].shape) for x in busiest)
    return np.stack([each[0], most, each[1], most_host, skew], -1)


def what_if(priced: PricedPlan, problem: Problem, model: CostModel, seed: int = 0) -> WhatIf:
    """The sums and laws that tell the effect of moving single shards of a plan.

    problem: with the plan's towers, if it has some (decisions.towers.as_planned).
    model: what prices the plan.
    """
    placements = merged(priced.plan.placements)
    account = account_of(placements, problem)
    runs = [run for run in account.runs if run.name == WHOLE_ROWS.name]
    n, cost = len(problem.topology), priced.cost
    (outputs, ids), pace, shards = np.zeros((2, len(runs), n)), np.ones((len(runs), n)), []
    speed = np.array([d.speed for d in problem.topology.devices])
    for r, run in enumerate(runs):
        held = [p for p in placements if run_of(p.kind, p.shard.table) is run]
        pace[r], *ms = _compute(held, run, speed, problem, model)
        for p, saves, adds, alone in zip(held, *(x.tolist() for x in ms), strict=True):
            n_out, n_ids = output_bytes(p.shard, problem.global_batch), received_bytes(p.shard, problem)
            outputs[r, p.devices[0]] += n_out
            ids[r, p.devices[0]] += n_ids
            sums, stays = sums_of(run, p.shard, problem), _stays(p.shard.table, problem)
            shards.append(OneDeviceShard(p, r, saves, adds, alone, n_out, n_ids, sums, stays))
    host_of = {host: i for i, host in enumerate(problem.topology.hosts)}
    known = WhatIf(
        tuple(shards),
        pace,
        np.array(cost.compute_ms),
        np.array(cost.forward_comm_ms),
        np.array(cost.backward_comm_ms),
        max(cost.input_ms),
        cost.dense_ms,
        np.array(cost.link_ms),
        np.array(cost.forward_compute_ms) / np.maximum(cost.compute_ms, 1e-300),
        outputs,
        ids,
        np.array([host_of[d.host] for d in problem.topology.devices]),
        account.base + account.loads(placements),
        account.limits,
        account.coefficients[[account.runs[run] for run in runs]],
        account.phases,
        speed,
        forward=np.zeros(5),
        backward=np.zeros(5),
        ids=np.zeros(5),
    )
    moves = _drawn(known, problem, np.random.default_rng(seed))
    if not moves:
        return known
    fitted = _fitted(known, moves[_CHECKED:] or moves, priced.workload, problem, model, runs)
    return replace(fitted, check=_checked(fitted, moves[:_CHECKED], priced, problem, model))


def _stays(table: Table, problem: Problem) -> str:
    """The reason why no shard of a table may move alone, or what it does is not known. "": it may."""
    others = [name for name in problem.bundle_of.get(table.name, ()) if name != table.name]
    if others:
        return f"it needs to stay together with {others[0]} (constraints.together)"
    return "some of its rows are not in device memory" if table.in_host_memory else ""


def _compute(
    held: Sequence[Placement], run: Layout, speed: np.ndarray, problem: Problem, model: CostModel
) -> tuple[np.ndarray, ...]:
    """[D] the pace, and [N] saves_ms, adds_ms and alone_ms, of a run's shards."""
    codes = np.asarray(model.encode([p.shard for p in held], run.batch(problem)), dtype=float)
    at, sums = np.array([p.devices[0] for p in held]), np.zeros((len(speed), codes.shape[1]))
    np.add.at(sums, at, codes)
    counts, ops = np.bincount(at, minlength=len(speed)), model.head(sums)
    # A shard's code does not always subtract to 0 exactly, and an empty op costs nothing.
    without = np.where(counts[at] > 1, model.head(sums[at] - codes), 0.0)
    typical = sums[counts > 0].mean(0, keepdims=True)
    adds = model.head(typical + codes) - model.head(typical)
    some = np.linspace(0, len(held) - 1, min(_PROBES, len(held))).astype(int)
    added = model.head((sums[:, None] + codes[some]).reshape(-1, codes.shape[1])).reshape(len(speed), -1)
    # A device without the op pays for a launch, too, which alone_ms has.
    pace = np.where(counts > 0, (added - ops[:, None]).sum(1) / max(adds[some].sum(), 1e-12), 1.0)
    return pace, (ops[at] - without) / speed[at], adds, model.head(codes)


def _drawn(known: WhatIf, problem: Problem, rng: np.random.Generator) -> list[Move]:
    """Different moves. Every other one leaves the device that is ready last."""
    last = int(np.argmax(known.compute_ms + known.backward_ms))
    free = [i for i, x in enumerate(known.shards) if not x.stays]
    own, moves = [i for i in free if known.shards[i].device == last], {}
    for k in range(_FITTED + _CHECKED) if free else ():
        i = int(rng.choice(own if own and k % 2 else free))
        if targets := known.targets(i, problem):
            moves[i, int(rng.choice(targets))] = None
    return list(moves)


def _fitted(
    known: WhatIf,
    moves: Sequence[Move],
    work: Workload,
    problem: Problem,
    model: CostModel,
    runs: Sequence[Layout],
) -> WhatIf:
    """The same with a law of exchanges: least squares over moves, as the model prices their bytes."""
    compute, outputs, ids = known.after(moves)
    change = np.zeros((len(work.traffic), *compute.shape))
    for k, (i, device) in enumerate(moves):
        x, run = known.shards[i], runs[known.shards[i].run]
        entering = dict(zip(CHANNELS, entering_bytes(run, (x.placement.shard,), problem), strict=True))
        entering |= {run.ids: x.id_bytes} if run.ids else {}
        for channel, n_bytes in entering.items():
            change[row_in(work.lanes[run], channel), k, [x.device, device]] += [-n_bytes, n_bytes]
    traffic = np.maximum(work.traffic[:, None] + shared_on_units(change, problem), 0.0)
    comm = model.comm(traffic, compute, problem.topology)
    # The ids of all devices take as long as those of the slowest.
    input_ms = np.broadcast_to(exposed_input_ms(comm, problem.job)[:, None], compute.shape)
    of_outputs = known.changes(compute, outputs, known.output_bytes)
    return replace(
        known,
        forward=_least_squares(of_outputs, comm.forward_ms - known.forward_ms),
        backward=_least_squares(of_outputs, comm.backward_ms - known.backward_ms),
        ids=_least_squares(known.changes(compute, ids, known.id_bytes), input_ms - known.input_ms),
    )


def _least_squares(changes: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """[Q] ms for each term. Terms that never change count 0."""
    terms = changes.reshape(-1, changes.shape[-1])
    scale = terms.std(0)
    # Sums of bytes that stay change by rounding only.
    varies, law = scale > 1e-9, np.zeros(len(scale))
    law[varies] = np.linalg.lstsq(terms[:, varies] / scale[varies], ms.ravel())[0] / scale[varies]
    return law


def _checked(
    known: WhatIf, moves: Sequence[Move], priced: PricedPlan, problem: Problem, model: CostModel
) -> Check:
    # To price plans of thousands of tables takes seconds each.
    moves, exact = moves[: _CHECKED if len(priced.plan.placements) < 1000 else _CHECKED // 3], []
    for move in moves:
        plan = known.moved(*move, priced.plan)
        exact.append(total_ms(lower(plan, problem, fits=False), model))
    off, change = abs(known.totals_ms(moves) - exact), abs(np.array(exact) - priced.cost.total_ms)
    return Check(len(moves), float(np.median(off)), float(off.max()), float(np.median(change)))
