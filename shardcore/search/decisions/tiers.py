"""Memory tiers: load factors of tables, for problems that do not fit in device memory.

Less of the memory is shared out at first than there is, which leaves searches room to even out devices. What
is then left on each device goes to its own tables (see shardcore/search/decisions/memory_tiers.py for the
law).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.decisions.memory_tiers import (
    choices_of,
    decide,
    in_device_memory,
    tier_bytes,
    tiers_of,
    water_filled,
    with_load_factors,
)
from shardcore.search.decisions.tower_plans import as_planned
from shardcore.search.state.shards import priced
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.memory import held_bytes, require_fits, resident_bytes, used_bytes

SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory for rows that are given to tables before the search."""


class Tiers(Decision):
    """Choose the rows of tables that lie in device memory, and those in that of hosts."""

    name: ClassVar[str] = "memory tiers"
    level: ClassVar[int] = 3
    changes: ClassVar[str] = "load factors"

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, Outcome, None]:
        """A problem with load factors for each of SHARES. Equal ones are proposed once.

        Raises Infeasible and ShardCoreError as `memory_tiers.decide` does.
        """
        different: dict[Problem, float] = {}
        for_rows = tier_bytes(in_device_memory(problem))
        for share in SHARES:
            try:
                different.setdefault(decide(problem, (share - 1) * for_rows).problem, share)
            except Infeasible:
                if not different:
                    raise
                break
        for i, (own, share) in enumerate(different.items()):
            yield Proposal(
                words=f"{share:.0%} of the memory for rows shared out first",
                problem=own,
                more=len(different) - 1 - i,
            )

    def adopt(self, proposal: Proposal, found: Found | None, model: CostModel) -> Found | None:
        if found is None:
            return None
        own, plan = filled(found.plan, as_planned(found.plan, found.problem), model)
        return replace(
            found,
            problem=replace(found.problem, tables=own.tables),
            plan=plan,
            ms=plan.provenance["predicted_ms"],
        )

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        problem = outcome.found.problem if outcome.found else outcome.proposal.problem
        return {
            "tables in host memory": sum(table.in_host_memory for table in problem.tables),
            "MB over the link": tiers_of(problem).link_bytes / 1e6,
        }


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
        found = priced(
            moved,
            better,
            model.for_problem(better),
            **{k: v for k, v in plan.provenance.items() if k not in ("setting", "predicted_ms")},
        )
    except Infeasible:
        return problem, plan
    faster = found.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    return (better, found) if faster else (problem, plan)
