"""What values may be at most, and the checks that refuse what lies beyond.

Anything beyond is a slip or an attack. Files are read up to here, so that all that is read can be priced
without overflow.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardcore.core.errors import ShardCoreError, escaped, shortened

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


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}


def require_types(record: object, noun: str) -> None:
    """Raise ShardCoreError naming a field of a dataclass whose value is not of its annotated type.

    Other sequences become tuples, as in a constructor call that gives lists. Types may be classes, unions,
    tuple[X, ...], tuple[X, Y], mappings and Any.
    """
    for name, kind, usual in _fields(type(record)):
        value = getattr(record, name)
        if type(value) in usual:
            continue
        if get_origin(kind) is tuple:
            value = as_tuples(value, kind)
            object.__setattr__(record, name, value)
        if not _is(value, kind):
            inner = get_args(kind)
            if isinstance(value, tuple) and inner[-1] is Ellipsis:
                at = next(i for i, v in enumerate(value) if not _is(v, inner[0]))
                name, value, kind = f"{name}[{at}]", value[at], inner[0]
            named = vars(record).get("name")
            which = f"{noun} {shown(named)}" if isinstance(named, str) else noun
            raise ShardCoreError(f"{which}: {name} is {shown(value)}; it needs to be {type_words(kind)}")


def require_type(value: object, kind: type | tuple[type, ...], what: str, right: str) -> None:
    """Raise ShardCoreError naming an argument that is not of a type. True and False are no numbers.

    right: what it needs to be, for the message.
    """
    if not any(_is(value, k) for k in (kind if isinstance(kind, tuple) else (kind,))):
        raise ShardCoreError(f"{what} is {shown(value)}; it needs to be {right}")


def as_tuples(value: Any, kind: Any) -> Any:
    """A value with tuples for other sequences where its type has tuples."""
    if (
        get_origin(kind) is not tuple
        or isinstance(value, str | bytes | Mapping)
        or not isinstance(value, Iterable)
    ):
        return value
    values, inner = tuple(value), get_args(kind)
    if get_origin(inner[0]) is not tuple:
        return values
    return tuple(as_tuples(v, inner[0]) for v in values)


def shown(value: object) -> str:
    """A value in a message, in 80 characters, however large it is."""
    try:
        return shortened(escaped(_SHORT.repr(value)), 80)
    except ValueError:  # Python refuses to print very long integers
        return f"a {type(value).__name__} that is too long"


@cache
def _fields(cls: type) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Name and type of each field, and the classes that are it without another look."""
    kinds = get_type_hints(cls)
    return tuple((f.name, kinds[f.name], _usual(kinds[f.name])) for f in dataclasses.fields(cls))


@cache
def _usual(kind: Any) -> frozenset[type]:
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(_usual, get_args(kind)))
    return frozenset((kind, int) if kind is float else (kind,) if isinstance(kind, type) else ())


def _is(value: Any, kind: Any) -> bool:
    """Tell if a value is of a type. Numbers of NumPy are numbers; True and False are none."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or type(value) in _usual(kind):
        return True
    if origin in (Union, UnionType):
        return any(_is(value, k) for k in inner)
    if origin is tuple:
        kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis and isinstance(value, tuple) else inner
        return (
            isinstance(value, tuple)
            and len(value) == len(kinds)
            and all(type(v) in _usual(k) or _is(v, k) for v, k in zip(value, kinds, strict=True))
        )
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def type_words(kind: Any) -> str:
    """A type in words, for messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(type_words, inner))
    if origin is tuple:
        several = inner[-1] is Ellipsis
        return (
            f"a list of {type_words(inner[0]).removeprefix('a ')}s"
            if several
            else f"[{', '.join(map(type_words, inner))}]"
        )
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None:
        return "a mapping"
    return _WORDS.get(kind, f"a {kind.__name__}")


def require(condition: bool, message: str) -> None:
    """Raise ShardCoreError unless a condition holds."""
    if not condition:
        raise ShardCoreError(message)


def require_within(record: object, what: str, **ends: tuple[float, float]) -> None:
    """Raise ShardCoreError naming a field of a record that is not within its ends; one that is None may be."""
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
    require(
        0 < len(name) <= MOST_NAME and name.isprintable(),
        f"{what} has name {shortened(repr(name), 80)}; it needs 1 to {MOST_NAME} printable characters",
    )


def is_path_name(name: str) -> bool:
    """Whether a name is a safe name of a file or folder."""
    return len(name) <= MOST_PATH_NAME and re.fullmatch(_NAME, name) is not None
