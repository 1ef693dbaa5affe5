"""Tables as plain text and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardcore.errors import escaped

_NUMBER = re.compile(r"[+-]?\d")


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with aligned columns: numbers right, words and the first column left."""
    cells = [[escaped(str(c)) for c in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # A column with a number anywhere counts as numbers: cells such as "-" stay aligned.
    words = [i == 0 or not any(_NUMBER.match(c) for c in column[1:]) for i, column in enumerate(columns)]

    def line(row: Sequence[str]) -> str:
        placed = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, words, strict=True))
        return "  ".join(placed).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    # A name with a bar would start a new cell.
    return "\n".join("| " + " | ".join(escaped(str(c)).replace("|", "\\|") for c in line) + " |"
                     for line in lines)


def percent_change(new: float, old: float) -> str:
    return f"{100 * (new - old) / old:+.1f}%" if old > 0 else "-"
