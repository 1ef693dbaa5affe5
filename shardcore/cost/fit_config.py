"""Settings and result of a training. This module is free of torch, which takes a second to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from shardcore.core.validation import Count, Record, Rule, Seed, entry_count_within, number_within
from shardcore.cost.neural import NeuralModel
from shardcore.io.measurements import CollectiveSample, ComputeSample

Progress = Callable[[str, int, dict[str, float]], None]

MIN_COMPUTE, MIN_COMM = 50, 10
"""The fewest samples to train with."""
MIN_STARTED = 20
"""The fewest groups to fine-tune with."""
_MOST_LAYERS, _MOST_UNITS = 7, 4096
"""Limits of the correction network. Beyond these it may predict infinite times (see weight_checks.py)."""
_UNITS = Rule(
    lambda units: all(1 <= n <= _MOST_UNITS for n in units), f"it needs 1 to {_MOST_UNITS:,} units in each"
)


@dataclass(frozen=True)
class FitConfig(Record, noun="train config"):
    """Settings of training the compute model.

    epochs: at most.
    patience: epochs without a better validation error, before training stops.
    learning_rate: the highest, reached after a tenth of the steps (one cycle, Smith 2018).
    batch_size: in ops. Smaller where there are few.
    hidden: units of the correction network's layers.
    seed: seed of initial weights and order.
    """

    epochs: Count = 60
    patience: Count = 30
    learning_rate: Annotated[float, number_within(0, 1, above=True, below=True)] = 1e-2
    batch_size: Count = 128
    hidden: Annotated[tuple[int, ...], entry_count_within(1, _MOST_LAYERS), _UNITS] = (64, 64)
    seed: Seed = 0


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained cost model and its learning curves.

    model: the trained model.
    curves: rows {model, epoch, train_loss, validation_mape}.
    """

    model: NeuralModel
    curves: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class AuxiliaryStart:
    """Start of a training from auxiliary samples, of other machines: their law of ops, and samples rescaled to this
    machine.

    law: a model to fine-tune. None: there is none.
    compute: groups at this machine's level, which join the train side.
    comm: exchanges, see collective_fit.fit_exchange_rates.
    is_final: True if the law is trained no further.
    """

    law: NeuralModel | None
    compute: Sequence[ComputeSample] = ()
    comm: Sequence[CollectiveSample] = ()
    is_final: bool = False
