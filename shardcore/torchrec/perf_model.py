"""TorchRec's own planner with ShardCore's predicted costs: the smallest way to use a cost model.

    problem = problem_for(module, topology, global_batch, lookups)
    rated = ShardCorePerfModel(problem, module, load_model("model/"))
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, performance_model=rated)

Its enumerator, storage, proposers and partitioner stay. Of the plans that they propose it takes the one that
our cost model prefers.

`register_profile` gives only a card's bandwidths to TorchRec's estimator, whose formulas stay, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.cost.model import CostModel, predicted_total_ms
from shardcore.cost.profile import Profile
from shardcore.step.lower import lower
from shardcore.torchrec.cost_models import resolve_cost_model
from shardcore.torchrec.modules import tables_of_model
from shardcore.torchrec.sharding_plan import from_torchrec

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ShardingOption


class ShardCorePerfModel:
    """A PerfModel of TorchRec. It rates a plan by the ms that a step takes.

    problem: as `problem_for` makes it for the same module.
    module: the model that is planned.
    model: the cost model, for the problem's batch; or the name or file of a profile.

    After planning, `rated` is how many plans were rated, and `refused` says why others could not be: shards
    that ShardCore does not know, or more than a device may hold as it counts. Those are rated infinite.

    Raises ShardCoreError where the problem is not of the module, and SettingMismatch where the model is not
    for the problem.
    """

    def __init__(self, problem: Problem, module: nn.Module, model: CostModel | str | Path) -> None:
        from torchrec.distributed.planner.types import PerfModel

        # Registering avoids importing TorchRec with this module.
        PerfModel.register(type(self))
        # A table that only one of the two has would have no price.
        if differing := sorted({t.name for t in problem.tables} ^ set(tables_of_model(module))):
            raise ShardCoreError(
                f"problem {problem.name!r} and the module differ in tables {differing[:5]}; "
                "make the problem with problem_for(module, ...)"
            )
        self.problem, self.module, self.model = (
            problem,
            module,
            resolve_cost_model(model).for_problem(problem),
        )
        problem.require_setting(self.model.setting)
        self.rated, self.refused = 0, list[str]()

    def rate(self, plan: Sequence[ShardingOption]) -> float:
        """Predicted ms of a training step under a plan of sharding options; lower is better."""
        from torchrec.distributed.planner import Topology
        from torchrec.distributed.planner.planners import to_sharding_plan

        n, hosts = len(self.problem.topology), len(self.problem.topology.hosts)
        # Only ranks and hosts matter for the conversion.
        on = Topology(n, "cuda", local_world_size=n // hosts if self.problem.topology.equal_hosts else n)
        try:
            ours = from_torchrec(to_sharding_plan(list(plan), on), self.problem, self.module)
            step = lower(ours, self.problem)
        except ShardCoreError as error:
            # Infinite, so that TorchRec takes another plan.
            self.refused.append(str(error))
            return float("inf")
        self.rated += 1
        return predicted_total_ms(step, self.model)


def register_profile(profile: Profile) -> str:
    """Register the bandwidths of a hardware profile with TorchRec's EmbeddingPerfEstimatorFactory (TorchRec 1.6).

    Lookups of each kernel then have the card's rates in TorchRec's formulas. Rates of exchanges stay the topology's:
    TorchRec's estimator reads none of a registered configuration.

    Returns the name under which `EmbeddingPerfEstimatorFactory.create` makes the estimator: the profile's.
    Raises ShardCoreError under an older TorchRec.
    """
    try:
        from torchrec.distributed.planner.estimator import config, estimator
    except ImportError as error:
        raise ShardCoreError(
            f"the installed TorchRec has no EmbeddingPerfEstimatorFactory to register {profile.name} with; "
            "it needs to be 1.6 or later"
        ) from error

    per_ms = {name: rate * 1e6 for name, rate in profile.rate_values.items()}  # GB/s as bytes per ms
    bandwidths = {
        "name": profile.name,
        "kernel_device_bandwidths": {
            ("cuda", "fused"): per_ms["read_gbps"],
            ("cuda", "dense"): per_ms["dense_gbps"],
            ("cuda", "fused_uvm"): per_ms["host_read_gbps"],
        },
        "hbm_to_ddr_mem_bw": per_ms["host_cache_gbps"],
    }
    of_card = type("ProfileConfig", (config.EmbeddingPerfEstimatorConfig,), bandwidths)
    estimator.EmbeddingPerfEstimatorFactory.register(profile.name)(of_card)
    return profile.name
