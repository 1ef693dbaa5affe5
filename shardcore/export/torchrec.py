"""A Plan to and from a TorchRec ShardingPlan of a model (TorchRec 1.8; every rule here was tried with DistributedModelParallel).

What TorchRec trains, and what of ours it is:

  column_wise      all rows: any widths (multiples of 4) on any devices. table_wise is one part of it; but TorchRec runs an op and
                   an exchange per sharding type, so once a table of a collection is cut by columns, its whole ones are written
                   as column_wise too and join its op, as `lower` has it
  row_wise         a row range on every device, rank r the r-th. TorchRec sends id i to rank i // ceil(rows / devices), whatever
                   the plan says: other ranges would train something else without a word. `torchrec_rows` has a sharder that
                   follows the plan (uneven_rows)
  table_row_wise   a row range on each device of one host, likewise; grid_shard: columns on several hosts, on each of them so.
                   (What they exchange, `lower` does not know: it prices row ranges as if over all devices.)
  data_parallel    a copy on every device; its kernel is dense, its optimizer the user's own

Where rows are not ordered by frequency, which of them a device holds does not matter, so row ranges are dealt out in the order of
the ranks. Columns are always exchangeable, and a device gets one part of a table alone, for TorchRec fails on parts of unequal
widths: a plan comes back with as many columns and rows on each device, consolidated.

Ranks are TorchRec's numbers of devices, host by host.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shardcore.export.torchrec_settings import PLAIN_KERNELS, settings_of, with_settings
from shardcore.search.peers.torchrec import placements_of
from shardcore.search.pieces import column_runs, consolidate, even_rows
from shardcore.types import Placement, Plan, Problem, Shard, ShardCoreError, Table, Topology
from shardcore.workload import device_names, require_cover

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ParameterSharding, ShardingPlan


@dataclass(frozen=True)
class ModelTable:
    """A table of a model: the path of its collection in the module tree, its own name there, its TorchRec config (rows, dim,
    features, data type), and whether the collection pools (an EmbeddingBagCollection does)."""

    path: str
    name: str
    config: Any
    pooled: bool


@dataclass(frozen=True)
class Layout:
    """How TorchRec shards a table: its sharding type, and what each rank holds (nothing said for data_parallel)."""

    sharding_type: str
    parts: tuple[tuple[int, Shard], ...] = ()


def tables_of(module: nn.Module) -> dict[str, ModelTable]:
    """The tables of all EmbeddingBagCollections and EmbeddingCollections in a module, by our names: a table's own name where no
    other collection has it too, else path.name."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    found = []
    for path, child in module.named_modules():
        if type(child) is EmbeddingBagCollection:
            found += [ModelTable(path, c.name, c, True) for c in child.embedding_bag_configs()]
        elif type(child) is EmbeddingCollection:
            found += [ModelTable(path, c.name, c, False) for c in child.embedding_configs()]
    having = Counter(t.name for t in found)
    return {t.name if having[t.name] == 1 else f"{t.path}.{t.name}": t for t in found}


@dataclass(frozen=True)
class Ranks:
    """Devices as TorchRec numbers them, host by host. devices: of each rank. hosts: the ranks of each; none where hosts are
    unequal, which TorchRec does not know."""

    devices: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, topology: Topology) -> Ranks:
        on: dict[str, list[int]] = {host: [] for host in topology.hosts}
        for d, device in enumerate(topology.devices):
            on[device.host].append(d)
        n, equal = len(on[topology.hosts[0]]), len({len(held) for held in on.values()}) == 1
        hosts = tuple(tuple(range(i * n, (i + 1) * n)) for i in range(len(on))) if equal else ()
        return cls(tuple(d for held in on.values() for d in held), hosts)

    @cached_property
    def of_device(self) -> Mapping[int, int]:
        return {device: rank for rank, device in enumerate(self.devices)}

    @property
    def per_host(self) -> int:
        return len(self.hosts[0]) if self.hosts else len(self.devices)


# --- to TorchRec -------------------------------------------------------------------------------------------------------------


def to_torchrec(plan: Plan, problem: Problem, module: nn.Module | str, compute_device: str = "cuda",
                like: ShardingPlan | None = None, uneven_rows: bool = False) -> ShardingPlan:
    """The plan of a model's tables as DistributedModelParallel(module, plan=...) takes it, with fused kernels.

    module: the model; or the path in it of its only EmbeddingBagCollection. compute_device: "cuda" or "cpu". like: a TorchRec
    plan of the same model, whose kernels, cache settings, output types and the rest are kept; without it, those that a plan of
    `from_torchrec` has in its provenance. uneven_rows: allow row ranges that only the sharder of `torchrec_rows` trains.
    Raises ShardCoreError for what TorchRec cannot run, naming the table and why, and where the problem's tables are not the
    model's.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    require_cover(plan, problem)
    theirs = ({t.name: ModelTable(module, t.name, None, True) for t in problem.tables} if isinstance(module, str)
              else _matched(problem, tables_of(module)))
    placed: dict[str, list[Placement]] = defaultdict(list)
    for placement in plan.placements:
        placed[placement.shard.table.name].append(placement)
    ranks = Ranks.of(problem.topology)
    layouts = {name: layout(placed[name], ranks, uneven_rows) for name in theirs}
    kept = {} if like else {name: with_settings(settings, f"table {name!r} of the plan's provenance")
                            for name, settings in plan.provenance.get("torchrec", {}).items()}
    if unknown := sorted(set(kept) - set(theirs)):
        raise ShardCoreError(f"the plan's provenance has settings of table {unknown[0]!r}; the model has {sorted(theirs)[:5]}")
    cut = {theirs[name].path for name, found in layouts.items() if found.sharding_type == "column_wise" and theirs[name].pooled}
    modules: dict[str, Any] = {}
    for name, table in theirs.items():
        found = layouts[name]
        if found.sharding_type == "table_wise" and table.path in cut:
            found = replace(found, sharding_type="column_wise")
        old = like.plan.get(table.path, {}).get(table.name) if like else kept.get(name)
        _require_replicable(found, old, name)
        modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = _sharding(
            found, ranks, compute_device, old)
    _require_sequences(layouts, theirs, compute_device)
    return ShardingPlan(modules)


def layout(placements: Sequence[Placement], ranks: Ranks, uneven_rows: bool = False) -> Layout:
    """How TorchRec shards a table that is placed so (all of its placements, which cover it once).

    Raises ShardCoreError for what it cannot, naming the table and why.
    """
    table, n_devices, rank_of = placements[0].shard.table, len(ranks.devices), ranks.of_device
    for p in placements:
        if len(p.devices) > 1 and (p.shard != Shard.whole(table) or len(p.devices) < n_devices):
            raise ShardCoreError(f"plan replicates {p.shard.label} on {device_names(p.devices)}; TorchRec replicates whole "
                                 f"tables, on all {n_devices} devices")
    if len(placements[0].devices) > 1:
        return Layout("data_parallel")
    joined = [Placement(shard, (d,)) for d in sorted({p.devices[0] for p in placements})
              for shard in _joined(p.shard for p in placements if p.devices[0] == d)]
    if all(p.shard.full_rows for p in joined):
        parts = tuple((rank_of[p.devices[0]], p.shard) for p in consolidate(joined))
        return Layout("table_wise" if len(parts) == 1 else "column_wise", parts)
    slices = _slices(joined, rank_of)
    if len(slices) == 1 and [rank for rank, _ in slices[0]] == list(range(n_devices)):
        return Layout("row_wise", tuple(slices[0] if uneven_rows else _evened(table, slices[0])))
    widths: dict[int, int] = defaultdict(int)
    for held in slices:
        if (on := tuple(rank for rank, _ in held)) not in ranks.hosts:
            raise ShardCoreError(f"plan cuts {_columns(held[0][1])} by rows over {device_names([ranks.devices[r] for r in on])}; "
                                 f"TorchRec needs one row range on each of the {n_devices} devices, or on each of one host "
                                 + (f"({ranks.per_host} each)" if ranks.hosts else "(where hosts are equal; these are not)"))
        _evened(table, held)
        widths[ranks.hosts.index(on)] += held[0][1].width
    return _grid(table, widths, ranks.hosts)


def _grid(table: Table, widths: Mapping[int, int], hosts: Sequence[Sequence[int]]) -> Layout:
    """So many columns on each host, cut by rows over its ranks, and dealt out in the order of the hosts."""
    parts, column = [], 0
    for host in sorted(widths):
        parts += [(rank, Shard(table, lo, hi, column, column + widths[host]))
                  for rank, (lo, hi) in zip(hosts[host], even_rows(table.rows, len(hosts[host])), strict=True)]
        column += widths[host]
    kind = "grid_shard" if len(widths) > 1 else "row_wise" if len(hosts) == 1 else "table_row_wise"
    return Layout(kind, tuple(parts))


def _require_sequences(layouts: Mapping[str, Layout], theirs: Mapping[str, ModelTable], compute_device: str) -> None:
    """Raise ShardCoreError for what TorchRec does for EmbeddingBagCollections alone."""
    width: dict[str, int] = {}
    for name, table in theirs.items():
        found, what = layouts[name], f"table {name!r} of the EmbeddingCollection {table.path!r}"
        if table.pooled:
            continue
        if found.sharding_type in ("table_row_wise", "grid_shard"):
            raise ShardCoreError(f"plan cuts {what} by rows over one host; TorchRec does so for EmbeddingBagCollections alone")
        if found.sharding_type == "data_parallel" and compute_device == "cpu":
            raise ShardCoreError(f"plan replicates {what}; on a CPU TorchRec cannot, for its dense kernel pools there")
        for _, part in found.parts if found.sharding_type == "column_wise" else ():
            if width.setdefault(table.path, part.width) != part.width:
                raise ShardCoreError(f"plan cuts {what} into parts {part.width} wide, and one {width[table.path]}; TorchRec "
                                     "there needs all parts of tables cut by columns equally wide")


def _require_replicable(found: Layout, old: ParameterSharding | None, name: str) -> None:
    if found.sharding_type == "data_parallel" and old is not None and old.compute_kernel not in PLAIN_KERNELS:
        raise ShardCoreError(f"plan replicates table {name!r}, which has kernel {old.compute_kernel}; TorchRec replicates with "
                             "its dense kernel alone, in device memory: change the kernel to 'fused', or the plan")


def _joined(shards: Iterable[Shard]) -> list[Shard]:
    """What one device holds of a table, neighbours in columns and then in rows as one."""
    found: list[Shard] = []
    for shard in sorted(column_runs(shards), key=lambda s: (s.col_lo, s.col_hi, s.row_lo)):
        if found and (found[-1].col_lo, found[-1].col_hi, found[-1].row_hi) == (shard.col_lo, shard.col_hi, shard.row_lo):
            found[-1] = replace(found[-1], row_hi=shard.row_hi)
        else:
            found.append(shard)
    return found


def _slices(placements: Sequence[Placement], rank_of: Mapping[int, int]) -> list[list[tuple[int, Shard]]]:
    """Parts by the columns that they have, from the left, each in the order of the ranks, in which row ranges are dealt out anew
    unless the table's rows are ordered."""
    slices: dict[tuple[int, int], list[tuple[int, Shard]]] = defaultdict(list)
    for p in placements:
        slices[p.shard.col_lo, p.shard.col_hi].append((rank_of[p.devices[0]], p.shard))
    return [_rising(sorted(held, key=lambda part: (part[0], part[1].row_lo))) for _, held in sorted(slices.items())]


def _rising(held: list[tuple[int, Shard]]) -> list[tuple[int, Shard]]:
    table, sizes = held[0][1].table, [shard.rows for _, shard in held]
    if table.ordered or sum(sizes) < table.rows:
        return held
    ends = list(accumulate(sizes))
    return [(rank, replace(shard, row_lo=end - n, row_hi=end)) for (rank, shard), n, end in zip(held, sizes, ends, strict=True)]


def _evened(table: Table, held: Sequence[tuple[int, Shard]]) -> list[tuple[int, Shard]]:
    """The parts with TorchRec's row ranges, where they have these or their sizes in another order: the last of the devices, which
    has the fewest, need not be the last of the ranks. Raises ShardCoreError where they differ otherwise."""
    wanted, n = even_rows(table.rows, len(held)), len(held)
    if wanted is None:
        raise ShardCoreError(f"plan cuts table {table.name!r} of {table.rows} rows over {n} devices; TorchRec would give each "
                             f"{math.ceil(table.rows / n)} and the last none, with which its kernels fail")
    found = [(shard.row_lo, shard.row_hi) for _, shard in held]
    dealt = not table.ordered and sorted(hi - lo for lo, hi in found) == sorted(hi - lo for lo, hi in wanted)
    if found != wanted and not dealt:
        raise ShardCoreError(f"plan cuts {_columns(held[0][1])} by rows at {[lo for lo, _ in found[1:]][:8]}; TorchRec cuts at "
                             f"{[lo for lo, _ in wanted[1:]][:8]}; uneven_rows, with its sharder, allows others over all devices")
    return [(rank, replace(shard, row_lo=lo, row_hi=hi)) for (rank, shard), (lo, hi) in zip(held, wanted, strict=True)]


def _columns(shard: Shard) -> str:
    table = shard.table
    return f"table {table.name!r}" + (f", columns [{shard.col_lo}, {shard.col_hi})," if shard.width < table.dim else "")


def _matched(problem: Problem, theirs: Mapping[str, ModelTable]) -> dict[str, ModelTable]:
    """The model's tables, in its order; raises ShardCoreError unless they are the problem's, in the same shapes."""
    ours = {t.name: t for t in problem.tables}
    if missing := sorted(set(theirs) ^ set(ours)):
        where = "the model lacks" if missing[0] in ours else "the problem lacks"
        raise ShardCoreError(f"problem {problem.name!r} has tables {sorted(ours)[:5]}, the model {sorted(theirs)[:5]}; {where} "
                             f"{missing[0]!r}")
    for name, table in theirs.items():
        shape, found = (ours[name].rows, ours[name].dim), (table.config.num_embeddings, table.config.embedding_dim)
        if shape != found:
            raise ShardCoreError(f"table {name!r} has (rows, dim) {shape} in problem {problem.name!r} and {found} in the model")
    return dict(theirs)


def _sharding(found: Layout, on: Ranks, compute_device: str, old: ParameterSharding | None) -> ParameterSharding:
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.sharding_plan import placement
    from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding

    if found.sharding_type == "data_parallel":
        ranks, spec, kernel = list(range(len(on.devices))), None, "dense"
    else:
        ranks = [rank for rank, _ in found.parts]
        spec = EnumerableShardingSpec([ShardMetadata([s.row_lo, s.col_lo], [s.rows, s.width],
                                                     placement(compute_device, rank, on.per_host)) for rank, s in found.parts])
        kernel = "fused" if old is None or old.sharding_type == "data_parallel" else old.compute_kernel
    base = old or ParameterSharding(found.sharding_type, kernel)
    return replace(base, sharding_type=found.sharding_type, compute_kernel=kernel, ranks=ranks, sharding_spec=spec)


# --- from TorchRec -----------------------------------------------------------------------------------------------------------


def from_torchrec(sharding_plan: ShardingPlan, problem: Problem, module: nn.Module) -> Plan:
    """A TorchRec plan of a model, its planner's or a user's, as ours, consolidated: to price, replay, improve. Settings of tables
    that it has beside their placement are in provenance["torchrec"], by our names: `to_torchrec` writes them again.

    Raises ShardCoreError where the plan, the problem and the model do not have the same tables, and as `placements_of` does.
    """
    theirs = _matched(problem, tables_of(module))
    ours = {t.name: t for t in problem.tables}
    by_path: dict[str, dict[str, Table]] = defaultdict(dict)
    for name, table in theirs.items():
        by_path[table.path][table.name] = ours[name]
    devices, found = Ranks.of(problem.topology).devices, []
    for path, tables in by_path.items():
        if path not in sharding_plan.plan:
            raise ShardCoreError(f"the TorchRec plan has no module {path!r}; it has {sorted(sharding_plan.plan)[:5]}")
        found += placements_of(sharding_plan.plan[path], tables, devices)
    kept = {name: settings for name, table in theirs.items()
            if (settings := settings_of(sharding_plan.plan[table.path][table.name], f"table {name!r}"))}
    plan = Plan(consolidate(found), {"algorithm": "torchrec plan"} | ({"torchrec": kept} if kept else {}))
    require_cover(plan, problem)
    return plan
