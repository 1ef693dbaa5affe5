"""TorchRec's own planner under our prices."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import training
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import PerfModel

from shardcore.core.constraints import Constraints
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.step.lower import lower
from shardcore.step.memory import require_fits
from shardcore.torchrec.perf_model import ShardCorePerfModel, register_profile
from shardcore.torchrec.planner import problem_for
from shardcore.torchrec.sharding_plan import from_torchrec

MODULE = training.Model()
LOOKUPS = {"f0": 10.0, "f1": 2.0, "f2": 1.5, "f3": 4.0, "f4": 1.0}
WHERE = TheirTopology(4, "cuda", hbm_cap=10**9, local_world_size=2)
PROBLEM = problem_for(MODULE, WHERE, 64, LOOKUPS)
SHARDERS = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def planned(rated):
    planner = EmbeddingShardingPlanner(WHERE, 16, performance_model=rated, debug=False, stats=[])
    return from_torchrec(planner.plan(MODULE, SHARDERS), PROBLEM, MODULE)


def test_torchrecs_planner_takes_the_plan_that_our_model_prefers():
    # Exchanges that cost nothing, or all: another plan is the best.
    for gbps in (1e-3, 1e6):
        model = AnalyticModel(Setting("cpu", 64), exchange_gbps=gbps)
        rated = ShardCorePerfModel(PROBLEM, MODULE, model)
        assert isinstance(rated, PerfModel)
        found, theirs = (
            price(lower(plan, PROBLEM), model).total_ms for plan in (planned(rated), planned(None))
        )
        assert found <= theirs and rated.rated > 1


def test_a_plan_that_we_do_not_know_is_rated_last_and_named():
    options = []

    class Keeping(ShardCorePerfModel):
        def rate(self, plan):
            options.append(plan)
            return super().rate(plan)

    planned(Keeping(PROBLEM, MODULE, AnalyticModel(Setting("cpu", 64))))
    rated = ShardCorePerfModel(PROBLEM, MODULE, AnalyticModel(Setting("cpu", 64)))
    assert rated.rate(options[0]) < math.inf and not rated.refused
    assert rated.rate(options[0][:-1]) == math.inf
    assert len(rated.refused) == 1 and options[0][-1].name in rated.refused[0]


def test_a_plan_that_is_too_large_as_we_count_leaves_the_choice_to_the_others():
    devices = tuple(dataclasses.replace(d, memory_bytes=100_000) for d in PROBLEM.topology.devices)
    small = dataclasses.replace(
        PROBLEM,
        topology=dataclasses.replace(PROBLEM.topology, devices=devices),
        constraints=Constraints(reserved_bytes=0),
    )
    rated = ShardCorePerfModel(small, MODULE, AnalyticModel(Setting("cpu", 64)))
    require_fits(planned(rated), small)
    assert rated.rated and "device 0 of problem 'model' would hold" in rated.refused[0]


def test_a_problem_or_model_of_something_else_is_refused():
    other = dataclasses.replace(PROBLEM, tables=PROBLEM.tables[1:])
    with pytest.raises(ShardCoreError, match="differ in tables .'a'"):
        ShardCorePerfModel(other, MODULE, AnalyticModel(Setting("cpu", 64)))
    with pytest.raises(SettingMismatch):
        ShardCorePerfModel(PROBLEM, MODULE, AnalyticModel(Setting("cpu", 64, precision="fp16")))


def test_a_registered_profile_prices_lookups_at_the_cards_rates():
    estimators = pytest.importorskip("torchrec.distributed.planner.estimator")
    profile = load_profile("nvidia-h100-sxm")
    assert register_profile(profile) == "nvidia-h100-sxm"
    made = estimators.EmbeddingPerfEstimatorFactory.create("NVIDIA-H100-SXM", topology=WHERE)
    rates = profile.rate_values
    assert made._config.kernel_device_bandwidths["cuda", "fused"] == rates["read_gbps"] * 1e6

    def lookup_ms(estimator):
        """TorchRec's ms of lookups, of all options with these kernels that it has for MODULE."""
        both = [estimator, EmbeddingStorageEstimator(topology=WHERE)]
        options = EmbeddingEnumerator(WHERE, 16, estimator=both).enumerate(MODULE, SHARDERS)
        options = [option for option in options if option.compute_kernel in ("fused", "dense", "fused_uvm")]
        perfs = [shard.perf for option in options for shard in option.shards]
        return sum(perf.fwd_compute + perf.bwd_compute for perf in perfs)

    slower = {name: rate / 2 for name, rate in rates.items() if name.endswith("_gbps")}
    register_profile(dataclasses.replace(profile.with_values({**rates, **slower}), name="half"))
    half = estimators.EmbeddingPerfEstimatorFactory.create("half", topology=WHERE)
    assert lookup_ms(half) == pytest.approx(2 * lookup_ms(made), rel=1e-6)


def test_a_profile_is_not_registered_with_an_older_torchrec(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec.distributed.planner.estimator", None)
    with pytest.raises(
        ShardCoreError, match="has no EmbeddingPerfEstimatorFactory .* needs to be 1.6 or later"
    ):
        register_profile(load_profile("nvidia-h100-sxm"))
