"""Constants of the engine: options as arrays, and what all plans of a problem have."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardcore.core.job import PIPELINES
from shardcore.core.types import Placement
from shardcore.step.engine.arrays import CACHED, WORK_ONCE
from shardcore.step.kinds import ShardingKind, kind_on_one_device, sharding_kind_for_table, shards_by_device
from shardcore.step.memory import (
    max_op_features,
    may_exceed_op_limits,
    moments_beyond_resident,
    table_of_runs,
    usable_bytes,
)
from shardcore.step.options import Part, ShardOptions
from shardcore.step.shard_memory import local_batch_shares, table_sort_keys
from shardcore.step.ways import fixed_placements


def search_problem_fields(options: ShardOptions, shared: bool) -> dict[str, Any]:
    """Fields of SearchProblem that are the same for all searches of a problem. Rates of exchanges are 0, and moves
    free.

    shared: whether groups share tables.
    """
    problem, runs, shared_kinds, stages = options.problem, options.runs, options.shared_kinds, options.stages
    job, topology, n_items = problem.job, problem.topology, len(options)
    order = table_sort_keys(problem)
    rank = {name: i for i, name in enumerate(sorted(order, key=order.__getitem__))}
    group_of = np.full((len(shared_kinds), len(topology)), -1)
    for g, (shared_kind, group) in enumerate(options.groups):
        group_of[shared_kinds.index(shared_kind), list(group)] = g
    of_groups = [
        (shared_kinds.index(shared_kind), group[0], group[-1], runs.index(shared_kind))
        for shared_kind, group in options.groups
    ]
    of_shared_kinds = [
        shared_kinds.index(x) if x in shared_kinds and x not in options.kinds else -1 for x in runs
    ]
    on_hosts = topology.devices_by_host
    # The first entry may make options.
    return {
        "shared": options.shared_options if shared else np.zeros((2, len(shared_kinds), n_items), np.int64),
        "shard": options.option_numbers(
            np.arange(n_items)[:, None], np.arange(options.size.max() + 1)
        ).astype(np.int32),
        "vectors": options.vectors,
        "options": np.ascontiguousarray(options.options),
        "alone": options.alone,
        "first_code": options.first_code,
        "items": np.array(
            [
                options.kind,
                options.size,
                # One number for a table: its row ranges are several items, but move as one table.
                [options.item_by_name[options.table_of_item(s).name] for s in range(n_items)],
                # Tables of a bundle that run apart from its first count as fixed ones.
                [
                    min(rank[s.table.name] for run, s in parts if run is parts[0][0])
                    for parts in options.parts
                ],
                # No limits of re-sharding: `limit_moves` puts them in.
                np.zeros(n_items),
                np.zeros(n_items),
            ],
            np.int64,
        ).T.copy(),
        # No rows if nothing is restricted: the engine then skips the check.
        "allowed": options.allowed[:0] if options.allowed.all() else options.allowed,
        # The local batch comes off in the engine, as it changes with the plan.
        "devices": np.stack([options.speed, usable_bytes(problem)], 1).astype(float),
        # Of ranks, which are host by host, and then of devices.
        "host": np.repeat(np.arange(len(on_hosts)), [len(devices) for devices in on_hosts])[
            np.argsort(topology.ranks)
        ],
        "rates": np.zeros((2 * len(runs), WORK_ONCE + 1)),
        "n_kinds": len(options.kinds),
        "hides_ids_ms": job.id_overlap_ms,
        "dense_ms": job.dense_ms,
        "groups": np.array(of_groups, np.int64).reshape(-1, 4),
        "group_of": group_of,
        "moments": moments_beyond_resident(problem),
        "looks_up_ahead": PIPELINES[job.pipeline].looks_up_ahead,
        "host_free": float(topology.memory[0].bytes) if topology.memory else np.inf,
        "runs": np.column_stack([table_of_runs(runs), of_shared_kinds, stages.phases]),
        "stages": stages.slots.sum(3),
        "limits": np.column_stack(
            [stages.max_multiples, [max_op_features(run.op_batch(problem)) for run in runs]]
        ),
        "ops_limited": may_exceed_op_limits(problem),
        **_cache_fields(options),
        **_fixed_fields(options, rank),
        "kept": np.zeros((0, len(topology)), np.int16),
        "most_tables": 0,
        "most_bytes": 0,
    }


def _cache_fields(options: ShardOptions) -> dict[str, np.ndarray]:
    """Fields of SearchProblem that describe embedding caches in device memory."""
    row_bytes = np.zeros(options.vectors.shape[1])
    row_bytes[CACHED : options.first_code] = options.cache_counts.row_bytes
    # A cache has a count of rows, then a count of shards for each width, ascending.
    caches = [
        (options.runs.index(run), CACHED + begin, CACHED + begin + len(widths))
        for (run, _), (begin, widths) in options.cache_counts.ops.items()
        if run in options.runs
    ]
    return {"caches": np.array(caches, np.int64).reshape(-1, 3), "cache_row_bytes": row_bytes}


def _fixed_fields(options: ShardOptions, rank: dict[str, int]) -> dict[str, Any]:
    """Fields of SearchProblem for tables that every plan places alike.

    rank: place of each table in the order in which TorchRec runs them.
    """
    problem, runs = options.problem, options.runs
    fixed, devices_of = fixed_placements(problem), dict[Part, list[int]]()
    for placement in fixed:
        for device, shard in shards_by_device(placement):
            devices_of.setdefault((sharding_kind_for_table(placement.kind, shard.table), shard), []).append(
                device
            )
    ops = np.zeros((len(options.speed), len(runs), options.vectors.shape[1]))
    if devices_of:
        # Replicas are the same on all devices, and are encoded once.
        vectors, _ = options.vectors_and_batch_shares(list(devices_of))
        for ((run, _), devices), vector in zip(devices_of.items(), vectors, strict=True):
            ops[devices, runs.index(run)] += vector
    apart = [
        Placement(kind_on_one_device(shard.table).name, shard, (0,))
        for parts in options.parts
        for run, shard in parts
        if run is not parts[0][0]
    ]
    # [N, 4] as State.runs. The rank is above every other, until a table of the run is found.
    fixed_runs, tables = np.zeros((len(runs), 4)), dict[ShardingKind, list[str]]()
    fixed_runs[:, 3] = len(problem.tables)
    for placement in (*fixed, *apart):
        tables.setdefault(sharding_kind_for_table(placement.kind, placement.shard.table), []).append(
            placement.shard.table.name
        )
    batches = local_batch_shares([*fixed, *apart], problem)
    for run, batch in batches.items():
        # None of them is cut by columns: each is whole, or has its rows divided.
        fixed_runs[runs.index(run)] = (
            batch.outputs,
            0,
            len(tables[run]),
            min(rank[name] for name in tables[run]),
        )
    return {
        "fixed_ops": ops,
        "fixed_runs": fixed_runs,
        "fixed_ids": float(sum(batch.sent for batch in batches.values())),
        # One table is updated after another, so the largest buffer counts.
        "fixed_scratch": float(
            max((problem.job.update_bytes, *(batch.scratch for batch in batches.values())))
        ),
    }
