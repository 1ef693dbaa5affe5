"""Plans for problems that do not fit in device memory: load factors of tables, then places.

Less of the memory is shared out at first than there is, which leaves searches room to even out devices. What
is then left on each device goes to its own tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardcore import progress
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible
from shardcore.layouts import WHOLE_ROWS
from shardcore.memory import held_bytes, require_fits, resident_bytes, used_bytes
from shardcore.memory_tiers import (
    choices_of,
    decide,
    in_device_memory,
    tier_bytes,
    water_filled,
    with_load_factors,
)
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.search.shards import priced
from shardcore.search.tried import Tried, searched
from shardcore.types import Plan, Problem, Shard

SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Of the memory for rows, what is shared out before the search."""


@dataclass(frozen=True, kw_only=True)
class Share(Tried):
    """A share of the memory, and what it gives: a problem with load factors.

    share: one of SHARES.
    """

    share: float


def try_shares(problem: Problem, model: CostModel, sharder: Sharder, seed: int = 0,
               budget: Budget | None = None,
               say: Callable[[Share], None] = lambda tried: None) -> list[Share]:
    """A plan for each of SHARES. Those for which load factors do not change are left out.

    Raises Infeasible and ShardCoreError as `memory_tiers.decide` does.
    """
    found: list[Share] = []
    for_rows = tier_bytes(in_device_memory(problem))
    for share in SHARES:
        try:
            own = decide(problem, (share - 1) * for_rows).problem
        except Infeasible:
            if not found:
                raise
            break
        if any(own == tried.problem for tried in found):
            continue
        with progress.part(f"{share:.0%} of the memory"):
            plan, why = searched(own, model, sharder, seed, budget)
        if plan is not None:
            own, plan = filled(plan, own, model)
        found.append(Share(share=share, problem=own, plan=plan, why=why))
        say(found[-1])
    return found


def filled(plan: Plan, problem: Problem, model: CostModel) -> tuple[Problem, Plan]:
    """The problem and plan once memory that is left on a device has gone to the tables that are only there.

    Load factors of other tables stay. If the step is not predicted faster, nothing changes.
    """
    homes: dict[str, set[int]] = defaultdict(set)
    for placement in plan.placements:
        homes[placement.shard.table.name].update(placement.devices)
    on_device: dict[int, list[str]] = defaultdict(list)
    tables = {table.name: table for table in problem.tables}
    for name, devices in homes.items():
        if len(devices) == 1 and tables[name].in_host_memory:
            on_device[min(devices)].append(name)
    factors: dict[str, float] = {}
    left = [may - used for may, used in zip(held_bytes(problem), used_bytes(plan, problem), strict=True)]
    for device, names in on_device.items():
        taken = sum(sum(resident_bytes(WHOLE_ROWS, Shard.whole(tables[name]), problem)) for name in names)
        tiers = water_filled([choices_of(tables[name], problem) for name in names], taken + left[device])
        factors |= {tier.table.name: tier.table.load_factor for tier in tiers}
    better = with_load_factors(problem, factors)
    now = {table.name: table for table in better.tables}
    moved = tuple(replace(p, shard=replace(p.shard, table=now[p.shard.table.name])) for p in plan.placements)
    try:
        require_fits(Plan(moved), better)
        found = priced(moved, better, model.for_problem(better), **{
            k: v for k, v in plan.provenance.items() if k not in ("setting", "predicted_ms")})
    except Infeasible:
        return problem, plan
    faster = found.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    return (better, found) if faster else (problem, plan)
