"""Limits of values, and checks of types and ranges.

A value beyond a limit is a slip or an attack. Within them, all that files hold can be priced without overflow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

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
"""Largest compression of outputs by towers."""
LINK_GBIT_S = (1e-3, 100.0)
"""The ends of the rate of an emulated link."""
MOST_COUNT, MOST_SEED = 1_000_000_000, 1 << 53
"""Limits of a count in a config (samples, evaluations, epochs), and of a seed."""
MOST_UNIX_S = 253402300799.0
"""Unix s, the end of the year 9999. Nothing is done later."""
MOST_REPEATS = 1_000_000
"""Most repeats of one timing."""
WAITS_S = (1e-3, 1e6)
"""The ends of a time after which something counts as hung: clocks overflow at longer ones."""
MOST_PINS = 1 << 22
"""Devices in all different sets of them that pins mean: a host's name may mean thousands."""
PATH_NAME = (
    f"a folder's name: letters, digits and . _ -, the first a letter or digit, {MOST_PATH_NAME} at most"
)
"""Names that `is_path_name` allows, for messages."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def path_name_of(text: str) -> str:
    """A text as such a name: in lower case, with dashes for what may not be in one."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
    Any: "any value",
}


def require_types(record: object, noun: str) -> None:
    """Raise ShardCoreError naming a field of a dataclass whose value is not of its annotated type.

    Other sequences become tuples, numbers of NumPy Python's, and whole numbers floats where floats are annotated.
    Then equal records have equal files. Types may be what `typed` knows. An annotation may have a check (`checks`).
    """
    own_name = vars(record).get("name")
    which = f"{noun} {shortened(repr(own_name), 80)}" if isinstance(own_name, str) else noun
    for name, kind, classes in _fields(type(record)):
        value = getattr(record, name)
        if type(value) in classes:
            continue
        try:
            object.__setattr__(record, name, typed(value, kind, name))
        except ShardCoreError as error:
            raise ShardCoreError(f"{which}: {error}") from None
    require_fields(record, which, checks(type(record)))


def typed(value: Any, kind: Any, what: str, build: Callable[..., Any] | None = None) -> Any:
    """Return a value of an annotated type, with tuples for other sequences.

    value: any value.
    kind: a class, a union, Literal, tuple[X, ...], tuple[X, Y], Mapping[str, X] or Any.
    what: its name, for messages.
    build: (dataclass, mapping, what) -> instance, for values from files. None: dataclasses are instances already.

    Raises ShardCoreError naming `what`, the value, and the type in words.
    """
    if kind is Any or type(value) in _exact_classes(kind):
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [k for k in inner if k is not NoneType]
        # The error of an only choice says more than that of the union.
        if len(others) == 1 and others[0] not in _WORDS:
            return typed(value, others[0], what, build)
        for k in others:
            with contextlib.suppress(ShardCoreError):
                return typed(value, k, what, build)
    elif origin is tuple:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            values = tuple(value)
            kinds = (inner[0],) * len(values) if inner[-1] is Ellipsis else inner
            if len(kinds) == len(values):
                return tuple(
                    v if type(v) in _exact_classes(k) else typed(v, k, f"{what}[{i}]", build)
                    for i, (v, k) in enumerate(zip(values, kinds, strict=True))
                )
    elif origin is Mapping:
        if isinstance(value, Mapping) and (inner[0] is not str or all(isinstance(k, str) for k in value)):
            return (
                value
                if inner[1] is Any
                else {k: typed(v, inner[1], f"{what}: {shown(k)}", build) for k, v in value.items()}
            )
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif kind in (int, float) and isinstance(value, bool):
        pass  # True and False are no numbers
    elif kind is int and isinstance(value, numbers.Integral):
        return int(value)
    elif kind is float and isinstance(value, numbers.Real):
        return float(value)
    elif build and dataclasses.is_dataclass(kind):
        return build(kind, value, what)
    elif isinstance(value, origin or kind):
        return value
    raise ShardCoreError(f"{what} is {shown(value)}; it needs to be {type_words(kind)}")


@cache
def _fields(cls: type) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Name, type and `_exact_classes` of each field."""
    kinds = type_hints(cls)
    return tuple((f.name, kinds[f.name], _exact_classes(kinds[f.name])) for f in dataclasses.fields(cls))


type_hints = cache(get_type_hints)
"""(class) -> type of each annotated field."""


@cache
def checks(cls: type) -> dict[str, Check]:
    """The check of each field that has one in its annotation: Annotated[int, within(1, 9)]."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


@cache
def _exact_classes(kind: Any) -> frozenset[type]:
    """Classes whose instances are of a type without another look."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(_exact_classes, get_args(kind)))
    return frozenset((kind,) if isinstance(kind, type) else ())


def require_type(value: object, kind: type | tuple[type, ...], what: str, right: str) -> None:
    """Raise ShardCoreError naming an argument that is not of a type. True and False are no numbers.

    right: words for a right value, for the message.
    """
    for k in kind if isinstance(kind, tuple) else (kind,):
        with contextlib.suppress(ShardCoreError):
            typed(value, k, what)
            return
    raise ShardCoreError(f"{what} is {shown(value)}; it needs to be {right}")


def shown(value: object, most: int = 80) -> str:
    """Show a value in a message: in one short line, however large it is."""
    try:
        return shortened(escaped(_SHORT.repr(value)), most)
    except ValueError:  # Python refuses to print very long integers
        return "a whole number that is too long"


def type_words(kind: Any) -> str:
    """Put a type in words, for messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(type_words, inner))
    if origin is tuple and inner[-1] is Ellipsis:
        each = [words.removeprefix("a ") for words in type_words(inner[0]).split(" or ")]
        plurals = [f"lists{w[4:]}" if w.startswith("list of") else f"{w}s" for w in each]
        return f"a list of {' or '.join(plurals)}"
    if origin is tuple:
        return f"[{', '.join(map(type_words, inner))}]"
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None:
        return "a mapping"
    return _WORDS.get(kind, f"a {kind.__name__}")


def require(condition: bool, message: str) -> None:
    """Raise ShardCoreError unless a condition holds."""
    if not condition:
        raise ShardCoreError(message)


def first_repeated(values: Iterable[Any]) -> Any:
    """The first of some values that was there before. None: all differ."""
    seen: set[Any] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)


Check = Callable[[Any, str, str], None]
"""(value, what, name) -> None. It raises ShardCoreError that `what` has a wrong value of its field `name`."""


def within(low: float, high: float) -> Check:
    """A check that a number is within its ends, or None."""

    def check(value: float | None, what: str, name: str) -> None:
        if value is not None and not low <= value <= high:
            raise ShardCoreError(f"{what} has {name} {value}; it needs {low:,.16g} to {high:,.16g}")

    return check


def one_of(known: Collection[Any]) -> Check:
    """A check that a value is one of those that are known, or None."""

    def check(value: Any, what: str, name: str) -> None:
        if value is not None and value not in known:
            raise ShardCoreError(f"{what} has {name} {value!r}; known are {', '.join(map(str, known))}")

    return check


def require_fields(record: object, what: str, checks: Mapping[str, Check]) -> None:
    """Raise ShardCoreError naming all fields of a record that do not pass their checks."""
    faults: list[ShardCoreError] = []
    for name, check in checks.items():
        try:
            check(getattr(record, name), what, name)
        except ShardCoreError as error:
            faults.append(error)
    if faults:
        raise faults[0] if len(faults) == 1 else ShardCoreError("; ".join(map(str, faults)), faults)


def require_within(record: object, what: str, **ends: tuple[float, float]) -> None:
    """Raise ShardCoreError naming the fields of a record that are not within their ends; one that is None may be."""
    require_fields(record, what, {name: within(*of_name) for name, of_name in ends.items()})


def require_known(record: object, what: str, **known: Collection[str]) -> None:
    """Raise ShardCoreError naming the fields that are none of their known words; one that is None may be."""
    require_fields(record, what, {name: one_of(words) for name, words in known.items()})


def differences(first: Any, second: Any) -> str:
    """The fields in which two records differ, with both values: "batch: 4096 against 2048"."""
    pairs = ((f.name, getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    return ", ".join(f"{name}: {a} against {b}" for name, a, b in pairs if a != b)


def require_name(value: str, what: str, name: str = "name") -> None:
    """Raise ShardCoreError unless a table or host may have this name."""
    require(
        0 < len(value) <= MOST_NAME and value.isprintable(),
        f"{what} has {name} {shortened(repr(value), 80)}; it needs 1 to {MOST_NAME} printable characters",
    )


def require_path_name(value: str | None, what: str, name: str = "name") -> None:
    """Raise ShardCoreError unless a file or folder may have this name, or it is None."""
    require(value is None or is_path_name(value), f"{what} has {name} {shown(value)}; it needs {PATH_NAME}")


def is_path_name(name: str) -> bool:
    """Tell if a name is safe for a file or folder."""
    return len(name) <= MOST_PATH_NAME and re.fullmatch(_NAME, name) is not None
