"""The page of a store of plans: links to the current plan of each problem, and to the pages beside them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from urllib.parse import quote

from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.plans.words import when

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .8rem .15rem 0;
vertical-align: top; border-bottom: 1px solid #e5e5e5; } .note { color: #666; }
"""


def page(decisions: Mapping[str, Decision | None]) -> str:
    """The page as one HTML file. Its links are relative to the store.

    decisions: the last decision on each problem. None: it cannot be read.
    """
    rows = "".join(_row(name, decision) for name, decision in sorted(decisions.items()))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
            f"'unsafe-inline'\"><title>Published plans</title><style>{_STYLE}</style></head><body>",
            "<h1>Published plans</h1>",
            f'<p><a href="{store.MODELS}">Versions of the cost model</a> · '
            f'<a href="{store.REPORT}">The last publish</a></p>',
            "<table><thead><tr><th>problem</th><th>ms of a step</th><th>model</th><th>decided</th>"
            f"<th>outcome</th></tr></thead><tbody>{rows}</tbody></table>",
            '<p class="note">Costs are those that the model of that time predicted.</p></body></html>\n',
        ]
    )


def _row(name: str, decision: Decision | None) -> str:
    if decision is None:
        return f"<tr><td>{escape(name)}</td><td colspan=4>cannot be read</td></tr>\n"
    link = f"{quote(name)}/versions/{quote(decision.current)}/{store.PAGE}"
    model = decision.provenance.get("model_version")
    cells = (
        "-" if decision.total_ms is None else f"{decision.total_ms:.2f}",
        f"version {model}" if model else "-",
        when(decision.decided_at),
        decision.outcome,
    )
    return (
        f'<tr><td><a href="{link}">{escape(name)}</a></td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
    )
