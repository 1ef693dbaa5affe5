"""Settings and result of a training. This module is free of torch, which takes a second to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.core.validation import MOST_COUNT, MOST_SEED, require, require_within
from shardcore.cost.neural import NeuralModel
from shardcore.io.measurements import CollectiveSample, ComputeSample

Progress = Callable[[str, int, dict[str, float]], None]

MIN_COMPUTE, MIN_COMM = 50, 10
"""The fewest samples to train with."""
MIN_STARTED = 20
"""The fewest groups to fine-tune with."""
_MOST_LAYERS, _MOST_UNITS = 7, 4096
"""Limits of the correction network. Beyond these it may predict infinite times (see weight_checks.py)."""


@dataclass(frozen=True)
class FitConfig:
    """Settings of training the compute model.

    epochs: at most.
    patience: epochs without a better validation error, before training stops.
    learning_rate: the highest, reached after a tenth of the steps (one cycle, Smith 2018).
    batch_size: in ops. Smaller where there are few.
    hidden: units of the correction network's layers.
    seed: seed of initial weights and order.
    """

    epochs: int = 60
    patience: int = 30
    learning_rate: float = 1e-2
    batch_size: int = 128
    hidden: tuple[int, ...] = (64, 64)
    seed: int = 0

    def __post_init__(self) -> None:
        # Files give lists. The field is a tuple, so that equal configs compare equal.
        object.__setattr__(self, "hidden", tuple(self.hidden))
        require_within(
            self,
            "train config",
            epochs=(1, MOST_COUNT),
            patience=(1, MOST_COUNT),
            batch_size=(1, MOST_COUNT),
            seed=(0, MOST_SEED),
        )
        require(
            0 < self.learning_rate < 1,
            f"train config has learning_rate {self.learning_rate}; it needs to be within 0 and 1",
        )
        require(
            1 <= len(self.hidden) <= _MOST_LAYERS and all(1 <= h <= _MOST_UNITS for h in self.hidden),
            f"train config has hidden {self.hidden}; it needs 1 to {_MOST_LAYERS} layers, each of 1 to {_MOST_UNITS} "
            "units",
        )


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model and its learning curves.

    model: the trained model.
    curves: rows {model, epoch, train_loss, validation_mape}.
    """

    model: NeuralModel
    curves: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Shape:
    """A law and samples that other machines lend to a training (lending.py).

    law: a model to fine-tune. None: there is none.
    compute: groups at this machine's level, which join the train side.
    comm: exchanges, see collective_fit.fit.
    is_final: True if the law is trained no further.
    """

    law: NeuralModel | None
    compute: Sequence[ComputeSample] = ()
    comm: Sequence[CollectiveSample] = ()
    is_final: bool = False
