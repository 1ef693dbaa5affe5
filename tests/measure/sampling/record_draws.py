"""Record the plans whose groups `measure` draws, so that draws need no sharder
(shardcore/measure/sampling/placements.py).

  python tests/measure/sampling/record_draws.py POOL.json --seeds 0 1 --draws 5300 [--held-out] [--batch 2048 ...]

Of the first draws of each seed, those from a plan are planned by the sharder of today, which sees an analytic
model. A plan is kept where the draws' own placement is another. What was recorded before stays as it is, so
the samples that datasets have stay wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.io import files, writing
from shardcore.measure.sampling import placements
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.search import SHARDERS, Budget
from shardcore.tables.held_out import is_held_out

EVALS = 300
"""Evaluations of a search: the datasets of before were drawn with as many."""


def planned_draws(
    pool: Sequence[Table], seed: int, draws: int, setting: Setting
) -> Iterator[tuple[Problem, str]]:
    """The problems and planners of the first draws, as compute_request asks for them."""
    for index in range(draws):
        rng = np.random.default_rng([1, seed, index])
        if rng.random() < GroupConfig().planned and (
            found := placements.draw_planned_problem(pool, rng, setting)
        ):
            yield found


def columns_of(drawn: Problem, planner: str, setting: Setting) -> placements.Columns | None:
    """The plan of today's sharder; None where it finds none. Raises ShardCoreError where it divides rows."""
    try:
        plan = SHARDERS[planner](drawn, AnalyticModel(setting), seed=0, budget=Budget(evals=EVALS))
    except Infeasible:
        return None
    place_of = {t.name: i for i, t in enumerate(drawn.tables)}
    found: placements.Columns = [{} for _ in drawn.topology.devices]
    for placement in plan.placements:
        shard, [device] = placement.shard, placement.devices
        if not shard.has_all_rows:
            raise ShardCoreError(
                f"{planner} divides rows of table {shard.table.name!r}; recorded plans have columns only"
            )
        i = place_of[shard.table.name]
        found[device][i] = found[device].get(i, 0) + shard.width
    return found


def record(pool: Sequence[Table], seed: int, draws: int, setting: Setting) -> dict[str, list[str]]:
    """Lines of the plans that are neither recorded nor the draws' own, by their keys."""
    new: dict[str, list[str]] = {}
    for drawn, planner in planned_draws(pool, seed, draws, setting):
        key = placements.recorded_plan_key(drawn, planner)
        if key in placements.recorded_plans():
            continue
        columns = columns_of(drawn, planner, setting)
        if columns and columns != placements.compute_placement(drawn, planner):
            new[key] = [placements.recorded_plan_line(of, drawn) for of in columns]
    return new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pool", help="a pool file; a dataset's folder has that of its samples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--held-out", action="store_true", help="draws of the tables kept for testing only")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--optimizer", default="exact_sgd")
    args = parser.parse_args()
    setting = Setting("any", args.batch, args.precision, args.optimizer)
    live = [t for t in files.read_pool(args.pool) if t.pooling > 0 and (is_held_out(t) or not args.held_out)]
    plans = dict(placements.recorded_plans())
    before = len(plans)
    for seed in args.seeds:
        plans |= record(live, seed, args.draws, setting)
    head = {"schema": placements.SCHEMA, "version": placements.VERSION}
    writing.write_json(placements.RECORDED, {**head, "plans": dict(sorted(plans.items()))})
    print(f"{len(plans) - before} plans recorded, {len(plans)} in all, in {placements.RECORDED}")


if __name__ == "__main__":
    main()
