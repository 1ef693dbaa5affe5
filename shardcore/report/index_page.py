"""The page of a store of plans: links to the current plan of each problem, and to other pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from shardcore.core.html import Link, html_table
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.plans.words import time_text
from shardcore.report.html import html_page, note_html

_HEADERS = ("problem", "ms of a step", "model", "decided", "outcome")


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
            html_table(_HEADERS, [_problem_row(*of) for of in sorted(decisions.items())], words=(2, 3, 4)),
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
        "-" if decision.total_ms is None else f"{decision.total_ms:.2f}",
        by,
        time_text(decision.decided_at),
        decision.outcome,
    )
