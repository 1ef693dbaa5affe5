"""A mixed-integer program on an additive surrogate, solved by HiGHS (Huangfu and Hall 2018;
scipy.optimize.milp).

Bundles b go to devices d, and their bytes have to fit. Minimise the largest load of a device:

    load_d = sum over its bundles of (ms_b / speed_d + columns_b × exchange_ms_per_column)

The fused cost is not additive. So ms_b is one of two surrogates, tried in turn:

- alone: the cost of the bundle alone, times what fusion saves on a mean device.
- share: its share in a mean device's op, the derivative of the fused cost if all devices hold the same.
  SurCo (Ferber et al., ICML 2023) learns such a linear surrogate.

Shards are whole tables. A second set halves columns of all that cost more than a device's mean load,
as NeuroShard cuts.

Each program starts from a greedy plan, which bounds it from above.
That plan stays if HiGHS finds nothing cheaper within its limits.
If no greedy plan fits, `packing` gives the start.
The cheapest of all plans and starts stays, under the model.

Equal devices are told apart by order, to avoid equivalent solutions.
The costliest bundle may only go to the first of them, the next to the first two, and so on.

Above GROUP devices, the bundles of the greedy plan are dealt to groups of busy and idle devices.
Each group has a program of its own. A single one spends long at its root:
a second for 16 devices and 200 tables, a minute for 64 and 800.

Shapes: B bundles, D devices, X pairs of them, one for each binary variable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from bench.peers.room import Room
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, Plan, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search.budget import Budget
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.search.state.shards import cheapest_plan, priced_plan
from shardcore.step.memory import plan_fits
from shardcore.step.ways import (
    ShardBundle,
    allowed_devices_of_shard,
    bundle_shards,
    cut_into_equal_parts,
    placements_of_bundles,
)
from shardcore.torchrec.baseline import exchange_ms_per_column

GROUP = 8
"""The most devices of a program."""
SURROGATES = ("share", "alone")
"""Ways to give a bundle a cost of its own."""
_LARGEST = 0.002
"""Loads are scaled to this maximum.

HiGHS repairs solutions that break its absolute tolerance of 1e-6, and prints that it does.
"""


@dataclass(frozen=True)
class MilpConfig:
    """The surrogates to try, and the limits of a program.

    surrogates: of SURROGATES.
    shares: shards that cost more than this share of a device's mean load are halved.
    nodes: the most of a branch and bound, without a budget in seconds.
    gap: relative gap at which it ends.
    """

    surrogates: tuple[str, ...] = SURROGATES
    shares: tuple[float, ...] = (float("inf"), 1.0)
    nodes: int = 100
    gap: float = 0.001

    def __post_init__(self) -> None:
        if (
            not self.surrogates
            or not set(self.surrogates) <= set(SURROGATES)
            or not self.shares
            or min(self.shares) <= 0
        ):
            raise ShardCoreError(f"{self} needs surrogates out of {', '.join(SURROGATES)} and shares above 0")
        if self.nodes < 1 or self.gap < 0:
            raise ShardCoreError(f"{self} needs 1 or more nodes and a gap of 0 or more")


@dataclass
class _Limits:
    """Seconds and integer programs that are left.

    programs: how many there are.
    nodes: for each.
    end: monotonic time at which all end. None: nodes limit them.
    """

    programs: int
    nodes: int
    end: float | None

    def next_options(self, gap: float) -> dict[str, float]:
        """Options of the solver HiGHS for the next program, within the remaining limits."""
        self.programs -= 1
        if self.end is None:
            return {"mip_rel_gap": gap, "node_limit": self.nodes}
        # Divide the remaining time evenly over the remaining programs.
        return {
            "mip_rel_gap": gap,
            "time_limit": max(0.0, (self.end - time.monotonic()) / (self.programs + 1)),
        }


def milp(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: MilpConfig = MilpConfig(),
) -> Plan:
    """Cheapest plan over all mixed-integer programs. The seed is only recorded.

    Deterministic, unless the budget is in seconds.
    One evaluation is one node of a branch and bound, at least one for each program.

    Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    problem.require_setting(model.setting)
    meter = (budget or Budget()).start()
    n_devices, per_column_ms = len(problem.topology), exchange_ms_per_column(problem, model)
    shards, given = feasible_shards(problem), {"algorithm": "milp", "seed": seed}
    plans = [] if shards else [priced_plan((), problem, model, **given, packed=False)]
    # Each cut once.
    cuts = {
        tuple(_split_costly_shards(shards, share, problem, model)): share for share in reversed(config.shares)
    }
    programs = len(config.surrogates) * len(cuts) * -(-n_devices // GROUP)
    limits = _Limits(
        programs,
        max(1, meter.budget.evals // programs) if meter.budget.evals else config.nodes,
        None if meter.budget.seconds is None else meter.started_s + meter.budget.seconds,
    )
    for surrogate in config.surrogates if shards else ():
        for cut, share in reversed(cuts.items()):
            if plans and not meter.has_budget_left():
                break
            program = _Program(problem, model, cut, surrogate, per_column_ms)
            devices = program.greedy_devices()
            if devices is None:
                continue
            # Both plans are kept: the surrogate may prefer the one that the model does not.
            start = devices
            for group in _device_groups(program.load, devices):
                devices, nodes = program.improve(devices, group, limits.next_options(config.gap))
                meter.evals += nodes
            plans += [
                priced_plan(
                    placements_of_bundles(program.bundles, d, problem),
                    problem,
                    model,
                    **given,
                    packed=False,
                    surrogate=surrogate,
                    share=share if share < np.inf else None,
                )
                for d in (start, devices)
            ]
    if not any(plan_fits(plan, problem) for plan in plans):
        plans = [priced_plan(find_fitting_plan(problem).placements, problem, model, **given, packed=True)]
    best = cheapest_plan(plans, problem)
    shares = [s if s < np.inf else None for s in config.shares]
    return replace(
        best,
        provenance={**best.provenance, "evals": meter.evals, "config": asdict(config) | {"shares": shares}},
    )


def _split_costly_shards(
    shards: Sequence[Shard], fraction: float, problem: Problem, model: CostModel
) -> list[Shard]:
    """Shards, with costly whole-row shards halved by columns until each costs at most a limit.

    The limit is a share of a device's mean load. A shard counts at its cost alone.
    """
    total_speed = sum(d.speed for d in problem.topology.devices)
    limit = fraction * float(model.op_ms(model.encode(shards)).sum()) / total_speed
    done, waiting = [], list(shards)
    while waiting:
        costs = model.op_ms(model.encode(waiting))
        halves = [
            cut_into_equal_parts(s, 2, MIN_WIDTH)
            if c > limit
            and s.has_all_rows
            and s.width > MIN_WIDTH
            and s.table.name not in problem.uncut_tables
            else None
            for s, c in zip(waiting, costs, strict=True)
        ]
        done += [s for s, h in zip(waiting, halves, strict=True) if h is None]
        waiting = [half for h in halves if h for half in h]
    return done


class _Program:
    """Mixed-integer program: assigns bundles of shards, each with its load, to devices.

    bundles: [B] to place.
    load: [B, D] ms of each bundle on each device.
    bytes: [B] memory.
    may: [B, D] where a bundle may live.
    free: [D] bytes.
    """

    def __init__(
        self,
        problem: Problem,
        model: CostModel,
        shards: Sequence[Shard],
        surrogate: str,
        per_column_ms: float,
    ) -> None:
        self.problem, self.bundles = problem, bundle_shards(shards, problem)
        room = Room(problem)
        self.free, self.bytes = room.left, np.array(list(map(room.bytes_of, self.bundles)), dtype=np.int64)
        speed = np.array([d.speed for d in problem.topology.devices])
        compute_ms = _surrogate_ms(self.bundles, model, surrogate, len(speed))
        columns = np.array([sum(shard.width for shard in bundle) for bundle in self.bundles])
        self.load = np.maximum(compute_ms, 0)[:, None] / speed + (columns * per_column_ms)[:, None]
        self.may = np.zeros(self.load.shape, dtype=bool)
        for i, bundle in enumerate(self.bundles):
            self.may[i, list(allowed_devices_of_shard(bundle[0], problem))] = True

    def greedy_devices(self) -> np.ndarray | None:
        """Device [B] of each bundle in a greedy plan. None if a bundle fits no device.

        Bundles go by falling load, each to the device that is then done first.
        """
        room, busy = Room(self.problem), np.zeros(len(self.free))
        devices = np.zeros(len(self.bundles), dtype=int)
        for i in np.lexsort(
            (
                -self.load.min(1),
                [len(allowed_devices_of_shard(bundle[0], self.problem)) for bundle in self.bundles],
            )
        ):
            fits = room.fitting_devices(self.bundles[i])
            if not fits.any():
                return None
            d = devices[i] = int(np.argmin(np.where(fits, busy + self.load[i], np.inf)))
            busy[d] += self.load[i, d]
            room.place_bundle(self.bundles[i], d)
        return devices

    def improve(
        self, devices: np.ndarray, group: np.ndarray, options: dict[str, float]
    ) -> tuple[np.ndarray, int]:
        """Reassign the bundles of one device group by HiGHS if cheaper. Returns devices [B] and solver nodes.

        Also returns the number of nodes.
        """
        mine = np.flatnonzero(np.isin(devices, group))
        if len(group) == 1 or len(mine) < 2 or options.get("time_limit") == 0:
            return devices, 0
        load, may = self.load[np.ix_(mine, group)], self.may[np.ix_(mine, group)]
        before = np.bincount(devices[mine], self.load[mine, devices[mine]], len(self.free))[group].max()
        if before <= 0:
            return devices, 0
        found, nodes = _solve_assignment(load, may, self.bytes[mine], self.free[group], before, options)
        if found is None:
            return devices, nodes
        result = devices.copy()
        result[mine] = group[found]
        # HiGHS's objective has a tolerance, so compare the real loads.
        after = np.bincount(found, load[np.arange(len(mine)), found], len(group)).max()
        return (result if after < before and self._fits_memory(result) else devices), nodes

    def _fits_memory(self, devices: np.ndarray) -> bool:
        """Tell if bundles fit device memory exactly, as HiGHS keeps constraints only to a tolerance."""
        room = Room(self.problem)
        for i, d in enumerate(devices):
            room.place_bundle(self.bundles[i], int(d))
        return bool((room.left >= np.minimum(self.free, 0)).all())


def _surrogate_ms(
    chosen: Sequence[ShardBundle], model: CostModel, surrogate: str, n_devices: int
) -> np.ndarray:
    """Surrogate ms [B] of bundles at speed 1, additive over the bundles of a device.

    Row ranges count as if they ran in one op with the rest.
    """
    codes = np.array([model.encode(bundle).sum(0) for bundle in chosen])
    mean = codes.sum(0) / n_devices
    if surrogate == "share":
        # A central difference around the mean load, small enough that no load is negative.
        step = 0.5 / n_devices  # no device holds less than nothing
        return (model.op_ms(mean + step * codes) - model.op_ms(mean - step * codes)) / (2 * step)
    alone = np.asarray(model.op_ms(codes))
    return alone * (float(model.op_ms(mean[None])[0]) * n_devices / alone.sum() if alone.sum() > 0 else 1.0)


def _device_groups(load: np.ndarray, devices: np.ndarray) -> list[np.ndarray]:
    """Divide devices into groups of at most GROUP, each with busy and idle devices."""
    busy = np.bincount(devices, load[np.arange(len(devices)), devices], load.shape[1])
    order, n = np.argsort(-busy, kind="stable"), -(-load.shape[1] // GROUP)
    return [np.sort(order[g::n]) for g in range(n)]


def _solve_assignment(
    load: np.ndarray,
    may: np.ndarray,
    needs: np.ndarray,
    free: np.ndarray,
    at_most: float,
    options: dict[str, float],
) -> tuple[np.ndarray | None, int]:
    """Solve a min-max assignment: device [B] of each bundle, and the number of branch-and-bound nodes.

    None if HiGHS finds no solution in time.
    """
    from scipy import optimize, sparse

    # Bytes are scaled to 1: large numbers would make the program ill-conditioned.
    scale = 1 / max(1, free.max())
    load = load * (_LARGEST / at_most)
    allowed = may & (needs[:, None] <= free) & ~_pairs_redundant_by_symmetry(load, may, free)
    # One binary variable for each allowed pair; the last variable is the largest load.
    i, d = np.nonzero(allowed)
    (n_bundles, n_devices), n = load.shape, len(i)
    if len(np.unique(i)) < n_bundles:
        return None, 0
    # Each bundle goes to exactly one device.
    each = sparse.csr_array((np.ones(n), (i, np.arange(n))), shape=(n_bundles, n + 1))
    # The load of each device is at most the last variable.
    makespan = sparse.csr_array(
        (
            np.append(load[i, d], -np.ones(n_devices)),
            (np.append(d, np.arange(n_devices)), np.append(np.arange(n), np.full(n_devices, n))),
        )
    )
    memory = sparse.csr_array((needs[i] * scale, (d, np.arange(n))), shape=(n_devices, n + 1))
    # Leave out devices that could hold everything: fewer constraints.
    scarce = np.flatnonzero(needs @ allowed > free)
    result = optimize.milp(
        np.append(np.zeros(n), 1.0),
        integrality=np.append(np.ones(n), 0),
        bounds=optimize.Bounds(np.append(np.zeros(n), load.min(1).max()), np.append(np.ones(n), _LARGEST)),
        options=options,
        constraints=[
            optimize.LinearConstraint(each, 1, 1),
            optimize.LinearConstraint(makespan, -np.inf, 0),
            optimize.LinearConstraint(memory[scarce], -np.inf, np.maximum(free, 0)[scarce] * scale),
        ],
    )
    nodes = int(getattr(result, "mip_node_count", None) or 1)
    if result.x is None:
        return None, nodes
    chosen = np.zeros((n_bundles, n_devices))
    chosen[i, d] = result.x[:n]
    return chosen.argmax(1), nodes


def _pairs_redundant_by_symmetry(load: np.ndarray, may: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Mask [B, D] of bundle-device pairs redundant by symmetry of equal devices.

    Of equal devices, the first takes the costliest of its bundles earliest, and so on.
    """
    skip = np.zeros(load.shape, dtype=bool)
    rank = np.empty(len(load), dtype=int)
    rank[np.argsort(-load.min(1), kind="stable")] = np.arange(len(load))
    place: dict[bytes, int] = {}
    for d in range(load.shape[1]):
        key = load[:, d].tobytes() + may[:, d].tobytes() + free[d].tobytes()
        place[key] = place.get(key, -1) + 1
        skip[:, d] = rank < place[key]
    return skip
