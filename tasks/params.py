"""params.yaml: a section for each stage, and the shared setting."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import short_repr
from shardcore.io.schema import build_record, read_yaml
from tasks import paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
SECTIONS = (
    "setting",
    "tables",
    "measure",
    "train",
    "train_policy",
    "evaluate",
    "promote",
    "publish",
    "stack",
)


def require_section(name: str, path: str | Path = paths.PARAMS) -> None:
    """Raise ShardCoreError unless a parameter file has a section, which may be empty.

    Without it a stage would run, and DVC would then fail to record its result.
    """
    if name not in (read_yaml(path) or {}):
        raise ShardCoreError(
            f"{path} has no section {name!r}, which is newer than the file; add the line "
            f"`{name}: {{}}`, for its defaults"
        )


def read_section(name: str, cls: type[T], path: str | Path = paths.PARAMS) -> T:
    """Read a section of params.yaml as a config dataclass. Raises ShardCoreError for an unknown key or section."""
    params = read_yaml(path) or {}
    if not isinstance(params, dict):
        raise ShardCoreError(f"{path} holds {type(params).__name__}; it needs sections with keys")
    unknown = sorted(map(str, set(params) - set(SECTIONS)))
    if unknown:
        raise ShardCoreError(
            f"{path} has an unknown section {short_repr(unknown[0])}; known are {', '.join(SECTIONS)}"
        )
    values = params.get(name)
    return build_record(cls, {} if values is None else values, f"{path}, section {name!r}")


def part_of_config(config: object, cls: type[T]) -> T:
    """The part of a stage's config that is a config of the library, whose fields the stage's class inherits."""
    return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(cls)})
