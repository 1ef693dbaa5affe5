"""A lower bound on the cost of the plans of a space, where the model allows a proof, and an estimate.

A step takes max over devices of (compute + backward exchange), plus the longest exchanges forward and of ids.
Each way to cut a table adds work to devices and bytes to exchanges. Each shard needs all ids of its rows.
Both add up over tables. So no plan is cheaper than the least work of all tables divided by the devices'
speeds, with exchanges of evenly divided bytes. These count by a line that is nowhere above the law: a tangent
of a convex one, a chord of a concave one. Groups within units count by their worst division. The cheapest way
to cut a table is a shortest path over widths.

Nor is a plan cheaper than its most expensive shard. So the bound is the least time T in which the work fits
when no shard takes longer than T.

The proof counts a shard at its cost alone, less the launch that fusing saves (model.BoundableCostModel). For
plans of one kind it counts more: the rate of an op with the mean load. Some device has at least that.
Contention in mixes of kinds, and shards that fit only alone, raise it further (packing.py).

The estimate prices all tables as one op, divided evenly over the devices. It is higher where shards contend.
It is no bound: a device may hold tables that contend less than the mean.

Plans in which groups share halves of tables (search/state/halves.py) are outside of the space, and may cost less.

Memory is ignored. So are constraints, except those that keep tables whole, together or on some devices.

Shapes: T tables, N shards, F features, D devices; K kinds: whole rows, and those that groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search.bound.ops import BoundShards, Ops, shared_layouts
from shardcore.search.bound.packing import least_ms
from shardcore.step.kinds import Layout

_EVENLY = "the work of all tables, divided evenly"
_PRECISION, _NOTHING_MS = 1e-3, 1e-9
"""Relative and absolute precision of a bisection."""
_ROUNDING = 2.0**-23
"""Share by which a cost may be off as encodings are rounded to 24 bits (cost.model.round_encodings)."""

Price = Callable[[list[int], np.ndarray], float]
"""ms of plans of a mix of kinds, using only some shards [N] bool. inf if there are none."""


@dataclass(frozen=True)
class Bound:
    """A bound on the plans of a space.

    proved_ms: no plan costs less. None if nothing is proved.
    estimate_ms: estimated cost of plans that divide all work evenly.
    limit: cause that prevents cheaper plans.
    space: the plans considered, in words.
    """

    proved_ms: float | None
    estimate_ms: float
    limit: str
    space: str


def bound(problem: Problem, model: CostModel, shared: Sequence[Layout] | None = None) -> Bound:
    """A bound over plans that cut tables by columns, or let groups of devices share them.

    shared: the kinds of sharing to consider; None for all.

    Raises SettingMismatch for a model of another setting.
    """
    problem.require_setting(model.setting)
    kinds = shared_layouts(problem.topology) if shared is None else shared
    job, topology, lower = problem.job, problem.topology, model.lower
    # Sequences run collectives that the bound does not know. Several collections run several ops on a device.
    pooled = {(t.collection, t.sequence) for t in problem.tables} <= {(problem.tables[0].collection, False)}
    if lower and not (pooled and lower.even_is_least(topology)):
        # Exchanges are priced as evenly divided, which is no bound where that is not the cheapest.
        lower = None
    bounds: list[Bound] = []
    # A step is no shorter than without ids, nor than with them less what the dense part hides.
    for ids in (True, False) if job.hides_ids_ms else (True,):
        # BoundShards prices ids in full, so what the dense part hides comes off.
        more_ms = job.dense_ms - (job.hides_ids_ms if ids else 0.0)
        shards, proved_ms = BoundShards(problem, model, kinds, ids), None
        if lower:
            least = shards if lower is model else BoundShards(problem, lower, kinds, ids)
            ops = [Ops(least, lower, k) for k in range(len(least.kinds))]
            equal_waits = lower.has_equal_transfers(topology)
            by_mix = _by_mix(least, _proved(least, ops, equal_waits), equal_waits)
            packed_ms = least_ms(least, ops, {mix: ms for mix, (ms, _) in by_mix.items()}, equal_waits)
            # Subtract a trace for rounding errors.
            proved_ms = packed_ms * (1 - _ROUNDING) + more_ms
        estimate_ms, limit = min(_by_mix(shards, _estimated(shards), True).values())
        bounds.append(Bound(proved_ms, max(estimate_ms + more_ms, proved_ms or 0.0), limit, shards.space()))
    # Both ways to count ids leave out costs that a plan has, so the higher one counts.
    best = max(bounds, key=lambda x: x.estimate_ms)
    return replace(
        best, proved_ms=max((x.proved_ms for x in bounds if x.proved_ms is not None), default=None)
    )


def _proved(shards: BoundShards, ops: Sequence[Ops], equal_waits: bool) -> Price:
    """A price that no plan undercuts: the least work, divided by all speeds.

    A shared table brings a launch on each device of its group. Columns bring one on at least one device.
    """
    launch_ms, total_speed = ops[0].model.launch_ms, shards.speed.sum()
    # [N] without launches, which fusing may save.
    work = shards.copies * np.maximum(0.0, shards.alone_ms - launch_ms) / total_speed + shards.exchange_ms

    def price(mix: list[int], usable: np.ndarray) -> float:
        shared = sum(int(shards.group_size[k]) for k in mix if k)  # launches on the devices of a group
        launches = (shared + (0 in mix)) / total_speed if shared else 1 / shards.speed.max()
        least, _ = shards.cheapest(np.where(usable, work, np.inf), mix)
        ms = launch_ms * launches + least + shards.latencies_ms(mix)
        # With several kinds a device has several ops, and nothing tells how its load divides over them.
        one_op = len(mix) == 1 and equal_waits
        return max(ms, _at_mean_load(shards, ops[mix[0]], usable)) if one_op else ms

    return price


def _at_mean_load(shards: BoundShards, ops: Ops, usable: np.ndarray) -> float:
    """A higher price for plans of one kind, which run one op on each device.

    Some device has at least the mean load by speed. It takes at least the slowdown of that load.
    """
    curve, kinds, total_speed = ops.every, [int(shards.kind[ops.number[0]])], shards.speed.sum()
    load = np.where(usable, shards.copies * curve.load, np.inf)
    # The least load of all tables together, however each is cut.
    least, _ = shards.cheapest(load, kinds)
    if not np.isfinite(least):
        return np.inf
    # The device of the mean load may be the slowest, which then has the least load of all.
    slowdown = curve.least(least * shards.speed.min() / total_speed)
    least, _ = shards.cheapest(slowdown * load / total_speed + shards.wait_ms, kinds)
    return ops.model.launch_ms / shards.speed.max() + least + shards.latencies_ms(kinds, every=True)


def _estimated(shards: BoundShards) -> Price:
    """An estimate of the price.

    Shared tables count as one op of each kind, the same on all devices.
    Columns count as one op, divided over the devices by speed.
    The cheapest cuts follow from the slope of the head at this point.
    """
    n, total_speed, codes = len(shards.speed), shards.speed.sum(), shards.codes
    shares = (shards.speed / total_speed)[:, None]  # [D, 1]

    def price(mix: list[int], usable: np.ndarray) -> float:
        sums, estimates = codes[shards.whole].sum(0), []  # start from uncut tables
        # The slope depends on the cuts, so refine once.
        for _ in range(2):
            work = shards.copies * (codes @ _slope(shards.model, sums / n)) / total_speed + shards.exchange_ms
            _, counts = shards.cheapest(np.where(usable, work, np.inf), mix)
            if counts is None:
                return np.inf
            # [F] summed encodings of all columns, and of what one group has of each kind that groups share.
            columns, *shared = (
                (counts * (shards.kind == k)) @ codes / shards.n_groups[k] ** (k > 0)
                for k in range(len(shards.kinds))
            )
            # All ops of all devices: the columns' on each, and a shared one on each for every kind.
            ms = shards.model.head(np.concatenate([columns * shares, *([e] * n for e in shared)])).sum()
            estimates.append(float(ms / total_speed + counts @ shards.exchange_ms))
            sums = columns + n * sum(shared)
        return min(estimates) + shards.latencies_ms(mix)

    return price


def _by_mix(shards: BoundShards, price: Price, equal_waits: bool) -> dict[tuple[int, ...], tuple[float, str]]:
    """The least ms of each mix of kinds, and the limit that prevents less. Exact for the lowest only.

    No shard may take longer than the result. Each kind in a mix adds its launches and latencies.
    equal_waits: True if the device with any one shard waits for the same exchanges as all others.
    """
    together_ms, together = _together(shards)
    mixes: list[tuple[float, str, list[int], float]] = []
    for mix in shards.mixes:
        # Any plan of the mix waits at least as long as the cuts with the cheapest exchanges do.
        waits_ms = shards.cheapest(shards.wait_ms, mix)[0] + shards.latencies_ms(mix, every=True)
        exchange_ms = max(0.0, waits_ms) if equal_waits else 0.0
        evenly_ms = price(mix, shards.within(np.full(len(shards.kind), True)))
        # Both are bounds, so the higher one counts.
        low, limit = max((evenly_ms, _EVENLY), (together_ms + exchange_ms, together))
        mixes.append((low, limit, mix, exchange_ms))
    by_mix = {tuple(mix): (low, limit) for low, limit, mix, _ in mixes}
    best = np.inf
    # From the lowest on: once a mix starts above the best, all later ones do.
    for low, limit, mix, exchange_ms in sorted(mixes):
        if low >= best:
            break
        # The device with a shard takes at least this long, whatever else it holds.
        shard_ms = shards.alone_ms / shards.fastest + exchange_ms
        above = price(mix, shards.within(shard_ms <= low))
        # Shards that take longer than `low` are impossible at that cost: without them, others cost more.
        if above > low:
            dearest = shards.problem.tables[int(np.argmax(shard_ms[shards.whole]))]
            limit = (
                f"table {dearest.name!r}: whole it is too much for one device, and its parts together "
                "cost more"
            )
            # More shards only lower the price, and all of them give `evenly_ms`: it is no higher there.
            high = min(above, float(shard_ms.max()))
            low = _crossing(lambda ms, m=mix, p=shard_ms: price(m, shards.within(p <= ms)), low, high)
        by_mix[tuple(mix)] = float(low), limit
        best = min(best, float(low))
    return by_mix


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which a falling function has the argument as its value, from below.

    Requires falling(low) > low and falling(high) <= high.
    """
    while high > max(low * (1 + _PRECISION), _NOTHING_MS):
        # A geometric mean, as the precision is relative.
        middle = float(np.sqrt(low * high)) if low > 0 else high / 2
        low, high = (low, middle) if falling(middle) <= middle else (middle, high)
    return low


def _together(shards: BoundShards) -> tuple[float, str]:
    """ms of the most expensive bundle on a device, and its name in words."""
    index, bundles = {t.name: i for i, t in enumerate(shards.problem.tables)}, [(0.0, "")]
    for group in shards.problem.constraints.together:
        chosen = shards.whole[[index[name] for name in group]]
        shown = ", ".join(map(repr, group[:3])) + ", ..." * (len(group) > 3)
        # One op on one device, at best the fastest that any of them may use.
        ms = shards.model.head(shards.codes[chosen].sum(0, keepdims=True))[0] / shards.fastest[chosen].max()
        bundles.append((float(ms), f"tables {shown}, kept together on one device"))
    return max(bundles)


def _slope(model: CostModel, sums: np.ndarray) -> np.ndarray:
    """[F] growth of the head with each feature, in ms, at sums [F]. By finite differences."""
    step = 1e-4 * np.maximum(sums, 1e-9)
    # First the point itself, then one row for each feature that grows.
    heads = model.head(np.concatenate([sums[None], sums + np.diag(step)]))
    return np.maximum(0.0, (heads[1:] - heads[0]) / step)
