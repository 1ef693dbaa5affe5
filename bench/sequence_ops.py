r"""How well do models price ops whose lookups are not pooled? Cross-validated over those of a dataset.

    cp -r datasets/cpu-amd-epyc DS
    python -m shardcore measure --device cpu --hardware cpu-amd-epyc --sequences 1 --minutes 16 --seed 3 \
        --out DS
    python -m bench.sequence_ops DS --folds 3

It trains on the pooled ops only, and on these and all sequences but those of one fold, for each fold. Each
training takes about a minute on an idle core.

Shapes: S samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardcore import report
from shardcore.cost import accuracy, fit
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import ComputeSample


def is_sequence(sample: ComputeSample) -> bool:
    return sample.request.shards[0].table.sequence


def cross_validated(
    samples: Sequence[ComputeSample], folds: int, config: fit.FitConfig
) -> list[tuple[str, np.ndarray, float]]:
    """What a model was trained on, [S] its relative errors on the sequences, and its error in percent on
    pooled ops of the test split."""
    pooled = [s for s in samples if not is_sequence(s)]
    own, test = [s for s in samples if is_sequence(s)], accuracy.held_out(pooled)
    measured = np.array([s.total_ms for s in test])

    def trained(on: Sequence[ComputeSample], judged: Sequence[ComputeSample]) -> tuple[np.ndarray, float]:
        model = fit.train([*pooled, *on], [], samples[0].setting, config).model
        took = np.array([s.total_ms for s in judged])
        return accuracy.predict(model, judged) / took - 1, mape(accuracy.predict(model, test), measured)

    without = trained([], own)
    errors, on_pooled = zip(
        *(trained([s for i, s in enumerate(own) if i % folds != k], own[k::folds]) for k in range(folds)),
        strict=True,
    )
    return [
        ("pooled ops only", *without),
        (f"these and sequences, {folds} folds", np.concatenate(errors), float(np.mean(on_pooled))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", help="folder of measurements, with sequences")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=fit.FitConfig().epochs)
    args = parser.parse_args()
    [setting] = dataset.settings(args.dataset)
    # By id, which is random: folds are random samples.
    samples = sorted(
        (s for s in dataset.read_compute(args.dataset, setting) if s.error is None), key=lambda s: s.id
    )
    rows = [
        (
            name,
            f"{100 * np.abs(errors).mean():.0f}%",
            f"{100 * np.median(np.abs(errors)):.0f}%",
            f"{100 * errors.mean():+.0f}%",
            f"{on_pooled:.1f}%",
        )
        for name, errors, on_pooled in cross_validated(
            samples, args.folds, replace(fit.FitConfig(), epochs=args.epochs)
        )
    ]
    print(f"{setting}; {sum(map(is_sequence, samples))} sequences, {len(samples)} ops in all.\n")
    print(
        report.markdown_table(
            ("trained on", "error on sequences", "median", "bias", "error on pooled ops"), rows
        )
    )


if __name__ == "__main__":
    main()
