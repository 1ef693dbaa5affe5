"""Progress of work of many parts: its rate, the time left, and, of samples, the share of time in kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

NAMES = {"compute": "groups", "comm": "exchanges", "steps": "steps of plans"}
"""Words for samples, by kind."""


class Tally:
    """Progress counter of samples of a kind, or of other work.

    kind: "compute", "comm" or "steps", or the name of the parts.
    total: number of samples to measure. None: as many as the time allows.
    again: True for samples that were disturbed and are measured once more.
    words: what else the line says.
    """

    def __init__(
        self,
        kind: str,
        total: int | None,
        again: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.kind, self.total, self.again = kind, total, again
        self.done = self.failed = 0
        self.words = ""
        self.by_device: dict[str, int] = defaultdict(int)
        self._kernel_s: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._began = clock()

    def add(self, device: str, samples: int, kernel_s: float | None = None) -> None:
        """Count samples of a device, and its seconds in kernels if known."""
        self.done += samples
        self.by_device[device] += samples
        if kernel_s is not None:
            self._kernel_s[device] += kernel_s

    @property
    def elapsed_s(self) -> float:
        return max(1e-6, self._clock() - self._began)

    @property
    def done_share(self) -> float:
        """Fraction of the samples that are done: 0 if the total is unknown, 1 if the total is 0."""
        return self.done / self.total if self.total else float(self.total == 0)

    @property
    def samples_per_s(self) -> float:
        """Samples per second, of all devices together."""
        return self.done / self.elapsed_s

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the end; None if unknown."""
        return (self.total - self.done) / self.samples_per_s if self.total and self.done else None

    @property
    def kernel_shares(self) -> dict[str, float]:
        """Fraction of time in kernels, by device."""
        return {device: seconds / self.elapsed_s for device, seconds in self._kernel_s.items()}

    @property
    def progress_line(self) -> str:
        """Progress of the samples in one line of text."""
        name = f"{NAMES.get(self.kind, self.kind)}{' that were disturbed' if self.again else ''}"
        failed = f" ({self.failed} failed)" if self.failed else ""
        line = f"{name}: {progress_text(self.done, self.total, self.elapsed_s)}{failed}"
        if shares := self.kernel_shares:
            line += f", {sum(shares.values()) / len(shares):.0%} of the time in kernels"
        return f"{line}; {self.words}" if self.words else line


def progress_text(done: int, total: int | None, seconds: float) -> str:
    """Progress in words, with rate and remaining time: "160 of 400, 10.2 a second, 24 s left"."""
    parts = f"{done}" if total is None else f"{done} of {total}"
    if not done or seconds <= 0:
        return parts
    a_second = done / seconds
    rate = f"{a_second:.1f} a second" if a_second >= 0.1 else f"{60 * a_second:.1f} a minute"
    left = "" if total is None else f", {duration_text((total - done) / a_second)} left"
    return f"{parts}, {rate}{left}"


def duration_text(seconds: float) -> str:
    """Duration in words: "89 s", "2 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
