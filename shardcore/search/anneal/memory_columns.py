"""Fields of SearchProblem about memory, and about tables of fixed kinds.

Shapes: S strips, R shards, D devices, F features, G groups, N runs, M columns of State.memory.
K kinds of strips (cache.kinds). Y layouts of what groups share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcore.core.job import PIPELINES
from shardcore.core.progress import ticking
from shardcore.core.types import OUTPUT_BYTES, PRECISION_BYTES, Problem, Shard
from shardcore.search.anneal.compiled import SUMS
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.state.shards import fixed_placements
from shardcore.step.kinds import Group, Layout, run_of, shards_on
from shardcore.step.memory import CACHED_ROW_BYTES, Caches
from shardcore.step.memory_account import sums_of
from shardcore.step.op_limits import most_features
from shardcore.step.output_bytes import table_output_rows
from shardcore.step.shard_memory import (
    batch_bytes,
    bucketized_bytes,
    expanded_bytes,
    run_batches,
    scratch_bytes,
    table_order,
)


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of State.memory.

    runs: [N] how strips and tables on several devices run.
    limited: whether FBGEMM's limits of an op may bind.
    """

    problem: Problem
    runs: tuple[Layout, ...]
    caches: Caches
    limited: bool

    @property
    def first_count(self) -> int:
        """The column in which counts of caches begin."""
        return SUMS + (2 + self.limited) * len(self.runs)

    def __len__(self) -> int:
        """M."""
        return self.first_count + len(self.caches)

    def more(self, run: Layout, shard: Shard, entered: bool) -> dict[int, float]:
        """A shard's limited features, and counts of its cache, by column.

        entered: also its bytes that enter collectives, and lookups. Mostly a shard's sums have them.
        """
        counts = self.caches.counts(run, shard)
        more = {self.first_count + i: n for i, n in counts.items()}
        # Columns of a run follow State.memory: SUMS + n, SUMS + N + n, SUMS + 2 N + n.
        n, sums = len(self.runs), sums_of(run, shard, self.problem)
        each = (sums.entered * entered, sums.lookups * entered, sums.features * self.limited)
        return more | {SUMS + i * n + self.runs.index(run): x for i, x in enumerate(each) if x}


def shards_memory(
    cache: ShardCostCache, columns: Columns, layouts: Sequence[Layout], parts: np.ndarray
) -> dict[str, np.ndarray]:
    """The fields about shards and their ops.

    layouts: [Y] of groups.
    parts: [2, Y, S] shards of a strip on a group's devices (see compiled/memory.shared_row). None where the
      layout does not run it.
    """
    problem, shared_sums = columns.problem, np.zeros((*parts.shape, 6))
    shared = [(at, layouts[at[1]], shard) for at, shard in np.ndenumerate(parts) if shard is not None]
    for at, run, shard in ticking(shared):
        # Rows that divide evenly give the last device the same shard, whose sums are known then.
        first = 0, *at[1:]
        known = at[0] > 0 and shard is parts[first]
        shared_sums[at] = shared_sums[first] if known else sums_of(run, shard, problem)
    # In the order of compiled/memory.shared_row: shards of strips, then what groups share.
    sums = np.concatenate([cache.sums, shared_sums.reshape(-1, 6)])
    # Strips with more than their sums: limits of ops, caches, or tables that run apart in their bundle.
    chosen = {
        s
        for s, runs in enumerate(cache.parts)
        if columns.limited or any(run is not runs[0][0] or shard.table.in_host_memory for run, shard in runs)
    }
    more: dict[int, Counter[int]] = {}  # by row of sums
    # Number 0 is nothing, whatever strip it names.
    for i in (np.flatnonzero(np.isin(cache.strip_of[1:], list(chosen))) + 1).tolist():
        runs, more[i] = [run for run, _ in cache.parts[cache.strip_of[i]]], Counter()
        for run, shard in zip(runs, cache.made[i], strict=True):
            # The sums count in the run of the first table.
            apart = run is not runs[0]
            more[i].update(columns.more(run, shard, apart))
            if apart:
                sums[i, 2:4] -= sums_of(run, shard, problem)[2:4]
    for at, run, shard in shared if chosen else ():
        if at[2] in chosen:
            # Their entered bytes and lookups are in `sums`, as each is of a single table.
            row = len(cache.made) + int(np.ravel_multi_index(at, parts.shape))
            more[row] = Counter(columns.more(run, shard, False))
    # Compressed sparse rows: `more` was filled by rising row, so its values are in order already.
    n_more = np.zeros(len(sums), np.int64)
    n_more[list(more)] = list(map(len, more.values()))
    # A cache's columns are a count of rows, then a count of shards for each width, ascending.
    row_bytes, begins = np.zeros(len(columns)), []
    for (_, precision), (begin, widths) in columns.caches.ops.items():
        begins.append(columns.first_count + begin)
        first = begins[-1] + 1
        row_bytes[first : first + len(widths)] = (
            np.array(widths) * PRECISION_BYTES[precision] + CACHED_ROW_BYTES
        )
    # Empty where no limit may bind: the compiled search then skips the check.
    most = [most_features(run.batch(problem)) for run in columns.runs if columns.limited]
    return {
        "sums": sums,
        "more_at": np.concatenate([[0], np.cumsum(n_more)]),
        "more_column": np.array([column for counts in more.values() for column in counts], np.int64),
        "more": np.array([n for counts in more.values() for n in counts.values()], float),
        "most_features": np.array(most, float),
        "cache_row_bytes": row_bytes,
        "cache_at": np.array([*begins, len(columns)] if begins else [], np.int64),
    }


def _ranks(problem: Problem) -> dict[str, int]:
    """The place of each table in the order in which TorchRec runs them."""
    order = table_order(problem)  # sort keys
    return {name: i for i, name in enumerate(sorted(order, key=order.__getitem__))}


def batch_memory(
    cache: ShardCostCache, groups: Sequence[tuple[Layout, Group]], columns: Columns
) -> dict[str, Any]:
    """The fields about the local batch, and about runs."""
    problem, runs = columns.problem, columns.runs
    topology, job, local, rank = problem.topology, problem.job, problem.local_batch, _ranks(problem)
    layouts = tuple(dict.fromkeys(layout for layout, _ in groups))
    n_devices = {layout: len(group) for layout, group in reversed(groups)}  # of the first group
    # The last device of a group has the rows that are left, which are the fewest.
    is_last = np.zeros((len(layouts), len(topology)), np.int64)
    for layout, group in groups:
        is_last[layouts.index(layout), group[-1]] = 1
    # Tables of a bundle that run apart from its first are among those of `fixed_memory`.
    strips = [[shard for run, shard in parts if run is parts[0][0]] for parts in cache.parts]
    # A local batch has the outputs and ids of a table's row ranges once: they count for the first.
    outputs = [sum(_outputs(s, local) for s in bundle if s.row_lo == 0) for bundle in strips]
    bucketized, scratch = np.zeros((2, len(layouts), len(cache)))
    for y, layout in enumerate(layouts):
        for s in ticking(range(len(cache))):
            table = cache.table(s)
            scratch[y, s] = scratch_bytes(layout, Shard.whole(table), problem)
            # Only divided rows need ids in buckets, one for each row range.
            if layout.divides_rows:
                bucketized[y, s] = local * bucketized_bytes(table, job, n_devices[layout])
    # Outputs of these runs are joined to one tensor, so the frame looks at them together.
    collections = sorted({(run.collection, run.sequence) for run in runs})
    return {
        # By unit: outputs of a local batch do not depend on how a strip is cut.
        "local_outputs": np.array(outputs, float) / cache.size,
        "local_ids": cache.local_ids,
        "bucketized": bucketized,
        "scratch": scratch,
        "rank": np.array([min(rank[shard.table.name] for shard in bundle) for bundle in strips], np.int64),
        "moments": _moments(problem),
        "always": float(expanded_bytes(problem) + job.dense_bytes),
        "looks_up_ahead": PIPELINES[job.pipeline].looks_up_ahead,
        "is_last": is_last,
        "run_collection": np.array([collections.index((run.collection, run.sequence)) for run in runs]),
        "run_sequence": np.array([run.sequence for run in runs], dtype=bool),
        "host_free": float(topology.memory[0].bytes) if topology.memory else np.inf,
        "run_replicas": np.array([run.local_batch for run in runs], dtype=bool),
    }


def _moments(problem: Problem) -> np.ndarray:
    """[2, 7, 3] the field of this name (compiled/arrays.py)."""
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


def fixed_memory(
    cache: ShardCostCache, groups: Sequence[tuple[Layout, Group]], columns: Columns
) -> dict[str, Any]:
    """The fields about tables that are on all devices in every plan: their memory and cost."""
    problem, all_runs, n_kinds = columns.problem, columns.runs, len(cache.kinds)
    rank, n_devices, n_runs = _ranks(problem), len(problem.topology), len(all_runs)
    memory = np.zeros((n_devices, len(columns)))
    carried = np.zeros((n_devices, n_kinds + n_runs), np.int64)
    # By group: encodings and bytes of fixed tables that run in its op.
    codes, size = np.zeros((len(groups), cache.codes.shape[1])), np.zeros(len(groups))
    # [N, 4] as State.run_shards, run_partial, run_outputs and run_rank.
    runs = np.zeros((n_runs, 4))
    # Above every rank, until a table of the run is found.
    runs[:, 3] = len(problem.tables)
    # cache.runs_of_plan begins with the kinds, so the first K columns are theirs.
    fixed, (outputs, ids) = fixed_placements(problem), cache.fixed_bytes
    batches = run_batches(fixed, problem)
    carried[:, :n_kinds] = outputs[:, :n_kinds]
    for run, batch in batches.items():
        placements = [p for p in fixed if run_of(p.kind, p.shard.table) is run]
        r, k = all_runs.index(run), cache.runs_of_plan.index(run)
        # None of them is cut by columns: each is whole, or has its rows divided.
        runs[r] = len(placements), 0, batch.outputs, min(rank[p.shard.table.name] for p in placements)
        for device, shard in (pair for p in placements for pair in shards_on(p)):
            sums = sums_of(run, shard, problem)
            memory[device, :SUMS] += sums.resident, sums.arrived, sums.on_host
            # No row of `sums` has these tables, so bytes that enter and lookups are added here.
            for column, n in columns.more(run, shard, True).items():
                memory[device, column] += n
        carried[:, n_kinds + r] = ids[:, k]
        if k >= n_kinds:
            # They run in the op of a group. It costs the same on all devices: take the first.
            devices = placements[0].devices
            g = groups.index((run, devices))
            codes[g], size[g] = cache.fixed_codes[devices[0], k], outputs[devices[0], k]
    for parts in cache.parts:
        # A bundle is one strip, and in every plan. Its tables may run apart from its first.
        for run, shard in parts:
            if run is not parts[0][0]:
                r = all_runs.index(run)
                runs[r, 0] += 1
                runs[r, 2] += _outputs(shard, problem.local_batch)
                runs[r, 3] = min(runs[r, 3], rank[shard.table.name])
    return {
        "fixed_memory": memory,
        "fixed_runs": runs,
        "fixed_carried": carried,
        "fixed_sums": np.ascontiguousarray(cache.fixed_codes[:, :n_kinds]),
        "fixed_codes": codes,
        "fixed_size": size,
        # Ids of a local batch in the order of the plan and in buckets.
        "fixed_ids": float(sum(b.permuted + b.bucketized for b in batches.values())),
        # One table is updated after another, so the largest buffer counts.
        "fixed_scratch": float(max((problem.job.update_bytes, *(b.scratch for b in batches.values())))),
    }
