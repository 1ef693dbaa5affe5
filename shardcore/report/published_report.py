"""Published plans as rows of a table."""

from __future__ import annotations

from typing import Any

from shardcore.plans.publisher import Published
from shardcore.report.text import percent_change
from shardcore.search import compare

HEADERS = (
    "problem",
    "tables",
    "devices",
    "published ms",
    "best baseline",
    "against it",
    "against random",
    "balance",
    "extrapolated",
    "decision",
)
"""Headers of a table of published plans."""


def row(published: Published) -> tuple[Any, ...]:
    """A row under HEADERS."""
    total = published.cost.total_ms
    costs = {k: v for k, v in published.baselines.items() if isinstance(v, float)}
    best = min(costs, key=lambda name: costs[name], default=None)
    extrapolated = "yes" if published.cost.extrapolated else "no"
    return (
        published.problem.name,
        len(published.problem.tables),
        len(published.problem.topology),
        f"{total:.2f}",
        f"{costs[best]:.2f} {best}" if best else "none found one",
        percent_change(total, costs[best]) if best else "-",
        percent_change(total, costs["random"]) if "random" in costs else "-",
        f"{100 * compare.balance(published.cost):.0f}%",
        "a profile" if "profile" in published.decision.provenance else extrapolated,
        published.decision.outcome,
    )
