"""Explain a plan: its limits, the cost of alternatives, and the gain of more memory or devices.

A step waits for the device that ends its compute and backward exchange last.
Then the longest forward exchange follows. So the last device limits the plan.
The compute that it would save without each of its shards shows which tables do.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from shardcore.core import progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Plan, Problem, Shard
from shardcore.core.validation import MOST_BYTES
from shardcore.cost.model import CostModel, PricedPlan, predicted_total_ms
from shardcore.search import compare
from shardcore.search.bound.lower_bound import LowerBound, prove_lower_bound
from shardcore.search.budget import Budget
from shardcore.search.decisions.towers import step_ms_without_towers
from shardcore.search.doubts import Doubt, plan_doubts
from shardcore.search.sharders import BASELINES, SHARDERS, SPACE_OF
from shardcore.step.kinds import ID_CHANNELS, sharding_kind_by_name
from shardcore.step.lower import Workload, lower
from shardcore.step.memory import DeviceMemory, memory_by_part, usable_bytes

MORE_MEMORY = (0.1, 0.5)
"""Shares by which the memory of each device grows in alternatives."""
MOST_TIMES_DEVICES = 4
"""The largest factor by which devices are added."""
DEFAULT_EVALS = 20_000
"""Evaluations of each alternative, where the plan does not tell how many its own search took."""
_MOST_CUTS = 64
"""Cut tables that are priced whole, at most."""
FALLBACK = "anneal"
"""Algorithm of alternatives where SHARDERS lacks the plan's own."""


@dataclass(frozen=True)
class ShardCost:
    """Cost of one shard on the device that limits the step.

    kind: kind of sharding, and the collection if it has a name.
    saves_ms: compute of the device that would go without it.
    """

    shard: str
    kind: str
    saves_ms: float
    bytes: int


@dataclass(frozen=True)
class Alternative:
    """The problem's cost with another algorithm, or with other devices.

    what: the alternative in words.
    total_ms: None if there is no plan.
    error: the reason for that.
    """

    what: str
    total_ms: float | None
    error: str | None = None


@dataclass(frozen=True)
class Explanation:
    """An explanation as plain data. Tuples of numbers have one entry a device.

    device: the device that is ready last.
    limit: "compute", "exchange" or "fetching" (cost.model.fetch_wait_ms), whichever takes most of the step
        there.
    shards: shards on that device, by falling saves_ms.
    widest: the device that sends most.
    exchange_bytes: bytes of each device, in all collectives of outputs and gradients.
    input_bytes: bytes of ids and lengths that each device receives.
    memory_bytes: bytes that each device needs.
    free_bytes: bytes that each device may hold: all but the reserve.
    fullest: the device of which the plan takes the largest share.
    memory: bytes that this device needs, by part.
    reserved_bytes: bytes kept free on every device.
    balance: mean over largest compute.
    bound: lower bound on the cost of plans. None: the model proves none.
    searched: search of the alternatives, in words.
    cuts_ms: for each table in parts, ms that the step takes more if all of it is where its widest part is.
    without_towers_ms: ms of the step if the job had no towers. None: it has none.
    doubts: measurements that could change the plan, under a hardware profile.
    """

    algorithm: str
    total_ms: float
    device: int
    limit: str
    cost: PredictedCost
    shards: tuple[ShardCost, ...]
    widest: int
    exchange_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    free_bytes: tuple[int, ...]
    fullest: int
    memory: DeviceMemory
    reserved_bytes: int
    balance: float
    bound: LowerBound | None
    baselines: tuple[Alternative, ...]
    changes: tuple[Alternative, ...]
    searched: str
    cuts_ms: Mapping[str, float]
    without_towers_ms: float | None = None
    doubts: tuple[Doubt, ...] = ()


def explain(
    priced: PricedPlan,
    problem: Problem,
    model: CostModel,
    budget: Budget | None = None,
    known: Mapping[str, compare.SharderOutcome] | None = None,
) -> Explanation:
    """Explain the limits of a plan, its distance to a lower bound, and the cost of alternatives.

    Alternatives are searched with the plan's own algorithm and seed. If SHARDERS lacks it, FALLBACK searches,
    and its plan of the unchanged problem is an alternative, too. TorchRec's planner is not run: it takes minutes
    on large problems.

    budget: budget of each search. None: as many evaluations as the plan's algorithm took, or 20,000.
    known: outcomes of other algorithms. If given, no baseline is run.
    """
    plan, workload, cost = priced.plan, priced.workload, priced.cost
    algorithm, seed = str(plan.provenance.get("algorithm", "")), int(plan.provenance.get("seed", 0))
    searcher = algorithm if algorithm in SHARDERS else FALLBACK
    # As much effort as the plan had, so that a difference is the alternative's.
    budget = (budget or Budget()).with_default_end(
        (plan.provenance.get("evals") if searcher == algorithm else None) or DEFAULT_EVALS, None
    )

    def search_alternative(
        what: str, problem: Problem, algorithm: str = searcher, kept_ms: float | None = None
    ) -> Alternative:
        """Search an alternative problem, or with another algorithm. kept_ms: cost of the present plan, if it is
        possible there.
        """
        try:
            with progress.prefixed_phases(what):
                plan = SHARDERS[algorithm](problem, model, seed=seed, budget=budget)
            ms, error = plan.provenance["predicted_ms"], None
        # An alternative without a plan is an answer, also where a constraint means nothing on so many devices.
        except ShardCoreError as refused:
            ms, error = None, str(refused)
        return Alternative(what, min((x for x in (ms, kept_ms) if x is not None), default=None), error)

    if known is None:
        baselines = [
            search_alternative(name, problem, name)
            for name in (*BASELINES, "neuroshard", *SPACE_OF)
            if name not in (algorithm, searcher)
        ]
    else:
        baselines = [
            Alternative(name, x.cost.total_ms if x.cost else None, x.error)
            for name, x in known.items()
            if name != algorithm
        ]
    # Also of the unchanged problem: else the gain of another search would look like that of more memory.
    again = "searched again, same memory" if searcher == algorithm else searcher
    if again not in (known or ()):
        baselines.append(search_alternative(again, problem))
    # Plans still fit with more memory, so a search that ends dearer does not count.
    changes, kept_ms = [], cost.total_ms
    for what, changed in _with_more_memory(problem):
        changes.append(search_alternative(what, changed, kept_ms=kept_ms))
        kept_ms = changes[-1].total_ms
    changes += [search_alternative(what, changed) for what, changed in _with_more_devices(problem)]
    # The forward exchange begins when the last device is ready.
    # Where caches fetch ahead, a device may be ready last because of that.
    ready_ms = np.array(cost.compute_ms) + cost.backward_comm_ms
    device = int(np.argmax(cost.device_ms if any(cost.fetch_wait_ms) else ready_ms))
    # The rest of the step counts as exchange, on the device that ends last.
    parts = {
        "compute": cost.compute_ms[device],
        "exchange": cost.total_ms - cost.compute_ms[device] - cost.fetch_wait_ms[device],
        "fetching": cost.fetch_wait_ms[device],
    }
    # Bytes of ids, and of all other channels, [D].
    ids = workload.traffic[[c in ID_CHANNELS for c in workload.channels]].sum(0)
    sent = workload.traffic.sum(0) - ids
    may_hold = np.array(usable_bytes(problem))
    # A device may have nothing that is not reserved.
    fullest = int(np.argmax(np.where(may_hold > 0, workload.memory_bytes / np.maximum(may_hold, 1), 0.0)))
    limits = [
        *([f"{budget.evals:,} evaluations"] if budget.evals else []),
        *([f"{budget.seconds:g} s"] if budget.seconds else []),
    ]
    # The plan with all of a table where its widest part is, for each table in parts.
    uncut = {
        name: (
            *(p for p in plan.placements if p.shard.table.name != name),
            replace(max(parts, key=lambda p: p.shard.width), shard=Shard.whole(parts[0].shard.table)),
        )
        for name, parts in plan.placements_by_table().items()
        if len(parts) > 1
        and problem.can_run_table(sharding_kind_by_name(parts[0].kind), parts[0].shard.table)
    }
    return Explanation(
        algorithm=algorithm,
        total_ms=cost.total_ms,
        device=device,
        limit=max(parts, key=parts.__getitem__),
        cost=cost,
        shards=_shard_costs(workload, device, model),
        widest=int(np.argmax(sent)),
        exchange_bytes=tuple(map(int, sent)),
        input_bytes=tuple(map(int, ids)),
        memory_bytes=workload.memory_bytes,
        free_bytes=tuple(map(int, may_hold)),
        fullest=fullest,
        memory=memory_by_part(plan, problem)[fullest],
        reserved_bytes=problem.constraints.reserved_bytes,
        balance=compare.compute_balance(cost),
        bound=prove_lower_bound(problem, model),
        baselines=tuple(baselines),
        changes=tuple(changes),
        # Memory does not count.
        cuts_ms={
            name: predicted_total_ms(lower(Plan(whole), problem, fits=False), model) - cost.total_ms
            for name, whole in islice(uncut.items(), _MOST_CUTS)
        },
        searched=f"{searcher}, seed {seed}, {' or '.join(limits) or 'no limit'} each",
        without_towers_ms=step_ms_without_towers(plan, problem, model),
        doubts=plan_doubts(
            priced, problem, model, lambda p, m: SHARDERS[searcher](p, m, seed=seed, budget=budget)
        ),
    )


def _shard_costs(workload: Workload, device: int, model: CostModel) -> tuple[ShardCost, ...]:
    """Shards of a device, with the compute ms that removing each would save."""
    costs = []
    for op in workload.ops[device]:
        codes = np.asarray(model.encode(op.shards, op.batch), dtype=float)
        sums = codes.sum(0)
        # An op with a single shard disappears with it, launch included.
        without = model.op_ms(sums - codes) if len(codes) > 1 else np.zeros(1)
        saves = (model.op_ms(sums[None])[0] - without) / workload.topology.devices[device].speed
        kind = f"{op.kind}, {op.sharding_kind.collection}" if op.sharding_kind.collection else op.kind
        costs += [
            ShardCost(s.label, kind, float(ms), s.bytes) for s, ms in zip(op.shards, saves, strict=True)
        ]
    return tuple(sorted(costs, key=lambda s: -s.saves_ms))


def _with_more_memory(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems with more memory on each device, with descriptions. The plan stays possible."""
    for share in MORE_MEMORY:
        topology = problem.topology.with_devices(
            # A problem may not state more memory than that.
            replace(d, memory_bytes=min(MOST_BYTES, int(d.memory_bytes * (1 + share))))
            for d in problem.topology.devices
        )
        yield f"{share:.0%} more memory on each device", replace(problem, topology=topology)


def _with_more_devices(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problem with the next larger number of devices, with a description.

    They are like the existing ones, in their order. With one host they join it; otherwise they form further
    hosts like those there are.
    """
    topology, n = problem.topology, len(problem.topology)
    # The global batch has to divide evenly over the devices.
    more = next((m for m in range(n + 1, MOST_TIMES_DEVICES * n + 1) if problem.global_batch % m == 0), None)
    # Towers are those of the hosts that there are.
    if more is None or problem.job.tower_ratio is not None:
        return
    # In their order, so that unequal devices are added in the ratio that there is.
    added = [
        replace(device, host=device.host if len(topology.hosts) == 1 else f"{device.host}-more-{i // n}")
        for i, device in zip(range(more - n), cycle(topology.devices), strict=False)
    ]
    why = "" if more == n + 1 else f" (the next number that divides the batch of {problem.global_batch})"
    larger = replace(problem, topology=topology.with_devices([*topology.devices, *added]))
    yield f"{more - n} more device{'s' * (more > n + 1)}: {more}{why}", larger
