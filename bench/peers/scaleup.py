"""TorchRec's planner with its EmbeddingOffloadScaleupProposer: caches of tables, their sizes, and places.

It gets what we know: the bytes that we count, the miss ratios of `heat`, the devices' memory, the bandwidth
of the link to host memory. Costs of lookups and exchanges are its own. Its proposer takes LRU caches only,
and one sharding type a table.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchrec.distributed.types import CacheStatistics

from bench.peers.room import free_bytes
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.search.decisions.memory_tiers import with_load_factors
from shardcore.search.state.shards import consolidate
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, run_of
from shardcore.step.memory_account import own_peaks
from shardcore.tables.heat import Heat, heat_of
from shardcore.torchrec.placements import placements_of
from shardcore.torchrec.planner_pieces import quiet

STARTS = (0.001, 0.01, 0.05, 0.2)
"""Load factors of all caches from which it scales up. The best plan of all counts."""


class Misses(CacheStatistics):
    """The miss ratios of a table's heat."""

    def __init__(self, table: Table, batch: int):
        self.table, self.batch = table, batch

    @cached_property
    def heat(self) -> Heat | None:
        if access.lookups(self.table, self.batch) == 0:
            return None
        return heat_of([self.table], self.batch, unseen=True)[0]

    def __deepcopy__(self, memo: Any) -> Misses:
        return self

    @property
    def expected_lookups(self) -> float:
        return self.heat.unique_rows if self.heat else 0.0

    def expected_miss_rate(self, clf: float) -> float:
        return float(self.heat.miss_ratio(clf * self.table.rows)) if self.heat else 0.0

    @property
    def cacheability(self) -> float:
        return self.expected_miss_rate(0.2)


@dataclass(frozen=True)
class _Bytes:
    """A ShardEstimator that counts each shard's own largest phase, with the load factor of the option."""

    problem: Problem
    names: dict[str, Table]

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        from torchrec.distributed.planner.types import Storage

        bytes_of = own_peaks(self.problem)
        for option in sharding_options:
            factor = option.cache_params.load_factor if option.cache_params else None
            table = dataclasses.replace(
                self.names[option.name], load_factor=1.0 if factor is None else factor
            )
            for theirs in option.shards:
                (row, column), (rows, columns) = theirs.offset, theirs.size
                ours = Shard(table, row, row + rows, column, column + columns)
                theirs.storage = Storage(hbm=bytes_of(run_of(WHOLE_ROWS.name, table), ours), ddr=0)


def scaled_up(
    problem: Problem, start: float, sharding_type: str = "table_wise"
) -> tuple[Problem, list[Placement]] | None:
    """The problem with its load factors, and its placements. None if it finds no plan."""
    with quiet():
        return _scaled_up(problem, start, sharding_type)


def _scaled_up(problem: Problem, start: float, sharding_type: str) -> tuple[Problem, list[Placement]] | None:
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError, Topology
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    names = {f"t{i}": table for i, table in enumerate(problem.tables)}
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=n, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[n])
            for n, t in names.items()
        ],
    )
    free = free_bytes(problem)
    topology = Topology(
        len(free),
        "cuda",
        hbm_cap=min(free),
        ddr_cap=1 << 50,
        local_world_size=len(free),
        hbm_to_ddr_mem_bw=problem.topology.memory_of("host").gbps * 2**30 / 1000,
    )
    constraints = {
        n: ParameterConstraints(
            sharding_types=[sharding_type],
            compute_kernels=["fused_uvm_caching"],
            pooling_factors=[t.pooling],
            cache_params=CacheParams(CacheAlgorithm.LRU, start, stats=Misses(t, problem.global_batch)),
        )
        for n, t in names.items()
    }
    enumerator = EmbeddingEnumerator(
        topology,
        problem.local_batch,
        constraints,
        estimator=[EmbeddingPerfEstimator(topology, constraints), _Bytes(problem, names)],
    )
    planner = EmbeddingShardingPlanner(
        topology,
        problem.local_batch,
        enumerator,
        constraints=constraints,
        stats=[],
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        proposer=EmbeddingOffloadScaleupProposer(),
        debug=False,
    )
    try:
        plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    except PlannerError:
        return None
    of_table = plan.plan[""]
    factors = {
        table.name: of_table[n].cache_params.load_factor if of_table[n].cache_params else None
        for n, table in names.items()
    }
    own = with_load_factors(problem, {name: 1.0 if f is None else f for name, f in factors.items()})
    tables = {n: own.tables[i] for i, n in enumerate(names)}
    return own, consolidate(placements_of(of_table, tables, problem.topology))
