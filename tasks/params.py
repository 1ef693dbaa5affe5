"""params.yaml: a section for each stage, and the shared setting."""

from typing import TypeVar

from shardcore import files
from tasks import paths

T = TypeVar("T")
SECTIONS = ("setting", "tables", "measure", "train", "evaluate", "promote", "publish", "stack")


def section(name: str, cls: type[T]) -> T:
    """A section as its config dataclass. Raises ShardCoreError for an unknown key or section."""
    return files.read_params(paths.PARAMS, name, cls, SECTIONS)
