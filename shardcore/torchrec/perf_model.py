"""TorchRec's own planner with ShardCore's predicted costs: the smallest way to use a cost model.

    problem = problem_for(module, topology, global_batch, lookups)
    rated = ShardCorePerfModel(problem, module, load_model("model/"))
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, performance_model=rated)

Its enumerator, storage, proposers and partitioner stay. Of the plans that they propose it takes the one that
our cost model prefers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.cost.model import CostModel, predicted_total_ms
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
