"""The part of a plan's page that one can sort, filter and hover over: its tables, and its devices.

A script of our own reads the data that the page has (plan_explorer.js). The browser runs no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from shardcore.core.types import Placement, Problem
from shardcore.plans.decisions import PlanVersion
from shardcore.plans.diff import diff_plans
from shardcore.plans.what_if import OF_TABLE, WhatIf
from shardcore.report.html import note_html
from shardcore.step.memory import usable_bytes

PARTS = (
    ("forward compute", "forward_compute_ms", "#4477aa"),
    ("backward compute", "backward_compute_ms", "#66ccee"),
    ("waiting", "waiting_ms", "#dddddd"),
    ("forward exchange", "forward_comm_ms", "#ccbb44"),
    ("backward exchange", "backward_comm_ms", "#ee6677"),
    ("ids", "input_ms", "#aa3377"),
)
"""Parts of a step: their words, the field of StepCost, and the color."""
_BUSY = (0, 1, 3, 4)
"""Numbers of the parts that are work of a device: all but waiting and ids."""
MOST_TABLES, MOST_DEVICES = 20_000, 2_000
"""Limit of a page. Larger plans have no such part, as browsers would take too long."""
_COLORS = "".join(f".part-{k} {{ fill: {color}; }} " for k, (_, _, color) in enumerate(PARTS))
STYLE = f"""
.side {{ display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; }} .bars {{ width: 100%; height: 170px; }}
.bars g {{ cursor: pointer; }} .bars .dim {{ opacity: .35; }} .bars g:focus {{ outline: none; }}
.bars g:focus-visible rect:last-child {{ stroke: light-dark(#000, #fff); stroke-width: 3px; }}
{_COLORS} .used {{ fill: #228833; }} .free {{ fill: light-dark(#eee, #333); }} .was {{ fill: light-dark(#222, #eee); }}
:focus-visible {{ outline: 2px solid light-dark(#25c, #8bf); outline-offset: -1px; }} #tables th {{ cursor: pointer; }}
#device {{ min-height: 4.5rem; }} #tables .moved {{ background: light-dark(#fff6dd, #3a3320); }}
#tables tbody tr:hover {{ background: light-dark(#f3f6fa, #222a33); }}
#tables :nth-child(2), #tables td:nth-child(n+8), #tables th:nth-child(n+8) {{ text-align: left; }}
#tables td:not(:nth-child(n+8)) {{ white-space: nowrap; }} #what-if-says {{ min-height: 1.5em; }}
.tools {{ margin: .5rem 0; }} .tools > * {{ margin-right: 1rem; font: inherit; }}
#what-if {{ border: 1px solid light-dark(#ddd, #444); border-radius: 6px; padding: .2rem 1rem; margin: 1rem 0; }}
#what-if select:disabled, #what-if table:has(tbody:empty) {{ display: none; }}
#theme {{ float: right; font-size: .8rem; font-weight: 400; }} .glance {{ font-size: 1.1rem; }}
.legend span {{ margin-right: 1rem; white-space: nowrap; }}
.legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .3em; }}
"""


def script_text() -> str:
    """JavaScript of the interactive part of a plan's page."""
    return files("shardcore.report").joinpath("plan_explorer.js").read_text()


def script_policy() -> str:
    """Content security policy of a page with the explorer's script: browsers load nothing and run only that script."""
    digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def bottleneck_sentence(new_version: PlanVersion) -> str:
    """Sentence on the bottleneck device of a plan, and why it is the bottleneck."""
    cost, d = new_version.cost, _bottleneck_device(new_version)
    others = [ms for i, ms in enumerate(cost.waiting_ms) if i != d]
    compute, exchange = cost.compute_ms[d], max(cost.forward_comm_ms) + cost.backward_comm_ms[d]
    why = f"its compute takes {compute:.3f} ms, with a mean of {sum(cost.compute_ms) / len(cost.compute_ms):.3f}"
    if new_version.what_if and new_version.what_if.heaviest:
        name, saves_ms = new_version.what_if.heaviest
        why += f" ({saves_ms:.3f} for table {name})"
    waits = f"; the others wait {sum(others) / len(others):.3f} ms for it on average" if others else ""
    share = f"; exchanges take {exchange / cost.total_ms:.0%} of the step" if exchange else ""
    return f"Device {d} is the bottleneck, ready last: {why}{waits}{share}."


def _bottleneck_device(version: PlanVersion) -> int:
    """Number of the device that is ready last in a step."""
    ready = [c + b for c, b in zip(version.cost.compute_ms, version.cost.backward_comm_ms, strict=True)]
    return ready.index(max(ready))


def explorer_html(new_version: PlanVersion, problem: Problem, old_version: PlanVersion | None = None) -> str:
    """Interactive part of a plan's page, as HTML; a note for plans too large for browsers.

    old_version: a plan of the same devices to compare with.
    """
    if len(problem.tables) > MOST_TABLES or len(problem.topology) > MOST_DEVICES:
        return note_html(
            f"Devices and tables are not drawn beyond {MOST_TABLES:,} tables or {MOST_DEVICES:,} devices, as browsers "
            "would take too long: shardcore price lists the devices."
        )
    # What is in the page cannot end the element that it is in.
    data = json.dumps(_page_data(new_version, problem, old_version), separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    moved = (
        f'<label><input id="moved" type="checkbox"> only what differs from {escape(old_version.name)}</label>'
        if old_version
        else ""
    )
    against = f" The line on a bar is {escape(old_version.name)}." if old_version else ""
    highest_ms = max(sum(parts) for v in (new_version, old_version) if v for parts in _device_parts_ms(v))
    shares = [u / max(f, 1) for u, f in zip(new_version.memory_bytes, usable_bytes(problem), strict=True)]
    legend = "".join(f'<span><i style="background:{color}"></i>{words}</span>' for words, _, color in PARTS)
    return "\n".join(
        [
            '<h2>Devices <button id="theme" type="button">light or dark</button></h2>',
            '<p class="note">A bar is a device. Hover, or walk with the arrow keys, to see what is on it; click, '
            f"or press Enter, to see only its tables.{against}</p>",
            '<div class="side"><div>',
            f"<b>ms of a step</b>, the highest is {highest_ms:.3f}",
            '<svg id="devices" class="bars" preserveAspectRatio="none"></svg></div><div>',
            f"<b>memory</b>, the fullest has {max(shares):.0%} of what it may",
            '<svg id="memory" class="bars" preserveAspectRatio="none"></svg></div></div>',
            f'<div class="legend note">{legend}</div>',
            '<div id="device"></div>',
            _what_if_html(new_version.what_if) if new_version.what_if else "",
            "<h2>Tables</h2>",
            '<div class="tools"><input id="filter" type="search" placeholder="name of a table" aria-label="filter">'
            f'<select id="kind" aria-label="kind"></select>{moved}'
            '<span id="tables-count" class="note" aria-live="polite"></span></div>',
            '<table id="tables"><thead><tr id="tables-head"></tr></thead>',
            '<tbody id="tables-body"></tbody></table>',
            '<noscript><p class="note">Bars, sorting, filtering and moves need JavaScript.</p></noscript>',
            f'<script type="application/json" id="plan-data">{data}</script>',
            f"<script>{script_text()}</script>",
        ]
    )


def _what_if_html(what_if: WhatIf) -> str:
    if not (what_if.of_table or what_if.stays):
        return '<p class="note">No table of this plan is on one device alone and may move.</p>'
    return "\n".join(
        [
            '<section id="what-if"><h2>What if one table moved?</h2>',
            f'<p class="note">Of all moves, {len(what_if.best) or "none"} that fit are listed, the best first. '
            f"For up to {OF_TABLE} moves of a table choose it below: click its row, or press Enter on it. "
            "Each move is priced as the plan after it.</p>",
            '<div class="tools"><b id="what-if-table"></b><select id="what-if-move" aria-label="move"></select>'
            '<button id="what-if-back" type="button">the best moves</button></div>',
            '<p id="what-if-says" aria-live="polite"></p><table><thead><tr><th></th>'
            "<th>ms, without waiting and ids</th><th>then</th>"
            "<th>memory</th><th>then</th><th>it may have</th></tr></thead>",
            '<tbody id="what-if-rows"></tbody></table></section>',
        ]
    )


def _device_parts_ms(version: PlanVersion) -> Iterable[tuple[float, ...]]:
    """ms of each device's step parts, in the order of PARTS."""
    return zip(*(getattr(version.cost, name) for _, name, _ in PARTS), strict=True)


def _page_data(new_version: PlanVersion, problem: Problem, old_version: PlanVersion | None) -> dict[str, Any]:
    is_, was = (
        new_version.plan.placements_by_table(),
        old_version.plan.placements_by_table() if old_version else {},
    )
    changed = diff_plans(old_version.plan, new_version.plan) if old_version else None
    moved = {m.table for m in changed.moves} | {*changed.added} if changed else set()
    n = len(problem.topology)
    return {
        "parts": [(words, color) for words, _, color in PARTS],
        "devices": _device_records(new_version, problem),
        "bottleneck": _bottleneck_device(new_version),
        "total_ms": new_version.cost.total_ms,
        "what_if": _what_if_data(new_version.what_if, problem)
        if new_version.what_if and (new_version.what_if.of_table or new_version.what_if.stays)
        else None,
        "before": old_version
        and {"version": old_version.name, "devices": _device_records(old_version, problem)},
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "dim": t.dim,
                "lookups": t.pooling,
                "bytes": t.bytes,
                "is": _placement_records(is_[t.name], n),
                "moved": t.name in moved,
                "was": _placement_records(was[t.name], n) if t.name in moved and t.name in was else None,
            }
            for t in problem.tables
        ],
    }


def _what_if_data(what_if: WhatIf, problem: Problem) -> dict[str, Any]:
    numbers = {table.name: i for i, table in enumerate(problem.tables)}
    moves = list(dict.fromkeys((*what_if.best, *(move for of in what_if.of_table.values() for move in of))))
    return {
        "best": list(range(len(what_if.best))),
        "moves": [
            (
                numbers[x.shard.table.name],
                x.shard.col_lo,
                x.shard.col_hi,
                *x.devices,
                round(x.total_ms, 9),
                x.refused,
                [(c.device, round(c.busy_ms, 6), c.used_bytes) for c in x.changed],
                x.last,
            )
            for x in moves
        ],
        "stays": {numbers[name]: why for name, why in what_if.stays.items()},
    }


def _placement_records(placements: Sequence[Placement], n_devices: int) -> list[dict[str, Any]]:
    """JSON records of a table's placements, with `on` their devices; None: all devices."""
    return [
        {
            "kind": p.kind,
            "columns": [p.shard.col_lo, p.shard.col_hi],
            "dim": p.shard.table.dim,
            "on": None if len(p.devices) == n_devices > 1 else list(p.devices),
        }
        for p in sorted(placements, key=lambda p: p.shard.col_lo)
    ]


def _device_records(version: PlanVersion, problem: Problem) -> list[dict[str, Any]]:
    return [
        {
            "host": device.host,
            "ms": [round(ms, 6) for ms in of],
            "busy_ms": round(sum(of[k] for k in _BUSY), 6),
            "used": used,
            "free": free,
        }
        for device, of, used, free in zip(
            problem.topology.devices,
            _device_parts_ms(version),
            version.memory_bytes,
            usable_bytes(problem),
            strict=True,
        )
    ]
