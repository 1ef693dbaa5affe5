"""Publicly released lists of embedding tables."""

from __future__ import annotations

import json
from pathlib import Path

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table

DEFAULT_ACCESS = Zipf(1.05)
"""Access statistics that public_pool assumes if a list has none. A common choice, not a measurement."""


def public_pool_sources() -> dict[str, str]:
    """Source of each public list of tables, by the list's name."""
    return {k: v["source"] for k, v in _read_public_lists().items() if not k.startswith("_")}


def public_pool(name: str, zipf_alpha: float | None = None) -> tuple[Table, ...]:
    """Tables of a public list, with its rows, dims and pooling, named as there, or c00, c01, ...

    Accesses follow Zipf(alpha): zipf_alpha, or that of the list, or DEFAULT_ACCESS.

    Raises ShardCoreError for an unknown name.
    """
    entry = _public_list(name)
    listed = entry.get("zipf_alpha", DEFAULT_ACCESS.alpha)
    access = Zipf(listed if zipf_alpha is None else zipf_alpha)
    tables = [row for row in entry["tables"] for _ in range(row.pop("count", 1))]
    # Equally many digits in all names, so that they sort in the order of tables.
    digits = max(2, len(str(len(tables) - 1)))
    return tuple(Table(**{"name": f"c{i:0{digits}d}", "access": access} | t) for i, t in enumerate(tables))


def public_optimizer(name: str) -> str:
    """Optimizer that the reference implementation of a public list of tables uses; "exact_sgd" if none is named."""
    return _public_list(name).get("optimizer", "exact_sgd")


def _public_list(name: str) -> dict:
    if name not in public_pool_sources():
        raise ShardCoreError(
            f"there is no public list of tables {name!r}; known are {', '.join(public_pool_sources())}"
        )
    return _read_public_lists()[name]


def _read_public_lists() -> dict:
    return json.loads((Path(__file__).parent / "public_tables.json").read_text(encoding="utf-8"))
