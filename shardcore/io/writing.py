"""Writing of files, whole or not at all: under a temporary name, which is then renamed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, require_type, short_repr

UNFINISHED = re.compile(r"\..+\.\d+\.tmp")
"""Temporary names of `write_atomic`."""
_MOST_LINKS = 40
"""Most symbolic links that are followed: as many as the kernel follows."""


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file atomically (whole or not at all), creating its folder.

    A device or pipe (/dev/null, /dev/stdout) is written to directly, as renaming a file over it would replace
    it. Temporary files that killed writers of the same file have left are removed.

    Raises ShardCoreError naming a file that cannot be written.
    """
    require_type(path, (str, Path), "path", "a path of a file")
    require(
        "\0" not in str(path) and str(path) != "", f"cannot write {short_repr(str(path))}: no name of a file"
    )
    path = Path(path)
    temporary = _temporary_path(path.parent, path.name)
    try:
        if _is_device_or_open_file(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            for name in os.listdir(path.parent):
                if name.startswith(f".{path.name}.") and UNFINISHED.fullmatch(name):
                    remove_unfinished(path.parent / name)
        # It may be of an earlier process with this id, or a link to any place.
        temporary.unlink(missing_ok=True)
        with _create_locked(temporary) as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ShardCoreError(f"cannot write {path}: {error.strerror}") from None
        raise


def _create_locked(temporary: Path) -> BinaryIO:
    """Create a file that stays locked while open; the lock shows that its writer is alive."""
    import fcntl

    while True:
        f = open(temporary, "xb")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(f, fcntl.LOCK_EX)
        if os.fstat(f.fileno()).st_nlink:
            return f
        f.close()  # another writer removed it before it was locked


def remove_unfinished(path: Path) -> None:
    """Remove a temporary file whose writer was killed, that is, whose lock nobody holds."""
    import fcntl

    # No link is followed, and no writer of a pipe is waited for.
    with (
        contextlib.suppress(OSError),
        open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as f,
    ):
        if stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def require_writable(path: str | Path, what: str, folder: bool = False) -> None:
    """Raise ShardCoreError if a file, or files in a folder, could not be written at a path.

    what: name of the file, for messages. A file is written, as permissions do not tell all, and removed
      again.
    """
    path = Path(path)
    try:
        if path.exists() and path.is_dir() != folder:
            kinds = ("file", "folder") if folder else ("folder", "file")
            raise ShardCoreError("{} {} is a {}; it needs to be a {}".format(what, path, *kinds))
        if _is_device_or_open_file(path):
            return
        at = path if folder else path.parent
        while not os.path.lexists(at):
            at = at.parent
        temporary = _temporary_path(at, path.name)
        temporary.unlink(missing_ok=True)
        open(temporary, "xb").close()
        temporary.unlink()
    except OSError as error:
        raise ShardCoreError(f"{what} {path} cannot be written: {error.strerror}") from None


def _temporary_path(folder: Path, name: str) -> Path:
    """Path of this process's temporary file for writing a file atomically."""
    return folder / f".{name}.{os.getpid()}.tmp"


def _is_device_or_open_file(path: Path) -> bool:
    """Tell if a path is a device or pipe, or leads to an open file of a process."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _is_open_file(path))


def _is_open_file(path: Path) -> bool:
    """Tell if a link leads to an open file of a process, as /dev/stdout does, even if the target is a regular file."""
    for _ in range(_MOST_LINKS):
        if path.parent.resolve().match("/proc/*/fd"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def write_json(path: str | Path, value: Any) -> None:
    """Write a value to a JSON file atomically."""
    write_atomic(path, json_bytes(value))


_dumps = json.JSONEncoder(allow_nan=False).encode
"""JSON on one line, by C code. With `indent`, json is pure Python."""


def json_bytes(value: Any) -> bytes:
    """JSON formatted for people: a line for each key, and for each record in a list."""
    return (_json_lines(value, "\n") + "\n").encode()


def _json_lines(value: Any, end: str) -> str:
    """JSON text of a value, indented, with lists of records on lines of their own."""
    inner = end + " "
    if isinstance(value, Mapping) and value:
        return (
            "{"
            + ",".join(f"{inner}{_dumps(str(k))}: {_json_lines(v, inner)}" for k, v in value.items())
            + end
            + "}"
        )
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple) for entry in value):
        return "[" + ",".join(inner + _dumps(entry) for entry in value) + end + "]"
    return _dumps(value)


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file with a line for each row. The columns are the keys of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())
