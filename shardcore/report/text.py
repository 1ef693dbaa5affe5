"""Tables as plain text and as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from shardcore.core.errors import escape_unprintable

_NUMBER = re.compile(r"[+-]?\d")
_LONGEST_RULE = 40
"""Under a header, so that one long cell makes no rule over several lines."""
MOST_DEVICES = 16
"""Devices of a table."""


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], words: Container[int] = ()) -> str:
    """Plain-text table with aligned columns: numbers right, words and the first column left.

    words: columns that are left-aligned, though numbers may be in them.
    """
    cells = [[escape_unprintable(str(c)) for c in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # A column with a number anywhere counts as numbers: cells such as "-" stay aligned.
    to_left = [
        i == 0 or i in words or not any(_NUMBER.match(c) for c in column[1:])
        for i, column in enumerate(columns)
    ]

    def aligned_line(row: Sequence[str]) -> str:
        placed = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, to_left, strict=True))
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * w for w in (*widths[:-1], min(widths[-1], _LONGEST_RULE)))
    return "\n".join([aligned_line(cells[0]), rule, *map(aligned_line, cells[1:])])


def device_table(columns: Mapping[str, Sequence[float | str]], costs: Sequence[float]) -> str:
    """Plain-text table with a row for each device, at most MOST_DEVICES, the costliest ones.

    columns: [D] ms or texts by header.
    costs: [D] by which devices are chosen.
    """
    highest = sorted(range(len(costs)), key=lambda d: -costs[d])[:MOST_DEVICES]
    rows = [
        (d, *(f"{x:.3f}" if isinstance(x, float) else x for x in (column[d] for column in columns.values())))
        for d in sorted(highest)
    ]
    return text_table(["device", *columns], rows) + f"\nand {len(costs) - len(rows)} more devices" * (
        len(costs) > len(rows)
    )


def records_table(records: Sequence[Mapping[str, Any]], words: Container[int] = ()) -> str:
    """Plain-text table of one or more records with equal keys, which are the headers. words: as of `text_table`."""
    return text_table(list(records[0]), [list(record.values()) for record in records], words)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    # A name with a bar would start a new cell.
    return "\n".join(
        "| " + " | ".join(escape_unprintable(str(c)).replace("|", "\\|") for c in line) + " |"
        for line in lines
    )


def rounded_json(value: Any) -> str:
    """Indented JSON of a value, with floats rounded to seven significant digits."""
    rounded = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.7g}"))
    return json.dumps(rounded, indent=1)


def number_text(value: float | None) -> str:
    """Number with two digits; "-" where not known."""
    return "-" if value is None else f"{value:.2f}"


def percent_change(new: float, old: float) -> str:
    return f"{100 * (new - old) / old:+.1f}%" if old > 0 else "-"
