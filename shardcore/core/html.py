"""Tables as HTML, for pages and for notebooks. Every text in them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

MOST_ROWS = 12
"""Rows that a notebook shows of a noun."""


class Link(NamedTuple):
    """A cell of a table that leads to another page."""

    text: str
    address: str


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """A table of cells. words: columns, other than the first, that are left-aligned."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        aligned = [(" class=words" if i in words else "", _cell(c)) for i, c in enumerate(cells)]
        return f"<tr>{''.join(f'<{tag}{mark}>{cell}</{tag}>' for mark, cell in aligned)}</tr>\n"

    return (
        f"<table><thead>{line('th', headers)}</thead>\n"
        f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
    )


def shown(text: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """A noun in a notebook: a line of text, and a table that ends with the number of rows left out."""
    rest = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<p>{escape(text)}</p>{table(headers, rows[:MOST_ROWS], words)}{rest}"


def _cell(value: Any) -> str:
    if isinstance(value, Link):
        return f'<a href="{escape(value.address)}">{escape(value.text)}</a>'
    return escape(str(value))
