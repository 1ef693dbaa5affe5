"""Lookups of a model's tables: pooling and access, from means, batches of data, or a traced step of a job.

Shapes: L ids of a feature, S samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.core.validation import require, short_repr
from shardcore.io import job_folder
from shardcore.step import access
from shardcore.tables.deduplication import deduplication_factor
from shardcore.tables.hash_tables import routed_row_shares
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.torchrec.modules import ModelTable

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    # By feature, or by (table, feature).
    Means = Mapping[str | tuple[str, str], float]
    Lookups = Means | Iterable[KeyedJaggedTensor] | KeyedJaggedTensor | str | Path


@dataclass(frozen=True)
class LookupData:
    """Lookups in batches of a model's data, by feature.

    ids: [L] of all batches.
    lengths: [S] ids of each sample; of a variable feature, of each bag.
    samples: S. A batch whose features differ in it (VBE) has as many local batches as ranks in its strides.
    variable: features of such batches.
    weighted: features whose ids have weights.
    """

    ids: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]
    samples: Mapping[str, int]
    variable: tuple[str, ...]
    weighted: frozenset[str]

    @property
    def bags_per_sample(self) -> dict[str, float]:
        """Mean bags per sample of each feature with variable batches (VBE)."""
        return {f: len(self.lengths[f]) / self.samples[f] for f in self.variable}


def read_lookups(lookups: Lookups | LookupData, local_batch: int) -> Means | LookupData:
    """Read batches or a job's folder into LookupData; mean lookups by feature are returned as given.

    lookups: a path is that of a job's folder (torchrec/profiler.py).
    local_batch: samples of a rank.

    Raises ShardCoreError for a folder without lookups.
    """
    if isinstance(lookups, (str, Path)):
        return _read_job_lookups(Path(lookups), local_batch)
    if isinstance(lookups, (Mapping, LookupData)):
        return lookups  # type: ignore[return-value]  # no mapping is a KeyedJaggedTensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ids, lengths = defaultdict[str, list[np.ndarray]](list), defaultdict[str, list[np.ndarray]](list)
    samples, variable, weighted = defaultdict[str, int](int), dict[str, None](), set[str]()
    # A single KeyedJaggedTensor is not an Iterable.
    for batch in lookups if isinstance(lookups, Iterable) else [lookups]:
        # Not by `require`: the text of a batch takes long to make.
        if not isinstance(batch, KeyedJaggedTensor):
            raise ShardCoreError(
                f"lookups has {batch!r:.80}; it needs KeyedJaggedTensors, or mean lookups by feature, or the "
                "folder of a job that ShardCoreProfiler traced"
            )
        is_variable = batch.variable_stride_per_key()
        # In a batch with different strides (VBE), all of its features count as variable.
        variable |= dict.fromkeys(batch.keys() if is_variable else ())
        n_samples = local_batch * _n_ranks_in_batch(batch) if is_variable else batch.stride()
        # TorchRec sends weights that are there, whether a collection uses them or not.
        weighted.update(batch.keys() if batch.weights_or_none() is not None else ())
        # Weighted, plain and sequence features may come in separate tensors.
        for feature, values in batch.to_dict().items():
            samples[feature] += n_samples
            ids[feature].append(values.values().cpu().numpy())
            lengths[feature].append(values.lengths().cpu().numpy())
    # One array for each feature: statistics are over all batches together.
    return LookupData(
        # Empty parts may be of another type, which would spread to all ids.
        {f: np.concatenate([part for part in parts if len(part)] or parts[:1]) for f, parts in ids.items()},
        {f: np.concatenate(parts) for f, parts in lengths.items()},
        samples,
        tuple(variable),
        frozenset(weighted),
    )


def _read_job_lookups(folder: Path, local_batch: int) -> LookupData:
    """Lookups of all ranks in the newest traced step of a job's folder."""
    step = job_folder.newest_step_folder(folder)
    ranks = [job_folder.read_lookups(path) for path in sorted(step.glob("rank-*.lookups.npz"))]
    require(
        bool(ranks),
        f"{step} has no lookups (rank-0.lookups.npz), which ShardCoreProfiler writes",
    )
    ids, lengths = ({f: np.concatenate([rank[f][i] for rank in ranks]) for f in ranks[0]} for i in (0, 1))
    samples = {f: len(of) for f, of in lengths.items()}
    # Features that differ in their samples have batches of their own.
    variable = tuple(samples) if len(set(samples.values())) > 1 else ()
    samples |= dict.fromkeys(variable, local_batch * len(ranks))
    return LookupData(ids, lengths, samples, variable, frozenset())


def _n_ranks_in_batch(batch: KeyedJaggedTensor) -> int:
    """Number of ranks whose local batches a KeyedJaggedTensor with variable strides (VBE) holds.

    Raises ShardCoreError if its features have strides of different ranks, or other strides than lengths.
    """
    of_ranks = batch.stride_per_key_per_rank()
    if len(ranks := {len(of_key) for of_key in of_ranks}) != 1:
        raise ShardCoreError(
            f"lookups has stride_per_key_per_rank {short_repr(of_ranks)}; each feature needs a stride of each rank"
        )
    strides, n_lengths = batch.stride_per_key(), batch.lengths().numel()
    require(
        sum(strides) == n_lengths,
        f"lookups has strides {short_repr(strides)}, {sum(strides)} in all, and {n_lengths} lengths; they need to "
        "add up to as many",
    )
    return ranks.pop()


def bags_per_sample_by_table(
    model_tables: Mapping[str, ModelTable], bags: Mapping[str, float]
) -> dict[str, tuple[float, ...]]:
    """Bags per sample of each feature (Table.strides), for tables that have a feature with variable batches (VBE).

    bags: bags of a feature, for a sample.
    """
    strided = {
        name: tuple(bags.get(f, 1.0) for f in t.config.feature_names)
        for name, t in model_tables.items()
        if set(bags) & set(t.config.feature_names)
    }
    # TorchRec pads features of an EmbeddingCollection to one batch, the largest.
    most = defaultdict[str, float](float)
    for name, strides in strided.items():
        most[model_tables[name].path] = max(most[model_tables[name].path], *strides)
    return {
        name: strides if model_tables[name].pooled else (most[model_tables[name].path],) * len(strides)
        for name, strides in strided.items()
    }


def pooling_and_access(
    model_tables: Mapping[str, ModelTable], lookups: Means | LookupData, global_batch: int
) -> Mapping[str, tuple[float, Reuse | Zipf]]:
    """Mean lookups per sample and access statistics of each table, from means or from data."""
    if isinstance(lookups, LookupData):
        return _pooling_and_access_from_data(model_tables, lookups, global_batch)
    return _pooling_and_access_from_means(model_tables, lookups)


def _pooling_and_access_from_means(
    model_tables: Mapping[str, ModelTable], lookups: Means
) -> dict[str, tuple[float, Zipf]]:
    # A typing error in a pair would silently fall back to the feature's mean.
    pairs = {(name, feature) for name, t in model_tables.items() for feature in t.config.feature_names}
    if unknown := next((key for key in lookups if isinstance(key, tuple) and key not in pairs), None):
        raise ShardCoreError(
            f"lookups are for {unknown}, which the model does not have; it has (table, feature) "
            f"{', '.join(map(str, sorted(pairs)[:5]))}{', ...' * (len(pairs) > 5)}"
        )

    def mean(name: str, feature: str) -> float:
        key = (name, feature) if (name, feature) in lookups else feature
        if key not in lookups:
            known = sorted(map(str, lookups))[:5]
            raise ShardCoreError(f"feature {feature!r} of table {name!r} has no lookups; given are {known}")
        value = lookups[key]
        require(
            isinstance(value, Real) and not isinstance(value, bool),
            f"feature {feature!r} of table {name!r} has lookups {value!r}; it needs a number, the mean of a sample",
        )
        return value

    return {
        name: (sum(mean(name, f) for f in t.config.feature_names), DEFAULT_ACCESS)
        for name, t in model_tables.items()
    }


def _pooling_and_access_from_data(
    model_tables: Mapping[str, ModelTable], data: LookupData, global_batch: int
) -> dict[str, tuple[float, Reuse]]:
    statistics = {}
    for name, table in model_tables.items():
        first, *_ = features = table.config.feature_names
        for feature in features:
            require(
                feature in data.ids,
                f"feature {feature!r} of table {name!r} is not in the data; there are {list(islice(data.ids, 5))}",
            )
            n = data.samples[feature]
            # Fewer samples would show too little reuse of ids in a batch.
            require(
                n >= global_batch,
                f"lookups has {n} samples of feature {feature!r}; it needs a global batch of the model's "
                f"data, {global_batch}, or more",
            )
            require(
                n == data.samples[first],
                f"lookups has {n} samples of feature {feature!r} and {data.samples[first]} of {first!r}; "
                f"table {name!r} needs as many of each",
            )
            # Managed collision maps raw ids, which may be any.
            if table.managed_collision is None:
                _require_ids_in_range(data.ids[feature], feature, name, table.config.num_embeddings)
        # All features of a table look up the same rows, so their ids count together.
        ids, n = np.concatenate([data.ids[f] for f in features]), data.samples[first]
        statistics[name] = len(ids) / n, access.reuse_from_ids(ids, n)
    return statistics


def _require_ids_in_range(ids: np.ndarray, feature: str, table: str, rows: int) -> None:
    require(
        not len(ids) or ids.dtype.kind in "iu",
        f"feature {feature!r} has ids of type {ids.dtype}; table {table!r} needs whole numbers",
    )
    if len(ids) and not 0 <= ids.min() <= ids.max() < rows:
        raise ShardCoreError(
            f"feature {feature!r} has ids {ids.min()} to {ids.max()}, table {table!r} rows 0 to {rows - 1}; give "
            "ids as the collection gets them"
        )


def deduplication_by_table(
    model_tables: Mapping[str, ModelTable],
    lookups: Means | LookupData,
    groups: Sequence[Sequence[str]],
    batch: int,
) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Deduplication factor of each table (Table.dedup), and the tables that share an inverse index, by group."""
    if not groups:
        return {}, []
    if not isinstance(lookups, LookupData):
        raise ShardCoreError(
            f"deduplicated has {list(groups[0])}; its factor is read from batches of data, so lookups need to be "
            "KeyedJaggedTensors"
        )
    if lookups.variable:
        raise ShardCoreError(
            f"deduplicated has {list(groups[0])}, but feature {lookups.variable[0]!r} has a number of samples of "
            "its own in the data (VBE); it needs data that is not deduplicated yet"
        )
    group_of = {feature: tuple(group) for group in groups for feature in group}
    tables: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, table in model_tables.items():
        group, *others = {group_of.get(f) for f in table.config.feature_names}
        require(
            not others,
            f"table {name!r} has features {table.config.feature_names}; deduplicated needs all of them in one "
            "group, or none",
        )
        if group is not None:
            tables[group].append(name)
    for group in map(tuple, groups):
        require(
            group in tables,
            f"deduplicated has {list(group)}; no table has these features",
        )
    # Features of a group share an inverse index, so one factor holds for all of its tables.
    factors = {
        group: deduplication_factor([(lookups.ids[f], lookups.lengths[f]) for f in group], batch)
        for group in tables
    }
    return (
        {name: factors[group] for group, names in tables.items() for name in names},
        [tuple(names) for names in tables.values() if len(names) > 1],
    )


def measure_row_shares(
    tables: Sequence[Table], model_tables: Mapping[str, ModelTable], data: LookupData, n_devices: int
) -> tuple[Table, ...]:
    """Tables with the measured shares of lookups in their ranges of rows (Table.row_shares), where ids are uneven.

    Of hash tables, where their routing sends raw ids.

    n_devices: devices that may divide rows.
    """
    shared = []
    for table in tables:
        ids = np.concatenate([data.ids[f] for f in model_tables[table.name].config.feature_names])
        if table.managed_collision:
            shares = routed_row_shares(ids, table.managed_collision, n_devices)
        else:
            # Few ids, or ids that lie as if hashed, give no shares.
            shares = access.row_shares_from_ids(ids, table.rows, n_devices)
        shared.append(replace(table, ordered=True, row_shares=shares) if shares else table)
    return tuple(shared)
