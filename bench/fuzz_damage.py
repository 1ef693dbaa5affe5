"""Damage for bench/fuzz.py: odd values, keys that are lost or misspelt, bytes that are cut or flipped."""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors import safe_open
from safetensors.numpy import save

from shardcore.io import files
from shardcore.io.tensor_files import tensor_sha256

ODD = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    0.5,
    -0.5,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    10**17,
    2**53,
    2**63,
    -(2**63),
    10**40,
    "",
    "x",
    "x" * 100_000,
    "../../x",
    "/etc/passwd",
    "..",
    ".",
    "report.md",
    "a\nb",
    "\x1b[31m",
    "\x00",
    "\ud800",
    "名",
    "1",
    [],
    [[]],
    {},
    {"a": {}},
    [None],
    [1, "x"],
    ["x"] * 50,
    list(range(1000)),
    "deep",
)


def odd(rng: random.Random) -> Any:
    value = rng.choice(ODD)
    if value != "deep":
        return copy.deepcopy(value)
    for _ in range(rng.choice([10, 30, 200])):
        value = [value] if rng.random() < 0.5 else {"d": value}
    return value


def place(value: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """An entry within a value: what holds it and its key. Each level is as likely, however many entries it
    has."""
    found = None
    while isinstance(value, dict | list) and value and (found is None or rng.random() < 0.65):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found, value = (value, key), value[key]
    return found


def damaged(value: Any, rng: random.Random) -> Any:
    """A value with one or a few things wrong."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = place(value, rng)
        if not found or rng.random() < 0.01:
            return odd(rng)
        held, last = found
        what = rng.random()
        if what < 0.6:
            held[last] = odd(rng)
        elif what < 0.7:
            del held[last]
        elif what < 0.8 and isinstance(held[last], int | float) and not isinstance(held[last], bool):
            held[last] = held[last] * rng.choice([-1, 2, 0.5, 1e3, 1e6, 1e12])
        elif what < 0.9 and isinstance(held, dict):
            name = rng.choice([f"{last}_", "x" * 5000, "__class__", "a\nb", ""])
            held[name] = odd(rng) if rng.random() < 0.5 else held.pop(last)
        elif isinstance(held, list):
            held.extend([held[last]] * rng.choice([1, 2, 50]))
        else:
            held[last] = copy.deepcopy(held[rng.choice(list(held))])
    return value


def cut(content: bytes, rng: random.Random) -> bytes:
    """Bytes with some lost, flipped, repeated or foreign."""
    at = rng.randrange(len(content) + 1)
    what = rng.randrange(6)
    if what == 0:
        return content[:at]
    if what == 1:
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 8, 64])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if what == 2:
        return content[:at] + content[at + rng.randrange(1, 200) :]
    if what == 3:
        repeated = content[max(0, at - rng.randrange(1, 200)) : at]
        return content[:at] + repeated * rng.choice([1, 3, 100]) + content[at:]
    if what == 4:
        return content[:at] + rng.randbytes(rng.choice([1, 4, 100])) + content[at:]
    return rng.choice(
        [
            b"",
            b"\x00" * 100,
            b"[" * 5000,
            b'{"a":' * 5000,
            b"\xff\xfe",
            b"null",
            b"1" * 5000,
            b"\xef\xbb\xbf" + content,
        ]
    )


def damage_json(path: Path, rng: random.Random, seal: Callable[[dict], dict] | None = None) -> None:
    if rng.random() < 0.15:
        path.write_bytes(cut(path.read_bytes(), rng))
        return
    value = damaged(json.loads(path.read_bytes()), rng)
    if seal and isinstance(value, dict) and rng.random() < 0.95:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            value = seal(value)
    path.write_text(json.dumps(value))


def sealed(value: dict[str, Any], without: Sequence[str] = ("schema", "version", "digest")) -> dict[str, Any]:
    return {**value, "digest": files.digest({k: v for k, v in value.items() if k not in without})}


def damage_decision(folder: Path, rng: random.Random) -> None:
    """Of a decision, whose name is its digest; sometimes of the pointer, a version's files or links."""
    [home] = [p for p in (folder / "plans").iterdir() if p.is_dir()]
    what = rng.random()
    if what < 0.6:
        [path] = (home / "decisions").glob("*.json")
        damage_json(path, rng)
        with contextlib.suppress(ValueError, RecursionError):
            name = files.digest(json.loads(path.read_bytes()))
            path.rename(path.with_name(f"{name}.json"))
            (home / "current").write_text(f"{name}\n")
    elif what < 0.75:
        (home / "current").write_bytes(
            rng.choice(
                [
                    b"../../x",
                    b"",
                    b"\xff\xfe",
                    b"x" * 100_000,
                    b"0" * 16,
                    b"../decisions/x",
                    cut((home / "current").read_bytes(), rng),
                ]
            )
        )
    elif what < 0.9:
        path = rng.choice(sorted((home / "versions").glob("*/*.json")))
        damage_json(path, rng, sealed if path.name == "plan.json" else None)
    else:
        link = home / "versions" / rng.choice(["latest", "0" * 16, ".hidden"])
        link.symlink_to(rng.choice([next((home / "versions").iterdir()), Path("nowhere"), link, folder]))


def damage_part(folder: Path, rng: random.Random) -> None:
    """A part of a dataset, named after its content again; sometimes its pool, or a link."""
    what = rng.random()
    if what < 0.05:
        (
            folder / "measurements" / rng.choice([f"compute-{'0' * 24}.parquet", "compute-x.parquet"])
        ).symlink_to("nowhere")
        return
    path = rng.choice(sorted((folder / "measurements").glob("*.parquet")))
    content = path.read_bytes()
    if what < 0.3:
        content = cut(content, rng)
    else:
        content = _damaged_table(pq.read_table(pa.BufferReader(content)), rng)
    path.unlink()
    (
        path.parent / f"{path.name.split('-')[0]}-{hashlib.sha256(content).hexdigest()[:24]}.parquet"
    ).write_bytes(content)


def _damaged_table(table: pa.Table, rng: random.Random) -> bytes:
    i = rng.randrange(table.num_columns)
    field, what = table.schema.field(i), rng.random()
    try:
        if what < 0.1:
            table = table.remove_column(i)
        elif what < 0.2:
            table = table.rename_columns([f"{n}_" if k == i else n for k, n in enumerate(table.schema.names)])
        elif what < 0.3:
            table = table.append_column(rng.choice(["x", field.name]), table.column(i))
        elif what < 0.4:
            table = table.set_column(
                i, field.name, pa.array([rng.choice(["x", 1, 0.5, None, []])] * len(table))
            )
        else:
            rows = table.column(i).to_pylist()
            at = rng.randrange(len(rows))
            rows[at] = _damaged_cell(rows[at], rng)
            table = table.set_column(i, field, pa.array(rows, field.type))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass  # what no table can hold no file has
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _damaged_cell(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.8:
        value = list(value)
        i = rng.randrange(len(value))
        value[i] = _damaged_cell(value[i], rng)
        return value if rng.random() < 0.7 else value[:i]
    if isinstance(value, dict) and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: _damaged_cell(value[key], rng)}
    return rng.choice(
        [
            None,
            0,
            -1,
            1,
            2**31 - 1,
            2**62,
            float("nan"),
            float("inf"),
            -0.5,
            1e300,
            "",
            "x",
            "../x",
            "t" * 10_000,
            [],
        ]
    )


def damage_model(folder: Path, rng: random.Random, name: str = "model") -> None:
    """model.json or the weights, whose digest stands there; of a policy alike."""
    meta, path = folder / name / f"{name}.json", folder / name / "weights.safetensors"
    if rng.random() < 0.4:
        damage_json(meta, rng, sealed)
        return
    content = cut(path.read_bytes(), rng) if rng.random() < 0.3 else _damaged_weights(path.read_bytes(), rng)
    path.write_bytes(content)
    value = json.loads(meta.read_bytes())
    meta.write_text(json.dumps(sealed({**value, "weights_sha256": hashlib.sha256(content).hexdigest()})))


def _damaged_weights(content: bytes, rng: random.Random) -> bytes:
    from safetensors.numpy import load

    weights = {k: v.copy() for k, v in load(content).items()}
    name = rng.choice(sorted(weights))
    what = rng.randrange(7)
    if what == 0:
        del weights[name]
    elif what == 1:
        weights[rng.choice([f"{name}_", "network.7.weight", "exchange_x_forward"])] = weights.pop(name)
    elif what == 2:
        weights[name] = weights[name].astype(rng.choice([np.float32, np.int64, np.float16, np.uint8]))
    elif what == 3:
        weights[name] = (
            weights[name][..., :-1] if rng.random() < 0.5 else np.concatenate([weights[name], weights[name]])
        )
    elif what == 4:
        weights[name] = weights[name][None] if rng.random() < 0.5 else weights[name].ravel()
    else:
        flat = weights[name].reshape(-1)
        flat[rng.randrange(flat.size)] = rng.choice(
            [float("nan"), float("inf"), -1.0, -1e-9, 1e300, -1e300, 0.0, 1e9, 1e-300]
        )
    return save({k: np.ascontiguousarray(v) for k, v in weights.items()})


def damage_yaml(path: Path, rng: random.Random) -> None:
    what = rng.random()
    text = path.read_bytes()
    if what < 0.25:
        path.write_bytes(cut(text, rng))
    elif what < 0.35:
        bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
        )
        odd_text = rng.choice(
            [
                bomb,
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
            ]
        )
        path.write_text(odd_text if rng.random() < 0.7 else text.decode() + odd_text)
    else:
        with contextlib.suppress(yaml.YAMLError, UnicodeError, ValueError, RecursionError):
            path.write_text(yaml.safe_dump(damaged(yaml.safe_load(text), rng)), "utf-8", "surrogatepass")


def damage_tensors(path: Path, rng: random.Random) -> None:
    """A file of write_tensors: its bytes, its meta or a tensor. Digests are made right again."""
    content = path.read_bytes()
    if rng.random() < 0.3:
        path.write_bytes(cut(content, rng))
        return
    with safe_open(path, "np") as file:
        meta = json.loads(file.metadata()["shardcore"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if rng.random() < 0.5:
        meta = damaged(meta, rng)
    else:
        _damage_tensor(tensors, rng)
        meta["tensors_sha256"] = {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    with contextlib.suppress(ValueError, TypeError, RecursionError, AttributeError):
        meta = sealed(meta)
    path.write_bytes(
        save(
            {k: np.ascontiguousarray(v) for k, v in tensors.items()},
            {"shardcore": json.dumps(meta)} if rng.random() < 0.95 else None,
        )
    )


def damage_rows(folder: Path, rng: random.Random) -> None:
    """A folder of save_rows: a file lost, complete.json, or rows. Digests are mostly made right again."""
    complete = folder / "rows/complete.json"
    path = rng.choice(sorted((folder / "rows").glob("rows-*")))
    what = rng.random()
    if what < 0.1:
        path.unlink()
    elif what < 0.4:
        damage_json(complete, rng, sealed)
    elif what < 0.6:
        path.write_bytes(cut(path.read_bytes(), rng))
    else:
        with safe_open(path, "np") as file:
            meta = json.loads(file.metadata()["shardcore"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if what < 0.8:
            meta = damaged(meta, rng)
        else:  # what loads must still be the same weights
            _damage_tensor(tensors, rng, values=False)
        content = save(
            {k: np.ascontiguousarray(v) for k, v in tensors.items()}, {"shardcore": json.dumps(meta)}
        )
        path.write_bytes(content)
        said = json.loads(complete.read_bytes())
        said["files"][path.name] = hashlib.sha256(content).hexdigest()
        complete.write_text(json.dumps(sealed(said)))


def _damage_tensor(tensors: dict[str, np.ndarray], rng: random.Random, values: bool = True) -> None:
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    what = rng.randrange(6 if values else 5)
    if what == 1:
        tensors[rng.choice([f"{name}_", "", "x" * 5000, "a\nb"])] = tensor
    elif what == 2:
        tensors[name] = tensor.astype(rng.choice([np.float16, np.int32, np.uint8, np.bool_]))
    elif what == 3:
        tensors[name] = tensor[:-1] if len(tensor) > 1 and rng.random() < 0.5 else tensor[None]
    elif what == 4:
        tensors[name] = np.concatenate([tensor, tensor])
    elif what == 5:
        flat = tensor.reshape(-1).copy()
        flat[rng.randrange(flat.size)] = rng.choice([-1, 2**62, -(2**63), 2**63 - 1, 0, 1])
        tensors[name] = flat.reshape(tensor.shape)


def damage_batch(folder: Path, rng: random.Random) -> None:
    """A torch.save of a batch, plain or gzipped."""
    path = folder / rng.choice(["batch.pt", "batch.pt.gz"])
    what = rng.random()
    if what < 0.4:
        path.write_bytes(cut(path.read_bytes(), rng))
        return
    tensors = list(torch.load(folder / "batch.pt", weights_only=True))
    i = rng.randrange(3)
    if what < 0.5:
        tensors[i] = rng.choice([None, 1, "x", [], {}, torch.Size([3]), torch.zeros(0)])
    elif what < 0.7:
        tensors[i] = rng.choice(
            [
                tensors[i].float(),
                tensors[i].int(),
                tensors[i].to("meta"),
                tensors[i].to_sparse(),
                tensors[i][None],
                tensors[i][:1].expand(3 << 30, *tensors[i].shape[1:]),
                tensors[i] > 0,
                tensors[i].flip(0),
            ]
        )
    else:
        flat = tensors[i].reshape(-1).clone()
        flat[rng.randrange(len(flat))] = rng.choice([-1, 2**62, -(2**63), 2**63 - 1, 2**40, 7])
        tensors[i] = flat.reshape(tensors[i].shape)
    sink = io.BytesIO()
    torch.save(
        tuple(tensors) if rng.random() < 0.9 else tensors,
        sink,
        _use_new_zipfile_serialization=rng.random() < 0.9,
    )
    content = sink.getvalue()
    if rng.random() < 0.15:
        content = cut(content, rng)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
