"""Moves, thresholds and times in words, for the reasons of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from shardcore.plans.diff import PlanDiff
from shardcore.step.memory import size_text


def moves_summary(moves: PlanDiff) -> str:
    """Text on tables that move, grow, are new or are gone, and on losses of a checkpoint."""
    return "; ".join(moves_phrases(moves))


def moves_phrases(moves: PlanDiff) -> list[str]:
    forced, chosen = moves.forced_moves, moves.voluntary_moves
    words = [f"{moved_amount_text(moves)} to move" if moves.moves else "nothing moves"]
    # Forced moves are named apart, as no setting avoids them.
    if forced.moves:
        words.append(
            f"{moved_amount_text(forced)} had to ({_first_names_text(m.table for m in forced.moves)}), "
            f"{moved_amount_text(chosen)} by choice"
        )
    if moves.resized:
        words.append(
            f"{count_text(len(moves.resized), 'table')} of another shape ({_first_names_text(moves.resized)}), "
            f"{size_text(moves.new_cell_bytes)} of new weights; a checkpoint of the old shape does not load"
        )
    for names, change in ((moves.added, "new"), (moves.removed, "gone")):
        if names:
            words.append(f"{count_text(len(names), 'table')} {change}: {_first_names_text(names)}")
    # Each loss once, with the tables that it concerns.
    for loses in dict.fromkeys(m.loses for m in moves.moves if m.loses):
        names = [m.table for m in moves.moves if m.loses == loses]
        words.append(
            f"{count_text(len(names), 'table')} by another kind of sharding or in other parts "
            f"({_first_names_text(names)}): a checkpoint loses {loses}"
        )
    return words


def moved_amount_text(moves: PlanDiff) -> str:
    """Text on the number of tables and bytes that move."""
    return (
        f"{count_text(len(moves.moves), 'table')}, {size_text(moves.bytes)} of weights"
        if moves.moves
        else "nothing"
    )


def threshold_text(threshold: float) -> str:
    """Text on the least gain that a threshold demands; "" without a threshold."""
    return f" (at least {threshold:.1%} asked)" if threshold else ""


def time_text(unix_s: float) -> str:
    # 0: unknown (Decision.decided_at).
    if not unix_s:
        return "at a time not known"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _first_names_text(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def count_text(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
