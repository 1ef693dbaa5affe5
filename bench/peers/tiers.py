"""Planners of memory tiers for comparisons: TorchRec's with any proposer, and TorchEasyRec's dynamic program.

They get what we know: our bytes of each shard, the heat of rows as CacheStatistics, and the bandwidth of the
link. Costs are TorchRec's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, Storage, Topology
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from bench.peers.room import free_bytes
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.search.decisions.memory_tiers import with_load_factors
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, kind_of_torchrec_type, sharding_kind_for_table
from shardcore.step.memory import host_tier_bytes, peak_bytes_function
from shardcore.tables.heat import heat_of_tables
from shardcore.torchrec.placements import placements_from_torchrec

KERNELS = {"fused": 1.0, "fused_uvm": 0.0}
"""Load factors of kernels without a cache."""


class Misses(CacheStatistics):
    """The miss ratios of a table's heat."""

    def __init__(self, table: Table, batch: int):
        self.heat = (
            heat_of_tables([table], batch, unseen=True)[0] if access.lookup_count(table, batch) else None
        )

    def __deepcopy__(self, memo: Any) -> Misses:
        return self

    @property
    def expected_lookups(self) -> float:
        return self.heat.unique_rows if self.heat else 0.0

    def expected_miss_rate(self, clf: float) -> float:
        return (
            float(self.heat.missed_rows(clf * self.heat.table_rows)) / self.expected_lookups
            if self.heat
            else 0.0
        )

    @property
    def cacheability(self) -> float:
        return self.expected_miss_rate(0.2)


@dataclass(frozen=True)
class OurStorage:
    """A ShardEstimator with our bytes of each shard, on its device and in its host's memory."""

    problem: Problem
    tables: Mapping[str, Table]

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        # TorchRec takes options from sets, whose order varies.
        sharding_options.sort(key=lambda o: (int(o.name[1:]), o.sharding_type, o.compute_kernel))
        bytes_of = peak_bytes_function(self.problem)
        for option in sharding_options:
            factor = KERNELS.get(option.compute_kernel, option.cache_load_factor)
            table = replace(self.tables[option.name], load_factor=1.0 if factor is None else factor)
            sharding_kind = kind_of_torchrec_type(option.sharding_type, self.problem.topology) or WHOLE_ROWS
            for theirs in option.shards:
                (row, column), (rows, columns) = theirs.offset, theirs.size
                ours = Shard(table, row, row + rows, column, column + columns) if rows and columns else None
                theirs.storage = Storage(
                    hbm=bytes_of(sharding_kind_for_table(sharding_kind.name, table), ours) if ours else 0,
                    ddr=host_tier_bytes(ours, self.problem) if ours else 0,
                )


class DynamicProgram:
    """TorchEasyRec's DynamicProgrammingProposer (tzrec/utils/plan_util.py), in arrays.

    Tables one after another: the least cost of each bin of HBM and DDR, all devices together. It proposes the
    best of each bin of HBM, from the largest on. Costs are sums over shards, as TorchRec estimates them.
    """

    bins = 100, 50
    """Bins of HBM and of DDR for each device. All devices together have at most 1,024 of each."""

    def load(self, search_space: list[Any], enumerator: Any = None) -> None:
        self.options: dict[str, list[Any]] = {}
        for option in sorted(search_space, key=lambda o: o.total_storage.hbm + o.total_storage.ddr):
            self.options.setdefault(option.fqn, []).append(option)
        self.waiting: list[list[Any]] = [[options[0] for options in self.options.values()]]
        self.is_first = True

    def propose(self) -> list[Any] | None:
        return self.waiting[0] if self.waiting else None

    def feedback(self, storage_constraint: Any = None, **rest: Any) -> None:
        self.waiting.pop(0)
        if self.is_first:
            self.is_first, self.waiting = False, list(self._proposals(storage_constraint))

    def _proposals(self, topology: Any) -> Iterator[list[Any]]:
        hbm, ddr = (
            np.array([getattr(d.storage, x) for d in topology.devices], float) for x in ("hbm", "ddr")
        )
        n_hbm, n_ddr = (min(n * len(hbm), 1024) for n in self.bins)
        size = np.array([max(hbm.sum(), 1) / n_hbm, max(ddr.sum(), 1) / n_ddr])
        cost, used = np.zeros(1), np.zeros((1, 2))
        back: list[tuple[np.ndarray, np.ndarray]] = []
        for options in self.options.values():
            needs = np.array([(o.total_storage.hbm, o.total_storage.ddr) for o in options]) / size
            largest = np.array(
                [[getattr(s.storage, x) for x in ("hbm", "ddr")] for o in options for s in o.shards]
            )
            of = np.repeat(np.arange(len(options)), [len(o.shards) for o in options])
            # HBM is a device's own, DDR a host's: here all devices are on one.
            too_large = np.bincount(of, (largest > (hbm.max(), ddr.sum())).any(1), len(options)) > 0
            costs = np.where(too_large, np.inf, [o.total_perf for o in options])
            after = used[:, None] + needs
            total = (cost[:, None] + costs).ravel()
            cell = (after[..., 0].astype(int) * n_ddr + after[..., 1].astype(int)).ravel()
            may = np.flatnonzero(((after < (n_hbm, n_ddr)).all(-1).ravel()) & np.isfinite(total))
            # The cheapest way to each cell.
            may = may[np.lexsort((total[may], cell[may]))]
            may = may[np.unique(cell[may], return_index=True)[1]]
            back.append(np.divmod(may, len(options)))
            cost, used = total[may], after.reshape(-1, 2)[may]
        level = used[:, 0].astype(int)
        for h in np.unique(level)[::-1]:
            at, chosen = int(min(np.flatnonzero(level == h), key=cost.__getitem__)), []
            for options, (before, option) in zip(
                reversed(self.options.values()), reversed(back), strict=True
            ):
                chosen.append(options[option[at]])
                at = int(before[at])
            yield chosen[::-1]


def torchrec_plan(
    problem: Problem,
    proposers: Sequence[Any],
    kernels: Sequence[str],
    types: Sequence[str],
    factor: float,
    fraction: float,
) -> tuple[Problem, list[Placement]] | None:
    """Problem with cache load factors chosen by TorchRec's planner, and its placements. None if infeasible.

    factor: load factor of caches that it starts from, or offers.
    fraction: of the devices' memory.
    """
    names, [memory] = {f"t{i}": table for i, table in enumerate(problem.tables)}, problem.topology.memory
    n = len(problem.topology)
    topology = Topology(
        n,
        "cuda",
        hbm_cap=int(fraction * min(free_bytes(problem))),
        ddr_cap=memory.bytes // n,
        local_world_size=n,
        hbm_to_ddr_mem_bw=memory.gbps * 1e6,
    )
    constraints = {
        n: ParameterConstraints(
            sharding_types=list(types),
            compute_kernels=list(kernels),
            pooling_factors=[t.pooling],
            cache_params=CacheParams(CacheAlgorithm.LRU, factor, stats=Misses(t, problem.global_batch)),
        )
        for n, t in names.items()
    }
    estimators: list[Any] = [EmbeddingPerfEstimator(topology, constraints), OurStorage(problem, names)]
    planner = EmbeddingShardingPlanner(
        topology,
        problem.local_batch,
        EmbeddingEnumerator(topology, problem.local_batch, constraints, estimator=estimators),
        constraints=constraints,
        stats=[],
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        proposer=list(proposers),
        debug=False,
    )
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[name])
        for name, t in names.items()
    ]
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    try:
        plan: Any = planner.plan(module, sharders).plan[""]
    except PlannerError:
        return None
    factors = {}
    for name, table in names.items():
        cache = plan[name].cache_params
        factors[table.name] = KERNELS.get(plan[name].compute_kernel, cache.load_factor if cache else 1.0)
    own = with_load_factors(problem, factors)
    return own, placements_from_torchrec(plan, dict(zip(names, own.tables, strict=True)), problem.topology)
