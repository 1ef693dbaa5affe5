"""The page of a cost model's versions over time: how good each is, and when it was champion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from shardcore.core.html import html_table
from shardcore.plans.words import time_text
from shardcore.report.figures import figure_with_panels, svg_text
from shardcore.report.html import html_page, note_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = (
    "version",
    "registered",
    "error, %",
    "noise, %",
    "error of replayed plans, %",
    "their noise, %",
    "champion",
    "gate",
    "setting",
    "data",
)


_EXPLAINED = 3
"""Newest versions whose errors are also in words."""


@dataclass(frozen=True)
class ModelRecord:
    """Record of one registered version of a cost model: errors and times as champion.

    registered_at: Unix s.
    error: its score where it was judged: percent, mean error on held-out groups and exchanges. None: unknown.
    replay_error: percent, mean error of replayed plans. None: there were none.
    noise: percent, mean error of a timing itself. No model can be shown to err less. None: unknown.
    replay_noise: percent, half the 95% interval of a replay, in the mean.
    accuracy: errors on held-out samples in words. "": unknown.
    replays: error of replayed plans in words, with a verdict. "": there were none.
    gate: what the gate said.
    reigns: from when to when plans were published under it, Unix s. None: still.
    data: digest of what it was trained on. "": unknown.
    """

    version: str
    registered_at: float
    error: float | None
    replay_error: float | None
    gate: str
    setting: str
    reigns: tuple[tuple[float, float | None], ...] = ()
    data: str = ""
    noise: float | None = None
    replay_noise: float | None = None
    accuracy: str = ""
    replays: str = ""


def model_version_rows(records: Sequence[ModelRecord]) -> list[tuple[str, ...]]:
    """Table rows of a cost model's versions under HEADERS, the newest first."""
    return [
        (
            x.version,
            time_text(x.registered_at),
            _percent_text(x.error),
            _percent_text(x.noise),
            _percent_text(x.replay_error),
            _percent_text(x.replay_noise),
            "; ".join(f"{time_text(begin)} to {time_text(end) if end else 'now'}" for begin, end in x.reigns)
            or "never",
            x.gate or "-",
            x.setting,
            x.data[:8] or "unknown",
        )
        for x in sorted(records, key=lambda x: -x.registered_at)
    ]


def errors_sentence(record: ModelRecord) -> str:
    """Sentence on a model version's errors on single ops and exchanges, and on whole steps."""
    return "; replayed steps of plans: ".join(
        filter(
            None,
            (f"Version {record.version}: {record.accuracy or 'its errors are not known'}", record.replays),
        )
    )


def model_versions_page(name: str, records: Sequence[ModelRecord], first: Sequence[str] = ()) -> str:
    """Self-contained HTML page of a cost model's versions.

    first: sentences about the champion, which come first.
    """
    newest = sorted(records, key=lambda x: -x.registered_at)[:_EXPLAINED]
    return html_page(
        name,
        [
            f"<h1>{escape(name)}</h1>",
            *(f"<p><b>{escape(x)}.</b></p>" for x in first),
            note_html(
                "Each version was judged on this machine's held-out data of its time. Dashed: the noise of those "
                "measurements, which a busy machine raises, and errors with it. Shaded: plans were published "
                "under it."
            ),
            *(f"<p>{escape(errors_sentence(x))}.</p>" for x in newest if x.accuracy or x.replays),
            f"<figure>{svg_text(model_errors_figure(records))}</figure>",
            html_table(HEADERS, model_version_rows(records), words=(1, 6, 7, 8)),
        ],
    )


def model_errors_figure(records: Sequence[ModelRecord]) -> Figure:
    """Figure of the errors of model versions over their time of registration."""
    from datetime import UTC, datetime

    from matplotlib.dates import date2num

    made, [axes] = figure_with_panels((11, 3.2))
    axes.xaxis_date()

    def utc_datetime(unix_s: float) -> datetime:
        return datetime.fromtimestamp(unix_s, UTC)

    ordered = sorted(records, key=lambda x: x.registered_at)
    times = (t for x in records for reign in x.reigns for t in reign if t)
    last = max((*(x.registered_at for x in records), *times), default=0.0)
    for x in ordered:
        for begin, end in x.reigns:
            days = (float(date2num(utc_datetime(unix_s))) for unix_s in (begin, end or last))
            axes.axvspan(*days, color="#228833", alpha=0.15, linewidth=0)
    for label, color, errors, noises in (
        ("held-out groups and exchanges", "#4477aa", [x.error for x in ordered], [x.noise for x in ordered]),
        ("replayed plans", "#ee6677", [x.replay_error for x in ordered], [x.replay_noise for x in ordered]),
    ):
        for values, style, name in ((errors, "o-", label), (noises, ".--", f"noise of {label}")):
            known = [
                (date2num(utc_datetime(x.registered_at)), v)
                for x, v in zip(ordered, values, strict=True)
                if v is not None
            ]
            if known or style == "o-":
                axes.plot([t for t, _ in known], [v for _, v in known], style, color=color, label=name)
    axes.set(ylabel="error, %", ylim=(0, None))
    axes.legend(frameon=False)
    return made


def _percent_text(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"
