"""Models and policies on disk: a folder of safetensors and JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require
from shardcore.io import writing
from shardcore.io.envelope import digest, document, open_document, seal, unseal
from shardcore.io.schema import names_in, read_bytes

MODEL_JSON, MODEL_WEIGHTS = "model.json", "weights.safetensors"
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of safetensors, in addition to SafetensorError, for types that numpy does not have."""


def write_model(
    folder: str | Path, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray], schema: str = "model"
) -> None:
    """Write a model's folder: weights.safetensors, and SCHEMA.json with `meta` and the digest of the weights."""
    from safetensors.numpy import save

    weights = save({k: np.ascontiguousarray(v) for k, v in tensors.items()})
    writing.write_atomic(Path(folder) / MODEL_WEIGHTS, weights)
    writing.write_json(
        Path(folder) / f"{schema}.json",
        document(schema, seal({**meta, "weights_sha256": hashlib.sha256(weights).hexdigest()})),
    )


def read_model(folder: str | Path, schema: str = "model") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A model's meta and tensors. Both formats hold data only, so reading a model runs none of its code.

    Raises ShardCoreError for a file that is missing, damaged or edited.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    meta_path, path = Path(folder) / f"{schema}.json", Path(folder) / MODEL_WEIGHTS
    require(
        meta_path.name in names_in(folder),
        f"{folder} holds no {meta_path.name}; give the folder of a trained {schema} by --{schema}",
    )
    meta = unseal(open_document(meta_path, schema), meta_path)
    if hashlib.sha256(weights := read_bytes(path)).hexdigest() != meta.pop("weights_sha256", None):
        raise ShardCoreError(
            f"{path} does not match the digest in {meta_path.name}; it was cut short or edited"
        )
    try:
        return meta, load(weights)
    except (SafetensorError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is not safetensors: {error}") from None


def model_folders(folder: str | Path) -> list[Path]:
    """Folders of the models in a folder: itself, or the subfolders of a mixed model, one for each precision."""
    inner = [] if (Path(folder) / MODEL_JSON).exists() else sorted(Path(folder).glob(f"*/{MODEL_JSON}"))
    return [path.parent for path in inner] or [Path(folder)]


def model_digest(folder: str | Path, schema: str = "model") -> str:
    """16 hex digits that change with the model's weights or meta, except its provenance.

    A mixed model has the digests of its parts, joined by "+".
    """
    contents = [
        document(schema, open_document(one / f"{schema}.json", schema))
        for one in (model_folders(folder) if schema == "model" else [Path(folder)])
    ]
    return "+".join(
        digest({k: v for k, v in content.items() if k not in ("provenance", "digest")})
        for content in contents
    )
