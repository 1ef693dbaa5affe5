"""Kinds of sharding: how shards of each kind run in a training step. One row of SHARDING_KINDS defines a kind.

On each device, a step of TorchRec runs one fused op for the shards of each kind and collection.
It also runs one collective on each channel of that kind. A row of SHARDING_KINDS gives:

- where such a shard may live,
- over which batch its op runs,
- what its channels carry,
- what stays in memory.

`lower`, memory checks, searches, replays, exports and reports read these rows. Nothing else knows a kind.
To add a kind, add a row. If it brings a collective that was not measured yet, measure that too.

Shapes: C channels, L traffic slots (lower.py), D devices. A formula takes numbers or arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import ROWS_OVER
from shardcore.core.topology import Topology
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.step.collectives import Collective, collective_by_name
from shardcore.step.memory_timeline import Stages
from shardcore.step.scopes import WORLD, Group, Scope, groups_in_topology, scope_by_name, scopes_of_domain

Bytes = Callable[[Any, Any, Problem], Any]
"""(weights, outputs, problem) -> bytes that a device's rows of a shard enter into a channel in one step.

weights, outputs: bytes of its weights, and of its outputs.
"""


@dataclass(frozen=True)
class Channel:
    """A collective among groups of devices. Each channel runs at most once forward and once backward.

    collective: a name of step.collectives.COLLECTIVES.
    group: scope of its groups, a name of step.scopes.SCOPES.
    """

    collective: str
    group: str = WORLD

    @property
    def definition(self) -> Collective:
        """The definition of the channel's collective. Raises ShardCoreError for an unknown one."""
        return collective_by_name(self.collective)

    @property
    def scope(self) -> Scope:
        """The scope of the channel's groups of devices. Raises ShardCoreError for an unknown one."""
        return scope_by_name(self.group)

    @property
    def name(self) -> str:
        """The channel's collective and scope, as a key."""
        return f"{self.collective} {self.group}"

    @property
    def description(self) -> str:
        """The channel's collective and scope as text."""
        return self.definition.words + self.scope.words


@dataclass(frozen=True, eq=False)
class ShardingKind:
    """A kind of sharding as it runs in one collection: its channels, device groups and memory.

    name: in placements and files.
    words: description for people.
    shared_by: the sets of devices that may share a shard.
    divides_rows: True if each device of a group has an even range of rows. Otherwise each has all rows.
    cuts_columns: True if a shard may have only some of the columns.
    local_batch: True if its op runs over a device's share of the batch. Otherwise over the global batch.
    dense_gradient: True if a device keeps a gradient of the shard's size.
    ids: the channel by which devices send each other the ids of its shards. None: each has its own samples'.
    channels: bytes that its shards enter into each channel.
    sequence_channels: the same for tables whose lookups are not pooled. None: TorchRec runs no such tables.
    torchrec: the sharding types that TorchRec runs in this way: of whole tables, of tables cut by columns,
      others.
    sequence: True if it runs tables whose lookups are not pooled (see `sequence_kind`).
    tower_channels: bytes that its pooled shards enter into each channel where the job has towers (see
      `channels_in_job`), by the domain that has a tower. Of others, and None: the same as without.
    collection: name of the collection whose tables it runs (see `sharding_kind_for_table`).
    rows_over: domain of links.ROWS_OVER that it divides rows over. A job divides them over one of these. "": it
      divides them over all devices, or not.
    """

    name: str
    words: str
    shared_by: Callable[[Topology], tuple[Group, ...]]
    divides_rows: bool
    cuts_columns: bool
    local_batch: bool
    dense_gradient: bool
    ids: Channel | None
    channels: Mapping[Channel, Bytes]
    sequence_channels: Mapping[Channel, Bytes] | None
    torchrec: tuple[str, ...]
    sequence: bool = False
    tower_channels: Mapping[str, Mapping[Channel, Bytes]] | None = None
    collection: str = ""
    rows_over: str = ""

    def device_groups(self, topology: Topology) -> tuple[Group, ...]:
        """The groups of devices that may share a shard of this kind, under the topology's (or default) division of
        rows.
        """
        return self.shared_by(topology) if self.rows_over in ("", topology.row_domain) else ()

    def possible_groups(self, topology: Topology) -> tuple[Group, ...]:
        """The groups of devices that may share a shard of this kind, under any division of rows that the topology
        allows.
        """
        return self.device_groups(topology) if topology.rows_over else self.shared_by(topology)

    @property
    def is_on_one_device(self) -> bool:
        """True if each shard of this kind is on a single device, with all rows of its columns."""
        return self.cuts_columns and not self.divides_rows

    @property
    def may_cache_rows(self) -> bool:
        """True if shards of this kind may have rows in host memory, behind a cache."""
        return not self.dense_gradient

    def torchrec_type(self, cut: bool) -> str:
        """TorchRec's sharding type of this kind, for tables that are cut by columns (where it has that), or whole."""
        return self.torchrec[cut and self.cuts_columns]

    @cached_property
    def sequence_kind(self) -> ShardingKind | None:
        """The variant of this kind for tables with unpooled lookups. None if TorchRec runs none."""
        if self.sequence_channels is None:
            return None
        return replace(self, channels=self.sequence_channels, sequence=True, tower_channels=None)

    @property
    def memory_stages(self) -> Stages:
        """Memory buffers of this kind's op and collectives in the four stages of a step."""
        first, *others = (channel.definition for channel in self.channels)
        with_another = first.memory_with_another if others else None
        stages = (first.memory_of_sequences if self.sequence else with_another) or first.memory
        if not stages:
            raise ShardCoreError(f"collective {first.name!r} carries ids; it has no memory in stages")
        return stages

    def channels_in_job(self, job: Job, topology: Topology) -> Mapping[Channel, Bytes]:
        """The channels of this kind in a job, each with a formula for the bytes that a shard enters into it.

        Towers (DMT, arXiv 2403.00877) split the exchange of outputs in two. Each host has one, or each pod where
        TorchRec divides rows over pods. Let a host have L devices, and outputs of T bytes for the global batch of
        B samples, o of them on some device. Let r be the ratio.

        1. Within the host, a device sends each of the L those outputs that samples of its number on any host
           need: o / L bytes to each, o in all. Then each device has all outputs of its tower for B / L
           samples: T / L bytes.
        2. A tower module makes r times less of them.
        3. Across hosts, devices of the same number exchange what is left: each enters T / (L r).

        A formula sees one shard, so it enters o / r in step 3. The sum over the host is T / r, as it should
        be. `spread_over_domains` then divides it evenly, T / (L r) a device. Where devices of a host sum their
        parts (rows divided), step 1 is that sum: T = o, and the formula enters o / (L r) itself.
        Backward, gradients go the same way back.
        """
        if job.tower_ratio is None or self.tower_channels is None:
            return self.channels
        return self.tower_channels.get(topology.row_domain, self.channels)

    def op_batch(self, problem: Problem) -> int:
        """Number of samples that the op of this kind runs over: the local or the global batch."""
        return problem.local_batch if self.local_batch else problem.global_batch


def _single_device_groups(topology: Topology) -> tuple[Group, ...]:
    """One group of devices for each single device."""
    return tuple((d,) for d in range(len(topology)))


def _one_group_of_all(topology: Topology) -> tuple[Group, ...]:
    """The only device group of a kind that uses all devices together."""
    return groups_in_topology(topology, WORLD)


def _groups_by_domain(scope: str) -> Callable[[Topology], tuple[Group, ...]]:
    """Function that gives a topology's device groups, one a domain (host, pod); () where that is no separate kind.

    TorchRec needs domains of equal size, of hosts of equal size. A single domain equals all devices. Domains of one
    device divide nothing, and those that join none equal others.
    """

    def domain_groups(topology: Topology) -> tuple[Group, ...]:
        domains = groups_in_topology(topology, scope)
        there = topology.equal_hosts and topology.joins_devices(scope_by_name(scope).domain)
        return domains if there and 1 < len(domains) < len(topology) else ()

    return domain_groups


def row_domain_of(topology: Topology, placements: Iterable[Placement] = ()) -> str:
    """The domain over which a job divides rows ("host" or "pod"), by the topology, a plan, or the default."""
    used = (domain for p in placements if (domain := sharding_kind_by_name(p.kind).rows_over))
    return topology.rows_over or next(used, topology.row_domain)


def pod_size(topology: Topology, placements: Iterable[Placement] = ()) -> int:
    """Number of hosts over which a job divides rows, by the topology, a plan, or the default.

    A job needs TORCHREC_RESOLVED_POD_SIZE of this value. Without the variable it divides rows over hosts.
    """
    domains = topology.devices_by_domain(ROWS_OVER[row_domain_of(topology, placements)])
    return max(1, len(domains[0]) // len(topology.devices_by_host[0]))


def row_domain_choices(topology: Topology) -> tuple[str, ...]:
    """The domains ("host", "pod") over which a job may divide rows in a topology."""
    able = (k.rows_over for k in SHARDING_KINDS.values() if k.rows_over and k.possible_groups(topology))
    # Without a kind for the default, such as on hosts of one device, a job has no rows over domains.
    return (
        (topology.row_domain,) if topology.rows_over else tuple(dict.fromkeys([topology.row_domain, *able]))
    )


def _entered_outputs(weights: Any, outputs: Any, problem: Problem) -> Any:
    """Bytes that a shard enters into a channel of outputs: those of the global batch."""
    return outputs


def _compressed_by_tower(entering: Bytes) -> Bytes:
    """A formula for bytes entered into a channel, divided by the compression of tower modules."""
    return lambda weights, outputs, problem: entering(weights, outputs, problem) / problem.job.tower_ratio


def _entered_gradients(weights: Any, outputs: Any, problem: Problem) -> Any:
    """Bytes that a shard enters into an all-reduce: a dense gradient of the type of its weights."""
    return weights


IDS = Channel("all_to_all_ids")
"""Carries ids to devices that hold all rows (see id_bytes.py)."""
BUCKETIZED_IDS = Channel("all_to_all_ids_bucketized")
"""Carries ids to devices that hold row ranges, once each device has put its own in buckets."""

_SCOPES_OF = {domain: scopes_of_domain(level) for domain, level in ROWS_OVER.items()}
"""Scopes within domains over which rows may be divided, and across them."""


def _rows_over_domain_kind(name: str, domain: str) -> ShardingKind:
    """The kind of sharding that divides rows over the devices of one domain, such as a host."""
    within, across = _SCOPES_OF[domain]

    def domain_output_bytes(weights: Any, outputs: Any, problem: Problem) -> Any:
        """Bytes of outputs on each device after the devices of a domain have summed and divided them."""
        return outputs / len(groups_in_topology(problem.topology, within)[0])

    return ShardingKind(
        name,
        f"rows divided over one {domain}",
        _groups_by_domain(within),
        divides_rows=True,
        cuts_columns=True,
        local_batch=False,
        dense_gradient=False,
        ids=BUCKETIZED_IDS,
        channels={
            Channel("reduce_scatter", within): _entered_outputs,
            Channel("all_to_all", across): domain_output_bytes,
        },
        sequence_channels=None,
        torchrec=("table_row_wise", "grid_shard"),
        # Only towers of such domains: rows of one tower are not divided over several.
        tower_channels={
            domain: {
                Channel("reduce_scatter", within): _entered_outputs,
                Channel("all_to_all", across): _compressed_by_tower(domain_output_bytes),
            }
        },
        rows_over=domain,
    )


SHARDING_KINDS: Mapping[str, ShardingKind] = {
    sharding_kind.name: sharding_kind
    for sharding_kind in (
        ShardingKind(
            "column",
            "all rows on one device",
            _single_device_groups,
            divides_rows=False,
            cuts_columns=True,
            local_batch=False,
            dense_gradient=False,
            ids=IDS,
            channels={Channel("all_to_all"): _entered_outputs},
            sequence_channels={Channel("all_to_all"): _entered_outputs},
            torchrec=("table_wise", "column_wise", "table_column_wise"),
            tower_channels={
                domain: {
                    Channel("all_to_all", within): _entered_outputs,
                    Channel("all_to_all", across): _compressed_by_tower(_entered_outputs),
                }
                for domain, (within, across) in _SCOPES_OF.items()
            },
        ),
        ShardingKind(
            "row",
            "rows divided over all devices",
            _one_group_of_all,
            divides_rows=True,
            cuts_columns=False,
            local_batch=False,
            dense_gradient=False,
            ids=BUCKETIZED_IDS,
            channels={Channel("reduce_scatter"): _entered_outputs},
            # Each lookup is on one device only, so there is nothing to sum.
            sequence_channels={Channel("all_to_all"): _entered_outputs},
            torchrec=("row_wise",),
        ),
        *(_rows_over_domain_kind("host_row", "host"), _rows_over_domain_kind("pod_row", "pod")),
        ShardingKind(
            "data_parallel",
            "a replica on every device",
            _one_group_of_all,
            divides_rows=False,
            cuts_columns=False,
            local_batch=True,
            dense_gradient=True,
            ids=None,
            channels={Channel("all_reduce"): _entered_gradients},
            sequence_channels={Channel("all_reduce"): _entered_gradients},
            torchrec=("data_parallel",),
        ),
    )
}
"""The kinds by name. Ops, and collectives of one direction, run in this order."""

RUNS: tuple[ShardingKind, ...] = (
    *SHARDING_KINDS.values(),
    *(x.sequence_kind for x in SHARDING_KINDS.values() if x.sequence_kind),
)
"""Runs: tables of a kind as one op on each device. Pooled tables first, then sequences.

Each collection has separate runs (`sharding_kind_for_table`). These are those of the collection without a name.
"""

ID_CHANNELS: tuple[Channel, ...] = tuple(dict.fromkeys(x.ids for x in SHARDING_KINDS.values() if x.ids))
"""The channels of input distribution."""
_PLAIN = dict.fromkeys(c for sharding_kind in SHARDING_KINDS.values() for c in sharding_kind.channels)
_IN_TOWERS = (
    of for sharding_kind in SHARDING_KINDS.values() for of in (sharding_kind.tower_channels or {}).values()
)
_WITHIN_TOWERS = (c for of in _IN_TOWERS for c in of if not c.scope.across and c not in _PLAIN)
CHANNELS: tuple[Channel, ...] = (*_WITHIN_TOWERS, *_PLAIN, *ID_CHANNELS)
"""All channels. Arrays of bytes [C, ...] use this order. Exchanges within hosts come before those across.

A device enters its outputs and gradients into a channel. Of ID_CHANNELS, it counts what a device receives.
Where several runs have a channel, such arrays have traffic slots, one after another: [L C, ...], see lower.py.
"""

# Found by its properties, so that no code names a kind.
WHOLE_ROWS = next(kind for kind in SHARDING_KINDS.values() if kind.is_on_one_device)
"""The kind in which one device has all rows. Searches place most tables in this kind."""


def kinds_of_channel(channel: Channel, towers: bool = False) -> str:
    """Names of the kinds of sharding that use a channel, as text, in a job with or without towers."""
    plain = [name for name, x in SHARDING_KINDS.items() if channel in (*x.channels, x.ids)]
    in_towers = [
        name
        for name, x in SHARDING_KINDS.items()
        if channel == x.ids or any(channel in of for of in (x.tower_channels or {"": x.channels}).values())
    ]
    return " and ".join(in_towers if towers else plain or in_towers)


def kinds_on_all_devices(topology: Topology) -> tuple[ShardingKind, ...]:
    """The kinds of sharding whose shards are always on all devices."""
    return tuple(
        k
        for k in SHARDING_KINDS.values()
        if len(topology) > 1 and k.device_groups(topology) == (topology.ranks,)
    )


def sharding_kind_by_name(kind: str) -> ShardingKind:
    """The definition of a kind of sharding. Raises ShardCoreError for an unknown name."""
    if kind not in SHARDING_KINDS:
        raise ShardCoreError(
            f"a placement or constraint has kind {kind!r}; known are {', '.join(SHARDING_KINDS)}"
        )
    return SHARDING_KINDS[kind]


def sharding_kind_for_table(kind: str, table: Table) -> ShardingKind:
    """The sharding kind of the fused op that runs a table by a kind of sharding, together with others of its
    collection.

    Raises ShardCoreError for an unknown kind, or one that runs no such table.
    """
    sharding_kind = sharding_kind_by_name(kind)
    run = sharding_kind.sequence_kind if table.sequence else sharding_kind
    if table.in_host_memory and not sharding_kind.may_cache_rows:
        raise ShardCoreError(
            f"plan places table {table.name!r} by {kind}, with load_factor {table.load_factor:g}; TorchRec has no "
            "rows of it below device memory, so it needs another kind, or load_factor 1"
        )
    if run is None:
        raise ShardCoreError(
            f"plan places table {table.name!r} by {kind}, which TorchRec does not run for a "
            "sequence; it needs another kind"
        )
    return _kind_in_collection(run, table.collection)


@cache  # one object each, for runs are compared by identity
def _kind_in_collection(sharding_kind: ShardingKind, name: str) -> ShardingKind:
    return replace(sharding_kind, collection=name) if name else sharding_kind


def kind_on_one_device(table: Table) -> ShardingKind:
    """The sharding kind of the fused op that runs a table on a single device."""
    return sharding_kind_for_table(WHOLE_ROWS.name, table)


def sharding_kinds_for_tables(tables: Iterable[Table]) -> tuple[ShardingKind, ...]:
    """Sharding kinds of all fused ops that some tables may need, collection by collection, in the order in which they
    run.
    """
    collections = sorted({(t.collection, t.sequence) for t in tables})
    return tuple(
        _kind_in_collection(run, name)
        for name, sequence in collections
        for run in RUNS
        if run.sequence == sequence
    )


def kinds_of_torchrec_type(sharding_type: str) -> list[ShardingKind]:
    """The kinds that TorchRec runs under a sharding type. A topology has at most one of them."""
    return [
        sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_type in sharding_kind.torchrec
    ]


def kind_of_torchrec_type(
    sharding_type: str, topology: Topology | None = None, devices: int | None = None
) -> ShardingKind | None:
    """The kind that TorchRec runs under a sharding type in a topology. None for an unknown type.

    devices: number of devices that share a shard. None: as the topology's rows_over, or the default, has it.
    """
    named = kinds_of_torchrec_type(sharding_type)
    if topology is None or not named:
        return named[0] if named else None
    # A plan of the undecided topology has either kind; the size of its groups tells which.
    sized = [x for x in named if any(len(group) == devices for group in x.possible_groups(topology)[:1])]
    return next(iter([*sized, *(x for x in named if x.device_groups(topology)), *named]))


def even_row_share(rows: int, n: int) -> int | None:
    """Rows of each device but the last if TorchRec divides a table over n devices: ceil(rows / n).

    None if the last device would get no rows: TorchRec's kernels fail then.
    """
    each = -(-rows // n)
    return each if each * (n - 1) < rows else None


def even_row_ranges(rows: int, n: int) -> list[tuple[int, int]] | None:
    """Row ranges [lo, hi) of n devices that divide a table evenly. None if the last would have no rows."""
    each = even_row_share(rows, n)
    # The last range may be shorter.
    return None if each is None else [(i * each, min((i + 1) * each, rows)) for i in range(n)]


def shards_by_device(placement: Placement) -> Iterator[tuple[int, Shard]]:
    """Each device of a placement, with the shard that it holds."""
    shard, devices = placement.shard, placement.devices
    if not sharding_kind_by_name(placement.kind).divides_rows:
        for device in devices:
            yield device, shard
        return
    # Row ranges are relative to the shard's own first row.
    for device, (lo, hi) in zip(devices, even_row_ranges(shard.rows, len(devices)) or (), strict=True):
        yield device, Shard(shard.table, shard.row_lo + lo, shard.row_lo + hi, shard.col_lo, shard.col_hi)


def merged_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements with all columns of a table that one group of devices holds by one kind merged into one shard.

    TorchRec's planner merges them, and its fused kernel fails on shards of unequal width of one table.
    Columns are interchangeable, so a merged shard starts at its first column and is as wide as all together.
    """
    shards: dict[tuple[Any, ...], list[Shard]] = {}
    for p in placements:
        shards.setdefault((p.kind, p.shard.table.name, p.shard.row_lo, p.devices), []).append(p.shard)
    if len(shards) == len(placements):  # the most common case
        return tuple(placements)
    together = []
    for (kind, _, _, devices), parts in shards.items():
        lo = min(s.col_lo for s in parts)
        shard = replace(parts[0], col_lo=lo, col_hi=lo + sum(s.width for s in parts))
        together.append(Placement(kind, shard, devices))
    return tuple(together)


def possible_groups(
    sharding_kind: ShardingKind, rows: int, topology: Topology, allowed: Collection[int] | None
) -> list[Group]:
    """The groups of devices that can share a table of `rows` rows by a kind of sharding.

    allowed: devices where the table may live; None for all.
    """
    # An empty last range would break TorchRec's kernels (see even_row_share).
    return [
        group
        for group in sharding_kind.device_groups(topology)
        if (allowed is None or set(group) <= set(allowed))
        and (not sharding_kind.divides_rows or even_row_share(rows, len(group)))
    ]


def require_valid_placement(placement: Placement, problem: Problem) -> None:
    """Raise ShardCoreError unless a placement's devices and cuts are possible for its kind."""
    sharding_kind, shard, devices = (
        sharding_kind_for_table(placement.kind, placement.shard.table),
        placement.shard,
        placement.devices,
    )
    what = f"plan places {shard.label} by {sharding_kind.name} on {device_names(devices)}"
    if max(devices) >= len(problem.topology):
        raise ShardCoreError(
            f"plan places {shard.label} on device {max(devices)}; "
            f"problem {problem.name!r} has devices 0 to {len(problem.topology) - 1}"
        )
    if sharding_kind.is_on_one_device and len(devices) == 1 and shard.has_all_rows:
        return  # the most common case
    groups = sharding_kind.possible_groups(problem.topology)
    if sharding_kind.rows_over and sharding_kind.rows_over != (
        domain := problem.topology.rows_over or sharding_kind.rows_over
    ):
        raise ShardCoreError(
            f"{what}; topology.rows_over is {domain!r}: it needs to be {sharding_kind.rows_over!r}, or left out"
        )
    if not groups:
        raise ShardCoreError(
            f"{what}; it needs several hosts with the same number of devices each, 2 or more"
        )
    # The order matters: row ranges are dealt out in it.
    if devices not in groups:
        shown = " or ".join(device_names(g) for g in groups[:3]) + " or ..." * (len(groups) > 3)
        raise ShardCoreError(f"{what}; such a shard lives on {shown}, in this order")
    if not shard.has_all_rows or not (sharding_kind.cuts_columns or shard.width == shard.table.dim):
        raise ShardCoreError(
            f"{what}; it needs all rows{'' if sharding_kind.cuts_columns else ' and all columns'} of the table"
        )
    if sharding_kind.divides_rows and not even_row_share(shard.rows, len(devices)):
        raise ShardCoreError(
            f"{what}; {shard.rows} rows in even ranges would leave the last of {len(devices)} devices none"
        )


def device_names(devices: Sequence[int]) -> str:
    """Numbers of devices as text, such as "devices 0, 1"; the first few of many."""
    shown = ", ".join(map(str, devices[:8])) + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
    return f"device{'s' * (len(devices) > 1)} {shown}"
