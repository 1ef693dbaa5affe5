"""How a peer's result becomes a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardcore.cost.model import CostModel, price
from shardcore.search.pieces import Item, consolidate
from shardcore.types import Placement, Plan, Problem
from shardcore.workload import lower


def placed(items: Sequence[Item], devices: Sequence[int]) -> list[Placement]:
    """items[i] on devices[i]."""
    return [Placement(shard, (int(d),)) for item, d in zip(items, devices, strict=True) for shard in item]


def priced(placements: Iterable[Placement], problem: Problem, model: CostModel, **provenance: Any) -> Plan:
    """The consolidated plan with its provenance and predicted cost: `pieces.to_plan` for what may have replicas."""
    plan = Plan(consolidate(placements))
    predicted_ms = price(lower(plan, problem), model).total_ms
    return replace(plan, provenance={**provenance, "setting": str(model.setting), "predicted_ms": predicted_ms})
