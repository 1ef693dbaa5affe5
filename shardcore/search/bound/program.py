"""A lower bound by a linear program over options: tables may be mixtures of all ways to run them.

An option is a shard at a site: a class of equal devices, or of equal groups that share the shard. A run is a kind of
a collection. Counts of options are whole in a plan and fractions in the program, so its least ms are a bound. All
its constraints hold for plans that take at most `top` ms:

- The parts of a table sum to 1.
- A run is there if any part of a table is. The program has at least that fraction of it, and so of its latencies and
  of launches of runs that are on all devices.
- Compute of a class of devices is at least rates times features. By load it is convex (ops.Curve), so lines below it
  hold for the sum over devices. A launch serves no more than fits until `top`, so launches count in proportion.
- A step takes at least the mean over devices, by speed, of compute and even exchanges (ops.BoundShards). Ids add to
  it what the dense part does not hide.
- Beside the least of the other parts of a step, a device has time for so much compute, and for so many bytes of
  outputs and of ids. So larger shards are left out. Of other large ones only few fit on a device: functions f are
  "dual feasible" if sums of f(x) are at most 1 wherever sums of x are (Lueker 1983). The same holds for memory, of
  which only bytes count that are there at all times.

So the lesser of `top` and the program's least ms is a bound. Bisection finds the best `top`.

Any prices of constraints, 0 or more, prove a bound if variables have upper limits (weak duality). The solver's prices
are used like that. So its tolerances may lower the bound, but never raise it.

Shapes: N options, T tables, R runs, C classes of devices, D devices, P points of a law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcore.cost.model import BoundableCostModel
from shardcore.search.bound.ops import BoundShards, Curve, op_curve
from shardcore.step.kinds import CHANNELS, Channel, Layout
from shardcore.step.memory import held_bytes
from shardcore.step.memory_account import sums_of

_LINES = 16
"""Lines below the compute of a run."""
_SHARES, _LIMITS = 6, (0.2, 0.3, 0.4)
"""Dual feasible functions: those that round to shares of a device, and those that round near its ends."""
_POINTS = 200
"""Bytes of one device at which exchanges are priced."""
_TOPS, _WIDER = 16, 1.5
"""Values of `top` to try at most. The next one, where all of a first one is proved."""
_PRECISION = 1e-3
"""Relative precision of the bisection."""
_TRACE = 1e-9
"""Share by which limits give way, for rounding."""
_MISSING = 3.0
"""Price of a table that is left out, in `top`. No plan leaves one out."""

Part = tuple[str, int]
"""A part of a step: compute; outputs or ids of a run, by its number; or none of these."""
_COMPUTE, _NO_PART = ("compute", 0), ("", 0)


@dataclass(frozen=True, eq=False)
class Options:
    """Options of a problem.

    run, table: [N] numbers.
    part: [N] fraction of the table.
    load, alone_ms: [N] as in ops.Curve.
    exchange_ms, wait_ms: [N] as in BoundShards, without ids. id_ms: [N] those of ids.
    resident: [N] bytes that a device has of it at all times.
    sent, received: [N] bytes of outputs, and of ids, of the device that has it. 0 where a group shares it.
    on: [N, C] devices of each class that have it.
    """

    run: np.ndarray
    table: np.ndarray
    part: np.ndarray
    load: np.ndarray
    alone_ms: np.ndarray
    exchange_ms: np.ndarray
    wait_ms: np.ndarray
    id_ms: np.ndarray
    resident: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    on: np.ndarray


@dataclass(frozen=True, eq=False)
class _Run:
    """A kind of a collection.

    everywhere: True if all devices have all its shards, so that each has an op.
    dense: True for replicas. All gradients of replicas are reduced together.
    curve: of its ops.
    """

    everywhere: bool
    dense: bool
    curve: Curve


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


class _Rows:
    """Constraints, each: a sum over variables is at least a number."""

    def __init__(self) -> None:
        self.least: list[float] = []
        self.found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, least: float, *terms: tuple[Any, Any]) -> None:
        """terms: numbers of variables, and their coefficients."""
        for columns, values in terms:
            columns = np.atleast_1d(columns)
            self.found.append(
                (np.full(len(columns), len(self.least)), columns, np.full(len(columns), values, float))
            )
        self.least.append(least)

    def matrix(self, n_variables: int) -> Any:
        """[rows, variables] sparse."""
        from scipy import sparse

        rows, columns, values = (np.concatenate(x) for x in zip(*self.found, strict=True))
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self.least), n_variables))
        matrix.eliminate_zeros()
        return matrix


class Program:
    """The program of a problem.

    speed, count: [C] speed of each class of devices, and number of devices.
    latency_ms: [R + 1, 3] ms of a run's collectives, whatever they carry: in the mean of devices, for every device,
      and of ids. The last row is that of all replicas.
    """

    def __init__(self, shards: BoundShards, model: BoundableCostModel, shared: Sequence[Layout]) -> None:
        """shards: those of all tables as one collection. shared: kinds that groups share."""
        self.problem, self.model, topology = shards.problem, model, shards.problem.topology
        # Where even exchanges are not the cheapest, none count.
        self.counted = float(model.even_is_least(topology))
        self.waits = self.counted * model.has_equal_transfers(topology)
        each = np.stack([shards.speed, np.array(held_bytes(self.problem), dtype=float)])
        classes, number, self.count = np.unique(each, axis=1, return_inverse=True, return_counts=True)
        (self.speed, held), self.class_of = classes, number.ravel()
        self.runs: list[_Run] = []
        self.rooms: list[_Room] = []
        found, latency, laws = [], [], {}
        replicas_ms = np.zeros(3)
        for group in sorted({(t.collection, t.sequence) for t in self.problem.tables}):
            number = np.array(
                [i for i, t in enumerate(self.problem.tables) if (t.collection, t.sequence) == group]
            )
            own = BoundShards(self.problem, model, shared, True, [self.problem.tables[i] for i in number])
            for kind, layout in enumerate(own.kinds):
                at = np.flatnonzero(own.kind == kind)
                if not len(at):
                    continue
                dense = all(channel.row.dense for channel in layout.channels)
                priced, priced_at = own, at
                latency.append(np.append(own.latency_ms[:, kind], own.ids_ms.get(layout.ids, 0.0)))
                if dense:
                    # Replicas of all collections are one exchange, so its law is that of all.
                    of_all = [x.name for x in shards.kinds].index(layout.name)
                    priced, priced_at = shards, shards.at[of_all][number[own.table[at]], 1]
                    replicas_ms = np.append(shards.latency_ms[:, of_all], 0.0)
                    latency[-1] = np.zeros(3)
                if kind == 0:
                    laws |= self._laws(own, layout, at, len(self.runs))
                self.runs.append(
                    _Run(own.group_size[kind] == len(shards.speed), dense, op_curve(own, model, kind))
                )
                columns = {
                    "run": np.full(len(at), len(self.runs) - 1),
                    "table": number[own.table[at]],
                    "part": own.part[at],
                    "load": self.runs[-1].curve.load[at],
                    "alone_ms": self.runs[-1].curve.alone[at],
                    "exchange_ms": self.counted * (priced.exchange_ms - priced.id_ms)[priced_at],
                    "wait_ms": self.waits * (priced.wait_ms - priced.id_ms)[priced_at],
                    "id_ms": self.counted * own.id_ms[at],
                    "resident": np.array([sums_of(layout, own.shards[i], self.problem).resident for i in at]),
                    "sent": own.all_bytes[at] * (kind == 0),
                    "received": own.id_bytes[at] * (kind == 0),
                }
                found += self._at_sites(layout, columns)
        options = self.options = Options(
            **{name: np.concatenate([x[name] for x in found]) for name in found[0]}
        )
        self.latency_ms = np.array([*latency, replicas_ms]) * [self.counted, self.waits, self.counted]
        for c, (speed, held_by_one) in enumerate(zip(self.speed.tolist(), held.tolist(), strict=True)):
            on, devices = options.on[:, c], int(self.count[c])
            # Any op has a launch.
            self.rooms += [
                _Room(_COMPUTE, options.alone_ms, on, devices, lambda ms, s=speed: s * ms - model.launch_ms),
                _Room(_NO_PART, options.resident, on, devices, lambda ms, most=held_by_one: most),
            ]
        for (what, run), law in laws.items():
            size = {"outputs": options.sent, "ids": options.received}[what]
            self.rooms.append(_Room((what, run), size, 1.0 * (options.run == run), len(shards.speed), law))

    def _at_sites(self, layout: Layout, columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """The columns of Options, for each site of a kind: those of shards that may be there."""
        problem, tables = self.problem, self.problem.tables
        n_classes = len(self.speed)
        may_run = np.array(
            [problem.may_run(layout, t) and (layout.caches or not t.in_host_memory) for t in tables]
        )
        groups = layout.groups(problem.topology)
        for site in sorted({tuple(np.bincount(self.class_of[list(g)], minlength=n_classes)) for g in groups}):
            may = may_run.copy()
            if sum(site) == 1:
                of_class = set(np.flatnonzero(self.class_of == np.argmax(site)).tolist())
                may &= [not of_class.isdisjoint(problem.allowed_devices(t.name)) for t in tables]
            at = np.flatnonzero(may[columns["table"]])
            yield {name: values[at] for name, values in columns.items()} | {
                "on": np.tile(np.array(site, dtype=float), (len(at), 1))
            }

    def _laws(
        self, own: BoundShards, layout: Layout, at: np.ndarray, run: int
    ) -> dict[Part, Callable[[float], float]]:
        """For outputs and ids of a run: from ms of their exchange to the most bytes of any device.

        An exchange takes no less than if that device alone had bytes.
        """
        n, job, topology = len(own.speed), self.problem.job, self.problem.topology
        # Towers divide a device's bytes over its unit.
        if n == 1 or job.tower_ratio is not None or not self.waits:
            return {}
        entering = {c: of(1.0, 1.0, self.problem) for c, of in layout.channels_in(job, topology).items()}
        ids: dict[Channel, float] = {layout.ids: 1.0} if layout.ids else {}
        laws: dict[Part, Callable[[float], float]] = {}
        for what, channels, n_bytes in (
            ("outputs", entering, own.all_bytes[at]),
            ("ids", ids, own.id_bytes[at]),
        ):
            # Beyond the largest shard, as a device may have several.
            points = np.geomspace(max(1.0, n_bytes.min()), 4 * max(1.0, n_bytes.max()), _POINTS)
            traffic = np.zeros((len(CHANNELS), _POINTS, n))
            for channel, each in channels.items():
                traffic[CHANNELS.index(channel), :, 0] = points * each / next(iter(channels.values()))
            comm = self.model.comm(traffic, np.zeros((_POINTS, n)), topology)
            # What every device takes part in: one with more bytes may have less to do elsewhere.
            ms = (comm.forward_ms + comm.backward_ms + comm.input_ms).min(-1)
            laws[what, run] = _law(points, ms - job.hides_ids_ms * (what == "ids"))
        return laws

    # --- the bound ------------------------------------------------------------------------------------------

    def least_ms(self, start_ms: float) -> float:
        """ms of plans at least, without the dense part. start_ms: the first `top`."""
        low, high, top = 0.0, np.inf, start_ms
        rest: dict[Part, float] = {}
        for _ in range(_TOPS):
            value = self._value(top, rest)
            if value < top:
                parts = {room.part for room in self.rooms} - {_NO_PART}
                tighter = {part: self._value(top, rest, part) * (1 - _TRACE) for part in parts}
                value = self._value(top, tighter)
                # What the rest takes in plans up to `top` holds for lower ones, but not beyond.
                rest = tighter if value < top else rest
            low = max(low, min(top, value))
            high = high if value >= top else top
            if high <= low * (1 + _PRECISION):
                break
            top = (low + high) / 2 if np.isfinite(high) else top * _WIDER
        return low

    def _value(self, top: float, rest: Mapping[Part, float], without: Part = _NO_PART) -> float:
        """The program's least ms. 0 or more.

        rest: the least ms of a step without a part.
        without: a part that costs nothing.
        """
        from scipy import optimize

        time = {room.part: top - rest.get(room.part, 0.0) for room in self.rooms}
        most = [room.most(time[room.part]) for room in self.rooms]
        # An option takes no more than there is on each device that has it.
        fits = [(r.on == 0) | (r.size <= m * (1 + _TRACE)) for r, m in zip(self.rooms, most, strict=True)]
        at = np.flatnonzero(np.all(fits, axis=0))
        options = Options(**{name: values[at] for name, values in vars(self.options).items()})
        n_runs, n_classes = len(self.runs), len(self.speed)
        # Variables: options; runs that are there, and replicas; ms of each run on each class; ids, step; tables left
        # out.
        present = len(at)
        compute = present + n_runs + 1 + np.arange(n_runs * n_classes).reshape(n_runs, n_classes)
        ids = int(compute[-1, -1]) + 1
        step, missing = ids + 1, ids + 2 + np.arange(len(self.problem.tables))
        rows = _Rows()
        self._add_tables(rows, options, present, missing)
        if without != _COMPUTE:
            self._add_compute(rows, options, present, compute, time[_COMPUTE])
        latency_ms, counts = self.latency_ms.copy(), dict.fromkeys(("outputs", "ids"), np.ones(present))
        if without[0] in counts:
            counts[without[0]] = 1.0 * (options.run != without[1])
            latency_ms[without[1], [2] if without[0] == "ids" else [0, 1]] = 0.0
        every, runs = np.arange(present), present + np.arange(n_runs + 1)
        per_ms = 1 / (self.speed @ self.count)
        means = [
            (compute[:, c], 1 / (self.speed[c] * self.count[c]), options.wait_ms, 1) for c in range(n_classes)
        ]
        # Beside the compute of one device counts what every device waits for, not the mean.
        if without != _COMPUTE:
            means.append((compute.ravel(), per_ms, options.exchange_ms, 0))
        for columns, share, ms, which in means:
            # In the mean over devices, a step takes at least so long.
            terms = (columns, -share), (every, -ms * counts["outputs"]), (runs, -latency_ms[:, which])
            rows.add(0.0, (step, 1.0), (ids, -1.0), *terms)
        id_terms = (every, -options.id_ms * counts["ids"]), (runs, -latency_ms[:, 2])
        rows.add(-self.problem.job.hides_ids_ms, (ids, 1.0), *id_terms)
        for room, m in zip(self.rooms, most, strict=True):
            for f in dual_feasible(room.size[at] / m) if 0 < m < np.inf else ():
                rows.add(-float(room.devices), (every, -f * room.on[at]))
        cost = np.zeros(missing[-1] + 1)
        cost[step], cost[missing] = 1.0, _MISSING * top
        limits = np.tile(top * self.speed * self.count, n_runs)
        limit = np.concatenate(
            [1 / options.part, np.ones(n_runs + 1), limits, [top, top], np.ones(len(missing))]
        )
        matrix, least = rows.matrix(len(cost)), np.array(rows.least)
        bounds = np.stack([np.zeros(len(cost)), limit], 1)
        result = optimize.linprog(cost, -matrix, -least, bounds=bounds, method="highs")
        if result.status:  # no solution in time: nothing is proved
            return 0.0
        prices, limit[missing] = np.maximum(0.0, -result.ineqlin.marginals), 0.0
        # What a variable may lower the cost by, at these prices, is subtracted.
        return max(0.0, float(prices @ least + np.minimum(0.0, cost - matrix.T @ prices) @ limit))

    def _add_tables(self, rows: _Rows, options: Options, present: int, missing: np.ndarray) -> None:
        """Tables are made up of options. Runs are there as far as any of their tables is."""
        for table, column in enumerate(missing):
            at = np.flatnonzero(options.table == table)
            rows.add(1.0, (at, options.part[at]), (column, 1.0))
            for run in np.unique(options.run[at]):
                of_run = at[options.run[at] == run]
                rows.add(0.0, (present + run, 1.0), (of_run, -options.part[of_run]))
        for run in np.flatnonzero([run.dense for run in self.runs]):
            rows.add(0.0, (present + len(self.runs), 1.0), (present + run, -1.0))

    def _add_compute(
        self, rows: _Rows, options: Options, present: int, compute: np.ndarray, most_ms: float
    ) -> None:
        """Ops take the ms of their shards and launches. most_ms: of a device's ops."""
        launch_ms = self.model.launch_ms
        for (r, c), column in np.ndenumerate(compute):
            run, at, most = (
                self.runs[r],
                np.flatnonzero(options.run == r),
                most_ms * self.speed[c] - launch_ms,
            )
            if most <= 0:
                continue
            # Launches of all devices if the run is there, else in proportion to their work.
            alone = 1.0 if run.everywhere else 1 + launch_ms / most
            lines = lines_below(run.curve, most, launch_ms * (not run.everywhere))
            for slope, once, per in (
                (alone, 0.0, options.alone_ms),
                *((*line, options.load) for line in lines),
            ):
                terms = [(column, 1.0), (at, -slope * per[at] * options.on[at, c])]
                if run.everywhere:
                    rows.add(0.0, *terms, (present + r, -self.count[c] * (launch_ms + once)))
                else:
                    rows.add(float(self.count[c]) * once, *terms)


def _law(points: np.ndarray, ms: np.ndarray) -> Callable[[float], float]:
    """The first of rising points that takes longer than some ms. inf if none does."""
    ends = np.append(points, np.inf)
    return lambda most_ms: float(ends[np.searchsorted(ms, most_ms * (1 + _TRACE), side="right")])


def lines_below(curve: Curve, most_ms: float, launch_ms: float) -> list[tuple[float, float]]:
    """Slopes, and ms at 0, of lines in load that are not above any op's ms, nor above 0 at no load.

    most_ms: of an op without its launch.
    """
    most = float(curve.most(np.array([most_ms]))[0])
    if most <= 0:
        return []
    inner = curve.ends[1:-1]
    load = np.append(inner[inner < most], most)
    # Before each step of the curve it is lowest, so it is nowhere below lines that are not above these points.
    ms = curve.slowdown[: len(load)] * load + launch_ms
    slopes = np.quantile(np.diff(ms, prepend=0.0) / np.diff(load, prepend=0.0), np.linspace(0, 1, _LINES))
    slopes = np.unique(np.append(slopes, (ms / load).min()))
    return [(slope, min(0.0, float((ms - slope * load).min()))) for slope in slopes.tolist()]


def dual_feasible(size: np.ndarray) -> Iterator[np.ndarray]:
    """[N] functions of sizes, whose sums are at most 1 wherever those of sizes are."""
    yield size
    for shares in range(1, _SHARES + 1):
        yield np.floor((shares + 1) * size * (1 - _TRACE)) / shares
    for limit in _LIMITS:
        yield np.where(size > (1 - limit) * (1 + _TRACE), 1.0, size * (size >= limit))
