"""How far work of many parts is: the rate, the time left, and of samples the share of time in kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

NAMES = {"compute": "groups", "comm": "exchanges", "steps": "steps of plans"}
"""Words for samples, by kind."""


class Tally:
    """Samples of a kind, or parts of other work, that are done.

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
        """Count samples of a device, and its seconds in kernels if they are known."""
        self.done += samples
        self.by_device[device] += samples
        if kernel_s is not None:
            self._kernel_s[device] += kernel_s

    @property
    def elapsed_s(self) -> float:
        return max(1e-6, self._clock() - self._began)

    @property
    def share(self) -> float:
        """Share that is done. 0 if the total is not known, 1 if it is 0."""
        return self.done / self.total if self.total else float(self.total == 0)

    @property
    def rate(self) -> float:
        """Samples a second, of all devices together."""
        return self.done / self.elapsed_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at this rate. None: not known."""
        return (self.total - self.done) / self.rate if self.total and self.done else None

    @property
    def kernel_shares(self) -> dict[str, float]:
        """Share of each device's time in kernels."""
        return {device: seconds / self.elapsed_s for device, seconds in self._kernel_s.items()}

    @property
    def line(self) -> str:
        """The progress in one line."""
        name = f"{NAMES.get(self.kind, self.kind)}{' that were disturbed' if self.again else ''}"
        failed = f" ({self.failed} failed)" if self.failed else ""
        line = f"{name}: {pace(self.done, self.total, self.elapsed_s)}{failed}"
        if shares := self.kernel_shares:
            line += f", {sum(shares.values()) / len(shares):.0%} of the time in kernels"
        return f"{line}; {self.words}" if self.words else line


def pace(done: int, total: int | None, seconds: float) -> str:
    """Parts that are done, their rate and the time left: "160 of 400, 10.2 a second, 24 s left"."""
    parts = f"{done}" if total is None else f"{done} of {total}"
    if not done or seconds <= 0:
        return parts
    a_second = done / seconds
    rate = f"{a_second:.1f} a second" if a_second >= 0.1 else f"{60 * a_second:.1f} a minute"
    left = "" if total is None else f", {duration((total - done) / a_second)} left"
    return f"{parts}, {rate}{left}"


def duration(seconds: float) -> str:
    """Seconds in words: "89 s", "2 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
