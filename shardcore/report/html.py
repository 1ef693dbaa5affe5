"""Self-contained pages. Every text in them is escaped. Their tables: core.html."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STATIC = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of a page without scripts: the browser loads nothing, and runs nothing."""
_STYLE = """
:root { color-scheme: light dark; } :root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
body { font: 15px/1.5 system-ui, sans-serif; background: light-dark(#fff, #16191d);
  color: light-dark(#222, #ddd); max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; vertical-align: top; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid light-dark(#e5e5e5, #333); }
th:first-child, td:first-child, .words { text-align: left; } th { font-weight: 600; color: light-dark(#555, #aaa); }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; }
.note { color: light-dark(#666, #999); } .warn { color: light-dark(#a33, #f88); }
@media (prefers-color-scheme: dark) { figure { filter: invert(1) hue-rotate(180deg); } }
"""


def html_page(title: str, body: Iterable[str], policy: str = STATIC, style: str = "") -> str:
    """Self-contained HTML page.

    body: elements, as HTML.
    policy: content security policy.
    style: CSS in addition to the common one.
    """
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def note_html(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
