"""Hot rows in words: what each threshold gives, and how many rows of each table are hot."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.memory import gib
from shardcore.report.text import text_table
from shardcore.search.hot_rows import Threshold
from shardcore.tables.hot_drift import HotDrift
from shardcore.tables.hot_rows import HOT
from shardcore.types import Problem
from shardcore.workload import lower


def thresholds_line(tried: Threshold) -> str:
    """What was just tried, while others are."""
    return f"{_threshold(tried)}: {tried.words}"


def thresholds_table(problem: Problem, tried: Sequence[Threshold], best: Threshold) -> str:
    """All thresholds, and the hot rows of the best."""
    lines = []
    for one in sorted(tried, key=lambda t: -(t.least_lookups or float("inf"))):
        work = lower(one.plan, one.problem) if one.plan else None
        sizes = [gib(work.traffic.sum()), gib(max(work.memory_bytes))] if work else ["", ""]
        lines.append([_threshold(one) + " (best)" * (one is best), f"{sum(one.rows.values()):,}",
                      one.words, *sizes])
    shares = {t.name.removesuffix(HOT): t.pooling for t in best.problem.tables if t.name.endswith(HOT)}
    rows = []
    for table in problem.tables:
        if table.name in best.rows:
            rows.append([table.name, f"{table.rows:,}", f"{best.rows[table.name]:,}",
                         f"{shares[table.name] / table.pooling:.1%}"])
    found = text_table(["rows are hot from", "hot rows", "step", "enters exchanges", "most memory"], lines)
    if rows:
        found += "\n\n" + text_table(["table", "rows", "hot rows", "their lookups"], rows)
    return found


def drift_table(found: Sequence[HotDrift]) -> str:
    """How hot the hot rows of each table still are, and what other hot ids would save and move."""
    rows = [(x.table, f"{x.rows:,}", f"{x.still_hot:.0%}", f"{x.planned_share:.1%}", f"{x.share:.1%}",
             f"{x.best_share:.1%}", f"{x.entering:,}", f"{x.saved_bytes / 1e6:,.3f}", gib(x.moved_bytes))
            for x in found]
    saved, moved = sum(x.saved_bytes for x in found), sum(x.moved_bytes for x in found)
    return "\n".join([
        text_table(["table", "hot rows", "still hot", "lookups, planned", "now", "with other ids",
                    "rows that enter", "MB saved a step", "moves"], rows), "",
        f"Other hot ids would save {saved / 1e6:,.3f} MB a step between devices, and move {gib(moved)} of "
        "weights once."])


def _threshold(tried: Threshold) -> str:
    return "no hot rows" if tried.least_lookups is None else f"{tried.least_lookups:,.1f} lookups a batch"
