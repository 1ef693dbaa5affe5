"""Sound files of every format for bench/fuzz.py, and what users do with what they read of each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from mlflow.exceptions import MlflowException

from flows.refresh import SECTIONS
from shardcore import files, grouped_plans, schema
from shardcore.cost import accuracy, fit, neural, ranges, replay_records
from shardcore.cost.model import CostModel, group_costs, price
from shardcore.draws.problems import ProblemConfig, draw_problem
from shardcore.errors import ShardCoreError
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
from shardcore.step_cost import PARTS
from shardcore.types import COLLECTIVES, Placement, Plan, Problem, Setting, Shard
from shardcore.workload import lower
from tasks import cache, params, served_model

HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
if HAS_TORCHREC:
    from shardcore.export.torchrec import to_torchrec

ROOT = Path(__file__).parents[1]


class Nonsense(Exception):
    """What was read cannot be used."""


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
    took = StepSample(**{part: getattr(cost, part) for part in PARTS}, oversubscribed=False,
                      step=Spread(cost.total_ms, cost.total_ms, cost.total_ms, 3))
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
