"""The nouns: frozen, validated when made, plain data.

Each is a value: equal by content, hashable, and without behaviour beyond its fields. Other nouns: topology.py
(devices), access_statistics.py (lookups), constraints.py, step_cost.py and io/measurements.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Protocol

from shardcore.core import catalog
from shardcore.core.access_statistics import ManagedCollision, Reuse, RowShares, Zipf
from shardcore.core.constraints import Constraints, allowed_devices_by_table, require_tower_domains
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.html import first_rows_html
from shardcore.core.job import PIPELINES, Job
from shardcore.core.payloads import Payload, block_multiple, payload_by_name, require_payload
from shardcore.core.tiers import BELOW, DEVICE, TIERS, MemoryTier
from shardcore.core.topology import Topology
from shardcore.core.validation import (
    MOST_BATCH,
    MOST_DIM,
    MOST_FEATURES,
    MOST_POOLING,
    MOST_ROWS,
    MOST_TABLES,
    Record,
    Rule,
    describe_differences,
    entry_count_within,
    first_duplicate,
    number_within,
    one_of,
    require,
    require_name,
    require_path_name,
    require_types,
    short_repr,
)

PRECISION_BYTES = {name: precision.bytes for name, precision in catalog.PRECISIONS.items()}
OPTIMIZERS = tuple(catalog.OPTIMIZERS)
OUTPUT_BYTES = 4
"""Bytes of one pooled output or gradient element: FBGEMM pools into FP32 and TorchRec sends it so by default."""

MIN_WIDTH = 4
"""Columns are cut in multiples of this: FBGEMM's kernels load rows as vectors of four."""


_DIM = (
    number_within(MIN_WIDTH, MOST_DIM),
    Rule(lambda dim: dim % MIN_WIDTH == 0, f"FBGEMM needs a multiple of {MIN_WIDTH}"),
)
_PRECISIONS = Rule(
    lambda names: all(name in PRECISION_BYTES for name in names.split("+")),
    f"known are {', '.join(PRECISION_BYTES)}, and several joined by +",
)


@dataclass(frozen=True)
class Table(Record, noun="table", hash_once=True):
    """One embedding table.

    name: differs from those of the problem's other tables.
    rows: ids that it embeds.
    dim: columns.
    pooling: mean lookups per sample, of all its features together.
    access: statistics of the rows that those lookups hit.
    precision: data type of the weights.
    ordered: True if ids are ordered by frequency, row 0 the most accessed, or as `row_shares` give it. Else
        ids count as hashed.
    features: number of features that look up in it. Each has its own pooled output.
    weighted: True if each lookup has a weight, which travels with its id.
    sequence: True if each lookup is an output, as in an EmbeddingCollection. Else they are pooled.
    dedup: samples of a device's batch for each distinct value of the table's features. Where features are
        deduplicated (RecD, arXiv 2211.05239), a value travels and is looked up once, and its output is
        copied by the device that needs it. `pooling` and `access` are those of all samples.
    collection: the EmbeddingBagCollection or EmbeddingCollection that has it, such as its path in the model.
        Each runs separate ops and exchanges. Pooled tables and sequences of one name are two.
    load_factor: share of its rows that a cache in device memory holds, while all are in `tier`. 1: all are in
        device memory, and there is no cache.
    tier: memory that has all rows where load_factor is below 1, a name of core.tiers.BELOW.
    strides: bags of each feature for a sample, where features have batches of their own (TorchRec's VBE), or
        several poolings. A device's batch of a feature is its stride times that of samples. (): one each. Of
        sequences, the largest of their collection for each, to which TorchRec pads.
    row_shares: lookups of ranges of rows, as measured. Only where ids are ordered.
    managed_collision: memory of the map from raw ids to rows. None: there is no map.
    """

    name: Annotated[str, require_name]
    rows: Annotated[int, number_within(1, MOST_ROWS)]
    dim: Annotated[int, *_DIM]
    pooling: Annotated[float, number_within(0, MOST_POOLING)]
    access: Reuse | Zipf = Zipf(1.05)
    precision: Annotated[str, one_of(PRECISION_BYTES)] = "fp32"
    ordered: bool = False
    features: Annotated[int, number_within(1, MOST_FEATURES)] = 1
    weighted: bool = False
    sequence: bool = False
    dedup: Annotated[float, number_within(1, MOST_BATCH)] = 1.0
    collection: str = ""
    load_factor: Annotated[float, number_within(0, 1)] = 1.0
    row_shares: RowShares | None = None
    managed_collision: ManagedCollision | None = None
    tier: Annotated[str, one_of(BELOW)] = BELOW[0]
    strides: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """Shape and lookups, and other fields only where different from the default."""
        shape = [f"{self.rows} x {self.dim}", f"pooling={self.pooling:g}"]
        given = {
            f.name: getattr(self, f.name) for f in fields(self)[4:] if getattr(self, f.name) != f.default
        }
        return f"Table({', '.join([repr(self.name), *shape, *(f'{k}={v!r}' for k, v in given.items())])})"

    def __post_init__(self) -> None:
        super().__post_init__()
        t = f"table {self.name!r}"
        if self.collection:
            require_name(self.collection, f"the collection of {t}")
        tiers = self.hash_table_tiers
        require(
            tiers is None
            or (
                (0 < self.load_factor < 1 if tiers else not self.in_host_memory)
                and self.tier in (tiers or BELOW)
            ),
            f"{t} has load_factor {self.load_factor:g} and tier {self.tier!r}; rows of its hash table are in "
            + (
                f"{', '.join(tiers)} memory, with a cache, so it needs that tier, and load_factor above 0, below 1"
                if tiers
                else "device memory, so it needs load_factor 1"
            ),
        )
        most = self.lower_tier.most_cached
        require(
            bool(self.kernel) and (self.load_factor <= most or not self.in_host_memory),
            f"{t} has load_factor {self.load_factor:g} and tier {self.tier!r}; TorchRec runs it there with a cache of "
            f"at most {most:.0%} of its rows, so it needs a share above 0, at most {most:g}",
        )
        require(
            self.ordered or self.row_shares is None,
            f"{t} has row_shares and ordered false; it needs ordered true, or no row_shares",
        )
        require(
            len(self.strides) in (0, self.features) and all(0 < s <= MOST_BATCH for s in self.strides),
            f"{t} has strides {short_repr(self.strides)} for its {self.features} features; it needs one for each, "
            "above 0, or none",
        )
        buckets = self.managed_collision.buckets if self.managed_collision else 1
        require(
            self.rows % buckets == 0,
            f"{t} has {self.rows} rows in {buckets} buckets of equal size; it needs a multiple, such as "
            f"{-(-self.rows // buckets) * buckets}",
        )
        require(
            self.pooling == 0 or not isinstance(self.access, Reuse) or sum(self.access.bins) > 0,
            f"{t} has pooling {self.pooling} but an empty reuse histogram",
        )

    @property
    def reuse(self) -> Reuse:
        """Reuse histogram of the table's accesses; only for tables whose `access` is a Reuse."""
        assert isinstance(self.access, Reuse), self.name
        return self.access

    @property
    def zipf_alpha(self) -> float:
        """Exponent of the power law of the table's accesses; only for tables whose `access` is a Zipf."""
        assert isinstance(self.access, Zipf), self.name
        return self.access.alpha

    @property
    def bytes(self) -> int:
        """Bytes of the table's weights."""
        return self.rows * self.dim * PRECISION_BYTES[self.precision]

    @property
    def in_host_memory(self) -> bool:
        """True if the table's rows are in a memory tier of the hosts (DRAM, SSD), whether or not a device caches
        some."""
        return self.load_factor < 1

    @property
    def hash_table_tiers(self) -> Mapping[str, MemoryTier] | None:
        """Memory tiers of the hosts where a hash table has to keep all rows: {} if device memory, None if free to
        choose."""
        return self.managed_collision.hash_form.tiers if self.managed_collision else None

    @property
    def lower_tier(self) -> MemoryTier:
        """The table's memory tier below device memory, with that tier's compute kernels."""
        return (self.hash_table_tiers or TIERS)[self.tier]

    @property
    def shares_cache(self) -> bool:
        """True if part of the table's rows is in a device cache that all tables of a fused op share."""
        return 0 < self.load_factor < 1 and self.lower_tier.shares_cache

    def cached_rows(self, rows: int) -> int:
        """Number of rows in device memory among `rows` rows of the table; all rows where the table has no cache."""
        return max(round(self.load_factor * rows), self.load_factor > 0)

    @property
    def kernel(self) -> str:
        """TorchRec's compute kernel for the table's shards, except replicas."""
        if not self.in_host_memory:
            return TIERS[DEVICE].kernel
        return self.lower_tier.cached_kernel if self.load_factor else self.lower_tier.kernel

    @property
    def mean_bags(self) -> float:
        """Mean pooled bags per sample after deduplication, by the features' strides."""
        return (sum(self.strides) or self.features) / self.dedup

    @property
    def has_variable_batch(self) -> bool:
        """True if the table's features have batches of another size than the samples, by strides or deduplication."""
        return self.dedup > 1 or bool(self.strides)

    @property
    def lookups_per_sample(self) -> float:
        """Mean lookups per sample after deduplication."""
        return self.pooling / self.dedup


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table: rows [row_lo, row_hi) × columns [col_lo, col_hi).

    A pure value, the key of every cache.
    """

    table: Table
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int

    def __post_init__(self) -> None:
        t = self.table
        try:
            rows_fit = 0 <= self.row_lo < self.row_hi <= t.rows
            columns_fit = 0 <= self.col_lo < self.col_hi <= t.dim
        except (AttributeError, TypeError):
            require_types(self, "a shard")
            raise
        if rows_fit and columns_fit and self.width % MIN_WIDTH == self.col_lo % MIN_WIDTH == 0:
            return  # searches make many: messages only where they are needed
        require(
            rows_fit,
            f"shard of table {t.name!r} has rows [{self.row_lo}, {self.row_hi}); the table has [0, {t.rows})",
        )
        right = f"FBGEMM needs multiples of {MIN_WIDTH}" if columns_fit else f"the table has [0, {t.dim})"
        raise ShardCoreError(f"shard of table {t.name!r} has columns [{self.col_lo}, {self.col_hi}); {right}")

    @classmethod
    def whole(cls, table: Table) -> Shard:
        """The shard that is a whole table."""
        return cls(table, 0, table.rows, 0, table.dim)

    @property
    def rows(self) -> int:
        return self.row_hi - self.row_lo

    @property
    def width(self) -> int:
        """Number of columns of the shard."""
        return self.col_hi - self.col_lo

    @property
    def bytes(self) -> int:
        """Bytes of the shard's weights."""
        return self.rows * self.width * PRECISION_BYTES[self.table.precision]

    @property
    def has_all_rows(self) -> bool:
        """True if the shard has all rows of its table."""
        return self.rows == self.table.rows

    @property
    def label(self) -> str:
        return f"{self.table.name}[{self.row_lo}:{self.row_hi}, {self.col_lo}:{self.col_hi}]"


@dataclass(frozen=True)
class Placement(Record, noun="a placement"):
    """A shard, its kind of sharding, and its devices.

    kind: a name of kinds.SHARDING_KINDS. It is never inferred.
    shard: cells that the devices hold together.
    devices: a group of that kind, in its order.
    """

    kind: str
    shard: Shard
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.devices) > 0 and len(set(self.devices)) == len(self.devices) and min(self.devices) >= 0,
            f"placement of {self.shard.label} names devices {self.devices}; it needs one or more different ones",
        )


@dataclass(frozen=True)
class Plan(Record, noun="a plan"):
    """Placements of all shards.

    placements: together they cover each cell of each table once.
    provenance: algorithm, seed, model and data version, search settings. Equality ignores it.
    """

    placements: tuple[Placement, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def placements_by_table(self) -> dict[str, list[Placement]]:
        """The plan's placements by table name."""
        placements: dict[str, list[Placement]] = {}
        for p in self.placements:
            placements.setdefault(p.shard.table.name, []).append(p)
        return placements

    def __repr__(self) -> str:
        tables = {p.shard.table for p in self.placements}
        devices = {d for p in self.placements for d in p.devices}
        by = f", by {self.provenance['algorithm']}" if "algorithm" in self.provenance else ""
        return f"Plan({len(tables)} tables in {len(self.placements)} shards on {len(devices)} devices{by})"

    def _repr_html_(self) -> str:
        """HTML table for notebooks: the plan's largest shards."""
        rows = [
            (
                p.shard.table.name,
                p.kind,
                f"{p.shard.col_lo}:{p.shard.col_hi} of {p.shard.table.dim}",
                ", ".join(map(str, p.devices)),
                f"{p.shard.bytes / 2**30:.3f}",
            )
            for p in sorted(self.placements, key=lambda p: -p.shard.bytes)
        ]
        return first_rows_html(
            repr(self), ("shard of", "kind", "columns", "devices", "GiB"), rows, words=(1, 2, 3)
        )


def precision_names(tables: Iterable[Table]) -> str:
    """Precision of some tables' weights; where tables differ, all names, sorted and joined by "+"."""
    return "+".join(sorted({t.precision for t in tables}))


@dataclass(frozen=True)
class Setting(Record, noun="setting"):
    """Conditions that a cost model is valid for.

    hardware: a device's name, such as "nvidia-h200".
    batch: the global batch: samples that a model-parallel op processes in one step.
    precision: data type of the weights. "fp16+fp32" where tables differ.
    optimizer: fused into the backward op.
    forward_payload, backward_payload: forms in which outputs and gradients travel.
    """

    hardware: Annotated[str, require_path_name]
    batch: Annotated[int, number_within(1, MOST_BATCH)]
    precision: Annotated[str, _PRECISIONS] = "fp32"
    optimizer: Annotated[str, one_of(catalog.OPTIMIZERS)] = "exact_sgd"
    forward_payload: Annotated[str, require_payload] = "fp32"
    backward_payload: Annotated[str, require_payload] = "fp32"

    @property
    def payloads(self) -> dict[str, str]:
        """Payload names by direction: outputs forward, gradients backward."""
        return {"forward": self.forward_payload, "backward": self.backward_payload}

    def __str__(self) -> str:
        payloads = f", payloads {self.forward_payload} and {self.backward_payload}"
        short = {*self.payloads.values()} != {"fp32"}
        return f"{self.hardware}, batch {self.batch}, {self.precision}, {self.optimizer}{payloads * short}"


class KindAttributes(Protocol):
    """Attributes of a kind of sharding that constraints concern (see kinds.ShardingKind)."""

    @property
    def name(self) -> str: ...
    @property
    def divides_rows(self) -> bool: ...
    @property
    def cuts_columns(self) -> bool: ...


@dataclass(frozen=True)
class Problem(Record, noun="problem", hash_once=True):
    """Tables to place on a topology.

    name: also that of the folder of its plans.
    tables: their names differ.
    topology: devices and links. Topology.of_hosts makes equal hosts.
    global_batch: samples of one training step over all devices, which divide it evenly.
    optimizer: optimizer of the embeddings.
    constraints: pins, groups of tables, kinds of sharding and memory that stays free.
    job: properties of a step around the embeddings.

        Problem("p", [Table("t0", 1_000_000, 64, 20.0)], Topology.of_hosts(2, 8, memory_gib=80), 65_536)
    """

    name: Annotated[str, require_path_name]
    tables: Annotated[tuple[Table, ...], entry_count_within(1, MOST_TABLES)]
    topology: Topology
    global_batch: Annotated[int, number_within(1, MOST_BATCH)]
    optimizer: Annotated[str, one_of(catalog.OPTIMIZERS)] = "exact_sgd"
    constraints: Constraints = Constraints()
    job: Job = Job()

    def __post_init__(self) -> None:
        super().__post_init__()
        p, n_devices = f"problem {self.name!r}", len(self.topology)
        require(
            self.global_batch % n_devices == 0,
            f"{p} has global_batch {self.global_batch}, which {n_devices} devices do not divide evenly",
        )
        names, twice = {t.name for t in self.tables}, first_duplicate(t.name for t in self.tables)
        require(twice is None, f"{p} has several tables named {twice!r}; names need to differ")
        for verb, tables in (
            ("forbids splitting", self.constraints.unsplit),
            ("pins", dict(self.constraints.pinned)),
            ("keeps together", self.group_by_table),
            ("has constraints.kinds of", self.restricted_kinds_by_table),
            ("has constraints.min_widths of", self.min_widths),
        ):
            unknown = sorted(set(tables) - names)
            require(not unknown, f"{p} {verb} {unknown[:3]}, which it does not have")
        self.pinned_devices  # noqa: B018 (it refuses pins that mean nothing)
        for t in self.tables:
            require(
                not t.in_host_memory or self.topology.memory_of(t.tier) is not None,
                f"{p} has rows of table {t.name!r} in {TIERS[t.tier].words}; its topology needs "
                f"memory of tier {t.tier!r}",
            )
            why_not = t.in_host_memory and t.lower_tier.why_unsupported(t.precision, self.optimizer)
            require(not why_not, f"{p} has rows of table {t.name!r} in {TIERS[t.tier].words}, and {why_not}")
            buckets = t.managed_collision.buckets if t.managed_collision else 1
            require(
                buckets == 1 or buckets % n_devices == 0,
                f"{p} has table {t.name!r} of {buckets} buckets, which {n_devices} devices do not divide; it needs a "
                f"multiple, such as {-(-buckets // n_devices) * n_devices}",
            )
            unit = n_devices * (t.managed_collision.hash_form.slot_rows if t.managed_collision else 1)
            require(
                unit == n_devices or t.rows % unit == 0,
                f"{p} has table {t.name!r} of {t.rows} rows, of which {n_devices} devices do not have whole buckets of "
                f"{unit // n_devices}; it needs a multiple, such as {-(-t.rows // unit) * unit}",
            )
        for name, codec in zip(self.job.payloads.values(), self.payload_codecs, strict=True):
            require(
                not (codec.cuda_only and self.topology.on_cpu),
                f"{p} has payload {name!r} on CPUs; FBGEMM has that codec on CUDA only, so it needs another",
            )
        if self.job.tower_ratio is not None:
            pooled = (t.name for t in self.tables if not t.sequence)
            where, topology = {name: self.allowed_devices(name) for name in pooled}, self.topology
            require_tower_domains(where, topology.row_domains, topology.row_domain, p)

    def __repr__(self) -> str:
        return (
            f"Problem({self.name!r}, {len(self.tables)} tables, {self.topology!r}, batch {self.global_batch})"
        )

    def _repr_html_(self) -> str:
        """HTML table for notebooks: the problem's largest tables."""
        rows = [
            (t.name, f"{t.rows:,}", t.dim, f"{t.pooling:g}", f"{t.bytes / 2**30:.3f}")
            for t in sorted(self.tables, key=lambda t: -t.bytes)
        ]
        return first_rows_html(repr(self), ("table", "rows", "dim", "lookups a sample", "GiB"), rows)

    @property
    def local_batch(self) -> int:
        """Samples of one training step on each device."""
        return self.global_batch // len(self.topology)

    @cached_property
    def precision(self) -> str:
        """Precision of the tables' weights; where tables differ, all names, sorted and joined by "+"."""
        return precision_names(self.tables)

    @property
    def replica_optimizer(self) -> str:
        """Optimizer of replicated (data-parallel) tables, a name of catalog.DENSE_OPTIMIZERS."""
        return self.job.replica_optimizer or catalog.OPTIMIZERS[self.optimizer].dense or self.optimizer

    @cached_property
    def restricted_kinds_by_table(self) -> Mapping[str, tuple[str, ...]]:
        """Allowed kinds of sharding by table, for tables that constraints.kinds restricts."""
        return dict(self.constraints.kinds)

    def can_run_table(self, kind: KindAttributes, table: Table) -> bool:
        """Tell if a kind of sharding may run a table, by constraints, shard width, payload codecs and pipeline.

        Searches cut columns only where a device has all rows, so others have all columns.
        """
        return (
            kind.name in self.restricted_kinds_by_table.get(table.name, (kind.name,))
            and (
                table.dim <= self.topology.max_shard_columns or (kind.cuts_columns and not kind.divides_rows)
            )
            and not self.why_codec_fails(kind, table)
            and not self.why_replicas_fail(kind)
        )

    @cached_property
    def payload_codecs(self) -> tuple[Payload, Payload]:
        """Payloads (encodings) of outputs and of gradients."""
        return payload_by_name(self.job.forward_payload), payload_by_name(self.job.backward_payload)

    @cached_property
    def codecs_may_fail(self) -> bool:
        """True if a payload codec of the job may fail on an exchange of some table."""
        sums_fail = len(self.topology) > 1 and any(codec.summed == () for codec in self.payload_codecs)
        return sums_fail or any(self.column_multiple(table) > 1 for table in self.tables)

    def column_multiple(self, table: Table) -> int:
        """Number that the column count of a table's shards has to be a multiple of, so that exchanges are whole codec
        blocks.

        Several tables on a device may make whole blocks together. Searches do not rely on it.
        """
        if len(self.topology) == 1:
            return 1
        # Devices send each other a local batch of pooled outputs, and any number of lookups or distinct values.
        even = not (table.sequence or table.has_variable_batch)
        rows = table.features * self.local_batch if even else 1
        there, back = self.payload_codecs
        return math.lcm(1 if there.pads and even else block_multiple(there, rows), block_multiple(back, rows))

    def why_replicas_fail(self, kind: KindAttributes) -> str:
        """Reason that TorchRec would fail if a kind of sharding replicated tables under the job's training pipeline; ""
        if it would work."""
        if kind.divides_rows or kind.cuts_columns or not PIPELINES[self.job.pipeline].looks_up_ahead:
            return ""
        return (
            f"{kind.name} has replicas, which the {self.job.pipeline} pipeline updates after it looked them up for the "
            "next batch: TorchRec fails"
        )

    def why_codec_fails(self, kind: KindAttributes, table: Table) -> str:
        """Reason that a payload codec of the job fails on the exchanges of a table sharded by a kind; "" if none
        fails."""
        if len(self.topology) == 1:
            return ""
        job, sums = self.job, kind.divides_rows and not table.sequence
        for name, codec in zip(job.payloads.values(), self.payload_codecs, strict=True):
            if sums and codec.summed == ():
                return f"{kind.name} sums outputs, and TorchRec's {name} codec fails in a reduce-scatter"
        # Exchanges of outputs that are not sums: of all rows or sequences, and of sums across hosts.
        blocks = (
            self.column_multiple(table) if kind.cuts_columns or (kind.divides_rows and table.sequence) else 1
        )
        if not table.dim % blocks:
            return ""
        return (
            f"{kind.name} exchanges {table.dim} columns, and codecs of {job.forward_payload} forward, "
            f"{job.backward_payload} backward take multiples of {blocks} at local batch {self.local_batch}"
        )

    @cached_property
    def min_widths(self) -> Mapping[str, int]:
        """Fewest columns of a shard, by table, for tables that constraints.min_widths restricts."""
        return dict(self.constraints.min_widths)

    def column_block_width(self, table: Table) -> int:
        """Width of a table's column block: the smallest allowed shard, of which all its shards have multiples.

        It is the smallest that divides the table evenly, respects constraints.min_widths, and is what codecs
        take. Of a table that they do not take, all columns.
        """
        least = min(self.min_widths.get(table.name, MIN_WIDTH), table.dim)
        multiple = math.lcm(MIN_WIDTH, self.column_multiple(table))
        widths = range(-(-least // multiple) * multiple, table.dim + 1, multiple)
        return next((width for width in widths if table.dim % width == 0), table.dim)

    def max_shard_width(self, table: Table) -> int:
        """Most columns that FBGEMM's kernels take of a table, rounded down to a multiple of `column_block_width`; 0 if
        none.
        """
        block = self.column_block_width(table)
        return min(table.dim, self.topology.max_shard_columns // block * block)

    @cached_property
    def group_by_table(self) -> Mapping[str, tuple[str, ...]]:
        """Group of tables that have to be on one device (constraints.together), by the name of each member."""
        return {name: group for group in self.constraints.together for name in group}

    @cached_property
    def pinned_devices(self) -> Mapping[str, tuple[int, ...]]:
        """Allowed devices, ascending, of each table that may not be on all devices.

        A table kept together with a pinned one counts as pinned.
        """
        topology, constraints = self.topology, self.constraints
        devices_of = allowed_devices_by_table(
            dict(constraints.pinned),
            constraints.together,
            dict(zip(topology.hosts, topology.devices_by_host, strict=True)),
            f"problem {self.name!r}",
        )
        return {name: devices for name, devices in devices_of.items() if len(devices) < len(topology)}

    @cached_property
    def uncut_tables(self) -> frozenset[str]:
        """Names of tables that no plan cuts: unsplit, kept together with other tables, or pinned to a single device."""
        return frozenset(
            (
                *self.constraints.unsplit,
                *self.group_by_table,
                *(name for name, devices in self.pinned_devices.items() if len(devices) == 1),
            )
        )

    def constraint_against_cuts(self, name: str) -> str:
        """Name of the constraint that keeps a table of `uncut_tables` whole, for messages."""
        return next(
            f"constraints.{kind}"
            for kind, names in (
                ("unsplit", self.constraints.unsplit),
                ("together", self.group_by_table),
                ("pinned", self.pinned_devices),
            )
            if name in names
        )

    def allowed_devices(self, name: str) -> tuple[int, ...]:
        """Devices where a table may be, ascending: all devices, unless pins restrict the table."""
        return self.pinned_devices.get(name, self.topology.device_indices)

    def setting(self, hardware: str) -> Setting:
        """Setting (hardware, batch, precision, optimizer, payloads) of the problem's training steps on some
        hardware."""
        return Setting(
            hardware, self.global_batch, self.precision, self.optimizer, *self.job.payloads.values()
        )

    def require_setting(self, setting: Setting) -> None:
        """Raise SettingMismatch unless a cost model for `setting` is valid for this problem."""
        own = self.setting(self.topology.hardware or setting.hardware)
        if own != setting:
            remedy = (
                "give a model of each precision (plan --model A --model B; to publish, promote.also of params.yaml)"
                if "+" in own.precision
                else "give a model of the problem's setting by --model (measure and train one), or change the problem"
            )
            raise SettingMismatch(
                f"problem {self.name!r} has another setting than the cost model: "
                f"{describe_differences(own, setting)}; {remedy}"
            )
