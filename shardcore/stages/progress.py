"""Progress of a stage: its messages, and the share of its work that is done."""

from __future__ import annotations

from typing import Any, Protocol

from shardcore.measure.tally import Tally


class Progress(Protocol):
    """Receiver of a stage's reports. `info` and `warning` are those of a logger."""

    info: Any
    warning: Any

    def show(self, tally: Tally) -> None:
        """Show the progress of a stage. Called often."""


class StageWork:
    """Long work of a stage, whose progress is shown.

    parts: name of its parts, such as "problems compared".
    total: number of parts.
    """

    def __init__(self, progress: Progress, parts: str, total: int) -> None:
        self._progress, self._tally = progress, Tally(parts, total)
        self.show_done(0)

    def show_done(self, n: int, words: str = "") -> None:
        """Show that n parts of the work are done.

        words: what else there is to say.
        """
        self._tally.done, self._tally.words = n, words
        self._progress.show(self._tally)

    def show_phase(self, phase: str, best_ms: float | None, left_s: float | None) -> None:
        """Show the phase of the current part of the work (see shardcore.core.progress.Listener)."""
        self.show_done(self._tally.done, f"{phase}{'' if best_ms is None else f', best {best_ms:.3f} ms'}")
