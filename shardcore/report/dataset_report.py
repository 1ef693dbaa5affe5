"""Coverage, noise and repeatability of a dataset of measurements."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from shardcore.io.dataset import has_reference_op
from shardcore.io.measurements import CollectiveSample, ComputeSample
from shardcore.io.replays import ReplaySet
from shardcore.io.traced_samples import TracedSample
from shardcore.report.figures import Figure, figure_with_panels
from shardcore.step.memory import size_text
from shardcore.step.scopes import WORLD


def dataset_summary(
    samples: Sequence[ComputeSample], repeats: Sequence[Sequence[ComputeSample]]
) -> list[tuple[str, str]]:
    """Coverage, noise and repeatability of compute samples: rows of name and value.

    repeats: timings of each sample that was timed several times, in order of time.

    Spread is the interquartile range of forward + backward over their median. Two timings agree if they
    differ by less than √2 times their relative confidence interval.
    """
    timed = [s for s in samples if s.error is None]
    rows = [("samples", f"{len(timed)} timed, {len(samples) - len(timed)} failed")]
    if timed:
        shards = [x for s in timed for x in s.request.shards]
        rows += [
            ("shards an op", _range_text([len(s.request.shards) for s in timed])),
            ("widths", _range_text([x.width for x in shards])),
            (
                "shard weights",
                f"{size_text(min(x.bytes for x in shards))} to {size_text(max(x.bytes for x in shards))}",
            ),
            ("row ranges", f"{np.mean([not x.has_all_rows for x in shards]):.0%} of shards"),
            ("batches", ", ".join(map(str, sorted({s.request.batch for s in timed})))),
            ("total ms", _range_text([s.total_ms for s in timed])),
            ("repeats", _range_text([s.forward.repeats for s in timed if s.forward])),
            ("spread of one sample's repeats", _deciles_text([_relative_spread(s) for s in timed])),
            ("slowdown of the machine (1: usual)", _range_text([s.slowdown for s in timed])),
        ]
        if known := [s.relative_ci for s in timed if s.relative_ci and np.isfinite(s.relative_ci)]:
            rows += [("a median is known to", _deciles_text(known))]
    # The reference op is timed throughout. It shows drift, not repeatability.
    if again := repeats[has_reference_op(repeats) :]:
        pairs = [(a, b) for group in again for a, b in itertools.pairwise(group)]
        # total_ms is already corrected for slowdown: the ratio of slowdowns gives back raw times.
        apart = [b.measured_at - a.measured_at for a, b in pairs]
        clock = [b.slowdown / a.slowdown for a, b in pairs]
        ratios = np.array([b.total_ms / a.total_ms for a, b in pairs])
        # √2: the difference of two independent errors of equal size.
        known_to = 2**0.5 * np.array([max(a.relative_ci or 0.0, b.relative_ci or 0.0) for a, b in pairs])
        rows += [
            ("samples timed again", f"{len(again)}, {np.median(apart) / 60:.0f} minutes apart (median)"),
            ("difference of two timings", _deciles_text(abs(ratios - 1))),
            ("the same as the clock showed them", _deciles_text(abs(ratios * clock - 1))),
            ("agree within √2 × what they are known to", f"{np.mean(abs(ratios - 1) <= known_to):.0%}"),
        ]
    if len(again) < len(repeats):
        reference = np.array([s.total_ms for s in repeats[0]])
        clock = reference * [s.slowdown for s in repeats[0]]
        rows += [
            ("reference op: timings", str(len(reference))),
            ("reference op: drift as the clock showed it", f"{clock.max() / clock.min() - 1:.0%}"),
            (
                "reference op: deviation at the usual speed",
                _deciles_text(abs(reference / np.median(reference) - 1)),
            ),
        ]
    return rows


def exchange_summary(samples: Sequence[CollectiveSample]) -> list[tuple[str, str]]:
    """Coverage and noise of collectives: rows of name and value."""
    timed = [s for s in samples if s.error is None]
    kinds = Counter(
        f"{r.collective}{f' {r.group}' * (r.group != WORLD)} {r.payload}" for r in (s.request for s in timed)
    )
    emulated = Counter(
        f"{s.request.hosts} {s.request.emulated.description}" for s in timed if s.request.emulated
    )
    rows = [("exchanges", f"{len(timed)} timed, {len(samples) - len(timed)} failed")]
    if timed:
        transfers = [
            x
            for s in timed
            for direction in (s.forward, s.backward)
            if direction
            for x in direction
            if x.median_ms > 0
        ]
        rows += [
            ("of them", ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())),
            ("ranks", _range_text([len(s.request.widths) for s in timed])),
            ("columns a rank", _range_text([w for s in timed for w in s.request.widths])),
            ("transfer ms", _range_text([x.median_ms for x in transfers])),
            (
                "spread of one transfer's repeats",
                _deciles_text([(x.q3_ms - x.q1_ms) / x.median_ms for x in transfers]),
            ),
            *((f"over {words}", f"{n} exchanges") for words, n in sorted(emulated.items())),
            ("more ranks than cores", f"{sum(s.oversubscribed for s in timed)} exchanges"),
        ]
    return rows


def step_summary(replay_sets: Sequence[ReplaySet]) -> list[tuple[str, str]]:
    """Coverage and noise of replayed steps: rows of name and value."""
    costs = [cost for one in replay_sets for cost in one.costs.values()]
    kinds = Counter(
        name
        for one in replay_sets
        for plan in one.plans.values()
        for name in dict.fromkeys(p.kind for p in plan.placements)
    )
    problems = sum(
        all(one.problem != other.problem for other in replay_sets[:i]) for i, one in enumerate(replay_sets)
    )
    return [
        ("steps", f"{len(costs)} plans of {problems} problems"),
        ("of them with shards of kind", ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())),
        ("devices", _range_text([len(one.problem.topology) for one in replay_sets])),
        ("step ms", _range_text([c.total_ms for c in costs])),
        (
            "spread of one step's repeats",
            _deciles_text([(c.step.q3_ms - c.step.q1_ms) / c.step.median_ms for c in costs]),
        ),
        ("more devices than cores", f"{sum(c.oversubscribed for c in costs)} plans"),
    ]


def traced_summary(samples: Sequence[TracedSample]) -> list[tuple[str, str]]:
    """Coverage of traced steps of jobs: rows of name and value."""
    return [
        (
            "traced steps",
            ", ".join(f"{n} of {job}" for job, n in Counter(x.job for x in samples).most_common()),
        ),
        ("their ranks", _range_text([len(step.ranks) for sample in samples for step in sample.steps])),
        ("their ms without tracing", _range_text([sample.step_ms for sample in samples])),
    ]


_COVERAGE = {
    "title": "coverage",
    "xlabel": "shards an op",
    "ylabel": "forward + backward ms",
    "yscale": "log",
}
_NOISE = {
    "title": "noise of repeats",
    "xlabel": "ms",
    "ylabel": "interquartile range, % of median",
    "xscale": "log",
    "yscale": "log",
}
_DRIFT = {
    "title": "drift: how slow the machine was",
    "xlabel": "minutes",
    "ylabel": "slowdown, 1 is usual",
}
_AGAIN = {
    "title": "last against first timing of a sample",
    "xlabel": "ms",
    "ylabel": "difference, %",
    "xscale": "log",
}


def dataset_figure(
    samples: Sequence[ComputeSample], repeats: Sequence[Sequence[ComputeSample]], title: str
) -> Figure:
    """Coverage, noise, drift and repeatability of a dataset, one panel each."""
    timed = [s for s in samples if s.error is None]
    figure, [coverage, noise, drift, again] = figure_with_panels((11, 8), 2, 2)
    figure.suptitle(title)
    if not timed:
        figure.text(0.5, 0.5, f"all {len(samples)} samples failed", ha="center")
        return figure
    began, groups = min(s.measured_at for s in timed), repeats[has_reference_op(repeats) :]
    for axes, points, labels in (
        (coverage, [(len(s.request.shards), s.total_ms) for s in timed], _COVERAGE),
        (noise, [(s.total_ms, 100 * _relative_spread(s)) for s in timed], _NOISE),
        (drift, [((s.measured_at - began) / 60, s.slowdown) for s in timed], _DRIFT),
        (again, [(g[0].total_ms, 100 * (g[-1].total_ms / g[0].total_ms - 1)) for g in groups], _AGAIN),
    ):
        axes.scatter(*np.reshape(points, (-1, 2)).T, s=6, label="all samples")
        axes.set(**labels)
    if repeats:
        usual = np.median([s.total_ms for s in repeats[0]])
        points = [((s.measured_at - began) / 60, s.total_ms * s.slowdown / usual) for s in repeats[0]]
        drift.scatter(*np.transpose(points), s=12, label="the most often timed, at the clock's slowdown")
        drift.legend()
    return figure


def _relative_spread(sample: ComputeSample) -> float:
    return sum(x.q3_ms - x.q1_ms for x in (sample.forward, sample.backward) if x) / sample.total_ms


def _range_text(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, median {np.median(values):.4g}"


def _deciles_text(values: Sequence[float] | np.ndarray) -> str:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return f"{low:.1%} / {middle:.1%} / {high:.1%} (10th / 50th / 90th percentile)"
