"""A profile in place of a cost model, in a TorchRec job."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import torch
import training
from planning import CONSTRAINTS, LOOKUPS
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TheirTopology

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.cost.profile import load_profile
from shardcore.search import Budget
from shardcore.torchrec.perf_model import ShardCorePerfModel
from shardcore.torchrec.planner import ShardCorePlanner, plan_for, problem_for

CARD = "nvidia-h100-sxm"
SAID = "extrapolated: profile: published measurements, not of your machine (band ±"
MODULE = training.Model()
WHERE = TheirTopology(8, "cuda", hbm_cap=80 * 10**9)
QUICK = {"algorithm": "anneal", "budget": Budget(evals=500)}


@pytest.mark.parametrize("batch_size", [2, 8192])
def test_a_planner_takes_a_profile_by_name_for_any_batch_and_says_what_it_is(batch_size):
    planner = ShardCorePlanner(WHERE, batch_size, CONSTRAINTS, model=CARD, **QUICK)
    assert planner.plan(MODULE).plan
    assert planner.problem.global_batch == 8 * batch_size
    assert any(line.startswith(SAID) for line in planner.unpriced)
    # Profiles have the time of a replica's dense optimizer.
    assert not any("not timed" in line for line in planner.unpriced)


@pytest.mark.parametrize("given", [CARD, load_profile(CARD).cost_model()])
def test_a_job_s_own_optimizer_is_priced(given):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = training.Model()
    _apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    planner = ShardCorePlanner(WHERE, 64, CONSTRAINTS, model=given, **QUICK)
    planner.plan(module)
    assert planner.problem.optimizer == "exact_adagrad"
    assert not any("priced as under" in line for line in planner.unpriced)


def test_the_page_s_script_plans_a_model_on_the_meta_device(capsys):
    page = (Path(__file__).parents[2] / "docs/torchrec.md").read_text()
    [script] = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "make_model()" in text]

    def make_model():
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=10**6, embedding_dim=64, feature_names=[n])
            for n in ("user", "item")
        ]
        return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)

    names = {"make_model": make_model}
    exec(script, names)
    assert set(names["plan"].plan[""]) == {"user", "item"}
    ms, *notes = capsys.readouterr().out.splitlines()
    assert float(ms) > 0 and any(note.startswith(SAID) for note in notes)


def test_plan_for_and_the_performance_model_take_a_profile():
    plan, problem = plan_for(MODULE, WHERE, CARD, LOOKUPS, "size_greedy", global_batch=4096)
    assert plan.placements and problem.global_batch == 4096
    rated = ShardCorePerfModel(problem_for(MODULE, WHERE, 512, LOOKUPS), MODULE, CARD)
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(WHERE, 64, performance_model=rated, debug=False, stats=[])
    assert planner.plan(MODULE, sharders) and rated.rated


def test_a_cuda_job_without_a_model_is_priced_by_the_profile_of_its_card(monkeypatch):
    """Not exercised on a GPU: torch's answers are those of a job on an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    planner = ShardCorePlanner(WHERE, 64, CONSTRAINTS, **QUICK)
    assert planner.plan(MODULE) and planner.model.setting.hardware == CARD
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 1080")
    with pytest.raises(ShardCoreError, match="'NVIDIA GeForce GTX 1080' has no profile; known are .*nvidia"):
        ShardCorePlanner(WHERE, 64, CONSTRAINTS)


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, f"model is None, and there is no CUDA device here .* {CARD}"),
        ({"model": "h100"}, "profile 'h100' is not known; known are "),
        ({"model": 4}, "model is 4; it needs to be a cost model"),
    ],
)
def test_a_model_that_is_none_is_refused(given, said):
    with pytest.raises(ShardCoreError, match=said):
        ShardCorePlanner(WHERE, 64, CONSTRAINTS, **given)


def test_a_profile_of_other_hardware_than_the_topology_s_is_refused():
    topology = Topology.of_hosts(1, 2, memory_gib=8, hardware="nvidia-a100-80")
    with pytest.raises(
        ShardCoreError, match="is for hardware 'nvidia-a100-80', the profile for 'nvidia-h100"
    ):
        ShardCorePlanner(topology, 64, CONSTRAINTS, model=CARD).plan(MODULE)


def test_the_call_in_the_readme_plans():
    call = re.search(
        r"`(ShardCorePlanner\(topology[^`]+\))`", Path(__file__).parents[2].joinpath("README.md").read_text()
    )
    assert call
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=64, feature_names=[name])
        for name in ("user", "item")
    ]
    topology = TheirTopology(8, "cuda", hbm_cap=80 * 10**9)
    planner = eval(call[1], {"ShardCorePlanner": ShardCorePlanner, "topology": topology})
    planner.budget = Budget(evals=100)
    assert planner.plan(EmbeddingBagCollection(tables=tables, device=torch.device("meta"))).plan
