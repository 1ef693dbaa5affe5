"""The part of a plan's page that one can sort, filter and hover over: its tables, and its devices.

A script of our own reads the data that the page has (plan_explorer.js). The browser runs no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from shardcore.core.types import Placement, Plan, Problem
from shardcore.plans.decisions import Version
from shardcore.plans.diff import diff
from shardcore.step.memory import held_bytes

PARTS = (
    ("forward compute", "forward_compute_ms", "#4477aa"),
    ("backward compute", "backward_compute_ms", "#66ccee"),
    ("waiting", "waiting_ms", "#dddddd"),
    ("forward exchange", "forward_comm_ms", "#ccbb44"),
    ("backward exchange", "backward_comm_ms", "#ee6677"),
    ("ids", "input_ms", "#aa3377"),
)
"""Parts of a step: their words, the field of StepCost, and the color."""
MOST_TABLES, MOST_DEVICES = 20_000, 2_000
"""Limit of a page. Larger plans have no such part, as browsers would take too long."""
STYLE = """
#devices { width: 100%; height: 170px; } #devices g { cursor: pointer; } #devices .dim { opacity: .35; }
#devices g:focus, #tables th:focus { outline: 1px solid #4477aa; } #tables th { cursor: pointer; }
#device { min-height: 4.5rem; color: #444; } #tables .moved { background: #fff6dd; }
#tables :nth-child(2), #tables td:nth-child(n+8), #tables th:nth-child(n+8) { text-align: left; }
#tables td:not(:nth-child(n+8)) { white-space: nowrap; }
.tools { margin: .5rem 0; } .tools > * { margin-right: 1rem; font: inherit; }
.legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
"""


def script() -> str:
    """The script."""
    return files("shardcore.report").joinpath("plan_explorer.js").read_text()


def policy() -> str:
    """The content security policy of a page with the script: the browser loads nothing, and runs only it."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def explorer(now: Version, problem: Problem, before: Version | None = None) -> str:
    """The part as HTML. before: a plan to compare with, of the same devices. Empty for very large plans."""
    if len(problem.tables) > MOST_TABLES or len(problem.topology) > MOST_DEVICES:
        return ""
    # What is in the page cannot end the element that it is in.
    data = json.dumps(_data(now, problem, before), separators=(",", ":")).replace("<", "\\u003c")
    moved = (
        f'<label><input id="moved" type="checkbox"> only what differs from {escape(before.name)}</label>'
        if before
        else ""
    )
    against = f" The line on a bar is {escape(before.name)}." if before else ""
    return "\n".join(
        [
            "<h2>Devices</h2>",
            '<p class="note">A bar is a device, and its height the ms of a step: the highest '
            f"is {_highest_ms(now, before):.3f} ms. Hover to see what is on a device, click to see only its "
            f"tables.{against}</p>",
            _legend(),
            '<svg id="devices" preserveAspectRatio="none"></svg>',
            '<div id="device"></div>',
            "<h2>Tables</h2>",
            '<div class="tools"><input id="filter" type="search" placeholder="name of a table">'
            f'<select id="kind"></select>{moved}<span id="tables-count" class="note"></span></div>',
            '<table id="tables"><thead><tr id="tables-head"></tr></thead>',
            '<tbody id="tables-body"></tbody></table>',
            '<noscript><p class="note">Sorting and filtering need JavaScript.</p></noscript>',
            f'<script type="application/json" id="plan-data">{data}</script>',
            f"<script>{script()}</script>",
        ]
    )


def _legend() -> str:
    shown = "".join(f'<span><i style="background:{color}"></i>{words}</span>' for words, _, color in PARTS)
    return f'<div class="legend note">{shown}</div>'


def _highest_ms(*versions: Version | None) -> float:
    return max(sum(parts) for v in versions if v for parts in _parts_ms(v))


def _parts_ms(version: Version) -> Iterable[tuple[float, ...]]:
    """ms of each device, in the order of PARTS."""
    return zip(*(getattr(version.cost, name) for _, name, _ in PARTS), strict=True)


def _data(now: Version, problem: Problem, before: Version | None) -> dict[str, Any]:
    is_, was = _by_table(now.plan), _by_table(before.plan) if before else {}
    changed = diff(before.plan, now.plan) if before else None
    moved = {m.table for m in changed.moves} | {*changed.added} if changed else set()
    n = len(problem.topology)
    return {
        "parts": [(words, color) for words, _, color in PARTS],
        "devices": _devices(now, problem),
        "before": before and {"version": before.name, "devices": _devices(before, problem)},
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "dim": t.dim,
                "lookups": t.pooling,
                "bytes": t.bytes,
                "is": _places(is_[t.name], n),
                "moved": t.name in moved,
                "was": _places(was[t.name], n) if t.name in moved and t.name in was else None,
            }
            for t in problem.tables
        ],
    }


def _by_table(plan: Plan) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for placement in plan.placements:
        found[placement.shard.table.name].append(placement)
    return found


def _places(placements: Sequence[Placement], n: int) -> list[dict[str, Any]]:
    """on: the devices. None: all."""
    return [
        {
            "kind": p.kind,
            "columns": [p.shard.col_lo, p.shard.col_hi],
            "dim": p.shard.table.dim,
            "on": None if len(p.devices) == n > 1 else list(p.devices),
        }
        for p in sorted(placements, key=lambda p: p.shard.col_lo)
    ]


def _devices(version: Version, problem: Problem) -> list[dict[str, Any]]:
    return [
        {"host": device.host, "ms": [round(ms, 6) for ms in of], "used": used, "free": free}
        for device, of, used, free in zip(
            problem.topology.devices,
            _parts_ms(version),
            version.memory_bytes,
            held_bytes(problem),
            strict=True,
        )
    ]
