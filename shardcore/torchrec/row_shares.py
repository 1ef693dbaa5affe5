"""Shares of a batch's ids in ranges of the rows, from a model's data (access_statistics.RowShares)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.core.types import Table
from shardcore.step import access

if TYPE_CHECKING:
    from shardcore.torchrec.modules import ModelTable


def with_row_shares(
    tables: Sequence[Table], theirs: Mapping[str, ModelTable], lookups: Any, n_devices: int
) -> tuple[Table, ...]:
    """The tables, ordered by measured row shares where ids lie unevenly. Only batches of data tell that.

    lookups: as in `planner.problem_for`.
    n_devices: that may divide rows.
    """
    if isinstance(lookups, (str, Path, Mapping)):
        return tuple(tables)
    ids: dict[str, list[np.ndarray]] = defaultdict(list)
    for batch in lookups if isinstance(lookups, Iterable) else [lookups]:
        for feature, values in batch.to_dict().items():
            ids[feature].append(values.values().cpu().numpy())
    found = []
    for table in tables:
        parts = [part for f in theirs[table.name].config.feature_names for part in ids[f]]
        shares = access.row_shares_of(np.concatenate(parts), table.rows, n_devices)
        found.append(replace(table, ordered=True, row_shares=shares) if shares else table)
    return tuple(found)
