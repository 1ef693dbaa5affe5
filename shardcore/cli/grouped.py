"""Price and export plans of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardcore.core.types import Problem

if TYPE_CHECKING:
    from shardcore.cli.plans import ExportOptions
    from shardcore.cost.model import CostModel
    from shardcore.step.sharding_groups import GroupedPlan


def price(grouped: GroupedPlan, problem: Problem, model: CostModel) -> dict[str, Any]:
    """The cost of a step in groups, as JSON, without its parts.

    model: model for the problem of a group.
    """
    from shardcore.search.decisions.groups import cost_of

    cost = cost_of(grouped, problem, model)
    return {
        "total_ms": cost.total_ms,
        "groups": dataclasses.asdict(grouped.grouping),
        "step_ms": cost.step_ms,
        "sync_ms": cost.sync_ms,
    }


def cost_words(priced: Mapping[str, Any], grouped: GroupedPlan, problem: Problem) -> str:
    """The parts of a cost in groups, in words. priced: of `price`."""
    from shardcore.step.sharding_groups import words

    return (
        f"{words(grouped.grouping, problem)}: {priced['step_ms']:.3f} ms in a group, and {priced['sync_ms']:.3f} ms "
        f"to synchronise them, once in {grouped.grouping.sync_every} steps"
    )


def extrapolated(grouped: GroupedPlan, problem: Problem, model: CostModel) -> list[str]:
    """Sentences on what is extrapolated in a step of one group, and in synchronising the replicas.

    model: model for the problem of a group.
    """
    from shardcore.search.decisions.groups import synchronisation
    from shardcore.step.lower import lower

    sentences = []
    # These come first, as only a few are shown: all weights travel at once, which is much more than steps
    # exchange.
    if grouped.grouping.size < len(problem.topology):
        for works in synchronisation(grouped, problem):
            sentences += [f"synchronising: {text}" for work in works for text in model.out_of_range(work)]
    return list(dict.fromkeys((*sentences, *model.out_of_range(lower(grouped.plan, grouped.problem)))))


def export(args: ExportOptions, problem: Problem) -> None:
    """Write a grouped plan as DMPCollection's arguments."""
    from shardcore.io.files import read_grouped
    from shardcore.torchrec.dmp_collection import to_dmp_collection, write_dmp_collection

    grouped = read_grouped(args.plan, problem)
    write_dmp_collection(
        args.out,
        to_dmp_collection(grouped, problem, str(args.module), args.compute_device),
        grouped.grouping.sync_every,
    )
