"""What annealing's compiled search knows of memory, and of tables of fixed kinds: fields of SearchProblem.

Shapes: S strips, R shards, D devices, F features, G groups, N runs, M columns of State.memory.
K kinds of what single devices hold (cache.kinds). Y layouts of what groups share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import OUTPUT_BYTES, PRECISION_BYTES, Problem, Shard
from shardcore.search.anneal.compiled import SUMS
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.state.shards import fixed_placements
from shardcore.step.kinds import Group, Layout, run_of, shards_on
from shardcore.step.memory import CACHED_ROW_BYTES, Caches
from shardcore.step.memory_account import sums_of
from shardcore.step.memory_timeline import BATCHES, IDS_ALIVE
from shardcore.step.op_limits import most_features
from shardcore.step.output_bytes import table_output_rows
from shardcore.step.shard_memory import batch_bytes, bucketized_bytes, run_batches, scratch_bytes, table_order


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

        entered: also what enters collectives, and lookups. Mostly a shard's sums have them.
        """
        found = {self.first_count + i: n for i, n in self.caches.counts(run, shard, self.problem).items()}
        n, of = len(self.runs), sums_of(run, shard, self.problem)
        each = (of.entered * entered, of.lookups * entered, of.features * self.limited)
        return found | {SUMS + i * n + self.runs.index(run): x for i, x in enumerate(each) if x}


def shards_memory(
    cache: ShardCostCache, columns: Columns, layouts: Sequence[Layout], parts: np.ndarray
) -> dict[str, np.ndarray]:
    """The fields about shards and their ops.

    layouts: [Y] of groups.
    parts: [2, Y, S] what devices of a group have of a strip (see compiled/memory.shared_row). None where the
      layout does not run it.
    """
    problem, of_parts = columns.problem, np.zeros((*parts.shape, 6))
    shared = [
        ((e, y, s), layouts[y], shard)
        for e, of_e in enumerate(parts.tolist())
        for y, of_y in enumerate(of_e)
        for s, shard in enumerate(of_y)
        if shard is not None
    ]
    for at, run, shard in ticking(shared):
        first = 0, *at[1:]
        of_parts[at] = of_parts[first] if at[0] and shard is parts[first] else sums_of(run, shard, problem)
    sums, more = np.concatenate([cache.sums, of_parts.reshape(-1, 6)]), {}
    chosen = {
        s
        for s in range(len(cache))
        if columns.limited
        or len(set(cache.runs(s))) > 1
        or any(shard.table.in_host_memory for shard in cache.whole(s))
    }
    for i in np.flatnonzero(np.isin(cache.strip_of[1:], list(chosen))) + 1:
        runs, found = cache.runs(cache.strip_of[i]), Counter()
        first = runs[0]
        for run, shard in zip(runs, cache.made[i], strict=True):
            found.update(columns.more(run, shard, run is not first))
            if run is not first:
                sums[i, 2:4] -= sums_of(run, shard, problem)[2:4]
        more[i] = found
    for at, run, shard in shared if chosen else ():
        if at[2] in chosen:
            row = len(cache.made) + int(np.ravel_multi_index(at, parts.shape))
            more[row] = columns.more(run, shard, False)
    n_more = np.zeros(len(sums), np.int64)
    n_more[list(more)] = [len(found) for found in more.values()]
    row_bytes, begins = np.zeros(len(columns)), []
    for (_, precision), (at, widths) in columns.caches.ops.items():
        at += columns.first_count
        begins.append(at)
        row_bytes[at + 1 : at + 1 + len(widths)] = (
            np.array(widths) * PRECISION_BYTES[precision] + CACHED_ROW_BYTES
        )
    most = [most_features(run.batch(problem)) for run in columns.runs if columns.limited]
    return {
        "sums": sums,
        "more_at": np.cumsum([0, *n_more]),
        "more_column": np.array([at for found in more.values() for at in found], np.int64),
        "more": np.array([n for found in more.values() for n in found.values()], float),
        "most_features": np.array(most, float),
        "cache_row_bytes": row_bytes,
        "cache_at": np.array([*begins, len(columns)] if begins else [], np.int64),
    }


def _ranks(problem: Problem) -> dict[str, int]:
    """The place of each table in the order in which TorchRec runs them."""
    order = table_order(problem)
    return {name: i for i, name in enumerate(sorted(order, key=order.__getitem__))}


def batch_memory(
    cache: ShardCostCache, groups: Sequence[tuple[Layout, Group]], columns: Columns
) -> dict[str, np.ndarray]:
    """The fields about the local batch, and about runs."""
    problem, runs = columns.problem, columns.runs
    topology, job, local, rank = problem.topology, problem.job, problem.local_batch, _ranks(problem)
    layouts = tuple(dict.fromkeys(layout for layout, _ in groups))
    of = {layout: next(group for y, group in groups if y is layout) for layout in layouts}
    # Tables of a bundle that run apart from its first are among those of `given`.
    strips = [
        [
            shard
            for run, shard in zip(cache.runs(s), cache.whole(s), strict=True)
            if run is cache.kinds[cache.kind[s]]
        ]
        for s in range(len(cache))
    ]
    # What the ranges of a table take of a local batch counts for the first.
    once = [[shard for shard in bundle if shard.row_lo == 0] for bundle in strips]
    collections = sorted({(run.collection, run.sequence) for run in runs})
    is_last = np.zeros((len(layouts), len(topology)), np.int64)
    for layout, group in groups:
        is_last[layouts.index(layout), group[-1]] = 1
    return {
        "local_outputs": np.array([sum(_outputs(shard, local) for shard in bundle) for bundle in once], float)
        / cache.size,
        "local_ids": cache.local_ids,
        "bucketized": np.array(
            [
                [
                    IDS_ALIVE * local * bucketized_bytes(cache.table(s), job, len(of[y])) * y.divides_rows
                    for s in ticking(range(len(cache)))
                ]
                for y in layouts
            ],
            float,
        ).reshape(len(layouts), len(cache)),
        "stepped": np.array(
            [
                [scratch_bytes(y, Shard.whole(cache.table(s)), problem) for s in range(len(cache))]
                for y in layouts
            ],
            float,
        ).reshape(len(layouts), len(cache)),
        "rank": np.array([min(rank[shard.table.name] for shard in bundle) for bundle in strips], np.int64),
        "waiting_ids": BATCHES * batch_bytes(problem),
        "is_last": is_last,
        "run_collection": np.array([collections.index((run.collection, run.sequence)) for run in runs]),
        "run_sequence": np.array([run.sequence for run in runs], dtype=bool),
        "host_free": float(topology.memory[0].bytes) if topology.memory else np.inf,
        "run_replicas": np.array([run.local_batch for run in runs], dtype=bool),
    }


def _outputs(shard: Shard, batch: int) -> int:
    return OUTPUT_BYTES * shard.width * table_output_rows(shard.table, batch)


def given(
    cache: ShardCostCache, groups: Sequence[tuple[Layout, Group]], columns: Columns
) -> dict[str, np.ndarray]:
    """The fields about tables that are on all devices in every plan: their memory, and what they cost."""
    problem, of_all, rank, kinds = columns.problem, columns.runs, _ranks(columns.problem), cache.kinds
    fixed, n_kinds = fixed_placements(problem), len(kinds)
    n_devices, n_runs, n_features = len(problem.topology), len(of_all), cache.codes.shape[1]
    memory = np.zeros((n_devices, len(columns)))
    carried = np.zeros((n_devices, n_kinds + n_runs), np.int64)
    codes, size, runs = np.zeros((len(groups), n_features)), np.zeros(len(groups)), np.zeros((n_runs, 4))
    runs[:, 3] = len(problem.tables)
    batches, (outputs, ids) = run_batches(fixed, problem), cache.fixed_bytes
    carried[:, :n_kinds] = outputs[:, :n_kinds]
    for run, batch in batches.items():
        of = [p for p in fixed if run_of(p.kind, p.shard.table) is run]
        r, k = of_all.index(run), cache.runs_of_plan.index(run)
        runs[r] = len(of), 0, batch.outputs, min(rank[p.shard.table.name] for p in of)
        for d, shard in (pair for p in of for pair in shards_on(p)):
            found = sums_of(run, shard, problem)
            memory[d, :SUMS] += found.resident, found.arrived, found.on_host
            for at, n in columns.more(run, shard, True).items():
                memory[d, at] += n
        carried[:, n_kinds + r] = ids[:, k]
        if k >= n_kinds:
            # They run in the op of a group. It costs what it does on the first device.
            g, first = groups.index((run, of[0].devices)), of[0].devices[0]
            codes[g], size[g] = cache.fixed_codes[first, k], outputs[first, k]
    for s in range(len(cache)):
        # A bundle is one strip, and in every plan. Its tables may run apart from its first.
        for run, shard in zip(cache.runs(s), cache.whole(s), strict=True):
            if run is not kinds[cache.kind[s]]:
                r = of_all.index(run)
                runs[r, 0] += 1
                runs[r, 2] += _outputs(shard, problem.local_batch)
                runs[r, 3] = min(runs[r, 3], rank[shard.table.name])
    return {
        "given_memory": memory,
        "given_runs": runs,
        "given_carried": carried,
        "given_sums": np.ascontiguousarray(cache.fixed_codes[:, :n_kinds]),
        "given_codes": codes,
        "given_size": size,
        "given_every": IDS_ALIVE * sum(b.permuted + b.bucketized for b in batches.values()),
        "given_stepped": float(max((b.stepped for b in batches.values()), default=0)),
    }
