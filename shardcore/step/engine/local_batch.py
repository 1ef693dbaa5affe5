"""Fields of SearchProblem about the local batch, which is the same on all devices.

Shapes: S strips, N runs. Y layouts of what groups share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardcore.core.job import PIPELINES
from shardcore.core.progress import ticking
from shardcore.core.types import OUTPUT_BYTES, Problem, Shard
from shardcore.step.kinds import Group, Layout, run_of
from shardcore.step.options import Options
from shardcore.step.output_bytes import table_output_rows
from shardcore.step.shard_memory import (
    batch_bytes,
    bucketized_bytes,
    expanded_bytes,
    run_batches,
    scratch_bytes,
    table_order,
)
from shardcore.step.ways import fixed_placements


def table_ranks(problem: Problem) -> dict[str, int]:
    """The place of each table in the order in which TorchRec runs them."""
    order = table_order(problem)  # sort keys
    return {name: i for i, name in enumerate(sorted(order, key=order.__getitem__))}


def batch_fields(
    cache: Options, groups: Sequence[tuple[Layout, Group]], layouts: Sequence[Layout]
) -> dict[str, Any]:
    """The fields of SearchProblem about the local batch. layouts: [Y] of the groups."""
    problem = cache.problem
    topology, job, local = problem.topology, problem.job, problem.local_batch
    n_devices = {layout: len(group) for layout, group in reversed(groups)}  # of the first group
    # A local batch has the outputs and ids of a table's row ranges once: they count for the first.
    outputs = [
        sum(_outputs(shard, local) for shard in first_run(parts) if shard.row_lo == 0)
        for parts in cache.parts
    ]
    shared_local = np.zeros((len(layouts), len(cache), 2))
    for y, layout in enumerate(layouts):
        for s in ticking(range(len(cache))):
            table = cache.table(s)
            # Only divided rows need ids in buckets, one for each row range.
            if layout.divides_rows:
                shared_local[y, s, 0] = local * bucketized_bytes(table, job, n_devices[layout])
            shared_local[y, s, 1] = scratch_bytes(layout, Shard.whole(table), problem)
    return {
        # By unit: outputs of a local batch do not depend on how a strip is cut.
        "local": np.stack([np.array(outputs, float) / cache.size, cache.local_ids], 1),
        "shared_local": shared_local,
        "moments": _moments(problem),
        "always": float(expanded_bytes(problem) + job.dense_bytes),
        "looks_up_ahead": PIPELINES[job.pipeline].looks_up_ahead,
        "host_free": float(topology.memory[0].bytes) if topology.memory else np.inf,
    }


def first_run(parts: Sequence[tuple[Layout, Shard]]) -> list[Shard]:
    """The shards of a strip that run as its first table. Others of a bundle count as tables of fixed kinds."""
    return [shard for run, shard in parts if run is parts[0][0]]


def _moments(problem: Problem) -> np.ndarray:
    """[2, 7, 3] the field of this name (arrays.py)."""
    job, batch = problem.job, batch_bytes(problem)
    pipeline = PIPELINES[job.pipeline]
    of_each = [
        [
            (n.batches * batch, n.sent + replicas * n.replicas, n.arrived - pipeline.least_arrived)
            for n in pipeline.moments
        ]
        for replicas in (False, True)
    ]
    moments = np.array(of_each, float)
    # Activations are there between forward and backward (memory_timeline.phases_of).
    moments[:, [0, 1, 3] if pipeline.looks_up_ahead else [3], 0] += job.activation_bytes
    return np.append(moments, moments.max(1, keepdims=True), axis=1)


def _outputs(shard: Shard, batch: int) -> int:
    return OUTPUT_BYTES * shard.width * table_output_rows(shard.table, batch)


def fixed_fields(cache: Options, runs: Sequence[Layout]) -> dict[str, Any]:
    """The fields about the local batch of tables that are on all devices in every plan."""
    problem, rank = cache.problem, table_ranks(cache.problem)
    # [N, 4] as State.runs. The rank is above every other, until a table of the run is found.
    fixed_runs = np.zeros((len(runs), 4))
    fixed_runs[:, 3] = len(problem.tables)
    fixed = fixed_placements(problem)
    batches = run_batches(fixed, problem)
    for run, batch in batches.items():
        tables = [p.shard.table for p in fixed if run_of(p.kind, p.shard.table) is run]
        # None of them is cut by columns: each is whole, or has its rows divided.
        fixed_runs[runs.index(run)] = len(tables), 0, batch.outputs, min(rank[t.name] for t in tables)
    for parts in cache.parts:
        # A bundle is one strip, and in every plan. Its tables may run apart from its first.
        for run, shard in parts:
            if run is not parts[0][0]:
                of_run = fixed_runs[runs.index(run)]
                of_run[0] += 1
                of_run[2] += _outputs(shard, problem.local_batch)
                of_run[3] = min(of_run[3], rank[shard.table.name])
    return {
        "fixed_runs": fixed_runs,
        # Ids of a local batch in the order of the plan and in buckets.
        "fixed_ids": float(sum(b.permuted + b.bucketized for b in batches.values())),
        # One table is updated after another, so the largest buffer counts.
        "fixed_scratch": float(max((problem.job.update_bytes, *(b.scratch for b in batches.values())))),
    }
