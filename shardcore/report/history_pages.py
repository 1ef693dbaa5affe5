"""Pages of what changes over weeks.

Versions of a cost model: how good each is, and when it was champion. Traced steps of a running job: as measured and as
predicted, and the model's factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from shardcore.core.html import html_table
from shardcore.plans.words import time_text
from shardcore.report.figures import DAY_S, Figure, draw_over_time, figure_with_panels, svg_text
from shardcore.report.html import html_page, note_html
from shardcore.report.text import number_text, percent_change

# --- a cost model ----------------------------------------------------------------------------------------

VERSION_HEADERS = (
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
    """Table rows of a cost model's versions under VERSION_HEADERS, the newest first."""
    return [
        (
            x.version,
            time_text(x.registered_at),
            number_text(x.error),
            number_text(x.noise),
            number_text(x.replay_error),
            number_text(x.replay_noise),
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
            html_table(VERSION_HEADERS, model_version_rows(records), words=(1, 6, 7, 8)),
        ],
    )


def model_errors_figure(records: Sequence[ModelRecord]) -> Figure:
    """Figure of the errors of model versions over their time of registration."""
    made, [axes] = figure_with_panels((11, 3.2))
    ordered = sorted(records, key=lambda x: x.registered_at)
    times = (t for x in records for reign in x.reigns for t in reign if t)
    last = max((*(x.registered_at for x in records), *times), default=0.0)
    for begin, end in (reign for x in ordered for reign in x.reigns):
        axes.axvspan(begin / DAY_S, (end or last) / DAY_S, color="#228833", alpha=0.15, linewidth=0)
    for label, color, error, noise in (
        ("held-out groups and exchanges", "#4477aa", "error", "noise"),
        ("replayed plans", "#ee6677", "replay_error", "replay_noise"),
    ):
        for name, style, words in ((error, "o-", label), (noise, ".--", f"noise of {label}")):
            points = [(x.registered_at, getattr(x, name)) for x in ordered]
            draw_over_time(axes, points, style, color=color, label=words)
    axes.set(ylabel="error, %", ylim=(0, None))
    return made


# --- a running job ---------------------------------------------------------------------------------------

STEP_HEADERS = (
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
    """Table rows of a job's traced steps under STEP_HEADERS, the last step first."""
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
            html_table(STEP_HEADERS, traced_step_rows(records), words=(1, 7)),
        ],
    )


def step_times_figure(records: Sequence[JobRecord]) -> Figure:
    """Figure of a job's measured and predicted step ms over time, with the cost model's correction factors below."""
    made, [steps, factors] = figure_with_panels((11, 5.4), rows=2, sharex=True)
    ordered = sorted(records, key=lambda x: x.at)
    draw_over_time(steps, [(x.at, x.measured_ms) for x in ordered], "o-", color="#4477aa", label="measured")
    draw_over_time(
        steps, [(x.at, x.predicted_ms) for x in ordered], ".--", color="#ee6677", label="predicted"
    )
    steps.set(ylabel="step, ms", ylim=(0, None))
    for name in dict.fromkeys(name for x in ordered for name in x.factors):
        draw_over_time(factors, [(x.at, x.factors.get(name)) for x in ordered], ".-", label=name)
    factors.axhline(1, color="0.6", linewidth=1)
    factors.set(ylabel="factor on the model", ylim=(0, None))
    return made
