"""Figures as PNG and SVG. Names in them are plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.core.extras import MissingExtra, explain_missing_extras
from shardcore.io.writing import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # matplotlib is an extra: modules name its types by this one, and need none of it until they draw
    Axes = Figure = Any

_POWER = re.compile(r"\$\\mathdefault\{\d*(\\times)?10\^\{[-\u2212]?\d+\}\}\$")
"""Formula that matplotlib itself writes at a logarithmic axis."""
DAY_S = 86400
"""Seconds of a day, of which matplotlib's axes of dates count those since 1970."""


def figure_with_panels(
    size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Figure with a grid of panels, listed row by row.

    size: width and height in inches.
    options: keyword arguments of `Figure.subplots`.
    """
    from matplotlib import figure as figures  # without pyplot: no global state, no display

    figure = figures.Figure(figsize=size, layout="constrained")
    made = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in made:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, made


def draw_over_time(
    axes: Axes, points: Iterable[tuple[float, float | None]], style: str, **options: Any
) -> None:
    """Draw those (Unix s, value) whose value is known, with a legend. Without one, draw nothing.

    options: keyword arguments of `Axes.plot`, with a label.
    """
    known = [(unix_s / DAY_S, value) for unix_s, value in points if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), style, **options)
        axes.xaxis_date()
        axes.legend(frameon=False, fontsize=8, ncols=4)


def png_bytes(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG image."""
    content = io.BytesIO()
    _disable_math_text(figure).savefig(content, dpi=120, format="png")
    return content.getvalue()


def write_png(path: Path, draw: Callable[[], Figure]) -> str:
    """Draw a figure and write it as PNG. Returns the path, or a sentence if matplotlib is missing."""
    try:
        with explain_missing_extras():
            write_atomic(path, png_bytes(draw()))
    except MissingExtra as error:
        return f"{path} was not drawn: {error}"
    return str(path)


def svg_text(figure: Figure) -> str:
    """A figure as SVG for HTML, the same text for equal figures."""
    import matplotlib

    text = io.StringIO()
    # A fixed salt and no date: equal figures give equal pages.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "shardcore", "font.family": "sans-serif"}
    ):
        _disable_math_text(figure).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _disable_math_text(figure: Figure) -> Figure:
    """Stop matplotlib from reading dollar signs in a figure's texts as formulas. Returns the figure."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text() and not _POWER.fullmatch(text.get_text()):
            text.set_parse_math(False)
    return figure
