"""Envelope of our JSON files: a schema, its version, and a digest, which an edited file does not match."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import shown
from shardcore.io.schema import Readable, read_json

VERSIONS = {
    "problem": 1,
    "pool": 1,
    "plan": 2,
    "grouped-plan": 1,
    "model": 1,
    "policy": 1,
    "towers": 1,
    "offers": 1,
    "hot-ids": 1,
    "row-counts": 1,
    "rows-complete": 2,
    "replays": 3,
    "decision": 1,
    "job": 1,
    "traced": 1,
    "torchrec-plan": 2,
    "dmp-collection": 1,
    "profile": 1,
    "move-rates": 1,
    "job-report": 1,
}
"""Version of each schema. No other version is read."""


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def document(schema: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with its schema and version."""
    return {"schema": f"shardcore/{schema}", "version": VERSIONS[schema], **body}


def is_document(path: str | Path, schema: str) -> bool:
    """Tell if a file has a schema."""
    try:
        data = read_json(path)
    except ShardCoreError:
        return False
    return isinstance(data, dict) and data.get("schema") == f"shardcore/{schema}"


def open_document(path: str | Path | Readable, schema: str) -> dict[str, Any]:
    """The body of a document's file. Raises ShardCoreError as `read_json` and `opened` do."""
    return opened(read_json(path), schema, path)


def opened(data: Any, schema: str, path: object) -> dict[str, Any]:
    """The body of a document that was read from a path. Raises ShardCoreError for another schema or version."""
    head = document(schema, {})
    if missing := [key for key in head if not isinstance(data, dict) or key not in data]:
        raise ShardCoreError(
            f"{path} lacks {' and '.join(map(repr, missing))}; it needs to be an object with {json.dumps(head)[1:-1]}"
        )
    if (found := data["schema"]) != head["schema"]:
        grouped = ": it is of one sharding group, which only price and export read" * (
            found == "shardcore/grouped-plan"
        )
        raise ShardCoreError(f"{path} has schema {shown(found)}{grouped}; expected {head['schema']!r}")
    if type(data["version"]) is not int or data["version"] != head["version"]:
        raise ShardCoreError(
            f"{path} has version {shown(data['version'])} of {found}; this ShardCore reads {head['version']}"
        )
    return {k: v for k, v in data.items() if k not in ("schema", "version")}


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with its digest."""
    return {**body, "digest": digest(body)}


def unseal(body: dict[str, Any], path: object) -> dict[str, Any]:
    """The body without its digest, which is removed. Raises ShardCoreError if it does not match."""
    if (found := body.pop("digest", None)) != digest(body):
        fault = "lacks its digest" if found is None else f"does not match its digest {shown(found)}"
        raise ShardCoreError(f"{path} {fault}; it was edited after ShardCore wrote it")
    return body
