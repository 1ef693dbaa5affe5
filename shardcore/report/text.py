"""Tables as plain text and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from shardcore.core.errors import escaped

_NUMBER = re.compile(r"[+-]?\d")
_LONGEST_RULE = 40
"""Under a header, so that one long cell makes no rule over several lines."""


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], words: Container[int] = ()) -> str:
    """A table with aligned columns: numbers right, words and the first column left.

    words: columns that are left-aligned, though numbers may be in them.
    """
    cells = [[escaped(str(c)) for c in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # A column with a number anywhere counts as numbers: cells such as "-" stay aligned.
    to_left = [
        i == 0 or i in words or not any(_NUMBER.match(c) for c in column[1:])
        for i, column in enumerate(columns)
    ]

    def line(row: Sequence[str]) -> str:
        placed = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, to_left, strict=True))
        return "  ".join(placed).rstrip()

    *all_but_last, last = widths
    rule = "  ".join("-" * w for w in (*all_but_last, min(last, _LONGEST_RULE)))
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def records_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of one or more records. Their keys, all the same, are its headers."""
    return text_table(list(records[0]), [list(record.values()) for record in records])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    # A name with a bar would start a new cell.
    return "\n".join(
        "| " + " | ".join(escaped(str(c)).replace("|", "\\|") for c in line) + " |" for line in lines
    )


def percent_change(new: float, old: float) -> str:
    return f"{100 * (new - old) / old:+.1f}%" if old > 0 else "-"
