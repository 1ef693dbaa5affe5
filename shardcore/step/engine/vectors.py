"""Options of a search as vectors: what each way to run some columns of a strip adds to an op.

Shapes: S strips, R shards of the cache, O options, V entries of a vector, C counts of caches, F features.
D devices, N runs. Y layouts of what groups share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import PRECISION_BYTES, Shard
from shardcore.step.engine.arrays import CACHED, RESIDENT
from shardcore.step.kinds import Layout, run_of, shards_on
from shardcore.step.memory import CACHED_ROW_BYTES
from shardcore.step.memory_account import sums_of
from shardcore.step.options import Options, encoded
from shardcore.step.ways import IMPOSSIBLE, fixed_placements


def option_fields(
    cache: Options,
    runs: Sequence[Layout],
    layouts: Sequence[Layout],
    parts: np.ndarray,
    shared_codes: np.ndarray,
) -> dict[str, Any]:
    """The fields of SearchProblem about options.

    runs: [N] all runs, those of the cache's kinds first.
    layouts: [Y] of groups.
    parts: [2, Y, S] shards of a strip on each device of a layout's group but the last, and on the last. None where
      the layout does not run the strip.
    shared_codes: [Y, S, F] encodings of the former.
    """
    first_code, n_shards = CACHED + len(cache.caches), len(cache.made)
    vectors = np.zeros((n_shards + parts.size, first_code + cache.codes.shape[1]))
    option_run = np.zeros(len(vectors), np.int64)
    vectors[:n_shards, :CACHED], vectors[:n_shards, first_code:] = cache.sums, cache.codes
    option_run[:n_shards] = cache.kind[cache.strip_of]
    shared = vectors[n_shards:].reshape(*parts.shape, vectors.shape[1])
    shared[..., first_code:] = shared_codes
    option_run[n_shards:] = np.tile(np.repeat([runs.index(y) for y in layouts], len(cache)), 2)
    for at, shard in ticking([(at, shard) for at, shard in np.ndenumerate(parts) if shard is not None]):
        # Rows that divide evenly give the last device the same shard, whose sums are known then.
        first = 0, *at[1:]
        if at[0] > 0 and shard is parts[first]:
            shared[at] = shared[first]
        else:
            shared[at][:first_code] = _amounts(cache, layouts[at[1]], shard)
    # Caches, and bundles of several runs, are rare. Number 0 is nothing, whatever strip it names.
    special = [
        s
        for s, of_strip in enumerate(cache.parts)
        if any(run is not of_strip[0][0] or shard.table.shares_cache for run, shard in of_strip)
    ]
    further, further_run, next_option = [], [], np.zeros(len(vectors), np.int64).tolist()
    for i in (np.flatnonzero(np.isin(cache.strip_of[1:], special)) + 1).tolist():
        by_run: dict[Layout, list[Shard]] = {}
        for (run, _), shard in zip(cache.parts[cache.strip_of[i]], cache.made[i], strict=True):
            by_run.setdefault(run, []).append(shard)
        # A shard that no device may have keeps its resident bytes, which no device has.
        resident = vectors[i, RESIDENT]
        (_, vectors[i]), *others = ((run, _vector(cache, run, shards)) for run, shards in by_run.items())
        vectors[i, RESIDENT] = max(vectors[i, RESIDENT], resident if resident >= IMPOSSIBLE else 0.0)
        # Tables of a bundle that run apart are a chain of options.
        for run, vector in others:
            next_option.append(next_option[i])
            next_option[i] = len(vectors) + len(further)
            further.append(vector)
            further_run.append(runs.index(run))
    return {
        "vectors": np.concatenate([vectors, np.reshape(further, (-1, vectors.shape[1]))]),
        "options": np.array([[*option_run.tolist(), *further_run], next_option], np.int64).T.copy(),
        "first_shared": n_shards,
        "first_code": first_code,
        "fixed_ops": _fixed_ops(cache, runs),
        **_cache_fields(cache, runs, vectors.shape[1]),
    }


def _amounts(cache: Options, run: Layout, shard: Shard) -> np.ndarray:
    """[6 + C] entries of a vector before the encoding."""
    amounts = np.zeros(CACHED + len(cache.caches))
    amounts[:CACHED] = sums_of(run, shard, cache.problem)
    for i, n in cache.caches.counts(run, shard).items():
        amounts[CACHED + i] = n
    return amounts


def _vector(cache: Options, run: Layout, shards: Sequence[Shard]) -> np.ndarray:
    """[V] what shards on one device add to an op."""
    n = np.sum([_amounts(cache, run, shard) for shard in shards], 0)
    return np.concatenate([n, encoded(shards, cache.model).sum(0)])


def _fixed_ops(cache: Options, runs: Sequence[Layout]) -> np.ndarray:
    """[D, N, V] vectors of the ops of tables of fixed kinds, which are on all devices in every plan."""
    problem, held = cache.problem, defaultdict[Layout, dict[Shard, list[int]]](dict)
    for placement in fixed_placements(problem):
        for device, shard in shards_on(placement):
            held[run_of(placement.kind, shard.table)].setdefault(shard, []).append(device)
    n_entries = CACHED + len(cache.caches) + cache.codes.shape[1]
    ops = np.zeros((len(cache.speed), len(runs), n_entries))
    for run, devices_of in held.items():
        # Replicas are the same on all devices, and are encoded once.
        codes = encoded(list(devices_of), cache.model, run.batch(problem))
        for (shard, devices), code in zip(devices_of.items(), codes, strict=True):
            ops[devices, runs.index(run)] += np.append(_amounts(cache, run, shard), code)
    return ops


def _cache_fields(cache: Options, runs: Sequence[Layout], length: int) -> dict[str, np.ndarray]:
    """The fields about caches. length: V."""
    row_bytes, caches = np.zeros(length), []
    # A cache has a count of rows, then a count of shards for each width, ascending.
    for (run, precision), (begin, widths) in cache.caches.ops.items():
        first = CACHED + begin
        if run in runs:
            caches.append((runs.index(run), first, first + len(widths)))
        row_bytes[first + 1 : first + 1 + len(widths)] = (
            np.array(widths) * PRECISION_BYTES[precision] + CACHED_ROW_BYTES
        )
    caches = np.array(caches, np.int64).reshape(-1, 3)
    return {"caches": caches, "cache_row_bytes": row_bytes}
