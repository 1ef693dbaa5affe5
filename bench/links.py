"""How well the communication model foretells exchanges: measured ones, and simulated ones among more devices
than are here.

    python -m bench.links datasets/cpu-amd-epyc      # measured: rates of the train split, errors on the test
                                                     split
    python -m bench.links --simulate                 # simulated: rates of 2, 4 and 8 ranks, errors on other
                                                     counts of ranks

Errors are of one rank's transfer, in percent. Of measured exchanges also:

  5 folds              the error by cross-validation over all three splits: of some collectives few are held
                       out
  at all-to-all rates  the error were the collective not measured: priced by its terms at the all-to-all's
                       rates
  neighbours' slowdown the error once both sides are brought to that of the eight training exchanges nearest
                       in time: a machine that others use too drifts, and nothing that a plan holds tells by
                       how much
  repeats              the median interquartile range of the repeats within one measurement
  repeatability        the mean error that a timing has against the truth, from exchanges measured twice, if
                       the folder has any

SIMULATED exchanges are no measurements: they come from tests/cost/simulated_cluster.py, whose laws are known and of
another form than the model's. `mean` is over the rows.

Shapes: D ranks, M messages, L links.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench import common
from shardcore import report
from shardcore.cost import collective_fit, collective_model
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample
from shardcore.step.collectives import COLLECTIVES

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cost"))

from simulated_cluster import KNOWN, UNKNOWN, Cluster, simulated

# --- measured -----------------------------------------------------------------------------------------------

NEIGHBOURS, FOLDS = 8, 5


def measured_rows(
    comm: Sequence[CollectiveSample], repeats: Sequence[Sequence[CollectiveSample]]
) -> list[tuple[str, ...]]:
    """One row a collective and way."""
    comm = [s for s in collective_fit.priced(comm) if s.error is None]
    train, test = ([s for s in comm if dataset.split_of(s.id) == side] for side in ("train", "test"))
    rates = collective_fit.fit(train)
    as_all_to_all = {
        k: v
        for k, v in rates.items()
        if k.startswith(collective_model.rates_name(collective_model.ALL_TO_ALL, ""))
    }
    slowdown, folds = _slowdown(train, rates), _fold_errors(comm)
    rows = []
    for collective, row in COLLECTIVES.items():
        held_out = [s for s in test if s.request.collective == collective]
        again = [
            g
            for g in repeats
            if g[0].request.collective == collective and len(collective_fit.priced(g)) == len(g)
        ]
        for way in row.ways if held_out else ():
            predicted, found = collective_fit.predicted(rates, held_out, way)
            proxy, _ = collective_fit.predicted(as_all_to_all, held_out, way)
            usual = np.concatenate(
                [[slowdown(s)] * len(collective_fit.observed([s], way)[1]) for s in held_out]
            )
            spread = np.median([(x.q3_ms - x.q1_ms) / x.median_ms for s in held_out for x in getattr(s, way)])
            rows.append(
                (
                    collective,
                    way,
                    str(len(held_out)),
                    f"{mape(predicted, found):.1f}",
                    folds[collective, way],
                    f"{mape(proxy, found):.1f}" if collective != "all_to_all" else "",
                    f"{mape(predicted, found / usual):.1f}",
                    f"{100 * spread:.0f}",
                    _repeatability(again, way),
                )
            )
    return rows


def _fold_errors(comm: Sequence[CollectiveSample]) -> dict[tuple[str, str], str]:
    """The error on held-out folds, by collective and way."""
    both: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for k in range(FOLDS):
        rates = collective_fit.fit([s for i, s in enumerate(comm) if i % FOLDS != k])
        for collective, row in COLLECTIVES.items():
            for way, left_out in (
                (way, [s for s in comm[k::FOLDS] if s.request.collective == collective]) for way in row.ways
            ):
                if left_out:
                    both.setdefault((collective, way), []).append(
                        collective_fit.predicted(rates, left_out, way)
                    )
    return {
        kind: f"{mape(*map(np.concatenate, zip(*parts, strict=True))):.1f}" for kind, parts in both.items()
    }


def _slowdown(
    train: Sequence[CollectiveSample], rates: Mapping[str, np.ndarray]
) -> Callable[[CollectiveSample], float]:
    """A function: how many times as long as usual the training exchanges took that were measured nearest to a
    sample."""

    def slower(sample: CollectiveSample) -> float:
        ratios = [
            math.log(b / a)
            for way in sample.request.row.ways
            for a, b in zip(*collective_fit.predicted(rates, [sample], way), strict=True)
        ]
        return float(np.mean(ratios))

    at, by = np.array([s.measured_at for s in train]), np.array([slower(s) for s in train])
    return lambda sample: math.exp(
        float(np.median(by[np.argsort(abs(at - sample.measured_at))[:NEIGHBOURS]]))
    )


def _repeatability(repeats: Sequence[Sequence[CollectiveSample]], way: str) -> str:
    pairs = [
        (a.median_ms, b.median_ms)
        for first, second, *_ in repeats
        for a, b in zip(getattr(first, way), getattr(second, way), strict=True)
    ]
    return (
        f"{100 * np.mean([abs(b / a - 1) for a, b in pairs]) / math.sqrt(2):.1f}"
        if pairs
        else "none measured twice"
    )


# --- simulated -----------------------------------------------------------------------------------------------


def simulated_rows(cluster: Cluster, n: int, seed: int) -> list[tuple[str, ...]]:
    """One row a number of ranks and hosts, and one of all that training did not have."""
    known = simulated(cluster, KNOWN, n, seed)
    rates = collective_fit.fit(known)
    tests = {shape: simulated(cluster, [shape], n // 2, seed + 1) for shape in (*KNOWN, *UNKNOWN)}
    rows = [
        (
            *map(str, shape),
            "trained on" if shape in KNOWN else "never trained on",
            *(f"{error:.1f}" for error in collective_fit.errors(rates, samples).values()),
        )
        for shape, samples in tests.items()
    ]
    means = [
        np.mean([float(row[k]) for row in rows if row[2] == "never trained on"])
        for k in range(3, len(rows[0]))
    ]
    return [*rows, ("mean", "", "never trained on", *(f"{mean:.1f}" for mean in means))]


# --- command ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(
        __doc__,
        simulate=(False, "simulated exchanges (as well)"),
        samples=(90, "simulated exchanges of each number of ranks and hosts"),
        uplink_gbps=(5.0, "simulated: of a host (5; a rank's port has 8)"),
        eager_bytes=(8192, "simulated: longer messages shake hands first"),
        seed=(0, "of the simulation"),
    )
    parser.add_argument("dataset", nargs="?", help="folder of measurements of one setting")
    args = parser.parse_args()
    if not (args.dataset or args.simulate):
        parser.error("give a folder of measurements, --simulate, or both")
    if args.dataset:
        setting = common.only_setting(args.dataset)
        comm = dataset.read_comm(args.dataset)
        rows = measured_rows(comm, dataset.read_comm_repeats(args.dataset))
        print(f"{setting}: error in percent on the test split\n")
        print(
            report.text_table(
                (
                    "collective",
                    "way",
                    "held out",
                    "error",
                    "5 folds",
                    "at all-to-all rates",
                    "neighbours' slowdown",
                    "repeats",
                    "repeatability",
                ),
                rows,
            )
        )
    if args.simulate:
        cluster = Cluster(uplink_gbps=args.uplink_gbps, eager_bytes=args.eager_bytes)
        ways = [f"{collective} {way}" for collective, row in COLLECTIVES.items() for way in row.ways]
        table = report.text_table(
            ("ranks", "hosts", "", *ways), simulated_rows(cluster, args.samples, args.seed)
        )
        lines = ["no measurements, known laws: error in percent", str(cluster), *table.splitlines()]
        print("\n".join(f"SIMULATED  {line}" for line in lines))


if __name__ == "__main__":
    main()
