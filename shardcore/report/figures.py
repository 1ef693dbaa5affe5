"""Figures as PNG and SVG. Names in them are plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.core.extras import MissingExtra, extras_named
from shardcore.io.writing import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POWER = re.compile(r"\$\\mathdefault\{\d*(\\times)?10\^\{[-\u2212]?\d+\}\}\$")
"""Formula that matplotlib itself writes at a logarithmic axis."""


def figure_with_panels(
    size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure, and its panels row by row. size: width and height in inches. options: of `Figure.subplots`."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=size, layout="constrained")
    made = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in made:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, made


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG."""
    content = io.BytesIO()
    _disable_math_text(figure).savefig(content, dpi=120, format="png")
    return content.getvalue()


def write_png(path: Path, draw: Callable[[], Figure]) -> str:
    """Write a picture, and give a line for people: its path, or why it was not drawn without matplotlib."""
    try:
        with extras_named():
            write_atomic(path, png_bytes(draw()))
    except MissingExtra as error:
        return f"{path} was not drawn: {error}"
    return str(path)


def svg_text(figure: Figure) -> str:
    """The figure as SVG for HTML. The same figure gives the same text."""
    import matplotlib

    text = io.StringIO()
    # A fixed salt and no date: equal figures give equal pages.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "shardcore", "font.family": "sans-serif"}
    ):
        _disable_math_text(figure).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _disable_math_text(figure: Figure) -> Figure:
    """The figure, whose texts are no formulas: a name such as A$_$ is none that can be drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text() and not _POWER.fullmatch(text.get_text()):
            text.set_parse_math(False)
    return figure
