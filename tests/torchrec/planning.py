"""A model, constraints for its tables, and a planner, for tests."""

from __future__ import annotations

import torch
import training
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.torchrec.planner import ShardCorePlanner

FOUR = Topology((Device(10**9),) * 4)
MODEL = AnalyticModel(Setting("cpu", 64))
MODULE = training.Model()
LOOKUPS = {"f0": 10.0, "f1": 2.0, "f2": 1.5, "f3": 4.0, "f4": 1.0}
CONSTRAINTS = {
    "a": ParameterConstraints(pooling_factors=[10.0]),
    "b": ParameterConstraints(pooling_factors=[2.0, 1.5]),
    "c": ParameterConstraints(pooling_factors=[3.0]),
    "d": ParameterConstraints(pooling_factors=[4.0]),
    "e": ParameterConstraints(pooling_factors=[1.5]),
}


def table_in(data_type: DataType) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name="t", num_embeddings=4, embedding_dim=4, feature_names=["f0"], data_type=data_type
            )
        ],
    )


def planner(constraints=CONSTRAINTS, topology=FOUR, **settings) -> ShardCorePlanner:
    return ShardCorePlanner(
        topology,
        16,
        constraints,
        budget=Budget(evals=2000),
        **{"algorithm": "anneal", "model": MODEL, **settings},
    )
