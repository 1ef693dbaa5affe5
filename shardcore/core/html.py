"""Tables as HTML, for pages and for notebooks. Every text in them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

MOST_ROWS = 12
"""Rows that a notebook shows of a noun, and a page of a long table."""


class Link(NamedTuple):
    """Table cell that links to another page."""

    text: str
    address: str


def html_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """HTML table of cells. words: columns, other than the first, that are left-aligned."""

    def row_html(tag: str, cells: Sequence[Any]) -> str:
        aligned = [(" class=words" if i in words else "", _cell_html(c)) for i, c in enumerate(cells)]
        return f"<tr>{''.join(f'<{tag}{mark}>{cell}</{tag}>' for mark, cell in aligned)}</tr>\n"

    return (
        f"<table><thead>{row_html('th', headers)}</thead>\n"
        f"<tbody>{''.join(row_html('td', row) for row in rows)}</tbody></table>"
    )


def first_rows_html(
    text: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], words: Sequence[int] = ()
) -> str:
    """HTML of a line of text, and of a table's first rows with the number of rows left out."""
    rest = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<p>{escape(text)}</p>{html_table(headers, rows[:MOST_ROWS], words)}{rest}"


def _cell_html(value: Any) -> str:
    """HTML of a table cell: a link, or escaped text."""
    if isinstance(value, Link):
        return f'<a href="{escape(value.address)}">{escape(value.text)}</a>'
    return escape(str(value))
