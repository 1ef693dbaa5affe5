"""Memory of shards in the cache that searches share."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from shapes import on_hosts

from shardcore.core.constraints import Constraints
from shardcore.core.tiers import Memory
from shardcore.core.types import Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.step.engine.arrays import NEXT, OPTION_RUN, PEAK_BYTES
from shardcore.step.memory import shard_sums
from shardcore.step.options import ShardOptions
from shardcore.step.shard_memory import local_batch_share
from shardcore.step.ways import IMPOSSIBLE

TABLES = (
    Table("pooled", 1001, 32, 7.3),
    Table("half", 777, 48, 2.5, precision="fp16"),
    Table("history", 500, 32, 9.0, sequence=True),
    Table("cached", 5003, 64, 3.0, load_factor=0.3),
    Table("below", 5003, 64, 3.0, load_factor=0.0),
    Table("on SSD", 400_003, 64, 3.0, load_factor=0.1, tier="ssd"),
    Table("a", 90, 8, 1.0),
    Table("b", 91, 16, 2.0, collection="other"),
)

MEMORY = (Memory("host", 1 << 34, 25.0), Memory("ssd", 1 << 40, 2.0))


def test_sums_of_any_number_of_columns_are_exactly_those_of_the_shard():
    problem = Problem(
        "p",
        TABLES,
        on_hosts("aabb", memory=MEMORY),
        64,
        "rowwise_adagrad",
        Constraints(together=(("a", "b"),)),
    )
    cache = ShardOptions(problem, AnalyticModel(Setting("gpu", 64)), map(Shard.whole, TABLES))
    items = np.repeat(np.arange(len(cache)), cache.size)
    blocks = np.concatenate([np.arange(1, n + 1) for n in cache.size])
    cache.make_shards(items, blocks)
    assert len(items) == cache.size.sum() > 40
    for item, number in zip(items, cache.option_numbers(items, blocks), strict=True):
        of_runs, following = defaultdict(list), number
        for (run, _), shard in zip(cache.parts[item], cache.made[number], strict=True):
            of = shard_sums(run, shard, problem)
            of_op = of.always_bytes(run, problem), of.arrived, of.entered, of.lookups, of.features, of.on_host
            of_runs[run].append((of_op, local_batch_share(run, shard, problem)))
        for run, each in of_runs.items():
            sums, batches = (np.sum(of, 0).tolist() for of in zip(*each, strict=True))
            assert cache.vectors[following, : len(sums)].tolist() == sums
            assert cache.options[following, OPTION_RUN] == cache.runs.index(run)
            if following == number:
                assert cache.alone[number, :PEAK_BYTES].tolist() == batches
            following = cache.options[following, NEXT]
        assert following == 0


def test_shards_that_no_device_may_have_are_too_large_for_any():
    wide = replace(TABLES[0], dim=4096)
    problem = Problem("p", (wide, TABLES[1]), on_hosts("aabb"), 64)
    cache = ShardOptions(problem, AnalyticModel(Setting("gpu", 64)), map(Shard.whole, problem.tables))
    [item] = np.flatnonzero(cache.size > 100)
    cache.make_shards(np.array([item, item]), np.array([1, cache.size[item]]))
    assert cache.peak_bytes[1] < IMPOSSIBLE == cache.peak_bytes[2]


def test_tables_that_differ_by_name_share_options_unless_constraints_differ():
    named = [replace(TABLES[0], name=name) for name in ("first", "same", "by rows")]
    wider = replace(TABLES[0], name="wider", dim=64)
    kinds = Constraints(kinds=(("by rows", ("row", "data_parallel")),))
    problem = Problem("p", (*named, wider), on_hosts("aabb"), 64, constraints=kinds)
    cache = ShardOptions(problem, AnalyticModel(Setting("gpu", 64)), map(Shard.whole, problem.tables))
    items = np.arange(4)
    cache.make_shards(items, cache.size)
    of = {
        cache.table_of_item(s).name: (n, *cache.shared_options[:, :, s].ravel())
        for s, n in enumerate(cache.option_numbers(items, cache.size))
    }
    assert of["first"] == of["same"]
    assert not {*of["first"]} & {*of["by rows"]} - {0} and not {*of["first"]} & {*of["wider"]} - {0}
    assert cache.peak_bytes[of["first"][0]] < IMPOSSIBLE == cache.peak_bytes[of["by rows"][0]]
