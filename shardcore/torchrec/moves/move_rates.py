"""Rates of the machines of a job at moving tables: measured by moves of tables made for it.

Jobs of tiny tables give what any move takes, and what each collection and table add. Large tables that stay on
their ranks give the rates of building, copying, digests and freeing, phase by phase. The same tables sent to
another rank of the host, and to another host, give those of links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.links import LEVELS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.core.validation import MOST_GBPS, Record, number_within, require
from shardcore.cost.move_rates import MoveRates
from shardcore.step.kinds import kind_on_one_device
from shardcore.torchrec.moves.reshard import BETWEEN, WITHIN, MoveConfig, MoveResult, reshard
from shardcore.torchrec.sharding_plan import to_torchrec

_WIDE, _NARROW, _ROWS = 32, 8, 64
"""Columns of large tables, and rows of tiny ones. Tables of few columns have more rows to digest."""
_FEW, _MANY, _COLLECTIONS = 3, 12, 3
"""Tables of jobs of tiny ones, and collections that a few are in."""
_PHASES = ("build", "fill", "check", "free")
"""Phases of a move that grow with bytes."""


@dataclass(frozen=True)
class MoveRatesConfig(Record):
    """Settings of measuring how fast tables move between ranks.

    mib: weights of a large table on each rank, in MiB. Each has as many bytes of state.
    repeats: number of each move there and back; the median counts.
    move: settings of the moves. Those of the job's moves tell most.
    """

    mib: Annotated[int, number_within(1, 1 << 20)] = 32
    repeats: Annotated[int, number_within(1, 1000)] = 3
    move: MoveConfig = field(default_factory=MoveConfig)


def measure_move_rates(
    device: torch.device, ranks_per_host: int, config: MoveRatesConfig = MoveRatesConfig()
) -> MoveRates:
    """Measure how fast this process group moves tables, with synthetic tables. All ranks call it.

    Each rank takes 4 * config.mib MiB of memory meanwhile, and a few buffers.

    Raises ShardCoreError for hosts with different numbers of ranks.
    """
    n = dist.get_world_size()
    require(
        n % ranks_per_host == 0,
        f"the job has {n} ranks, and a host {ranks_per_host}; each host needs the same number of them",
    )
    host = [rank // ranks_per_host for rank in range(n)]
    few, many, divided = (
        _median_phase_seconds(_SyntheticJob(host, device, tables, collections=collections), [], config)
        for tables, collections in ((_FEW, 1), (_MANY, 1), (_FEW, _COLLECTIONS))
    )
    a_table = {phase: (many[phase] - few[phase]) / (_MANY - _FEW) for phase in few}
    table_s = max(0.0, sum(a_table.values()))
    collection_s = max(0.0, sum(divided.values()) - sum(few.values())) / (_COLLECTIONS - 1)

    # Rows of a large table, and where each goes.
    n_cells = config.mib * 2**20 // 4
    made, narrow = (_SyntheticJob(host, device, n + 1, n_cells // width, width) for width in (_WIDE, _NARROW))
    small = {phase: few[phase] + a_table[phase] * (n + 1 - _FEW) for phase in few}
    n_bytes = 2 * n_cells * 4
    local, of_narrow = (_excess_seconds(_median_phase_seconds(m, [], config), small) for m in (made, narrow))
    # Weights and state have digests before and after.
    checked = np.array([[4 * n_cells, 4 * m.rows] for m in (made, narrow)])
    digest_ns, row_ns = np.linalg.solve(checked, 1e9 * np.array([local["check"], of_narrow["check"]]))
    if min(digest_ns, row_ns) < 0:  # noise: all of it counts by number
        digest_ns, row_ns = 1e9 * local["check"] / checked[0, 0], 0.0
    links = {}
    # Each rank sends its table to the next one of its host, or to the same one of the next host.
    for level, to in (
        (WITHIN, [h * ranks_per_host + (r + 1) % ranks_per_host for r, h in enumerate(host)]),
        (BETWEEN, [(r + ranks_per_host) % n for r in range(n)]),
    ):
        if to != list(range(n)):
            fill_s = _excess_seconds(_median_phase_seconds(made, to, config), small)["fill"]
            links[level] = _gbps(n_bytes, fill_s)
    return MoveRates(
        move_s=max(0.0, sum(few.values()) - _FEW * table_s - collection_s),
        collection_s=collection_s,
        table_s=table_s,
        build_gbps=_gbps(n_bytes, local["build"]),
        copy_gbps=_gbps(n_bytes, local["fill"]),
        digest_ns=float(digest_ns),
        digest_row_ns=float(row_ns),
        free_gbps=_gbps(n_bytes, local["free"]),
        link_gbps={level: links[level] for level in LEVELS if level in links},
    )


def _excess_seconds(phases: Mapping[str, float], small: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of a move beyond those of a move of tiny tables."""
    return {phase: max(1e-9, phases[phase] - small[phase]) for phase in _PHASES}


def _gbps(n_bytes: int, seconds: float) -> float:
    return min(MOST_GBPS, n_bytes / seconds / 1e9)


@dataclass(frozen=True)
class _SyntheticJob:
    """A synthetic training job whose tables are moved to measure rates.

    host: host of each rank.
    tables: in turn of each collection. The first of each is tiny, and moves; others have `rows` and `dim`.
    """

    host: list[int]
    device: torch.device
    tables: int
    rows: int = _ROWS
    dim: int = _WIDE
    collections: int = 1

    def problem(self) -> Problem:
        tables = [
            Table(
                f"t{i}",
                self.rows if i >= self.collections else _ROWS,
                self.dim,
                1.0,
                collection=f"bags{i % self.collections}",
            )
            for i in range(self.tables)
        ]
        devices = tuple(Device(1 << 50, host=f"host-{h}") for h in self.host)
        return Problem("moved", tuple(tables), Topology(devices), len(devices))

    def plan(self, tiny_at: int, to: list[int]) -> Plan:
        """Plan with the tiny tables on one rank, and the i-th large table on rank to[i]; on rank i if `to` is empty."""
        n, others = len(self.host), range(self.tables - self.collections)
        at = [tiny_at] * self.collections + [to[i % n] if to else i % n for i in others]
        tables = self.problem().tables
        return Plan(
            tuple(
                Placement(kind_on_one_device(t).name, Shard.whole(t), (rank,))
                for t, rank in zip(tables, at, strict=True)
            )
        )

    def sharded_model(self) -> Any:
        """DistributedModelParallel of the synthetic tables, sharded by the job's first plan."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        model = self.unsharded_model()
        sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD})
        exported = to_torchrec(self.plan(0, []), self.problem(), model, self.device.type)
        return DistributedModelParallel(
            model, device=self.device, plan=exported, sharders=cast(Any, [sharder])
        )

    def unsharded_model(self) -> nn.Module:
        """Module of EmbeddingBagCollections with the synthetic tables, on the meta device."""
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        model, tables = nn.Module(), self.problem().tables
        for path in dict.fromkeys(t.collection for t in tables):
            configs = [
                EmbeddingBagConfig(
                    name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
                )
                for t in tables
                if t.collection == path
            ]
            model.add_module(path, EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
        return model


def _median_phase_seconds(made: _SyntheticJob, to: list[int], config: MoveRatesConfig) -> dict[str, float]:
    """Median seconds of each phase of moves there and back, of the slowest rank."""
    job = made.sharded_model()
    there, back = (
        to_torchrec(made.plan(*at), made.problem(), made.unsharded_model(), made.device.type)
        for at in ((len(made.host) - 1, to), (0, []))
    )
    moves: list[MoveResult] = []
    for _ in range(1 + config.repeats):  # the first warms up
        moves += [reshard(job, plan, config=config.move) for plan in (there, back)]
    moves = moves[2:]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [dict(m.seconds) for m in moves])
    # Ranks wait for each other after most phases: the slowest counts.
    return {
        phase: float(np.median([max(of[i][phase] for of in of_ranks) for i in range(len(moves))]))
        for phase in moves[0].seconds
    }
