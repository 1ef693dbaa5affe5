"""Does a plan take as much memory as is counted? Peaks of training steps in TorchRec's real processes.

    python tests/torchrec/memory_peaks.py --plans 20 --first 800
    python tests/torchrec/memory_peaks.py --modules 40          with a dense part, under each of TorchRec's pipelines

`peaks` says how plans are drawn, and what is measured. The peak of warm steps is compared with what `memory`
counts; with --modules, with the dense part's memory as `measured_job` finds it. Exits 1 if a count is off by more than
is promised.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))

import peaks

from shardcore import report
from shardcore.step import memory

AT_ONCE = 5
"""Models that are trained one after the other by the same processes."""
MODULE_LIMITS = 0.01, 0.05
"""Distances of a count below and above the peak that are allowed with a dense part, as shares of it."""


def plans(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each drawn plan. Plans of one shape share processes."""
    rows = {}
    for shape in dict.fromkeys(peaks.SHAPES):
        of_shape = [s for s in seeds if peaks.SHAPES[s % len(peaks.SHAPES)] == shape]
        rows |= {row["seed"]: row for row in (peaks.compared(of_shape) if of_shape else ())}
    return [rows[seed] for seed in seeds]


def modules(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each drawn model with a dense part."""
    rows = []
    for at in range(0, len(seeds), AT_ONCE):
        given = [peaks.drawn_module(seed) for seed in seeds[at : at + AT_ONCE]]
        for seed, (_, plan, _), steps in zip(seeds[at:], given, peaks.measured(given), strict=False):
            rows.append(peaks.counted_of(peaks.counted_module(seed), plan, steps))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("plans", 20), ("modules", 0), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    seeds = range(args.first, args.first + (args.modules or args.plans))
    rows = (modules if args.modules else plans)(seeds)
    below, above = MODULE_LIMITS if args.modules else (peaks.BELOW, peaks.ABOVE)
    shown, each = [], []
    for row in rows:
        fullest, off = int(np.argmax(row["peak_bytes"])), peaks.off(row, "used_bytes")
        each += off
        kinds = ", ".join(row["kinds"]) + ("; sequences" if row["sequences"] else "")
        peak = memory.size_text(row["peak_bytes"][fullest])
        shown.append((row["problem"], kinds, row["phases"][fullest], peak, f"{off[fullest]:+.1%}"))
    print(report.text_table(("plan", "kinds", "phase", "peak of the fullest", "counted"), shown))
    within = sum(-below <= share <= above for share in each)
    print(
        f"counted: {min(each):+.1%} to {max(each):+.1%}, {np.median(each):+.1%} in the median; "
        f"{within} of {len(each)} devices within limits"
    )
    sys.exit(within < len(each))


if __name__ == "__main__":
    main()
