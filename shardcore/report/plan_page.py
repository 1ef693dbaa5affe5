"""The report page of a published plan: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.core.step_cost import StepCost
from shardcore.core.types import Problem
from shardcore.plans.decisions import Decision, Version, version_name
from shardcore.plans.diff import Diff, diff
from shardcore.plans.words import moves_text, when
from shardcore.report import plan_report
from shardcore.report.figures import svg
from shardcore.report.plan_explorer import PARTS, STYLE, explorer, policy
from shardcore.report.text import percent_change
from shardcore.search.explain import Alternative, Explanation
from shardcore.step.memory import gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 12
"""Rows of a table. The page says how many more there are."""
_MOST_TICKS = 16
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; vertical-align: top;
         padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #e5e5e5; }
th:first-child, td:first-child, .words { text-align: left; } th { font-weight: 600; color: #555; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; } .note { color: #666; } .warn { color: #a33; }
"""


def page(
    now: Version,
    problem: Problem,
    explained: Explanation,
    decisions: Sequence[Decision],
    moves: Diff | None,
    before: Version | None = None,
) -> str:
    """The report page of a version.

    now: the version.
    decisions: first the decision that this version was made for, then earlier ones.
    moves: from the version before. None: there was none.
    before: the version before, with what it takes now. None: there was none that still fits.
    """
    decision = decisions[0]
    return "\n".join(
        [
            _head(problem, now, decision),
            f"<p><b>{explained.total_ms:.2f} ms</b> predicted for {_what(explained)} of one training step: "
            f"{len(problem.tables)} tables on {len(problem.topology)} devices, global batch "
            f"{problem.global_batch:,}.<br>{escape(decision.outcome.capitalize())}: "
            f"{escape(decision.reason)}.</p>",
            *([_warning(now.cost.extrapolated)] if now.cost.extrapolated else []),
            f"<figure>{svg(figure(explained))}</figure>",
            "<h2>What bounds it</h2>",
            *(f"<p>{escape(line)}</p>" for line in plan_report.sentences(explained)),
            _shards(explained),
            _memory(explained),
            "<h2>Instead</h2>",
            _alternatives(explained),
            *(["<h2>Against the version before</h2>", _moves(moves)] if moves is not None else []),
            explorer(now, problem, before),
            "<h2>Decisions</h2>",
            _history(decisions),
            "<h2>Where it comes from</h2>",
            _pairs({**decision.provenance, **now.plan.provenance}),
            "</body></html>\n",
        ]
    )


def comparison(problem: Problem, now: Version, before: Version) -> str:
    """A page of two plans of a problem. Versions name them."""
    said = moves_text(diff(before.plan, now.plan, problem))
    title = f"{problem.name}: {now.name} against {before.name}"
    ms, was = now.cost.total_ms, before.cost.total_ms
    totals = f"<b>{ms:.2f} ms</b> predicted for a step, {percent_change(ms, was)} against {was:.2f} ms"
    return "\n".join(
        [
            _opened(title),
            f"<h1>{escape(title)}</h1>",
            f"<p>{totals}. {escape(said[0].upper() + said[1:])}.</p>",
            *([_warning(now.cost.extrapolated)] if now.cost.extrapolated else []),
            explorer(now, problem, before),
            "</body></html>\n",
        ]
    )


def _what(explained: Explanation) -> str:
    return "the embeddings and the dense part" if explained.cost.dense_ms else "the embeddings"


def _head(problem: Problem, now: Version, decision: Decision) -> str:
    refused = ' <span class="warn">(considered, not taken)</span>'
    taken = "" if now.name == version_name(decision.current) else refused
    return (
        f"{_opened(f'{problem.name}, {now.name}')}\n<h1>{escape(problem.name)}</h1>\n"
        f'<p class="note">{now.name}{taken}, {when(decision.decided_at)}</p>'
    )


def _opened(title: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        f"<title>{escape(title)}</title><style>{_STYLE}{STYLE}</style></head><body>"
    )


def _warning(extrapolated: Sequence[str]) -> str:
    # A sentence a quantity, so there are a dozen at most.
    return f'<p class="warn">Beyond what was measured: {escape("; ".join(extrapolated))}.</p>'


# --- figures ---------------------------------------------------------------------------------------------


def figure(explained: Explanation) -> Figure:
    """Two panels over devices: stacked parts of a step, and used memory."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    made = Figure(figsize=(11, 3.4))
    made.subplots_adjust(0.06, 0.14, 0.99, 0.92, 0.16)
    costs, memory = made.subplots(1, 2)
    _stack_costs(costs, explained.cost)
    _bar_memory(memory, explained)
    for axes in (costs, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return made


def _stack_costs(axes: Axes, cost: StepCost) -> None:
    n = len(cost.waiting_ms)
    below = np.zeros(n)
    for label, name, color in PARTS:
        below = _bars(axes, np.array(getattr(cost, name)), below, color, label)
    axes.set(ylabel="ms of one step", xlabel="device")
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=len(PARTS),
        loc="lower left",
        bbox_to_anchor=(-0.12, 1.0),
        columnspacing=0.9,
        handlelength=1.0,
        handletextpad=0.4,
    )


def _bar_memory(axes: Axes, explained: Explanation) -> None:
    # The largest unit in which the fullest device reads as 1 or more.
    unit, name = next(
        (u, n)
        for u, n in ((2**30, "GiB"), (2**20, "MiB"), (1, "bytes"))
        if max(explained.free_bytes) >= u or u == 1
    )
    free = np.array(explained.free_bytes) / unit
    used = np.array(explained.memory_bytes) / unit
    _bars(axes, free, np.zeros(len(free)), "#eeeeee", "may be used")
    _bars(axes, used, np.zeros(len(free)), "#228833", "used")
    axes.set(ylabel=f"memory, {name}", xlabel="device")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _bars(axes: Axes, heights: np.ndarray, below: np.ndarray, color: str, label: str) -> np.ndarray:
    """Draw bars on top of `below`, and return the new tops."""
    n = len(heights)
    # One outline per layer: a rectangle per device would bloat the SVG of 1,000 devices.
    edges = np.column_stack([np.arange(n) - 0.4, np.arange(n) + 0.4]).ravel()
    tops, base = (np.column_stack([x, np.full(n, np.nan)]).ravel()[:-1] for x in (below + heights, below))
    axes.stairs(
        np.nan_to_num(tops),
        edges,
        baseline=np.nan_to_num(base),
        fill=True,
        color=color,
        label=label,
        linewidth=0,
    )
    axes.set_xlim(-0.7, n - 0.3)
    axes.set_xticks(np.arange(0, n, -(-n // _MOST_TICKS)))
    return below + heights


# --- tables ----------------------------------------------------------------------------------------------


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """An HTML table. words: columns, other than the first, that are left-aligned."""
    head = "".join(
        f"<th{' class=words' if i in words else ''}>{escape(h)}</th>" for i, h in enumerate(headers)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=words' if i in words else ''}>{escape(str(c))}</td>" for i, c in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _shards(x: Explanation) -> str:
    shown = [(s.shard, s.kind, f"{s.saves_ms:.3f}", gib(s.bytes)) for s in x.shards[:MOST_ROWS]]
    return _table((f"on device {x.device}", "kind", "without it, ms less", "weights"), shown) + _rest(
        len(x.shards)
    )


def _memory(x: Explanation) -> str:
    rows = _table(plan_report.MEMORY_HEADERS, plan_report.memory_rows(x))
    return f'{rows}<p class="note">{escape(plan_report.memory_note(x))}</p>'


def _alternatives(x: Explanation) -> str:
    rows = [(a.what, *_against(a, x.total_ms)) for a in (*x.baselines, *x.changes)]
    return f'{_table(("", "ms", "against this plan"), rows)}<p class="note">{escape(x.searched)}</p>'


def _against(a: Alternative, total_ms: float) -> tuple[str, str]:
    if a.total_ms is None:
        return "none", (a.error or "")[:80]
    return f"{a.total_ms:.2f}", percent_change(a.total_ms, total_ms)


def _moves(moves: Diff) -> str:
    rows = plan_report.moves_rows(moves)[:MOST_ROWS]
    listed = _table(plan_report.MOVES_HEADERS, rows, words=(2, 3, 4)) if rows else ""
    said = moves_text(moves)
    return f"<p>{escape(said[0].upper() + said[1:])}.</p>{listed}{_rest(len(moves.moves))}"


def _history(decisions: Sequence[Decision]) -> str:
    return _table(
        plan_report.DECISION_HEADERS, map(plan_report.decision_row, decisions[:MOST_ROWS]), words=(1, 2, 6)
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(("", ""), ((k, v) for k, v in values.items()), words=(1,))


def _rest(n: int) -> str:
    return f'<p class="note">and {n - MOST_ROWS} more</p>' if n > MOST_ROWS else ""
