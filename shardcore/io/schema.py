"""Strict reading of files that anybody may have written.

`read_json` and `read_yaml` parse a file, and limit its size, depth and numbers. `build_record` makes a dataclass of
the result: annotations of its fields are the schema. Any error is a ShardCoreError that names the file, the
thing and its value.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_origin

from shardcore.core.errors import ShardCoreError, Unreachable, message_with_name, shorten
from shardcore.core.validation import (
    convert_to_type,
    field_rules,
    first_duplicate,
    require,
    short_repr,
    type_hints,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
MOST_FILE_BYTES = 1 << 29
"""Largest file. A problem of a million tables is smaller."""
MOST_MAPPED_BYTES = 1 << 44
"""Largest file that is mapped into memory or read in pieces."""
MOST_RATIO, LEAST_UNPACKED_BYTES = 50, 1 << 24
"""Most bytes of unpacked content, over a file's size (batches of ids have 4, traces 15); and bytes up to which any
ratio is allowed."""
_CHUNK_BYTES = 1 << 20
_PART_BYTES = 512
"""Fewest bytes of a gzip file for each of its parts beyond the first thousand."""
MOST_YAML_BYTES = 1 << 18
"""Largest YAML file. Parsing takes 14 s per MiB."""
MOST_VALUES = 1 << 25
"""Most values of a JSON file, each of which takes about 100 bytes. A problem of a million tables has fewer."""
MOST_DEPTH = 24
"""Most levels of nested values."""
MOST_INT = 1 << 53
"""Largest integer. Floats are not exact beyond it, nor are most JSON readers."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors for a file that does not exist."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may make a lone surrogate, which UTF-8 cannot encode."""
_SHOWN_FAULTS, _MOST_FAULTS = 5, 1000
"""Faults that an error shows, and after which no more are looked for."""
_YAML_NUMBERS, _MOST_DIGITS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"), 40


class Readable(Protocol):
    """A file that may not be on a local disk (see plans/places.py)."""

    def read_bytes(self) -> bytes: ...


# --- bytes --------------------------------------------------------------------------------------------------


def read_bytes(path: str | Path | Readable, max_bytes: int = MOST_FILE_BYTES) -> bytes:
    """Read a file's content. Raises ShardCoreError for a file that is missing, too large or not regular."""
    is_path = isinstance(path, str | os.PathLike) or hasattr(path, "read_bytes")
    require(is_path, f"path is {short_repr(path)}; it needs to be a path of a file")
    with _report_read_errors(path):
        if isinstance(path, str | os.PathLike):
            return read_regular_file(path, max_bytes)
        content = path.read_bytes()
    _require_max_size(path, len(content), max_bytes)
    return content


def require_file(path: str | Path) -> None:
    """Raise ShardCoreError for a file that is missing, too large or not regular, before another library opens the
    file."""
    with _report_read_errors(path):
        _require_max_size(path, _regular_file_size(path), MOST_MAPPED_BYTES)


@contextmanager
def _report_read_errors(path: Any) -> Iterator[None]:
    """Context manager: turn an OSError of reading a file into ShardCoreError, or Unreachable if the file may exist."""
    try:
        yield
    except OSError as error:
        kind = ShardCoreError if isinstance(error, ABSENT) or not error.errno else Unreachable
        raise kind(f"cannot read {path}: {error.strerror or 'there is no such file'}") from None


def read_regular_file(path: str | os.PathLike, max_bytes: int = MOST_FILE_BYTES) -> bytes:
    """Read a regular file's content, up to a maximum size. Raises OSError if the file cannot be read."""
    _require_max_size(path, size := _regular_file_size(path), max_bytes)
    # Files of /proc claim a size of 0, and reading some of them never ends.
    if size == 0:
        return b""
    # Without waiting for a writer, in case a pipe has replaced the file.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
        content = f.read(size + 1)
    if len(content) > size:
        raise OSError(0, "it grows while it is read")
    return content


def _regular_file_size(path: str | os.PathLike) -> int:
    """Size of a regular file in bytes. Raises OSError for a folder, pipe or device."""
    if "\0" in str(path):
        raise OSError(0, "no file has such a name")
    status = os.stat(path)
    # Opening or reading a pipe or device may never end.
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no file")
    return status.st_size


def count_gzip_members(path: Path) -> int:
    """Approximate number of members of a gzip file (RFC 1952); 0 for any other file."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return 0
        return 1 + sum(chunk.count(b"\x1f\x8b\x08") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))


def unpacked_chunks(path: Path) -> Iterator[bytes]:
    """Iterate over a file's content in chunks, unpacked if gzip, with a limit on the ratio of sizes.

    Raises ShardCoreError for gzip that unpacks to far more than its size, and EOFError, OSError or zlib.error after
    what can be read of a file that is damaged.
    """
    packed, size, done = count_gzip_members(path), _regular_file_size(path), 0
    # Each part takes 30 µs, however short.
    if packed > (limit := 1000 + size // _PART_BYTES):
        raise ShardCoreError(
            f"{path} has {size:,} bytes and about {packed:,} parts of gzip; it needs to have {limit:,} at most; if it "
            "is sound, unpack it with gunzip"
        )
    most = max(LEAST_UNPACKED_BYTES, MOST_RATIO * size)
    with gzip.open(path) if packed else path.open("rb") as file:
        # One chunk at a time, so that no content before a damage is lost.
        while chunk := file.read1(_CHUNK_BYTES):
            done += len(chunk)
            if packed and done > most:
                raise ShardCoreError(
                    f"{path} has {size:,} bytes and unpacks to more than {most:,} bytes, over {MOST_RATIO} times its "
                    "size; if it is sound, unpack it with gunzip"
                )
            yield chunk


def require_uncompressed_zip(path: Path) -> None:
    """Raise ShardCoreError for a zip archive with compressed or overlapping entries. torch.save and numpy.savez write
    none."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size, content = path.stat().st_size, sum(entry.file_size for entry in entries)
    require(
        content <= size and all(entry.compress_type == zipfile.ZIP_STORED for entry in entries),
        f"{path} has {size:,} bytes, and has packed or overlapping entries of {content:,} bytes; write it "
        "unpacked, as torch.save and numpy.savez do",
    )


def list_names(folder: str | Path) -> list[str]:
    """Sorted names of the files in a folder; empty if there is no such folder.

    Raises Unreachable for a folder that cannot be read, which `Path.glob` takes for an empty one.
    """
    try:
        return sorted(os.listdir(folder))
    except ABSENT:
        return []
    except OSError as error:
        raise Unreachable(f"cannot read {folder}: {error.strerror}") from None


def _require_max_size(path: Any, size: int, max_bytes: int) -> None:
    """Raise ShardCoreError for a file that is too large."""
    require(size <= max_bytes, f"{path} has {size:,} bytes; files of at most {max_bytes:,} are read")


def read_text(path: str | Path | Readable, max_bytes: int = MOST_FILE_BYTES) -> str:
    """Read a UTF-8 text file. Raises ShardCoreError as read_bytes does, and for text that is not UTF-8."""
    return decode_utf8(read_bytes(path, max_bytes), path)


def decode_utf8(content: bytes, what: Any) -> str:
    """Decode UTF-8 text, without a byte order mark. Raises ShardCoreError naming the file and position."""
    try:
        # Programs on Windows put a byte order mark before text. It is dropped.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ShardCoreError(f"{what} is no text in UTF-8: {error.reason} at byte {error.start}") from None


def read_json(path: str | Path | Readable) -> Any:
    """Read the value of a JSON file.

    Raises ShardCoreError naming the file if it cannot be read or is not complete JSON, and for a duplicate
    key, a number that is too large or not finite, and values nested too deep.
    """
    return parse_json(read_bytes(path), path)


def parse_json(content: bytes, what: Any) -> Any:
    """Parse a JSON file's content. Raises as read_json does.

    what: name of the file, for messages.
    """
    text = decode_utf8(content, what)
    # A value takes much more memory than its text, so values are counted before they are made.
    if (values := sum(map(content.count, (b",", b"[", b"{")))) > MOST_VALUES:
        raise ShardCoreError(f"{what} has about {values:,} values; files of at most {MOST_VALUES:,} are read")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_dict_without_duplicates,
            # A longer one is too large, and slow to convert.
            parse_int=lambda number: _valid_number(int(number[:18]), number),
            parse_float=lambda number: _valid_number(float(number), number),
            parse_constant=lambda number: _valid_number(float(number), number),
        )
        _require_max_depth(value)
        if _SURROGATE.search(content):
            # Encoding fails on a lone surrogate: better here than when the value is written.
            json.dumps(value, ensure_ascii=False).encode()
    except MemoryError:
        raise ShardCoreError(
            f"{what} has {len(content):,} bytes; this process has no memory to read it"
        ) from None
    except RecursionError:
        raise ShardCoreError(f"{what} has values within values, deeper than {MOST_DEPTH}") from None
    except ValueError as error:
        raise ShardCoreError(
            f"{what} is not whole JSON: {shorten(str(error), 120)}; it was cut short or edited"
        ) from None
    return value


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Dictionary of a JSON object's pairs. Raises ValueError for a duplicate key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"key {short_repr(first_duplicate(key for key, _ in pairs))} appears twice")
    return made


def _valid_number(value: float, text: str) -> float:
    """A parsed number of a file. Raises ValueError, with its text, if the number is too large or not finite."""
    if isinstance(value, int) and abs(value) > MOST_INT:
        raise ValueError(f"the number {shorten(text, 40)} is too large")
    if not math.isfinite(value):
        raise ValueError(f"the number {shorten(text, 40)} is not finite")
    return value


def _require_max_depth(value: Any) -> None:
    """Raise RecursionError for a parsed value that is nested deeper than MOST_DEPTH."""
    # Level by level, as recursion itself has a limit of depth.
    level = [[value]]
    for _ in range(MOST_DEPTH + 1):
        level = [
            v.values() if isinstance(v, dict) else v
            for one in level
            for v in one
            if isinstance(v, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def read_yaml(path: str | Path) -> Any:
    """Read the value of a YAML file.

    Raises ShardCoreError as read_json does, and for aliases: eight lines of them can expand to gigabytes.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(
                    f"line {self.peek_event().start_mark.line + 1} has an alias, "
                    f"*{shorten(self.peek_event().anchor, 40)}; write it out"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            made = super().construct_mapping(node, deep)
            if len(made) < len(node.value):
                twice = first_duplicate(self.construct_object(key, deep=True) for key, _ in node.value)
                raise ValueError(f"key {short_repr(twice)} appears twice")
            return made

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            made = super().construct_object(node, deep)
            return _valid_number(made, short_repr(made)) if isinstance(made, int | float) else made

        def construct_scalar(self, node: Any) -> Any:
            value = super().construct_scalar(node)
            # A lone surrogate cannot be encoded.
            value.encode()
            # YAML reads 1:0:0: ... as a number to the base of 60, which may be huge.
            if node.tag in _YAML_NUMBERS and len(value) > _MOST_DIGITS:
                raise ValueError(f"the number {shorten(value, 40)} is too large")
            return value

    text = read_text(path, MOST_YAML_BYTES)
    try:
        value = yaml.load(text, Loader)
        _require_max_depth(value)
    except RecursionError:
        raise ShardCoreError(f"{path} has values within values, deeper than {MOST_DEPTH}") from None
    # Constructors of dates, tags and the like raise various errors.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ShardCoreError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return value


# --- records ------------------------------------------------------------------------------------------------


class Faults(ShardCoreError):
    """Several faults of one file. The message has a line for each of the first, and the number of further faults."""

    def __init__(self, message: str = "", faults: Sequence[ShardCoreError] = ()) -> None:
        super().__init__(message, faults)
        if faults:
            more = len(faults) - _SHOWN_FAULTS
            others = f"... and {more:,} more{' at least' * (len(faults) >= _MOST_FAULTS)}"
            self.args = ("\n".join([*map(str, faults[:_SHOWN_FAULTS]), *[others] * (more > 0)]),)

    def __format__(self, spec: str) -> str:
        """One line with all shown faults, for the message of another error."""
        return format("; ".join(str(self).split("\n")), spec)


@contextmanager
def prefix_errors(what: Any) -> Iterator[None]:
    """Context manager: prefix the messages of ShardCoreErrors with a name, such as a file's."""
    try:
        yield
    except ShardCoreError as error:
        if not error.faults:
            raise type(error)(message_with_name(what, error)) from None
        raise Faults(faults=[type(fault)(message_with_name(what, fault)) for fault in error.faults]) from None


def map_collecting_errors(make: Callable[[Any], Any], entries: Iterable[Any]) -> list[Any]:
    """Apply a function to each entry. Raises ShardCoreError if one call fails, and Faults with all errors if several
    do."""
    made, faults = [], list[ShardCoreError]()
    for entry in entries:
        try:
            made.append(make(entry))
        except ShardCoreError as error:
            faults += error.faults or [error]
            if len(faults) >= _MOST_FAULTS:
                break
    if faults:
        raise Faults(faults=faults) if len(faults) > 1 else faults[0]
    return made


def build_record(cls: type[T], data: Any, what: str, extra_keys: Collection[str] = (), **given: Any) -> T:
    """Build a dataclass instance from a mapping, such as a JSON object, with types and rules from the field
    annotations.

    data: the mapping.
    what: its name, for messages.
    extra_keys: other known keys, which messages list and the caller has taken out.
    given: fields that the caller sets, or functions that make them. They are not allowed in `data`.

    Raises ShardCoreError naming `what` and unknown keys, a missing one, or a wrong value. If there are several,
    it names them all (Faults).
    """
    if not isinstance(data, Mapping):
        raise ShardCoreError(f"{what} is {short_repr(data)}; it needs to be an object with keys")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name not in given}
    unknown, kinds, values = {str(key) for key in data if key not in fields}, type_hints(cls), {}
    # Those that the data has, or lacks: others keep their defaults.
    present = [
        name
        for name, f in fields.items()
        if name in data or f.default is f.default_factory is dataclasses.MISSING
    ]

    def set_field(name: str) -> None:
        if name in unknown:
            raise ShardCoreError(
                f"{what} has an unknown key {short_repr(name)}; "
                f"known are {', '.join(dict.fromkeys([*fields, *extra_keys]))}"
            )
        if name in given:
            values[name] = given[name]() if callable(given[name]) else given[name]
        elif name in data:
            values[name] = convert_value(data[name], kinds[name], f"{what}: {name}")
            # As the record itself does, but together with the faults of other fields.
            for rule in field_rules(cls).get(name, ()):
                rule(values[name], what, name)
        else:
            raise ShardCoreError(f"{what} lacks the key {name!r}")

    map_collecting_errors(set_field, dict.fromkeys([*sorted(unknown), *present, *given]))
    with prefix_errors(what):
        return cls(**values)


def require_unique(entries: Any, keys: Sequence[str], words: str) -> None:
    """Raise ShardCoreError naming the first entry of a file that has the same values of some keys as an earlier entry.

    It is quick: to make records of a million entries takes a minute.
    """
    found = (e for e in entries if isinstance(e, Mapping)) if isinstance(entries, list | tuple) else ()
    twice = first_duplicate(", ".join(f"{key} {e.get(key)!r}" for key in keys) for e in found)
    require(twice is None, f"{words}: {twice}; it needs to be there once")


def convert_value(value: Any, kind: Any, what: str) -> Any:
    """Convert a parsed value to an annotated type, lists to tuples. Raises ShardCoreError naming `what`."""
    try:
        return convert_to_type(value, kind, what, build_record)
    except ShardCoreError:
        # Only of a list that has a fault: entries one by one take longer.
        if isinstance(value, list) and get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
            map_collecting_errors(
                lambda i: convert_value(value[i], get_args(kind)[0], f"{what}[{i}]"), range(len(value))
            )
        raise


def is_whole_number(value: Any) -> bool:
    """Tell if a parsed value is an integer, within the range of JSON."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_INT
