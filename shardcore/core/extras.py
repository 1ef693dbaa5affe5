"""Packages beyond the core, each with the extra of this package that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.core.errors import ShardCoreError

EXTRA_OF = {
    "torch": "measure",
    "pyarrow": "measure",
    "fbgemm_gpu": "measure",
    "matplotlib": "report",
    "torchrec": "torchrec",
    "fsspec": "s3",
    "s3fs": "s3",
    "yaml": "pipeline",
}
"""Extra by the name that is imported."""


class MissingExtra(ShardCoreError, ImportError):
    """A package is not installed. The message names the extra that brings it."""


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise MissingExtra where an import within fails for lack of an extra's package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise MissingExtra(
            f"this needs {package}, which is not installed: pip install 'shardcore[{EXTRA_OF[package]}]'"
        ) from None
