"""Jobs that follow a store, in text: the current plan, each job's own, its changes, and what it does next."""

from __future__ import annotations

from shardcore.core.links import LEVELS
from shardcore.plans.decisions import Decision
from shardcore.plans.followed import JobEvent, JobReport
from shardcore.plans.words import count_text, time_text
from shardcore.step.memory import size_text


def current_version_text(x: Decision) -> str:
    return f"{x.problem}: version {x.current} is current since {time_text(x.decided_at)} ({x.outcome}): {x.reason}"


def job_text(report: JobReport, now_s: float) -> str:
    plan = f"version {report.current}" if report.current else "a plan of its own"
    step_ms = f", {report.step_ms:.3g} ms a step" if report.step_ms is not None else ""
    return f"job {report.job}, step {report.step:,}, {_age_text(now_s - report.at_s)} ago: on {plan}{step_ms}"


def event_text(event: JobEvent) -> str:
    """Line on a change of a job's plan: outcome, pause, bytes moved, and step ms before and after."""
    words = [f"step {event.step:,}: {event.outcome}, version {event.version}"]
    if event.pause_s is not None:
        ways = [
            f"{size_text(n)} {LEVELS[way].words if way in LEVELS else 'within ranks'}"
            for way, n in (event.bytes or {}).items()
            if n
        ]
        words.append(f"{count_text(event.tables, 'table')} in {event.pause_s:.3g} s ({', '.join(ways)})")
    if event.after_ms is not None and event.before_ms:
        change = event.after_ms / event.before_ms - 1
        most = f", predicted at most {event.expected_ms:.3g}" if event.expected_ms is not None else ""
        words.append(f"{event.after_ms:.3g} ms a step, {event.before_ms:.3g} before ({change:+.1%}){most}")
    return "; ".join(filter(None, (*words, event.reason)))


def next_action_text(report: JobReport, current: str) -> str:
    """Line on what a job does at its next look at the store of plans."""
    if report.current == current:
        return "next: nothing, until another version is current"
    last = report.events[-1] if report.events else None
    if last and last.version == current and last.outcome == "refused":
        return f"next: nothing, as it cannot move to version {current}: {last.reason}"
    return f"next: it moves to version {current}"


def _age_text(seconds: float) -> str:
    for unit, each in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * each:
            return f"{seconds / each:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
