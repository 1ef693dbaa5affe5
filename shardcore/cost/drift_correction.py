"""Correct slow machine drift using neighbouring samples' residuals.

While measuring, an op's slowdown is known from the ops timed in turn with it (measure/timing.py). A drift
that outlasts all of these ops is invisible then. It shows later: neighbours in time all cost more than a law
of their drivers predicts. So each sample's slowdown is multiplied by the median of its neighbours' residuals,
as far as neighbours predict each other.

A sample never corrects itself. The test split corrects nobody.

Shapes: S samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import collective_fit, features
from shardcore.cost.nnls import fit_law
from shardcore.io import dataset, traced_samples
from shardcore.io.dataset import split_of
from shardcore.io.measurements import CollectiveSample, ComputeSample, Spread
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.scopes import WORLD

FEWEST_BUSY = 20
"""From this number on, collectives between busy ranks replace those between idle ranks."""
NEIGHBOURS = 12
"""Samples on each side in time."""
REACH_S = 60.0
"""Neighbours lie within this time, in seconds."""
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

    def split(self, name: str) -> tuple[list[ComputeSample], list[CollectiveSample]]:
        """Groups and exchanges of the split "train", "validation" or "test"."""
        return (
            [s for s in self.compute if split_of(s.id) == name],
            [s for s in self.comm if split_of(s.id) == name],
        )


def read(folders: Sequence[str | Path], setting: Setting) -> Measurements:
    """The measurements of one setting, from several dataset folders together.

    Raises ShardCoreError for a folder without measurements, and for one whose compute samples are all of
    other settings.
    """
    # Refuse a wrong folder before samples of the others are read.
    for folder in folders:
        parts = (Path(folder) / dataset.REPLAYS, Path(folder) / traced_samples.TRACES)
        if not any(Path(folder).glob("*.parquet")) and not any(part.is_dir() for part in parts):
            raise ShardCoreError(f"{folder} holds no measurements; it needs to be a dataset folder")
        # A folder may hold exchanges or replays only, which name no setting of groups.
        others = dataset.settings(folder)
        if others and setting not in others:
            held = "; ".join(map(str, others))
            raise ShardCoreError(f"{folder} holds samples for ({held}), none for ({setting})")
    # Each folder comes from one machine: drift is shared within a folder only.
    each = [corrected(dataset.read_timings(f, setting)) for f in folders]
    # One sample for each time of measurement: folders may overlap.
    known = list({(s.id, s.measured_at): s for samples in each for s in samples}.values())
    # Emulated links are no links of the setting's hardware. And no law of groups is fitted.
    comm = {
        (s.id, s.measured_at): s
        for f in folders
        for s in dataset.read_comm(f, setting)
        if s.request.emulated is None and s.request.group == WORLD
    }
    return Measurements(
        # Models train on one timing of each sample, the best known. Repeats show how far timings agree.
        compute=dataset.best_known(known),
        repeats=dataset.repeated(known),
        comm=as_in_a_step(dataset.best_known(comm.values())),
    )


def as_in_a_step(comm: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """Prefer collectives timed between busy ranks, which is how training steps run them.

    That needs FEWEST_BUSY of them, or no others. Otherwise those between idle ranks stay.
    """

    def chosen(collective: str) -> list[CollectiveSample]:
        mine = [s for s in comm if s.request.collective == collective]
        # busy_ms 0: ranks were idle before the exchange.
        busy, idle = ([s for s in mine if bool(s.request.busy_ms) == kind] for kind in (True, False))
        timed = [s for s in collective_fit.priced(busy) if s.error is None]
        # Busy ranks alone suffice if there are enough, or if there is nothing else.
        return busy if not idle or len(timed) >= FEWEST_BUSY else idle

    kept = {s.id for c in COLLECTIVES for s in chosen(c)}
    return [s for s in comm if s.id in kept]


def corrected(samples: Sequence[ComputeSample]) -> list[ComputeSample]:
    """The samples with their slowdown refined, and their timings scaled to match.

    Failed samples stay as they are. Several timings of one id are a sample each.
    Nothing changes where neighbours do not predict each other: on a quiet machine, or without times of
    measurement.
    """
    timed = [s for s in samples if s.error is None]
    # Too few samples: the law and the medians would be mostly noise.
    if len(timed) < _LEAST:
        return list(samples)
    # By identity: several timings of one id are separate samples.
    slower = dict(zip(map(id, timed), np.exp(_drift(timed)), strict=True))
    return [_at_faster_pace(s, float(slower[id(s)])) if id(s) in slower else s for s in samples]


def _drift(timed: Sequence[ComputeSample]) -> np.ndarray:
    """[S] log of the machine's slowdown beyond what each sample already records."""
    # The test split corrects nobody, or its samples would influence training.
    trusted = np.array([split_of(s.id) != "test" for s in timed])
    # Without times of measurement all share one, and have no neighbours in time.
    if trusted.sum() < _LEAST or len({s.measured_at for s in timed}) == 1:
        return np.zeros(len(timed))
    residual = _residual(timed, trusted)
    at_s = np.array([s.measured_at for s in timed])
    medians = _neighbours_median(at_s, residual, trusted, [s.id for s in timed])
    # The slope comes from trusted samples only, and is applied to all.
    near, own = medians[trusted], residual[trusted]
    # The slope of a sample's residual on its neighbours': 0 where they tell nothing, 1 where they tell all.
    slope = float(near @ own / (near @ near)) if near.any() else 0.0
    # A negative slope would mean neighbours predict the opposite: then correct nothing.
    return np.clip(slope, 0.0, 1.0) * medians


def _residual(timed: Sequence[ComputeSample], trusted: np.ndarray) -> np.ndarray:
    """[S] log of measured / predicted, for a linear law of the drivers. The trusted median is 0."""
    terms, measured = features.launch_and_drivers(timed), features.measured_ms(timed).sum(1)
    # The law is fitted without the test split, and predicts it too.
    law = fit_law(terms[trusted], measured[trusted])
    residual = np.log(measured / np.maximum(terms @ law, 1e-9))
    # Centred: a law that is too high or low everywhere is not drift.
    return residual - np.median(residual[trusted])


def _neighbours_median(
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


def _at_faster_pace(sample: ComputeSample, by: float) -> ComputeSample:
    """The sample as if timed on a machine faster by this factor."""

    def divided(part: Spread | None) -> Spread | None:
        # Quartiles scale with the median. The number of repeats stays.
        return part and Spread(part.median_ms / by, part.q1_ms / by, part.q3_ms / by, part.repeats)

    forward, backward = divided(sample.forward), divided(sample.backward)
    # The slowdown says by how much timings were divided in all.
    return dataclasses.replace(sample, forward=forward, backward=backward, slowdown=sample.slowdown * by)
