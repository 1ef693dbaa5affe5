"""Limits of values, and checks of types and ranges.

A value beyond a limit is a slip or an attack. Within them, all that files hold can be priced without overflow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from shardcore.core.errors import ShardCoreError, escape_unprintable, shorten

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
MOST_COUNT, MOST_SEED = 1_000_000_000, 1 << 53
"""Limits of a count (samples, evaluations, epochs; millions of operations of a sample), and of a seed."""
MOST_UNIX_S = 253402300799.0
"""Unix s, the end of the year 9999. Nothing is done later."""
MOST_REPEATS = 1_000_000
"""Most repeats of one timing."""
WAITS_S = (1e-3, 1e6)
"""The ends of a time after which something counts as hung: clocks overflow at longer ones."""
MOST_PINS = 1 << 22
"""Devices in all different sets of them that pins mean: a host's name may mean thousands."""


def to_path_name(text: str) -> str:
    """A text made valid as a file or folder name: lower case, with dashes for other characters than letters and
    digits."""
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
    """Convert all fields of a dataclass to their annotated types. Raises ShardCoreError naming a field of another type.

    Other sequences become tuples, numbers of NumPy Python's, and whole numbers floats where floats are annotated.
    Then equal records have equal files. Types may be what `convert_to_type` knows. An annotation may have rules
    (`field_rules`).
    """
    own_name = vars(record).get("name") or vars(record).get("tier")
    which = f"{noun} {shorten(repr(own_name), 80)}" if isinstance(own_name, str) else noun
    for name, kind, classes in _typed_fields(type(record)):
        value = getattr(record, name)
        if type(value) in classes:
            continue
        try:
            object.__setattr__(record, name, convert_to_type(value, kind, name))
        except ShardCoreError as error:
            raise ShardCoreError(f"{which}: {error}") from None
    require_rules(record, which, field_rules(type(record)))


def convert_to_type(value: Any, kind: Any, what: str, build: Callable[..., Any] | None = None) -> Any:
    """Convert a value to an annotated type: sequences to tuples, NumPy's numbers to Python's. Raises ShardCoreError.

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
            return convert_to_type(value, others[0], what, build)
        for k in others:
            with contextlib.suppress(ShardCoreError):
                return convert_to_type(value, k, what, build)
    elif origin is tuple:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            values = tuple(value)
            kinds = (inner[0],) * len(values) if inner[-1] is Ellipsis else inner
            if len(kinds) == len(values):
                return tuple(
                    v if type(v) in _exact_classes(k) else convert_to_type(v, k, f"{what}[{i}]", build)
                    for i, (v, k) in enumerate(zip(values, kinds, strict=True))
                )
    elif origin is Mapping:
        if isinstance(value, Mapping) and (inner[0] is not str or all(isinstance(k, str) for k in value)):
            return (
                value
                if inner[1] is Any
                else {
                    k: convert_to_type(v, inner[1], f"{what}: {short_repr(k)}", build)
                    for k, v in value.items()
                }
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
    raise ShardCoreError(f"{what} is {short_repr(value)}; it needs to be {describe_type(kind)}")


@cache
def _typed_fields(cls: type) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Name, type, and classes that need no conversion, of each field of a dataclass."""
    kinds = type_hints(cls)
    return tuple((f.name, kinds[f.name], _exact_classes(kinds[f.name])) for f in dataclasses.fields(cls))


type_hints = cache(get_type_hints)
"""(class) -> type of each annotated field."""


@cache
def field_rules(cls: type) -> dict[str, tuple[Rule, ...]]:
    """Rules of a dataclass's fields, by field, from their annotations; fields without rules are left out."""
    hints = get_type_hints(cls, include_extras=True)
    found = {
        name: tuple(x for x in annotation_metadata(hint) if isinstance(x, Rule))
        for name, hint in hints.items()
    }
    return {name: of_field for name, of_field in found.items() if of_field}


def annotation_metadata(hint: Any) -> tuple[Any, ...]:
    """Metadata of a type annotation, such as the rule in Annotated[int, within(1, 9)]; looks inside "X | None" and
    list[X]."""
    if get_origin(hint) is Annotated:
        return (*hint.__metadata__, *annotation_metadata(hint.__origin__))
    inner = [kind for kind in get_args(hint) if kind is not NoneType]
    return (
        annotation_metadata(inner[0])
        if get_origin(hint) in (Union, UnionType, list) and len(inner) == 1
        else ()
    )


@cache
def _exact_classes(kind: Any) -> frozenset[type]:
    """Classes whose instances are of an annotated type without further checks."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(_exact_classes, get_args(kind)))
    return frozenset((kind,) if isinstance(kind, type) else ())


def require_type(value: object, kind: type | tuple[type, ...], what: str, right: str) -> None:
    """Raise ShardCoreError naming an argument whose value is not of a type. True and False are not numbers.

    right: words for a right value, for the message.
    """
    try:
        convert_to_type(value, Union[kind], what)  # noqa: UP007 (one class, or a tuple of some)
    except ShardCoreError:
        raise ShardCoreError(f"{what} is {short_repr(value)}; it needs to be {right}") from None


def short_repr(value: object, max_characters: int = 80) -> str:
    """Short, one-line text of any value, for error messages."""
    try:
        return shorten(escape_unprintable(_SHORT.repr(value)), max_characters)
    except ValueError:  # Python refuses to print very long integers
        return "a whole number that is too long"


def describe_type(kind: Any) -> str:
    """Describe a type in words, for error messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is tuple and inner[-1] is Ellipsis:
        each = [words.removeprefix("a ") for words in describe_type(inner[0]).split(" or ")]
        plurals = [f"lists{w[4:]}" if w.startswith("list of") else f"{w}s" for w in each]
        return f"a list of {' or '.join(plurals)}"
    if origin is tuple:
        return f"[{', '.join(map(describe_type, inner))}]"
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None:
        return "a mapping"
    return _WORDS.get(kind, f"a {kind.__name__}")


def require(condition: bool, message: str) -> None:
    """Raise ShardCoreError with a message unless a condition holds."""
    if not condition:
        raise ShardCoreError(message)


def first_duplicate(values: Iterable[Any]) -> Any:
    """The first value that occurred before in an iterable; None if all differ."""
    seen: set[Any] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """Rule on the values of a dataclass field, in the field's annotation: Annotated[int, within(1, 9)]. None is always
    allowed.

    admits: tells if a value is right.
    right: what would be right, for messages.
    ends: least and largest, of a number.
    known: all right values, if they can be listed.
    found: a field with a wrong value in words: "rows 0".
    """

    admits: Callable[[Any], bool]
    right: str
    ends: tuple[float, float] | None = None
    known: Collection[Any] = ()
    found: Callable[[str, Any], str] = lambda name, value: f"{name} {short_repr(value)}"

    def accepts(self, value: Any) -> bool:
        """Tell if a value is None or satisfies the rule."""
        return value is None or self.admits(value)

    def __call__(self, value: Any, what: str, name: str = "name") -> None:
        """Raise ShardCoreError if a value, field `name` of `what`, breaks the rule."""
        if not self.accepts(value):
            raise ShardCoreError(self.fault_message(value, what, name))

    def fault_message(self, value: Any, what: str, name: str) -> str:
        """Error message for a value of field `name` of `what` that breaks the rule."""
        return f"{what} has {self.found(name, value)}; {self.right}"


def number_within(
    low: float, high: float, *, above: bool = False, below: bool = False, such_as: str = ""
) -> Rule:
    """Rule that a number is in the range from low to high.

    above, below: True excludes the low end, or the high end.
    """
    right = f"it needs {'more than ' * above}{low:,.16g} to {'less than ' * below}{high:,.16g}"
    return Rule(
        lambda value: low <= value <= high and not (above and value == low) and not (below and value == high),
        f"{right}, such as {such_as}" if such_as else right,
        (low, high),
    )


def one_of(known: Collection[Any]) -> Rule:
    """Rule that a value is one of some known values."""
    return Rule(known.__contains__, f"known are {', '.join(map(str, known))}", known=known)


def each_entry(rule: Rule) -> Rule:
    """Rule that each entry of a list, or each value of a mapping, satisfies another rule."""
    return Rule(
        lambda entries: all(map(rule.admits, entries.values() if isinstance(entries, Mapping) else entries)),
        rule.right.replace("it needs", "each needs", 1),
    )


def entry_count_within(least: int, most: int) -> Rule:
    """Rule that a list has `least` to `most` entries."""
    return Rule(
        lambda value: least <= len(value) <= most,
        f"it needs {least:,} to {most:,}",
        found=lambda name, value: f"{len(value) or 'no'} {name}",
    )


Wait = Annotated[float, number_within(*WAITS_S)]
Share = Annotated[float, number_within(0, 1)]
Seed = Annotated[int, number_within(0, MOST_SEED)]
Count = Annotated[int, number_within(1, MOST_COUNT)]
Repeats = Annotated[int, number_within(1, MOST_REPEATS)]


class Record:
    """Base of frozen dataclasses that checks types and rules of all fields on construction.

    noun: an instance in words, for messages: `class Memory(Record, noun="memory")`. Default: the class's name.
    hash_once: True for nouns that are keys of many caches: an instance computes its hash once.
    """

    noun: ClassVar[str] = ""

    def __init_subclass__(cls, noun: str = "", hash_once: bool = False, **others: Any) -> None:
        super().__init_subclass__(**others)
        if hash_once:  # a dataclass makes a hash of its own otherwise
            cls.__hash__, cls.__getstate__ = Record._cached_hash, Record._state_without_hash
        cls.noun = noun or re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__.lstrip("_")).lower()

    def __post_init__(self) -> None:
        require_types(self, self.noun)

    def _cached_hash(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))  # pyright: ignore[reportArgumentType]

    def _state_without_hash(self) -> dict[str, Any]:
        """State for pickling. Hashes of strings differ in other processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


def require_rules(record: object, what: str, rules: Mapping[str, Sequence[Rule]]) -> None:
    """Raise ShardCoreError naming all fields of a record that break their rules."""
    faults = [
        ShardCoreError(rule.fault_message(getattr(record, name), what, name))
        for name, of_field in rules.items()
        for rule in of_field
        if not rule.accepts(getattr(record, name))
    ]
    if faults:
        raise faults[0] if len(faults) == 1 else ShardCoreError("; ".join(map(str, faults)), faults)


def describe_differences(first: Any, second: Any) -> str:
    """Fields in which two records differ, with both values: "batch: 4096 against 2048"."""
    pairs = ((f.name, getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    return ", ".join(f"{name}: {a} against {b}" for name, a, b in pairs if a != b)


require_name = Rule(
    lambda value: 0 < len(value) <= MOST_NAME and value.isprintable(),
    f"it needs 1 to {MOST_NAME} printable characters",
)
"""Rule of the name of a table or host."""


require_path_name = Rule(
    lambda name: (
        len(name) <= MOST_PATH_NAME and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None
    ),
    f"it needs a folder's name: letters, digits and . _ -, the first a letter or digit, {MOST_PATH_NAME} at most",
)
"""Rule of the name of a file or folder."""
