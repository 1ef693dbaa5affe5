"""The machine's pace, once more: what slowed a whole stretch of samples is told from what they cost.

While measuring, an op's pace is known from the ops that run in turn with it; what slows all of them for longer than they stay is
invisible then (measure/timing.py). Afterwards it shows: samples next to each other in time then all cost more than a law of their
drivers says. So each sample's pace is refined by the median of its neighbours' deviations from such a law, as far as these
foretell its own. Its own timing is no witness, nor is any of the test split.

Shapes: S samples, W witnesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.cost import exchange, features
from shardcore.cost.accuracy import split_of
from shardcore.cost.rates import fit_law
from shardcore.samples import dataset
from shardcore.types import COLLECTIVES, CommSample, ComputeSample, Setting, ShardCoreError, Spread


@dataclass(frozen=True, eq=False)
class Measurements:
    """What models are trained and judged on, timings settled: compute and comm, each sample once, and repeats, all timings of
    what was timed several times (the most often timed first)."""

    compute: list[ComputeSample]
    comm: list[CommSample]
    repeats: list[list[ComputeSample]]


def read(folders: Sequence[str | Path], setting: Setting) -> Measurements:
    """The measurements of one setting in all of some dataset folders together. Raises ShardCoreError where one holds no
    measurements, or compute samples but none of the setting."""
    for folder in folders:
        if not any(Path(folder).glob("*.parquet")) and not (Path(folder) / dataset.REPLAYS).is_dir():
            raise ShardCoreError(f"{folder} holds no measurements; it needs to be a dataset folder")
        found = dataset.settings(folder)
        if found and setting not in found:
            raise ShardCoreError(f"{folder} holds samples for ({'; '.join(map(str, found))}), none for ({setting})")
    settled_each = [settled(dataset.read_timings(f, setting)) for f in folders]  # each a machine of its own
    known = list({(s.id, s.measured_at): s for samples in settled_each for s in samples}.values())
    comm = {(s.id, s.measured_at): s for f in folders for s in dataset.read_comm(f, setting)}
    return Measurements(dataset.best_known(known), as_in_a_step(dataset.best_known(comm.values())), dataset.repeated(known))


def as_in_a_step(comm: Sequence[CommSample]) -> list[CommSample]:
    """Of each collective the exchanges between busy ranks, as steps have them, where FEWEST_BUSY were timed or there are no
    others; else those between idle ranks."""
    def chosen(collective: str) -> list[CommSample]:
        mine = [s for s in comm if s.request.collective == collective]
        busy, idle = ([s for s in mine if bool(s.request.busy_ms) == kind] for kind in (True, False))
        return busy if not idle or sum(s.error is None for s in exchange.priced(busy)) >= FEWEST_BUSY else idle

    kept = {s.id for c in COLLECTIVES for s in chosen(c)}
    return [s for s in comm if s.id in kept]


FEWEST_BUSY = 20
"""Exchanges of a collective between busy ranks that are worth more than all those between idle ones."""
NEIGHBOURS = 12
"""Witnesses on each side in time."""
REACH_S = 60.0
"""Witnesses further away in time say nothing."""
_LEAST = 50
"""Fewer timed samples than these tell no pace."""


def settled(samples: Sequence[ComputeSample]) -> list[ComputeSample]:
    """The samples, timings brought from the pace that they had been given to the refined one; those that failed as they are.

    Several timings of one id are each a sample. Where neighbours do not foretell each other (a quiet machine, or samples without
    their times), nothing changes.
    """
    timed = [s for s in samples if s.error is None]
    if len(timed) < _LEAST:
        return list(samples)
    slower = dict(zip(map(id, timed), np.exp(_drift(timed)), strict=True))
    return [_slowed(s, float(slower[id(s)])) if id(s) in slower else s for s in samples]


def _drift(timed: Sequence[ComputeSample]) -> np.ndarray:
    """[S] log of how much slower than its pace says the machine was at each sample."""
    witness = np.array([split_of(s.id) != "test" for s in timed])
    if witness.sum() < _LEAST or len({s.measured_at for s in timed}) == 1:
        return np.zeros(len(timed))
    deviation = _deviation(timed, witness)
    found = _neighbours_median(np.array([s.measured_at for s in timed]), deviation, witness, [s.id for s in timed])
    theirs, own = found[witness], deviation[witness]
    foretold = float(theirs @ own / (theirs @ theirs)) if theirs.any() else 0.0
    return np.clip(foretold, 0.0, 1.0) * found


def _deviation(timed: Sequence[ComputeSample], witness: np.ndarray) -> np.ndarray:
    """[S] log of measured over what a law of the drivers says, the witnesses' median being 0."""
    drivers = np.stack([features.features(s.request.shards, s.request.batch)[0].sum(0) for s in timed])
    terms, measured = np.concatenate([np.ones((len(timed), 1)), drivers], 1), np.array([s.total_ms for s in timed])
    law = fit_law(terms[witness], measured[witness])
    deviation = np.log(measured / np.maximum(terms @ law, 1e-9))
    return deviation - np.median(deviation[witness])


def _neighbours_median(at_s: np.ndarray, deviation: np.ndarray, witness: np.ndarray, ids: Sequence[str]) -> np.ndarray:
    """[S] median deviation of the nearest witnesses in time, other timings of the same id left out; 0 where there are few."""
    order = np.flatnonzero(witness)[np.argsort(at_s[witness], kind="stable")]
    found = np.zeros(len(at_s))
    for i, place in enumerate(np.searchsorted(at_s[order], at_s)):
        near = [j for j in order[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
                if ids[j] != ids[i] and abs(at_s[j] - at_s[i]) <= REACH_S]
        if len(near) >= NEIGHBOURS // 2:
            found[i] = np.median(deviation[near])
    return found


def _slowed(sample: ComputeSample, by: float) -> ComputeSample:
    def brought(spread: Spread) -> Spread:
        return dataclasses.replace(spread, median_ms=spread.median_ms / by, q1_ms=spread.q1_ms / by, q3_ms=spread.q3_ms / by)

    return dataclasses.replace(sample, forward=brought(sample.forward), backward=brought(sample.backward),
                               pace=sample.pace * by)
