"""The page of a running job over weeks: its traced steps as measured and as predicted, and the model's factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from shardcore.core.html import html_table
from shardcore.plans.words import time_text
from shardcore.report.figures import figure_with_panels, svg_text
from shardcore.report.html import html_page, note_html
from shardcore.report.text import percent_change

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = (
    "step",
    "traced",
    "measured ms",
    "predicted",
    "difference",
    "around the embeddings, ms",
    "named",
    "model",
)


@dataclass(frozen=True)
class JobRecord:
    """Record of one traced step of a job, as a row of the job's page.

    number: in the job's count.
    at: when it was traced, Unix s.
    measured_ms: of steps without tracing.
    predicted_ms: by the model of its time, with what earlier steps show around the embeddings.
    around_ms: of the step, around the embeddings.
    named_share: of the traced step's ms that is recognised.
    model: version of the model that predicted. "": a profile.
    factors: of the model's parts, by name, that this step asks for.
    """

    number: int
    at: float
    measured_ms: float
    predicted_ms: float
    around_ms: float
    named_share: float
    model: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)


def traced_step_rows(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Table rows of a job's traced steps under HEADERS, the last step first."""
    return [
        (
            f"{x.number:,}",
            time_text(x.at),
            f"{x.measured_ms:.1f}",
            f"{x.predicted_ms:.1f}",
            percent_change(x.predicted_ms, x.measured_ms),
            f"{x.around_ms:.1f}",
            f"{x.named_share:.1%}",
            x.model or "profile",
        )
        for x in sorted(records, key=lambda x: -x.number)
    ]


def traced_job_page(job: str, records: Sequence[JobRecord], first: Sequence[str] = ()) -> str:
    """Self-contained HTML page of a job's traced steps, measured and predicted.

    first: sentences that come first.
    """
    return html_page(
        job,
        [
            f"<h1>{escape(job)}</h1>",
            *(f"<p>{escape(x)}</p>" for x in first),
            note_html(
                "Each step was predicted before it was read: by the champion of its time, with what earlier steps took "
                "around the embeddings. Below: by what each part differs from that model."
            ),
            f"<figure>{svg_text(step_times_figure(records))}</figure>",
            html_table(HEADERS, traced_step_rows(records), words=(1, 7)),
        ],
    )


def step_times_figure(records: Sequence[JobRecord]) -> Figure:
    """Figure of a job's measured and predicted step ms over time, with the cost model's correction factors below."""
    from datetime import UTC, datetime

    made, [steps, factors] = figure_with_panels((11, 5.4), rows=2, sharex=True)
    ordered = sorted(records, key=lambda x: x.at)
    times: list[Any] = [datetime.fromtimestamp(x.at, UTC) for x in ordered]
    steps.plot(times, [x.measured_ms for x in ordered], "o-", color="#4477aa", label="measured")
    steps.plot(times, [x.predicted_ms for x in ordered], ".--", color="#ee6677", label="predicted")
    steps.set(ylabel="step, ms", ylim=(0, None))
    for name in dict.fromkeys(name for x in ordered for name in x.factors):
        known = [(t, x.factors[name]) for t, x in zip(times, ordered, strict=True) if name in x.factors]
        factors.plot([t for t, _ in known], [v for _, v in known], ".-", label=name)
    factors.axhline(1, color="0.6", linewidth=1)
    factors.set(ylabel="factor on the model", ylim=(0, None))
    for axes in (steps, factors):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, ncols=4)
    return made
