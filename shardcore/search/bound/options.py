"""The options of a problem for a lower bound: every shard that a device, or each device of a group, may hold.

A run is a kind of a collection: its shards on a device are one op, and their bytes exchanges of its own.
Exchanges are priced by lines below their laws: a tangent of a convex law, a chord of a concave one.

Shapes: N options of a run, I items, D devices, F features, C channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.topology import Topology
from shardcore.core.types import MIN_WIDTH, Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.step.access import output_bytes
from shardcore.step.exchange_lines import has_concave_exchanges, total_linear_cost
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.kinds import CHANNELS, LAYOUTS, Channel, Layout, even_row_share
from shardcore.step.scopes import WORLD, group_members
from shardcore.tables.host_rows import with_highest_load_factors

MOST_SHARDS = 150_000
"""With more possible shards, only widths of powers of two are considered."""
_EVEN_BYTES, _LEAST_BYTES, _STEP, _ROUNDING = 2.0**24, 2.0**-10, 2.0**-20, 1e-9
"""Bytes of a device at which exchanges are priced, and how near two such points are (`_line_end_points`)."""
_POINTS, _SEVERAL = 200, 4
"""Bytes of one device at which exchanges are priced, up to as many as several shards like the largest have."""
_TRACE = 1e-9
"""Share by which limits give way, for rounding."""


@dataclass(frozen=True, eq=False)
class Run:
    """The shards that a device may have by one kind of a collection. Each device of a group has the same.

    item: [N] number of the item (`tables_placed_as_one`). shards: [N] one of each of its tables.
    part: [N] fraction of the item.
    codes: [N, F] encodings.
    sent: [N] bytes of outputs of all devices that have it, as they enter the first channel. received: those of ids.
    """

    layout: Layout
    item: np.ndarray
    shards: list[tuple[Shard, ...]]
    part: np.ndarray
    codes: np.ndarray
    sent: np.ndarray
    received: np.ndarray

    @property
    def is_replicated(self) -> bool:
        """True for a run of replicas, whose gradients are reduced together across collections."""
        return all(channel.definition.dense for channel in self.layout.channels)


@dataclass(frozen=True)
class Line:
    """ms that an exchange takes at least: `once_ms`, and `byte_ms` for each byte."""

    once_ms: float
    byte_ms: float


def layouts_shared_by_groups(topology: Topology) -> tuple[Layout, ...]:
    """Layouts by which groups of several devices share tables."""
    return tuple(k for k in LAYOUTS.values() if any(len(group) > 1 for group in k.groups(topology)))


def considers_all_widths(problem: Problem) -> bool:
    """True if shards of all column widths are options. False if these would be too many for the limits of time and
    memory.
    """
    return sum(t.dim // MIN_WIDTH for t in problem.tables) <= MOST_SHARDS


def space_description(problem: Problem, runs: Sequence[Run]) -> str:
    """Plans covered by a lower bound's options, in words."""
    widths = (
        f"multiples of {MIN_WIDTH}" if considers_all_widths(problem) else f"{MIN_WIDTH} times powers of two"
    )
    # Groups share whole tables here. Searches also let them share parts (state/column_parts.py).
    others = dict.fromkeys(
        run.layout.words + " (not in parts)" * run.layout.cuts_columns
        for run in runs
        if not run.layout.is_on_one_device
    )
    return ", or with ".join([f"each table whole or cut by columns ({widths})", *others])


def tables_placed_as_one(problem: Problem) -> list[tuple[Table, ...]]:
    """Tuples of tables of a collection that plans place together: bundles, and single tables."""
    of_key: dict[tuple[str, bool, tuple[str, ...]], list[Table]] = defaultdict(list)
    for t in problem.tables:
        of_key[t.collection, t.sequence, problem.group_by_table.get(t.name, (t.name,))].append(t)
    return [tuple(of_key[key]) for key in sorted(of_key)]


def runs_of_problem(problem: Problem, model: CostModel, shared: Sequence[Layout]) -> list[Run]:
    """Runs of a problem for each collection: by columns, and by each layout in `shared`. Runs without options are left
    out.
    """
    runs, items = [], tables_placed_as_one(problem)
    for group in sorted({(t.collection, t.sequence) for t in problem.tables}):
        numbers = [i for i, (t, *_) in enumerate(items) if (t.collection, t.sequence) == group]
        tables = [t for i in numbers for t in items[i]]
        # No plan has tables share caches in which their rows stay longer.
        longest = with_highest_load_factors(tables, problem.global_batch, len(problem.topology))
        held = dict(zip(tables, longest, strict=True))
        for kind in (*(k for k in LAYOUTS.values() if k.is_on_one_device), *shared):
            layout = kind.sequence_layout if group[1] else kind
            if layout is None:
                continue
            # Of tables kept together each has one shard, so they make up one option.
            each = [
                (i, zip(*(_possible_shards(layout, t, problem) for t in items[i]), strict=True))
                for i in numbers
            ]
            options = [(i, shards) for i, several in each for shards in several]
            if options:
                runs.append(_make_run(layout, options, held, problem, model))
    return runs


def _make_run(
    layout: Layout,
    options: Sequence[tuple[int, tuple[Shard, ...]]],
    held: Mapping[Table, Table],
    problem: Problem,
    model: CostModel,
) -> Run:
    """Run of a layout with its options. held: tables with the load factors of the longest cache."""
    item, shards = (list(x) for x in zip(*options, strict=True))
    flat, firsts = [s for several in shards for s in several], np.cumsum([0, *map(len, shards[:-1])])
    bytes_of = next(iter(layout.channels_in_job(problem.job, problem.topology).values()))
    n_bytes = [
        (
            bytes_of(float(s.bytes), output_bytes(s, problem.global_batch), problem),
            received_id_bytes(s, problem),
        )
        for s in flat
    ]
    sent, received = (
        len(layout.groups(problem.topology)[0]) * np.add.reduceat(np.array(n_bytes, float), firsts).T
    )
    codes = model.encode([replace(s, table=held[s.table]) for s in flat], layout.op_batch(problem))
    return Run(
        layout=layout,
        item=np.array(item),
        shards=shards,
        part=np.array([first.width / first.table.dim for first, *_ in shards]),
        codes=np.add.reduceat(np.asarray(codes, dtype=float), firsts),
        sent=sent,
        received=received,
    )


def _possible_shards(layout: Layout, table: Table, problem: Problem) -> Iterator[Shard]:
    """Shards of a table that a device may have: of each column width, or the smallest share of a group.

    What others of the group have costs no less.
    """
    whole, n = table.name in problem.uncut_tables, len(layout.groups(problem.topology)[0])
    if layout.is_on_one_device:
        columns = table.dim // MIN_WIDTH
        widths = range(1, columns)
        if not considers_all_widths(problem):
            widths = [1 << k for k in range((columns - 1).bit_length())]
        for width in [columns] if whole or len(problem.topology) == 1 else [*widths, columns]:
            yield Shard(table, 0, table.rows, 0, width * MIN_WIDTH)
    elif not layout.divides_rows:
        yield Shard.whole(table)
    elif not (table.ordered or whole) and (each := even_row_share(table.rows, n)):
        # The last device has the remaining rows, which are the fewest.
        yield Shard(table, (n - 1) * each, table.rows, 0, table.dim)


class Exchanges:
    """Lines below the exchanges of a run.

    mean: outputs and gradients of even bytes, in the mean of devices by speed; per byte of all devices.
    every: the same for every device: without what other groups may wait for by themselves, backward.
    ids: ids of even bytes; per byte of all devices.
    own_outputs, own_ids: from ms to the most bytes that any device can have then.
    """

    def __init__(self, problem: Problem, model: CostModel, run: Run, of_items: np.ndarray) -> None:
        """of_items: bytes in the first channel of each item that may be of the kind, of all devices."""
        self._model, self._topology = model, problem.topology
        topology, job, n = problem.topology, problem.job, len(problem.topology)
        channels = run.layout.channels_in_job(job, topology)
        entering = {channel: bytes_of(1.0, 1.0, problem) for channel, bytes_of in channels.items()}
        # Bytes of all channels are proportional to those of the first.
        sent = {channel: x / next(iter(entering.values())) for channel, x in entering.items()}
        # Groups within units exchange by themselves: backward, devices of others do not wait for them.
        within = {c: x for c, x in sent.items() if c.group != WORLD and not c.scope.across}
        groups = group_members(next(iter(within)).group if within else WORLD, topology)
        speed = np.array([d.speed for d in topology.devices])
        shares = np.sort(speed[groups].sum(1)) / speed.sum()
        ids: dict[Channel, float] = {run.layout.ids: 1.0} if run.layout.ids else {}
        points = self._line_end_points(of_items / n, of_items.sum() / n * len(groups))
        outputs = self._line_below_exchanges(sent, points, ("forward", "backward"))
        forward = self._line_below_exchanges(within, points, ("forward",))
        backward = self._line_below_exchanges(within, points, ("backward",))

        def line_for_groups(shares: np.ndarray) -> Line:
            """Line below exchanges however groups divide the bytes. shares: [G] of the groups' speed, rising."""
            # Forward all wait for the group with most bytes, backward each for itself. The least is where the first
            # groups have equally many, and the others none.
            n_groups, number = len(shares), np.arange(1, len(shares) + 1)
            apart = ((forward.byte_ms + backward.byte_ms * shares.cumsum()) * n_groups / number).min()
            sure = outputs.once_ms - backward.once_ms * (1 - shares[0])
            if job.tower_ratio is not None:
                # Several kinds exchange within groups, and differ in which has most.
                apart, sure = forward.byte_ms + n_groups * backward.byte_ms * shares[0], sure / n_groups
            saved = max(0.0, forward.byte_ms + backward.byte_ms - apart)
            # At least one group is used. Devices of other groups may not wait at all.
            once = min(sure, outputs.once_ms / n_groups) if outputs.once_ms > 0 else outputs.once_ms
            return Line(once, (outputs.byte_ms - saved) / n)

        # A single device may be of the group that has nothing.
        last = 1.0 * (np.arange(len(groups)) == len(groups) - 1)
        self.mean, self.every = line_for_groups(shares), line_for_groups(last)
        # No device receives more than all ids of all tables.
        tables = {s.table for several in run.shards for s in several}
        most = float(sum(received_id_bytes(Shard.whole(t), problem) for t in tables))
        received = self._line_below_exchanges(
            ids, self._line_end_points(run.received / n, most), ("forward",)
        )
        self.ids = Line(received.once_ms, received.byte_ms / n)
        self.own_outputs = self._most_bytes_by_ms(sent, run.sent, 0.0)
        self.own_ids = self._most_bytes_by_ms(ids, run.received, job.id_overlap_ms)

    def _line_below_exchanges(
        self, channels: Mapping[Channel, float], points: tuple[float, float], ways: Sequence[str]
    ) -> Line:
        """Line below the ms of exchanges in the given directions, if every device sends equally many bytes.

        points: bytes of a device between which it is below.
        """
        line = total_linear_cost(self._model, channels, self._topology, points, ways)
        byte_ms, once_ms = float(line[:-1].sum()), float(line[-1])
        # Lowered a trace, for rounding.
        return Line(once_ms - _ROUNDING * (once_ms + byte_ms * points[0]), byte_ms)

    def _line_end_points(self, each: np.ndarray, most: float) -> tuple[float, float]:
        """Bytes of a device between which the line through the exchange law is nowhere above the law.

        each: those of the shards or items of which some are exchanged. most: of all plans.
        A convex law is above all its tangents. A concave one is above the chord of all that plans may have.
        """
        each = each[each > 0]
        if not has_concave_exchanges(self._model, self._topology) or not len(each):
            return _EVEN_BYTES, _EVEN_BYTES
        least = max(float(each.min()), _LEAST_BYTES)
        return least, max(most, least * (1 + _STEP))

    def _most_bytes_by_ms(
        self, channels: Mapping[Channel, float], n_bytes: np.ndarray, hidden_ms: float
    ) -> Callable[[float], float]:
        """Function from ms of an exchange to the smallest bytes of a device that take longer. Hidden ms do not count.

        An exchange takes no less than if one device alone had bytes. inf: all take less.
        """
        # Beyond the largest shard, as a device may have several.
        points = np.geomspace(max(1.0, n_bytes.min()), _SEVERAL * max(1.0, n_bytes.max()), _POINTS)
        alone, traffic = (
            1.0 * (np.arange(len(self._topology)) == 0),
            np.zeros((len(CHANNELS), len(points), len(self._topology))),
        )
        for channel, each in channels.items():
            traffic[CHANNELS.index(channel)] = each * points[:, None] * alone
        comm = self._model.comm(traffic, np.zeros(traffic.shape[1:]), self._topology)
        # What every device takes part in: one with more bytes may have less to do elsewhere.
        ms = (comm.forward_ms + comm.backward_ms + comm.input_ms).min(-1) - hidden_ms
        ends = np.append(points, np.inf)
        return lambda most_ms: float(ends[np.searchsorted(ms, most_ms * (1 + _TRACE), side="right")])
