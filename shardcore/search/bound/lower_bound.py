"""A lower bound on the cost of the plans of a space, where the model allows a proof, and an estimate.

A step takes max over devices of (compute + backward exchange), plus the longest exchanges forward and of ids.
Each way to cut a table adds work to devices and bytes to exchanges. Each shard needs all ids of its rows.
Both add up over tables. So no plan is cheaper than the least work of all tables divided by the devices'
speeds, with exchanges of evenly divided bytes. These count by a line that is nowhere above the law: a tangent
of a convex one, a chord of a concave one. Groups within units count by their worst division.

The proof is a linear program over options (program.py). It holds for sequences, several collections and too little
memory, too. Where an even division may not be the cheapest one, it is without exchanges and ids.

The estimate prices all tables as one op, divided evenly over the devices. It is higher where shards contend. The
cheapest way to cut a table is a shortest path over widths. No plan is cheaper than its most expensive shard, so the
estimate is the least time T in which the work fits when no shard takes longer than T.
It is no bound: a device may hold tables that contend less than the mean.

Plans in which groups share halves of tables (search/state/halves.py) are outside of the space, and may cost less.

Constraints count that keep tables whole, together or on some devices, or that name kinds. The estimate ignores memory.

Shapes: T tables, N shards, F features, D devices; K kinds: whole rows, and those that groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search.bound.ops import BoundShards, shared_layouts
from shardcore.search.bound.program import Program
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
    job, proved_ms = problem.job, None
    of_ids = [
        BoundShards(problem, model, kinds, ids) for ids in ((True, False) if job.hides_ids_ms else (True,))
    ]
    # A step is no shorter than without ids, nor than with them less what the dense part hides.
    estimates = [
        (ms + job.dense_ms - job.hides_ids_ms * bool(shards.ids_ms), limit)
        for shards in of_ids
        for ms, limit in [_least_of_mixes(shards, _estimated(shards))]
    ]
    estimate_ms, limit = max(estimates)
    if lower := model.lower:
        shards = of_ids[0] if lower is model else BoundShards(problem, lower, kinds, True)
        found_ms = Program(shards, lower, kinds).least_ms(max(estimate_ms - job.dense_ms, _NOTHING_MS))
        # Bundles of several collections have several ops, which may cost less than one.
        if len({(t.collection, t.sequence) for t in problem.tables}) == 1:
            found_ms = max(found_ms, _together(shards)[0])
        # Subtract a trace for rounding errors.
        proved_ms = found_ms * (1 - _ROUNDING) + job.dense_ms
    return Bound(proved_ms, max(estimate_ms, proved_ms or 0.0), limit, of_ids[0].space())


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


def _least_of_mixes(shards: BoundShards, price: Price) -> tuple[float, str]:
    """The least ms of all mixes of kinds, and the limit that prevents less.

    No shard may take longer than the result. Each kind in a mix adds its launches and latencies.
    """
    together_ms, together = _together(shards)
    mixes: list[tuple[float, str, list[int], float]] = []
    for mix in shards.mixes:
        # Any plan of the mix waits at least as long as the cuts with the cheapest exchanges do.
        exchange_ms = max(0.0, shards.cheapest(shards.wait_ms, mix)[0] + shards.latencies_ms(mix, every=True))
        evenly_ms = price(mix, shards.within(np.full(len(shards.kind), True)))
        low, limit = max((evenly_ms, _EVENLY), (together_ms + exchange_ms, together))
        mixes.append((low, limit, mix, exchange_ms))
    best = np.inf, ""
    # From the lowest on: once a mix starts above the best, all later ones do.
    for low, limit, mix, exchange_ms in sorted(mixes):
        if low >= best[0]:
            break
        # The device with a shard takes at least this long, whatever else it holds.
        shard_ms = shards.alone_ms / shards.fastest + exchange_ms
        above = price(mix, shards.within(shard_ms <= low))
        # Shards that take longer than `low` are impossible at that cost: without them, others cost more.
        if above > low:
            dearest = shards.problem.tables[int(np.argmax(shard_ms[shards.whole]))]
            limit = (
                f"table {dearest.name!r}: whole on a device it alone takes longer than an even share of all, "
                "and its parts together cost more"
            )
            # More shards only lower the price, and all of them give `evenly_ms`: it is no higher there.
            high = min(above, float(shard_ms.max()))
            low = _crossing(lambda ms, m=mix, p=shard_ms: price(m, shards.within(p <= ms)), low, high)
        best = min(best, (float(low), limit))
    return best


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
