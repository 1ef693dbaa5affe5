"""Steps of MLPerf's systems under hardware profiles.

A published step of MLPerf is the time between evaluations over the steps of it: embeddings, dense part, optimizer and
input. A predicted one has the embeddings of our plan and the dense part, one after the other.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from bench.published_cards import BASE, base_profile, shipped_profile_of_card
from bench.workloads import FP16
from shardcore import report
from shardcore.core.types import Problem
from shardcore.cost.model import price
from shardcore.cost.profile import SPEC, Profile
from shardcore.cost.profile_fit import scale_profile
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.step.lower import lower
from shardcore.tables.public import public_pool

STEP = "training step (DLRM-DCNv2, whole model)"
"""Op of MLPerf's steps in tables of timings."""
_MLPS = (13, 512, 256, 128), (27 * 128, 1024, 1024, 512, 256, 1)
"""Widths of the layers of DLRM-DCNv2's MLPs. Between them is the cross network of 26 embeddings and the first one's."""
_CROSS = 3, 2 * 27 * 128, 512
"""Its layers, and the shape of the two matrices of low rank of each."""
_CLOSE = 0.15
"""Relative error of a step that was wanted."""
_EVALS = 10_000


# --- MLPerf -------------------------------------------------------------------------------------------------


def dcnv2_mflops() -> float:
    """Millions of operations of DLRM-DCNv2's dense part on a sample, forward: two for each weight of a matrix."""
    weights = sum(n * m for widths in _MLPS for n, m in pairwise(widths)) + math.prod(_CROSS)
    return 2 * weights / 1e6


def steps_table(timings: Path, shipped: Mapping[str, Profile]) -> str:
    """Tables of MLPerf's systems and of those left out in turn, and sentences on how far predicted steps are right.

    Each system is priced by its card's profile. Others are left out by name.
    """
    with open(timings, encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["op"] == STEP]
    profiles = {gpu: shipped.get(shipped_profile_of_card(gpu) or "") for gpu in {row["gpu"] for row in rows}}
    left_out = Counter(row["gpu"] for row in rows if not profiles[row["gpu"]])
    rows = [row for row in rows if profiles[row["gpu"]]]
    if not rows:
        return "The file has no steps.\n"
    # Systems of one layout have one prediction.
    layouts = [(row["gpu"], *(int(row[name]) for name in ("hosts", "ranks", "B"))) for row in rows]
    found = {(gpu, *shape): _predicted_step(profiles[gpu], *shape) for gpu, *shape in dict.fromkeys(layouts)}
    steps = _Steps(
        layouts,
        np.array([float(row["time_us"]) / 1e3 for row in rows]),
        *np.transpose([found[x] for x in layouts]),
    )
    of_left_out = (
        "left out",
        "systems",
        "its own rate",
        "rate of the others",
        "steps by that",
        "pairs in order",
    )
    headers = ("system", "devices", "batch", "published step, ms", "embeddings, ms", "step, ms", "error")
    cells = [
        (
            row["source"].split("/results/")[-1].split("/")[0],
            f"{hosts} x {ranks // hosts} {gpu}",
            str(batch),
            f"{published:.2f}",
            f"{embeddings:.2f}",
            f"{ms:.2f} ±{band:.0%}",
            f"{ms / published - 1:+.0%}",
        )
        for row, (gpu, hosts, ranks, batch), published, embeddings, band, ms in zip(
            rows, layouts, steps.published_ms, steps.embeddings_ms, steps.bands, steps.ms, strict=True
        )
    ]
    rounds = [row["source"].partition("training_results_")[2].partition(" ")[0] for row in rows]
    return (
        f"{report.markdown_table(headers, cells)}\n\n"
        f"{steps.closeness_text(steps.ms)}, {(abs(steps.ms / steps.published_ms - 1) <= steps.bands).sum()} in their "
        f"band. In order, of pairs of systems that differ by more than 5%: {steps.order_text(steps.ms)}; by the "
        f"embeddings alone {steps.order_text(steps.embeddings_ms)}."
        + "".join(f" No profile is of card {gpu!r}: {n} left out." for gpu, n in left_out.items())
        + f"\n\n{report.markdown_table(of_left_out, [*steps.left_out_rows(rounds)])}\n"
    )


def _predicted_step(profile: Profile, hosts: int, ranks: int, batch: int) -> tuple[float, ...]:
    """Predicted ms of our plan on a system: of its embeddings, and of the whole step with its relative error band; and
    ms of the dense part at the first card's rate, scaled by data sheets.
    """
    topology, job = profile.topology(hosts, ranks // hosts), replace(FP16, dense_mflops=dcnv2_mflops())
    problem = Problem("mlperf", public_pool("mlperf-dlrm-dcnv2"), topology, batch, "exact_adagrad", job=job)
    model = profile.cost_model().for_problem(problem)
    workload = lower(SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=_EVALS)), problem)
    cost = price(workload, model)
    # HugeCTR reads a batch's ids while it trains on the one before, so they delay no step.
    step_ms = cost.total_ms - max(cost.input_ms)
    first = scale_profile(base_profile(), "first", **{name: profile.rate_values[name] for name in SPEC})
    scaled_ms = cost.dense_ms * model.dense_tflops / first.rate_values["dense_tflops"]
    return step_ms - cost.dense_ms, step_ms, model.step_error_band(workload), scaled_ms


@dataclass(frozen=True)
class _Steps:
    """Steps of S systems of MLPerf, each array [S].

    layouts: card, hosts, devices and batch of each.
    embeddings_ms, ms: predicted, of the embeddings and of the whole step. bands: relative errors expected of that.
    scaled_ms: ms of the dense part at the first card's rate, scaled by data sheets.
    """

    layouts: Sequence[tuple[str, int, int, int]]
    published_ms: np.ndarray
    embeddings_ms: np.ndarray
    ms: np.ndarray
    bands: np.ndarray
    scaled_ms: np.ndarray

    def closeness_text(self, ms: np.ndarray, among: np.ndarray | slice = slice(None)) -> str:
        """Number of steps, among some, that are predicted closely."""
        is_close = abs(ms / self.published_ms - 1)[among] <= _CLOSE
        return f"{is_close.sum()} of {is_close.size} within {_CLOSE:.0%}"

    def order_text(self, ms: np.ndarray) -> str:
        """Number of pairs of systems that predicted steps have in order, of all and of pairs of two cards."""
        pairs = [
            (a[0] != b[0], (self.published_ms[i] < self.published_ms[j]) == (ms[i] < ms[j]))
            for (i, a), (j, b) in combinations(enumerate(self.layouts), 2)
            if a != b and abs(np.log(self.published_ms[i] / self.published_ms[j])) > 0.05
        ]
        between, right = np.array(pairs, bool).reshape(-1, 2).T
        return f"{right.sum()} of {len(pairs)}, between cards {right[between].sum()} of {between.sum()}"

    def left_out_rows(self, rounds: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Table rows for a card or a round left out, whose dense parts have the rate of all others.

        Rates are medians over systems, in TFLOP/s of the first card, to which data sheets scale them.
        """
        left_ms = self.published_ms - self.embeddings_ms
        # Relative to the first card's. A step that is shorter than its embeddings would need a rate above all.
        rates = np.where(left_ms > 0, self.scaled_ms / left_ms, np.inf)
        for labels in ([layout[0] for layout in self.layouts], rounds):
            for name in dict.fromkeys(labels):
                own = np.array(labels) == name
                # In a file of one card there are no others.
                others = np.median(rates if own.all() else rates[~own])
                ms = np.where(own, self.embeddings_ms + self.scaled_ms / others, self.ms)
                yield (
                    name,
                    str(own.sum()),
                    *(f"{BASE['dense_tflops'][0] * rate:.0f}" for rate in (np.median(rates[own]), others)),
                    self.closeness_text(ms, own),
                    self.order_text(ms),
                )
