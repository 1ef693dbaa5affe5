"""Measured samples as timings of a hardware profile: how far it errs on them, and what it is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.cost.collective_fit import rank_bytes
from shardcore.cost.features import WIDTH_CLASSES
from shardcore.cost.known_errors import law_uncertainties
from shardcore.cost.profile import Profile
from shardcore.cost.profile_fit import EXCHANGES, OPS, Predictor, Timing
from shardcore.cost.profile_law import MS_PER_US
from shardcore.io.measurements import CollectiveSample, ComputeSample
from shardcore.step.scopes import WORLD

NARROW = WIDTH_CLASSES[0]
"""Widest shard of a narrow op, in columns. Kernels are chosen by the widest shard."""
_SHORT = {name: short for short, name in EXCHANGES.items()}
_BACK = {"reduce_scatter": "all_gather"}
"""Collectives that run backward by another."""


def sample_timings(compute: Iterable[ComputeSample], comm: Iterable[CollectiveSample]) -> list[Timing]:
    """Measured samples as timings: ops forward and backward, and collectives until their last rank is done.

    Failed samples are left out, and exchanges that a profile's law has no rates for: of ids, of other
    payloads than FP32, within groups of ranks, and of emulated links.
    """
    timings = [
        Timing(
            f"groups measured on {op.setting.hardware}",
            "",
            name,
            spread.median_ms / MS_PER_US,
            shards=op.request.shards,
            batch=op.request.batch,
            optimizer=op.setting.optimizer,
        )
        for op in compute
        if op.forward is not None and op.backward is not None
        for name, spread in (("fwd", op.forward), ("bwd", op.backward))
    ]
    for sample in comm:
        r = sample.request
        plain = r.collective in _SHORT and r.payload == "fp32" and r.group == WORLD and not r.emulated
        for direction in r.definition.directions if plain and sample.error is None else ():
            collective = _BACK.get(r.collective, r.collective) if direction == "backward" else r.collective
            ms = max(spread.median_ms for spread in getattr(sample, direction))
            if ms > 0:  # else it ended before its last rank started
                timings.append(
                    Timing(
                        f"exchanges measured on {sample.setting.hardware}",
                        "",
                        _SHORT[collective],
                        ms / MS_PER_US,
                        sent=tuple(rank_bytes(sample).tolist()),
                        hosts=r.hosts,
                    )
                )
    return timings


@dataclass(frozen=True)
class ProfileCheck:
    """Measured against predicted times of one kind of op or collective.

    kind: kind of op with its setting and widths, or of collective.
    n: timings.
    ratio: measured over predicted, median. low, high: quartiles.
    error: mean of |measured - predicted| / measured.
    expected: relative error that the profile's law leaves unexplained.
    """

    kind: str
    n: int
    ratio: float
    low: float
    high: float
    error: float
    expected: float

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.n} timings, measured {self.ratio:.2f} times the prediction (half of them "
            f"{self.low:.2f} to {self.high:.2f}), mean error {self.error:.0%}; the profile expects ±{self.expected:.0%}"
        )


def check_profile(profile: Profile, timings: Sequence[Timing]) -> list[ProfileCheck]:
    """Compare a hardware profile's predictions with timings, by kind of op or collective. [] without timings."""
    if not timings:
        return []
    predicted_us = Predictor(timings).times_us(profile.rate_values)
    measured_us = np.array([t.time_us for t in timings])
    of_ops, of_exchanges = law_uncertainties(profile)
    kinds: dict[str, list[int]] = {}
    for i, timing in enumerate(timings):
        kinds.setdefault(_timing_kind(timing), []).append(i)
    of_kinds = []
    for kind, of in sorted(kinds.items()):
        low, ratio, high = np.quantile(measured_us[of] / predicted_us[of], (0.25, 0.5, 0.75)).tolist()
        error = float(np.abs(predicted_us[of] / measured_us[of] - 1).mean())
        expected = of_ops if timings[of[0]].op in OPS else of_exchanges
        of_kinds.append(ProfileCheck(kind, len(of), ratio, low, high, error, expected))
    return of_kinds


def _timing_kind(timing: Timing) -> str:
    if timing.op in EXCHANGES:
        return f"{EXCHANGES[timing.op].replace('_', '-')} of {len(timing.sent)} on {timing.hosts} hosts"
    widths, precision = [s.width for s in timing.shards], timing.shards[0].table.precision
    narrow, wide = min(widths) <= NARROW, max(widths) > NARROW
    direction = {"fwd": "forward", "bwd": "backward"}.get(timing.op, timing.op)
    sides = "mixed" if narrow and wide else "wide" if wide else "narrow"
    return f"{precision} {timing.optimizer} {direction}, {sides} groups"
