"""The nouns: frozen, validated when made, plain data.

Everything here is a value: equal by content, hashable, and free of behaviour beyond what follows from its own
fields. Nothing of ours is imported.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

REUSE_BINS = 17
"""Bins of a reuse histogram: bin k holds unique rows seen (2^(k-1), 2^k] times, bin 0 once, bin 16 more than
2^15 times."""

PRECISION_BYTES = {"fp32": 4, "fp16": 2}
OPTIMIZERS = ("exact_sgd", "rowwise_adagrad")
OUTPUT_BYTES = 4
"""Bytes of one pooled output or gradient element: FBGEMM pools into FP32 and TorchRec sends it so by default.
"""

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_reduce")
PAYLOADS = ("fp32", "bf16")
"""What travels between ranks; pooled outputs and gradients are FP32 at both ends."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
MOST_CHARACTERS = 300
"""Of an error's message; a longer one is cut in the middle."""

# What a noun may be at most. Anything beyond is a slip or an attack: files are read up to here, and what was
# read can be priced without overflow.
MOST_NAME = 200
MOST_PATH_NAME = 100
"""Characters of a name of a table or host, and of one that becomes the name of a file or folder."""
MOST_TABLES, MOST_DEVICES = 1_000_000, 1 << 16
MOST_ROWS, MOST_DIM, MOST_POOLING = 1 << 40, 1 << 16, 1e6
MOST_BATCH, MOST_BYTES = 1 << 40, 1 << 50
MOST_SPEED, SLOWDOWN_LIMIT, MOST_GBPS, MOST_MS = 1e3, 1e9, 1e9, 1e9
MOST_COUNT, MOST_SEED = 1_000_000_000, 1 << 53
"""Of anything that a config counts: samples, evaluations, epochs. And of a seed."""
MOST_REPEATS = 1_000_000
"""Of one timing."""
WAITS_S = (1e-3, 1e6)
"""The ends of a time after which something counts as hung: clocks overflow at longer ones."""
MOST_PINS = 1 << 22
"""Devices in all different sets of them that pins mean: a host's name may mean thousands."""
_PATH_NAME = f"a name of letters, digits and . _ -, {MOST_PATH_NAME} at most"

MIN_WIDTH = 4
"""Columns are cut in multiples of this: FBGEMM's kernels load rows as vectors of four."""


class ShardCoreError(ValueError):
    """What a user can mend: the message names the thing, its value and what would be right.

    It is one line of printable characters, at most `most`: values in it come from files that anybody may have
    written.
    """

    most = MOST_CHARACTERS

    def __init__(self, message: str = ""):
        super().__init__(shortened(escaped(shortened(message, 1 << 12)), self.most))


def escaped(text: str) -> str:
    """Text with all that is not printable (line ends, control characters, lone surrogates) as backslash
    escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int) -> str:
    """Text of at most `most` characters: of a longer one its start and its end, which tell the thing and what
    would be right."""
    if len(text) <= most:
        return text
    end = most * 2 // 5
    return f"{text[:most - end - 5]} ... {text[-end:]}"


class Infeasible(ShardCoreError):
    """No plan fits; the message says what does not fit and by how much, and what would make it fit: so it may
    be longer."""

    most = 3 * MOST_CHARACTERS


class SettingMismatch(ShardCoreError):
    """A problem, dataset or plan belongs to another setting than the model; the message shows both."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShardCoreError(message)


def require_within(record: object, what: str, **ends: tuple[float, float]) -> None:
    """Raise ShardCoreError naming a field of a record that is not within its ends; one that is None may be.
    """
    for name, (low, high) in ends.items():
        value = getattr(record, name)
        if value is not None and not low <= value <= high:
            raise ShardCoreError(f"{what} has {name} {value}; it needs {low:,} to {high:,}")


def is_path_name(name: str) -> bool:
    """Whether a name is a safe name of a file or folder."""
    return len(name) <= MOST_PATH_NAME and re.fullmatch(_NAME, name) is not None


def _require_name(name: str, what: str) -> None:
    _require(0 < len(name) <= MOST_NAME and name.isprintable(),
             f"{what} has name {shortened(repr(name), 80)}; it needs 1 to {MOST_NAME} printable characters")


@dataclass(frozen=True)
class Reuse:
    """Access statistics as a reuse histogram, as in the dlrm_datasets release and NeuroShard.

    bins: REUSE_BINS fractions of the unique rows of a batch, by how often each is seen; they sum to 1, or are
    all 0 for a table that is never accessed. batch: the samples of the batch that it was taken at; without it
    the bins mean nothing.
    """

    bins: tuple[float, ...]
    batch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", tuple(map(float, self.bins)))
        total = sum(self.bins)
        if (len(self.bins) == REUSE_BINS and 0 <= min(self.bins) and max(self.bins) <= 1 + 1e-6
            and 1 <= self.batch <= MOST_BATCH
                and (total == 0 or abs(total - 1) < 1e-3)):
            return  # pools have many: words only where they are needed
        _require(len(self.bins) == REUSE_BINS, f"reuse histogram has {len(self.bins)} bins; it needs "
                 f"{REUSE_BINS}")
        _require(all(0 <= b <= 1 + 1e-6 for b in self.bins), f"reuse bins {self.bins} are not fractions "
                 "within 0 and 1")
        _require(total == 0 or abs(total - 1) < 1e-3, f"reuse bins sum to {total:.6g}; they need to sum to 1 "
                 "(or be all 0)")
        _require(1 <= self.batch <= MOST_BATCH,
                 f"reuse batch is {self.batch}; it needs to be the samples it was taken at, 1 to {MOST_BATCH}")


@dataclass(frozen=True)
class Zipf:
    """Access statistics as a power law: the row of rank r (from 1) is accessed in proportion to r^-alpha; 0
    is uniform."""

    alpha: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", float(self.alpha))
        _require(0 <= self.alpha < 10, f"zipf alpha is {self.alpha}; it needs to be within 0 and 10")


@dataclass(frozen=True)
class Table:
    """One embedding table.

    rows, dim: its shape. pooling: mean lookups per sample. access: which rows those lookups hit. precision:
    of the weights. ordered: ids are ordered by frequency (row 0 the most accessed); otherwise they count as
    hashed over the rows.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    access: Reuse | Zipf = Zipf(1.05)
    precision: str = "fp32"
    ordered: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "pooling", float(self.pooling))  # equal tables have equal files
        _require_name(self.name, "a table")
        t = f"table {self.name!r}"
        _require(1 <= self.rows <= MOST_ROWS, f"{t} has {self.rows} rows; it needs 1 to {MOST_ROWS}")
        _require(MIN_WIDTH <= self.dim <= MOST_DIM and self.dim % MIN_WIDTH == 0,
                 f"{t} has dim {self.dim}; FBGEMM needs a positive multiple of {MIN_WIDTH}, up to {MOST_DIM}")
        _require(0 <= self.pooling <= MOST_POOLING,
                 f"{t} has pooling {self.pooling}; it needs mean lookups per sample, 0 to {MOST_POOLING:.0f}")
        _require(self.precision in PRECISION_BYTES,
                 f"{t} has precision {self.precision!r}; known are {', '.join(PRECISION_BYTES)}")
        if isinstance(self.access, Reuse):
            _require(self.pooling == 0 or sum(self.access.bins) > 0,
                     f"{t} has pooling {self.pooling} but an empty reuse histogram")

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.rows, self.dim, self.pooling, self.access, self.precision, self.ordered))

    def __hash__(self) -> int:  # a table is part of every cache key, so its hash is kept
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # but not across processes, where strings hash otherwise
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}

    @property
    def bytes(self) -> int:
        return self.rows * self.dim * PRECISION_BYTES[self.precision]


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table: rows [row_lo, row_hi) × columns [col_lo, col_hi). A pure value, the key of
    every cache."""

    table: Table
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int

    def __post_init__(self) -> None:
        t = self.table
        if 0 <= self.row_lo < self.row_hi <= t.rows and 0 <= self.col_lo < self.col_hi <= t.dim and (
                self.width % MIN_WIDTH == self.col_lo % MIN_WIDTH == 0):
            return  # searches make many: words only where they are needed
        _require(0 <= self.row_lo < self.row_hi <= t.rows,
                 f"shard of table {t.name!r} has rows [{self.row_lo}, {self.row_hi}); the table has [0, "
                 f"{t.rows})")
        _require(0 <= self.col_lo < self.col_hi <= t.dim,
                 f"shard of table {t.name!r} has columns [{self.col_lo}, {self.col_hi}); the table has [0, "
                 f"{t.dim})")
        raise ShardCoreError(f"shard of table {t.name!r} has columns [{self.col_lo}, {self.col_hi}); "
                             f"FBGEMM needs multiples of {MIN_WIDTH}")

    @classmethod
    def whole(cls, table: Table) -> Shard:
        return cls(table, 0, table.rows, 0, table.dim)

    @property
    def rows(self) -> int:
        return self.row_hi - self.row_lo

    @property
    def width(self) -> int:
        return self.col_hi - self.col_lo

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return self.rows * self.width * PRECISION_BYTES[self.table.precision]

    @property
    def full_rows(self) -> bool:
        return self.rows == self.table.rows

    @property
    def label(self) -> str:
        return f"{self.table.name}[{self.row_lo}:{self.row_hi}, {self.col_lo}:{self.col_hi}]"


@dataclass(frozen=True)
class Placement:
    """A shard, how it is run, and where.

    kind: of sharding, a name of layouts.LAYOUTS. It is never inferred.
    shard: what the devices have together.
    devices: a group of that kind, in its order.
    """

    kind: str
    shard: Shard
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(int(d) for d in self.devices))
        _require(len(self.devices) > 0 and len(set(self.devices)) == len(self.devices)
                 and min(self.devices) >= 0,
                 f"placement of {self.shard.label} names devices {self.devices}; it needs one or more "
                 "different ones")


@dataclass(frozen=True)
class Plan:
    """Where every shard lives. provenance: algorithm, seed, model and data version, search settings; not part
    of equality."""

    placements: tuple[Placement, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Device:
    """memory_bytes: what embeddings may use. speed: compute relative to the measured hardware (2 is twice as
    fast)."""

    memory_bytes: int
    speed: float = 1.0
    host: str = "host-0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speed", float(self.speed))
        _require_name(self.host, "a device's host")
        _require(0 < self.memory_bytes <= MOST_BYTES,
                 f"a device has memory_bytes {self.memory_bytes}; it needs 1 to {MOST_BYTES}")
        _require(1 / MOST_SPEED <= self.speed <= MOST_SPEED,
                 f"a device has speed {self.speed}; it needs {1 / MOST_SPEED:g} to {MOST_SPEED:g}, 1 being "
                 "the measured hardware")


@dataclass(frozen=True)
class Topology:
    """The devices and how they are joined.

    hardware: the setting's name of a device ("nvidia-h200"); None means whatever the cost model was measured
    on. Bandwidths in GB/s per device, latency in ms; None means that the cost model's own measurements hold.
    """

    devices: tuple[Device, ...]
    hardware: str | None = None
    within_host_gbps: float | None = None
    between_hosts_gbps: float | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        _require(1 <= len(self.devices) <= MOST_DEVICES,
                 f"a topology has {len(self.devices) or 'no'} devices; it needs 1 to {MOST_DEVICES}")
        _require(self.hardware is None or is_path_name(self.hardware),
                 f"topology has hardware {self.hardware!r}; it needs {_PATH_NAME}, such as 'nvidia-h200'")
        for name in ("within_host_gbps", "between_hosts_gbps"):
            value = getattr(self, name)
            _require(value is None or 1 / MOST_GBPS <= value <= MOST_GBPS,
                     f"topology has {name} {value}; it needs to be positive, {1 / MOST_GBPS:g} to "
                     f"{MOST_GBPS:g}")
        _require(self.latency_ms is None or 0 <= self.latency_ms <= MOST_MS,
                 f"topology has latency_ms {self.latency_ms}; it needs 0 to {MOST_MS:g}")

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.host for d in self.devices))

    @cached_property
    def on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each of `hosts`."""
        found: dict[str, list[int]] = {host: [] for host in self.hosts}
        for d, device in enumerate(self.devices):
            found[device.host].append(d)
        return tuple(map(tuple, found.values()))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The devices as TorchRec numbers them, host by host."""
        return tuple(d for devices in self.on_hosts for d in devices)

    @property
    def equal_hosts(self) -> bool:
        """Whether all hosts have the same number of devices."""
        return len({len(devices) for devices in self.on_hosts}) == 1

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.hardware, self.within_host_gbps, self.between_hosts_gbps,
                     self.latency_ms))

    def __hash__(self) -> int:  # of thousands of devices, and looked up often
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}


@dataclass(frozen=True)
class Setting:
    """What a cost model is valid for. batch is the global batch: what a model-parallel op processes in one
    step."""

    hardware: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "exact_sgd"

    def __post_init__(self) -> None:
        _require(is_path_name(self.hardware),
                 f"setting has hardware {self.hardware!r}; it needs {_PATH_NAME}, such as 'nvidia-h200'")
        _require(1 <= self.batch <= MOST_BATCH, f"setting has batch {self.batch}; it needs 1 to {MOST_BATCH} "
                 "samples")
        _require(self.precision in PRECISION_BYTES,
                 f"setting has precision {self.precision!r}; known are {', '.join(PRECISION_BYTES)}")
        _require(self.optimizer in OPTIMIZERS, f"setting has optimizer {self.optimizer!r}; known are "
                 f"{', '.join(OPTIMIZERS)}")

    def __str__(self) -> str:
        return f"{self.hardware}, batch {self.batch}, {self.precision}, {self.optimizer}"


@dataclass(frozen=True)
class Constraints:
    """What a user asks of a plan.

    reserved_bytes: kept free on every device. unsplit: names of tables that stay whole. pinned: for some
    tables, the devices that they may live on: indices, or names of hosts, which mean all devices of the host.
    together: groups of tables that live on one device, whole.
    """

    reserved_bytes: int = 0
    unsplit: tuple[str, ...] = ()
    pinned: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unsplit", tuple(self.unsplit))
        _require(0 <= self.reserved_bytes <= MOST_BYTES,
                 f"constraints have reserved_bytes {self.reserved_bytes}; it needs 0 to {MOST_BYTES}")
        for name, where in self.pinned:
            _require(isinstance(where, (list, tuple)) and len(where) > 0
                     and all(isinstance(d, (int, str)) and not isinstance(d, bool) for d in where),
                     f"constraints have table {name!r} pinned to {where!r}; it needs a list of one or more "
                     "devices (such as 0) "
                     "or hosts (such as 'host-0')")
        for group in self.together:
            _require(isinstance(group, (list, tuple)) and len(group) > 0
                     and all(isinstance(name, str) for name in group),
                     f"constraints keep together {group!r}; it needs a list of one or more names of tables")
        object.__setattr__(self, "pinned", tuple((name, tuple(where)) for name, where in self.pinned))
        object.__setattr__(self, "together", tuple(map(tuple, self.together)))
        for name in _twice(name for name, _ in self.pinned):
            raise ShardCoreError(f"constraints pin table {name!r} twice; it needs one list of all its devices")
        for name in _twice(name for group in self.together for name in group):
            raise ShardCoreError(f"constraints keep table {name!r} together twice; it needs to be in one "
                                 "group, once")


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, n in Counter(names).items() if n > 1]


@dataclass(frozen=True)
class Problem:
    """Tables to place on a topology. global_batch: samples of one training step over all devices.

    A table- or column-wise shard looks up the global batch; a replicated one the local batch, global_batch /
    devices.
    """

    name: str
    tables: tuple[Table, ...]
    topology: Topology
    global_batch: int
    optimizer: str = "exact_sgd"
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", tuple(self.tables))
        p = f"problem {self.name!r}"
        _require(is_path_name(self.name), f"{p} needs {_PATH_NAME}, for its plans are kept in a folder of "
                 "that name")
        _require(1 <= len(self.tables) <= MOST_TABLES, f"{p} has {len(self.tables) or 'no'} tables; it needs "
                 f"1 to {MOST_TABLES}")
        _require(1 <= self.global_batch <= MOST_BATCH,
                 f"{p} has global_batch {self.global_batch}; it needs at least 1 sample, at most {MOST_BATCH}")
        _require(self.global_batch % len(self.topology) == 0,
                 f"{p} has global_batch {self.global_batch}, which {len(self.topology)} devices do not "
                 "divide evenly")
        _require(self.optimizer in OPTIMIZERS, f"{p} has optimizer {self.optimizer!r}; known are "
                 f"{', '.join(OPTIMIZERS)}")
        names = [t.name for t in self.tables]
        twice = sorted(_twice(names))
        _require(not twice, f"{p} has several tables named {twice[:3]}; names need to differ")
        precisions = sorted({t.precision for t in self.tables})
        _require(len(precisions) == 1, f"{p} mixes weight precisions {precisions}; a setting has one")
        for verb, tables in (("forbids splitting", self.constraints.unsplit),
                             ("pins", dict(self.constraints.pinned)),
                             ("keeps together", self.bundle_of)):
            unknown = sorted(set(tables) - set(names))
            _require(not unknown, f"{p} {verb} {unknown[:3]}, which it does not have")
        self._require_pins()

    @property
    def local_batch(self) -> int:
        return self.global_batch // len(self.topology)

    @property
    def precision(self) -> str:
        return self.tables[0].precision

    @cached_property
    def bundle_of(self) -> Mapping[str, tuple[str, ...]]:
        """For each table that is kept together with others, the names of the whole group, itself among them.
        """
        return {name: group for group in self.constraints.together for name in group}

    @cached_property
    def pinned(self) -> Mapping[str, tuple[int, ...]]:
        """The tables that may not live everywhere, and the devices where they may: pinned themselves or by
        their group."""
        of_host: dict[str, list[int]] = {}
        for d, device in enumerate(self.topology.devices):
            of_host.setdefault(device.host, []).append(d)
        sets: dict[Any, frozenset[int]] = {}
        room = MOST_PINS

        def known(key: Any, make: Callable[[], frozenset[int]]) -> frozenset[int]:
            nonlocal room
            if key not in sets:
                sets[key] = make()
                room -= len(sets[key])
                _require(room >= 0, f"problem {self.name!r} pins tables to sets of more than {MOST_PINS} "
                         "devices in all; "
                                    "it needs fewer or smaller ones")
            return sets[key]

        own = {name: known(where, lambda w=where: frozenset(d for x in w
                                                            for d in (of_host[x] if isinstance(x, str)
                                                                      else (x,))))
               for name, where in self.constraints.pinned}
        for group in self.constraints.together:
            if shared := frozenset(own[name] for name in group if name in own):
                own.update(dict.fromkeys(group, known(shared, lambda s=shared: frozenset.intersection(*s))))
        ordered = {devices: tuple(sorted(devices)) for devices in set(own.values())}
        return {name: ordered[devices] for name, devices in own.items() if len(devices) < len(self.topology)}

    @cached_property
    def whole(self) -> frozenset[str]:
        """Names of the tables that no plan cuts: unsplit, kept together with others, or pinned to a single
        device."""
        on_one = (name for name, devices in self.pinned.items() if len(devices) == 1)
        return frozenset((*self.constraints.unsplit, *self.bundle_of, *on_one))

    def kept_whole_by(self, name: str) -> str:
        """The constraint for which no plan cuts a table that is in `whole`, for messages."""
        return next(f"constraints.{kind}" for kind, names in (("unsplit", self.constraints.unsplit),
                                                              ("together", self.bundle_of),
                                                              ("pinned", self.pinned)) if name in names)

    def allowed_devices(self, name: str) -> tuple[int, ...]:
        """The devices that a table may live on, rising: all but for pinned tables and those kept together
        with one."""
        return self.pinned.get(name, self._devices)

    @cached_property
    def _devices(self) -> tuple[int, ...]:
        return tuple(range(len(self.topology)))

    def _require_pins(self) -> None:
        """Raise ShardCoreError unless all devices and hosts of pins exist, and each group has a device for
        all of its tables."""
        known = {*self._devices, *self.topology.hosts}
        for name, where in self.constraints.pinned:
            for unknown in (w for w in where if w not in known):
                raise ShardCoreError(f"problem {self.name!r} pins table {name!r} to {unknown!r}; its devices "
                                     f"are 0 to {len(self._devices) - 1}, its hosts "
                                     f"{', '.join(self.topology.hosts[:5])}")
        self.allowed_devices("")  # which bounds the pins
        for group in self.constraints.together:
            if not self.allowed_devices(group[0]):
                pins = dict(self.constraints.pinned)
                shown = ", ".join(f"{n!r} to {list(pins[n])}" for n in group if n in pins)
                raise ShardCoreError(f"problem {self.name!r} keeps tables {list(group[:5])} together but "
                                     f"pins {shown}; "
                                     "they need a device in common")

    def require_setting(self, setting: Setting) -> None:
        """Raise SettingMismatch unless a model for `setting` is valid for this problem."""
        own = Setting(self.topology.hardware or setting.hardware, self.global_batch, self.precision,
                      self.optimizer)
        if own != setting:
            raise SettingMismatch(f"problem {self.name!r} is for ({own}), the cost model for ({setting}); "
                                  "measure and train one for the problem's setting, or change the problem")


@dataclass(frozen=True)
class StepCost:
    """What one training step costs, per device, in ms: five tuples of D numbers.

    A device computes, waits for the last one, and transfers; its total is their sum, the step's the largest
    total.
    """

    forward_compute_ms: tuple[float, ...]
    backward_compute_ms: tuple[float, ...]
    forward_comm_ms: tuple[float, ...]
    backward_comm_ms: tuple[float, ...]
    waiting_ms: tuple[float, ...]

    @property
    def compute_ms(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward_compute_ms, self.backward_compute_ms, strict=True))

    @property
    def device_ms(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(self.compute_ms, self.forward_comm_ms, self.backward_comm_ms,
                                  self.waiting_ms, strict=True)))

    @property
    def total_ms(self) -> float:
        return max(self.device_ms)


@dataclass(frozen=True)
class Replayed(StepCost):
    """A measured StepCost: each part the median over the repeats, per device.

    step: spread over the repeats of the slowest device's total. On a busy machine it lies above total_ms,
    whose parts leave out disturbances one by one. oversubscribed: there were more processes than cores, so
    that the parts measure the scheduler as much as the plan. slowdown: how slow the machine was meanwhile, by
    a dataset's reference op: all times are as the clock showed them, which is slowdown times as much as at
    the dataset's usual speed (1 where no reference op ran).
    """

    step: Spread
    oversubscribed: bool
    slowdown: float = 1.0

    def at_usual_speed(self) -> Replayed:
        parts = {f.name: tuple(ms / self.slowdown for ms in getattr(self, f.name)) for f in fields(StepCost)}
        step = replace(self.step, median_ms=self.step.median_ms / self.slowdown,
                       q1_ms=self.step.q1_ms / self.slowdown,
                       q3_ms=self.step.q3_ms / self.slowdown)
        return replace(self, **parts, step=step, slowdown=1.0)


@dataclass(frozen=True)
class ComputeRequest:
    """Shards to run as one fused op over `batch` samples."""

    shards: tuple[Shard, ...]
    batch: int


@dataclass(frozen=True)
class CommRequest:
    """One collective among D = len(widths) ranks, as workload.Traffic has them and a replay runs them.

    collective, with what travels of `batch` = B rows:
      all_to_all       forward: each rank d sends every other its B / D rows of the widths[d] columns of pooled outputs that d
                       owns; backward: their gradients go the way back
      reduce_scatter   forward: all give [B, max width] partial outputs, padded, and each receives the sum of its B / D rows;
                       backward: an all-gather of their gradients
      all_reduce       backward alone: the sum of dense gradients [B, width], all widths being equal

    payload: "fp32", or "bf16" to which FP32 tensors are cast to travel. hosts: how many the ranks are spread
    over, evenly. start_ms: how much later than the first each rank enters the first exchange (forward, or the
    all-reduce). busy_ms: how long each rank computes before an exchange, as in a step; between ranks that did
    not, CPUs exchange up to three times as fast.
    """

    widths: tuple[int, ...]
    batch: int
    start_ms: tuple[float, ...]
    collective: str = "all_to_all"
    payload: str = "fp32"
    hosts: int = 1
    busy_ms: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(int(w) for w in self.widths))
        object.__setattr__(self, "start_ms", tuple(float(s) for s in self.start_ms))
        ranks = len(self.widths)
        _require(self.collective in COLLECTIVES,
                 f"exchange has collective {self.collective!r}; known are {', '.join(COLLECTIVES)}")
        _require(self.payload in PAYLOADS, f"exchange has payload {self.payload!r}; known are "
                 f"{', '.join(PAYLOADS)}")
        _require(ranks >= 2 and min(self.widths) >= 0 and max(self.widths) > 0,
                 f"exchange has widths {self.widths}; it needs one of 0 or more for each of at least 2 "
                 "ranks, and one above 0")
        _require(self.collective != "all_reduce" or len(set(self.widths)) == 1,
                 f"exchange all_reduce has widths {self.widths}; the same gradient on all ranks has one width")
        _require(self.batch >= 1 and (self.collective == "all_reduce" or self.batch % ranks == 0),
                 f"exchange has batch {self.batch}, which its {ranks} ranks need to divide evenly")
        _require(len(self.start_ms) == ranks and all(0 <= s < math.inf for s in self.start_ms),
                 f"exchange has start_ms {self.start_ms}; it needs one of 0 or more for each of its {ranks} "
                 "ranks")
        _require(self.hosts >= 1 and ranks % self.hosts == 0,
                 f"exchange has hosts {self.hosts}; they need to hold the same number of its {ranks} ranks "
                 "each")
        _require(0 <= self.busy_ms < math.inf, f"exchange has busy_ms {self.busy_ms}; it needs to be 0 or "
                 "more")


@dataclass(frozen=True)
class Spread:
    """Repeats of one timing, in ms."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    repeats: int

    def __post_init__(self) -> None:
        fine = 0 <= self.median_ms <= MOST_MS and 0 <= self.q1_ms <= MOST_MS and 0 <= self.q3_ms <= MOST_MS
        if not (fine and self.repeats >= 1):  # a dataset has many: the words are made only where they are needed
            raise ShardCoreError(f"a timing is {self.median_ms} ms ({self.q1_ms} to {self.q3_ms}) in "
                                 f"{self.repeats} repeats; it needs 0 to {MOST_MS:g} ms, and 1 repeat or more")


@dataclass(frozen=True)
class ComputeSample:
    """One measured op: forward, and backward with the fused optimizer. error: why there is no timing, or
    None.

    slowdown: how slow the machine was meanwhile, 1 being its usual speed; forward and backward are at the
    usual one, so what the clock showed is slowdown times as much. relative_ci: half the 95% interval of the
    median of forward + backward, relative to it. order: its place among what its process measured, from 0.
    measured_at: when it was done, Unix s.
    """

    id: str
    setting: Setting
    request: ComputeRequest
    forward: Spread | None
    backward: Spread | None
    measured_at: float
    error: str | None = None
    slowdown: float = 1.0
    relative_ci: float | None = None
    order: int = 0

    def __post_init__(self) -> None:
        _require_sample(self, self.forward is not None and self.backward is not None)
        _require(1 / SLOWDOWN_LIMIT <= self.slowdown <= SLOWDOWN_LIMIT
                 and (self.relative_ci is None or self.relative_ci >= 0),
                 f"sample {self.id} has slowdown {self.slowdown} and relative_ci {self.relative_ci}; it "
                 f"needs a slowdown of {1 / SLOWDOWN_LIMIT:g} to {SLOWDOWN_LIMIT:g}, and 0 or more")
        _require(self.forward is None or self.backward is None or self.total_ms > 0, f"sample {self.id} took "
                 "0 ms; no op does")
        _require(self.request.batch >= 1, f"sample {self.id} has batch {self.request.batch}; it needs at "
                 "least 1")

    @property
    def total_ms(self) -> float:
        """Median forward + backward. Only where there is a timing."""
        return self.forward.median_ms + self.backward.median_ms


@dataclass(frozen=True)
class CommSample:
    """One measured exchange, per rank: transfer is from the last rank's start to the own end, waiting what
    lies before.

    A cast to and from BF16 is part of the exchange. forward is None for an all_reduce, whose waiting is the
    backward's. order: its place in its gang's run, from 0. oversubscribed: a host had more ranks than cores,
    so that it measures the scheduler as much as the network.
    """

    id: str
    setting: Setting
    request: CommRequest
    forward: tuple[Spread, ...] | None
    backward: tuple[Spread, ...] | None
    waiting_ms: tuple[float, ...] | None
    measured_at: float
    error: str | None = None
    order: int = 0
    oversubscribed: bool = False

    def __post_init__(self) -> None:
        one_way = self.request.collective == "all_reduce"
        _require_sample(self, self.backward is not None and self.waiting_ms is not None
                        and (self.forward is None) == one_way)
        of_ranks = [x for x in (self.forward, self.backward, self.waiting_ms) if x is not None]
        _require(all(len(x) == len(self.request.widths) for x in of_ranks),
                 f"sample {self.id} has {[len(x) for x in of_ranks]} timings; it needs one for each of its "
                 f"{len(self.request.widths)} ranks")
        _require(all(0 <= ms <= MOST_MS for ms in self.waiting_ms or ()),
                 f"sample {self.id} has waiting_ms {self.waiting_ms}; it needs 0 or more")


def _require_sample(sample: ComputeSample | CommSample, is_timed: bool) -> None:
    _require(is_timed or sample.error is not None, f"sample {sample.id} has no timing, and no error for "
             "which there is none")
    _require(0 <= sample.measured_at < math.inf and sample.order >= 0,
             f"sample {sample.id} was measured at {sample.measured_at} with order {sample.order}; it needs 0 "
             "or more")
