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
class RemotePath:
    """A file or folder on an fsspec file system, with a few methods of Path."""

    fs: Any
    path: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.path.rstrip('/')}/{name}")

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


StorePath = Path | RemotePath


@contextmanager
def raise_plain_errors(place: StorePath, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Context that turns OSErrors into ShardCoreErrors of one line, and suppresses those in `but`."""
    try:
        yield
    except but:
        return
    except OSError as error:
        raise Unreachable(f"cannot use {error.filename or place}: {error.strerror or error}") from None


def open_place(root: str | Path) -> StorePath:
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
    return Path(path) if isinstance(fs, LocalFileSystem) else RemotePath(fs, path)


def is_link(path: StorePath) -> bool:
    with raise_plain_errors(path):
        return isinstance(path, Path) and path.is_symlink()


def is_folder(path: StorePath) -> bool:
    """Tell if a path is neither a link nor a file. In an object store, any name may be a folder."""
    with raise_plain_errors(path):
        return not isinstance(path, Path) or not (path.is_symlink() or path.is_file())


def path_exists(path: StorePath) -> bool:
    """Tell if a file or folder exists, locally or on a remote file system."""
    with raise_plain_errors(path, ABSENT):
        # fsspec's `exists` takes any failure for a no.
        path.stat() if isinstance(path, Path) else path.call_file_system("info")
        return True
    return False


def list_names(folder: StorePath) -> list[str]:
    """Sorted names in a folder, without names that begin with a dot. Empty if the folder is missing."""
    paths = []
    with raise_plain_errors(folder, ABSENT):
        paths = (
            os.listdir(folder) if isinstance(folder, Path) else folder.call_file_system("ls", detail=False)
        )
    # File systems list full paths. Names that begin with a dot are locks and temporary files.
    names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
    return sorted(name for name in names if not name.startswith("."))


def write_file(path: StorePath, content: bytes) -> None:
    """Write a file atomically: whole or not at all."""
    with raise_plain_errors(path):
        if isinstance(path, RemotePath):
            path.call_file_system("pipe_file", content)
            return
        # Writing to a pipe may never end. A link may lead to a device.
        require(not path.exists() or path.is_file(), f"cannot write {path}: it is no regular file; remove it")
    writing.write_atomic(path, content)


def remove_file_or_folder(path: StorePath) -> None:
    """Remove a file, or a folder with its content, if present."""
    with raise_plain_errors(path, ABSENT):
        if not isinstance(path, Path):
            path.call_file_system("rm", recursive=True)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
