"""What values may be at most, and the checks that refuse what lies beyond.

Anything beyond is a slip or an attack. Files are read up to here, so that all that is read can be priced
without overflow.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from shardcore.errors import ShardCoreError, shortened

MOST_NAME = 200
"""Characters of a name of a table or host."""
MOST_PATH_NAME = 100
"""Characters of a name that becomes the name of a file or folder."""
MOST_TABLES, MOST_DEVICES = 1_000_000, 1 << 16
MOST_ROWS, MOST_DIM, MOST_POOLING, MOST_FEATURES = 1 << 40, 1 << 16, 1e6, 10_000
MOST_CUDA_COLUMNS = 2048
"""Columns of a shard that FBGEMM's CUDA op runs. Its CPU op has no such limit. Source: pytorch/FBGEMM 2448,
meta-pytorch/torchrec 1125.
"""
MOST_BATCH, MOST_BYTES = 1 << 40, 1 << 50
MOST_SPEED, SLOWDOWN_LIMIT, MOST_GBPS, MOST_MS = 1e3, 1e9, 1e9, 1e9
MOST_RATIO = 1e6
"""By which towers make outputs smaller."""
LINK_GBIT_S = (1e-3, 100.0)
"""The ends of the rate of an emulated link."""
MOST_COUNT, MOST_SEED = 1_000_000_000, 1 << 53
"""Of anything that a config counts: samples, evaluations, epochs. And of a seed."""
MOST_UNIX_S = 253402300799.0
"""Unix s, the end of the year 9999. Nothing is done later."""
MOST_REPEATS = 1_000_000
"""Of one timing."""
WAITS_S = (1e-3, 1e6)
"""The ends of a time after which something counts as hung: clocks overflow at longer ones."""
MOST_PINS = 1 << 22
"""Devices in all different sets of them that pins mean: a host's name may mean thousands."""
PATH_NAME = f"a name of letters, digits and . _ -, the first a letter or digit, {MOST_PATH_NAME} at most"
"""For messages: what `is_path_name` asks for."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def require(condition: bool, message: str) -> None:
    """Raise ShardCoreError unless a condition holds."""
    if not condition:
        raise ShardCoreError(message)


def require_within(record: object, what: str, **ends: tuple[float, float]) -> None:
    """Raise ShardCoreError naming a field of a record that is not within its ends; one that is None may be.
    """
    for name, (low, high) in ends.items():
        value = getattr(record, name)
        if value is not None and not low <= value <= high:
            raise ShardCoreError(f"{what} has {name} {value}; it needs {low:,} to {high:,}")


def require_known(record: object, what: str, **known: Collection[str]) -> None:
    """Raise ShardCoreError naming a field of a record that is none of the words that are known for it."""
    for name, words in known.items():
        value = getattr(record, name)
        if value not in words:
            raise ShardCoreError(f"{what} has {name} {value!r}; known are {', '.join(words)}")


def require_name(name: str, what: str) -> None:
    """Raise ShardCoreError unless a table or host may have this name."""
    require(0 < len(name) <= MOST_NAME and name.isprintable(),
            f"{what} has name {shortened(repr(name), 80)}; it needs 1 to {MOST_NAME} printable characters")


def is_path_name(name: str) -> bool:
    """Whether a name is a safe name of a file or folder."""
    return len(name) <= MOST_PATH_NAME and re.fullmatch(_NAME, name) is not None
