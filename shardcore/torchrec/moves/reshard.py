"""Move the tables of a running DistributedModelParallel job to another plan, between two steps.

    moved = reshard(model, read_torchrec("new.json"), optimizer)

New shards are built and filled while the old ones stay, then compared with them by digests of rows and state.
Only if all ranks find them equal does any rank use them (see `agreement`). Until then the old plan is whole
on every rank, and it stays so if a rank fails, takes too long or dies.

The optimizer of the job's replicas goes on with their new parameters and state. Collections are replaced in
the model: what holds one of them, or its parameters, needs to take it from the model again.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.validation import Record, Wait, number_within, require
from shardcore.torchrec.modules import Collection, collections_of_model, is_replicated, quote_first_names
from shardcore.torchrec.moves.agreement import Agreement, WaitEnded, time_limit
from shardcore.torchrec.moves.pipelines import drain_pipeline
from shardcore.torchrec.moves.rebuild import (
    WithoutInit,
    leave_uninitialized,
    restore_table_configs,
    unsharded_copy,
)
from shardcore.torchrec.moves.replica_optimizers import (
    refresh_optimizer_wrappers,
    renew_fused_optimizer,
    replace_parameter,
    replica_parameter_group,
    replica_parameter_groups,
)
from shardcore.torchrec.moves.rows import (
    WEIGHTS,
    DenseOptimizer,
    Key,
    RowFormat,
    TablePart,
    dense_state_granularity,
    fused_kernels,
    fused_state_granularity,
    key_name,
    parts_on_rank,
    set_fused_step,
    zero_optimizer_state,
)
from shardcore.torchrec.moves.transfer import (
    DIGEST_BYTES,
    Exchange,
    TableRegion,
    TableRegions,
    TransferPiece,
    inexact_state_reason,
    tensor_digests,
    transfer_pieces,
)
from shardcore.torchrec.plan_files import plan_to_json, shardings_by_module
from shardcore.torchrec.problems import unpriced_problem
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

if TYPE_CHECKING:
    from torchrec.distributed.types import ParameterSharding, ShardingPlan

LOCAL, WITHIN, BETWEEN = "local", "within_host", "between_hosts"
"""Ways of bytes: within a rank, and the levels of links."""
TRIED = "1.5", "1.9"
"""Oldest and newest versions of TorchRec under which tables were moved. It has no public call for all of it."""
_OF_PLACEMENT = frozenset(
    "cache_algorithm cache_load_factor cache_reserved_memory cache_precision prefetch_pipeline "
    "multipass_prefetch_config enforce_hbm stochastic_rounding bounds_check_mode output_dtype _batch_key".split()
)
"""Settings of fused ops that follow from a plan."""


@dataclass(frozen=True)
class MoveConfig(Record):
    """Settings of a move of a running job's tables.

    max_gib: extra memory of a rank while it moves, at most. None: any.
    piece_mib: bytes that a rank sends at once, and those that it receives, in MiB.
    timeout_s: limit of each wait for other ranks.
    approximate: True to carry optimizer state over as well as it can be where another plan has state of
      another form: a mean over columns, a number a row for its cells, or 0.
    """

    max_gib: Annotated[float | None, number_within(0, 1e6)] = None
    piece_mib: Annotated[float, number_within(2**-20, 1e5)] = 64.0
    timeout_s: Wait = 300.0
    approximate: bool = False


@dataclass(frozen=True)
class MoveResult:
    """Result of a completed move: tables, bytes and times.

    tables: tables that are sharded otherwise now, by path and name.
    bytes: bytes of weights and state that were copied, by way, on all ranks.
    seconds: seconds of this rank, by phase.
    extra_bytes: memory in addition to the old shards while they moved, by rank.
    digests: digest of each tensor of those collections, by table and tensor, as they were before and after.
    inexact: tables whose optimizer state was carried over as well as it could be, and why.
    """

    tables: tuple[str, ...]
    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    extra_bytes: tuple[int, ...]
    digests: Mapping[str, str]
    inexact: Mapping[str, str]

    @property
    def pause_s(self) -> float:
        """Seconds for which the move stopped training."""
        return sum(self.seconds.values())


def reshard(
    model: nn.Module,
    new_plan: ShardingPlan,
    optimizer: Any = None,
    pipeline: Any = None,
    config: MoveConfig = MoveConfig(),
) -> MoveResult:
    """Move a running job's tables to a new plan. All ranks call it, between the same two training steps.

    model: a DistributedModelParallel.
    new_plan: plan of the same model, such as of `to_torchrec`.
    optimizer: the job's, of replicas. Its parameters and state are replaced.
    pipeline: the job's TrainPipelineSparseDist. Its batches are distributed again by the new plan.

    Raises ShardCoreError on all ranks, and leaves the old plan as it is, if a rank cannot make the move. It
    raises Undecided if a rank cannot learn what the others did.
    """
    require(dist.is_initialized(), "tables move in a job of torch.distributed; call init_process_group first")
    require(
        not getattr(model, "_moves_tables", False),
        "the model's tables are being moved; ask for a second move when this one is done",
    )
    model._moves_tables = True  # type: ignore[assignment]
    try:
        with drain_pipeline(pipeline):
            moved = _move_tables(model, new_plan, DenseOptimizer(optimizer), config)
    finally:
        model._moves_tables = False  # type: ignore[assignment]
        start = time.perf_counter()
        gc.collect()  # shards that are no longer used, which hooks hold in circles
    return replace(moved, seconds={**moved.seconds, "free": time.perf_counter() - start})


def _move_tables(
    model: Any, new_plan: ShardingPlan, optimizer: DenseOptimizer, config: MoveConfig
) -> MoveResult:
    clock, rank = _Clock(), dist.get_rank()
    agreed = Agreement.new(config.timeout_s)
    with agreed.agreed_phase("plan", lambda: move.facts_for_other_ranks()) as shared:
        move = _Move.plan_move(model, new_plan, optimizer, config)
    with agreed.agreed_phase("same plan"):
        if differing := [r for r, of in enumerate(shared) if of["digest"] != shared[0]["digest"]]:
            raise ShardCoreError(
                f"rank {differing[0]} was given another plan or other settings than rank 0; all need the same"
            )
    clock.lap("plan")
    if not move.collections:
        return MoveResult((), {}, clock.seconds, (0,) * len(shared), {}, {})
    built: list[_NewCollection] = []
    group: Any = None
    try:
        with agreed.agreed_phase("build"), time_limit(model._env.process_group, config.timeout_s):
            group = dist.new_group(timeout=timedelta(seconds=config.timeout_s))
            built += [
                c.build_new_shards(model, optimizer, _OptimizerProgress.merge_ranks(shared))
                for c in move.collections
            ]
        clock.lap("build")
        with agreed.agreed_phase("fill"):
            move.fill_new_shards(built, group, config)
        clock.lap("fill")
        with agreed.agreed_phase("digest", lambda: {"before": before, "after": after}) as found:
            # Of replicas that all ranks had, that of rank 0 counts.
            counted = (
                part
                for c in move.collections
                for part in c.parts
                if rank == 0 or not c.regions[part.key][0].replicas
            )
            before = tensor_digests(counted, move.formats_to_verify())
            after = tensor_digests((p for b in built for p in b.parts.values()), move.formats_to_verify())
        with agreed.agreed_phase("compare"):
            totals = move.require_equal_digests(found)
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    clock.lap("check")
    agreed.commit()
    # From here on nothing may fail: other ranks use the new plan.
    for collection, new in zip(move.collections, built, strict=True):
        collection.swap_into_model(model, new, optimizer)
    renew_fused_optimizer(model)
    refresh_optimizer_wrappers(optimizer.given)
    clock.lap("swap")
    return MoveResult(
        tables=tuple(
            sorted(
                key_name(key)
                for collection in move.collections
                for key, (before, after) in collection.regions.items()
                if before != after
            )
        ),
        bytes=move.bytes_by_link_level(),
        seconds=clock.seconds,
        extra_bytes=tuple(of["extra_bytes"] for of in shared),
        digests={name: f"{total:016x}" for name, total in totals.items()},
        inexact=move.inexact,
    )


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Record the seconds since the last lap under a phase's name."""
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


# --- what moves ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OldCollection:
    """A sharded collection that a new plan shards otherwise.

    old: before the move. sharder: of its type. new: sharding of its tables.
    regions: regions of each table, before and after.
    parts: this rank's, before.
    dense: the optimizer and group of parameters of replicas, before or after, by table.
    """

    old: Collection
    sharder: Any
    new: Mapping[str, ParameterSharding]
    regions: Mapping[Key, tuple[TableRegions, TableRegions]]
    parts: tuple[TablePart, ...]
    dense: Mapping[str, tuple[Any, dict[str, Any]]]

    @property
    def path(self) -> str:
        return self.old.path

    def build_new_shards(
        self, model: Any, optimizer: DenseOptimizer, counts: _OptimizerProgress
    ) -> _NewCollection:
        """Build the collection under the new plan, with optimizer state of 0."""
        start = Collection(self.path, unsharded_copy(self.old, leave_uninitialized))
        for table, settings in self.old.fused_params.items():
            weight = start.table_modules[table].weight
            # Types of optimizers are already FBGEMM's, so TorchRec needs no class of one.
            weight._optimizer_kwargs = [{k: v for k, v in settings.items() if k not in _OF_PLACEMENT}]  # type: ignore[attr-defined]
        with WithoutInit():
            module = self.sharder.shard(start.module, self.new, model._env, model.device, self.path)
        restore_table_configs(module, self.old)
        module.train(self.old.module.training)
        built = Collection(self.path, module)
        self._restore_fused_optimizers(built, counts)
        state = {}
        for key, (_, new) in self.regions.items():
            if new.replicas:
                weight, (kind, group) = built.table_modules[key[1]].weight, self.dense[key[1]]
                state[weight] = zero_optimizer_state(kind, group, weight, counts.steps.get(key_name(key), 0))
        parts = {(p.key, p.rows, p.columns): p for p in parts_on_rank(built, optimizer, new_state=state)}
        self._require_planned_shards(parts)
        return _NewCollection(built, parts, state)

    def _restore_fused_optimizers(self, built: Collection, counts: _OptimizerProgress) -> None:
        """Set learning rates and step counts of new fused ops to those that their tables had."""
        for kernel in fused_kernels(built):
            tables = [t.name for t in kernel._config.embedding_tables]
            names = [key_name((self.path, t)) for t in tables]
            groups = [counts.groups[name] for name in names if name in counts.groups]
            require(
                not any(g != groups[0] for g in groups),
                f"tables {quote_first_names(tables)} of {self.path!r} would share a fused op, and have other "
                f"learning rates: {[g.get('lr') for g in groups][:5]}",
            )
            if groups:
                kernel.fused_optimizer.param_groups[0].update(groups[0])
                kernel.emb_module.set_learning_rate(groups[0]["lr"])
            if steps := [counts.steps[name] for name in names if name in counts.steps]:
                set_fused_step(kernel.emb_module, max(steps))

    def _require_planned_shards(self, parts: Mapping[Any, TablePart]) -> None:
        """Raise ShardCoreError if TorchRec built other shards, or other tensors of a shard, than planned."""
        rank = dist.get_rank()
        planned = {
            (key, r.rows, r.columns)
            for key, (_, new) in self.regions.items()
            for r in new.regions_on_rank(rank)
        }
        if differing := sorted(planned ^ set(parts)):
            raise ShardCoreError(
                f"TorchRec shards table {differing[0][0][1]!r} of {self.path!r} otherwise than planned: rows and "
                f"columns {[d[1:] for d in differing[:3]]}"
            )
        for (key, *_), part in parts.items():
            expected = self.regions[key][1].format.tensor_formats()
            actual = {name: (t.ndim == 1, t.dtype) for name, t in part.tensors.items()}
            require(
                actual == expected,
                f"table {key[1]!r} of {self.path!r} has {actual} under the new plan; expected are {expected}",
            )

    def swap_into_model(self, model: Any, built: _NewCollection, optimizer: DenseOptimizer) -> None:
        """Replace the old collection in the model and in optimizers by the new one, without waits."""
        before, now = self.old, built.collection
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(now.module, hooks).update(getattr(before.module, hooks))
        for (_, table), (old, new) in self.regions.items():
            if old.replicas or new.replicas:
                weights = (
                    before.table_modules[table].weight if old.replicas else None,
                    now.table_modules[table].weight if new.replicas else None,
                )
                group = self.dense[table]
                replace_parameter(optimizer.given, group, weights, now.weights_name(table))
                if weights[1] is not None:
                    group[0].state[weights[1]] = built.state[weights[1]]
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is before.module:
                    setattr(parent, name, now.module)
        writable = model.__dict__.get("_writable_sharded_modules", [])
        writable[:] = [now.module if m is before.module else m for m in writable]
        model._plan.plan[self.path] = now.module.module_sharding_plan


@dataclass(frozen=True)
class _OptimizerProgress:
    """Settings of optimizers that go on, by table: numbers of its fused group, and the largest count of steps."""

    groups: Mapping[str, Mapping[str, float]]
    steps: Mapping[str, int]

    @staticmethod
    def merge_ranks(shared: Sequence[Mapping[str, Any]]) -> _OptimizerProgress:
        """Optimizer settings and step counts of all tables, from what each rank shared. The largest count wins."""
        groups = {name: group for of in shared for name, group in of["groups"].items()}
        rising = sorted((step, name) for of in shared for name, step in of["steps"].items())
        return _OptimizerProgress(groups, {name: step for step, name in rising})


@dataclass(frozen=True)
class _NewCollection:
    """A collection under a new plan. state: of its replicas, by parameter."""

    collection: Collection
    parts: Mapping[tuple[Key, tuple[int, int], tuple[int, int]], TablePart]
    state: Mapping[nn.Parameter, dict[str, Any]]


@dataclass(frozen=True)
class _Move:
    """All that changes when a running job moves to a new plan: collections, parameters and transfers.

    digest: digest of both plans and the settings.
    inexact: why optimizer state cannot be carried over as it is, by table.
    extra_bytes: memory of this rank in addition to the old shards.
    """

    collections: tuple[_OldCollection, ...]
    pieces: tuple[TransferPiece, ...]
    digest: str
    inexact: Mapping[str, str]
    extra_bytes: int
    device: torch.device
    per_host: int

    @staticmethod
    def plan_move(model: Any, new_plan: ShardingPlan, optimizer: DenseOptimizer, config: MoveConfig) -> _Move:
        """Prepare a move of a model's tables to a plan. Raises ShardCoreError if the model cannot run it, or lacks
        memory.
        """
        rank = dist.get_rank()
        changed = _changed_collections(model, new_plan, optimizer)
        regions = {key: pair for c in changed for key, pair in c.regions.items()}
        reasons = {
            key_name(key): why
            for key, (old, new) in regions.items()
            if (why := inexact_state_reason(old, new))
        }
        if reasons and not config.approximate:
            name = next(iter(reasons))
            raise ShardCoreError(
                f"optimizer state of tables {quote_first_names(list(reasons))} cannot move as it is: of {name!r}, "
                f"{reasons[name]}; set approximate to carry it over as well as can be"
            )
        buffer = int(config.piece_mib * 2**20)
        moved = tuple(
            p for key, (old, new) in regions.items() for p in transfer_pieces(key, old, new, buffer)
        )
        sent = [p.aligned_bytes for p in moved if p.source.rank != p.target.rank]
        buffers = 2 * min(max([buffer, *sent]), sum(sent))
        # A replica has a gradient in its data-parallel wrapper. Digests are taken once buffers are gone.
        extra = max(buffers, DIGEST_BYTES) + sum(
            new.bytes_on_rank(rank)
            + new.replicas * sum(r.cells for r in new.regions_on_rank(rank)) * new.format.weights.itemsize
            for _, new in regions.values()
        )
        _require_memory(extra, model.device, config)
        content = [plan_to_json(model.plan), plan_to_json(new_plan), repr(config)]
        return _Move(
            collections=tuple(changed),
            pieces=moved,
            digest=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
            inexact=reasons,
            extra_bytes=extra,
            device=model.device,
            per_host=_ranks_per_host(model),
        )

    def facts_for_other_ranks(self) -> dict[str, Any]:
        """Facts that other ranks need of this one: step counts and learning rates of its fused ops, and the move's
        digest.
        """
        groups: dict[str, Any] = {}
        steps = {key_name(p.key): p.step for c in self.collections for p in c.parts if p.step is not None}
        for c in self.collections:
            for kernel in fused_kernels(c.old):
                group = kernel.fused_optimizer.param_groups[0]
                numbers = {k: v for k, v in group.items() if isinstance(v, int | float)}
                groups |= {key_name((c.path, t.name)): numbers for t in kernel._config.embedding_tables}
        return {"digest": self.digest, "extra_bytes": self.extra_bytes, "groups": groups, "steps": steps}

    def fill_new_shards(
        self, built: Sequence[_NewCollection], group: dist.ProcessGroup, config: MoveConfig
    ) -> None:
        """Copy rows and optimizer state from the old shards of all ranks to the new ones."""
        for part in (p for b in built for p in b.parts.values()):
            for name, tensor in part.tensors.items():
                if name != WEIGHTS:
                    tensor.zero_()

        def all_to_all(received: Any, sent: Any, of_each: list[int], to_each: list[int]) -> None:
            try:
                work: Any = dist.all_to_all_single(
                    received, sent, of_each, to_each, group=group, async_op=True
                )
                work.wait(timedelta(seconds=config.timeout_s))
            except RuntimeError as error:
                raise WaitEnded(
                    f"an exchange of rows has failed on rank {dist.get_rank()}: {error}"
                ) from error

        Exchange(
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            old={(p.key, p.rows, p.columns): p for c in self.collections for p in c.parts},
            new={at: p for b in built for at, p in b.parts.items()},
            all_to_all=all_to_all,
            device=self.device,
        ).fill_new_parts(self.pieces, int(config.piece_mib * 2**20))

    def formats_to_verify(self) -> dict[Key, RowFormat]:
        """Formats of each table with the tensors that a move leaves unchanged: all but inexact optimizer state."""
        return {
            key: replace(new.format, states=()) if key_name(key) in self.inexact else new.format
            for c in self.collections
            for key, (_, new) in c.regions.items()
        }

    def require_equal_digests(self, found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Digests of all tensors. Raises ShardCoreError for a tensor whose digest the move has changed."""
        totals: dict[str, int] = {}
        pairs = (pair for c in self.collections for pair in c.regions.items())
        replicas = tuple(f"{key_name(key)}." for key, (_, new) in pairs if new.replicas)
        for name in {name for of in found for name in of["before"]}:
            totals[name] = total = sum(of["before"].get(name, 0) for of in found) % (1 << 64)
            after = [of["after"].get(name, 0) for of in found]
            # Each rank has all of a replica, and a part of another table.
            after = after if name.startswith(replicas) else [sum(after) % (1 << 64)]
            require(
                set(after) == {total},
                f"{name} is other on its new shards than on the old ones: digest {after[0]:016x}, not {total:016x}",
            )
        return totals

    def bytes_by_link_level(self) -> dict[str, int]:
        """Bytes that the move copies within ranks, within hosts and between hosts."""
        by_way: dict[str, int] = dict.fromkeys((LOCAL, WITHIN, BETWEEN), 0)
        for piece in self.pieces:
            a, b = piece.source.rank, piece.target.rank
            way = LOCAL if a == b else WITHIN if a // self.per_host == b // self.per_host else BETWEEN
            by_way[way] += piece.bytes
        return by_way


def _changed_collections(
    model: Any, new_plan: ShardingPlan, optimizer: DenseOptimizer
) -> list[_OldCollection]:
    """Collections that the new plan shards differently. Raises ShardCoreError for a plan that the model cannot run."""
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.model_parallel import get_unwrapped_module
    from torchrec.distributed.types import ShardingPlan

    oldest, release, newest = (
        [int(n) for n in v.split(".")[:2]] for v in (TRIED[0], torchrec.__version__, TRIED[1])
    )
    require(
        oldest <= release <= newest,
        f"TorchRec is {torchrec.__version__}; tables were moved under {' to '.join(TRIED)}",
    )
    require(
        type(model) is DistributedModelParallel,
        f"the model is a {type(model).__name__}; tables of a DistributedModelParallel can be moved",
    )
    require(
        not getattr(model, "model_trackers", {}) and not getattr(model._env, "output_dtensor", False),
        "the model has trackers or DTensors, which know its shards; tables are moved of models without",
    )
    require(
        isinstance(new_plan, ShardingPlan),
        f"the new plan is a {type(new_plan).__name__}; it needs to be TorchRec's ShardingPlan, as of read_torchrec",
    )
    now, new = shardings_by_module(model.plan), shardings_by_module(new_plan)
    collections = {
        c.path: c
        for c in collections_of_model(model, refuses_others=False)
        if c.is_sharded and c.wrapper is None
    }
    if differing := sorted(set(now) ^ set(new)):
        raise ShardCoreError(
            f"the new plan is of modules {sorted(new)[:5]}, the model has {sorted(now)[:5]}; "
            f"differing is {differing[0]!r}"
        )
    for path in now.keys() - collections.keys():
        require(
            dict(now[path]) == dict(new[path]),
            f"the new plan changes module {path!r}, a "
            f"{type(get_unwrapped_module(model).get_submodule(path)).__name__}; tables can be moved of "
            "EmbeddingBagCollections and EmbeddingCollections that nothing wraps",
        )
    n, per_host = dist.get_world_size(), _ranks_per_host(model)
    # Memory without limit, as nothing is planned here.
    devices = tuple(Device(1 << 50, host=f"host-{rank // per_host}") for rank in range(n))
    problem = unpriced_problem(model, Topology(devices))
    # Refuses a plan that TorchRec cannot run, before it is tried.
    to_torchrec(from_torchrec(new_plan, problem, model), problem, model, model.device.type, like=new_plan)
    return [
        _old_collection(model, collection, new[path], optimizer)
        for path, collection in collections.items()
        if dict(new[path]) != dict(now[path])
    ]


def _old_collection(
    model: Any, old: Collection, new: Mapping[str, ParameterSharding], optimizer: DenseOptimizer
) -> _OldCollection:
    from torchrec.modules.embedding_configs import data_type_to_dtype

    now, settings = old.module.module_sharding_plan, old.fused_params
    collection = _OldCollection(old, model._sharder_map[type(unsharded_copy(old))], new, {}, (), {})
    regions, dense, groups = {}, {}, replica_parameter_groups(model, optimizer)
    for config in old.table_configs:
        dtype = data_type_to_dtype(config.data_type)

        def regions_under(
            sharding: ParameterSharding, config: Any = config, dtype: torch.dtype = dtype
        ) -> TableRegions:
            if replicas := is_replicated(sharding):
                dense[config.name] = replica_parameter_group(old, config.name, optimizer, groups)
                states, state = dense_state_granularity(*dense[config.name]), dtype
            else:
                fused = settings[config.name].get("optimizer")
                states, state = fused_state_granularity(getattr(fused, "name", "EXACT_SGD")), torch.float32
            shards = _regions_of_sharding(sharding, config.num_embeddings, config.embedding_dim)
            return TableRegions(shards, replicas, RowFormat(dtype, states, state))

        regions[old.path, config.name] = regions_under(now[config.name]), regions_under(new[config.name])
    parts = []
    for part in parts_on_rank(old, optimizer):
        # A dense optimizer has no state before its first step.
        missing = {
            name: torch.zeros(
                part.rows[1] if flat else (part.rows[1], part.columns[1]), dtype=kind, device=model.device
            )
            for name, (flat, kind) in regions[part.key][0].format.tensor_formats().items()
            if name not in part.tensors
        }
        parts.append(replace(part, tensors=part.tensors | missing))
    return replace(collection, regions=regions, parts=tuple(parts), dense=dense)


def _ranks_per_host(model: Any) -> int:
    from torchrec.distributed.comm import get_local_size

    return get_local_size(model._env.world_size)


def _regions_of_sharding(sharding: ParameterSharding, rows: int, dim: int) -> tuple[TableRegion, ...]:
    if is_replicated(sharding):
        return tuple(TableRegion(rank, (0, rows), (0, dim)) for rank in range(dist.get_world_size()))
    shards: Any = sharding.sharding_spec
    return tuple(
        TableRegion(s.placement.rank(), (row, row + n), (column, column + width))
        for s in shards.shards
        for (row, column), (n, width) in [(s.shard_offsets, s.shard_sizes)]
        if n and width
    )


def _require_memory(extra: int, device: torch.device, config: MoveConfig) -> None:
    limit = None if config.max_gib is None else int(config.max_gib * 2**30)
    require(
        limit is None or extra <= limit,
        f"the move takes {extra / 2**30:.3g} GiB on rank {dist.get_rank()} beside its shards; max_gib is "
        f"{config.max_gib}: allow more, or move fewer tables",
    )
    try:
        torch.empty(extra, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ShardCoreError(
            f"rank {dist.get_rank()} has no {extra / 2**30:.3g} GiB of memory beside its shards: {error}"
        ) from None
