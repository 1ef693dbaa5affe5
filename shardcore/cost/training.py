"""Train a cost model on dataset folders, and judge it on samples that it was not trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import accuracy, drift_correction, step_factors, traced_training
from shardcore.cost.fit_config import FitConfig, Progress, TrainedModel
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile import Profile
from shardcore.io import replays, traced_samples
from shardcore.io.traced_samples import TracedSample


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The samples of one setting in dataset folders.

    known: groups and exchanges.
    steps: replayed steps.
    traced: steps of running jobs.
    """

    folders: tuple[Path, ...]
    setting: Setting
    known: drift_correction.Measurements
    steps: Sequence[step_factors.Step]
    traced: Sequence[TracedSample] = ()

    def __str__(self) -> str:
        return (
            f"training for {self.setting} on {len(self.known.compute)} groups, {len(self.known.comm)} "
            f"exchanges, {len(self.steps)} replayed and {len(self.traced)} traced steps of "
            f"{' and '.join(map(str, self.folders))}"
        )

    @property
    def warnings(self) -> list[str]:
        # Timings of different kernels would be averaged, so say so and let the user decide.
        software = sorted({s.software for s in self.known.compute if s.software})
        if len(software) < 2:
            return []
        return [
            f"samples were measured with different software: {'; '.join(software)}; if their timings differ, train on "
            "those of one"
        ]


def read(folders: Sequence[str | Path], setting: Setting) -> TrainingData:
    """Read the samples of a setting. Raises as drift_correction.read, replays.steps and traced_samples.read_all."""
    paths = tuple(map(Path, folders))
    # All are read with the same setting, so that factors fit the model.
    known, steps = drift_correction.read(paths, setting), replays.steps(paths, setting)
    return TrainingData(paths, setting, known, steps, traced_samples.read_all(paths, setting))


@dataclass(frozen=True, eq=False)
class Trained(TrainedModel):
    """A model and its learning curves.

    of_steps: a sentence on the replayed steps. "": there were none.
    of_traces: the same of traced steps.
    traced_errors: in percent on held-out traces, before and after they joined. None: none is held out.
    """

    of_steps: str = ""
    of_traces: str = ""
    traced_errors: tuple[float, float] | None = None


def train(
    data: TrainingData,
    config: FitConfig | None = None,
    progress: Progress | None = None,
    start: NeuralModel | Profile | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Trained:
    """Train on the train and validation splits, then fit factors of exchanges in steps.

    Traced steps correct the result (cost/traced_training.py), unless it errs more on held-out ones then.

    provenance: added to the model's, with the digest of the data.

    Raises as fit.train.
    """
    from shardcore.cost import fit  # imports torch, which judging does not need

    fitted = fit.train(data.known.compute, data.known.comm, data.setting, config, progress, start)
    # Factors need the trained model's prices of exchanges, so they come after it.
    model = step_factors.fit(fitted.model, data.steps)
    # Traces tell what a step takes, factors included, so they come last.
    corrected = traced_training.correct(model, data.traced) if data.traced else None
    model = corrected.model if corrected else model
    # The digest ties a model to the data that it was trained on.
    about = {**model.meta["provenance"], "data": replays.data_digest(data.folders), **(provenance or {})}
    of_steps = step_factors.summary(fitted.model, model, len(data.steps)) if data.steps else ""
    model = dataclasses.replace(model, meta={**model.meta, "provenance": about})
    if corrected is None:
        return Trained(model, fitted.curves, of_steps)
    return Trained(model, fitted.curves, of_steps, corrected.words, corrected.errors)


def judge(model: NeuralModel, known: drift_correction.Measurements, split: str = "test") -> dict[str, float]:
    """Accuracy on a split of measurements, see accuracy.evaluate."""
    return accuracy.evaluate(model, *known.split(split))


def read_held_out(model: NeuralModel, folder: Path) -> drift_correction.Measurements:
    """Measurements to judge a model by, from a folder and the datasets that joined its training.

    Raises ShardCoreError where none of the groups is held out.
    """
    # A model that joined datasets is judged on held-out samples of all of them.
    known = drift_correction.read([folder, *model.meta["provenance"].get("datasets", {})], model.setting)
    if all(s.error is not None for s in accuracy.held_out(known.compute)):
        raise ShardCoreError(
            f"{folder} holds no held-out samples for ({model.setting}) to judge a model by; measure more"
        )
    return known
