"""Explain a plan: what limits it, what alternatives cost, and what more memory or devices would bring.

A step waits for the device that ends its compute and backward exchange last.
Then the longest forward exchange follows. So the last device limits the plan.
What it would save without each of its shards shows which tables do.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.core.validation import MOST_BYTES
from shardcore.cost.model import CostModel, PricedPlan
from shardcore.search import compare
from shardcore.search.bound.lower_bound import Bound, bound
from shardcore.search.budget import Budget
from shardcore.search.decisions.towers import TowerTraffic, tower_traffic
from shardcore.search.sharders import BASELINES, SHARDERS, SPACE_OF
from shardcore.step.kinds import ID_CHANNELS
from shardcore.step.lower import Workload
from shardcore.step.memory import DeviceMemory, by_part, held_bytes

MORE_MEMORY = (0.1, 0.5)
MOST_TIMES_DEVICES = 4
"""The largest factor by which devices are added."""
DEFAULT_EVALS = 20_000
AGAIN = "searched again, same memory"
OTHERWISE = "anneal"


@dataclass(frozen=True)
class ShardCost:
    """A shard on the limiting device.

    kind: of sharding, and the collection if it has a name.
    saves_ms: by how much less the device computes without it.
    """

    shard: str
    kind: str
    saves_ms: float
    bytes: int


@dataclass(frozen=True)
class Alternative:
    """The problem's cost with another algorithm, or with other devices.

    what: in words.
    total_ms: None if there is no plan.
    error: then, why.
    """

    what: str
    total_ms: float | None
    error: str | None = None


@dataclass(frozen=True)
class Explanation:
    """An explanation as plain data. Tuples of numbers have one entry a device.

    device: the one that is ready last.
    limit: "compute" or "exchange", whichever takes most of the step there.
    shards: on that device, by falling saves_ms.
    widest: the device that sends most.
    exchange_bytes: of each device, in all collectives of outputs and gradients.
    input_bytes: of ids and lengths that each device receives.
    memory_bytes: that each device needs.
    free_bytes: that each device may hold: all but what is reserved.
    fullest: the device of which the plan takes the largest share.
    memory: what that device needs, by part.
    reserved_bytes: kept free on every device.
    balance: mean over largest compute.
    searched: in words, how the alternatives were found.
    towers: what they change in the exchange. None: the job has none.
    """

    algorithm: str
    total_ms: float
    device: int
    limit: str
    cost: StepCost
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
    bound: Bound
    baselines: tuple[Alternative, ...]
    changes: tuple[Alternative, ...]
    searched: str
    towers: TowerTraffic | None = None


def explain(
    priced: PricedPlan,
    problem: Problem,
    model: CostModel,
    budget: Budget | None = None,
    known: Mapping[str, compare.Outcome] | None = None,
) -> Explanation:
    """What limits a plan, how close it is to a bound, and what alternatives cost.

    Alternatives are searched with the plan's own algorithm and seed. If SHARDERS lacks it, OTHERWISE
    searches. What that finds for the problem itself is an alternative, too. TorchRec's planner is none, for
    it takes minutes on large problems.

    budget: of each search. None: as many evaluations as the plan's own algorithm took, or 20,000.
    known: outcomes of other algorithms. If given, no baseline is run.
    """
    plan, workload, cost = priced.plan, priced.workload, priced.cost
    algorithm, seed = str(plan.provenance.get("algorithm", "")), int(plan.provenance.get("seed", 0))
    searcher = algorithm if algorithm in SHARDERS else OTHERWISE
    took = plan.provenance.get("evals") if searcher == algorithm else None
    budget = budget or Budget(evals=took or DEFAULT_EVALS)
    # The forward exchange begins when the last device is ready.
    ready = np.array(cost.compute_ms) + cost.backward_comm_ms
    device = int(np.argmax(ready))
    compute_ms = cost.compute_ms[device]
    # Bytes of ids, and of all other channels, [D].
    ids = workload.traffic[[c in ID_CHANNELS for c in workload.channels]].sum(0)
    sent = workload.traffic.sum(0) - ids
    if known is None:
        others = [n for n in (*BASELINES, "neuroshard", *SPACE_OF) if n not in (algorithm, searcher)]
        baselines = tuple(_searched(name, problem, name, model, seed, budget) for name in others)
    else:
        baselines = tuple(
            Alternative(name, x.cost.total_ms if x.cost else None, x.error)
            for name, x in known.items()
            if name != algorithm
        )
    # Else the gain of another search would look like that of more memory.
    again = AGAIN if searcher == algorithm else searcher
    if again not in (known or ()):
        baselines += (_searched(again, problem, searcher, model, seed, budget),)
    may_hold = tuple(held_bytes(problem))
    # A device may have nothing that is not reserved.
    shares = [
        used / free if free > 0 else 0.0 for used, free in zip(workload.memory_bytes, may_hold, strict=True)
    ]
    fullest = int(np.argmax(shares))
    changes = tuple(
        _searched(what, changed, searcher, model, seed, budget, cost.total_ms if keeps else None)
        for what, changed, keeps in _changes(problem)
    )
    return Explanation(
        algorithm=algorithm,
        total_ms=cost.total_ms,
        device=device,
        limit="compute" if compute_ms >= cost.total_ms - compute_ms else "exchange",
        cost=cost,
        shards=_shards(workload, device, model),
        widest=int(np.argmax(sent)),
        exchange_bytes=tuple(map(int, sent)),
        input_bytes=tuple(map(int, ids)),
        memory_bytes=workload.memory_bytes,
        free_bytes=may_hold,
        fullest=fullest,
        memory=by_part(plan, problem)[fullest],
        reserved_bytes=problem.constraints.reserved_bytes,
        balance=compare.balance(cost),
        bound=bound(problem, model),
        baselines=baselines,
        changes=changes,
        searched=f"{searcher}, seed {seed}, {_words(budget)} each",
        towers=tower_traffic(plan, problem),
    )


def _shards(workload: Workload, device: int, model: CostModel) -> tuple[ShardCost, ...]:
    """The shards of a device, with the compute that leaving each one out would save."""
    found = []
    for op in workload.ops[device]:
        codes = np.asarray(model.encode(op.shards, op.batch), dtype=float)
        sums = codes.sum(0)
        # An op with a single shard disappears with it, launch included.
        without = model.head(sums - codes) if len(codes) > 1 else np.zeros(1)
        saves = (model.head(sums[None])[0] - without) / workload.topology.devices[device].speed
        kind = f"{op.kind}, {op.run.collection}" if op.run.collection else op.kind
        found += [
            ShardCost(s.label, kind, float(ms), s.bytes) for s, ms in zip(op.shards, saves, strict=True)
        ]
    return tuple(sorted(found, key=lambda s: -s.saves_ms))


def _changes(problem: Problem) -> Iterator[tuple[str, Problem, bool]]:
    """Changes to the problem: in words, the changed problem, and whether the plan stays possible."""
    topology = problem.topology
    for share in MORE_MEMORY:
        devices = tuple(
            replace(d, memory_bytes=min(MOST_BYTES, int(d.memory_bytes * (1 + share))))
            for d in topology.devices
        )
        yield (
            f"{share:.0%} more memory on each device",
            replace(problem, topology=replace(topology, devices=devices)),
            True,
        )
    n = len(topology)
    # The global batch has to divide evenly over the devices.
    more = next((m for m in range(n + 1, MOST_TIMES_DEVICES * n + 1) if problem.global_batch % m == 0), None)
    # Towers are those of the hosts that there are.
    if more and problem.job.tower_ratio is None:
        added = more - n
        why = "" if added == 1 else f" (the next number that divides the batch of {problem.global_batch})"
        what = f"{added} more device{'s' * (added > 1)}: {more}{why}"
        yield (
            what,
            replace(
                problem, topology=replace(topology, devices=(*topology.devices, *_like(topology, added)))
            ),
            False,
        )


def _like(topology: Topology, n: int) -> Iterator[Device]:
    """More devices like the existing ones, in their order.

    With one host they join it; otherwise they form further hosts like those there are.
    """
    several, size = len(topology.hosts) > 1, len(topology)
    for i in range(n):
        device = topology.devices[i % size]
        yield replace(device, host=f"{device.host}-more-{i // size}") if several else device


def _searched(
    what: str,
    problem: Problem,
    algorithm: str,
    model: CostModel,
    seed: int,
    budget: Budget,
    kept_ms: float | None = None,
) -> Alternative:
    """The cost of a problem under an algorithm. kept_ms: cost of the present plan there, if possible."""
    try:
        ms, error = (
            SHARDERS[algorithm](problem, model, seed=seed, budget=budget).provenance["predicted_ms"],
            None,
        )
    # That an alternative has no plan is an answer, not an error.
    except ShardCoreError as refused:  # also where a constraint means nothing on so many devices
        ms, error = None, str(refused)
    return Alternative(what, min((x for x in (ms, kept_ms) if x is not None), default=None), error)


def _words(budget: Budget) -> str:
    """A budget in words."""
    limits = [f"{budget.evals:,} evaluations"] if budget.evals else []
    limits += [f"{budget.seconds:g} s"] if budget.seconds else []
    return " or ".join(limits) or "no limit"
