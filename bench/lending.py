"""Ways to use the samples of another machine: error on own groups and exchanges that were not trained on.

    python -m bench.lending data/measurements datasets/cpu-amd-epyc --out lending.jsonl

OWN are samples of this machine, AUXILIARY those of another one. Machines that differ by a known amount are made of the
latter's: some of its samples are own ones, rescaled, and the others auxiliary. `sizes` are 1.2 times as slow for the
smallest tenth of ops and 1.7 times for the largest, with exchanges 0.8 times as long. Each row draws own groups for
training and at most 400 others to judge by; of exchanges as many as own groups, at most 120.

  own         own samples alone; `-` with fewer than 50
  one factor  the auxiliary machine's law times the median ratio on own groups
  lending     what training does (cost/auxiliary_samples.py)

Errors are means over --seeds draws, in percent. Rows are kept in OUT: killed, it goes on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from bench import common
from shardcore import report
from shardcore.cost import accuracy, auxiliary_samples, collective_fit, features, fit
from shardcore.cost.drift_correction import AuxiliarySamples, Measurements, read_measurements, rescale_sample
from shardcore.cost.fit_config import MIN_COMPUTE
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample, TimingSpread

WAYS = ("own", "one factor", "lending", "exchanges: own", "exchanges: lending")


def slowed_measurements(
    measured: Measurements, small_ops: float, large_ops: float, exchanges: float
) -> Measurements:
    """Measurements as on a slower machine. small_ops, large_ops, exchanges: factors of their times."""
    ms = np.log([s.total_ms for s in measured.compute])
    low, high = np.quantile(ms, (0.1, 0.9))
    factors = small_ops * (large_ops / small_ops) ** np.clip((ms - low) / (high - low), 0, 1)
    compute = [rescale_sample(s, x, x) for s, x in zip(measured.compute, factors.tolist(), strict=True)]
    return Measurements(compute, [slowed_exchange(s, exchanges) for s in measured.comm], [])


def slowed_exchange(sample: CollectiveSample, factor: float) -> CollectiveSample:
    def slowed_spreads(spreads: tuple[TimingSpread, ...] | None) -> tuple[TimingSpread, ...] | None:
        return spreads and tuple(x.scaled_by(factor) for x in spreads)

    return dataclasses.replace(
        sample, forward=slowed_spreads(sample.forward), backward=slowed_spreads(sample.backward)
    )


def errors_with_auxiliary_samples(
    own: Measurements, test: Measurements, auxiliary: AuxiliarySamples
) -> dict[str, float]:
    setting, measured = test.compute[0].setting, features.measured_ms(test.compute).sum(1)
    law = fit.train_op_model(auxiliary.known.compute, setting, fit.FitConfig(epochs=30))
    # Without own groups the auxiliary machine's level stands.
    some = own.compute or auxiliary.known.compute
    level = features.measured_ms(some).sum(1) / fit.predicted_op_ms(law, some).sum(1)

    def exchange_error(model: NeuralModel) -> float:
        pairs = (
            collective_fit.predicted_and_measured_ms(model.weights, [s], way)
            for s in test.comm
            for way in s.request.definition.directions
        )
        return float(100 * np.mean(np.concatenate([np.abs(ms / took - 1) for ms, took in pairs])))

    models = {
        "lending": auxiliary_samples.train_with_auxiliary_samples(
            own, setting, [auxiliary], fit.FitConfig(), None
        )[0].model
    }
    if len(own.compute) >= MIN_COMPUTE:
        models["own"] = fit.train(own.compute, own.comm, setting).model
    return {
        "one factor": mape(np.median(level) * accuracy.predict_op_ms(law, test.compute), measured),
        **{
            name: mape(accuracy.predict_op_ms(model, test.compute), measured)
            for name, model in models.items()
        },
        **{f"exchanges: {name}": exchange_error(model) for name, model in models.items()},
    }


def split_measurements(
    some: Measurements, n: int, seed: int
) -> tuple[Measurements, Measurements, Measurements]:
    """Split measurements into n groups for training, groups for judging, and the rest."""
    rng = np.random.default_rng(seed)
    compute = [some.compute[i] for i in rng.permutation(len(some.compute))]
    comm = [some.comm[i] for i in rng.permutation(len(some.comm))]
    known = min(n, 120)
    return (
        Measurements(
            dataset.most_precise_samples(compute[:n]), dataset.most_precise_samples(comm[:known]), []
        ),
        Measurements(compute[n : n + 400], comm[known : known + 60], []),
        Measurements(
            dataset.most_precise_samples(compute[n + 400 :]),
            dataset.most_precise_samples(comm[known + 60 :]),
            [],
        ),
    )


def read_timed_measurements(folder: Path) -> Measurements:
    known = read_measurements(folder, common.single_setting(folder))
    comm = [s for s in collective_fit.priceable_samples(known.comm) if s.error is None]
    return Measurements([s for s in known.compute if s.error is None], comm, [])


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"own": (Path, "measurements of this machine"), "auxiliary": (Path, "those of another one")},
        groups=([0, 60, 320], "numbers of own groups"),
        factors=([0.4, 1.6, 2.5], "of machines made of the auxiliary machine's samples"),
        seeds=(2, "draws of each row"),
        out=(..., "file of rows"),
    )
    args = parser.parse_args()
    here, there = read_timed_measurements(args.own), read_timed_measurements(args.auxiliary)
    hardware = there.compute[0].setting.hardware
    machines: dict[str, tuple[float, float, float] | None] = {here.compute[0].setting.hardware: None}
    machines |= {f"{hardware} × {x:g}": (x, x, x) for x in args.factors}
    machines[f"{hardware}, sizes"] = (1.2, 1.7, 0.8)
    rows = common.read_rows(args.out)
    for machine, change in machines.items():
        for n, seed in ((n, seed) for n in args.groups for seed in range(args.seeds)):
            if any((r["machine"], r["groups"], r["seed"]) == (machine, n, seed) for r in rows):
                continue
            own, test, rest = split_measurements(here if change is None else there, n, seed)
            auxiliary = AuxiliarySamples(str(args.auxiliary), hardware, there if change is None else rest)
            if change is not None:
                own, test = (
                    slowed_measurements(some, *change) if some.compute else some for some in (own, test)
                )
            rows.append(
                {
                    "machine": machine,
                    "groups": n,
                    "seed": seed,
                    **errors_with_auxiliary_samples(own, test, auxiliary),
                }
            )
            common.write_rows(args.out, rows)
            common.print_progress(rows[-1])
    cells = []
    for machine, n in dict.fromkeys((r["machine"], r["groups"]) for r in rows):
        of_row = [r for r in rows if (r["machine"], r["groups"]) == (machine, n)]
        means = [f"{np.mean([r[way] for r in of_row]):.1f}" if way in of_row[0] else "-" for way in WAYS]
        cells.append((machine, str(n), *means))
    print(report.markdown_table(("machine", "own groups", *WAYS), cells))


if __name__ == "__main__":
    main()
