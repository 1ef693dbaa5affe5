"""Tensors on disk: trained models and policies, and files of named tensors.

A trained model or policy is a folder of safetensors and JSON, of one format for both. Rows of tables are one file of
safetensors with metadata. All are sealed by digests: a flipped bit is refused. These formats hold data only, so reading
a file runs none of its code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import require, short_repr
from shardcore.io import files, writing
from shardcore.io.envelope import (
    document_body,
    json_digest,
    open_document,
    read_document,
    remove_digest,
    sealed_document,
    with_schema,
)
from shardcore.io.schema import build_record, convert_value, list_names, parse_json, read_bytes, require_file

MODEL_JSON, MODEL_WEIGHTS = "model.json", "weights.safetensors"
_META, _DIGESTS = "shardcore", "tensors_sha256"
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of safetensors, in addition to SafetensorError, for types that numpy does not have."""


@dataclass(frozen=True)
class Tensor:
    """Declaration of a named tensor in a model's file: shape, range of values and data type."""

    shape: tuple[int, ...]
    ends: tuple[float, float]
    dtype: type[np.generic] = np.float64
    is_optional: bool = False


def require_tensors(found: Mapping[str, np.ndarray], declared: Mapping[str, Tensor]) -> None:
    """Raise ShardCoreError for a model's tensor that is missing, unknown, of a wrong shape or type, or out of range."""
    for name, right in declared.items():
        require(name in found or right.is_optional, f"weight {name!r} is missing")
    # An unknown weight would be ignored silently, so refuse it.
    unknown = sorted(set(found) - set(declared))
    require(not unknown, f"weight {', '.join(map(repr, unknown[:3]))} is not known")
    for name, right in declared.items():
        if name in found:
            values, (low, high) = found[name], right.ends
            require(
                values.shape == right.shape and values.dtype == right.dtype,
                f"weight {name!r} is {values.dtype} {list(values.shape)}; it needs to be "
                f"{np.dtype(right.dtype)} {list(right.shape)}",
            )
            # Negated, so that comparisons with NaN, which are False, count as wrong.
            wrong = values[~((values >= low) & (values <= high))].tolist()
            require(not wrong, f"weight {name!r} has {sum(wrong[:1]):g}; it needs {low:g} to {high:g}")


# --- folders of what was trained ----------------------------------------------------------------------------


def write_model(
    folder: str | Path, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray], schema: str = "model"
) -> None:
    """Write a model's folder: weights.safetensors, and SCHEMA.json with `meta` and the digest of the weights."""
    from safetensors.numpy import save

    weights = save({k: np.ascontiguousarray(v) for k, v in tensors.items()})
    writing.write_atomic(Path(folder) / MODEL_WEIGHTS, weights)
    writing.write_json(
        Path(folder) / f"{schema}.json",
        sealed_document(schema, {**meta, "weights_sha256": hashlib.sha256(weights).hexdigest()}),
    )


def read_model(folder: str | Path, schema: str = "model") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a model's metadata and tensors. Both formats hold data only, so reading a model runs no code.

    Raises ShardCoreError for a file that is missing, damaged or edited.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    meta_path, path = Path(folder) / f"{schema}.json", Path(folder) / MODEL_WEIGHTS
    require(
        meta_path.name in list_names(folder),
        f"{folder} holds no {meta_path.name}; give the folder of a trained {schema} by --{schema}",
    )
    meta = read_document(meta_path, schema)
    if hashlib.sha256(weights := read_bytes(path)).hexdigest() != meta.pop("weights_sha256", None):
        raise ShardCoreError(
            f"{path} does not match the digest in {meta_path.name}; it was cut short or edited"
        )
    try:
        return meta, load(weights)
    except (SafetensorError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is not safetensors: {error}") from None


@dataclass(frozen=True)
class TrainedFormat:
    """File format of a kind of trained model.

    schema: "model" or "policy".
    about: dataclass of its JSON, without the setting and names. It has `provenance`.
    names: names by position in its tensors, such as of features, by noun. Other ones would be read as these.
    """

    schema: str
    about: type[Any]
    names: Mapping[str, Sequence[str]]

    def write_trained(
        self,
        folder: str | Path,
        setting: Setting,
        meta: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray],
    ) -> None:
        """Write the folder of a trained model or policy."""
        names = {noun: list(of) for noun, of in self.names.items()}
        meta = {**meta, **names, "setting": files.setting_to_json(setting)}
        write_model(folder, meta, tensors, self.schema)

    def read_trained(self, folder: str | Path) -> tuple[Setting, dict[str, Any], dict[str, np.ndarray]]:
        """Read a trained model or policy: its setting, other metadata, and tensors, bit for bit.

        Raises ShardCoreError for files that are missing, cut short or edited, of another schema, or trained on other
        names than this ShardCore computes.
        """
        meta, tensors = read_model(folder, self.schema)
        for noun, names in self.names.items():
            trained_on = meta.pop(noun, None)
            require(
                trained_on == list(names),
                f"{self.schema} in {folder} was trained on {noun} {short_repr(trained_on)}; this ShardCore computes "
                f"{short_repr(list(names))}: train again",
            )
        # Without a setting nobody knows which hardware the weights are for.
        setting = build_record(Setting, meta.pop("setting", None), f"{folder}: setting")
        about = build_record(self.about, meta, str(folder))
        files.require_provenance(about.provenance, f"{folder}: provenance")
        return setting, meta, tensors


def model_folders(folder: str | Path) -> list[Path]:
    """Folders of the models in a folder: itself, or the subfolders of a mixed model, one for each precision."""
    inner = [] if (Path(folder) / MODEL_JSON).exists() else sorted(Path(folder).glob(f"*/{MODEL_JSON}"))
    return [path.parent for path in inner] or [Path(folder)]


def model_digest(folder: str | Path, schema: str = "model") -> str:
    """Digest of a model's weights and metadata, without provenance, in 16 hex digits.

    A mixed model has the digests of its parts, joined by "+".
    """
    contents = [
        with_schema(schema, open_document(one / f"{schema}.json", schema))
        for one in (model_folders(folder) if schema == "model" else [Path(folder)])
    ]
    return "+".join(
        json_digest({k: v for k, v in content.items() if k not in ("provenance", "digest")})
        for content in contents
    )


# --- one file of named tensors ------------------------------------------------------------------------------


def write_tensors(
    path: str | Path, schema: str, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write named tensors and metadata to one safetensors file."""
    from safetensors.numpy import save

    own = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    body = {**meta, _DIGESTS: {name: tensor_sha256(tensor) for name, tensor in own.items()}}
    writing.write_atomic(path, save(own, {_META: json.dumps(sealed_document(schema, body))}))


def read_tensors(path: str | Path, schema: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the metadata and tensors of a file of `write_tensors`. Raises ShardCoreError for any other file."""
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, "np") as file:
            about = (file.metadata() or {}).get(_META, "null")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is not safetensors: {error}") from None
    body = remove_digest(document_body(parse_json(about.encode(), path), schema, path), path)
    digests = convert_value(body.pop(_DIGESTS, None), Mapping[str, str], f"{path}: {_DIGESTS}")
    require(
        digests == {name: tensor_sha256(tensor) for name, tensor in tensors.items()},
        f"{path} has tensors that do not match their digests; it was cut short or edited",
    )
    return body, tensors


def tensor_sha256(tensor: np.ndarray) -> str:
    """SHA-256 of a tensor's type, shape and values."""
    sha256 = hashlib.sha256(f"{tensor.dtype.str} {tensor.shape}".encode())
    sha256.update(tensor.data if tensor.size else b"")
    return sha256.hexdigest()
