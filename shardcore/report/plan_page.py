"""The report page of a published plan: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.step_cost import StepCost
from shardcore.core.types import Problem
from shardcore.plans.decisions import Decision, Version, version_name
from shardcore.plans.diff import Diff, diff
from shardcore.plans.words import moves_text, when
from shardcore.report import plan_report
from shardcore.report.figures import svg
from shardcore.report.html import document, note, table
from shardcore.report.plan_explorer import PARTS, STYLE, explorer, policy
from shardcore.report.text import percent_change
from shardcore.search.explain import Alternative, Explanation
from shardcore.step.memory import gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 12
"""Rows of a table. The page says how many more there are."""
_REFUSED = ' <span class="warn">(considered, not taken)</span>'
_MOST_TICKS = 16


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
    refused = "" if now.name == version_name(decision.current) else _REFUSED
    what = "the embeddings and the dense part" if explained.cost.dense_ms else "the embeddings"
    return document(
        f"{problem.name}, {now.name}",
        [
            f"<h1>{escape(problem.name)}</h1>\n"
            f'<p class="note">{now.name}{refused}, {when(decision.decided_at)}</p>',
            f"<p><b>{explained.total_ms:.2f} ms</b> predicted for {what} of one training step: "
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
            table(
                plan_report.DECISION_HEADERS,
                map(plan_report.decision_row, decisions[:MOST_ROWS]),
                words=(1, 2, 6),
            ),
            "<h2>Where it comes from</h2>",
            table(("", ""), {**decision.provenance, **now.plan.provenance}.items(), words=(1,)),
        ],
        policy(),
        STYLE,
    )


def comparison(problem: Problem, now: Version, before: Version) -> str:
    """A page of two plans of a problem. Versions name them."""
    summary = moves_text(diff(before.plan, now.plan, problem))
    title = f"{problem.name}: {now.name} against {before.name}"
    ms, was = now.cost.total_ms, before.cost.total_ms
    totals = f"<b>{ms:.2f} ms</b> predicted for a step, {percent_change(ms, was)} against {was:.2f} ms"
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<p>{totals}. {escape(summary[0].upper() + summary[1:])}.</p>",
            *([_warning(now.cost.extrapolated)] if now.cost.extrapolated else []),
            explorer(now, problem, before),
        ],
        policy(),
        STYLE,
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


def _shards(x: Explanation) -> str:
    shown = [(s.shard, s.kind, f"{s.saves_ms:.3f}", gib(s.bytes)) for s in x.shards[:MOST_ROWS]]
    headers = (f"on device {x.device}", "kind", "without it, ms less", "weights")
    return table(headers, shown) + _rest(len(x.shards))


def _memory(x: Explanation) -> str:
    rows = table(plan_report.MEMORY_HEADERS, plan_report.memory_rows(x))
    return rows + note(plan_report.memory_note(x))


def _alternatives(x: Explanation) -> str:
    rows = [(a.what, *_against(a, x.total_ms)) for a in (*x.baselines, *x.changes)]
    return table(("", "ms", "against this plan"), rows) + note(x.searched)


def _against(a: Alternative, total_ms: float) -> tuple[str, str]:
    if a.total_ms is None:
        return "none", (a.error or "")[:80]
    return f"{a.total_ms:.2f}", percent_change(a.total_ms, total_ms)


def _moves(moves: Diff) -> str:
    rows = plan_report.moves_rows(moves)[:MOST_ROWS]
    listed = table(plan_report.MOVES_HEADERS, rows, words=(2, 3, 4)) if rows else ""
    summary = moves_text(moves)
    return f"<p>{escape(summary[0].upper() + summary[1:])}.</p>{listed}{_rest(len(moves.moves))}"


def _rest(n: int) -> str:
    return note(f"and {n - MOST_ROWS} more") if n > MOST_ROWS else ""
