"""The options of a problem (step/options.py) as a lower bound mixes them, and lines below their exchanges.

A run is a kind of a collection: its shards on a device are one op, and their bytes exchanges of its own.
Exchanges are priced by lines below their laws: a tangent of a convex law, a chord of a concave one.

Shapes: N options of a run, I bundles, D devices, F features, C channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.types import Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.step.engine.arrays import ARRIVED, ENTERED, RESIDENT
from shardcore.step.exchange_lines import has_concave_exchanges, total_linear_cost
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.kinds import CHANNELS, Channel, ShardingKind, sharding_kind_by_name
from shardcore.step.options import ShardOptions
from shardcore.step.scopes import WORLD, group_members
from shardcore.step.ways import IMPOSSIBLE, reason_not_runnable
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
class RunShards:
    """The shards that a device may have by one kind of a collection. Each device of a group has the same.

    bundle: [N] number of the bundle (`bundles_and_runs`), rising. part: [N] fraction of the bundle.
    codes: [N, F] encodings.
    resident: [N] bytes that a device has of it at all times.
    sent: [N] bytes of outputs of all devices that have it, as they enter the first channel. received: those of ids.
    """

    sharding_kind: ShardingKind
    bundle: np.ndarray
    part: np.ndarray
    codes: np.ndarray
    resident: np.ndarray
    sent: np.ndarray
    received: np.ndarray

    @property
    def is_replicated(self) -> bool:
        """True for shards replicated on all devices, whose gradients are reduced together across collections."""
        return all(channel.definition.dense for channel in self.sharding_kind.channels)


@dataclass(frozen=True)
class LinearCost:
    """ms that an exchange takes at least: `once_ms`, and `byte_ms` for each byte."""

    once_ms: float
    byte_ms: float


def considers_all_widths(problem: Problem) -> bool:
    """True if shards of all column widths are options. False if these would be too many for the limits of time and
    memory.
    """
    return sum(t.dim // problem.column_block_width(t) for t in problem.tables) <= MOST_SHARDS


def space_description(problem: Problem, runs: Sequence[RunShards]) -> str:
    """Plans covered by a lower bound's options, in words."""
    blocks = " or ".join(map(str, sorted({problem.column_block_width(t) for t in problem.tables})))
    widths = f"multiples of {blocks}" if considers_all_widths(problem) else f"{blocks} times powers of two"
    # Groups share whole tables here. Searches also let them share parts (state/column_parts.py).
    others = dict.fromkeys(
        run.sharding_kind.words + " (not in parts)" * run.sharding_kind.cuts_columns
        for run in runs
        if not run.sharding_kind.is_on_one_device
    )
    return ", or with ".join([f"each table whole or cut by columns ({widths})", *others])


@dataclass(frozen=True)
class _LongestCaches:
    """A cost model that encodes tables as if caches kept their rows longest. No plan has tables share caches in which
    their rows stay longer.

    longest: tables with the load factors of these caches.
    """

    model: CostModel
    longest: Mapping[Table, Table]

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        return self.model.encode([replace(s, table=self.longest[s.table]) for s in shards], batch)

    def op_ms(self, sums: np.ndarray) -> np.ndarray:
        return self.model.op_ms(sums)


def bundles_and_runs(
    problem: Problem, model: CostModel, shared: Sequence[ShardingKind] | None
) -> tuple[list[tuple[Table, ...]], list[RunShards]]:
    """Bundles of a problem (tables that plans place together, mostly a single one) by run, and the runs that they may
    have: by columns, and by each kind in `shared` (None: by all). Runs without options are left out.
    """
    longest = dict[Table, Table]()
    # Tables share a cache in one collection only, pooled or not.
    for group in {(t.collection, t.sequence) for t in problem.tables}:
        tables = [t for t in problem.tables if (t.collection, t.sequence) == group]
        held = with_highest_load_factors(tables, problem.global_batch, len(problem.topology))
        longest |= dict(zip(tables, held, strict=True))
    encoder = _LongestCaches(model, longest)
    options = ShardOptions(problem, encoder, map(Shard.whole, problem.tables))
    every = considers_all_widths(problem)
    widths = [(s, n) for s in range(len(options)) for n in _possible_blocks(options, s, every)]
    options.make_shards(*np.array(widths).T)
    # Numbers of bundles, by item and run. By run: bundles, options, and parts of the bundles.
    bundles, found = dict[tuple[int, int], int](), defaultdict[int, list[tuple[int, int, float]]](list)
    for s, n in widths:
        option = int(options.option_numbers(s, n))
        # Tables of a bundle that run differently are a chain of options, each a bundle of its own.
        while option:
            run, following = options.options[option].tolist()
            bundle = bundles.setdefault((s, run), len(bundles))
            # Other shards may be on no device.
            if options.vectors[option, RESIDENT] < IMPOSSIBLE:
                found[run].append((bundle, option, n / options.size[s]))
            option = following
    for y, sharding_kind in enumerate(options.shared_kinds):
        kind, run = sharding_kind_by_name(sharding_kind.name), options.runs.index(sharding_kind)
        for (s, _), bundle in bundles.items() if shared is None or kind in shared else ():
            # The last device has the remaining rows, which are the fewest: others of a group have no less.
            option, table = options.shared_options[1, y, s], options.table_of_item(s)
            # Of ordered rows it may have more to do than others.
            if (
                option
                and len(options.items[s]) == 1
                and not (kind.divides_rows and table.ordered)
                and reason_not_runnable(kind, table, problem) is None
            ):
                found[run].append((bundle, option, 1.0))
    tables = [
        tuple(s.table for sharding_kind, s in options.parts[item] if sharding_kind == options.runs[run])
        for item, run in bundles
    ]
    return tables, [_run_of_options(options, run, found[run]) for run in sorted(found)]


def _possible_blocks(options: ShardOptions, item: int, every: bool) -> Sequence[int]:
    """Blocks of an item that a device may have by columns. every: whether all, or powers of two and the whole item."""
    problem, size = options.problem, int(options.size[item])
    if len(problem.topology) == 1 or options.table_of_item(item).name in problem.uncut_tables:
        return [size]
    if every:
        return range(1, size + 1)
    return [*(1 << k for k in range((size - 1).bit_length())), size]


def _run_of_options(options: ShardOptions, run: int, found: Sequence[tuple[int, int, float]]) -> RunShards:
    """Make the Run of one kind from its options. found: bundle, option, and part of the bundle of each."""
    bundle, number, part = (np.array(x) for x in zip(*found, strict=True))
    sharding_kind, vectors, problem = options.runs[run], options.vectors[number], options.problem
    bytes_of = next(iter(sharding_kind.channels_in_job(problem.job, problem.topology).values()))
    devices = len(sharding_kind.device_groups(problem.topology)[0])
    return RunShards(
        sharding_kind=sharding_kind,
        bundle=bundle,
        part=part,
        codes=vectors[:, options.first_code :],
        resident=vectors[:, RESIDENT],
        sent=devices * bytes_of(1.0, 1.0, problem) * vectors[:, ENTERED],
        received=devices * vectors[:, ARRIVED],
    )


class Exchanges:
    """Linear lower bounds on the exchanges of one kind of sharding.

    mean: outputs and gradients of even bytes, in the mean of devices by speed; per byte of all devices.
    every: the same for every device: without what other groups may wait for by themselves, backward.
    ids: ids of even bytes; per byte of all devices.
    own_outputs, own_ids: from ms to the most bytes that any device can have then.
    """

    def __init__(self, problem: Problem, model: CostModel, run: RunShards, of_bundles: np.ndarray) -> None:
        """of_bundles: bytes in the first channel of each bundle that may be of the kind, of all devices."""
        self._model, self._topology = model, problem.topology
        topology, job, n = problem.topology, problem.job, len(problem.topology)
        channels = run.sharding_kind.channels_in_job(job, topology)
        entering = {channel: bytes_of(1.0, 1.0, problem) for channel, bytes_of in channels.items()}
        # Bytes of all channels are proportional to those of the first.
        sent = {channel: x / next(iter(entering.values())) for channel, x in entering.items()}
        # Groups within domains exchange by themselves: backward, devices of others do not wait for them.
        within = {c: x for c, x in sent.items() if c.group != WORLD and not c.scope.across}
        groups = group_members(next(iter(within)).group if within else WORLD, topology)
        speed = np.array([d.speed for d in topology.devices])
        shares = np.sort(speed[groups].sum(1)) / speed.sum()
        ids: dict[Channel, float] = {run.sharding_kind.ids: 1.0} if run.sharding_kind.ids else {}
        points = self._line_end_points(of_bundles / n, of_bundles.sum() / n * len(groups))
        outputs = self._line_below_exchanges(sent, points, ("forward", "backward"))
        forward = self._line_below_exchanges(within, points, ("forward",))
        backward = self._line_below_exchanges(within, points, ("backward",))

        def line_for_groups(shares: np.ndarray) -> LinearCost:
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
            return LinearCost(once, (outputs.byte_ms - saved) / n)

        # A single device may be of the group that has nothing.
        last = 1.0 * (np.arange(len(groups)) == len(groups) - 1)
        self.mean, self.every = line_for_groups(shares), line_for_groups(last)
        # No device receives more than all ids of all tables.
        collection = run.sharding_kind.collection, run.sharding_kind.sequence
        tables = [t for t in problem.tables if (t.collection, t.sequence) == collection]
        most = float(sum(received_id_bytes(Shard.whole(t), problem) for t in tables))
        received = self._line_below_exchanges(
            ids, self._line_end_points(run.received / n, most), ("forward",)
        )
        self.ids = LinearCost(received.once_ms, received.byte_ms / n)
        self.own_outputs = self._bytes_that_take_longer(sent, run.sent, 0.0)
        self.own_ids = self._bytes_that_take_longer(ids, run.received, job.id_overlap_ms)

    def _line_below_exchanges(
        self, channels: Mapping[Channel, float], points: tuple[float, float], directions: Sequence[str]
    ) -> LinearCost:
        """Line below the ms of exchanges in the given directions, if every device sends equally many bytes.

        points: bytes of a device between which it is below.
        """
        line = total_linear_cost(self._model, channels, self._topology, points, directions)
        byte_ms, once_ms = float(line[:-1].sum()), float(line[-1])
        # Lowered a trace, for rounding.
        return LinearCost(once_ms - _ROUNDING * (once_ms + byte_ms * points[0]), byte_ms)

    def _line_end_points(self, each: np.ndarray, most: float) -> tuple[float, float]:
        """Bytes of a device between which the line through the exchange law is nowhere above the law.

        each: those of the shards or bundles of which some are exchanged. most: of all plans.
        A convex law is above all its tangents. A concave one is above the chord of all that plans may have.
        """
        each = each[each > 0]
        if not has_concave_exchanges(self._model, self._topology) or not len(each):
            return _EVEN_BYTES, _EVEN_BYTES
        least = max(float(each.min()), _LEAST_BYTES)
        return least, max(most, least * (1 + _STEP))

    def _bytes_that_take_longer(
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
        comm = self._model.comm_cost(traffic, np.zeros(traffic.shape[1:]), self._topology)
        # What every device takes part in: one with more bytes may have less to do elsewhere.
        ms = (comm.forward_ms + comm.backward_ms + comm.input_ms).min(-1) - hidden_ms
        ends = np.append(points, np.inf)
        return lambda most_ms: float(ends[np.searchsorted(ms, most_ms * (1 + _TRACE), side="right")])
