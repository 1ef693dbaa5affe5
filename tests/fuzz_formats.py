"""All formats that ShardCore reads: who reads each, how it is damaged, and how it is used.

A format that is not here fails tests/test_readers.py: every function of shardcore/, tasks/ and flows/ that
reads a file is a reader of a row. So nothing is read that tests/test_fuzz.py does not damage.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from fuzz_damage import (
    Draw,
    damage_batch,
    damage_csv,
    damage_decision,
    damage_job,
    damage_json,
    damage_log,
    damage_model,
    damage_part,
    damage_rows,
    damage_tensors,
    damage_yaml,
)
from fuzz_files import ENTRY, HAS_TORCHREC, Sound, hot_collection
from mlflow.exceptions import MlflowException

from flows.refresh import SECTIONS, read_overrides
from shardcore.cli import published
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.cost import accuracy, neural, ranges, replay_metrics, traced_training
from shardcore.cost.model import CostModel, group_op_ms, price
from shardcore.cost.move_rates import read_move_rates
from shardcore.cost.nccl_tests import read_nccl_logs
from shardcore.cost.profile import load_network, load_profile
from shardcore.cost.profile_fit import Predictor, read_timings
from shardcore.cost.profile_model import ProfileModel
from shardcore.io import dataset, files, model_files, replays, schema, traced_samples
from shardcore.io.dlrm_datasets import read_dlrm_datasets_pool
from shardcore.io.hot_ids import read_hot_ids
from shardcore.io.row_counts import read_row_counts
from shardcore.io.towers import read_towers
from shardcore.plans import followed, store, traced_job
from shardcore.plans.move_price import price_move
from shardcore.report import follow_report
from shardcore.search import SHARDERS
from shardcore.search.decisions.provision import candidate_clusters, read_offers
from shardcore.search.decisions.towers import assign_tower_hosts
from shardcore.search.learned.policy import place_with_policy, read_policy
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import devices_of_groups
from shardcore.torchrec import dmp_collection, plan_files
from tasks import cache, params, refresh, served_model

if HAS_TORCHREC:
    from shardcore.torchrec.moves import checkpoints

Damage = Callable[[Path, Draw], None]
Use = Callable[[Path, Sound], None]


@dataclass(frozen=True)
class Format:
    """A format of files.

    parts: those of the sound files that it is.
    damage, use: of a folder with its parts. use raises ShardCoreError for files that are refused, and
        AssertionError for values that were read and cannot be.
    readers: functions that read it, as FILE:FUNCTION.
    """

    parts: tuple[str, ...]
    damage: Damage
    use: Use
    readers: tuple[str, ...]


FORMATS: dict[str, Format] = {}


def json_of(name: str, seal: bool = False) -> Damage:
    return lambda folder, draw: damage_json(folder / name, draw, seal)


def reads(
    name: str,
    *readers: str,
    parts: tuple[str, ...] = (),
    damage: Damage | None = None,
    seal: bool = False,
    needs: bool = True,
) -> Callable[[Use], Use]:
    """Enter the use of a format into FORMATS. Default: NAME.json, whose digest is made right if it has one."""

    def enter(use: Use) -> Use:
        if needs:
            FORMATS[name] = Format(
                parts or (f"{name}.json",), damage or json_of(f"{name}.json", seal), use, readers
            )
        return use

    return enter


def _is_cost(*values: Any) -> bool:
    found = np.concatenate([np.ravel(np.asarray(v, dtype=float)) for v in values])
    return bool(np.isfinite(found).all() and (found >= 0).all())


def _priced(plan: Plan, problem: Problem, model: CostModel) -> None:
    cost = price(lower(plan, problem), model)
    assert _is_cost(cost.device_ms), f"it costs {cost.total_ms} ms"


@reads("problem", "shardcore/io/files.py:read_problem")
def use_problem(folder: Path, sound: Sound) -> None:
    problem = files.read_problem(folder / "problem.json")
    files.write_problem(folder / "again.json", problem)
    assert files.read_problem(folder / "again.json") == problem, "written and read again it is another"
    with contextlib.suppress(ShardCoreError):  # of what does not fit, say
        _priced(SHARDERS["lookup_greedy"](problem, sound.model), problem, sound.model)


@reads(
    "pool",
    "shardcore/io/files.py:read_pool",
    "shardcore/cli/published.py:_with_statistics_of_file",
    seal=True,
)
def use_pool(folder: Path, sound: Sound) -> None:
    tables = files.read_pool(folder / "pool.json")
    assert _is_cost(group_op_ms([[Shard.whole(t)] for t in tables], sound.model)), "a table's cost is no cost"
    with contextlib.suppress(ShardCoreError):  # its tables have other widths
        published._with_statistics_of_file(folder / "pool.json", sound.problem)


@reads("plan", "shardcore/io/files.py:read_plan", seal=True)
def use_plan(folder: Path, sound: Sound) -> None:
    plan = files.read_valid_plan(folder / "plan.json", sound.problem)
    _priced(plan, sound.problem, sound.model)


@reads(
    "grouped",
    "shardcore/io/files.py:is_grouped_plan",
    "shardcore/io/files.py:read_grouped_plan",
    seal=True,
)
def use_grouped(folder: Path, sound: Sound) -> None:
    files.is_grouped_plan(folder / "grouped.json")
    found = files.read_grouped_plan(folder / "grouped.json", sound.problem)
    lower(found.plan, found.problem)
    assert devices_of_groups(sound.problem.topology, found.grouping), "there are no groups"


@reads("dmp", "shardcore/torchrec/dmp_collection.py:read_dmp_collection", seal=True, needs=HAS_TORCHREC)
def use_dmp(folder: Path, sound: Sound) -> None:
    arguments, every = dmp_collection.read_dmp_collection(folder / "dmp.json")
    assert every >= 1 and arguments["world_size"] % arguments["sharding_group_size"] == 0, "groups differ"


@reads(
    "model",
    "shardcore/cost/neural.py:load",
    "shardcore/io/model_files.py:read_model",
    "shardcore/io/model_files.py:read_trained",
    "shardcore/io/model_files.py:model_digest",
    parts=("model",),
    damage=lambda folder, draw: damage_model(folder, draw, "model"),
)
def use_model(folder: Path, sound: Sound) -> None:
    model = neural.load(folder / "model")
    model_files.model_digest(folder / "model")
    workload = lower(sound.plan, sound.problem)
    assert _is_cost(price(workload, model).device_ms), "its price is no cost"
    sums = model.encode([p.shard for p in sound.plan.placements])
    low, high = model.ms_interval(sums, 0.9)
    assert _is_cost(low, high) and (low <= high).all(), "its interval is none"
    ranges.describe_out_of_range(model, workload)


@reads(
    "policy",
    "shardcore/search/learned/policy.py:read_policy",
    parts=("policy",),
    damage=lambda folder, draw: damage_model(folder, draw, "policy"),
)
def use_policy(folder: Path, sound: Sound) -> None:
    policy = read_policy(folder / "policy")
    _priced(place_with_policy(policy, policy.name, sound.problem, sound.model), sound.problem, sound.model)


@reads("offers", "shardcore/search/decisions/provision.py:read_offers")
def use_offers(folder: Path, sound: Sound) -> None:
    for cluster in candidate_clusters(sound.problem, read_offers(folder / "offers.json")):
        assert _is_cost(cluster.price_per_hour), f"{cluster.words} has no price"


@reads(
    "plans",
    *(
        f"shardcore/plans/store.py:{name}"
        for name in ("_read_decision", "is_version_intact", "_current_decision_id")
    ),
    parts=("plans",),
    damage=damage_decision,
)
def use_plans(folder: Path, sound: Sound) -> None:
    name = sound.problem.name
    for decision in store.decision_history(folder / "plans", name):
        assert decision.problem == name, "a decision is another problem's"
    plan, problem = store.load_plan(folder / "plans", name)
    assert problem.name == name, "the plan is another problem's"
    _priced(plan, problem, sound.model)
    store.prune_versions(folder / "plans", name, store.FEWEST_KEPT)
    assert store.load_plan(folder / "plans", name)[0] == plan, "pruning took the plan"


@reads(
    "replays",
    "shardcore/io/replays.py:_read_body",
    "shardcore/io/replays.py:_is_replay_file",
    parts=("replays",),
    damage=json_of("replays/replays.json", seal=True),
)
def use_replays(folder: Path, sound: Sound) -> None:
    rows = replay_metrics.judge_replays([replays.read_replays(folder / "replays")], sound.model)
    assert _is_cost([(r.predicted_ms, r.replayed_ms, r.noise_ms) for r in rows]), "a replay's time is none"


@reads(
    "measurements",
    "shardcore/io/dataset_parts.py:_read_part",
    "shardcore/io/dataset_parts.py:_read_bounded",
    parts=("measurements",),
    damage=damage_part,
)
def use_measurements(folder: Path, sound: Sound) -> None:
    where = folder / "measurements"
    for setting in dataset.dataset_settings(where):
        samples = [s for s in dataset.read_compute_samples(where, setting) if s.error is None]
        assert _is_cost(
            [(s.total_ms, s.forward.q1_ms, s.backward.q3_ms, s.slowdown) for s in samples] or 0.0
        ), "a timing is none"
        if samples:
            assert _is_cost(accuracy.predict_op_ms(sound.model, samples)), (
                "what was measured cannot be priced"
            )
        for s in dataset.read_collective_samples(where, setting):
            ways = s.request.definition.directions
            times_ms = [] if s.error else [x.median_ms for way in ways for x in getattr(s, way)]
            assert s.error or _is_cost(times_ms, s.waiting_ms), "an exchange's time is none"
    dataset.disturbed_sample_ids(where, 0.02)
    dataset.merge_parts(where)


@reads("torchrec", "shardcore/torchrec/plan_files.py:_read_plan_file", seal=True, needs=HAS_TORCHREC)
def use_torchrec(folder: Path, sound: Sound) -> None:
    plan = plan_files.read_torchrec(folder / "torchrec.json")
    plan_files.read_qcomms(folder / "torchrec.json")
    assert plan_files.plan_from_json(plan_files.plan_to_json(plan)) == plan, (
        "written and read again it is another"
    )


@reads(
    "params",
    "tasks/params.py:read_section",
    "tasks/params.py:require_section",
    "tasks/refresh.py:override_params",
    "flows/refresh.py:read_overrides",
    parts=("params.yaml",),
    damage=lambda folder, draw: damage_yaml(folder / "params.yaml", draw),
)
def use_params(folder: Path, sound: Sound) -> None:
    for name, cls in SECTIONS.items():
        params.read_section(name, cls, folder / "params.yaml")
        params.require_section(name, folder / "params.yaml")
    assert read_overrides(folder / "params.yaml"), "a demo would override nothing"
    with contextlib.chdir(folder):
        refresh.override_params({"train": {"epochs": 3}}, SECTIONS)
        assert params.read_section("train", SECTIONS["train"]).epochs == 3, "a written parameter is another"


@reads(
    "lock",
    "tasks/cache.py:read_locked_results",
    "flows/train.py:data_version",
    parts=("dvc.lock",),
    damage=lambda folder, draw: damage_yaml(folder / "dvc.lock", draw),
)
def use_lock(folder: Path, sound: Sound) -> None:
    with contextlib.chdir(folder):
        for path, md5 in cache.read_locked_results():
            assert (folder / path).resolve().is_relative_to(folder.resolve()), "a result is outside"
            assert set(md5.removesuffix(".dir")) <= set("0123456789abcdef"), "a hash is none"


@reads(
    "cache",
    "tasks/cache.py:_cache_entries",
    "tasks/cache.py:_file_md5",
    parts=("cache",),
    damage=json_of(f"cache/{ENTRY}"),
)
def use_cache(folder: Path, sound: Sound) -> None:
    md5 = ENTRY.removesuffix(".dir")
    entry = folder / md5[:2] / md5[2:]
    entry.parent.mkdir()
    (folder / "cache" / ENTRY).rename(f"{entry}.dir")
    for copy, entry, right in cache._cache_entries(folder, Path("data"), ENTRY):
        assert not copy.is_absolute() and ".." not in copy.parts, "a result is outside"
        assert entry.parent.parent == folder and len(right) == 32, "an entry is outside"
        if entry.is_file():
            cache._file_md5(entry)


@reads(
    "users",
    "tasks/refresh.py:remove_ended_dvc_users",
    "tasks/refresh.py:dvc_error_reason",
    parts=(".dvc",),
    damage=json_of(".dvc/tmp/rwlock"),
)
def use_users(folder: Path, sound: Sound) -> None:
    with contextlib.chdir(folder):
        refresh.remove_ended_dvc_users()
        left = json.loads(Path(".dvc/tmp/rwlock").read_bytes())
        refresh.dvc_error_reason(["error: Unable to acquire lock"])
        if not left:
            raise ShardCoreError("the list of users is not DVC's; it is written anew")
        users = [*left["write"].values(), *(user for each in left["read"].values() for user in each)]
        assert all(psutil.pid_exists(user["pid"]) for user in users), "a process that is gone is kept"


@reads("towers", "shardcore/io/towers.py:read_towers")
def use_towers(folder: Path, sound: Sound) -> None:
    half = len(sound.problem.topology) // 2
    topology = sound.problem.topology
    devices = tuple(replace(d, host=f"host-{i // half}") for i, d in enumerate(topology.devices))
    on_hosts = replace(sound.problem, topology=replace(topology, devices=devices))
    found = assign_tower_hosts(on_hosts, read_towers(folder / "towers.json", on_hosts), sound.model)
    assert 0 <= found.affinity_inside <= 1 + 1e-9 and _is_cost(found.loads), "affinity or loads are none"
    _priced(SHARDERS["lookup_greedy"](found.problem, sound.model), found.problem, sound.model)


@reads(
    "hot_ids",
    "shardcore/io/hot_ids.py:read_hot_ids",
    "shardcore/io/model_files.py:read_tensors",
    parts=("hot.safetensors",),
    damage=lambda folder, draw: damage_tensors(folder / "hot.safetensors", draw),
)
def use_hot_ids(folder: Path, sound: Sound) -> None:
    for hot in read_hot_ids(folder / "hot.safetensors").values():
        assert len(hot.cold_ids(0, 3)) == 3 and hot.digest >= 0, "cold rows have no ids"
        assert 0 <= hot.ids[0] and hot.ids[-1] < hot.rows, "an id is no row"


@reads(
    "row_counts",
    "shardcore/io/row_counts.py:read_row_counts",
    parts=("counts.safetensors",),
    damage=lambda folder, draw: damage_tensors(folder / "counts.safetensors", draw),
)
def use_row_counts(folder: Path, sound: Sound) -> None:
    found = read_row_counts(folder / "counts.safetensors")
    for name, counts in found.counts.items():
        of = found.table_counts(name, len(counts))
        assert 0 <= int(of.sum()) < 2**62 and (of >= 0).all(), "counts overflow"


@reads(
    "batch",
    *(f"shardcore/io/dlrm_datasets.py:{name}" for name in ("_read_batch", "_unpacked_file")),
    parts=("batch.pt", "batch.pt.gz"),
    damage=damage_batch,
)
def use_batch(folder: Path, sound: Sound) -> None:
    for name in ("batch.pt", "batch.pt.gz"):
        for table in read_dlrm_datasets_pool(folder / name):
            assert table.rows >= 1 and table.pooling >= 0, "a table has no rows"


@reads(
    "rows",
    "shardcore/torchrec/moves/checkpoint_files.py:checked_metadata",
    "shardcore/torchrec/moves/checkpoint_files.py:_slice_file",
    parts=("rows",),
    damage=damage_rows,
    needs=HAS_TORCHREC,
)
def use_rows(folder: Path, sound: Sound) -> None:
    wanted = hot_collection()
    checkpoints.load_rows(wanted, sound.folder / "rows")
    found = hot_collection()
    checkpoints.load_rows(found, folder / "rows")
    of_wanted = wanted.state_dict()
    # Rows may have been kept as FP16.
    same = all(
        torch.allclose(tensor, of_wanted[name], atol=1e-3) for name, tensor in found.state_dict().items()
    )
    assert same, "it loads other weights"


@reads("profile", "shardcore/cost/profile.py:_read")
def use_profile(folder: Path, sound: Sound) -> None:
    profile = load_profile(folder / "profile.json")
    _priced(sound.plan, sound.problem, ProfileModel(profile, sound.model.setting))


@reads("network", "shardcore/cost/profile.py:_read")
def use_network(folder: Path, sound: Sound) -> None:
    profile = load_profile("cpu").on_network(load_network(folder / "network.json"))
    _priced(sound.plan, sound.problem, ProfileModel(profile, sound.model.setting))


@reads("move-rates", "shardcore/cost/move_rates.py:read_move_rates", seal=True)
def use_move_rates(folder: Path, sound: Sound) -> None:
    rates = read_move_rates(folder / "move-rates.json")
    on_last = tuple(
        Placement("column", Shard.whole(t), (len(sound.problem.topology) - 1,)) for t in sound.problem.tables
    )
    price = price_move(sound.plan, Plan(on_last), sound.problem, rates=rates)
    assert _is_cost(list(price.overhead_s.values()), list(price.seconds.values())), "a move takes no time"


@reads(
    "job-report",
    "shardcore/plans/followed.py:read_reports",
    parts=("job-report",),
    damage=lambda folder, draw: damage_json(folder / "job-report/jobs/trainer.json", draw, True),
)
def use_job_report(folder: Path, sound: Sound) -> None:
    [report] = followed.read_reports(folder, "job-report")
    if isinstance(report, ShardCoreError):
        raise report
    assert follow_report.job_text(report, 3.0) and all(map(follow_report.event_text, report.events))


@reads(
    "timings",
    "shardcore/cost/profile_fit.py:read_timings",
    parts=("timings.csv",),
    damage=lambda folder, draw: damage_csv(folder / "timings.csv", draw),
)
def use_timings(folder: Path, sound: Sound) -> None:
    timings, reasons = read_timings(folder / "timings.csv")
    if timings:
        assert _is_cost(Predictor(timings).times_us(load_profile("cpu").rate_values)), (
            "a timing cannot be priced"
        )
    if reasons:
        raise ShardCoreError(f"timings.csv: {next(iter(reasons))}")


@reads(
    "nccl log",
    "shardcore/cost/nccl_tests.py:read_nccl_logs",
    parts=("links.log",),
    damage=lambda folder, draw: damage_log(folder / "links.log", draw),
)
def use_log(folder: Path, sound: Sound) -> None:
    profile = load_profile("nvidia-h100-sxm")
    timings, reasons = read_nccl_logs([folder / "links.log"], profile)
    if timings:
        assert _is_cost(Predictor(timings).times_us(profile.rate_values)), "a timing cannot be priced"
    if reasons:
        raise ShardCoreError(f"links.log: {next(iter(reasons))}")


@reads(
    "job",
    *(f"shardcore/io/job_folder.py:{name}" for name in ("read_lookups", "_read_facts", "read_step")),
    *(f"shardcore/io/kineto.py:{name}" for name in ("__post_init__", "_add_header")),
    "shardcore/measure/traces/job.py:_file_digest",
    parts=("job",),
    damage=damage_job,
)
def use_job(folder: Path, sound: Sound) -> None:
    job = traced_job.read_job_traces(folder / "job")
    for rank in (rank for step in job.traced.steps for rank in step.ranks):
        assert _is_cost(list(rank.ms.values()), rank.hidden_ms), "a part of a step takes no time"
        assert sum(rank.ms.values()) == pytest.approx(rank.total_ms), "parts are not the step"
    checked = traced_job.check_traced_job(job, sound.model)
    assert _is_cost(checked.before.cost.device_ms, checked.after.cost.device_ms), "its price is no cost"
    if remarks := (*job.remarks, *job.traced.remarks):
        raise ShardCoreError(f"job: {remarks[0]}")


@reads(
    "traced",
    "shardcore/io/traced_samples.py:_read_bodies",
    parts=("traces",),
    damage=json_of("traces/sample/traced.json", seal=True),
)
def use_traced(folder: Path, sound: Sound) -> None:
    for sample in traced_samples.read_traced_samples([folder]):
        seen = traced_training.observe_samples(sound.model, [sample])
        assert _is_cost(seen.measured, seen.predicted), "a traced step's price is no cost"


@reads("request")
def use_request(folder: Path, sound: Sound) -> None:
    groups = [served_model.GroupInput(**g) for g in _objects(schema.read_json(folder / "request.json"))]
    served = served_model.ServedCostModel()
    served._model = sound.model
    try:
        answers = served.predict(None, groups)
    except MlflowException as error:
        assert error.error_code == "INVALID_PARAMETER_VALUE", f"it is answered as {error.error_code}"
        raise ShardCoreError(error.message) from None
    assert _is_cost([(a["ms"], a["forward_ms"], a["low_ms"], a["high_ms"]) for a in answers] or 0.0), (
        "an answer is no cost"
    )


def _objects(value: Any) -> list[dict[str, Any]]:
    """Arguments that MLflow passes on. It has checked the rest against the model's signature."""
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ShardCoreError("the request is no list of objects")
    return value
