"""Judge models and sharders by replays: several plans of each of many problems, run on real processes.

Figures are means over problems, however many plans each has. Plans of one problem err together. So 95%
intervals come from a bootstrap over problems (Efron 1979). Two replays differ beyond noise if they differ by
more than half their joint 95% interval.

The best plan of a problem is the best one replayed; better ones may exist. Selecting the minimum biases
regret upward, and the share of a closed gap downward.

Shapes: N problems, P plans of a problem.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.cost.metrics import kendall_tau, mape, spearman
from shardcore.io.measurements import Spread

OURS, RANDOM = "portfolio", "random"
FEWEST = 5
"""The fewest problems that can refuse a model. With fewer, a bootstrap interval means too little."""
_DRAWS = 4000


@dataclass(frozen=True)
class ReplayRecord:
    """A plan that was priced by a model and replayed.

    plan: its name. Equal plans of several algorithms share one.
    predicted_ms, replayed_ms: ms of a step.
    noise_ms: half the 95% interval of replayed_ms.
    """

    problem: str
    algorithm: str
    plan: str
    predicted_ms: float
    replayed_ms: float
    noise_ms: float


@dataclass(frozen=True)
class Interval:
    """A mean over problems with its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class SharderComparison:
    """An algorithm against ours, on the problems where both have a plan. Several plans count by their mean.

    predicted: its predicted cost over ours, the mean over problems.
    cost: its replayed cost over ours.
    gap_closed: share of its regret that ours avoids. None where it has no regret.
    losses: by problem, the share by which ours was slower, beyond noise.
    """

    problems: int
    predicted: float
    cost: Interval
    gap_closed: Interval | None
    losses: Mapping[str, float]


def noise_ms(step: Spread) -> float:
    """Half the 95% interval of a median, from the quartiles of its repeats.

    As for the notches of box plots, errors are taken as normal (McGill, Tukey, Larsen 1978).
    """
    # sd = IQR / 1.349; a median's standard error is 1.2533 sd / sqrt(n); 1.96 for 95%.
    return 1.96 * 1.2533 / 1.349 * (step.q3_ms - step.q1_ms) / step.repeats**0.5


def distinct(rows: Sequence[ReplayRecord]) -> list[ReplayRecord]:
    """Each plan of each problem once."""
    # A later record of a plan replaces an earlier one: they are the same replay.
    return list({(r.problem, r.plan): r for r in rows}.values())


def errors(rows: Sequence[ReplayRecord]) -> tuple[float, float]:
    """Mean absolute error and bias of the predictions, in percent of the replay."""
    predicted, replayed = _arrays(rows)
    return mape(predicted, replayed), float(100 * np.mean(predicted / replayed - 1))


def by_problem(rows: Sequence[ReplayRecord], ours: str = OURS) -> dict[str, np.ndarray]:
    """Quality of a model's choice among the plans of each problem. Figures are [N].

    kendall_tau, spearman: rank correlation of predicted and replayed.
    tau_beyond_noise: as Kendall's tau, over the pairs that differ beyond noise only.
    regret: percent by which the plan that the model prefers is slower than the best.
    ours_regret: the same for the plan of `ours`.

    nan where a problem has too few plans.
    """
    names = "kendall_tau", "spearman", "tau_beyond_noise", "regret", "ours_regret"
    figures: dict[str, list[float]] = {name: [] for name in names}
    for rows_of_problem in _grouped(rows).values():
        # Algorithms may find equal plans, which must not count twice in a rank correlation.
        plans = distinct(rows_of_problem)
        predicted, replayed = _arrays(plans)
        best_ms = replayed.min()
        several = len(plans) > 1
        # From all records, not distinct plans: an equal plan may be listed under another algorithm.
        our_ms = [r.replayed_ms for r in rows_of_problem if r.algorithm == ours]
        figures["kendall_tau"].append(kendall_tau(predicted, replayed) if several else np.nan)
        figures["spearman"].append(spearman(predicted, replayed) if several else np.nan)
        figures["tau_beyond_noise"].append(_tau_beyond_noise(plans))
        # The plan that the model would choose, against the best one replayed.
        figures["regret"].append(100 * (replayed[predicted.argmin()] / best_ms - 1))
        figures["ours_regret"].append(100 * (np.mean(our_ms) / best_ms - 1) if our_ms else np.nan)
    return {name: np.array(values) for name, values in figures.items()}


def rivals(rows: Sequence[ReplayRecord]) -> dict[str, SharderComparison]:
    """Every algorithm against ours, by name. Those without a common problem are left out."""
    problems = _grouped(rows)
    comparisons = {}
    for name in dict.fromkeys(r.algorithm for r in rows):
        costs, predicted, losses = [], [], {}
        for problem, own in problems.items():
            theirs, mine = ([r for r in own if r.algorithm == a] for a in (name, OURS))
            # Only problems that both solved can be compared.
            if theirs and mine:
                their_predicted_ms, their_ms, their_noise_ms = _means(theirs)
                our_predicted_ms, our_ms, our_noise_ms = _means(mine)
                predicted.append(their_predicted_ms / our_predicted_ms)
                # The best of all algorithms, so that ratios of different rivals have one base.
                costs.append((their_ms, our_ms, min(r.replayed_ms for r in own)))
                # Two independent errors add in quadrature.
                if our_ms - their_ms > math.hypot(their_noise_ms, our_noise_ms):
                    losses[problem] = our_ms / their_ms - 1
        if costs:
            their, our, best = np.array(costs).T
            # Both relative to the best plan replayed, so that problems weigh equally.
            lacked, gained = their / best - 1, (their - our) / best
            # A ratio of means, not a mean of ratios: a problem without regret would divide by 0.
            closed = bootstrap(gained, over=lacked) if name != OURS and lacked.sum() > 0 else None
            comparisons[name] = SharderComparison(
                problems=len(costs),
                predicted=float(np.mean(predicted)),
                cost=bootstrap(their / our),
                gap_closed=closed,
                losses=losses,
            )
    return comparisons


def _means(rows: Sequence[ReplayRecord]) -> list[float]:
    """Mean predicted, replayed and noise ms."""
    return np.mean([(r.predicted_ms, r.replayed_ms, r.noise_ms) for r in rows], axis=0).tolist()


def bootstrap(values: np.ndarray, over: np.ndarray | None = None) -> Interval:
    """The mean of values [N], or the ratio of their mean to the mean of `over`. nan are left out.

    With one value the interval is infinite.
    """
    known = np.isfinite(values)
    values, over = values[known], np.ones(known.sum()) if over is None else over[known]
    # One problem has no spread to draw from.
    if len(values) == 1:
        return Interval(float(values[0] / over[0]), -np.inf, np.inf)
    # A fixed seed: the same records give the same interval.
    # [draws, N] problems drawn with replacement.
    drawn = np.random.default_rng(0).integers(len(values), size=(_DRAWS, len(values)))
    below = over[drawn].mean(1)
    # A draw whose denominator is 0 has no ratio.
    means = values[drawn].mean(1)[below > 0] / below[below > 0]
    # The mean itself is not drawn. Percentiles of draws give the interval.
    return Interval(float(values.mean() / over.mean()), *map(float, np.percentile(means, [2.5, 97.5])))


def figures(rows: Sequence[ReplayRecord]) -> dict[str, float]:
    """Flat metrics. Unknown ones are left out.

    Errors, bias, regrets and noise are in percent. Costs are relative to ours.
    """
    metrics = {
        "problems": float(len(_grouped(rows))),
        "plans": float(len(distinct(rows))),
        "noise": float(100 * np.mean([r.noise_ms / r.replayed_ms for r in distinct(rows)])),
    }
    for kind, chosen in (
        ("", distinct(rows)),
        ("ours_", [r for r in rows if r.algorithm == OURS]),
        # Random plans show errors away from the plans that a search prefers.
        ("random_", [r for r in rows if r.algorithm == RANDOM]),
    ):
        if chosen:
            metrics[f"{kind}mape"], metrics[f"{kind}bias"] = errors(chosen)
    metrics |= {name: float(np.nanmean(v)) for name, v in by_problem(rows).items() if np.isfinite(v).any()}
    for name, rival in rivals(rows).items():
        if name != OURS:
            metrics |= {
                f"{name}_relative_cost": rival.cost.mean,
                f"{name}_relative_cost_low": rival.cost.low,
                f"{name}_relative_cost_high": rival.cost.high,
                f"{name}_losses": float(len(rival.losses)),
            }
            metrics |= {f"{name}_gap_closed": rival.gap_closed.mean} if rival.gap_closed else {}
    # Infinite intervals of single problems are no metrics.
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def lost(challenger: Sequence[ReplayRecord], champion: Sequence[ReplayRecord]) -> str | None:
    """The reason why a challenger may not replace a champion. None: it may.

    It loses if its regret is larger, or its tau_beyond_noise smaller, on the same replays. The 95% interval
    of the difference has to exclude 0. FEWEST problems are needed.
    """
    new, old = by_problem(challenger), by_problem(champion)
    # Sign: a larger regret is worse, a larger tau is better.
    for name, words, sign, form in (
        ("regret", "regret", 1, "{:.1f}%"),
        ("tau_beyond_noise", "Kendall tau", -1, "{:.3f}"),
    ):
        # The same problems in both, so differences are paired.
        worse_by = sign * (new[name] - old[name])
        # Worse beyond doubt: even the low end of the interval is above 0.
        if np.isfinite(worse_by).sum() >= FEWEST and (by := bootstrap(worse_by)).low > 0:
            ours, theirs = (form.format(np.nanmean(x[name])) for x in (new, old))
            low, high = form.format(by.low), form.format(by.high)
            return (
                f"{words} of {ours} against {theirs} on the same replays of {len(worse_by)} problems "
                f"(worse by {low} to {high} with 95% confidence)"
            )
    return None


def _tau_beyond_noise(plans: Sequence[ReplayRecord]) -> float:
    """Pairs ranked right minus pairs ranked wrong, as a share of the pairs that differ beyond noise."""
    # Pairs within noise tell nothing: either order would be right.
    agree = [
        np.sign(a.predicted_ms - b.predicted_ms) * np.sign(a.replayed_ms - b.replayed_ms)
        for i, a in enumerate(plans)
        for b in plans[:i]
        if abs(a.replayed_ms - b.replayed_ms) > np.hypot(a.noise_ms, b.noise_ms)
    ]
    return float(np.mean(agree)) if agree else np.nan


def _arrays(rows: Sequence[ReplayRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and replayed ms, [P]."""
    return np.array([r.predicted_ms for r in rows]), np.array([r.replayed_ms for r in rows])


def _grouped(rows: Sequence[ReplayRecord]) -> dict[str, list[ReplayRecord]]:
    """The records of each problem."""
    by_problem = defaultdict(list)
    for row in rows:
        by_problem[row.problem].append(row)
    return by_problem
