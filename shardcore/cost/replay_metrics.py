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
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardcore.core.step_cost import StepCost
from shardcore.cost.known_errors import USUAL_ERRORS, known_model_errors
from shardcore.cost.metrics import MeanInterval, kendall_tau, mape, mean_interval
from shardcore.cost.model import CostModel, price
from shardcore.io.measurements import TimingSpread
from shardcore.io.replays import ReplaySet
from shardcore.step.lower import lower

OURS, RANDOM = "portfolio", "random"
FEWEST = 5
"""The fewest problems on which a challenger can choose surely worse than a champion."""


@dataclass(frozen=True)
class PlanReplay:
    """A plan that was priced by a model and replayed.

    plan: its name. Equal plans of several algorithms share one.
    predicted_ms, replayed_ms: ms of a step.
    noise_ms: half the 95% interval of replayed_ms.
    explained_ms: mean absolute error of predicted_ms that the model's errors of ops and exchanges explain.
    """

    problem: str
    algorithm: str
    plan: str
    predicted_ms: float
    replayed_ms: float
    noise_ms: float
    explained_ms: float = 0.0


@dataclass(frozen=True)
class SharderComparison:
    """An algorithm against ours, on the problems where both have a plan. Several plans count by their mean.

    predicted: its predicted cost over ours, the mean over problems.
    cost: its replayed cost over ours.
    losses: by problem, the share by which ours was slower, beyond noise.
    """

    problems: int
    predicted: float
    cost: MeanInterval
    losses: Mapping[str, float]


def median_noise_ms(step: TimingSpread) -> float:
    """Half the 95% interval of a median step time, from the quartiles of its repeats.

    As for the notches of box plots, errors are taken as normal (McGill, Tukey, Larsen 1978).
    """
    # sd = IQR / 1.349; a median's standard error is 1.2533 sd / sqrt(n); 1.96 for 95%.
    return 1.96 * 1.2533 / 1.349 * (step.q3_ms - step.q1_ms) / step.repeats**0.5


def judge_replays(replayed: Sequence[ReplaySet], model: CostModel, ids: bool = True) -> list[PlanReplay]:
    """One record of predicted and replayed ms for every replayed plan. Times are scaled to a slowdown of 1.

    ids: True if both times include the ms that ids add to a step.
    """
    # A model whose few held-out samples err by less than usual is not known to be better.
    usual, rows = np.maximum(known_model_errors(model), USUAL_ERRORS), []
    for one in replayed:
        own = model.for_problem(one.problem)
        # fits=False: a replay ran, whatever today's count of memory says.
        steps = {name: lower(plan, one.problem, fits=False) for name, plan in one.plans.items()}
        predicted = {name: price(step, own) for name, step in steps.items()}
        ops_ms = {name: max(cost.compute_ms) for name, cost in predicted.items()}
        # A model predicts a machine at its usual speed.
        costs = {name: cost.at_usual_speed() for name, cost in one.costs.items()}
        rows += [
            PlanReplay(
                problem=one.problem.name,
                algorithm=algorithm,
                plan=name,
                predicted_ms=_step_ms(predicted[name], ids),
                replayed_ms=_step_ms(costs[name], ids),
                noise_ms=median_noise_ms(costs[name].step),
                explained_ms=float(
                    usual @ (ops_ms[name], predicted[name].total_ms - predicted[name].dense_ms - ops_ms[name])
                ),
            )
            for algorithm, name in one.made
        ]
    return rows


def _step_ms(cost: StepCost, ids: bool) -> float:
    # Ids add equally much on every device.
    return cost.total_ms - (0.0 if ids else max(cost.input_ms))


def csv_rows(replays: Sequence[PlanReplay]) -> list[dict[str, Any]]:
    return [{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in replays]


def distinct_plans(replays: Sequence[PlanReplay]) -> list[PlanReplay]:
    """The records with each plan of each problem once."""
    # A later record of a plan replaces an earlier one: they are the same replay.
    return list({(r.problem, r.plan): r for r in replays}.values())


def mean_error_and_bias(replays: Sequence[PlanReplay]) -> tuple[float, float]:
    """Mean absolute error and bias of predicted step times, in percent of the replayed ones."""
    predicted, replayed = _predicted_and_replayed_ms(replays)
    return mape(predicted, replayed), float(100 * np.mean(predicted / replayed - 1))


def quality_by_problem(replays: Sequence[PlanReplay], ours: str = OURS) -> dict[str, np.ndarray]:
    """Quality of a model's ranking of the replayed plans of each problem, as arrays [N] by name.

    error: mean absolute error in percent.
    kendall_tau: rank correlation of predicted and replayed.
    tau_beyond_noise: as Kendall's tau, over the pairs that differ beyond noise only.
    regret: percent by which the plan that the model prefers is slower than the best.
    ours_regret: the same for the plan of `ours`.

    nan where a problem has too few plans.
    """
    figures = []
    for rows_of_problem in _group_by_problem(replays).values():
        # Algorithms may find equal plans, which must not count twice in a rank correlation.
        plans = distinct_plans(rows_of_problem)
        predicted, replayed = _predicted_and_replayed_ms(plans)
        best_ms = replayed.min()
        # From all records, not distinct plans: an equal plan may be listed under another algorithm.
        our_ms = [r.replayed_ms for r in rows_of_problem if r.algorithm == ours]
        figures.append(
            (
                mape(predicted, replayed),
                kendall_tau(predicted, replayed) if len(plans) > 1 else np.nan,
                _tau_beyond_noise(plans),
                # The plan that the model would choose, against the best one replayed.
                100 * (replayed[predicted.argmin()] / best_ms - 1),
                100 * (np.mean(our_ms) / best_ms - 1) if our_ms else np.nan,
            )
        )
    names = ("error", "kendall_tau", "tau_beyond_noise", "regret", "ours_regret")
    return dict(zip(names, np.reshape(figures, (-1, len(names))).T, strict=True))


def compare_sharders(replays: Sequence[PlanReplay]) -> dict[str, SharderComparison]:
    """Each algorithm against ours on the problems that both solved, by name."""
    problems = _group_by_problem(replays)
    comparisons = {}
    for name in dict.fromkeys(r.algorithm for r in replays):
        # Only problems that both solved can be compared.
        both = {
            problem: [_mean_ms(own, algorithm) for algorithm in (name, OURS)]
            for problem, own in problems.items()
            if {name, OURS} <= {r.algorithm for r in own}
        }
        if not both:
            continue
        # [3, N] predicted, replayed and noise ms.
        theirs, ours = np.moveaxis(np.array([*both.values()]), 0, -1)
        # Two independent errors add in quadrature.
        slower = ours[1] - theirs[1] > np.hypot(theirs[2], ours[2])
        more = (ours[1] / theirs[1] - 1).tolist()
        comparisons[name] = SharderComparison(
            problems=len(both),
            predicted=float(np.mean(theirs[0] / ours[0])),
            cost=mean_interval(theirs[1] / ours[1]),
            losses={problem: more[i] for i, problem in enumerate(both) if slower[i]},
        )
    return comparisons


def _mean_ms(replays: Sequence[PlanReplay], algorithm: str) -> np.ndarray:
    """[3] mean predicted, replayed and noise ms of an algorithm's plans."""
    own = [(r.predicted_ms, r.replayed_ms, r.noise_ms) for r in replays if r.algorithm == algorithm]
    return np.mean(own, axis=0)


def flat_metrics(replays: Sequence[PlanReplay]) -> dict[str, float]:
    """Metrics of replayed plans, by name. Unknown values are left out.

    Errors, bias, regrets and noise are in percent. Costs are relative to ours.

    explained_mape, explained_bias: the largest error and bias that the model's errors of ops and exchanges, the noise
      of the replays and chance explain.
    """
    plans, problems = distinct_plans(replays), len(_group_by_problem(replays))
    _, replayed = _predicted_and_replayed_ms(plans)
    noise, explained = np.mean([(r.noise_ms, r.explained_ms) for r in plans] / replayed[:, None], axis=0)
    # Mean absolute errors of a normal distribution: 0.8 of its deviation, of which the noise is 1.96.
    usual = math.hypot(100 * explained, 100 * noise * 0.8 / 1.96)
    metrics = {
        "problems": float(problems),
        "plans": float(len(plans)),
        "noise": float(100 * noise),
        # Plans of a problem err together, so each problem is one draw. A mean of n absolute errors deviates
        # by 0.755 / √n of itself.
        "explained_mape": usual * (1 + 1.96 * 0.755 / problems**0.5),
        # All steps may be off to one side by as much as the mean error. A mean of n draws adds chance.
        "explained_bias": usual * math.hypot(1, 1.96 * 1.25 / problems**0.5),
    }
    metrics["mape"], metrics["bias"] = mean_error_and_bias(plans)
    metrics |= {
        name: float(np.nanmean(v)) for name, v in quality_by_problem(replays).items() if np.isfinite(v).any()
    }
    for name, rival in compare_sharders(replays).items():
        if name != OURS:
            metrics |= {
                f"{name}_relative_cost": rival.cost.mean,
                f"{name}_relative_cost_low": rival.cost.low,
                f"{name}_relative_cost_high": rival.cost.high,
                f"{name}_losses": float(len(rival.losses)),
            }
    # Infinite intervals of single problems are no metrics.
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def unexplained_error(metrics: Mapping[str, float]) -> float:
    """Percentage points by which the error or the bias of replayed plans exceeds the explained one. 0 if neither
    does.
    """
    return max(
        0.0, metrics["mape"] - metrics["explained_mape"], abs(metrics["bias"]) - metrics["explained_bias"]
    )


def describe_accuracy(metrics: Mapping[str, float]) -> str:
    """Text on the error of replayed plans, how much of it is explained, and what to do about an excess."""
    all_alike = (
        f"ops ran {'slower' if metrics['bias'] > 0 else 'faster'} when they were measured than they do in steps: move "
        "data/measurements away, and `make run` on a quiet machine"
    )
    each_otherwise = (
        "steps take other time than their ops and exchanges do alone: raise measure.step_samples in params.yaml, and "
        "`make run` again"
    )
    return (
        f"error {metrics['mape']:.1f}% (bias {metrics['bias']:+.1f}%, noise {metrics['noise']:.1f}%) "
        f"on {metrics['plans']:.0f} "
        f"plans of {metrics['problems']:.0f} problems, {'beyond' if unexplained_error(metrics) else 'within'} what is "
        "expected: the model's errors on single ops and exchanges, noise and chance explain an error of up to "
        f"{metrics['explained_mape']:.1f}% and a bias of up to ±{metrics['explained_bias']:.1f}%"
    ) + f"; {all_alike if abs(metrics['bias']) > metrics['mape'] / 2 else each_otherwise}" * bool(
        unexplained_error(metrics)
    )


def challenger_rejection(challenger: Sequence[PlanReplay], champion: Sequence[PlanReplay]) -> str | None:
    """The reason why a challenger model may not replace the champion. None if it may.

    It loses if its regret or its error is larger, or its tau_beyond_noise smaller, on the same replays. The 95%
    interval of the difference has to exclude 0. FEWEST problems are needed.
    """
    new, old = quality_by_problem(challenger), quality_by_problem(champion)
    # Sign: a larger regret is worse, a larger tau is better.
    for name, words, sign, form in (
        ("regret", "regret", 1, "{:.1f}%"),
        ("tau_beyond_noise", "Kendall tau", -1, "{:.3f}"),
        ("error", "error", 1, "{:.1f}%"),
    ):
        # The same problems in both, so differences are paired.
        worse_by = sign * (new[name] - old[name])
        # Worse beyond doubt: even the low end of the interval is above 0.
        if np.isfinite(worse_by).sum() >= FEWEST and (by := mean_interval(worse_by)).low > 0:
            ours, theirs = (form.format(np.nanmean(x[name])) for x in (new, old))
            low, high = form.format(by.low), form.format(by.high)
            return (
                f"{words} of {ours} against {theirs} on the same replays of {len(worse_by)} problems "
                f"(worse by {low} to {high} with 95% confidence)"
            )
    return None


def _tau_beyond_noise(plans: Sequence[PlanReplay]) -> float:
    """Kendall's tau over pairs of plans that differ beyond noise: the share ranked right minus the share ranked
    wrong.
    """
    # Pairs within noise tell nothing: either order would be right.
    agree = [
        np.sign(a.predicted_ms - b.predicted_ms) * np.sign(a.replayed_ms - b.replayed_ms)
        for i, a in enumerate(plans)
        for b in plans[:i]
        if abs(a.replayed_ms - b.replayed_ms) > np.hypot(a.noise_ms, b.noise_ms)
    ]
    return float(np.mean(agree)) if agree else np.nan


def _predicted_and_replayed_ms(replays: Sequence[PlanReplay]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and replayed step ms of plans, [P] each."""
    return np.array([r.predicted_ms for r in replays]), np.array([r.replayed_ms for r in replays])


def _group_by_problem(replays: Sequence[PlanReplay]) -> dict[str, list[PlanReplay]]:
    """Records of replayed plans, by problem."""
    by_problem = defaultdict(list)
    for row in replays:
        by_problem[row.problem].append(row)
    return by_problem
