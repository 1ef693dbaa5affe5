"""DVC's cache, checked against the hashes in its names: DVC takes what is there on trust.

A damaged entry would come back at every checkout, and even in place of what a stage has just made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

_BLOCK_BYTES = 1 << 24


def remove_damaged(logger: logging.Logger | logging.LoggerAdapter) -> None:
    """Remove the damaged entries of the results that dvc.lock names, and the copies of them in the working tree, so that the
    next `dvc repro` makes just these anew; each is named in a warning."""
    lock = Path("dvc.lock")
    if not lock.exists():
        return
    cache = Path(subprocess.check_output([sys.executable, "-m", "dvc", "cache", "dir"], text=True).strip()) / "files" / "md5"
    stages = yaml.safe_load(lock.read_text())["stages"].values()
    for out in (o for stage in stages for o in stage.get("outs", ())):
        for path, entry, md5 in _entries(cache, Path(out["path"]), out["md5"]):
            if not entry.exists() or (found := _md5(entry)) == md5:
                continue
            entry.chmod(0o644)
            entry.unlink()
            if path.is_file() and _md5(path) == found:
                path.unlink()
            logger.warning("DVC's cache entry %s of %s was damaged and is removed: what it held is made anew", entry, path)


def _entries(cache: Path, path: Path, md5: str) -> Iterator[tuple[Path, Path, str]]:
    """A result's files: path in the working tree, cache entry, the MD5 that it should have; of a directory its list first."""
    entry = cache / md5[:2] / md5[2:]
    yield path, entry, md5.removesuffix(".dir")
    if md5.endswith(".dir") and entry.exists():
        for file in json.loads(entry.read_bytes()):
            yield path / file["relpath"], cache / file["md5"][:2] / file["md5"][2:], file["md5"]


def _md5(path: Path) -> str:
    found = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as f:
        while block := f.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
