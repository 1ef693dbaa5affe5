"""Envelope of our JSON files: a schema, its version, and a digest, which an edited file does not match."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, short_repr
from shardcore.io.schema import Readable, T, build_record, read_json

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
    "replays": 3,
    "decision": 1,
    "job": 1,
    "traced": 1,
    "torchrec-plan": 2,
    "dmp-collection": 1,
    "network": 1,
    "profile": 1,
    "move-rates": 1,
    "job-report": 1,
}
"""Version of each schema. No other version is read."""
UNSEALED = ("problem", "towers", "offers", "decision", "profile", "network")
"""Schemas whose files hold no digest: people write those, or the file's name is its digest."""


def json_digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def with_schema(schema: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON document: body with the name of a schema and its version."""
    return {"schema": f"shardcore/{schema}", "version": VERSIONS[schema], **body}


def is_document(path: str | Path, schema: str) -> bool:
    """Tell if a file is a JSON document of a schema."""
    try:
        data = read_json(path)
    except ShardCoreError:
        return False
    return isinstance(data, dict) and data.get("schema") == f"shardcore/{schema}"


def open_document(path: str | Path | Readable, schema: str) -> dict[str, Any]:
    """Read the body of a JSON document of a schema. Raises ShardCoreError as `read_json` and `document_body` do."""
    return document_body(read_json(path), schema, path)


def document_body(data: Any, schema: str, path: object) -> dict[str, Any]:
    """Body of a parsed JSON document. Raises ShardCoreError for another schema or version."""
    head = with_schema(schema, {})
    if missing := [key for key in head if not isinstance(data, dict) or key not in data]:
        raise ShardCoreError(
            f"{path} lacks {' and '.join(map(repr, missing))}; it needs to be an object with {json.dumps(head)[1:-1]}"
        )
    if (found := data["schema"]) != head["schema"]:
        grouped = ": it is of one sharding group, which only price and export read" * (
            found == "shardcore/grouped-plan"
        )
        raise ShardCoreError(f"{path} has schema {short_repr(found)}{grouped}; expected {head['schema']!r}")
    require(
        type(data["version"]) is int and data["version"] == head["version"],
        f"{path} has version {short_repr(data['version'])} of {found}; this ShardCore reads {head['version']}",
    )
    return {k: v for k, v in data.items() if k not in ("schema", "version")}


def sealed_document(schema: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A whole JSON document: a body with its schema, its version and, unless UNSEALED, the digest of its content."""
    return with_schema(schema, body if schema in UNSEALED else add_digest(body))


def read_document(path: str | Path | Readable, schema: str) -> dict[str, Any]:
    """Read the body of a whole JSON document, and check its digest. Raises ShardCoreError for an edited file."""
    body = open_document(path, schema)
    return body if schema in UNSEALED else remove_digest(body, path)


def read_record(cls: type[T], path: str | Path | Readable, schema: str) -> T:
    """Read a JSON document whose body is a record. Raises ShardCoreError as `read_document` and `build_record` do."""
    return build_record(cls, read_document(path, schema), str(path), extra_keys=("schema", "version"))


def add_digest(body: Mapping[str, Any]) -> dict[str, Any]:
    """A document's body with the digest of its content."""
    return {**body, "digest": json_digest(body)}


def remove_digest(body: dict[str, Any], path: object) -> dict[str, Any]:
    """A document's body without its digest, which is checked. Raises ShardCoreError for a wrong digest."""
    if (found := body.pop("digest", None)) != json_digest(body):
        fault = "lacks its digest" if found is None else f"does not match its digest {short_repr(found)}"
        raise ShardCoreError(f"{path} {fault}; it was edited after ShardCore wrote it")
    return body
