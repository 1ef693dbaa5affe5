"""Damage of files, drawn by Hypothesis: odd values, keys lost or misspelt, bytes lost or replaced.

Digests are made right again, for they are no secret.
"""

import contextlib
import copy
import csv
import gzip
import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save
from sealing import sealed

from shardcore.io import files
from shardcore.io.model_files import tensor_sha256

Draw = Callable[[st.SearchStrategy[Any]], Any]
"""`draw` of Hypothesis's st.data()."""

_WORDS = (
    "x" * 100_000,
    "../../x",
    "/etc/passwd",
    "..",
    "report.md",
    "a\nb",
    "\x1b[31m",
    "\x00",
    "\ud800",
    "1",
)
_EDGES = (0, 1, -1, 1e308, -1e308, 1e-320, 2**53, 2**63, -(2**63), 10**40)
_DEEP = tuple(json.loads("[" * n + "]" * n) for n in (30, 200))
_LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(_EDGES)
)
ODD = st.recursive(
    _LEAF | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
) | st.sampled_from(_DEEP)
_EDGE_CASES_OF_YAML = (
    "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),  # a billion laughs
    "<<<<<<< HEAD\na: 1\n=======\n",
    "&x [*x]\n",
    "? {a: 1}\n: 2\n",
    "a: !!python/object:os.system x\n",
    "a: 2024-13-45\n",
    "<<: 3\n",
    "? [1]\n: 2\n",
    "1: 2\n",
    "a: 1e999\n",
    "--- 1\n--- 2\n",
    "a: 0x" + "f" * 400,
)
_NO_TABLE = (pa.ArrowException, AttributeError, OverflowError, TypeError, ValueError, RecursionError)
"""Raised for values that no table, and so no file, can hold."""


def one_of(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def once_in(draw: Draw, n: int) -> bool:
    return draw(st.integers(1, n)) == n


def damaged(value: Any, draw: Draw) -> Any:
    """A copy of a value with one to three things wrong."""
    root = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        held, key = root, ""
        for _ in range(one_of(draw, 1, 2, 3, 4, 5, 6, 0)):
            inner = held.setdefault(key, None) if held is root else held[key]
            if not (isinstance(inner, dict | list) and inner):
                break
            held, key = inner, one_of(draw, *(inner if isinstance(inner, dict) else range(len(inner))))
        match one_of(draw, "odd", "odd", "odd", "lost", "scaled", "misspelt", "repeated"):
            case "lost":
                held.pop(key, None) if isinstance(held, dict) else held.pop(key)
            case "scaled" if held is not root and type(held[key]) in (int, float):
                held[key] *= one_of(draw, -1, 2, 0.5, 1e3, 1e6, 1e12)
            case "misspelt" if isinstance(held, dict) and held is not root:
                held[one_of(draw, f"{key}_", "x" * 5000, "__class__", "a\nb", "")] = held.pop(key)
            case "repeated" if isinstance(held, list):
                held.extend([held[key]] * one_of(draw, 1, 2, 50))
            case _:
                held[key] = copy.deepcopy(draw(ODD))
    return root.get("")


def cut(content: bytes, draw: Draw) -> bytes:
    """Bytes of which some are lost, repeated or replaced."""
    first = draw(st.integers(0, len(content)))
    last = draw(st.integers(first, min(len(content), first + 200)) | st.just(len(content)))
    repeated = content[max(0, first - 100) : first] * 3
    odd = st.sampled_from(
        (b"", repeated, b"\x00" * 100, b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"1" * 5000)
    )
    return content[:first] + draw(odd | st.binary(max_size=100)) + content[last:]


def damage_json(path: Path, draw: Draw, seal: bool = False) -> None:
    if once_in(draw, 7):
        path.write_bytes(cut(path.read_bytes(), draw))
        return
    value = damaged(json.loads(path.read_bytes()), draw)
    if seal and isinstance(value, dict):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            value = sealed(value)
    path.write_text(json.dumps(value))


def damage_decision(folder: Path, draw: Draw) -> None:
    """Damage a decision, whose name is its digest, the pointer, a version's files, or put a link there."""
    [home] = [p for p in (folder / "plans").iterdir() if p.is_dir()]
    current = home / "current"
    match one_of(draw, "decision", "decision", "decision", "pointer", "version", "link"):
        case "decision":
            [path] = (home / "decisions").glob("*.json")
            damage_json(path, draw)
            with contextlib.suppress(ValueError, RecursionError):
                name = files.json_digest(json.loads(path.read_bytes()))
                path.rename(path.with_name(f"{name}.json"))
                current.write_text(f"{name}\n")
        case "pointer":
            odd = (b"../../x", b"", b"\xff\xfe", b"x" * 100_000, b"0" * 16, b"../decisions/x")
            current.write_bytes(one_of(draw, *odd, cut(current.read_bytes(), draw)))
        case "version":
            path = one_of(draw, *sorted((home / "versions").glob("*/*.json")))
            damage_json(path, draw, seal=path.name == "plan.json")
        case "link":
            link, version = home / "versions" / one_of(draw, "latest", "0" * 16, ".hidden"), home / "versions"
            link.symlink_to(one_of(draw, next(version.iterdir()), Path("nowhere"), link, folder))


def damage_part(folder: Path, draw: Draw) -> None:
    """A part of a dataset, named after its content again; or a link in the place of one."""
    home = folder / "measurements"
    if once_in(draw, 20):
        (home / one_of(draw, f"compute-{'0' * 24}.parquet", "compute-x.parquet")).symlink_to("nowhere")
        return
    path = one_of(draw, *sorted(home.glob("*.parquet")))
    content = path.read_bytes()
    path.unlink()
    content = cut(content, draw) if once_in(draw, 4) else _damaged_table(content, draw)
    digest = hashlib.sha256(content).hexdigest()[:24]
    (home / f"{path.name.split('-')[0]}-{digest}.parquet").write_bytes(content)


def _damaged_table(content: bytes, draw: Draw) -> bytes:
    table = pq.read_table(pa.BufferReader(content))
    i = draw(st.integers(0, table.num_columns - 1))
    name, column = table.schema.names[i], table.column(i)
    with contextlib.suppress(*_NO_TABLE):
        match one_of(draw, "cell", "cell", "cell", "lost", "misspelt", "type", "no head", "no rows"):
            case "cell":
                rows = column.to_pylist()
                k = draw(st.integers(0, len(rows) - 1))
                rows[k] = damaged(rows[k], draw)
                table = table.set_column(i, name, pa.array(rows, column.type))
            case "lost":
                table = table.remove_column(i)
            case "misspelt":
                table = table.rename_columns([f"{n}_" if n == name else n for n in table.schema.names])
            case "type":
                to = one_of(draw, pa.string(), pa.float64(), pa.int64(), pa.list_(pa.int64()))
                table = table.set_column(i, name, column.cast(to))
            case "no head":
                table = table.replace_schema_metadata(one_of(draw, None, {"shardcore": "{"}))
            case "no rows":
                table = table.slice(0, 0)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _damage_tensor(tensors: dict[str, np.ndarray], draw: Draw, values: bool = True) -> None:
    """Damage one of some tensors. values: its values, too."""
    name = one_of(draw, *sorted(tensors))
    tensor = tensors.pop(name)
    match one_of(draw, *["value", "value"] * values, "lost", "misspelt", "type", "shape", "length"):
        case "value":
            of_kind = {"f": (np.nan, np.inf, -1.0, -1e-9, 1e300, -1e300, 0.0, 1e9, 1e-300)}
            flat, odd = (
                tensor.flatten(),
                of_kind.get(tensor.dtype.kind, (-1, 0, 1, 2**62, 2**63 - 1, -(2**63))),
            )
            with np.errstate(over="ignore"):
                flat[draw(st.integers(0, flat.size - 1))] = np.array(one_of(draw, *odd)).astype(tensor.dtype)
            tensors[name] = flat.reshape(tensor.shape)
        case "misspelt":
            tensors[one_of(draw, f"{name}_", "", "x" * 5000, "a\nb", "network.7.weight")] = tensor
        case "type":
            to = one_of(draw, np.float16, np.float32, np.int32, np.int64, np.uint8, np.bool_)
            with np.errstate(invalid="ignore", over="ignore"):
                tensors[name] = tensor.astype(to)
        case "shape":
            tensors[name] = one_of(draw, tensor[None], tensor.ravel())
        case "length":
            tensors[name] = one_of(draw, tensor[..., :-1], np.concatenate([np.atleast_1d(tensor)] * 2))


def _saved(tensors: dict[str, np.ndarray], meta: dict[str, str] | None = None) -> bytes:
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, meta)


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Meta and tensors of a file of write_tensors."""
    with safe_open(path, "np") as file:
        names = list(file.keys())
        return json.loads(file.metadata()["shardcore"]), {name: file.get_tensor(name) for name in names}


def damage_model(folder: Path, draw: Draw, name: str) -> None:
    """MODEL.json of a model or a policy, or the weights, whose digest stands there."""
    meta, path = folder / name / f"{name}.json", folder / name / "weights.safetensors"
    if once_in(draw, 3):
        damage_json(meta, draw, seal=True)
        return
    content = path.read_bytes()
    if once_in(draw, 4):
        content = cut(content, draw)
    else:
        weights = load(content)
        _damage_tensor(weights, draw)
        content = _saved(weights)
    path.write_bytes(content)
    value = json.loads(meta.read_bytes()) | {"weights_sha256": hashlib.sha256(content).hexdigest()}
    meta.write_text(json.dumps(sealed(value)))


def damage_yaml(path: Path, draw: Draw) -> None:
    text = path.read_bytes()
    match one_of(draw, "value", "value", "cut", "odd"):
        case "cut":
            path.write_bytes(cut(text, draw))
        case "odd":
            path.write_bytes(one_of(draw, text, b"") + one_of(draw, *_EDGE_CASES_OF_YAML).encode())
        case "value":
            with contextlib.suppress(yaml.YAMLError, UnicodeError, ValueError, RecursionError):
                value = yaml.safe_dump(damaged(yaml.safe_load(text), draw))
                path.write_text(value, "utf-8", "surrogatepass")


_CELLS = (
    "",
    "x",
    "-1",
    "0",
    "nan",
    "inf",
    "1e999",
    "9" * 30,
    "1e308",
    "1e-320",
    "9x9999",
    "1.5",
    "\x1b[31m",
)
"""Values in place of a number or a word of a table."""


def damage_csv(path: Path, draw: Draw) -> None:
    """A cell of a CSV file, its bytes, or the name of a column."""
    if once_in(draw, 4):
        path.write_bytes(cut(path.read_bytes(), draw))
        return
    rows = list(csv.reader(path.read_text().splitlines()))
    row = one_of(draw, *rows)
    filled = [i for i, cell in enumerate(row) if cell]
    row[one_of(draw, *filled)] = one_of(draw, *_CELLS, *map(str, _EDGES))
    sink = io.StringIO()
    csv.writer(sink).writerows(rows)
    path.write_text(sink.getvalue())


def damage_log(path: Path, draw: Draw) -> None:
    """A word of a line, a line that is gone, repeated or another one, or the bytes of a text."""
    if once_in(draw, 4):
        path.write_bytes(cut(path.read_bytes(), draw))
        return
    lines = path.read_text().splitlines()
    number = one_of(draw, *range(len(lines)))
    other = one_of(draw, *_CELLS, *map(str, _EDGES))
    words = lines[number].split()
    words[one_of(draw, *range(len(words)))] = other
    lines[number] = one_of(
        draw, "", other, f"{lines[number]}\n{lines[number]}", " ".join(words), " ".join(words)
    )
    path.write_text("\n".join(lines))


def damage_job(folder: Path, draw: Draw) -> None:
    """A file of a traced step: what the job says, its problem or plan, times, lookups or traces."""
    path = one_of(draw, *sorted((folder / "job").glob("step-*/*")))
    match path.suffix:
        case ".npz":
            with np.load(path) as file:
                arrays = dict(file)
            _damage_tensor(arrays, draw)
            sink = io.BytesIO()
            np.savez(sink, **arrays)
            path.write_bytes(cut(path.read_bytes(), draw) if once_in(draw, 4) else sink.getvalue())
        case ".gz":
            plain = path.with_suffix("")
            plain.write_bytes(gzip.decompress(path.read_bytes()))
            damage_json(plain, draw)
            path.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
            if once_in(draw, 4):
                path.write_bytes(cut(path.read_bytes(), draw))
        case _:
            damage_json(path, draw, seal=path.name in ("job.json", "plan.json"))


def damage_tensors(path: Path, draw: Draw) -> None:
    """A file of write_tensors: its bytes, its meta or a tensor."""
    if once_in(draw, 4):
        path.write_bytes(cut(path.read_bytes(), draw))
        return
    meta, tensors = _opened(path)
    if draw(st.booleans()):
        meta = damaged(meta, draw)
    else:
        _damage_tensor(tensors, draw)
        meta["tensors_sha256"] = {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    with contextlib.suppress(ValueError, TypeError, RecursionError, AttributeError):
        meta = sealed(meta)
    path.write_bytes(_saved(tensors, None if once_in(draw, 20) else {"shardcore": json.dumps(meta)}))


def damage_rows(folder: Path, draw: Draw) -> None:
    """A folder of save_rows: a file lost, bytes of one, or its metadata, with a digest of it."""
    metadata = folder / "rows/.metadata"
    path = one_of(draw, metadata, *sorted((folder / "rows").glob("*.distcp")))
    match one_of(draw, "lost", "cut", "cut", "foreign", "metadata", "metadata"):
        case "lost":
            path.unlink()
        case "cut":
            path.write_bytes(cut(path.read_bytes(), draw))
        case "foreign":
            metadata.write_bytes(pickle.dumps(one_of(draw, os.getcwd, None, {}, [1], pickle.Unpickler)))
        case _:
            value = pickle.loads(metadata.read_bytes())
            _damage_metadata(value, draw)
            metadata.write_bytes(pickle.dumps(value))
    if metadata.exists() and draw(st.booleans()):
        digest = hashlib.sha256(metadata.read_bytes()).hexdigest()
        (folder / "rows/.metadata.sha256").write_text(f"{digest}  .metadata\n")


def _damage_metadata(value: Any, draw: Draw) -> None:
    """A tensor less, or another size, or one that another has, in what DCP says of a checkpoint."""
    tensors, files = value.state_dict_metadata, value.storage_data
    name, index = one_of(draw, *sorted(tensors)), one_of(draw, *sorted(files, key=str))
    odd = one_of(draw, (), (0,), (7,), (50, 8), (8, 50), (2**40, 8), (50, 8, 1))
    match one_of(draw, "lost", "size", "chunk", "file", "range", "odd"):
        case "lost":
            del tensors[name]
        case "size":
            tensors[name].size = torch.Size(odd)
        case "chunk":
            tensors[name].chunks[0].sizes = torch.Size(odd)
        case "file":
            del files[index]
        case "range":
            files[index].offset += one_of(draw, -1, 1, 64, 2**40)
        case "odd":
            setattr(value, one_of(draw, "storage_data", "state_dict_metadata"), one_of(draw, None, [], {}, 3))


def damage_batch(folder: Path, draw: Draw) -> None:
    """A torch.save of a batch, plain or gzipped."""
    path = folder / one_of(draw, "batch.pt", "batch.pt.gz")
    if once_in(draw, 3):
        path.write_bytes(cut(path.read_bytes(), draw))
        return
    tensors = list(torch.load(folder / "batch.pt", weights_only=True))
    i = draw(st.integers(0, 2))
    x = tensors[i]
    match one_of(draw, "foreign", "kind", "value"):
        case "foreign":
            tensors[i] = one_of(draw, None, 1, "x", [], {}, torch.Size([3]), torch.zeros(0))
        case "kind":
            huge = x[:1].expand(3 << 30, *x.shape[1:])  # takes no memory until it is copied
            kinds = (x.float(), x.int(), x.to("meta"), x.to_sparse(), x[None], huge, x > 0, x.flip(0))
            tensors[i] = kinds[draw(st.integers(0, len(kinds) - 1))]
        case "value":
            flat = x.flatten()
            flat[draw(st.integers(0, len(flat) - 1))] = one_of(draw, -1, 2**62, -(2**63), 2**63 - 1, 2**40, 7)
            tensors[i] = flat.reshape(x.shape)
    sink = io.BytesIO()
    whole = one_of(draw, tuple(tensors), tuple(tensors), tensors)
    torch.save(whole, sink, _use_new_zipfile_serialization=not once_in(draw, 10))
    content = sink.getvalue()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
