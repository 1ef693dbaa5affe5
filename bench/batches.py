"""Is one model good for a range of batches? Its errors at batches that it was trained on, and at one between.

    python -m shardcore measure --samples 3000 --out DATA
    python -m bench.batches DATA

`measure` draws a fifth of the groups at a half, a quarter and an eighth of the batch. Errors are of forward +
backward in percent, on groups that are no replicas of small tables. They are held out in FOLDS turns. Each
row is a batch, each column a training set of the other groups:

  all batches   all of them
  without it    those of other batches: the model has to interpolate, or for the ends to extrapolate
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.cost import accuracy, drift_correction, fit
from shardcore.io import dataset, files
from shardcore.io.measurements import ComputeSample
from shardcore.measure.sampling.groups import REPLICATED_BYTES

FOLDS = 5


def errors(train: Sequence[ComputeSample], test: Sequence[ComputeSample]) -> np.ndarray:
    """[S] relative errors of a model."""
    model = fit.train(train, [], train[0].setting).model
    measured = np.array([s.total_ms for s in test])
    return np.abs(accuracy.predict(model, test) / measured - 1)


def by_batch(samples: Sequence[ComputeSample]) -> dict[int, tuple[list[float], list[float]]]:
    """For each batch, errors with all batches and without it."""
    batches = sorted({s.request.batch for s in samples if _is_large(s)})
    found: dict[int, tuple[list[float], list[float]]] = {batch: ([], []) for batch in batches}
    for fold in range(FOLDS):
        held = {s.id for s in samples if int(files.digest(["fold", s.id]), 16) % FOLDS == fold}
        rest = [s for s in samples if s.id not in held]
        for batch in batches:
            test = [s for s in samples if s.id in held and s.request.batch == batch and _is_large(s)]
            for into, train in zip(
                found[batch], (rest, [s for s in rest if s.request.batch != batch]), strict=True
            ):
                into += errors(train, test).tolist() if test else []
        print(f"fold {fold + 1} of {FOLDS}", file=sys.stderr, flush=True)
    return found


def _is_large(sample: ComputeSample) -> bool:
    return max(s.bytes for s in sample.request.shards) > REPLICATED_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="+", help="folders of one setting's samples")
    args = parser.parse_args()
    settings = {setting for folder in args.data for setting in dataset.settings(folder)}
    if len(settings) != 1:
        raise ShardCoreError(f"the folders hold samples of {len(settings)} settings; give those of one")
    # Without drift, as models are trained.
    samples = [s for s in drift_correction.read(args.data, settings.pop()).compute if s.error is None]
    rows = [
        (str(batch), len(known), *(f"{100 * np.mean(x):.1f}%" for x in (known, asked)))
        for batch, (known, asked) in by_batch(samples).items()
    ]
    print(report.markdown_table(("batch", "groups", "all batches", "without it"), rows))


if __name__ == "__main__":
    try:
        main()
    except ShardCoreError as error_:
        sys.exit(str(error_))
