"""The report page of a published plan: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardcore.core.html import MOST_ROWS, first_rows_html, html_table
from shardcore.core.types import Problem
from shardcore.plans.decisions import Decision, PlanVersion, version_name
from shardcore.plans.diff import PlanDiff, diff_plans
from shardcore.plans.words import moves_summary, time_text
from shardcore.report import plan_report
from shardcore.report.html import html_page, note_html
from shardcore.report.plan_explorer import STYLE, bottleneck_sentence, explorer_html, script_policy
from shardcore.report.text import percent_change
from shardcore.search.explain import Explanation
from shardcore.step.memory import size_text

_REFUSED = ' <span class="warn">(considered, not taken)</span>'


def published_version_page(
    new_version: PlanVersion,
    problem: Problem,
    explained: Explanation,
    decisions: Sequence[Decision],
    moves: PlanDiff | None,
    old_version: PlanVersion | None = None,
) -> str:
    """HTML report page of a published version of a plan.

    new_version: the version.
    decisions: first the decision that this version was made for, then earlier ones.
    moves: from the version before. None: there was none.
    old_version: the version before, with what it takes now. None: there was none that still fits.
    """
    decision = decisions[0]
    refused = "" if new_version.name == version_name(decision.current) else _REFUSED
    what = "the embeddings and the dense part" if explained.cost.dense_ms else "the embeddings"
    return html_page(
        f"{problem.name}, {new_version.name}",
        [
            f"<h1>{escape(problem.name)}</h1>\n"
            f'<p class="note">{new_version.name}{refused}, {time_text(decision.decided_at)}</p>',
            f"<p><b>{explained.total_ms:.2f} ms</b> predicted for {what} of one training step: "
            f"{len(problem.tables)} tables on {len(problem.topology)} devices, global batch "
            f"{problem.global_batch:,}.<br>{escape(decision.outcome.capitalize())}: "
            f"{escape(decision.reason)}.</p>",
            *(
                [_extrapolation_warning(new_version.cost.extrapolated)]
                if new_version.cost.extrapolated
                else []
            ),
            f'<p class="glance">{escape(bottleneck_sentence(new_version))}</p>',
            explorer_html(new_version, problem, old_version),
            "<h2>What bounds it</h2>",
            *(f"<p>{escape(line)}</p>" for line in plan_report.explanation_sentences(explained)),
            first_rows_html(
                f"Shards on device {explained.device}, the one that saves most without it first",
                ("shard", "kind", "without it, ms less", "weights"),
                [(s.shard, s.kind, f"{s.saves_ms:.3f}", size_text(s.bytes)) for s in explained.shards],
            ),
            html_table(plan_report.MEMORY_HEADERS, plan_report.memory_rows(explained)),
            note_html(plan_report.peak_moment_text(explained)),
            "<h2>Instead</h2>",
            html_table(("", "ms", "against this plan"), plan_report.alternative_rows(explained)),
            note_html(explained.searched),
            *([_moves_html(moves)] if moves is not None else []),
            "<h2>Decisions</h2>",
            html_table(
                plan_report.DECISION_HEADERS,
                map(plan_report.decision_row, decisions[:MOST_ROWS]),
                words=(1, 2, 6),
            ),
            "<h2>Where it comes from</h2>",
            html_table(("", ""), {**decision.provenance, **new_version.plan.provenance}.items(), words=(1,)),
        ],
        script_policy(),
        STYLE,
    )


def plan_comparison_page(problem: Problem, new_version: PlanVersion, old_version: PlanVersion) -> str:
    """HTML page that compares two plans of a problem."""
    summary = moves_summary(diff_plans(old_version.plan, new_version.plan, problem))
    title = f"{problem.name}: {new_version.name} against {old_version.name}"
    ms, was = new_version.cost.total_ms, old_version.cost.total_ms
    totals = f"<b>{ms:.2f} ms</b> predicted for a step, {percent_change(ms, was)} against {was:.2f} ms"
    return html_page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<p>{totals}. {escape(summary[0].upper() + summary[1:])}.</p>",
            *(
                [_extrapolation_warning(new_version.cost.extrapolated)]
                if new_version.cost.extrapolated
                else []
            ),
            f'<p class="glance">{escape(bottleneck_sentence(new_version))}</p>',
            explorer_html(new_version, problem, old_version),
        ],
        script_policy(),
        STYLE,
    )


def unpublished_plan_page(problem: Problem, new_version: PlanVersion) -> str:
    """HTML page of one plan that is in no store."""
    return html_page(
        f"{problem.name}: {new_version.name}",
        [
            f'<h1>{escape(problem.name)}</h1><p class="note">{escape(new_version.name)}</p>',
            f"<p><b>{new_version.cost.total_ms:.2f} ms</b> predicted for a step: {len(problem.tables)} tables on "
            f"{len(problem.topology)} devices, global batch {problem.global_batch:,}.</p>",
            *(
                [_extrapolation_warning(new_version.cost.extrapolated)]
                if new_version.cost.extrapolated
                else []
            ),
            f'<p class="glance">{escape(bottleneck_sentence(new_version))}</p>',
            explorer_html(new_version, problem),
            "<h2>Where it comes from</h2>",
            html_table(("", ""), new_version.plan.provenance.items(), words=(1,)),
        ],
        script_policy(),
        STYLE,
    )


def _extrapolation_warning(extrapolated: Sequence[str]) -> str:
    # A sentence a quantity, so there are a dozen at most.
    return f'<p class="warn">Beyond what was measured: {escape("; ".join(extrapolated))}.</p>'


def _moves_html(moves: PlanDiff) -> str:
    """Section on what moves between a version and the one before; without a table where nothing does."""
    summary = moves_summary(moves)
    rows = plan_report.move_rows(moves)
    words = f"{summary[0].upper()}{summary[1:]}."
    table = first_rows_html(words, plan_report.MOVES_HEADERS, rows, words=(2, 3, 4))
    return f"<h2>Against the version before</h2>{table if rows else f'<p>{escape(words)}</p>'}"
