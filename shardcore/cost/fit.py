"""Training the cost models on measurements, and how good they are on others.

The compute model's rates come first, by least squares; the correction is then learned against what they leave. Both see
relative errors: a small group counts as much as a large one.

Shapes: S samples, N shards, K terms, D ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardcore.cost import exchange, features, nets, neural
from shardcore.cost.accuracy import Sample, evaluate, split_of
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.cost.rates import fit_law
from shardcore.types import CommSample, ComputeSample, Setting, ShardCoreError

Progress = Callable[[str, int, dict[str, float]], None]

MIN_COMPUTE, MIN_COMM = 50, 10
"""Samples below which nothing is trained."""
_WHOLE, _PART = 1.0, 0.25
"""Weights of the errors of forward + backward, and of each of them."""


@dataclass(frozen=True)
class FitConfig:
    """epochs at most, patience of them without a better validation error; learning_rate at the start, falling to 0 along a
    cosine; batch_size in groups; hidden layers of the correction; seed of initial weights and order."""

    epochs: int = 80
    patience: int = 25
    learning_rate: float = 5e-3
    batch_size: int = 128
    hidden: tuple[int, ...] = (32,)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for name in ("epochs", "patience", "batch_size"):
            if getattr(self, name) < 1:
                raise ShardCoreError(f"train config has {name} {getattr(self, name)}; it needs at least 1")
        if not 0 < self.learning_rate < 1:
            raise ShardCoreError(f"train config has learning_rate {self.learning_rate}; it needs to be within 0 and 1")
        if any(h < 1 for h in self.hidden):
            raise ShardCoreError(f"train config has hidden {self.hidden}; each layer needs at least 1 unit")


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """curves: rows {model, epoch, train_loss, validation_mape}."""

    model: NeuralModel
    curves: list[dict[str, Any]]


# --- training ----------------------------------------------------------------------------------------------------------


def train(compute: Sequence[ComputeSample], comm: Sequence[CommSample], setting: Setting, config: FitConfig | None = None,
          progress: Progress | None = None) -> TrainedModel:
    """Models for `setting` from the train and validation splits of the samples; those of the test split are left alone.

    Samples that carry an error are skipped. progress(model, epoch, values) is called once an epoch. The same samples and config
    give the same model. Without any exchange, the model prices only topologies that give their links. Raises ShardCoreError for
    samples of another setting, or too few.
    """
    config, progress = config or FitConfig(), progress or (lambda model, epoch, values: None)
    compute = _usable(compute, setting, MIN_COMPUTE, "measured groups")
    comm = exchange.priced(comm)
    comm = _usable(comm, setting, MIN_COMM, "measured exchanges") if comm else []
    curves: list[dict[str, Any]] = []

    def note(model: str, epoch: int, values: dict[str, float]) -> None:
        curves.append({"model": model, "epoch": epoch, **values})
        progress(model, epoch, values)

    with _one_thread():
        weights = {**_fit_compute(*_sides(compute), config, note), **exchange.fit(*_sides(comm), note)}
    splits = {f"{kind}_{side}": sum(split_of(s.id) == side for s in samples)
              for kind, samples in (("compute", compute), ("comm", comm)) for side in ("train", "validation", "test")}
    meta = {"ranges": measured_ranges(_sides(compute)[0], _sides(comm)[0]), "samples": splits,
            "config": {**dataclasses.asdict(config), "hidden": list(config.hidden)}, "metrics": {}, "provenance": {}}
    model = NeuralModel(setting, weights, meta)
    metrics = evaluate(model, _sides(compute)[1], _sides(comm)[1])
    return TrainedModel(dataclasses.replace(model, meta={**meta, "metrics": metrics}), curves)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread: its matrices here are so small that several threads only wait for each other, 30 times slower where
    the cores have other work; and the result does not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _usable(samples: Sequence[Sample], setting: Setting, least: int, what: str) -> list[Sample]:
    other = next((s for s in samples if s.setting != setting), None)
    if other is not None:
        raise ShardCoreError(f"sample {other.id} was measured for ({other.setting}); the model is for ({setting})")
    usable = sorted((s for s in samples if s.error is None), key=lambda s: s.id)
    if len(usable) < least:
        failed = f" ({len(samples) - len(usable)} more failed)" if len(usable) < len(samples) else ""
        raise ShardCoreError(f"there are {len(usable)} {what}{failed} for ({setting}); training needs at least {least}")
    return usable


def _sides(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Train and validation samples; where a dataset is so small that one has none, it takes the other's."""
    train_side, validation = ([s for s in samples if split_of(s.id) == side] for side in ("train", "validation"))
    return train_side or validation or list(samples), validation or train_side or list(samples)


def measured_ranges(compute: Sequence[ComputeSample], comm: Sequence[CommSample]) -> dict[str, list[float]]:
    """Smallest and largest of neural.QUANTITIES among samples."""
    values: dict[str, list[float]] = {name: [] for name in neural.QUANTITIES}
    for sample in compute:
        for name, found in neural.op_quantities(sample.request.shards, sample.request.batch).items():
            values[name] += found
    for sample in comm:
        values["devices"].append(len(sample.request.widths))
        values["exchange_bytes"] += exchange.owned_bytes(sample).tolist()
    return {name: [float(min(v)), float(max(v))] for name, v in values.items() if v}


# --- compute -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups flattened: drivers [N, K] and conditions [N, C] of all shards, starts [S + 1] of each group's rows, measured
    forward and backward ms [S, 2]."""

    drivers: np.ndarray
    conditions: np.ndarray
    starts: np.ndarray
    measured: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[ComputeSample]) -> _Groups:
        rows = [features.features(s.request.shards, s.request.batch) for s in samples]
        measured = [[s.forward.median_ms, s.backward.median_ms] for s in samples]
        return cls(np.concatenate([d for d, _ in rows]), np.concatenate([c for _, c in rows]),
                   np.concatenate([[0], np.cumsum([len(d) for d, _ in rows])]), np.array(measured))

    def sums(self, per_shard: np.ndarray) -> np.ndarray:
        return np.add.reduceat(per_shard, self.starts[:-1], axis=0)


def _fit_compute(train_side: Sequence[ComputeSample], validation: Sequence[ComputeSample], config: FitConfig,
                 note: Progress) -> dict[str, np.ndarray]:
    """The weights of nets.encode and nets.parts."""
    known, unseen = _Groups.of(train_side), _Groups.of(validation)
    terms = np.concatenate([np.ones((len(train_side), 1)), known.sums(known.drivers)], 1)
    laws = np.stack([fit_law(terms, known.measured[:, way]) for way in (0, 1)], 1)
    spread = known.conditions.std(0)
    fixed = {"rates": laws[1:], "condition_low": known.conditions.min(0), "condition_high": known.conditions.max(0),
             "condition_mean": known.conditions.mean(0), "condition_sd": np.where(spread > 1e-9, spread, 1.0)}
    raw = _initial(laws[0], len(features.CONDITIONS), config)
    optimizer = torch.optim.Adam(raw.values(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    tensors = {k: torch.from_numpy(v) for k, v in fixed.items()}
    rng = np.random.default_rng(config.seed)
    best, best_epoch, kept = np.inf, 0, {}
    for epoch in range(config.epochs + 1):  # epoch 0 is the physical baseline
        loss = _epoch(known, raw, tensors, optimizer, config, rng) if epoch else float("nan")
        with torch.no_grad():
            error = mape(_predict(unseen, raw, tensors).sum(1).numpy(), unseen.measured.sum(1))
            loss = float(_loss(_predict(known, raw, tensors), torch.from_numpy(known.measured))) if epoch == 0 else loss
        if epoch:
            schedule.step()
        note("compute", epoch, {"train_loss": loss, "validation_mape": error})
        if error < best:
            best, best_epoch, kept = error, epoch, {k: v.detach().clone() for k, v in raw.items()}
        elif epoch - best_epoch >= config.patience:
            break
    return {**fixed, **{k: v.numpy() for k, v in _positive(kept).items()}}


def _initial(launch_ms: np.ndarray, inputs: int, config: FitConfig) -> dict[str, torch.Tensor]:
    """Weights before training; the network's last layer is 0, so that all begins at the physical baseline."""
    generator = torch.Generator().manual_seed(config.seed)
    sizes = [inputs, *config.hidden, 2]
    raw = {"log_launch": torch.from_numpy(np.log(np.maximum(launch_ms, 1e-4)))}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        last = i == len(sizes) - 2
        scale = 0.0 if last else n_in**-0.5
        raw[f"network.{i}.weight"] = scale * torch.randn(n_in, n_out, generator=generator, dtype=torch.float64)
        raw[f"network.{i}.bias"] = torch.zeros(n_out, dtype=torch.float64)
    return {k: v.requires_grad_() for k, v in raw.items()}


def _positive(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as the formulas take them."""
    return {"launch": raw["log_launch"].exp(), **{k: v for k, v in raw.items() if k != "log_launch"}}


def _predict(groups: _Groups, raw: dict[str, torch.Tensor], fixed: dict[str, torch.Tensor],
             chosen: np.ndarray | None = None) -> torch.Tensor:
    """[S, 2] forward and backward ms of groups (the chosen ones)."""
    chosen = np.arange(len(groups.measured)) if chosen is None else chosen
    rows, group = _shards_of(groups, chosen)
    w = {**fixed, **_positive(raw)}
    codes = nets.encode(w, torch.from_numpy(groups.drivers[rows]), torch.from_numpy(groups.conditions[rows]), torch)
    sums = torch.zeros(len(chosen), codes.shape[1], dtype=codes.dtype).index_add(0, torch.from_numpy(group), codes)
    return nets.parts(w, sums, torch)


def _shards_of(groups: _Groups, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the chosen groups' shards, and the position in `chosen` of the group that each belongs to."""
    sizes = np.diff(groups.starts)[chosen]
    group = np.repeat(np.arange(len(chosen)), sizes)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return groups.starts[chosen][group] + within, group


def _epoch(groups: _Groups, raw: dict[str, torch.Tensor], fixed: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer,
           config: FitConfig, rng: np.random.Generator) -> float:
    """One pass over the groups; the mean loss."""
    losses = []
    order = rng.permutation(len(groups.measured))
    for chosen in _batches(order, config.batch_size):
        loss = _loss(_predict(groups, raw, fixed, chosen), torch.from_numpy(groups.measured[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(chosen))
    return sum(losses) / len(order)


def _batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[i : i + size] for i in range(0, len(order), size))


def _loss(predicted: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Mean absolute log ratio: near the relative error, equal for too much and too little, and deaf to outliers."""
    whole = (predicted.sum(1) / measured.sum(1)).log().abs().mean()
    return _WHOLE * whole + _PART * (predicted / measured).log().abs().mean(0).sum()
