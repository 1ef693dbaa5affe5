"""A lower bound on the cost of the plans of a space, where the model allows a proof.

A step takes max over devices of (compute + backward exchange), plus the longest exchanges forward and of ids.
Each way to cut a table adds work to devices and bytes to exchanges. Each shard needs all ids of its rows.
Both add up over tables. So no plan is cheaper than the least work of all tables divided by the devices'
speeds, with exchanges of evenly divided bytes. These count by a line that is nowhere above the law: a tangent
of a convex one, a chord of a concave one. Groups within domains count by their worst division.

The proof is a linear program over options. It holds for sequences, several collections and too little memory, too.
Where an even division may not be the cheapest one, it is without exchanges and ids.

Plans in which groups share parts of tables (search/state/column_parts.py) are outside of the space, and may cost less.

Constraints count that keep tables whole, together or on some devices, or that name kinds.

In the program tables may be mixtures of all ways to run them. An option is a shard at a site: a class of equal
devices, or of equal groups that share the shard. A run is a kind of a collection. Counts of options are whole in a
plan and fractions in the program, so its least ms are a bound. All its constraints hold for plans that take at most
`top` ms:

- The parts of a bundle, a table or several kept together, sum to 1.
- A run is there if any part of a bundle is. The program has at least that fraction of it, and so of its latencies and
  of launches of runs that are on all devices.
- Compute of a class of devices is at least rates times features. By load it is convex (contention.SlowdownCurve), so
lines
  below it hold for the sum over devices. A launch serves no more than fits until `top`, so launches count in
  proportion.
- A step takes at least the mean over devices, by speed, of compute and even exchanges (options.Exchanges). Ids add to
  it what the dense part does not hide.
- Beside the least of the other parts of a step, a device has time for so much compute, and for so many bytes of
  outputs and of ids. So larger shards are left out. Of other large ones only few fit on a device: functions f are
  "dual feasible" if sums of f(x) are at most 1 wherever sums of x are (Lueker 1983). The same holds for memory, of
  which only bytes count that are there at all times.

So the lesser of `top` and the program's least ms is a bound. Bisection finds the best `top`.

Any prices of constraints, 0 or more, prove a bound if variables have upper limits (weak duality). The solver's prices
are used like that. So its tolerances may lower the bound, but never raise it.

Shapes: N options, I bundles, R runs, C classes of devices, D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcore.core.types import Problem, Table
from shardcore.cost.model import CostModel, with_predicted_dense_ms
from shardcore.search.bound.contention import SlowdownCurve, first_shard_of_each_bundle, op_slowdown_curve
from shardcore.search.bound.options import Exchanges, RunShards, bundles_and_runs, space_description
from shardcore.step.exchange_lines import has_equal_transfers, is_even_division_cheapest
from shardcore.step.kinds import ShardingKind
from shardcore.step.memory import usable_bytes

_SHARES = 6
"""Dual feasible functions that round to shares of a device."""
_TOPS, _WIDER = 20, 1.1
"""Values of `top` to try at most, and the next one at most, over what is proved."""
_PRECISION = 1e-3
"""Relative precision of the bisection."""
_TRACE = 1e-9
"""Share by which limits give way, for rounding."""
_MORE = 1e-2
"""Share by which a bound has to be above that of evenly divided work for another cause to be named."""
_ROUNDING = 2.0**-23
"""Share by which a cost may be off as encodings are rounded to 24 bits (cost.model.round_encodings)."""
_MISSING = 3.0
"""Price of a bundle that is left out, in `top`. No plan leaves one out."""

Part = tuple[str, int]
"""A part of a step: compute; outputs or ids of a run, by its number; or none of these."""
_COMPUTE, _NO_PART = ("compute", 0), ("", 0)


@dataclass(frozen=True)
class LowerBound:
    """Proved lower bound on the cost of all plans in a space.

    proved_ms: no plan costs less.
    limit: cause that prevents cheaper plans.
    space: the plans considered, in words.
    """

    proved_ms: float
    limit: str
    space: str


def prove_lower_bound(
    problem: Problem, model: CostModel, shared: Sequence[ShardingKind] | None = None
) -> LowerBound | None:
    """Lower bound on the cost of plans that cut tables by columns, or let groups of devices share them.

    shared: the kinds of sharing to consider; None for all.

    None where the model proves nothing. Raises SettingMismatch for a model of another setting.
    """
    problem.require_setting(model.setting)
    if (bounding := model.bounding_model) is None:
        return None
    problem = with_predicted_dense_ms(problem, bounding)
    bundles, runs = bundles_and_runs(problem, bounding, shared)
    program = BoundProgram(problem, bounding, bundles, runs)
    proved_ms, even_ms = program.lower_bound_ms()
    limit = "the work of all tables, divided evenly"
    if proved_ms > even_ms * (1 + _MORE):
        bundle = program.costliest_bundle()
        shown = ", ".join(repr(t.name) for t in bundle[:3]) + ", ..." * (len(bundle) > 3)
        limit = (
            f"tables {shown}: kept together on one device they take more than an even share of all"
            if len(bundle) > 1
            else f"table {shown}: whole on a device it takes more than an even share of all, "
            "and its parts together cost more"
        )
    # Subtract a trace for rounding errors.
    return LowerBound(
        proved_ms * (1 - _ROUNDING) + problem.job.dense_ms, limit, space_description(problem, runs)
    )


@dataclass(frozen=True, eq=False)
class _Room:
    """Limit of a part of a step on each device, or of its memory.

    part: the part of a step whose time limits it.
    size: [N] that an option takes on each of its devices.
    on: [N] number of these devices.
    devices: number of all.
    most: ms for this part of a step -> the most on a device.
    """

    part: Part
    size: np.ndarray
    on: np.ndarray
    devices: int
    most: Callable[[float], float]


class _ConstraintRows:
    """Constraints, each: a sum over variables is at least a number."""

    def __init__(self) -> None:
        self.least: list[float] = []
        self.found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add_constraint(self, least: float, *terms: tuple[Any, Any]) -> None:
        """Add a constraint: the sum of terms is at least `least`. terms: variables' numbers, and coefficients."""
        for columns, values in terms:
            columns = np.atleast_1d(columns)
            self.found.append(
                (np.full(len(columns), len(self.least)), columns, np.full(len(columns), values, float))
            )
        self.least.append(least)

    def sparse_matrix(self, n_variables: int) -> Any:
        """[rows, variables] sparse matrix of the constraints' coefficients."""
        from scipy import sparse

        rows, columns, values = (np.concatenate(x) for x in zip(*self.found, strict=True))
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self.least), n_variables))
        matrix.eliminate_zeros()
        return matrix


class BoundProgram:
    """Linear program whose optimum is a lower bound on the cost of a problem's plans.

    options: arrays of options, by name:
      run, bundle: [N] numbers. part: [N] fraction of the bundle. on: [N, C] devices of each class that have it.
      load, alone_ms: [N] as in contention.SlowdownCurve.
      mean_ms, every_ms, id_ms: [N] of exchanges, as in options.Exchanges.
      resident: [N] bytes that a device has of it at all times.
      sent, received: [N] bytes of outputs, and of ids, of the device that has it. 0 where a group shares it.
    speed, count: [C] speed of each class of devices, and number of devices.
    everywhere: [R] whether all devices have all shards of a run, so that each has an op.
    latency_ms: [R + 1, 3] ms of a run's exchanges, whatever they carry: mean, every and ids. The last row is of all
      replicas.
    """

    def __init__(
        self, problem: Problem, model: CostModel, bundles: list[tuple[Table, ...]], runs: Sequence[RunShards]
    ) -> None:
        self.problem, self.model, topology = problem, model, problem.topology
        self.bundles = bundles
        # Where even exchanges are not the cheapest, none count.
        counted = float(is_even_division_cheapest(model, topology))
        waits = counted * has_equal_transfers(model, topology)
        each = np.stack([[d.speed for d in topology.devices], usable_bytes(problem)])
        (self.speed, held), of_class, self.count = np.unique(
            each, axis=1, return_inverse=True, return_counts=True
        )
        self.class_of = of_class.ravel()
        self.runs = runs
        self.everywhere = [len(run.sharding_kind.device_groups(topology)[0]) == len(topology) for run in runs]
        self.curves = [self._slowdown_curve(run) for run in runs]
        exchanges, found = [], []
        for r, run in enumerate(runs):
            # Replicas of all collections are one exchange, so its law is that of all.
            peers = [other for other in runs if other.is_replicated] if run.is_replicated else [run]
            of_bundles = [(x.sent / x.part)[first_shard_of_each_bundle(x.bundle)] for x in peers]
            exchanges.append(Exchanges(problem, model, run, np.concatenate(of_bundles)))
            lines = exchanges[-1]
            columns = {
                "run": np.full(len(run.part), r),
                "bundle": run.bundle,
                "part": run.part,
                "load": self.curves[r].load,
                "alone_ms": self.curves[r].alone_ms,
                "mean_ms": counted * lines.mean.byte_ms * run.sent,
                "every_ms": waits * lines.every.byte_ms * run.sent,
                "id_ms": counted * lines.ids.byte_ms * run.received,
                "resident": run.resident,
                "sent": run.sent * run.sharding_kind.is_on_one_device,
                "received": run.received * run.sharding_kind.is_on_one_device,
            }
            found += self._options_by_site(run, columns)
        options = self.options = {name: np.concatenate([x[name] for x in found]) for name in found[0]}
        self.latency_ms = np.zeros((len(runs) + 1, 3))
        for run, x, row in zip(runs, exchanges, self.latency_ms, strict=False):
            paid = self.latency_ms[-1] if run.is_replicated else row
            paid[:] = counted * x.mean.once_ms, waits * x.every.once_ms, counted * x.ids.once_ms
        self.rooms = []
        for c, (speed, most) in enumerate(zip(self.speed.tolist(), held.tolist(), strict=True)):
            on, devices = options["on"][:, c], int(self.count[c])
            # Any op has a launch.
            self.rooms += [
                _Room(
                    _COMPUTE, options["alone_ms"], on, devices, lambda ms, s=speed: s * ms - model.launch_ms()
                ),
                _Room(_NO_PART, options["resident"], on, devices, lambda ms, most=most: most),
            ]
        # Towers divide a device's bytes over its domain.
        if waits and len(topology) > 1 and problem.job.tower_ratio is None:
            for r in (r for r, run in enumerate(runs) if run.sharding_kind.is_on_one_device):
                on, lines = 1.0 * (options["run"] == r), exchanges[r]
                self.rooms += [
                    _Room(("outputs", r), options["sent"], on, len(topology), lines.own_outputs),
                    _Room(("ids", r), options["received"], on, len(topology), lines.own_ids),
                ]

    def _slowdown_curve(self, run: RunShards) -> SlowdownCurve:
        """Slowdown by contention of a kind's fused ops, as a curve over their load."""
        # A usual op has an even part of the tables. Of a kind that groups share, about half of the tables.
        topology = self.problem.topology
        n_ops = (
            len(topology)
            if run.sharding_kind.is_on_one_device
            else 2 * len(run.sharding_kind.device_groups(topology))
        )
        return op_slowdown_curve(run.codes, run.bundle, run.codes[run.part == 1].sum(0) / n_ops, self.model)

    def _options_by_site(
        self, run: RunShards, columns: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        """Arrays of a run's options for each site: of the shards that may be there."""
        n_classes, groups = len(self.speed), run.sharding_kind.device_groups(self.problem.topology)
        for site in sorted({tuple(np.bincount(self.class_of[list(g)], minlength=n_classes)) for g in groups}):
            may = np.ones(len(self.bundles), bool)
            if sum(site) == 1:
                of_class = set(np.flatnonzero(self.class_of == np.argmax(site)).tolist())
                may &= [
                    not of_class.isdisjoint(self.problem.allowed_devices(t.name)) for t, *_ in self.bundles
                ]
            at = np.flatnonzero(may[run.bundle])
            yield {name: values[at] for name, values in columns.items()} | {
                "on": np.tile(np.array(site, dtype=float), (len(at), 1))
            }

    # --- the bound ------------------------------------------------------------------------------------------

    def costliest_bundle(self) -> tuple[Table, ...]:
        """Bundle (tables placed together) that takes longest whole on one device."""
        whole = self.options["alone_ms"] * (self.options["part"] == 1) * (self.options["on"].sum(1) == 1)
        return self.bundles[self.options["bundle"][whole.argmax()]]

    def lower_bound_ms(self) -> tuple[float, float]:
        """Lower bound on ms of a step without its dense part, and ms if all work were divided evenly.

        0 where nothing is proved.
        """
        whole = self.options["part"] == 1
        work_ms = sum(self.options[name][whole].sum() for name in ("alone_ms", "mean_ms", "id_ms"))
        # All tables on the slowest device: a time that hardly limits what fits.
        top = (work_ms + self.latency_ms.sum()) / self.speed.min() + self.model.launch_ms()
        low, high, rest = 0.0, np.inf, dict[Part, float]()
        even_ms = value = self._program_optimum_ms(top, rest)
        for _ in range(_TOPS):
            if value < top:
                parts = {room.part for room in self.rooms} - {_NO_PART}
                tighter = {part: self._program_optimum_ms(top, rest, part) * (1 - _TRACE) for part in parts}
                value = self._program_optimum_ms(top, tighter)
                # What the rest takes in plans up to `top` holds for lower ones, but not beyond.
                rest = tighter if value < top else rest
            low = max(low, min(top, value))
            # Nothing is proved: the first program has no solution.
            if low <= 0:
                break
            high = high if value >= top else top
            if high <= low * (1 + _PRECISION):
                break
            top = min((low + high) / 2, _WIDER * low)
            value = self._program_optimum_ms(top, rest)
        return low, even_ms

    def _program_optimum_ms(self, top: float, rest: Mapping[Part, float], without: Part = _NO_PART) -> float:
        """Optimum of the linear program in ms, 0 or more.

        rest: the least ms of a step without a part.
        without: a part that costs nothing.
        """
        from scipy import optimize

        time = {room.part: top - rest.get(room.part, 0.0) for room in self.rooms}
        most = [room.most(time[room.part]) for room in self.rooms]
        # An option takes no more than there is on each device that has it.
        fits = [(r.on == 0) | (r.size <= m * (1 + _TRACE)) for r, m in zip(self.rooms, most, strict=True)]
        at = np.flatnonzero(np.all(fits, axis=0))
        options = {name: values[at] for name, values in self.options.items()}
        n_options, n_runs, n_classes = len(at), len(self.curves), len(self.speed)
        # Variables: options; runs that are there, and replicas; ms of each run and class; ids, step; bundles left out.
        ends = np.cumsum([n_options, n_runs + 1, n_runs * n_classes, 1, 1, len(self.bundles)])
        every, present, compute, (ids,), (step,), missing = np.split(np.arange(ends[-1]), ends[:-1])
        compute = compute.reshape(n_runs, n_classes)
        rows = _ConstraintRows()
        self._add_bundle_constraints(rows, options, present, missing)
        if without != _COMPUTE:
            self._add_compute_constraints(rows, options, present, compute, time[_COMPUTE])
        latency_ms, counts = self.latency_ms.copy(), dict.fromkeys(("outputs", "ids"), np.ones(n_options))
        if without[0] in counts:
            counts[without[0]] = 1.0 * (options["run"] != without[1])
            latency_ms[without[1], [2] if without[0] == "ids" else [0, 1]] = 0.0
        means = [
            (compute[:, c], 1 / (self.speed[c] * self.count[c]), options["every_ms"], 1)
            for c in range(n_classes)
        ]
        # Beside the compute of one device counts what every device waits for, not the mean.
        if without != _COMPUTE:
            means.append((compute.ravel(), 1 / (self.speed @ self.count), options["mean_ms"], 0))
        for columns, share, ms, which in means:
            # In the mean over devices, a step takes at least so long.
            terms = (columns, -share), (every, -ms * counts["outputs"]), (present, -latency_ms[:, which])
            rows.add_constraint(0.0, (step, 1.0), (ids, -1.0), *terms)
        id_terms = (every, -options["id_ms"] * counts["ids"]), (present, -latency_ms[:, 2])
        rows.add_constraint(-self.problem.job.id_overlap_ms, (ids, 1.0), *id_terms)
        for room, m in zip(self.rooms, most, strict=True):
            for f in dual_feasible_functions(room.size[at] / m) if 0 < m < np.inf else ():
                rows.add_constraint(-float(room.devices), (every, -f * room.on[at]))
        cost = np.zeros(ends[-1])
        cost[step], cost[missing] = 1.0, _MISSING * top
        limit = np.ones(ends[-1])
        limit[every], limit[[ids, step]] = 1 / options["part"], top
        limit[compute] = top * self.speed * self.count
        matrix, least = rows.sparse_matrix(ends[-1]), np.array(rows.least)
        bounds = np.stack([np.zeros(ends[-1]), limit], 1)
        result = optimize.linprog(cost, -matrix, -least, bounds=bounds, method="highs")
        if result.status:  # no solution in time: nothing is proved
            return 0.0
        prices, limit[missing] = np.maximum(0.0, -result.ineqlin.marginals), 0.0
        # What a variable may lower the cost by, at these prices, is subtracted.
        return max(0.0, float(prices @ least + np.minimum(0.0, cost - matrix.T @ prices) @ limit))

    def _add_bundle_constraints(
        self,
        rows: _ConstraintRows,
        options: Mapping[str, np.ndarray],
        present: np.ndarray,
        missing: np.ndarray,
    ) -> None:
        """Add constraints: each bundle is placed whole, and a run is present as far as any of its bundles is."""
        for bundle, column in enumerate(missing):
            at = np.flatnonzero(options["bundle"] == bundle)
            rows.add_constraint(1.0, (at, options["part"][at]), (column, 1.0))
            for run in np.unique(options["run"][at]):
                of_run = at[options["run"][at] == run]
                rows.add_constraint(0.0, (present[run], 1.0), (of_run, -options["part"][of_run]))
        for run in np.flatnonzero([run.is_replicated for run in self.runs]):
            rows.add_constraint(0.0, (present[-1], 1.0), (present[run], -1.0))

    def _add_compute_constraints(
        self,
        rows: _ConstraintRows,
        options: Mapping[str, np.ndarray],
        present: np.ndarray,
        compute: np.ndarray,
        most_ms: float,
    ) -> None:
        """Add constraints on the compute ms of ops from shards and launches. most_ms: of a device's ops."""
        launch_ms = self.model.launch_ms()
        for (r, c), column in np.ndenumerate(compute):
            at, most = np.flatnonzero(options["run"] == r), most_ms * self.speed[c] - launch_ms
            if most <= 0:
                continue
            everywhere = self.everywhere[r]
            # Launches of all devices if the run is there, else in proportion to their work.
            alone = 1.0 if everywhere else 1 + launch_ms / most
            lines = self.curves[r].lines_below_op_ms(most, launch_ms * (not everywhere))
            for slope, once, per in (
                (alone, 0.0, options["alone_ms"]),
                *((*line, options["load"]) for line in lines),
            ):
                terms = [(column, 1.0), (at, -slope * per[at] * options["on"][at, c])]
                if everywhere:
                    rows.add_constraint(0.0, *terms, (present[r], -self.count[c] * (launch_ms + once)))
                else:
                    rows.add_constraint(float(self.count[c]) * once, *terms)


def dual_feasible_functions(size: np.ndarray) -> Iterator[np.ndarray]:
    """[N] dual feasible functions of sizes: wherever sizes sum to at most 1, so do the functions' values."""
    yield size
    for shares in range(1, _SHARES + 1):
        yield np.floor((shares + 1) * size * (1 - _TRACE)) / shares
