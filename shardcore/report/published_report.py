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


def published_plan_row(published: Published) -> tuple[Any, ...]:
    """Table row of a published plan under HEADERS. A plan kept against a cheaper one has the gain's margin."""
    decision, total = published.decision, published.cost.total_ms
    # A candidate that is cheaper, but not surely, is not current.
    margin_ms = (decision.margin_ms or 0.0) if (decision.candidate_ms or total) < total else 0.0
    within = f", ±{margin_ms / total:.1%}" if margin_ms else ""
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
        f"{100 * compare.compute_balance(published.cost):.0f}%",
        "a profile" if "profile" in decision.provenance else extrapolated,
        decision.outcome + within,
    )
