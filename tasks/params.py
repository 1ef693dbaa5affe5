"""params.yaml: a section for each stage, and the shared setting."""

from pathlib import Path
from typing import TypeVar

from shardcore.errors import ShardCoreError
from shardcore.schema import build, read_yaml, show
from tasks import paths

T = TypeVar("T")
SECTIONS = ("setting", "tables", "measure", "train", "train_policy", "evaluate", "promote", "publish",
            "stack")


def section(name: str, cls: type[T], path: str | Path = paths.PARAMS) -> T:
    """A section as its config dataclass. Raises ShardCoreError for an unknown key or section."""
    params = read_yaml(path) or {}
    if not isinstance(params, dict):
        raise ShardCoreError(f"{path} holds {type(params).__name__}; it needs sections with keys")
    unknown = sorted(map(str, set(params) - set(SECTIONS)))
    if unknown:
        raise ShardCoreError(f"{path} has an unknown section {show(unknown[0])}; "
                             f"known are {', '.join(SECTIONS)}")
    found = params.get(name)
    return build(cls, {} if found is None else found, f"{path}, section {name!r}")
