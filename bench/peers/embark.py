"""EMBark's planner (Liu et al., RecSys 2024): split the hottest table again and again, with greedy passes.

The code followed is NVIDIA HugeCTR's: samples/dlrm/sharding, and the benchmark of its embedding collection.

A table is cut into equal shards by rows, columns or both. A device takes at most one of them.
The cost of a shard is hotness × columns + bw_ratio × columns: what it looks up, and what it exchanges.
Hotness is the lookups of a sample. A cut by rows divides it.

A pass places shards by falling cost, each on the device that costs least.
A round then cuts the table with the costliest shard further: by rows, or in twice the columns.
It takes the way whose next pass is cheaper (rows, if equal).
If a shard found no memory, the round cuts its table instead.
The cheapest pass of 20 rounds stays, or the plan that cuts every table by rows over all devices.
The smallest tables are data-parallel. They take memory everywhere, but the cost ignores them.

Where its users choose parameters by hand, here they are swept.
The cheapest plan stays, under the model that all sharders are compared with. Swept are:

- bw_ratio: its default, and what the cost model says of this hardware and the topology's links.
  The default is 2000 GB/s of memory over 25 of links, over 4 for a lookup's bytes and its update's.
- Whether columns may become narrower than 32.
- The rows below which a table is data-parallel: none, or 0.28 of the batch.
  That is 0.008 GB at dim 128 and batch 55,296, its MLPerf entries on a DGX H100.

Differences to the public code:

- It once confuses rows with columns, if only one of both ways leads to a pass that fits.
  Here the one that fits is taken.
- Costs are at a device's speed and include the shard. On equal devices this is the published rule.
- Its row shards are interleaved, on any number of devices. Here they are ranges on all, as TorchRec trains.
  So rows are cut once, not doubled, and without columns.
- Tables ordered by frequency are cut by columns only.
- Tables that must stay whole, are in bundles or are pinned are never data-parallel.
- `packing` takes over if no round fits.
- Left out: the hierarchical variant, and its compression by concatenated unique rows.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np

from bench.peers.room import Room, free_bytes
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.search.budget import Budget, Meter
from shardcore.search.greedy import looked_up_elements
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.search.state.shards import cheapest_plan, priced_plan
from shardcore.step.kinds import ShardingKind, even_row_ranges, kinds_on_all_devices, sharding_kind_for_table
from shardcore.step.memory import peak_bytes_function, plan_fits
from shardcore.step.ways import (
    ShardBundle,
    allowed_devices_of_shard,
    bundle_shards,
    placements_of_bundles,
    row_division,
    searched_tables,
)
from shardcore.torchrec.baseline import exchange_ms_per_column, lookup_ms_per_element

_MOST_SHARDS = 1 << 20
Grid = tuple[int, int]
"""Number of shards of a table by rows, and by columns."""


@dataclass(frozen=True)
class EmbarkConfig:
    """Parameters of EMBark's search; all but the number of rounds are swept.

    rounds: of splitting.
    replicated_rows: tables with fewer rows than this multiple of the batch are data-parallel.
    bw_ratio: cost of an exchanged column over one looked up. None: the model's.
    narrowest: columns no wider than this are not halved.
    """

    rounds: int = 20
    replicated_rows: tuple[float, ...] = (0.0, 0.28)
    bw_ratio: tuple[float | None, ...] = (2000 / 25 / 4, None)
    narrowest: tuple[int, ...] = (32, 4)

    def __post_init__(self) -> None:
        if min(self.rounds, len(self.replicated_rows), len(self.bw_ratio), len(self.narrowest)) < 1:
            raise ShardCoreError(f"{self} needs 1 or more rounds, and one or more of what is swept")


@dataclass(frozen=True)
class _Pass:
    """Result of one greedy placement of all shards.

    cost: of the busiest device; infinite if a table found no memory.
    chosen, devices: bundles and their devices.
    stuck: the table that found no memory.
    """

    cost: float
    chosen: tuple[ShardBundle, ...] = ()
    devices: tuple[int, ...] = ()
    stuck: Table | None = None


def embark(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: EmbarkConfig = EmbarkConfig(),
) -> Plan:
    """Cheapest plan of EMBark's parameter sweep. Deterministic: the seed is only recorded.

    One evaluation is one greedy pass. Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    problem.require_setting(model.setting)
    feasible_shards(problem)  # for its refusals
    meter = (budget or Budget()).start()
    plans: list[Plan] = []
    for rows, ratio, narrowest in product(config.replicated_rows, config.bw_ratio, config.narrowest):
        replicas = _replicated_tables(problem, rows)
        if (plans and not meter.has_budget_left()) or (rows and not replicas):
            continue
        search = _Search(
            problem,
            _exchange_to_lookup_ratio(problem, model) if ratio is None else ratio,
            narrowest,
            replicas,
            meter,
        )
        best = search.run(config.rounds)
        if best.stuck is None:
            found = [*search.replicas, *placements_of_bundles(best.chosen, best.devices, problem)]
            plans.append(
                priced_plan(
                    found,
                    problem,
                    model,
                    algorithm="embark",
                    seed=seed,
                    packed=False,
                    swept=[rows, search.ratio, narrowest],
                    config=asdict(config),
                )
            )
    if not any(plan_fits(plan, problem) for plan in plans):
        plans = [
            priced_plan(
                find_fitting_plan(problem).placements,
                problem,
                model,
                algorithm="embark",
                seed=seed,
                packed=True,
                config=asdict(config),
            )
        ]
    best_plan = cheapest_plan(plans, problem)
    return replace(best_plan, provenance={**best_plan.provenance, "evals": meter.evals})


def _exchange_to_lookup_ratio(problem: Problem, model: CostModel) -> float:
    """Predicted cost of exchanging a column relative to looking up a column.

    1 if the model has no cost for one of the two. The ratio then does not matter.
    """
    lookup, exchange = lookup_ms_per_element(problem, model), exchange_ms_per_column(problem, model)
    return exchange / lookup if lookup > 0 and exchange > 0 else 1.0


def _replicated_tables(problem: Problem, fraction: float) -> list[Table]:
    """Tables to replicate: unconstrained, with few rows (share × batch). [] if replicas do not fit."""
    if len(problem.topology) == 1:
        return []
    small = [
        t
        for t in searched_tables(problem)
        if t.rows < fraction * problem.global_batch
        and t.name not in problem.uncut_tables
        and t.name not in problem.pinned_devices
    ]
    return small if sum(_replica_bytes(t, problem) for t in small) <= min(free_bytes(problem)) else []


def replicated_kind(problem: Problem) -> ShardingKind:
    """Kind of sharding that keeps a replica of a table on every device."""
    return next(
        sharding_kind
        for sharding_kind in kinds_on_all_devices(problem.topology)
        if not sharding_kind.divides_rows
    )


def _replica_bytes(table: Table, problem: Problem) -> int:
    """Bytes of a replica of a table."""
    return peak_bytes_function(problem)(
        sharding_kind_for_table(replicated_kind(problem).name, table), Shard.whole(table)
    )


class _Search:
    """Greedy search of EMBark with fixed parameters."""

    def __init__(
        self, problem: Problem, ratio: float, narrowest: int, replicas: Sequence[Table], meter: Meter
    ) -> None:
        self.problem, self.ratio, self.narrowest, self.meter = problem, ratio, narrowest, meter
        self.speed = np.array([d.speed for d in problem.topology.devices])
        self.replicas = [
            Placement(replicated_kind(problem).name, Shard.whole(t), problem.topology.ranks) for t in replicas
        ]
        taken = sum(_replica_bytes(t, problem) for t in replicas)
        self.free = [f - taken for f in free_bytes(problem)]
        self.tables = [t for t in searched_tables(problem) if t not in set(replicas)]

    def run(self, rounds: int) -> _Pass:
        """Cheapest greedy pass of `rounds` rounds, within the budget. At least one pass runs."""
        grids: dict[Table, Grid] = dict.fromkeys(self.tables, (1, 1))
        now = best = self._run_pass(grids)
        if (uniform := self._uniform_row_grids()) and self.meter.has_budget_left():
            best = min(best, self._run_pass(uniform), key=lambda p: p.cost)
        for _ in range(rounds - 1):
            # Cut the table that found no memory, or else the hottest one that can be cut.
            ways = (
                self._finer_grids(now.stuck, grids)
                if now.stuck
                else next(
                    filter(
                        None,
                        (
                            self._finer_grids(t, grids)
                            for t in sorted(
                                grids, key=lambda t: -self._shard_cost(_equal_shards(t, grids[t])[0])
                            )
                        ),
                    ),
                    [],
                )
            )
            if not ways or not self.meter.has_budget_left():
                break
            # min keeps the first of equals: rows.
            now, grids = min(((self._run_pass(way), way) for way in ways), key=lambda found: found[0].cost)
            best = min(best, now, key=lambda p: p.cost)
        return best

    def _shard_cost(self, shard: Shard) -> float:
        """Heuristic cost of a shard, in elements looked up."""
        return looked_up_elements(shard) + self.ratio * shard.width

    def _finer_grids(self, table: Table, grids: Mapping[Table, Grid]) -> list[dict[Table, Grid]]:
        """Grids that cut one table further: by rows, or into twice as many column shards."""
        rows, columns = grids[table]
        # Rows are divided once, over all devices: such a table cannot be cut further.
        if rows > 1 or table.name in self.problem.uncut_tables:
            return []
        width, most = table.dim // columns, len(self.problem.allowed_devices(table.name))
        ways = [self._row_grid(table)]
        if 2 * columns <= most and width > self.narrowest and width % (2 * MIN_WIDTH) == 0:
            ways.append((1, 2 * columns))
        return [{**grids, table: way} for way in ways if way]

    def _row_grid(self, table: Table) -> Grid | None:
        """Grid that cuts a table by rows over all devices. None if TorchRec cannot train it."""
        whole = None if table.ordered else row_division(table, self.problem)
        return (len(whole.devices), 1) if whole else None

    def _uniform_row_grids(self) -> dict[Table, Grid] | None:
        """Grids that cut every table by rows over all allowed devices.

        None if one table cannot be, or if the shards would take gigabytes.
        """
        # One shard for each table and device.
        if len(self.tables) * len(self.speed) > _MOST_SHARDS:
            return None
        grids = {t: self._row_grid(t) for t in self.tables}
        return grids if all(grids.values()) else None

    def _run_pass(self, grids: Mapping[Table, Grid]) -> _Pass:
        """Run a greedy pass that places the shards of all tables."""
        self.meter.evals += 1
        found = bundle_shards(
            (shard for t, grid in grids.items() for shard in _equal_shards(t, grid)), self.problem
        )
        costs = np.array([sum(map(self._shard_cost, bundle)) for bundle in found])
        room = Room(self.problem, self.free)
        holds = {t: np.zeros(len(self.speed), dtype=bool) for t in grids}
        looked, columns = np.zeros(len(self.speed)), np.zeros(len(self.speed))
        chosen, devices = [], []
        # Least freedom first, then the highest cost.
        for i in np.lexsort(
            (-costs, [len(allowed_devices_of_shard(bundle[0], self.problem)) for bundle in found])
        ):
            bundle, table = found[i], found[i][0].table
            # A device takes at most one shard of a table.
            ok = room.fitting_devices(bundle) & ~holds[table]
            if not ok.any():
                return _Pass(np.inf, stuck=table)
            more_looked, more_columns = (
                sum(map(looked_up_elements, bundle)),
                self.ratio * sum(s.width for s in bundle),
            )
            after = (looked + more_looked) / self.speed + columns + more_columns
            d = int(np.argmin(np.where(ok, after, np.inf)))
            room.place_bundle(bundle, d)
            holds[table][d] = True
            looked[d] += more_looked
            columns[d] += more_columns
            chosen.append(bundle)
            devices.append(d)
        return _Pass(float((looked / self.speed + columns).max()), tuple(chosen), tuple(devices))


def _equal_shards(table: Table, grid: Grid) -> list[Shard]:
    """Shards of a table by a grid, equal in rows and columns up to rounding."""
    n_ranges, columns = grid
    width = table.dim // columns
    return [
        Shard(table, *rows, c * width, (c + 1) * width)
        for rows in even_row_ranges(table.rows, n_ranges)
        for c in range(columns)
    ]
