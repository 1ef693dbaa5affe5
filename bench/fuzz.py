"""Does any file make a reader fail other than with one clear line? Damaged files of every format, read as
users' commands do.

Each case takes a sound file, damages it (a value replaced by an odd one, a key lost or misspelt, bytes cut or
flipped; digests are then made right again, for they are no secret), reads it and uses what was read. It may
be

  refused     a ShardCoreError of one printable line of at most 300 characters
  accepted    what was read can be priced, at a finite cost of 0 or more, or what else the format promises
  nonsense    accepted, but it cannot be used so
  exception   any other exception; hang: no end within 20 s; crash: the process ended

The last four must not occur. A case is its format and its number: `--only FORMAT --first N --count 1` shows
one again.

  python -m bench.fuzz --out FILE.jsonl --count 1500      so many of each format; what FILE has is not done
                                                          again
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from mlflow.exceptions import MlflowException

from flows.refresh import SECTIONS
from shardcore import files, grouped_plans, report, schema
from shardcore.cost import accuracy, fit, neural, ranges, replay_records
from shardcore.cost.model import CostModel, group_costs, price
from shardcore.draws.problems import ProblemConfig, draw_problem
from shardcore.errors import MOST_CHARACTERS, ShardCoreError
from shardcore.export import dmp_collection, fbgemm_statistics, torchrec_json
from shardcore.measure.replay import ReplayConfig
from shardcore.measurements import Spread, StepSample
from shardcore.provision import clusters, read_offers
from shardcore.publish import store
from shardcore.samples import dataset, replays
from shardcore.search import SHARDERS
from shardcore.search.learned import sharder
from shardcore.search.learned.policy import NETS, Policy, read_policy, write_policy
from shardcore.sharding_groups import CONTIGUOUS, GroupedPlan, Grouping, members, problem_of_group
from shardcore.types import COLLECTIVES, Placement, Plan, Problem, Setting, Shard
from shardcore.workload import lower
from tasks import cache, params, served_model

HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
if HAS_TORCHREC:
    from shardcore.export.torchrec import to_torchrec

ROOT = Path(__file__).parents[1]
LIMIT_S = 20
MEMORY_BYTES = 4 << 30
"""Of a process that reads, beside the libraries' own."""
OUTCOMES = ("refused", "accepted", "nonsense", "exception", "hang", "crash")


class Nonsense(Exception):
    """What was read cannot be used."""


# --- sound files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sound:
    """A folder of sound files of all formats, and what they hold."""

    folder: Path
    problem: Problem
    plan: Plan
    model: CostModel
    version: str

    @classmethod
    def read(cls, folder: Path) -> Sound:
        problem = files.read_problem(folder / "problem.json")
        plan = files.read_plan(folder / "plan.json", problem)
        return cls(folder, problem, plan, neural.load(folder / "model"), store.version_of(plan, problem))


def make(folder: Path) -> None:
    """Write sound files of all formats, with shipped measurements."""
    shipped = ROOT / "datasets" / "cpu-amd-epyc"
    [setting, *_] = dataset.settings(shipped)
    known, exchanges = dataset.read_compute(shipped, setting)[:150], dataset.read_comm(shipped, setting)[:40]
    model = fit.train(known, exchanges, setting, fit.FitConfig(epochs=1, hidden=(4,))).model
    neural.save(model, folder / "model")
    write_policy(folder / "policy", _untrained("dreamshard", setting))
    _write(folder / "offers.json", {"schema": "shardcore/offers", "version": 1, "offers": [
        {"name": "small", "devices": 2, "memory_bytes": 1 << 34, "price_per_hour": 1.5, "most_hosts": 3,
         "model": "model", "watts": 300.0},
        {"name": "large", "devices": 8, "memory_bytes": 1 << 36, "price_per_hour": 20.0, "model": "model",
         "speed": 1.5, "within_host_gbps": 100.0, "between_hosts_gbps": 10.0, "latency_ms": 0.05}]})
    pool = tuple({s.table.name: s.table for sample in known for s in sample.request.shards}.values())
    files.write_pool(folder / "pool.json", pool)
    measurements = folder / "measurements"
    dataset.write_compute(measurements, known[:6], dataset.write_pool(measurements, pool))
    dataset.write_comm(measurements, exchanges[:6])

    problem = draw_problem(pool, 0, setting, 0, ProblemConfig(devices=2, min_tables=4, max_tables=6,
                                                              max_dim=32))
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(problem.tables)),
                {"algorithm": "dealt"})
    cost = price(lower(plan, problem), model)
    files.write_problem(folder / "problem.json", problem)
    files.write_plan(folder / "plan.json", plan, problem)
    version = store.add(folder / "plans", problem, plan, {"total_ms": cost.total_ms}, "<html></html>")
    store.record(folder / "plans", store.Decision(
        problem.name, "first", "nothing was published", version, version, files.problem_digest(problem),
        cost.total_ms,
        provenance={"model": "m", "model_version": "1"}))
    took = StepSample(**vars(cost), step=Spread(cost.total_ms, cost.total_ms, cost.total_ms, 3),
                    oversubscribed=False)
    replays.keep(folder / "replays", problem, [("dealt", plan)], setting, ReplayConfig(), lambda _: [took])

    shutil.copy(ROOT / "params.yaml", folder)
    out = {"path": "data/measurements", "hash": "md5", "md5": f"{'ab' * 16}.dir", "size": 10, "nfiles": 2}
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": {
        "measure": {"cmd": "python -m flows.measure", "outs": [out]}}}))
    _write(folder / "request.json", [{"shards": [{"table": files.table_to_json(t)}
                                                 for t in problem.tables[:2]]},
                                     {"shards": [], "batch": 64}])
    law = {"heavy_hitters": [0.2, 0.1, 0.05], "zipf_q": 2.0, "zipf_s": 1.1}
    _write(folder / "fbgemm.json", {
        "embedding_specs": [[20000, 8], [300, 12]], "feature_table_map": [0, 0, 1],
        "pooling_params": {"Ls": [8.0, 9.0, 8.0]},
        "batch_params": {"Bs": [256, 256, 256]}, "indices_params_list": [law, law, law]})
    # One device could not hold all tables.
    grouping = Grouping(2, CONTIGUOUS, 5)
    one = GroupedPlan(grouping, plan, problem_of_group(problem, grouping))
    grouped_plans.write_grouped(folder / "grouped.json", one, problem)
    if HAS_TORCHREC:
        torchrec_json.write_torchrec(folder / "torchrec.json",
                                     to_torchrec(plan, problem, "model.bags", "cpu"))
        dmp_collection.write_dmp_collection(
            folder / "dmp.json", dmp_collection.to_dmp_collection(one, problem, "model.bags", "cpu"), 5)


def _untrained(name: str, setting: Setting) -> Policy:
    """A policy that reads and places like a trained one."""
    rng, shapes = np.random.default_rng(0), NETS[name].shapes
    weights = {k: rng.uniform(-1, 1, shape).astype(np.float32) for k, shape in shapes.items()}
    for k in ("sd", "scale_ms"):
        weights[k] = np.ones(shapes[k], np.float32)
    return Policy(name, setting, weights)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


# --- what users do with them --------------------------------------------------------------------------------


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise Nonsense(what)


def _is_cost(*values: Any) -> bool:
    found = np.concatenate([np.ravel(np.asarray(v, dtype=float)) for v in values])
    return bool(np.isfinite(found).all() and (found >= 0).all())


def _priced(plan: Plan, problem: Problem, model: CostModel) -> None:
    cost = price(lower(plan, problem), model)
    _require(_is_cost(cost.device_ms), f"it costs {cost.total_ms} ms")


def use_problem(folder: Path, sound: Sound) -> None:
    problem = files.read_problem(folder / "problem.json")
    files.write_problem(folder / "again.json", problem)
    _require(files.read_problem(folder / "again.json") == problem, "written and read again it is another")
    with contextlib.suppress(ShardCoreError):  # of what does not fit, say
        _priced(SHARDERS["lookup_greedy"](problem, sound.model), problem, sound.model)


def use_pool(folder: Path, sound: Sound) -> None:
    tables = files.read_pool(folder / "pool.json")
    _require(_is_cost(group_costs([[Shard.whole(t)] for t in tables], sound.model)), "a table's cost is no "
             "cost")


def use_plan(folder: Path, sound: Sound) -> None:
    _priced(files.read_plan(folder / "plan.json", sound.problem), sound.problem, sound.model)


def use_grouped(folder: Path, sound: Sound) -> None:
    found = grouped_plans.read_grouped(folder / "grouped.json", sound.problem)
    lower(found.plan, found.problem)
    _require(members(sound.problem.topology, found.grouping), "there are no groups")


def use_dmp(folder: Path, sound: Sound) -> None:
    arguments, every = dmp_collection.read_dmp_collection(folder / "dmp.json")
    _require(every >= 1 and arguments["world_size"] % arguments["sharding_group_size"] == 0, "groups differ")


def use_model(folder: Path, sound: Sound) -> None:
    model = neural.load(folder / "model")
    workload = lower(sound.plan, sound.problem)
    _require(_is_cost(price(workload, model).device_ms), "its price is no cost")
    sums = model.encode([p.shard for p in sound.plan.placements])
    low, high = model.interval(sums, 0.9)
    _require(_is_cost(low, high) and (low <= high).all(), "its interval is none")
    ranges.out_of_range(model, workload)


def use_policy(folder: Path, sound: Sound) -> None:
    policy = read_policy(folder / "policy")
    _priced(sharder.place(policy, policy.name, sound.problem, sound.model), sound.problem, sound.model)


def use_offers(folder: Path, sound: Sound) -> None:
    for cluster in clusters(sound.problem, read_offers(folder / "offers.json")):
        _require(_is_cost(cluster.price_per_hour, cluster.watts or 0.0), f"{cluster.words} has no price")


def use_plans(folder: Path, sound: Sound) -> None:
    name = sound.problem.name
    for decision in store.history(folder / "plans", name):
        _require(decision.problem == name, "a decision is another problem's")
    plan, problem = store.load_plan(folder / "plans", name)
    _require(problem.name == name, "the plan is another problem's")
    _priced(plan, problem, sound.model)
    store.prune(folder / "plans", name, store.FEWEST_KEPT)
    _require(store.load_plan(folder / "plans", name)[0] == plan, "pruning took the plan")


def use_replays(folder: Path, sound: Sound) -> None:
    rows = replay_records.judge([replays.read(folder / "replays")], sound.model)
    _require(_is_cost([(r.predicted_ms, r.replayed_ms, r.noise_ms) for r in rows]), "a replay's time is none")


def use_measurements(folder: Path, sound: Sound) -> None:
    where = folder / "measurements"
    for setting in dataset.settings(where):
        samples = [s for s in dataset.read_compute(where, setting) if s.error is None]
        _require(_is_cost([(s.total_ms, s.forward.q1_ms, s.backward.q3_ms, s.slowdown) for s in samples]
                          or 0.0),
                 "a timing is none")
        if samples:
            _require(_is_cost(accuracy.predict(sound.model, samples)), "what was measured cannot be priced")
        for s in dataset.read_comm(where, setting):
            ways = COLLECTIVES[s.request.collective]
            times_ms = [] if s.error else [x.median_ms for way in ways for x in getattr(s, way)]
            _require(s.error or _is_cost(times_ms, s.waiting_ms), "an exchange's time is none")
    dataset.disturbed_ids(where, 0.02)
    dataset.merge_parts(where)


def use_torchrec(folder: Path, sound: Sound) -> None:
    plan = torchrec_json.read_torchrec(folder / "torchrec.json")
    torchrec_json.read_qcomms(folder / "torchrec.json")
    _require(torchrec_json.from_json(torchrec_json.to_json(plan)) == plan, "written and read again it is "
             "another")


def use_fbgemm(folder: Path, sound: Sound) -> None:
    tables = fbgemm_statistics.reported_tables(folder / "fbgemm.json")
    _require(_is_cost(group_costs([[Shard.whole(t)] for t in tables], sound.model)), "a table's cost is no "
             "cost")


def use_params(folder: Path, sound: Sound) -> None:
    for name, cls in SECTIONS.items():
        params.section(name, cls, folder / "params.yaml")


def use_lock(folder: Path, sound: Sound) -> None:
    with contextlib.chdir(folder):
        for path, md5 in cache.results():
            _require((folder / path).resolve().is_relative_to(folder.resolve()), "a result is outside")
            _require(set(md5.removesuffix(".dir")) <= set("0123456789abcdef"), "a hash is none")


def use_request(folder: Path, sound: Sound) -> None:
    groups = [served_model.GroupInput(**g) for g in _objects(schema.read_json(folder / "request.json"))]
    served = served_model.ServedCostModel()
    served._model = sound.model
    try:
        answers = served.predict(None, groups)
    except MlflowException as error:
        _require(error.error_code == "INVALID_PARAMETER_VALUE", f"it is answered as {error.error_code}")
        raise ShardCoreError(error.message) from None
    _require(_is_cost([(a["ms"], a["forward_ms"], a["low_ms"], a["high_ms"]) for a in answers] or 0.0),
             "an answer is no cost")


def _objects(value: Any) -> list[dict[str, Any]]:
    """What MLflow passes on: it has checked the rest against the model's signature."""
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ShardCoreError("the request is no list of objects")
    return value


# --- damage -------------------------------------------------------------------------------------------------

ODD = (None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"),
       10**17, 2**53, 2**63,
       -(2**63), 10**40, "", "x", "x" * 100_000, "../../x", "/etc/passwd", "..", ".", "report.md", "a\nb",
       "\x1b[31m", "\x00",
       "\ud800", "名", "1", [], [[]], {}, {"a": {}}, [None], [1, "x"], ["x"] * 50, list(range(1000)), "deep")


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
        return content[:at] + content[at + rng.randrange(1, 200):]
    if what == 3:
        repeated = content[max(0, at - rng.randrange(1, 200)):at]
        return content[:at] + repeated * rng.choice([1, 3, 100]) + content[at:]
    if what == 4:
        return content[:at] + rng.randbytes(rng.choice([1, 4, 100])) + content[at:]
    return rng.choice([b"", b"\x00" * 100, b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"null", b"1" * 5000,
                       b"\xef\xbb\xbf" + content])


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
        (home / "current").write_bytes(rng.choice([b"../../x", b"", b"\xff\xfe", b"x" * 100_000, b"0" * 16,
                                                   b"../decisions/x",
                                                   cut((home / "current").read_bytes(), rng)]))
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
        (folder / "measurements" / rng.choice([f"compute-{'0' * 24}.parquet",
                                               "compute-x.parquet"])).symlink_to("nowhere")
        return
    path = rng.choice(sorted((folder / "measurements").glob("*.parquet")))
    content = path.read_bytes()
    if what < 0.3:
        content = cut(content, rng)
    else:
        content = _damaged_table(pq.read_table(pa.BufferReader(content)), rng)
    path.unlink()
    (path.parent
     / f"{path.name.split('-')[0]}-{hashlib.sha256(content).hexdigest()[:24]}.parquet").write_bytes(content)


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
            table = table.set_column(i, field.name, pa.array([rng.choice(["x", 1, 0.5, None, []])]
                                                             * len(table)))
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
    return rng.choice([None, 0, -1, 1, 2**31 - 1, 2**62, float("nan"), float("inf"), -0.5, 1e300, "", "x",
                       "../x", "t" * 10_000,
                       []])


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
    from safetensors.numpy import load, save

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
        weights[name] = weights[name][..., :-1] if rng.random() < 0.5 else np.concatenate([weights[name],
                                                                                           weights[name]])
    elif what == 4:
        weights[name] = weights[name][None] if rng.random() < 0.5 else weights[name].ravel()
    else:
        flat = weights[name].reshape(-1)
        flat[rng.randrange(flat.size)] = rng.choice([float("nan"), float("inf"), -1.0, -1e-9, 1e300, -1e300,
                                                     0.0, 1e9, 1e-300])
    return save({k: np.ascontiguousarray(v) for k, v in weights.items()})


def damage_yaml(path: Path, rng: random.Random) -> None:
    what = rng.random()
    text = path.read_bytes()
    if what < 0.25:
        path.write_bytes(cut(text, rng))
    elif what < 0.35:
        bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
        odd_text = rng.choice([
            bomb, "<<<<<<< HEAD\na: 1\n=======\n", "&x [*x]\n", "? {a: 1}\n: 2\n", "a: "
            "!!python/object:os.system x\n",
            "a: 2024-13-45\n", "<<: 3\n", "? [1]\n: 2\n", "1: 2\n", "a: 1e999\n", "--- 1\n--- 2\n",
            "a: 0x" + "f" * 400])
        path.write_text(odd_text if rng.random() < 0.7 else text.decode() + odd_text)
    else:
        with contextlib.suppress(yaml.YAMLError, UnicodeError, ValueError, RecursionError):
            path.write_text(yaml.safe_dump(damaged(yaml.safe_load(text), rng)), "utf-8", "surrogatepass")


# --- formats ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """parts: what it needs of the sound files. damage, use: as their names say."""

    parts: tuple[str, ...]
    damage: Callable[[Path, random.Random], None]
    use: Callable[[Path, Sound], None]


def _json(name: str, seal: Callable[[dict], dict] | None = None) -> Callable[[Path, random.Random], None]:
    return lambda folder, rng: damage_json(folder / name, rng, seal)


FORMATS = {
    "problem": Format(("problem.json",), _json("problem.json"), use_problem),
    "pool": Format(("pool.json",), _json("pool.json", sealed), use_pool),
    "plan": Format(("plan.json",), _json("plan.json", sealed), use_plan),
    "grouped": Format(("grouped.json",), _json("grouped.json", sealed), use_grouped),
    "model": Format(("model",), damage_model, use_model),
    "policy": Format(("policy",), lambda folder, rng: damage_model(folder, rng, "policy"), use_policy),
    "offers": Format(("offers.json",), _json("offers.json"), use_offers),
    "plans": Format(("plans",), damage_decision, use_plans),
    "replays": Format(("replays",), _json("replays/replays.json", sealed), use_replays),
    "measurements": Format(("measurements",), damage_part, use_measurements),
    "torchrec": Format(("torchrec.json",), _json("torchrec.json", sealed), use_torchrec),
    "dmp": Format(("dmp.json",), _json("dmp.json", sealed), use_dmp),
    "fbgemm": Format(("fbgemm.json",), _json("fbgemm.json"), use_fbgemm),
    "params": Format(("params.yaml",), lambda folder, rng: damage_yaml(folder / "params.yaml", rng),
                     use_params),
    "lock": Format(("dvc.lock",), lambda folder, rng: damage_yaml(folder / "dvc.lock", rng), use_lock),
    "request": Format(("request.json",), _json("request.json"), use_request),
}
if not HAS_TORCHREC:
    del FORMATS["torchrec"], FORMATS["dmp"]


def judge(name: str, number: int, sound: Sound, folder: Path, damage: bool = True) -> dict[str, Any]:
    """One case: its outcome, and what was said."""
    one, rng = FORMATS[name], random.Random(f"{name} {number}")
    for part in one.parts:
        (shutil.copytree if (sound.folder / part).is_dir() else shutil.copy)(sound.folder / part,
                                                                             folder / part)
    if damage:
        one.damage(folder, rng)
    row = {"format": name, "number": number}
    try:
        with _limited():
            one.use(folder, sound)
        return row | {"outcome": "accepted", "said": ""}
    except ShardCoreError as error:
        plain = str(error).isprintable() and len(str(error)) <= MOST_CHARACTERS and str(error)
        return row | {"outcome": "refused" if plain else "exception",
                      "said": str(error).replace(str(folder), "")}
    except Nonsense as error:
        return row | {"outcome": "nonsense", "said": str(error)}
    except TimeoutError as error:
        return row | {"outcome": "hang", "said": str(error)}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:200]} ({Path(frame.filename).name}:{frame.lineno})"
        return row | {"outcome": "exception", "said": said}


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(name: str, numbers: Sequence[int], sound: Sound) -> Iterator[dict[str, Any]]:
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            yield judge(name, number, sound, Path(folder))


# --- running ------------------------------------------------------------------------------------------------


def work(name: str, numbers: Sequence[int], sound: Path) -> None:
    """Judge cases in this process, whose memory is limited; a line of JSON on stdout for each."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    known = Sound.read(sound)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        row = judge(name, 0, known, Path(folder), damage=False)
        if row["outcome"] != "accepted":
            raise SystemExit(f"{name} is {row['outcome']} without damage: {row['said']}")
    for row in judged(name, numbers, known):
        print(json.dumps(row), flush=True)


def run(name: str, numbers: Sequence[int], sound: Path) -> Iterator[dict[str, Any]]:
    """Judge cases in a process of their own, in another one after each that ends it."""
    left = list(numbers)
    while left:
        command = [sys.executable, "-m", "bench.fuzz", "--work", str(sound), "--only", name, "--numbers",
                   json.dumps(left)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from rows
        left = left[len(rows):]
        if left:
            said = (done.stderr.strip().splitlines() or [""])[-1][:200]
            yield {"format": name, "number": left.pop(0), "outcome": "crash", "said": f"exit code "
                   f"{done.returncode}: {said}"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a line of JSON for each case; what is there is not done "
                        "again")
    parser.add_argument("--only", choices=FORMATS, help="one format (all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each format (0)")
    parser.add_argument("--count", type=int, default=100, help="cases of each format (100)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.only, args.numbers, args.work)
        return 0
    rows = ([json.loads(line) for line in args.out.read_text().splitlines()] if args.out
            and args.out.exists() else [])
    known = {(r["format"], r["number"]) for r in rows}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as sound, open(args.out or os.devnull, "a") as out:
        make(Path(sound))
        for name in [args.only] if args.only else FORMATS:
            wanted = [n for n in range(args.first, args.first + args.count) if (name, n) not in known]
            for i in range(0, len(wanted), 500):
                for row in run(name, wanted[i:i + 500], Path(sound)):
                    rows.append(row)
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                print(f"{name}: {min(i + 500, len(wanted))} of {len(wanted)}, {time.monotonic() - began:.0f} "
                      "s", flush=True)
    counts = Counter((r["format"], r["outcome"]) for r in rows)
    table = [(name, *(counts[name, o] for o in OUTCOMES)) for name in FORMATS]
    total = ("all", *(sum(row[i + 1] for row in table) for i in range(len(OUTCOMES))))
    print(report.text_table(("format", *OUTCOMES), [*table, total]))
    bad = [r for r in rows if r["outcome"] not in ("refused", "accepted")]
    for r in bad[:50]:
        print(f"{r['outcome']}: --only {r['format']} --first {r['number']} --count 1: {r['said']}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
