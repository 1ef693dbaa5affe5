"""Named tensors with metadata in one safetensors file, sealed by digests: a flipped bit is refused.

The format holds data only, so reading a file runs none of its code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.io.envelope import document, opened, seal, unseal
from shardcore.io.model_files import UNREADABLE
from shardcore.io.schema import parse_json, read, require_file
from shardcore.io.writing import write_atomic

_META, _DIGESTS = "shardcore", "tensors_sha256"


def write_tensors(
    path: str | Path, schema: str, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    from safetensors.numpy import save

    own = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    body = seal({**meta, _DIGESTS: {name: tensor_sha256(tensor) for name, tensor in own.items()}})
    write_atomic(path, save(own, {_META: json.dumps(document(schema, body))}))


def read_tensors(path: str | Path, schema: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and tensors that `write_tensors` wrote. Raises ShardCoreError for any other file."""
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, "np") as file:
            about = (file.metadata() or {}).get(_META, "null")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is not safetensors: {error}") from None
    body = unseal(opened(parse_json(about.encode(), path), schema, path), path)
    digests = read(body.pop(_DIGESTS, None), Mapping[str, str], f"{path}: {_DIGESTS}")
    if digests != {name: tensor_sha256(tensor) for name, tensor in tensors.items()}:
        raise ShardCoreError(
            f"{path} has tensors that do not match their digests; it was cut short or edited"
        )
    return body, tensors


def tensor_sha256(tensor: np.ndarray) -> str:
    """Digest of a tensor's type, shape and cells."""
    sha256 = hashlib.sha256(f"{tensor.dtype.str} {tensor.shape}".encode())
    sha256.update(tensor.data if tensor.size else b"")
    return sha256.hexdigest()
