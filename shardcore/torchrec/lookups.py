"""Lookups of a model's tables: pooling and access, from means, batches of data or FBGEMM's reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.step import access
from shardcore.tables.deduplication import dedup_of
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.torchrec import fbgemm_statistics
from shardcore.torchrec.modules import ModelTable

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    # By feature, or by (table, feature).
    Means = Mapping[str | tuple[str, str], float]
    Lookups = Means | Iterable[KeyedJaggedTensor] | KeyedJaggedTensor | str | Path


def variable_features(lookups: Lookups) -> tuple[str, ...]:
    """Features of batches whose features differ in their numbers of samples (VBE)."""
    if isinstance(lookups, (str, Path, Mapping)):
        return ()
    batches = lookups if isinstance(lookups, Iterable) else [lookups]
    return tuple(
        dict.fromkeys(
            f for batch in batches if getattr(batch, "variable_stride_per_key", bool)() for f in batch.keys()
        )
    )


def statistics_of(
    theirs: Mapping[str, ModelTable], lookups: Lookups, global_batch: int
) -> dict[str, tuple[float, Reuse | Zipf]]:
    """Pooling and access of each table.

    A batch whose features differ in their numbers of samples (VBE) is a step of all ranks. Its lookups count
    as those of global_batch samples.
    """
    if isinstance(lookups, (str, Path)):
        return _reported(theirs, lookups)
    if isinstance(lookups, Mapping):
        return _given(theirs, lookups)
    # A single KeyedJaggedTensor is not an Iterable.
    return _measured(theirs, lookups if isinstance(lookups, Iterable) else [lookups], global_batch)


def _given(theirs: Mapping[str, ModelTable], lookups: Means) -> dict[str, tuple[float, Zipf]]:
    pairs = {(name, feature) for name, t in theirs.items() for feature in t.config.feature_names}
    if unknown := next((key for key in lookups if isinstance(key, tuple) and key not in pairs), None):
        raise ShardCoreError(
            f"lookups are for {unknown}, which the model does not have; it has (table, feature) "
            f"{', '.join(map(str, sorted(pairs)[:5]))}{', ...' * (len(pairs) > 5)}"
        )

    def mean(name: str, feature: str) -> float:
        key = (name, feature) if (name, feature) in lookups else feature
        if key not in lookups:
            raise ShardCoreError(
                f"feature {feature!r} of table {name!r} has no lookups; given are {sorted(map(str, lookups))[:5]}"
            )
        found = lookups[key]
        if not isinstance(found, Real) or isinstance(found, bool):
            raise ShardCoreError(
                f"feature {feature!r} of table {name!r} has lookups {found!r}; it needs a number, the mean of a sample"
            )
        return found

    return {
        name: (sum(mean(name, f) for f in t.config.feature_names), DEFAULT_ACCESS)
        for name, t in theirs.items()
    }


def _reported(theirs: Mapping[str, ModelTable], path: str | Path) -> dict[str, tuple[float, Reuse]]:
    return fbgemm_statistics.matched(
        fbgemm_statistics.read_statistics(path),
        {
            name: (t.path, t.name, t.config.num_embeddings, t.config.embedding_dim)
            for name, t in theirs.items()
        },
    )


def _measured(
    theirs: Mapping[str, ModelTable], batches: Iterable[KeyedJaggedTensor], global_batch: int
) -> dict[str, tuple[float, Reuse]]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ids: dict[str, list[np.ndarray]] = defaultdict(list)
    samples: dict[str, int] = defaultdict(int)
    for batch in batches:
        if not isinstance(batch, KeyedJaggedTensor):
            raise ShardCoreError(
                f"lookups has {batch!r:.80}; it needs KeyedJaggedTensors, or mean lookups "
                "by feature, or the path of FBGEMM's reports"
            )
        # Weighted, plain and sequence features may come in tensors of their own.
        for feature, values in batch.to_dict().items():
            samples[feature] += global_batch if batch.variable_stride_per_key() else batch.stride()
            ids[feature].append(values.values().cpu().numpy())
    found = {}
    for name, table in theirs.items():
        features = table.config.feature_names
        for feature in features:
            if feature not in ids:
                raise ShardCoreError(
                    f"feature {feature!r} of table {name!r} is not in the data; there are {list(ids)[:5]}"
                )
            # Fewer samples would show too little reuse of ids in a batch.
            if samples[feature] < global_batch:
                raise ShardCoreError(
                    f"lookups has {samples[feature]} samples of feature {feature!r}; it "
                    f"needs a global batch of the model's data, {global_batch}, or more"
                )
            if samples[feature] != samples[features[0]]:
                raise ShardCoreError(
                    f"lookups has {samples[feature]} samples of feature {feature!r} and {samples[features[0]]} of "
                    f"{features[0]!r}; table {name!r} needs as many of each"
                )
            for values in ids[feature]:
                _require_rows(values, feature, name, table.config.num_embeddings)
        all_ids, n = np.concatenate([of for f in features for of in ids[f]]), samples[features[0]]
        found[name] = len(all_ids) / n, access.reuse_of(all_ids, n)
    return found


def deduplicated_of(
    theirs: Mapping[str, ModelTable], lookups: Lookups, groups: Sequence[Sequence[str]], batch: int
) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """The dedup of the tables of some groups of features, and the tables of each group of several."""
    if not groups:
        return {}, []
    if isinstance(lookups, (str, Path, Mapping)):
        raise ShardCoreError(
            f"deduplicated has {list(groups[0])}; its factor is read from batches of data, "
            "so lookups need to be KeyedJaggedTensors"
        )
    if variable := variable_features(lookups):
        raise ShardCoreError(
            f"deduplicated has {list(groups[0])}, but feature {variable[0]!r} has a number of samples of its own in "
            "the data (VBE); it needs data that is not deduplicated yet"
        )
    group_of = {feature: tuple(group) for group in groups for feature in group}
    tables: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, table in theirs.items():
        found = {group_of.get(f) for f in table.config.feature_names}
        if len(found) > 1:
            raise ShardCoreError(
                f"table {name!r} has features {table.config.feature_names}; deduplicated "
                "needs all of them in one group, or none"
            )
        if (group := found.pop()) is not None:
            tables[group].append(name)
    for group in map(tuple, groups):
        if group not in tables:
            raise ShardCoreError(f"deduplicated has {list(group)}; no table has these features")
    batches = lookups if isinstance(lookups, Iterable) else [lookups]
    of: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for jagged in batches:
        for feature, values in jagged.to_dict().items():
            of[feature].append((values.values().cpu().numpy(), values.lengths().cpu().numpy()))
    joined = {f: tuple(map(np.concatenate, zip(*parts, strict=True))) for f, parts in of.items()}
    factors = {group: dedup_of([joined[f] for f in group], batch) for group in tables}
    return (
        {name: factors[group] for group, names in tables.items() for name in names},
        [tuple(names) for names in tables.values() if len(names) > 1],
    )


def _require_rows(ids: np.ndarray, feature: str, table: str, rows: int) -> None:
    if len(ids) and ids.dtype.kind not in "iu":
        raise ShardCoreError(
            f"feature {feature!r} has ids of type {ids.dtype}; table {table!r} needs whole numbers"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < rows:
        raise ShardCoreError(
            f"feature {feature!r} has ids {ids.min()} to {ids.max()}, table {table!r} rows "
            f"0 to {rows - 1}; give ids as the collection gets them"
        )
