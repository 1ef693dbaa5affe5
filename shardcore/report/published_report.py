"""Published plans as rows of a table, and the index page of a store of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from shardcore.core.html import Link, html_table
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.plans.publisher import PublishedPlan
from shardcore.plans.words import time_text
from shardcore.report.html import html_page, note_html
from shardcore.report.text import number_text, percent_change
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


def published_plan_row(published: PublishedPlan) -> tuple[Any, ...]:
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


_INDEX_HEADERS = ("problem", "ms of a step", "model", "decided", "outcome")


def store_index_page(decisions: Mapping[str, Decision | None]) -> str:
    """HTML index of a store of plans, with a row for each problem. Links are relative to the store.

    decisions: the last decision on each problem. None: it cannot be read.
    """
    return html_page(
        "Published plans",
        [
            "<h1>Published plans</h1>",
            f'<p><a href="{store.MODELS}">Versions of the cost model</a> · '
            f'<a href="{store.REPORT}">The last publish</a></p>',
            html_table(
                _INDEX_HEADERS, [_problem_row(*of) for of in sorted(decisions.items())], words=(2, 3, 4)
            ),
            note_html("Costs are those that the model of that time predicted."),
        ],
    )


def _problem_row(name: str, decision: Decision | None) -> tuple[Any, ...]:
    if decision is None:
        return name, "cannot be read", "", "", ""
    model, profile = (decision.provenance.get(key) for key in ("model_version", "profile"))
    by = f"{decision.provenance.get('model')}, {profile}" if profile else f"version {model}" if model else "-"
    return (
        Link(name, f"{quote(name)}/versions/{quote(decision.current)}/{store.PAGE}"),
        number_text(decision.total_ms),
        by,
        time_text(decision.decided_at),
        decision.outcome,
    )
