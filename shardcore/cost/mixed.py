"""The cost model of problems whose tables differ in the precision of their weights.

A model is trained for one precision. TorchRec runs the shards of a kind as one fused op for each precision,
one after another. So a mixed model encodes each shard by the model of its precision, and adds up the ops.

Shapes: N shards, P precisions, F features of one model, G ops.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardcore.cost import neural
from shardcore.cost.collective_model import ALL_TO_ALL, is_measured
from shardcore.cost.host_memory import HostMemoryModel, with_host_memory
from shardcore.cost.model import BoundableCostModel, CommCost, Compiled, CostModel
from shardcore.cost.neural import NeuralModel
from shardcore.errors import SettingMismatch
from shardcore.limits import require_type
from shardcore.model_files import model_folders
from shardcore.topology import Topology
from shardcore.types import Problem, Setting, Shard
from shardcore.workload import Workload


@dataclass(frozen=True, eq=False)
class MixedModel:
    """Models of one machine and optimizer, one for each precision. A ProbabilisticCostModel.

    models: in the order of their precisions' names.

    Raises SettingMismatch for models that differ in more than the precision.
    """

    models: tuple[NeuralModel, ...]

    def __post_init__(self) -> None:
        first, *others = (m.setting for m in self.models)
        for other in others:
            if replace(other, precision=first.precision, batch=first.batch) != first:
                raise SettingMismatch(f"models for ({first}) and ({other}) cannot be mixed; they need the "
                                      "same hardware and optimizer")
        precisions = [m.setting.precision for m in self.models]
        if precisions != sorted(set(precisions)):
            raise SettingMismatch(f"models for {' and '.join(precisions)} weights cannot be mixed; they need "
                                  "a precision each")

    @property
    def setting(self) -> Setting:
        return replace(self.models[0].setting, precision="+".join(m.setting.precision for m in self.models))

    def for_problem(self, problem: Problem) -> NeuralModel | MixedModel | HostMemoryModel:
        """See model.CostModel. Of the precisions that the problem has; a single model where it has one."""
        models = [m.in_device_memory(problem) for m in self.models]
        wanted = problem.precision.split("+")
        needed = [model for model in models if model.setting.precision in wanted]
        measured = [model for model in models if is_measured(model.weights, ALL_TO_ALL)]
        if not needed or (len(needed) > 1 and measured and not any(model in measured for model in needed)):
            needed = models  # so that exchanges are priced as they were measured
        return with_host_memory(needed[0] if len(needed) == 1 else MixedModel(tuple(needed)), problem)

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, P F] the encoding by the model of a shard's precision at its place, and 0 elsewhere."""
        places = [m.setting.precision for m in self.models]
        of = np.array([places.index(s.table.precision) for s in shards], dtype=int)
        found = []
        for i, model in enumerate(self.models):
            own = np.flatnonzero(of == i)
            codes = model.encode([shards[j] for j in own], batch)
            found.append(np.zeros((len(shards), codes.shape[1])))
            found[-1][own] = codes
        return np.concatenate(found, axis=1)

    def _split(self, sums: np.ndarray) -> list[tuple[NeuralModel, np.ndarray]]:
        """The models, and the sums [G, F] of each."""
        return list(zip(self.models, np.split(np.asarray(sums, dtype=float), len(self.models), axis=-1),
                        strict=True))

    def head(self, sums: np.ndarray) -> np.ndarray:
        return sum(model.head(own) for model, own in self._split(sums))

    def quantile(self, sums: np.ndarray, level: float) -> np.ndarray:
        """As if errors of all precisions went together."""
        return sum(np.where(own[..., 0] > 0, model.quantile(own, level), 0.0)
                   for model, own in self._split(sums))

    def is_above_head(self, level: float) -> bool:
        return all(model.is_above_head(level) for model in self.models)

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        total = np.asarray(self.head(sums))
        forward = sum(model.forward_share(own) * model.head(own) for model, own in self._split(sums))
        return np.divide(forward, total, out=np.zeros_like(total), where=total > 0)

    def compiled(self, level: float | None = None) -> Compiled:
        from shardcore.cost import compiled

        parameters = [model.compiled(level).parameters for model in self.models]
        numbers = [len(parameters), *map(len, parameters)]
        return Compiled(compiled.ready(compiled.several),
                        np.concatenate([np.array(numbers, dtype=float), *parameters]))

    @property
    def of_exchanges(self) -> NeuralModel:
        """The first model with measured exchanges. Outputs are FP32, whatever the weights are."""
        measured = (m for m in self.models if is_measured(m.weights, ALL_TO_ALL))
        return next(measured, self.models[0])

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        return self.of_exchanges.comm(traffic, compute_ms, topology)

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel. Each precision's shards against its own model."""
        found = [m.out_of_range(_only(m.setting.precision, workload, m is self.of_exchanges))
                 for m in self.models]
        return list(dict.fromkeys(sentence for sentences in found for sentence in sentences))

    @property
    def lower(self) -> BoundableCostModel | None:
        """None: an op of a single precision saves less launches than one of all."""
        return None


def load(folders: str | Path | Sequence[str | Path]) -> NeuralModel | MixedModel:
    """The model of a folder, or of several folders of different precisions.

    A folder may have one model, or a subfolder with one for each precision, as the registry keeps them.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    require_type(folders, (list, tuple), "folder of a model", "a path, or a list of paths")
    for folder in folders:
        require_type(folder, (str, os.PathLike), "folder of a model", "a path")
    models = [neural.load(one) for folder in folders for one in model_folders(folder)]
    models.sort(key=lambda m: m.setting.precision)
    return models[0] if len(models) == 1 else MixedModel(tuple(models))


def out_of_range(model: CostModel, workload: Workload) -> list[str]:
    """Sentences on what of a step a model has not measured (see model.CostModel)."""
    return model.out_of_range(workload)


def _only(precision: str, workload: Workload, exchanges: bool) -> Workload:
    """The workload without shards of other precisions, and with or without exchanges."""
    ops = tuple(tuple(replace(op, shards=own) for op in ops
                      if (own := tuple(s for s in op.shards if s.table.precision == precision)))
                for ops in workload.ops)
    return replace(workload, ops=ops, traffic=workload.traffic * exchanges)
