"""Training the cost models on measurements, and how good they are on others.

The compute model's rates come first, by least squares; the correction is then learned against what they leave. Both see
relative errors: a small group counts as much as a large one.

Shapes: S samples, N shards, K terms, D ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from shardcore.cost import features, nets, neural
from shardcore.cost.neural import NeuralModel
from shardcore.types import OUTPUT_BYTES, CommSample, ComputeSample, Setting, ShardCoreError

Sample = TypeVar("Sample", ComputeSample, CommSample)
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


# --- splits ------------------------------------------------------------------------------------------------------------


def split_of(sample_id: str) -> str:
    """"train", "validation" or "test" (8 : 1 : 1), from the id alone: a sample stays on its side as the dataset grows."""
    part = int(hashlib.sha256(sample_id.encode()).hexdigest(), 16) % 10
    return "train" if part < 8 else ("validation" if part == 8 else "test")


def held_out(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the test split."""
    return [s for s in samples if split_of(s.id) == "test"]


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
    comm = _priced(comm)
    comm = _usable(comm, setting, MIN_COMM, "measured exchanges") if comm else []
    curves: list[dict[str, Any]] = []

    def note(model: str, epoch: int, values: dict[str, float]) -> None:
        curves.append({"model": model, "epoch": epoch, **values})
        progress(model, epoch, values)

    with _one_thread():
        weights = {**_fit_compute(*_sides(compute), config, note), **_fit_comm(*_sides(comm), note)}
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
        values["exchange_bytes"] += _owned_bytes(sample).tolist()
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
            error = _mape(_predict(unseen, raw, tensors).sum(1).numpy(), unseen.measured.sum(1))
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


# --- communication -----------------------------------------------------------------------------------------------------


def _fit_comm(train_side: Sequence[CommSample], validation: Sequence[CommSample], note: Progress) -> dict[str, np.ndarray]:
    """The rates of nets.exchange_ms, each way."""
    rates: dict[str, np.ndarray] = {f"exchange_{way}": np.zeros(len(nets.EXCHANGE_TERMS)) for way in ("forward", "backward")}
    for way in ("forward", "backward") if train_side else ():
        (terms, measured), (unseen_terms, unseen) = _exchanges(train_side, way), _exchanges(validation, way)
        rates[f"exchange_{way}"] = law = fit_law(terms, measured)
        fitted = terms @ law
        note(f"{way}_comm", 0, {"train_loss": float(np.abs(np.log(np.maximum(fitted, 1e-9) / measured)).mean()),
                                "validation_mape": _mape(unseen_terms @ law, unseen)})
    return rates


def _priced(samples: Sequence[CommSample]) -> list[CommSample]:
    """The exchanges that the model has terms for: all-to-alls in FP32 on one host. What was over before the last rank's start
    has no transfer time to compare with."""
    return [s for s in samples if (s.request.collective, s.request.payload, s.request.hosts) == ("all_to_all", "fp32", 1)
            and (s.error or min(x.median_ms for x in (*s.forward, *s.backward)) > 0)]


def _exchanges(samples: Sequence[CommSample], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Terms [sum of D, E] and measured transfer ms [sum of D] of all samples' ranks."""
    terms = [nets.exchange_terms(_owned_bytes(s), way == "backward") for s in samples]
    return np.concatenate(terms), np.array([x.median_ms for s in samples for x in getattr(s, way)])


def _owned_bytes(sample: CommSample) -> np.ndarray:
    return np.array(sample.request.widths, dtype=float) * sample.request.batch * OUTPUT_BYTES


def fit_law(terms: np.ndarray, measured: np.ndarray, rounds: int = 15) -> np.ndarray:
    """[K] rates, none negative, that bring terms [S, K] @ rates nearest to measured [S] by mean absolute relative error
    (iteratively reweighted least squares)."""
    weights = 1.0 / measured
    for _ in range(rounds):
        rates = _non_negative_least_squares(terms * weights[:, None], measured * weights)
        error = np.abs(terms @ rates / measured - 1)
        weights = 1.0 / (measured * np.sqrt(np.maximum(error, 0.02)))
    return rates


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0, by trying every set of terms that may be positive: exact, and K is small.

    A trace of ridge shares the rate evenly among terms that the data cannot tell apart (one latency and one a peer, say, when
    all exchanges had two ranks).
    """
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    gram, target = (a / scale).T @ (a / scale) + 1e-9 * np.eye(a.shape[1]), (a / scale).T @ b
    best, solution = 0.0, np.zeros(a.shape[1])
    for mask in itertools.product((False, True), repeat=a.shape[1]):
        chosen = np.flatnonzero(mask)
        if len(chosen):
            x = np.linalg.solve(gram[np.ix_(chosen, chosen)], target[chosen])
            value = -float(target[chosen] @ x)  # of the objective x'Gx - 2x't, at its least
            if (x >= 0).all() and value < best:
                best, solution = value, np.zeros(a.shape[1])
                solution[chosen] = x
    return solution / scale


# --- accuracy ----------------------------------------------------------------------------------------------------------


def predict(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S] forward + backward ms."""
    return _predicted_parts(model, samples).sum(1)


def _predicted_parts(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    if not samples:
        return np.zeros((0, 2))
    sums = np.stack([model.encode(s.request.shards, s.request.batch).sum(0) for s in samples])
    return nets.parts(model.weights, sums)


def evaluate(model: NeuralModel, compute: Sequence[ComputeSample], comm: Sequence[CommSample]) -> dict[str, float]:
    """Accuracy on measurements: flat metrics, errors in percent; those of a kind without samples are left out.

    compute_* is of forward + backward of a group; *_comm_mape of one rank's transfer.
    """
    compute, comm = ([s for s in samples if s.error is None] for samples in (compute, _priced(comm)))
    metrics: dict[str, float] = {"n_compute": float(len(compute)), "n_comm": float(len(comm))}
    if compute:
        both, found = _predicted_parts(model, compute), _Groups.of(compute).measured
        total, measured = both.sum(1), found.sum(1)
        metrics |= {"compute_mape": _mape(total, measured), "forward_compute_mape": _mape(both[:, 0], found[:, 0]),
                    "backward_compute_mape": _mape(both[:, 1], found[:, 1]),
                    "compute_mse_ms2": float(((total - measured) ** 2).mean()),
                    "compute_kendall_tau": kendall_tau(total, measured)}
    if comm:
        for way in ("forward", "backward"):
            terms, measured = _exchanges(comm, way)
            metrics[f"{way}_comm_mape"] = _mape(terms @ model.weights[f"exchange_{way}"], measured)
    return metrics


def _mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(100 * np.mean(np.abs(predicted - measured) / measured))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b of two [S] arrays, 1 where they rank alike; 0 where either has no order."""
    agree = untied_x = untied_y = 0.0
    for i in range(1, len(x)):
        a, b = np.sign(x[i] - x[:i]), np.sign(y[i] - y[:i])
        agree, untied_x, untied_y = agree + a @ b, untied_x + np.abs(a).sum(), untied_y + np.abs(b).sum()
    return float(agree / np.sqrt(untied_x * untied_y)) if untied_x * untied_y else 0.0
