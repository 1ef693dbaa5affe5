"""How functions are compiled with numba, and where the result is kept.

Numba keeps what it compiled beside a function's file, and compiles again when that file changes; but it does not notice a
change of another file whose functions it took in. So the cache is a folder named after all compiled sources. Import this
before compiling anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import numba
from numba import njit
from numba.core.caching import UserProvidedCacheLocator as Locator

_PACKAGE = Path(__file__).parent
_SOURCES = ("compiling.py", "cost/compiled.py", "search/anneal/compiled/*.py")
_KEPT = 3
"""Folders of so many versions of the sources are kept."""

OPTIONS = {"cache": True, "error_model": "numpy", "_nrt": False}
"""Of a function that Python calls: kept on disk, without Python's errors, and without reference counts."""
inner = njit(error_model="numpy", _nrt=False)
"""Of a function that only compiled ones call."""


def copy_compiled(package: Path, copy: Path) -> None:
    """Give a copy of the package, with the same sources, what is compiled for it. Numba names its folders after the sources'."""
    made = cache_folder()
    for folder in {path.parent for pattern in _SOURCES for path in package.glob(pattern)}:
        source, target = (made / Locator.get_suitable_cache_subpath(str(f / "module.py"))
                          for f in (folder, copy / folder.relative_to(package)))
        if source.exists():
            shutil.copytree(source, copy / "__pycache__" / made.name / target.name)


def cache_folder() -> Path:
    """Beside the package's other compiled files or, where these cannot be written, in the user's cache."""
    sources = sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern))
    name = f"numba-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}"
    for parent in (_PACKAGE / "__pycache__", Path.home() / ".cache/shardcore"):
        with contextlib.suppress(OSError):
            (parent / name).mkdir(parents=True, exist_ok=True)
            (parent / name).touch()  # those used last are kept
            for old in sorted(parent.glob("numba-*"), key=lambda p: -p.stat().st_mtime)[_KEPT:]:
                shutil.rmtree(old, ignore_errors=True)
            return parent / name
    return Path()


numba.config.CACHE_DIR = str(cache_folder())
