"""Budget: how long a search may run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from shardcore.core import progress
from shardcore.core.validation import Record
from shardcore.core.validation import number_within as in_range
from shardcore.io.schema import MOST_INT

MOST_THREADS = 1024
WITHIN, MOST_EVALS = 1e-3, 20_000_000
"""The end of a search without a budget: its `within`, and its evaluations at the latest."""
FEWEST_EVALS, LATE_SHARE = 800_000, 0.75
"""A search ends by `within` after so many evaluations at the earliest, and by what this share of all brought."""
_KNOWN = 0.1
"""Share of the evaluations after which their rate is known."""


def usable_cores() -> int:
    """Number of cores that this process may use: by its affinity, and by the quota of its container."""
    there = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Without a quota the file says "max", or is not there.
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        there = min(there, math.ceil(int(quota) / int(period)))
    return min(max(1, there), MOST_THREADS)


@dataclass(frozen=True)
class Budget(Record):
    """Limits of a search. None means no limit.

    evals: plans priced, or changes of plans tried.
    seconds: wall time. Compiling is not counted.
    threads: cores that a search may use. None: all that this process may.
    within: share of the cost. A search by annealing ends once three quarters of its evaluations brought less.

    A search returns its best plan once any limit is reached.
    It always returns one, however small the budget.
    Without a limit in seconds a run is repeatable, with any number of threads.
    """

    evals: Annotated[int | None, in_range(1, MOST_INT)] = None
    seconds: Annotated[float | None, in_range(0, MOST_INT, above=True)] = None
    threads: Annotated[int | None, in_range(1, MOST_THREADS)] = None
    within: Annotated[float | None, in_range(0, 1)] = None

    def with_default_end(self, evals: int = MOST_EVALS, within: float | None = WITHIN) -> Budget:
        """The budget itself if it limits evaluations or seconds, else one with default limits."""
        if self.evals or self.seconds:
            return self
        return replace(self, evals=evals, within=within if self.within is None else self.within)

    @property
    def max_threads(self) -> int:
        """Number of threads that a search may start."""
        return self.threads or usable_cores()

    @property
    def threads_to_keep_busy(self) -> int:
        """Threads that each round of a search should keep busy. 1 with evaluations, so that plans do not depend on
        threads.
        """
        return 1 if self.evals else self.max_threads

    def start(self) -> Meter:
        """Start the budget's clock."""
        return Meter(self, progress.clock())


@dataclass
class Meter:
    """Meter of a search's budget: evaluations and seconds used and left.

    budget: the limits.
    started_s: time of the start, by `progress.clock`.
    evals: used so far.
    reserved: of work that has begun, not yet used.
    counted_from: seconds and evaluations at the first report that had some. None: none had.
    """

    budget: Budget
    started_s: float
    evals: int = 0
    reserved: int = 0
    counted_from: tuple[float, int] | None = None

    def affordable_repeats(self, wanted: int, evals_each: int, seconds_each: float = 0.0) -> int:
        """Repeats of some work that the budget still allows, at most `wanted`.

        evals_each: evaluations of one repeat.
        seconds_each: about its seconds; 0 if unknown.
        """
        # Checked first: without an estimate of its time, a repeat may begin until then.
        if self.budget.seconds is not None and self.elapsed_s() >= self.budget.seconds:
            return 0
        if self.budget.seconds is not None and seconds_each > 0:
            # The estimate may be wrong: callers ask again after each chunk of work.
            wanted = min(wanted, int((self.budget.seconds - self.elapsed_s()) / seconds_each))
        if self.budget.evals is None:
            return wanted
        # Whole repeats only. The last work may have used more than there was.
        return max(0, min(wanted, (self.budget.evals - self.evals - self.reserved) // evals_each))

    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return progress.clock() - self.started_s

    def share_used(self) -> float:
        """Used share of the budget, from 0 to 1, by the limit that is closer. 0 without a limit."""
        of_evals = self.evals / self.budget.evals if self.budget.evals is not None else 0.0
        of_seconds = self.elapsed_s() / self.budget.seconds if self.budget.seconds is not None else 0.0
        return min(1.0, max(of_evals, of_seconds))

    def remaining_s(self) -> float | None:
        """Estimated seconds until the budget is used. None without limits, or if the rate is not known yet."""
        # Seconds are the nearer limit: what is left is known, not estimated.
        if self.budget.seconds is not None and self.share_used() * self.budget.seconds <= self.elapsed_s():
            return max(0.0, self.budget.seconds - self.elapsed_s())
        # A search that ends by its gains ends long before its last evaluation.
        if self.budget.evals is None or self.budget.within is not None or not self.evals:
            return None
        # Evaluations are. Their rate leaves out what came before the first ones, as that comes only once.
        self.counted_from = self.counted_from or (self.elapsed_s(), self.evals)
        began_s, before = self.counted_from
        counted, left = self.evals - before, max(0, self.budget.evals - self.evals)
        return (
            (self.elapsed_s() - began_s) * left / counted if counted >= _KNOWN * self.budget.evals else None
        )

    def report_progress(self, phase: str, best_ms: float = math.inf) -> None:
        """Report a search's progress to its listeners (see shardcore.core.progress).

        phase: present work, in a few words.
        best_ms: cost of the best plan so far, infinite before the first.
        """
        progress.report(phase, best_ms if best_ms < math.inf else None, self.remaining_s())

    @contextmanager
    def enforced_deadline(self, spare_s: float = 0.0) -> Iterator[None]:
        """Context that ends work within by progress.OutOfTime, `spare_s` seconds before the budget ends."""
        end_s = math.inf if self.budget.seconds is None else self.started_s + self.budget.seconds - spare_s
        with progress.deadline(end_s):
            yield

    def has_time(self, seconds: float) -> bool:
        """Tell if the budget has `seconds` left. Always true without a limit in seconds."""
        return self.budget.seconds is None or self.elapsed_s() + seconds <= self.budget.seconds

    def has_budget_left(self) -> bool:
        """Tell if the budget allows one more evaluation."""
        return self.affordable_repeats(1, 1) > 0
