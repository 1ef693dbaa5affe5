"""A real job on two gloo processes leaves what `job read` needs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import profiled_training
import torch.distributed as dist
import training
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from shardcore.cli import main
from shardcore.core.access_statistics import Reuse
from shardcore.core.errors import ShardCoreError
from shardcore.cost import traced_factors
from shardcore.io import files, job_folder
from shardcore.plans import traced_job
from shardcore.step.lower import lower
from shardcore.torchrec.problems import problem_for
from shardcore.torchrec.profiler import ShardCoreProfiler


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The problem, the plan, and the folder of a job of 22 steps that traces two of them three times."""
    given = training.problem(1, 2, sequence=True)
    plan = training.draw(given, np.random.default_rng(3))
    folder = tmp_path_factory.mktemp("job") / "traces"
    codes = training.in_processes(2, profiled_training.work, (given, plan, folder, 22, 6), 240)
    assert codes == [0, 0]
    return given, plan, folder


@pytest.mark.long
def test_a_job_leaves_its_newest_traced_steps(job):
    _, _, folder = job
    # Traced were the steps 7 and 8, 13 and 14, and 19 and 20. One is kept, until another is whole. The rank that
    # removes old ones may be first or last to write.
    names = [path.name for path in job_folder.complete_step_folders(folder)]
    assert names in (["step-00000014", "step-00000020"], ["step-00000020"])
    assert not list(folder.rglob(".*"))


@pytest.mark.long
def test_a_job_leaves_its_plan_and_the_lookups_of_all_ranks(job):
    given, plan, folder = job
    step = job_folder.read_step(job_folder.complete_step_folders(folder)[-1])
    assert training.held(step.plan, 2) == training.held(plan, 2)
    assert {t.name: (t.rows, t.dim) for t in step.problem.tables} == {
        t.name: (t.rows, t.dim) for t in given.tables
    }
    assert {t.name for t in step.problem.tables if t.sequence} == {"s", "t"}
    assert (step.problem.optimizer, step.problem.global_batch) == ("rowwise_adagrad", given.global_batch)
    assert all(isinstance(t.access, Reuse) for t in step.problem.tables)
    assert step.facts.features["b"] == ("f1", "f2")
    assert set(step.step_ms) == {0, 1} and step.remarks == ()


@pytest.mark.long
def test_a_jobs_lookups_are_those_of_the_planner(job, tmp_path):
    given, _, folder = job
    step = job_folder.read_step(job_folder.newest_step_folder(folder))
    found = problem_for(
        training.Model("meta", sequence=True), given.topology, step.problem.global_batch, folder
    )
    read = {t.name: (t.pooling, t.access) for t in step.problem.tables}
    assert {t.name: (t.pooling, t.access) for t in found.tables} == read
    with pytest.raises(ShardCoreError, match="needs a global batch of the model's data"):
        problem_for(training.Model("meta", sequence=True), given.topology, 1 << 20, folder)
    with pytest.raises(ShardCoreError, match="has no lookups .rank-0.lookups.npz., which ShardCoreProfiler"):
        problem_for(training.Model("meta", sequence=True), given.topology, 16, tmp_path)
    written = tmp_path / "p.json"
    assert main(["problem", str(folder), "--devices", "2", "--batch", "64", "--out", str(written)]) == 0
    assert files.read_problem(written).tables == step.problem.tables


@pytest.mark.long
def test_a_jobs_traces_tell_its_parts(job):
    _, _, folder = job
    read = traced_job.read_job_traces(folder)
    assert read.traced.backend == "gloo" and len(read.traced.steps) == 2
    assert read.problem is not None and read.plan is not None
    for step in read.traced.steps:
        assert [rank.rank for rank in step.ranks] == [0, 1]
        for rank in step.ranks:
            assert rank.ms["lookup_forward"] > 0 and rank.ms["lookup_backward"] > 0 and rank.ms["ids"] > 0
            assert sum(rank.ms.values()) == pytest.approx(rank.total_ms)
            assert {x.role for x in rank.exchanges} >= {"ids", "outputs", "gradients"}
        assert traced_factors.describe_mismatches(lower(read.plan, read.problem, fits=False), step) == []


@pytest.mark.parametrize(
    "options, words",
    [
        ({"every": 2}, "every is 2; it needs more than"),
        ({"steps": 0}, "steps is 0"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ShardCoreError, match=words):
        ShardCoreProfiler(torch.nn.Linear(1, 1), **options)


def test_what_fails_while_it_writes_stops_no_training(tmp_path, caplog, monkeypatch):
    """A sharded collection of a TorchRec that we do not know: its configurations have no names."""
    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables=[config])})
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        job = DistributedModelParallel(model, device=torch.device("cpu"))
        bags = job.module["bags"]
        profiler = ShardCoreProfiler(job, tmp_path, every=3)
        with monkeypatch.context() as changed:
            changed.setattr(bags, "_embedding_bag_configs", (object(),))
            for _ in range(9):
                profiler.step()
        assert "ShardCoreProfiler wrote no trace at step 4: " in caplog.text
        # No batch entered the collection for two cycles. The next one does.
        ids = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([5]), torch.tensor([1]))
        assert "input_dist" in vars(bags)
        bags.input_dist(bags.create_context(), ids)
        assert "input_dist" not in vars(bags)
    finally:
        dist.destroy_process_group()


def test_a_model_without_sharded_collections_is_refused():
    with pytest.raises(ShardCoreError, match="Linear without sharded collections"):
        ShardCoreProfiler(torch.nn.Linear(1, 1))
