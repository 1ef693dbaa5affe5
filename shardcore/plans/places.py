"""Local folders and fsspec URLs behind one interface."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.extras import explain_missing_extras
from shardcore.core.validation import require, require_type, short_repr
from shardcore.io import writing
from shardcore.io.schema import ABSENT


@dataclass(frozen=True)
class Remote:
    """A file or folder on an fsspec file system, with a few methods of Path."""

    fs: Any
    path: str

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def read_bytes(self) -> bytes:
        return self.call_file_system("cat_file")

    def call_file_system(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the remote file system with this file's path.

        Raises FileNotFoundError as the file system does, and ShardCoreError for any other failure.
        """
        try:
            return getattr(self.fs, method)(self.path, *args, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # each storage has its own exceptions
            raise Unreachable(
                f"cannot use {self}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
            ) from None


Place = Path | Remote


@contextmanager
def raise_plain_errors(place: Place, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Context that turns OSErrors into ShardCoreErrors of one line, and suppresses those in `but`."""
    try:
        yield
    except but:
        return
    except OSError as error:
        raise Unreachable(f"cannot use {error.filename or place}: {error.strerror or error}") from None


def open_place(root: str | Path) -> Place:
    """Local path or remote folder that a path or URL names.

    Raises ShardCoreError for an unknown URL scheme, a missing package, or an invalid folder name.
    """
    require_type(root, (str, Path), "plans", "a folder or URL")
    # A NUL byte would fail with an error that names nothing.
    require("\0" not in str(root), f"plans are at {short_repr(str(root))}, which is no name of a folder")
    if isinstance(root, Path) or "://" not in root:
        return Path(root)
    with explain_missing_extras():
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

    try:
        fs, path = url_to_fs(root, use_listings_cache=False)  # a cache misses what others write
    except Exception as error:  # each storage has its own exceptions
        raise ShardCoreError(
            f"plans are at {root}, which cannot be opened: {' '.join(str(error).split())[:200]}"
        ) from None
    # A file URL is a local folder, with locks and atomic renames.
    return Path(path) if isinstance(fs, LocalFileSystem) else Remote(fs, path)


def is_link(at: Place) -> bool:
    with raise_plain_errors(at):
        return isinstance(at, Path) and at.is_symlink()


def is_folder(at: Place) -> bool:
    """Tell if a path is neither a link nor a file. In an object store, any name may be a folder."""
    with raise_plain_errors(at):
        return not isinstance(at, Path) or not (at.is_symlink() or at.is_file())


def exists(at: Place) -> bool:
    """Tell if a file or folder exists, locally or on a remote file system."""
    with raise_plain_errors(at, ABSENT):
        # fsspec's `exists` takes any failure for a no.
        at.stat() if isinstance(at, Path) else at.call_file_system("info")
        return True
    return False


def list_names(folder: Place) -> list[str]:
    """Sorted names in a folder, without names that begin with a dot. Empty if the folder is missing."""
    paths = []
    with raise_plain_errors(folder, ABSENT):
        paths = (
            os.listdir(folder) if isinstance(folder, Path) else folder.call_file_system("ls", detail=False)
        )
    # File systems list full paths. Names that begin with a dot are locks and temporary files.
    names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
    return sorted(name for name in names if not name.startswith("."))


def write_file(at: Place, content: bytes) -> None:
    """Write a file atomically: whole or not at all."""
    with raise_plain_errors(at):
        if isinstance(at, Remote):
            at.call_file_system("pipe_file", content)
            return
        # Writing to a pipe may never end. A link may lead to a device.
        require(not at.exists() or at.is_file(), f"cannot write {at}: it is no regular file; remove it")
    writing.write_atomic(at, content)


def remove_file_or_folder(at: Place) -> None:
    """Remove a file, or a folder with its content, if present."""
    with raise_plain_errors(at, ABSENT):
        if not isinstance(at, Path):
            at.call_file_system("rm", recursive=True)
        elif at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink()
