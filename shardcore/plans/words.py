"""Moves, thresholds and times in words, for the reasons of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from shardcore.plans.diff import Diff
from shardcore.step.memory import gib


def moves_text(found: Diff) -> str:
    """Tables that move, grow, are new or are gone, in a few words, and what a checkpoint loses."""
    return "; ".join(moves_words(found))


def moves_words(found: Diff) -> list[str]:
    forced, chosen = found.forced, found.chosen
    said = [f"{moved_words(found)} to move" if found.moves else "nothing moves"]
    if forced.moves:
        said.append(
            f"{moved_words(forced)} had to ({_few(m.table for m in forced.moves)}), {moved_words(chosen)} by choice"
        )
    if found.resized:
        said.append(
            f"{count(len(found.resized), 'table')} of another shape ({_few(r.new.name for r in found.resized)}), "
            f"{gib(found.new_bytes)} of new weights; a checkpoint of the old shape does not load"
        )
    said += [
        f"{count(len(names), 'table')} {words}: {_few(names)}"
        for names, words in ((found.added, "new"), (found.removed, "gone"))
        if names
    ]
    for loses in dict.fromkeys(m.loses for m in found.moves if m.loses):
        names = [m.table for m in found.moves if m.loses == loses]
        said.append(
            f"{count(len(names), 'table')} by another kind of sharding or in other parts "
            f"({_few(names)}): a checkpoint loses {loses}"
        )
    return said


def moved_words(found: Diff) -> str:
    """How many tables and bytes move."""
    return f"{count(len(found.moves), 'table')}, {gib(found.bytes)} of weights" if found.moves else "nothing"


def threshold_words(threshold: float) -> str:
    """The least gain that was asked for, if any."""
    return f" (at least {threshold:.1%} asked)" if threshold else ""


def when(unix_s: float) -> str:
    if not unix_s:
        return "at a time not known"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _few(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:3]) + ", ..." * (len(found) > 3)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
