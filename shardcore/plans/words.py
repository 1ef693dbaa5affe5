"""Moves, thresholds and times in words, for the reasons of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from shardcore.plans.diff import Diff
from shardcore.step.memory import gib


def moves_text(moves: Diff) -> str:
    """Tables that move, grow, are new or are gone, in a few words, and losses of a checkpoint."""
    return "; ".join(moves_words(moves))


def moves_words(moves: Diff) -> list[str]:
    forced, chosen = moves.forced, moves.chosen
    words = [f"{moved_words(moves)} to move" if moves.moves else "nothing moves"]
    # Forced moves are named apart, as no setting avoids them.
    if forced.moves:
        words.append(
            f"{moved_words(forced)} had to ({_few(m.table for m in forced.moves)}), {moved_words(chosen)} by choice"
        )
    if moves.resized:
        words.append(
            f"{count(len(moves.resized), 'table')} of another shape ({_few(moves.resized)}), "
            f"{gib(moves.new_bytes)} of new weights; a checkpoint of the old shape does not load"
        )
    for names, change in ((moves.added, "new"), (moves.removed, "gone")):
        if names:
            words.append(f"{count(len(names), 'table')} {change}: {_few(names)}")
    # Each loss once, with the tables that it concerns.
    for loses in dict.fromkeys(m.loses for m in moves.moves if m.loses):
        names = [m.table for m in moves.moves if m.loses == loses]
        words.append(
            f"{count(len(names), 'table')} by another kind of sharding or in other parts "
            f"({_few(names)}): a checkpoint loses {loses}"
        )
    return words


def moved_words(moves: Diff) -> str:
    """The number of tables and bytes that move."""
    return f"{count(len(moves.moves), 'table')}, {gib(moves.bytes)} of weights" if moves.moves else "nothing"


def threshold_words(threshold: float) -> str:
    """The least gain that a threshold demands, if any."""
    return f" (at least {threshold:.1%} asked)" if threshold else ""


def when(unix_s: float) -> str:
    # 0: unknown (Decision.decided_at).
    if not unix_s:
        return "at a time not known"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
