"""Is a plan that replaces another really faster? The rule of plans/gain.py, on pairs of replayed plans.

    python -m shardcore train datasets/cpu-amd-epyc --out MODEL
    python -m bench.replacements MODEL

The replays are those of bench/emulated-hosts: nine problems of six plans each, over hosts of slow links. What
exchanges take in steps is fitted without the problem that is judged. So is the calibration in the last table.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import box_replays
from shardcore import report
from shardcore.cost import neural, step_factors
from shardcore.cost.model import price_plan
from shardcore.io import replays
from shardcore.plans import gain
from shardcore.step.lower import lower

BOX = Path("bench/emulated-hosts")


@dataclass(frozen=True)
class Pair:
    """Two plans of a problem, of which the model prefers the second.

    gain: predicted.
    real_ms: the replayed difference. Above 0 the second was faster.
    """

    problem: str
    gain: gain.Gain
    real_ms: float

    @property
    def score(self) -> float:
        """The error of the difference over its standard deviation without calibration."""
        return abs(self.real_ms - self.gain.ms) * gain.CALIBRATION / self.gain.margin_ms


def pairs(model: neural.NeuralModel) -> list[Pair]:
    alone = box_replays.of_box(model, BOX)
    kept, found = replays.read_all(BOX / "steps", model.setting), []
    for one in kept:
        others = [
            (lower(x.plans[name], x.problem, fits=False), cost.at_usual_speed())
            for x in kept
            if x is not one
            for name, cost in x.costs.items()
        ]
        own = step_factors.fit(alone, others).for_problem(one.problem)
        plans = [
            (price_plan(plan, one.problem, own, fits=False), one.costs[name].total_ms)
            for name, plan in one.plans.items()
        ]
        plans.sort(key=lambda x: -x[0].cost.total_ms)
        for (a, a_ms), (b, b_ms) in itertools.combinations(plans, 2):
            found.append(Pair(one.problem.name, gain.gain(a, b, one.problem, own), a_ms - b_ms))
    return found


def calibration(of: Sequence[Pair]) -> float:
    return float(np.quantile([p.score for p in of], gain.CONFIDENCE))


def accepted(of: Sequence[Pair], calibrated: float = gain.CALIBRATION) -> list[Pair]:
    return [p for p in of if p.gain.ms > p.gain.margin_ms * calibrated / gain.CALIBRATION]


def text(of: Sequence[Pair]) -> str:
    problems = dict.fromkeys(p.problem for p in of)
    without = [
        ([p for p in of if p.problem == name], calibration([p for p in of if p.problem != name]))
        for name in problems
    ]
    held = [p for own, k in without for p in accepted(own, k)]
    inside = np.mean([p.score < k for own, k in without for p in own])
    rows = [
        ("a fixed 2%", _right([p for p in of if p.gain.ms > 0.02 * p.gain.before_ms])),
        ("the interval", _right(accepted(of))),
        ("the interval, calibrated without the problem", _right(held)),
    ]
    small = [p for p in of if p.gain.ms < 0.1 * p.gain.before_ms]
    rows += [
        ("a fixed 2%, gains below 10%", _right([p for p in small if p.gain.ms > 0.02 * p.gain.before_ms])),
        ("the interval, gains below 10%", _right(accepted(small))),
    ]
    return "\n\n".join(
        [
            f"{len(of)} pairs of {len(problems)} problems; errors: see cost/known_errors.py. The "
            f"calibration is {calibration(of):.2f} (in use: {gain.CALIBRATION}); calibrated without the problem, "
            f"{inside:.1%} of the differences are within their interval (nominal {gain.CONFIDENCE:.0%}).",
            report.markdown_table(
                ("rule", "replacements", "really faster", "share"), [(name, *found) for name, found in rows]
            ),
        ]
    )


def _right(of: Sequence[Pair]) -> tuple[int, int, str]:
    right = sum(p.real_ms > 0 for p in of)
    return len(of), right, f"{right / len(of):.1%}" if of else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replacements",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of a model of the shipped data")
    print(text(pairs(neural.load(parser.parse_args().model))))


if __name__ == "__main__":
    main()
