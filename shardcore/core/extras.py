"""Packages beyond the core, each with the shell command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.core.errors import ShardCoreError

# TorchRec asks for the CUDA build of FBGEMM by name, so it is installed without its dependencies.
TORCHREC = "pip install 'shardcore[measure,torchrec]' && pip install --no-deps torchrec==1.8.0"
"""Shell command that installs TorchRec, its dependencies, and the matching torch and FBGEMM for the CPU."""
RECIPES = {
    **dict.fromkeys(("torch", "pyarrow", "fbgemm_gpu"), "pip install 'shardcore[measure]'"),
    **dict.fromkeys(
        ("torchrec", "tensordict", "torchmetrics", "tqdm", "pyre_extensions", "iopath"), TORCHREC
    ),
    **dict.fromkeys(("fsspec", "s3fs"), "pip install 'shardcore[s3]'"),
    "matplotlib": "pip install 'shardcore[report]'",
    "yaml": "pip install PyYAML",
}
"""Shell command that installs a package and what it needs, by the name that is imported."""


class MissingExtra(ShardCoreError, ImportError):
    """Raised when an optional package is not installed. The message has the command that installs the package."""


@contextmanager
def explain_missing_extras() -> Iterator[None]:
    """Context manager: raise MissingExtra, with the install command, where an import of an optional package fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in RECIPES:
            raise
        raise MissingExtra(
            f"this needs {package}, which is not installed ({error}): {RECIPES[package]}"
        ) from None
