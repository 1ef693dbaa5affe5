"""Auxiliary samples, of other machines, give the shape of costs. This machine's own samples give their level.

The groups of an auxiliary machine train a law. Own groups bring it here in two ways. One factor is best where machines
differ in speed only. Launch and rates fitted anew are best where ops differ, but few groups fit them badly. The mean of
both errs less than either chosen by few groups would (docs/decisions/cost-models.md). It brings some of the auxiliary
groups here, op by op: by what it takes here over what the law takes there. They join own ones, and training goes on
from the law.

Cross-validation on own groups chooses the auxiliary machine. Own groups alone are one of the choices, so a machine that
does not help has no effect. With very few own groups nothing is chosen, and the law takes one factor.

Exchanges join at the own level of their collective, payload and direction, if own ones are predicted better then
(collective_fit.fit_exchange_rates).

Shapes: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np

from shardcore.core.types import Setting
from shardcore.cost import collective_fit, features, fit, quantiles
from shardcore.cost.drift_correction import (
    MOST_AUXILIARY_SAMPLES,
    AuxiliarySamples,
    Measurements,
    rescale_sample,
)
from shardcore.cost.fit_config import (
    MIN_COMPUTE,
    MIN_STARTED,
    AuxiliaryStart,
    FitConfig,
    Progress,
    TrainedModel,
)
from shardcore.cost.neural import NeuralModel
from shardcore.io.dataset import Sample, split_of_sample
from shardcore.io.measurements import CollectiveSample, ComputeSample

_JOINED = 120
"""An auxiliary machine's groups that join own ones."""
_LINEAR = ("launch", "rates")
"""Weights that an op's ms are linear in: their mean gives the mean of ms."""
_FAVOUR = 4
"""Own samples alone have to err less by this over the number of own groups: 8% with 50, 1% with 400."""
_FOLDS = 4
_LEVEL = 0.56
"""Standard deviation of the logarithm of a machine's level that no own sample tells. 90% take 0.4 to 2.5 times as long
as the auxiliary machine."""
_SHAPE = 0.15
"""The same of ops around their machine's level (datasets/cpu-amd-epyc for an Intel Xeon)."""


def train_with_auxiliary_samples(
    own: Measurements,
    setting: Setting,
    auxiliaries: Sequence[AuxiliarySamples],
    config: FitConfig,
    progress: Progress | None,
) -> tuple[TrainedModel, AuxiliaryStart, dict[str, str]]:
    """Train a cost model on few own samples and auxiliary ones. Returns it, what joined, and text on each auxiliary
    machine.

    Its quantiles and its error are those of cross-validation on own groups. With fewer than 20, they are as wide as
    the level is uncertain. Raises as fit.train. With an auxiliary machine few own groups suffice, or none.
    """
    mine = [s for s in own.compute if s.error is None and split_of_sample(s.id) != "test"]
    tune = partial(fit.train_op_model, setting=setting, config=config)
    # Ops that were timed here, too, would make an auxiliary machine look better than it is on others.
    asked = {s.request for s in own.compute}
    laws = [
        # Half the epochs, as a law is trained further on own groups.
        _AuxiliaryLaw(
            x.name,
            fit.train_op_model(theirs, setting, replace(config, epochs=math.ceil(config.epochs / 2))),
            theirs,
        )
        for x in auxiliaries
        if len(
            theirs := [s for s in x.known.compute if s.error is None and s.request not in asked][
                :MOST_AUXILIARY_SAMPLES
            ]
        )
        >= MIN_COMPUTE
    ]
    if few := len(mine) < (MIN_STARTED if laws else MIN_COMPUTE):
        # Nothing is chosen, and nothing but the level is fitted.
        best = laws[0].scaled_shape(mine) if laws else AuxiliaryStart(None)
        words = {
            law.auxiliary: f"lends ops their shape; {len(mine)} own groups tell the level" for law in laws[:1]
        }
        # The level is known as far as they tell it.
        normal = NormalDist(0, math.hypot(_SHAPE, 1 / math.sqrt(_LEVEL**-2 + len(mine) * _SHAPE**-2)))
        logs = np.array([normal.inv_cdf(x / 50) for x in range(1, 50)])
        band = quantiles.fit_error_quantiles(np.ones(len(logs)), np.exp(logs))
    else:
        tried: list[tuple[str, AuxiliaryStart, np.ndarray]] = (
            [
                (
                    "",
                    AuxiliaryStart(None),
                    _cross_validate(mine, lambda some, rest: _log_ratios(tune(some), rest)),
                )
            ]
            if len(mine) >= MIN_COMPUTE
            else []
        )
        alone = "".join(f", {_mean_percent_error(logs):.1f}% without" for _, _, logs in tried)
        for law in laws:
            logs = _cross_validate(
                mine, lambda some, rest, of=law.fitted_shape: _log_ratios(tune(some, start=of(some)), rest)
            )
            tried.append((law.auxiliary, law.fitted_shape(mine), logs))
        # Few own groups cannot tell errors of some percent more. An auxiliary machine errs less then, mostly.
        auxiliary, best, logs = min(
            tried, key=lambda one: _mean_percent_error(one[2]) * (1 if one[0] else 1 + _FAVOUR / len(mine))
        )
        words = {
            name: f"lends ops {'their shape' if name == auxiliary else 'nothing'}: own groups err by "
            f"{min(_mean_percent_error(x) for of, _, x in tried if of == name):.1f}% with it{alone} (cross-validation)"
            for name in (law.auxiliary for law in laws)
        }
        measured = features.measured_ms([s for k in range(_FOLDS) for s in mine[k::_FOLDS]]).sum(1)
        band = quantiles.fit_error_quantiles(measured / np.exp(logs), measured)
    offers = [
        [s for s in collective_fit.priceable_samples(x.known.comm) if s.error is None] for x in auxiliaries
    ]
    known = [
        s
        for s in collective_fit.priceable_samples(own.comm)
        if s.error is None and split_of_sample(s.id) != "test"
    ]
    # Without own exchanges, the auxiliary machine's level is all that is known.
    comm = min(
        [[], *offers] if known else offers, key=partial(_cross_validated_exchange_error, known), default=()
    )
    best = replace(best, comm=comm)
    trained = fit.train(own.compute, own.comm, setting, config, progress, best)
    model = replace(
        trained.model,
        weights={**trained.model.weights, **band},
        meta={
            **trained.model.meta,
            "metrics": {
                **trained.model.meta["metrics"],
                "compute_mape": _mean_percent_error(logs),
                "n_compute": float(len(mine)),
                **({"forward_comm_mape": 100 * _LEVEL} if comm and not known else {}),
            },
            "judged_by": {
                "ops": f"with {len(mine)} own groups to tell this machine's level"
                if few
                else f"in cross-validation over {len(mine)} own groups",
                **(
                    {"exchanges": "with no own exchange to tell this machine's level"}
                    if comm and not known
                    else {}
                ),
            },
        },
    )
    return TrainedModel(model, trained.curves), best, words


@dataclass(frozen=True, eq=False)
class _AuxiliaryLaw:
    """An auxiliary machine's law of ops, and the groups that it was trained on."""

    auxiliary: str
    model: NeuralModel
    groups: Sequence[ComputeSample]

    def level_factor(self, own_samples: Sequence[ComputeSample]) -> float:
        """Median ratio of measured times of own ops to those that the auxiliary machine's law predicts."""
        return math.exp(float(np.median(_log_ratios(self.model, own_samples)))) if own_samples else 1.0

    def scaled_shape(self, own_samples: Sequence[ComputeSample]) -> AuxiliaryStart:
        """The auxiliary machine's law scaled by one factor, with its samples scaled likewise."""
        scaled = self._scaled_law(own_samples)
        return AuxiliaryStart(scaled, self._rescaled_groups(scaled), is_final=True)

    def fitted_shape(self, own_samples: Sequence[ComputeSample]) -> AuxiliaryStart:
        """The auxiliary machine's law, with its samples rescaled op by op to this machine."""
        refitted, scaled = fit.refit_rates(self.model, own_samples), self._scaled_law(own_samples)
        mean = {name: (refitted.weights[name] + scaled.weights[name]) / 2 for name in _LINEAR}
        return AuxiliaryStart(
            self.model,
            self._rescaled_groups(replace(refitted, weights={**refitted.weights, **mean})),
        )

    def _scaled_law(self, own_samples: Sequence[ComputeSample]) -> NeuralModel:
        """The auxiliary machine's law scaled to the speed of this machine, by its measured ops."""
        scaled = {name: self.level_factor(own_samples) * self.model.weights[name] for name in _LINEAR}
        return replace(self.model, weights={**self.model.weights, **scaled})

    def _rescaled_groups(self, local_model: NeuralModel) -> list[ComputeSample]:
        """Auxiliary samples, rescaled by the ratio of this machine's law `local_model` to the auxiliary machine's
        law.
        """
        joined = self.groups[:_JOINED]
        factors = fit.predicted_op_ms(local_model, joined) / fit.predicted_op_ms(self.model, joined)
        return [rescale_sample(s, *x) for s, x in zip(joined, factors.tolist(), strict=True)]


def _cross_validate(
    own_samples: Sequence[Sample], logs_of: Callable[[list[Sample], Sequence[Sample]], np.ndarray]
) -> np.ndarray:
    """Logarithms of measured over predicted ms, of each fold by a model of the other folds."""
    # Samples are sorted by id, which is random.
    return np.concatenate(
        [
            logs_of([s for i, s in enumerate(own_samples) if i % _FOLDS != k], fold)
            for k in range(_FOLDS)
            if (fold := own_samples[k::_FOLDS])
        ]
    )


def _log_ratios(model: NeuralModel, groups: Sequence[ComputeSample]) -> np.ndarray:
    """[S] logarithms of measured over predicted ms of ops."""
    return np.log(features.measured_ms(groups).sum(1) / fit.predicted_op_ms(model, groups).sum(1))


def _mean_percent_error(logs: np.ndarray) -> float:
    """Mean absolute error in percent of the measurement, from logarithms of measured over predicted."""
    return float(100 * np.abs(np.exp(-logs) - 1).mean())


def _cross_validated_exchange_error(
    own_samples: Sequence[CollectiveSample], auxiliary_samples: Sequence[CollectiveSample]
) -> float:
    """Cross-validated error in percent on own collectives, with an auxiliary machine's samples joined."""

    def fold_log_ratios(some: Sequence[CollectiveSample], rest: Sequence[CollectiveSample]) -> np.ndarray:
        law = collective_fit.fit_exchange_rates(some, auxiliary_samples)
        both = (
            collective_fit.predicted_and_measured_ms(law, [s], direction)
            for s in rest
            for direction in s.request.definition.directions
        )
        return np.concatenate([np.log(measured / np.maximum(ms, 1e-9)) for ms, measured in both])

    return _mean_percent_error(_cross_validate(own_samples, fold_log_ratios)) if own_samples else 0.0
