"""EMBark's planner (Liu et al., RecSys 2024; in NVIDIA HugeCTR: samples/dlrm/sharding and, with columns, the benchmark of its
embedding collection): split the hottest table again and again, with a greedy pass after each split.

A table is cut into equal parts, in rows, columns or both, of which a device takes one at most. A part's cost is what it looks
up and what it exchanges: hotness × columns + bw_ratio × columns, hotness being the lookups of a sample, which a cut by rows
divides. A pass places parts by falling cost, each on the device that costs least. A round then cuts the table with the
costliest part further, by rows or in twice the columns, whichever the next pass ends cheaper (rows, if even); where a part found
no room, its table instead. The cheapest pass of 20 rounds stays, or the plan that cuts every table by rows over all devices.
The smallest tables are data-parallel and take memory everywhere; the cost does not know of them.

Against the public code: what its users set by hand is swept, and the cheapest plan under the model that all sharders are
compared with stays. bw_ratio: its default (2000 GB/s of memory over 25 of links, over 4 for the bytes of a lookup and its
update), and what the cost model says of this hardware and the topology's links. Whether columns may become narrower than 32.
The rows below which a table is data-parallel: none, or 0.28 of the batch (0.008 GB at dim 128 and batch 55,296: its MLPerf
entries on a DGX H100).
The public code once confuses rows with columns, where only one of both ways leads to a pass that fits; the one that fits is
taken. Costs are at a device's speed, with the part's own, which on equal devices is the published rule. Its parts of rows are
interleaved, on any number of devices; here they are ranges on all, which TorchRec trains: so rows are cut once, not doubled, and
without columns, and tables ordered by frequency by columns alone. Tables that must stay whole, are kept together or pinned are
never data-parallel. `packing` takes over where no round fits. Left out: the
hierarchical variant, and the concatenated unique rows that are its compression.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.layouts import Layout, even_rows, ways
from shardcore.memory import bytes_as, free_bytes
from shardcore.search.budget import Budget, Meter
from shardcore.search.feasible import feasible_pieces, pack_or_raise
from shardcore.search.free_memory import FreeMemory, freedom
from shardcore.search.greedy import looked_up
from shardcore.search.pieces import Item, division, items, placed, priced, to_plan
from shardcore.search.rates import exchange_ms, lookup_ms
from shardcore.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table

_MOST_PARTS = 1 << 20
Grid = tuple[int, int]
"""Parts of a table by rows, and by columns."""


@dataclass(frozen=True)
class EmbarkConfig:
    """rounds: of splitting. Swept: replicated_rows: tables of fewer rows, relative to the batch, are data-parallel; bw_ratio:
    cost of a column exchanged over one looked up (None: as the model has it); narrowest: columns no wider are not halved."""

    rounds: int = 20
    replicated_rows: tuple[float, ...] = (0.0, 0.28)
    bw_ratio: tuple[float | None, ...] = (2000 / 25 / 4, None)
    narrowest: tuple[int, ...] = (32, 4)

    def __post_init__(self) -> None:
        if min(self.rounds, len(self.replicated_rows), len(self.bw_ratio), len(self.narrowest)) < 1:
            raise ShardCoreError(f"{self} needs 1 or more rounds, and one or more of what is swept")


@dataclass(frozen=True)
class _Pass:
    """A greedy pass: its cost, and the items with their devices; or, at infinite cost, the table that found no room."""

    cost: float
    chosen: tuple[Item, ...] = ()
    devices: tuple[int, ...] = ()
    stuck: Table | None = None


def embark(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None,
           config: EmbarkConfig = EmbarkConfig()) -> Plan:  # noqa: B008 (frozen)
    """The cheapest plan of the sweep. Deterministic: the seed is only recorded. One evaluation is one greedy pass.

    Raises Infeasible (see `feasible_pieces`) and SettingMismatch.
    """
    problem.require_setting(model.setting)
    feasible_pieces(problem)  # for its refusals
    meter = (budget or Budget()).start()
    plans: list[Plan] = []
    for rows, ratio, narrowest in product(config.replicated_rows, config.bw_ratio, config.narrowest):
        replicas = _replicas(problem, rows)
        if (plans and not meter.left()) or (rows and not replicas):
            continue
        search = _Search(problem, _bw_ratio(problem, model) if ratio is None else ratio, narrowest, replicas, meter)
        best = search.run(config.rounds)
        if best.stuck is None:
            found = [*search.replicas, *placed(best.chosen, best.devices, problem)]
            plans.append(priced(found, problem, model, algorithm="embark", seed=seed, packed=False,
                                swept=[rows, search.ratio, narrowest], config=asdict(config)))
    if not plans:
        packing = pack_or_raise(problem)
        plans = [to_plan(packing.pieces, packing.devices, problem, model, algorithm="embark", seed=seed, packed=True,
                         config=asdict(config))]
    best_plan = min(plans, key=lambda p: p.provenance["predicted_ms"])
    return replace(best_plan, provenance={**best_plan.provenance, "evals": meter.evals})


def _bw_ratio(problem: Problem, model: CostModel) -> float:
    """1 where the model says nothing of lookups or of the exchange: with one of both alone, the ratio is of no account."""
    lookup, exchange = lookup_ms(problem, model), exchange_ms(problem, model)
    return exchange / lookup if lookup > 0 and exchange > 0 else 1.0


def _replicas(problem: Problem, share: float) -> list[Table]:
    """The tables with fewer rows than share × batch that are free to be everywhere; none where they alone do not fit."""
    if len(problem.topology) == 1:
        return []
    small = [t for t in problem.tables if t.rows < share * problem.global_batch
             and t.name not in problem.whole and t.name not in problem.pinned]
    return small if sum(_replica_bytes(t, problem) for t in small) <= min(free_bytes(problem)) else []


def replicating(problem: Problem) -> Layout:
    """The kind that keeps a replica on every device."""
    return next(layout for layout in ways(problem.topology) if not layout.divides_rows)


def _replica_bytes(table: Table, problem: Problem) -> int:
    return bytes_as(replicating(problem), Shard.whole(table), problem)


class _Search:
    def __init__(self, problem: Problem, ratio: float, narrowest: int, replicas: Sequence[Table], meter: Meter) -> None:
        self.problem, self.ratio, self.narrowest, self.meter = problem, ratio, narrowest, meter
        self.speed = np.array([d.speed for d in problem.topology.devices])
        self.replicas = [Placement(replicating(problem).name, Shard.whole(t), problem.topology.ranks) for t in replicas]
        taken = sum(_replica_bytes(t, problem) for t in replicas)
        self.free = [f - taken for f in free_bytes(problem)]
        self.tables = [t for t in problem.tables if t not in set(replicas)]

    def run(self, rounds: int) -> _Pass:
        """The cheapest pass of so many rounds, as far as the budget goes: always a first one."""
        grids: dict[Table, Grid] = dict.fromkeys(self.tables, (1, 1))
        now = best = self._pass(grids)
        if (uniform := self._uniform()) and self.meter.left():
            best = min(best, self._pass(uniform), key=lambda p: p.cost)
        for _ in range(rounds - 1):
            ways = self._doubled(now.stuck, grids) if now.stuck else next(filter(None, (
                self._doubled(t, grids) for t in self._by_heat(grids))), [])
            if not ways or not self.meter.left():
                break
            now, grids = min(((self._pass(way), way) for way in ways), key=lambda found: found[0].cost)
            best = min(best, now, key=lambda p: p.cost)
        return best

    def _cost(self, shard: Shard) -> float:
        return looked_up(shard) + self.ratio * shard.width

    def _by_heat(self, grids: Mapping[Table, Grid]) -> list[Table]:
        return sorted(grids, key=lambda t: -self._cost(_parts(t, grids[t])[0]))

    def _doubled(self, table: Table, grids: Mapping[Table, Grid]) -> list[dict[Table, Grid]]:
        """The ways to cut a table further: by rows, or in twice the columns."""
        rows, columns = grids[table]
        if rows > 1 or table.name in self.problem.whole:
            return []
        width, most = table.dim // columns, len(self.problem.allowed_devices(table.name))
        ways = [self._by_rows(table)]
        if 2 * columns <= most and width > self.narrowest and width % (2 * MIN_WIDTH) == 0:
            ways.append((1, 2 * columns))
        return [{**grids, table: way} for way in ways if way]

    def _by_rows(self, table: Table) -> Grid | None:
        whole = None if table.ordered else division(table, self.problem)
        return (len(whole.devices), 1) if whole else None

    def _uniform(self) -> dict[Table, Grid] | None:
        """Every table by rows over all devices that may hold it; None where one cannot be, or the parts would take gigabytes."""
        if len(self.tables) * len(self.speed) > _MOST_PARTS:
            return None
        grids = {t: self._by_rows(t) for t in self.tables}
        return grids if all(grids.values()) else None

    def _pass(self, grids: Mapping[Table, Grid]) -> _Pass:
        self.meter.evals += 1
        parts = items((part for t, grid in grids.items() for part in _parts(t, grid)), self.problem)
        costs = np.array([sum(map(self._cost, item)) for item in parts])
        room, holds = FreeMemory(self.problem, self.free), {t: np.zeros(len(self.speed), dtype=bool) for t in grids}
        looked, columns = np.zeros(len(self.speed)), np.zeros(len(self.speed))
        chosen, devices = [], []
        for i in np.lexsort((-costs, [freedom(item, self.problem) for item in parts])):
            item, table = parts[i], parts[i][0].table
            ok = room.fits(item[0]) & ~holds[table]
            if not ok.any():
                return _Pass(np.inf, stuck=table)
            item_looked, item_columns = sum(map(looked_up, item)), self.ratio * sum(s.width for s in item)
            after = (looked + item_looked) / self.speed + columns + item_columns
            d = int(np.argmin(np.where(ok, after, np.inf)))
            for shard in item:
                room.put(shard, d)
            holds[table][d] = True
            looked[d] += item_looked
            columns[d] += item_columns
            chosen.append(item)
            devices.append(d)
        return _Pass(float((looked / self.speed + columns).max()), tuple(chosen), tuple(devices))


def _parts(table: Table, grid: Grid) -> list[Shard]:
    """Equal parts, by rows as far as the rows divide."""
    n_ranges, columns = grid
    width = table.dim // columns
    return [Shard(table, *rows, c * width, (c + 1) * width) for rows in even_rows(table.rows, n_ranges) for c in range(columns)]
