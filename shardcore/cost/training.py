"""Train a cost model on dataset folders, and judge it on samples that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcore.core.types import Setting
from shardcore.core.validation import describe_differences, require
from shardcore.cost import accuracy, drift_correction, step_factors, traced_training
from shardcore.cost.drift_correction import AuxiliarySamples
from shardcore.cost.fit_config import AuxiliaryStart, FitConfig, Progress, TrainedModel
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile import Profile
from shardcore.io import dataset, replays, traced_samples
from shardcore.io.traced_samples import TracedSample


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The samples of one setting in this machine's folder, and auxiliary ones of other machines.

    known: groups and exchanges.
    steps: replayed steps.
    traced: steps of running jobs on this hardware, also those in other folders.
    auxiliary: samples of the other folders.
    """

    folder: Path
    setting: Setting
    known: drift_correction.Measurements
    steps: Sequence[step_factors.Step]
    traced: Sequence[TracedSample] = ()
    auxiliary: tuple[AuxiliarySamples, ...] = ()

    def __str__(self) -> str:
        return (
            f"training for {self.setting} on {len(self.known.compute)} groups, {len(self.known.comm)} "
            f"exchanges, {len(self.steps)} replayed and {len(self.traced)} traced steps of {self.folder}"
        ) + "".join(
            f"; {len(x.known.compute)} groups and {len(x.known.comm)} exchanges of {x.name} ({x.hardware}) may lend "
            "their shape"
            for x in self.auxiliary
        )

    @property
    def warnings(self) -> list[str]:
        # Timings of different kernels would be averaged, so say so and let the user decide.
        software = sorted({s.software for s in self.known.compute if s.software})
        words = (
            f"samples were measured with different software: {'; '.join(software)}; if their timings differ, train on "
            "those of one"
        )
        return [words] if len(software) > 1 else []


def read_training_data(
    folder: str | Path, setting: Setting, auxiliaries: Sequence[str | Path] = ()
) -> TrainingData:
    """Read the samples of a setting from a dataset folder, and auxiliary ones from folders of other machines.

    Raises as drift_correction.read_measurements, replays.read_step_samples and traced_samples.read_traced_samples,
    and ShardCoreError for an auxiliary machine without samples.
    """
    own, others = Path(folder), [path for path in map(Path, auxiliaries) if path != Path(folder)]
    known, traced = (
        drift_correction.read_measurements(own, setting),
        traced_samples.read_traced_samples([own, *others], setting),
    )
    auxiliary = [
        AuxiliarySamples(
            str(path),
            held.hardware,
            drift_correction.read_measurements(path, held, drift_correction.MOST_AUXILIARY_SAMPLES),
        )
        for path in others
        for held in dataset.dataset_settings(path)
        if differs_in_hardware_only(held, setting)
    ]
    for path in others:
        require(
            any(x.name == str(path) for x in auxiliary) or bool(traced_samples.traced_digests(path)),
            f"{path} holds samples of other settings than {folder}: "
            f"{'; '.join(describe_differences(held, setting) for held in dataset.dataset_settings(path)) or 'none'}; "
            "to lend their shape, they may differ in hardware only, as of a CPU or of a GPU",
        )
    return TrainingData(
        own, setting, known, replays.read_step_samples([own], setting), traced, tuple(auxiliary)
    )


def differs_in_hardware_only(other: Setting, setting: Setting) -> bool:
    """True for two settings that differ in hardware only, both of a CPU or both of a GPU."""
    return (
        other.hardware.startswith("cpu-") == setting.hardware.startswith("cpu-")
        and replace(other, hardware=setting.hardware) == setting
    )


@dataclass(frozen=True, eq=False)
class TrainingResult(TrainedModel):
    """A trained cost model, its learning curves, and notes on the training.

    of_steps: a sentence on the replayed steps. "": there were none.
    of_traces: the same of traced steps.
    traced_errors: in percent on held-out traces, before and after they joined. None: none is held out.
    auxiliary_notes: a sentence on each auxiliary machine.
    start: law and samples of an auxiliary machine. None: nothing.
    """

    of_steps: str = ""
    of_traces: str = ""
    traced_errors: tuple[float, float] | None = None
    auxiliary_notes: tuple[str, ...] = ()
    start: AuxiliaryStart | None = None


def train(
    data: TrainingData,
    config: FitConfig | None = None,
    progress: Progress | None = None,
    start: NeuralModel | Profile | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> TrainingResult:
    """Train a cost model on the train and validation splits, then fit collectives' factors in steps.

    Traced steps correct the result (cost/traced_training.py), unless it errs more on held-out ones then.

    provenance: added to the model's, with the digest of the data.

    Raises as fit.train.
    """
    from shardcore.cost import auxiliary_samples, fit  # they import torch, which judging does not need

    shape, auxiliary = None, {}
    if data.auxiliary and start is None:
        fitted, shape, words = auxiliary_samples.train_with_auxiliary_samples(
            data.known, data.setting, data.auxiliary, config or FitConfig(), progress
        )
        auxiliary = {
            x.name: {
                "digest": replays.dataset_digest(Path(x.name)),
                "hardware": x.hardware,
                "groups": len(x.known.compute),
                "exchanges": len(x.known.comm),
                "words": words.get(x.name, "lends ops nothing"),
            }
            for x in data.auxiliary
        }
    else:
        fitted = fit.train(data.known.compute, data.known.comm, data.setting, config, progress, start)
    # Factors need the trained model's prices of exchanges, so they come after it.
    model = step_factors.fit_step_factors(fitted.model, data.steps)
    # Traces tell what a step takes, factors included, so they come last.
    corrected = traced_training.correct_model(model, data.traced) if data.traced else None
    model = corrected.model if corrected else model
    # The digest ties a model to the data that it was trained on.
    about = {
        **model.meta["provenance"],
        "data": replays.datasets_digest([data.folder, *(Path(x.name) for x in data.auxiliary)]),
        **({"lent": auxiliary} if auxiliary else {}),
        **(provenance or {}),
    }
    return TrainingResult(
        replace(model, meta={**model.meta, "provenance": about}),
        fitted.curves,
        step_factors.fit_summary(fitted.model, model, len(data.steps)) if data.steps else "",
        corrected.words if corrected else "",
        corrected.errors if corrected else None,
        tuple(f"{name} {one['words']}" for name, one in auxiliary.items()),
        shape,
    )


def judge_model(
    model: NeuralModel, known: drift_correction.Measurements, split: str = "test"
) -> dict[str, float]:
    """Accuracy of a cost model on a split of measurements, as flat metrics."""
    return accuracy.evaluate_accuracy(model, *known.samples_of_split(split))


def read_held_out_samples(model: NeuralModel, folder: Path) -> drift_correction.Measurements:
    """Read this machine's measurements to judge a model by. Raises ShardCoreError if none is held out.

    Raises ShardCoreError where none of the groups is held out.
    """
    known = drift_correction.read_measurements(folder, model.setting)
    require(
        any(s.error is None for s in accuracy.held_out_samples(known.compute)),
        f"{folder} holds no held-out samples for ({model.setting}) to judge a model by; measure more",
    )
    return known
