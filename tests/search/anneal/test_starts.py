"""Plans from which annealing starts."""

import numpy as np
import pytest
from shapes import column, on_hosts

from shardcore.core.types import Placement, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.search.anneal.sharder import AnnealingSearch
from shardcore.search.state.feasible import feasible_shards

HOT = Table("hot", 100_000, 64, 80.0)
COOL = tuple(Table(f"t{i}", 1000, 16, 4.0 + i) for i in range(6))
PROBLEM = Problem("cut", (HOT, *COOL), on_hosts("aaaaaa", 2**30), 4098)
MODEL = AnalyticModel(Setting("gpu", PROBLEM.global_batch))


def search_for(budget: Budget) -> AnnealingSearch:
    return AnnealingSearch(PROBLEM, MODEL, budget.start(), 0)


def halved_plan() -> list[Placement]:
    """The hot table in two equal parts, all others whole."""
    halves = (Shard(HOT, 0, HOT.rows, low, low + 32) for low in (0, 32))
    placements = [Placement("column", half, (d,)) for d, half in enumerate(halves)]
    return placements + [column(table, i % 6) for i, table in enumerate(COOL)]


def parts(start) -> dict[str, int]:
    held = (start.state.held > 0).sum(1)
    return {start.space.cache.table_of_item(s).name: int(held[s]) for s in range(len(held))}


def test_recut_plans_have_one_part_more_or_fewer_of_a_costly_table():
    """Parts of a table that meet on a device are one, so that others may have fewer, too."""
    starts = search_for(Budget(evals=10_000)).starts
    halves = starts.start_from_plan(halved_plan(), "all")
    by_columns = next(starts.starts_by_columns("all", feasible_shards(PROBLEM)))
    for start, change in ((halves, 1), (by_columns, -1)):
        before, recut = parts(start), starts.recut_starts(start)
        assert before["hot"] + change in {parts(x)["hot"] for x in recut}
        for x in recut:
            more = {name for name, n in parts(x).items() if n > before[name]}
            assert len(more) <= 1 and all(parts(x)[name] == before[name] + 1 for name in more)
            assert (x.state.held.sum(1) == x.space.cache.size).all() and np.isfinite(x.ms)


@pytest.mark.parametrize(
    "space, budget",
    [("halves", Budget(evals=10_000)), ("all", Budget(seconds=1e-9))],
    ids=["halves", "no time"],
)
def test_nothing_is_recut_where_columns_are_only_halved_and_without_time(space, budget):
    starts = search_for(budget).starts
    assert starts.recut_starts(starts.start_from_plan(halved_plan(), space)) == []
