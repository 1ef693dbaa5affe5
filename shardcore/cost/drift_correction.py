"""Correct slow machine drift using neighbouring samples' residuals.

While measuring, an op's slowdown is known from the ops timed in turn with it (measure/timing.py). A drift
that outlasts all of these ops is invisible then. It shows later: neighbours in time all cost more than a law
of their drivers predicts. So each sample's slowdown is multiplied by the median of its neighbours' residuals,
as far as neighbours predict each other.

A sample never corrects itself. The test split corrects nobody.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardcore.core.types import Setting
from shardcore.core.validation import describe_differences, require
from shardcore.cost import features
from shardcore.cost.nnls import fit_nonnegative_rates
from shardcore.io import dataset, traced_samples
from shardcore.io.dataset import split_of_sample
from shardcore.io.measurements import CollectiveSample, ComputeSample
from shardcore.step.scopes import WORLD

NEIGHBOURS = 12
"""Samples on each side in time."""
REACH_S = 60.0
"""Neighbours lie within this time, in seconds."""
MOST_AUXILIARY_SAMPLES = 2_000
"""Timings of an auxiliary machine that are read, and groups that train its law, at most. More take longer and help
little (docs/decisions/cost-models.md)."""
_LEAST = 50
"""With fewer timed samples, no drift is estimated."""


@dataclass(frozen=True, eq=False)
class Measurements:
    """Samples to train and judge models on, after drift correction.

    compute, comm: each sample once. Exchanges over emulated links are left out.
    repeats: all timings of samples timed several times, the most often timed first.
    """

    compute: list[ComputeSample]
    comm: list[CollectiveSample]
    repeats: list[list[ComputeSample]]

    def samples_of_split(self, name: str) -> tuple[list[ComputeSample], list[CollectiveSample]]:
        """Measured ops and collectives of the split "train", "validation" or "test"."""
        return (
            [s for s in self.compute if split_of_sample(s.id) == name],
            [s for s in self.comm if split_of_sample(s.id) == name],
        )


@dataclass(frozen=True, eq=False)
class AuxiliarySamples:
    """The samples of another machine, or of another session.

    name: their folder.
    """

    name: str
    hardware: str
    known: Measurements


def read_measurements(folder: str | Path, setting: Setting, max_samples: int | None = None) -> Measurements:
    """Read the measurements of one setting from a dataset folder, and correct their drift.

    max_samples: timings of groups to read (see dataset.read_compute_timings).

    Raises ShardCoreError for a folder without measurements, and for one whose compute samples are all of
    other settings.
    """
    require(
        any(Path(folder).glob("*.parquet"))
        or any((Path(folder) / part).is_dir() for part in (dataset.REPLAYS, traced_samples.TRACES)),
        f"{folder} holds no measurements; it needs to be a dataset folder",
    )
    # A folder may hold exchanges or replays only, which name no setting of groups.
    others = dataset.dataset_settings(folder)
    require(
        not others or setting in others,
        f"{folder} holds samples of other settings than asked for: "
        f"{'; '.join(describe_differences(other, setting) for other in others)}",
    )
    known = correct_drift(dataset.read_compute_timings(folder, setting, max_samples))
    return Measurements(
        # Models train on one timing of each sample, the best known. Repeats show how far timings agree.
        compute=dataset.most_precise_samples(known),
        repeats=dataset.repeated_samples(known),
        # Emulated links are no links of the setting's hardware. And no law of groups is fitted.
        comm=[
            s
            for s in dataset.read_collective_samples(folder, setting)
            if s.request.emulated is None and s.request.group == WORLD
        ],
    )


def correct_drift(samples: Sequence[ComputeSample]) -> list[ComputeSample]:
    """Measured ops with their slowdown refined by neighbours in time, and their timings scaled to match.

    Failed samples stay as they are. Several timings of one id are a sample each.
    Nothing changes where neighbours do not predict each other: on a quiet machine, or without times of
    measurement.
    """
    timed = [s for s in samples if s.error is None]
    # By identity: several timings of one id are separate samples.
    slower = dict(zip(map(id, timed), np.exp(_log_drift(timed)).tolist(), strict=True))
    # As timed on a machine faster by this factor. The slowdown says by how much in all.
    return [
        replace(rescale_sample(s, 1 / by, 1 / by), slowdown=s.slowdown * by)
        if (by := slower.get(id(s)))
        else s
        for s in samples
    ]


def _log_drift(timed: Sequence[ComputeSample]) -> np.ndarray:
    """[S] log of the machine's slowdown beyond the one that each sample records."""
    # The test split corrects nobody, or its samples would influence training.
    trusted = np.array([split_of_sample(s.id) != "test" for s in timed])
    # Without times of measurement all share one, and have no neighbours in time.
    if trusted.sum() < _LEAST or len({s.measured_at for s in timed}) == 1:
        return np.zeros(len(timed))
    residual = _log_residuals(timed, trusted)
    medians = _median_of_neighbours(
        np.array([s.measured_at for s in timed]), residual, trusted, [s.id for s in timed]
    )
    # The slope comes from trusted samples only, and is applied to all.
    near, own = medians[trusted], residual[trusted]
    # The slope of a sample's residual on its neighbours': 0 where they tell nothing, 1 where they tell all.
    slope = float(near @ own / (near @ near)) if near.any() else 0.0
    # A negative slope would mean neighbours predict the opposite: then correct nothing.
    return np.clip(slope, 0.0, 1.0) * medians


def _log_residuals(timed: Sequence[ComputeSample], trusted: np.ndarray) -> np.ndarray:
    """[S] log of measured / predicted ms by a linear law of drivers. Its median over trusted samples is 0."""
    of_shards, _, starts = features.op_features([s.request for s in timed])
    # 1 for the launch, then the op's drivers, which are sums over its shards, [S, K + 1].
    terms = np.concatenate([np.ones((len(timed), 1)), np.add.reduceat(of_shards, starts[:-1])], 1)
    measured = features.measured_ms(timed).sum(1)
    # The law is fitted without the test split, and predicts it too.
    law = fit_nonnegative_rates(terms[trusted], measured[trusted])
    residual = np.log(measured / np.maximum(terms @ law, 1e-9))
    # Centred: a law that is too high or low everywhere is not drift.
    return residual - np.median(residual[trusted])


def _median_of_neighbours(
    at_s: np.ndarray, residual: np.ndarray, trusted: np.ndarray, ids: Sequence[str]
) -> np.ndarray:
    """[S] median residual of the nearest trusted samples in time. 0 where there are too few.

    Other timings of the same id are left out.
    """
    # Positions of trusted samples by time, so that neighbours are a slice.
    order = np.flatnonzero(trusted)[np.argsort(at_s[trusted], kind="stable")]
    medians = np.zeros(len(at_s))
    for i, place in enumerate(np.searchsorted(at_s[order], at_s)):
        near = [
            j
            # One more to the right, as the sample itself may be among them.
            for j in order[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
            # The same op, timed again, would correct itself.
            if ids[j] != ids[i] and abs(at_s[j] - at_s[i]) <= REACH_S
        ]
        # A median of few samples is mostly noise.
        if len(near) >= NEIGHBOURS // 2:
            medians[i] = np.median(residual[near])
    return medians


def rescale_sample(sample: ComputeSample, forward: float, backward: float) -> ComputeSample:
    """A measured op with its forward and backward times multiplied by factors."""
    assert sample.forward and sample.backward, sample.error
    return replace(
        sample, forward=sample.forward.scaled_by(forward), backward=sample.backward.scaled_by(backward)
    )
