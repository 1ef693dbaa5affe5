"""Fine-tuning on little data: a model of one setting on a few samples of another, against training on those
alone.

    python -m bench.tuning datasets/cpu-amd-epyc DIR

DIR holds samples of the other setting, some hundreds. Each size takes the first so many samples (in the order
of their ids), and is judged on the last third, in percent of forward + backward; the mean of three seeds.
"""

from __future__ import annotations

import argparse

import numpy as np

from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import accuracy, drift_correction, fit
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset
from shardcore.io.measurements import ComputeSample

SIZES = (60, 120, 240, 480)
SEEDS = 3


def known(folder: str) -> tuple[Setting, list[ComputeSample]]:
    settings = dataset.settings(folder)
    if len(settings) != 1:
        raise ShardCoreError(
            f"{folder} holds samples of [{'; '.join(map(str, settings))}]; this bench needs one setting"
        )
    return settings[0], [s for s in drift_correction.read([folder], settings[0]).compute if s.error is None]


def error(model: NeuralModel, samples: list[ComputeSample]) -> float:
    return mape(accuracy.predict(model, samples), np.array([s.total_ms for s in samples]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("start", help="dataset of the model to start from")
    parser.add_argument("dataset", help="samples of the other setting")
    args = parser.parse_args()
    (first, many), (other, samples) = known(args.start), known(args.dataset)
    start = fit.train(many, [], first).model
    judged = samples[-len(samples) // 3 :]
    rows = [("0", f"{error(start, judged):.1f}", "")]
    for n in (n for n in SIZES if n <= len(samples) - len(judged)):
        tuned, alone = (
            np.mean(
                [
                    error(fit.train(samples[:n], [], other, fit.FitConfig(seed=seed), start=s).model, judged)
                    for seed in range(SEEDS)
                ]
            )
            for s in (start, None)
        )
        rows.append((str(n), f"{tuned:.1f}", f"{alone:.1f}"))
    print(f"({first}), {len(many)} groups, to ({other}); judged on {len(judged)} groups\n")
    print(report.text_table(("samples", "fine-tuned, %", "on these alone, %"), rows))


if __name__ == "__main__":
    main()
