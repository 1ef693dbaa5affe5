"""Tables and figures for people; pure: data in, text or a matplotlib figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; the first left, the others right."""
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def percent_change(new: float, old: float) -> str:
    return f"{100 * (new - old) / old:+.1f}%" if old > 0 else "-"


def predicted_against_measured(measured_ms: np.ndarray, predicted_ms: np.ndarray, title: str) -> Figure:
    """Scatter on log axes with the line of equality and ±10%."""
    figure, axes = _axes(title)
    low, high = (f(np.concatenate([measured_ms, predicted_ms])) for f in (np.min, np.max))
    line = np.array([low * 0.9, high * 1.1])
    axes.fill_between(line, line * 0.9, line * 1.1, alpha=0.2, label="±10%")
    axes.plot(line, line, linewidth=1)
    axes.scatter(measured_ms, predicted_ms, s=8)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    axes.legend()
    return figure


def curves(rows: Sequence[Mapping[str, Any]], metric: str, title: str) -> Figure:
    """One metric over epochs, a line for each "model" of the rows."""
    figure, axes = _axes(title)
    for model in dict.fromkeys(r["model"] for r in rows):
        points = [(r["epoch"], r[metric]) for r in rows if r["model"] == model and metric in r]
        axes.plot(*zip(*points, strict=True), label=model)
    axes.set(xlabel="epoch", ylabel=metric)
    axes.legend()
    return figure


def _axes(title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
