"""Sound files of every format for tests/test_fuzz.py."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from kineto_traces import gloo_step, write

from shardcore.core.step_cost import PARTS
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard
from shardcore.cost import fit, neural
from shardcore.cost.model import CostModel, price
from shardcore.cost.move_rates import MoveRates, write_move_rates
from shardcore.cost.profile import load_network, load_profile, write_profile
from shardcore.io import dataset, files, job_folder, replays, traced_samples
from shardcore.io.hot_ids import HotIds, write_hot_ids
from shardcore.io.measurements import StepSample, TimingSpread
from shardcore.io.row_counts import RowCounts, write_row_counts
from shardcore.measure.replay import ReplayConfig
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.plans import store, traced_job
from shardcore.plans.followed import JobEvent, StoredPlans
from shardcore.search.learned.policy import NETS, Policy, write_policy
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import CONTIGUOUS, GroupedPlan, Grouping, problem_of_group
from shardcore.torchrec import dmp_collection, plan_files

HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
if HAS_TORCHREC:
    from shardcore.torchrec.moves import checkpoints
    from shardcore.torchrec.sharding_plan import to_torchrec

ROOT = Path(__file__).parents[1]
ENTRY = f"{'ab' * 16}.dir"
"""Entry of DVC's cache that lists the files of a folder."""


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
        return cls(folder, problem, plan, neural.load(folder / "model"), store.plan_version(plan, problem))


def make(folder: Path) -> None:
    """Write sound files of all formats, with shipped measurements."""
    some = _some_of(ROOT / "datasets" / "cpu-amd-epyc", folder / "some")
    [setting, *_] = dataset.dataset_settings(some)
    known, exchanges = (
        dataset.read_compute_samples(some, setting)[:150],
        dataset.read_collective_samples(some, setting)[:40],
    )
    shutil.rmtree(some)
    model = fit.train(known, exchanges, setting, fit.FitConfig(epochs=1, hidden=(4,))).model
    neural.save(model, folder / "model")
    write_policy(folder / "policy", _untrained("dreamshard", setting))
    _write(
        folder / "offers.json",
        {
            "schema": "shardcore/offers",
            "version": 1,
            "offers": [
                {
                    "name": "small",
                    "devices": 2,
                    "memory_bytes": 1 << 34,
                    "price_per_hour": 1.5,
                    "most_hosts": 3,
                    "model": "model",
                },
                {
                    "name": "large",
                    "devices": 8,
                    "memory_bytes": 1 << 36,
                    "price_per_hour": 20.0,
                    "model": "model",
                    "speed": 1.5,
                    "links": [
                        {"level": "within_host", "gbps": 100.0},
                        {"level": "between_hosts", "gbps": 10.0, "latency_ms": 0.05},
                    ],
                },
            ],
        },
    )
    pool = tuple({s.table.name: s.table for sample in known for s in sample.request.shards}.values())
    files.write_pool(folder / "pool.json", pool)
    measurements = folder / "measurements"
    dataset.write_compute_samples(measurements, known[:6], dataset.write_pool(measurements, pool))
    dataset.write_collective_samples(measurements, exchanges[:6])

    problem = draw_problem(
        pool, 0, setting, 0, ProblemConfig(devices=2, min_tables=4, max_tables=6, max_dim=32)
    )
    plan = Plan(
        tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(problem.tables)),
        {"algorithm": "dealt"},
    )
    cost = price(lower(plan, problem), model)
    files.write_problem(folder / "problem.json", problem)
    files.write_plan(folder / "plan.json", plan, problem)
    version = store.add_version(folder / "plans", problem, plan, {"total_ms": cost.total_ms}, "<html></html>")
    store.record_decision(
        folder / "plans",
        store.Decision(
            problem.name,
            "first",
            "nothing was published",
            version,
            version,
            files.problem_digest(problem),
            cost.total_ms,
            provenance={"model": "m", "model_version": "1"},
        ),
    )
    took = StepSample(
        **{part: getattr(cost, part) for part in PARTS},
        oversubscribed=False,
        step=TimingSpread(cost.total_ms, cost.total_ms, cost.total_ms, 3),
    )
    replays.replay_or_reuse(
        folder / "replays", problem, [("dealt", plan)], setting, ReplayConfig(), lambda _: [took]
    )

    shutil.copy(ROOT / "params.yaml", folder)
    out = {"path": "data/measurements", "hash": "md5", "md5": f"{'ab' * 16}.dir", "size": 10, "nfiles": 2}
    (folder / "dvc.lock").write_text(
        yaml.safe_dump(
            {"schema": "2.0", "stages": {"measure": {"cmd": "python -m flows.measure", "outs": [out]}}}
        )
    )
    _write(
        folder / "request.json",
        [
            {"shards": [{"table": files.table_to_json(t)} for t in problem.tables[:2]]},
            {"shards": [], "batch": 64},
        ],
    )
    _write(
        folder / "towers.json",
        {
            "schema": "shardcore/towers",
            "version": 1,
            "compression_ratio": 4.0,
            "towers": [[problem.tables[0].name, problem.tables[1].name]],
            "tables": [t.name for t in problem.tables[:3]],
            "affinity": [[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [2.0, 0.5, 0.0]],
        },
    )
    write_hot_ids(
        folder / "hot.safetensors", [HotIds("t0", 500, np.arange(0, 60, 2)), HotIds("t1", 90, np.array([7]))]
    )
    write_row_counts(
        folder / "counts.safetensors",
        RowCounts(64, {"t0": np.arange(500)[::-1].copy(), "t1": np.ones(90, np.int64)}),
    )
    lengths = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    batch = (
        torch.arange(10),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]),
        lengths,
    )
    torch.save(batch, folder / "batch.pt")
    (folder / "batch.pt.gz").write_bytes(gzip.compress((folder / "batch.pt").read_bytes()))
    _write(
        folder / "cache" / ENTRY, [{"md5": "ab" * 16, "relpath": "a.csv"}, {"md5": "cd" * 16, "relpath": "b"}]
    )
    _write(
        folder / ".dvc/tmp/rwlock",
        {"write": {"data": {"pid": 1, "cmd": "dvc"}}, "read": {"x": [{"pid": 2**22 + 1, "cmd": "dvc"}]}},
    )
    (folder / ".dvc/tmp/lock").write_text(" 123")
    write_profile(folder / "profile.json", load_profile("cpu"))
    write_profile(folder / "network.json", load_network("aws-efa-4x100g"))
    write_move_rates(
        folder / "move-rates.json", MoveRates(1.0, 0.1, 0.1, 1.0, 2.0, 3.0, 4.0, 5.0, {"within_host": 5.0})
    )
    event = JobEvent("0" * 16, "stayed", "", 9, 1.0, 3.0, 2.0, 4.0, 1, {"local": 8}, 0.5)
    # A store of its own: of reports alone.
    report = {"current": "0" * 16, "step": 10, "at_s": 2.0, "step_ms": 3.0, "events": [vars(event)]}
    StoredPlans(folder, "job-report", "trainer").report(report)
    op = {"op": "bwd", "time_us": "612.5", "B": "1024", "T": "2", "E": "1000,50", "D": "2x64", "L": "10"}
    exchange = {"op": "alltoall", "time_us": "30", "ranks": "16", "hosts": "2", "msg_bytes_per_rank": "1024"}
    with open(folder / "timings.csv", "w") as file:
        rows = csv.DictWriter(file, [*op, "optimizer", "mode", "cached", *list(exchange)[2:]], restval="")
        rows.writeheader()
        rows.writerows([op, {**op, "op": "fwd", "optimizer": "adam"}, exchange])
    (folder / "links.log").write_text(
        "# Collective test starting: alltoall_perf\n# nThread 1 nGpus 2\n# Using devices\n"
        "#  Rank  0 Group  0 Pid 9 on host0 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3\n"
        "#  Rank  1 Group  0 Pid 9 on host1 device  1 [0000:1c:00] NVIDIA H100 80GB HBM3\n"
        "#   size   count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong\n"
        "  1048576  262144  float  none  -1  57.1  18.4  9.2  0  56.9  18.4  9.2  N/A\n"
    )
    _write_job(folder / "job", problem, plan)
    traced = traced_job.traced_sample(traced_job.read_job_traces(folder / "job"), setting.hardware)
    # Under a name that a test knows.
    traced_samples.add_traced_sample(folder, traced).rename(folder / "traces" / "sample")
    # One device could not hold all tables.
    grouping = Grouping(2, CONTIGUOUS, 5)
    one = GroupedPlan(grouping, plan, problem_of_group(problem, grouping))
    files.write_grouped_plan(folder / "grouped.json", one, problem)
    if HAS_TORCHREC:
        plan_files.write_torchrec(folder / "torchrec.json", to_torchrec(plan, problem, "model.bags", "cpu"))
        dmp_collection.write_dmp_collection(
            folder / "dmp.json", dmp_collection.to_dmp_collection(one, problem, "model.bags", "cpu"), 5
        )
        checkpoints.save_rows(hot_collection(), folder / "rows")


def _some_of(shipped: Path, folder: Path) -> Path:
    """A folder with the first samples of a dataset: to read them all takes seconds."""
    folder.mkdir(parents=True)
    for path in shipped.glob("pool-*.json"):
        shutil.copy(path, folder)
    for path in shipped.glob("*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, 400), folder / "part")
        digest = hashlib.sha256((folder / "part").read_bytes()).hexdigest()[:24]
        (folder / "part").rename(folder / f"{path.stem.split('-')[0]}-{digest}.parquet")
    return folder


def _write_job(folder: Path, problem: Problem, plan: Plan) -> None:
    """A traced step of two ranks, as ShardCoreProfiler leaves it."""
    step, rng = job_folder.step_folder(folder, 1000), np.random.default_rng(0)
    step.mkdir(parents=True)
    features = {t.name: (f"f-{t.name}",) for t in problem.tables}
    job_folder.write_facts(step, job_folder.JobFacts(2, features, {"torch": "2"}), problem, plan)
    for rank in range(2):
        lookups = {f"f-{t.name}": (rng.integers(0, t.rows, 12), np.full(4, 3)) for t in problem.tables}
        job_folder.write_rank_measurements(step, rank, TimingSpread(18.0, 17.0, 19.0, 900), lookups)
        columns = sum(p.shard.width for p in plan.placements if p.devices == (rank,))
        outputs = problem.global_batch * columns  # traces of another plan correct nothing
        write(step, rank, gloo_step(late_ms=3.0 * rank, entered=outputs), zipped=bool(rank))


def hot_collection() -> Any:
    """A collection of two small tables, one with hot rows."""
    from torchrec import EmbeddingConfig

    from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection

    return HotColdEmbeddingCollection(
        [
            EmbeddingConfig(name="h", num_embeddings=50, embedding_dim=8, feature_names=["f"]),
            EmbeddingConfig(name="k", num_embeddings=20, embedding_dim=8, feature_names=["q"]),
        ],
        {"h": HotIds("h", 50, np.array([0, 3, 17]))},
    )


def _untrained(name: str, setting: Setting) -> Policy:
    """A policy that reads and places like a trained one."""
    rng, shapes = np.random.default_rng(0), NETS[name].shapes
    weights = {k: rng.uniform(-1, 1, shape).astype(np.float32) for k, shape in shapes.items()}
    for k in ("sd", "scale_ms"):
        weights[k] = np.ones(shapes[k], np.float32)
    return Policy(name, setting, weights)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
