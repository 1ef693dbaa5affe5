"""What our JSON files share: a schema, its version, and a digest, which an edited file does not match."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardcore.errors import ShardCoreError
from shardcore.schema import read_json, show

VERSIONS = {"problem": 1, "pool": 1, "plan": 2, "grouped-plan": 1, "model": 1, "policy": 1, "towers": 1,
            "offers": 1, "hot-ids": 1, "row-counts": 1, "rows": 1, "rows-complete": 1}
"""By schema. A file of an earlier version is read by its migration.

A plan of version 1 names no kinds of sharding: see plans_v1.
"""


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def document(schema: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema": f"shardcore/{schema}", "version": VERSIONS[schema], **body}


def is_document(path: str | Path, schema: str) -> bool:
    """Whether a file says that it is of a schema."""
    try:
        data = read_json(path)
    except ShardCoreError:
        return False
    return isinstance(data, dict) and data.get("schema") == f"shardcore/{schema}"


def open_document(path: str | Path, schema: str) -> dict[str, Any]:
    return open_versions(path, schema)[0]


def open_versions(path: str | Path, schema: str) -> tuple[dict[str, Any], int]:
    """A document of the latest version, or an earlier one, and which that is."""
    return opened(read_json(path), schema, path)


def opened(data: Any, schema: str, path: str | Path) -> tuple[dict[str, Any], int]:
    """The same of a document that was read from a path."""
    latest = VERSIONS[schema]
    if not isinstance(data, dict) or data.get("schema") != f"shardcore/{schema}":
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        grouped = ": it is of one sharding group, which only price and export read" * (
            found == "shardcore/grouped-plan")
        raise ShardCoreError(f"{path} has schema {show(found)}{grouped}; expected 'shardcore/{schema}'")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= latest:
        raise ShardCoreError(f"{path} has version {show(version)} of {data['schema']}; this ShardCore reads "
                             f"{'1 to ' * (latest > 1)}{latest}")
    return {k: v for k, v in data.items() if k not in ("schema", "version")}, version


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "digest": digest(body)}


def unseal(body: dict[str, Any], path: str | Path) -> dict[str, Any]:
    found = body.pop("digest", None)
    if found != digest(body):
        raise ShardCoreError(f"{path} does not match its digest {show(found)}; "
                             "it was edited after ShardCore wrote it")
    return body
