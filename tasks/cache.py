"""Check of DVC's cache against the hashes in its file names, as DVC trusts its cache.

A damaged entry would come back at every checkout, and even replace a stage's new result.
"""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import short_repr
from shardcore.io import schema
from tasks.paths import LOCK

_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")


def remove_damaged_entries(logger: logging.Logger | logging.LoggerAdapter) -> None:
    """Remove damaged entries of DVC's cache for results in dvc.lock, and their copies in the working tree.

    The next `dvc repro` makes only these again. A warning names each.

    Raises ShardCoreError for an invalid dvc.lock.
    """
    if not LOCK.exists():
        return
    outs = read_locked_results()
    done = subprocess.run([sys.executable, "-m", "dvc", "cache", "dir"], capture_output=True, text=True)
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise ShardCoreError(f"DVC does not say where its cache is: {message}; see .dvc/config")
    cache = Path(done.stdout.strip()) / "files" / "md5"
    for path, md5 in outs:
        for copy, entry, right in _cache_entries(cache, path, md5):
            if not entry.is_file() or entry.is_symlink() or not _resolves_within(entry, cache):
                continue
            if (found := _file_md5(entry)) == right:
                continue
            entry.chmod(0o644)
            entry.unlink()
            # A copy with other content was changed by the user, and stays.
            if copy.is_file() and _resolves_within(copy, Path.cwd()) and _file_md5(copy) == found:
                copy.unlink()
            logger.warning(
                "DVC's cache entry %s of %s was damaged and is removed: what it held is made anew",
                entry,
                copy,
            )


def read_locked_results() -> list[tuple[Path, str]]:
    """Read (path, MD5) of the stage results in dvc.lock.

    Raises ShardCoreError for an invalid dvc.lock.
    """
    stages = _require_type(
        _require_type(schema.read_yaml(LOCK), dict, "it").get("stages", {}), dict, "stages"
    )
    outs = [
        _require_type(out, dict, "an out")
        for stage in stages.values()
        for out in _require_type(_require_type(stage, dict, "a stage").get("outs", []), list, "outs")
    ]
    return [
        (_require_project_path(out.get("path"), LOCK), _require_md5(out.get("md5"), LOCK)) for out in outs
    ]


def _require_type(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ShardCoreError(
            f"{LOCK}: {what} is {short_repr(value)}, which DVC did not write; take the "
            "file from git again, or remove it"
        )
    return value


def _resolves_within(path: Path, root: Path) -> bool:
    """Tell if a path, with links resolved, is inside the folder `root`."""
    with suppress(OSError, RuntimeError):  # for links that form a circle
        return path.parent.resolve().is_relative_to(root.resolve())
    return False


def _require_project_path(name: Any, where: Path) -> Path:
    """Parse a path inside the project. Raises ShardCoreError for a hidden, absolute or outside path."""
    if isinstance(name, str) and name and name.isprintable():
        path = Path(name)
        # No result is in a folder such as .git or .dvc.
        hidden = not path.parts or path.parts[0].startswith(".")
        if not hidden and not path.is_absolute() and ".." not in path.parts:
            return path
    raise ShardCoreError(f"{where} has path {short_repr(name)}; it needs to be one in the project")


def _require_md5(md5: Any, where: Path) -> str:
    if not isinstance(md5, str) or not _MD5.fullmatch(md5):
        raise ShardCoreError(
            f"{where} has md5 {short_repr(md5)}; it needs 32 hex digits, and .dir for a folder"
        )
    return md5


def _cache_entries(cache: Path, path: Path, md5: str) -> Iterator[tuple[Path, Path, str]]:
    """Files of a stage result in DVC's cache: path in the working tree, cache entry, expected MD5.

    For a folder, DVC's list of its files comes first.
    """
    entry = cache / md5[:2] / md5[2:]
    yield path, entry, md5.removesuffix(".dir")
    if md5.endswith(".dir") and entry.is_file():
        for file in schema.convert_value(schema.read_json(entry), tuple[Mapping[str, Any], ...], str(entry)):
            found = _require_md5(file.get("md5"), entry).removesuffix(".dir")
            yield (
                _require_project_path(str(path / str(file.get("relpath"))), entry),
                cache / found[:2] / found[2:],
                found,
            )


def _file_md5(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
