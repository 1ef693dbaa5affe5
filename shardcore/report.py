"""Tables and figures for people; pure: data in, text or a matplotlib figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.memory import gib
from shardcore.types import ComputeSample

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; the first left, the others right."""
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def percent_change(new: float, old: float) -> str:
    return f"{100 * (new - old) / old:+.1f}%" if old > 0 else "-"


def predicted_against_measured(measured_ms: np.ndarray, predicted_ms: np.ndarray, title: str) -> Figure:
    """Scatter on log axes with the line of equality and ±10%."""
    figure, axes = _axes(title)
    low, high = (f(np.concatenate([measured_ms, predicted_ms])) for f in (np.min, np.max))
    line = np.array([low * 0.9, high * 1.1])
    axes.fill_between(line, line * 0.9, line * 1.1, alpha=0.2, label="±10%")
    axes.plot(line, line, linewidth=1)
    axes.scatter(measured_ms, predicted_ms, s=8)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    axes.legend()
    return figure


def curves(rows: Sequence[Mapping[str, Any]], metric: str, title: str) -> Figure:
    """One metric over epochs, a line for each "model" of the rows."""
    figure, axes = _axes(title)
    for model in dict.fromkeys(r["model"] for r in rows):
        points = [(r["epoch"], r[metric]) for r in rows if r["model"] == model and metric in r]
        axes.plot(*zip(*points, strict=True), label=model)
    axes.set(xlabel="epoch", ylabel=metric)
    axes.legend()
    return figure


def dataset_summary(samples: Sequence[ComputeSample], repeats: Sequence[Sequence[ComputeSample]]) -> list[tuple[str, str]]:
    """What a dataset of compute samples covers, how noisy it is, and how well it repeats: rows of name and value.

    repeats: the timings of each sample that was timed several times, in the order of time. Spread is the interquartile range of
    forward + backward over their median; drift is the largest timing of the most often timed sample over its smallest.
    """
    timed = [s for s in samples if s.error is None]
    rows = [("samples", f"{len(timed)} timed, {len(samples) - len(timed)} failed")]
    if timed:
        shards = [x for s in timed for x in s.request.shards]
        rows += [("shards an op", _range([len(s.request.shards) for s in timed])), ("widths", _range([x.width for x in shards])),
                 ("shard weights", f"{gib(min(x.bytes for x in shards))} to {gib(max(x.bytes for x in shards))}"),
                 ("row ranges", f"{np.mean([not x.full_rows for x in shards]):.0%} of shards"),
                 ("total ms", _range([_total(s) for s in timed])),
                 ("spread of one sample's repeats", _deciles([_spread(s) for s in timed])),
                 ("disturbed (spread above 25%)", f"{np.mean([_spread(s) > 0.25 for s in timed]):.1%} of samples")]
    if repeats:
        control = [_total(s) for s in repeats[0]]
        pairs = [abs(_total(b) / _total(a) - 1) for group in repeats for a, b in zip(group[:-1], group[1:], strict=True)]
        rows += [("drift of the control sample", f"{max(control) / min(control) - 1:.1%} over {len(control)} timings"),
                 ("samples timed again", str(len(repeats))), ("difference of two timings", _deciles(pairs))]
    return rows


def dataset_figure(samples: Sequence[ComputeSample], repeats: Sequence[Sequence[ComputeSample]], title: str) -> Figure:
    """Coverage, noise, drift and repeatability of a dataset, one panel each."""
    from matplotlib.figure import Figure

    timed = [s for s in samples if s.error is None]
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    (coverage, noise), (drift, again) = figure.subplots(2, 2)
    total = np.array([_total(s) for s in timed])
    coverage.scatter([len(s.request.shards) for s in timed], total, s=6)
    coverage.set(title="coverage", xlabel="shards an op", ylabel="forward + backward ms", yscale="log")
    noise.scatter(total, [100 * _spread(s) for s in timed], s=6)
    noise.set(title="noise of repeats", xlabel="ms", ylabel="interquartile range, % of median", xscale="log", yscale="log")
    if repeats:
        began = repeats[0][0].measured_at
        drift.plot([(s.measured_at - began) / 60 for s in repeats[0]], [_total(s) for s in repeats[0]], marker=".")
        again.scatter([_total(g[0]) for g in repeats[1:]], [100 * (_total(g[-1]) / _total(g[0]) - 1) for g in repeats[1:]], s=6)
    drift.set(title="drift: the control sample", xlabel="minutes", ylabel="ms", ylim=(0, None))
    again.set(title="last against first timing of a sample", xlabel="ms", ylabel="difference, %", xscale="log")
    return figure


def _total(sample: ComputeSample) -> float:
    return sample.forward.median_ms + sample.backward.median_ms


def _spread(sample: ComputeSample) -> float:
    return sum(x.q3_ms - x.q1_ms for x in (sample.forward, sample.backward)) / _total(sample)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, median {np.median(values):.4g}"


def _deciles(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return f"{low:.1%} / {middle:.1%} / {high:.1%} (10th / 50th / 90th percentile)"


def _axes(title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
