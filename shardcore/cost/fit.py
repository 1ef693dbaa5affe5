"""Train the cost models on measurements.

First the compute model's rates are fitted by least squares. Then correction and contention learn the
remaining error. Both minimise relative errors, so a small op counts as much as a large one.

Shapes: S samples, N shards, K terms, D ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from shardcore.core.types import Setting
from shardcore.core.validation import describe_differences, require
from shardcore.cost import collective_fit, collective_model, features, nets, quantiles, ranges
from shardcore.cost.accuracy import evaluate_accuracy
from shardcore.cost.fit_config import (
    MIN_COMM,
    MIN_COMPUTE,
    MIN_STARTED,
    AuxiliaryStart,
    FitConfig,
    Progress,
    TrainedModel,
)
from shardcore.cost.known_errors import NOT_MEASURED
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.cost.nnls import fit_nonnegative_rates
from shardcore.cost.profile import Profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.io.dataset import Sample, split_of_sample
from shardcore.io.measurements import CollectiveSample, ComputeRequest, ComputeSample

_WHOLE, _PART = 1.0, 0.25
"""Weights in the loss: of forward + backward, and of each of the two."""
_LEAST_STEPS = 8
"""The fewest steps of an epoch. Small datasets get smaller batches."""
_FEWEST_AT_BATCH = 8
"""Groups at a batch, for it to count as measured."""
_OF_EXCHANGES = ("devices", "exchange_bytes", "exchange_id_bytes")
"""Names of ranges.RANGES that concern exchanges."""
_CONTENTIONS = 8
"""Hidden units of the contention network."""
_FEWEST_UNSEEN = 30
"""Validation groups that early stopping needs. Fewer stop it by chance, and training groups are scarce then."""
_FINE_TUNING = 0.2
"""Share of the learning rate that fine-tuning takes, as most weights are known."""
_SEQUENCES = 5
"""Groups of sequences that their rates need. With fewer, what a pooled op takes tells these rates, too."""
_PRIOR = (
    ("unpooled_cells", "lookup_cells", (1.0, 0.3)),
    ("unpooled_unique_rows", "unique_rows", (1.0, 20.0)),
)
"""What a sequence takes on a CPU on top of a pooled op, for each of its cells and distinct rows (features.DRIVERS): so
many times the ms of pooled ops for each of theirs, forward and backward. It is right to a factor of two or so. Rates of
few small sequences alone are off by ten."""


# --- training -----------------------------------------------------------------------------------------------


def train(
    compute_samples: Sequence[ComputeSample],
    collective_samples: Sequence[CollectiveSample],
    setting: Setting,
    config: FitConfig | None = None,
    progress: Progress | None = None,
    start: NeuralModel | Profile | AuxiliaryStart | None = None,
) -> TrainedModel:
    """Train a model for `setting` on the train and validation splits. The test split is not used.

    Samples with an error are skipped. The same samples and config give the same model.

    With fewer than 30 validation groups, the compute model's weights are trained again on both splits, to the
    end. Its error bands and metrics stay those of the first training, which did not see the validation split.

    progress: called as progress(model, epoch, values), once an epoch.
    start: a model to fine-tune, of another batch, optimizer or machine; or a hardware profile. Some dozens of
      samples then suffice. Or those of other machines.

    Without measured exchanges, fine-tuning on the same hardware keeps those of `start`.
    Otherwise the model prices only topologies that state their links.

    Raises ShardCoreError for samples of another setting, or too few.
    """
    # A no-op progress saves checks for None at each call.
    config, progress = config or FitConfig(), progress or (lambda model, epoch, values: None)
    shape = start if isinstance(start, AuxiliaryStart) else AuxiliaryStart(None)
    start = shape.law if isinstance(start, AuxiliaryStart) else start
    # Few groups suffice for fine-tuning: most weights are known. None have to, where others join.
    least = 0 if shape.compute else MIN_COMPUTE if start is None else MIN_STARTED
    compute_samples = _usable_samples(compute_samples, setting, least, "measured groups")
    collective_samples = collective_fit.priceable_samples(collective_samples)
    # No exchanges at all are fine. Some, but too few, are an error.
    collective_samples = (
        _usable_samples(collective_samples, setting, 0 if shape.comm else MIN_COMM, "measured exchanges")
        if collective_samples
        else []
    )
    curves: list[dict[str, Any]] = []

    def record_epoch(model: str, epoch: int, values: dict[str, float]) -> None:
        curves.append({"model": model, "epoch": epoch, **values})
        progress(model, epoch, values)

    # Training sees `known`. `unseen` decides when to stop, and gives error quantiles.
    (seen, validation), (seen_comm, unseen_comm) = (
        _split_train_validation(compute_samples),
        _split_train_validation(collective_samples),
    )
    known, unseen = _flatten_samples([*seen, *shape.compute]), _flatten_samples(validation or shape.compute)
    with _single_torch_thread():
        if isinstance(start, Profile):
            # Its shards are those of the measured groups, at the same batches.
            start = _distilled_model(start, [s.request for s in compute_samples], setting, config)
        weights = {
            **_train_weights(known, unseen, config, record_epoch, start, shape.is_final),
            **collective_fit.fit_exchange_rates(seen_comm, shape.comm),
        }
    # Ranges are those of training samples: the model knows no others.
    measured, carried, provenance = measured_ranges(seen or shape.compute, seen_comm), {}, {}
    if start is not None and start is not shape.law:
        # Keep the origin of the model that was fine-tuned.
        provenance = {"start": {"setting": str(start.setting), **start.meta["provenance"]}}
        # Exchanges belong to the hardware, not to the batch or the optimizer.
        if not collective_samples and start.setting.hardware == setting.hardware:
            weights |= {
                k: v
                for k, v in start.weights.items()
                if k.startswith("exchange") or k in collective_model.OWN_WORK
            }
            measured |= {k: v for k, v in start.meta["ranges"].items() if k in _OF_EXCHANGES}
            carried = {k: v for k, v in start.meta.items() if k == "steps"}
    # Counts of samples by kind and split, for the model's file.
    splits = {
        f"{kind}_{side}": sum(split_of_sample(s.id) == side for s in samples)
        for kind, samples in (("compute", compute_samples), ("comm", collective_samples))
        for side in ("train", "validation", "test")
    }
    # Sizes of hidden layers as trained: those of `start` may differ from the config's.
    # The last layer has two outputs, always.
    *hidden, _ = (
        weights[k].size for k in sorted(weights) if k.startswith("network.") and k.endswith(".bias")
    )
    meta = {
        "ranges": measured,
        "samples": splits,
        "config": {**asdict(config), "hidden": hidden},
        "metrics": {},
        "provenance": provenance,
        **carried,
    }
    # Metrics need a model, and a model's meta has metrics: so make it twice.
    model = NeuralModel(setting, weights, meta)
    meta["metrics"] = evaluate_accuracy(model, validation, unseen_comm)
    if len(validation) < _FEWEST_UNSEEN:
        # The two sides are the same groups where one of them was empty.
        learned = {s.id: s for s in (*seen, *validation)}.values()
        again = train_op_model(list(learned), setting, config, replace(shape, law=start)).weights
        # Errors on groups that were trained on would be too small.
        weights |= {k: v for k, v in again.items() if not k.startswith("band.")}
        meta["ranges"] = measured | measured_ranges(list(learned) or shape.compute, [])
    return TrainedModel(replace(model, weights=weights, meta=meta), curves)


def train_op_model(
    compute_samples: Sequence[ComputeSample],
    setting: Setting,
    config: FitConfig,
    start: AuxiliaryStart | None = None,
) -> NeuralModel:
    """Train a model of fused ops on all samples, without early stopping. It has no rates of collectives."""
    start = start or AuxiliaryStart(None)
    groups = _flatten_samples([*compute_samples, *start.compute])
    with _single_torch_thread():
        weights = _train_weights(groups, groups, config, lambda *_: None, start.law, start.is_final)
    return NeuralModel(setting, weights, {"ranges": {}})


def refit_rates(law: NeuralModel, compute_samples: Sequence[ComputeSample]) -> NeuralModel:
    """A trained model of ops with launch and rates fitted to other samples; correction and contention are kept."""
    return replace(
        law, weights={**law.weights, **_fit_launch_and_rates(_flatten_samples(compute_samples), law)}
    )


def predicted_op_ms(model: NeuralModel, compute_samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, 2] predicted ms of measured ops, forward and backward."""
    groups = _flatten_samples(compute_samples)
    return nets.op_ms(
        model.weights, groups.sum_by_op(nets.encode_shards(model.weights, groups.drivers, groups.conditions))
    )


def _flatten_samples(samples: Sequence[ComputeSample]) -> _Groups:
    """Measured ops as arrays: features of all shards, the first row of each op, and measured ms."""
    return _Groups(
        *features.op_features([s.request for s in samples]),
        features.measured_ms(samples),
        on_cpu=samples[0].setting.hardware.startswith("cpu-"),
    )


@contextmanager
def _single_torch_thread() -> Iterator[None]:
    """Context in which torch runs on one thread.

    The matrices are small: threads mostly wait for each other, 30 times slower on busy cores.
    The result also no longer depends on the number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _usable_samples(samples: Sequence[Sample], setting: Setting, least: int, what: str) -> list[Sample]:
    """Samples without an error, sorted by id. Raises ShardCoreError for another setting, or fewer than `least`."""
    # A model is for one hardware, optimizer and precision. Mixed timings would average them.
    for s in samples:
        require(
            s.setting == setting,
            f"sample {s.id} has another setting than the model: {describe_differences(s.setting, setting)}",
        )
    # Sorted by id, so that the order of files does not matter.
    usable = sorted((s for s in samples if s.error is None), key=lambda s: s.id)
    failed = f" ({len(samples) - len(usable)} more failed)" if len(usable) < len(samples) else ""
    require(
        len(usable) >= least,
        f"there are {len(usable)} {what}{failed} for ({setting}); training needs at least {least}",
    )
    return usable


def _split_train_validation(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Train and validation samples. In a tiny dataset an empty split takes the samples of the other split."""
    train_side, validation = (
        [s for s in samples if split_of_sample(s.id) == side] for side in ("train", "validation")
    )
    # Never empty: a side without samples falls back on the other, then on all.
    return train_side or validation or list(samples), validation or train_side or list(samples)


def measured_ranges(
    compute_samples: Sequence[ComputeSample], collective_samples: Sequence[CollectiveSample]
) -> dict[str, list[float]]:
    """The smallest and largest measured value of each quantity of ranges.RANGES."""
    values: dict[str, list[float]] = {name: [] for name in ranges.RANGES}
    for sample in compute_samples:
        for name, of_op in ranges.op_quantities(sample.request.shards, sample.request.batch).items():
            values[name] += of_op
    for sample in collective_samples:
        # Exchanges of ids are small, so they have a separate range.
        values["devices"].append(len(sample.request.widths))
        name = "exchange_id_bytes" if sample.request.definition.ids else "exchange_bytes"
        values[name] += collective_fit.rank_bytes(sample).tolist()
    # Local batches of replicas are no global batches (see _global_batches).
    values["batch"] = _global_batches(compute_samples)
    return {name: [float(min(v)), float(max(v))] for name, v in values.items() if any(v)}


def _global_batches(samples: Sequence[ComputeSample]) -> list[float]:
    """Global batches of measured ops, without the local batches at which replicas of small tables ran."""
    largest: dict[int, list[int]] = {}
    for sample in samples:
        largest.setdefault(sample.request.batch, []).append(max(s.bytes for s in sample.request.shards))
    # Replicas run at the local batch and are small. A quarter of the largest op tells them apart.
    enough = max(map(max, largest.values())) / 4
    return [
        batch
        for batch, n_bytes in largest.items()
        # The largest batch always counts, even if few ops ran at it.
        if (len(n_bytes) >= _FEWEST_AT_BATCH and max(n_bytes) >= enough) or batch == max(largest)
    ]


# --- compute ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Groups:
    """Fused ops, flattened to rows of shards.

    drivers: [N, K] of all shards.
    conditions: [N, C] of all shards.
    starts: [S + 1] first row of each op.
    measured: [S, 2] ms, forward and backward.
    on_cpu: True if a CPU ran them.
    """

    drivers: np.ndarray
    conditions: np.ndarray
    starts: np.ndarray
    measured: np.ndarray
    on_cpu: bool = False

    def sum_by_op(self, per_shard: np.ndarray) -> np.ndarray:
        """[S, ...] sums over the shards of each op."""
        # reduceat sums consecutive rows. No op is empty, which it would get wrong.
        return np.add.reduceat(per_shard, self.starts[:-1], axis=0)


def _train_weights(
    train_groups: _Groups,
    validation_groups: _Groups,
    config: FitConfig,
    note: Progress,
    start: NeuralModel | None,
    is_final: bool = False,
) -> dict[str, np.ndarray]:
    """Train the weights of nets.encode_shards and nets.op_ms, and fit the error quantiles (quantiles.py)."""
    first = _initial_weights(train_groups, config) if start is None else dict(start.weights)
    if start is not None and not is_final:
        first |= _fit_launch_and_rates(train_groups, start)
    # Fixed weights are constants of the formulas; raw ones are trained, of positive ones the logarithms.
    fixed = {k: first[k] for k in _FIXED}
    tensors = {k: torch.from_numpy(v) for k, v in fixed.items()}
    raw = {
        f"log.{k}" if k in _LOGS else k: torch.from_numpy(
            np.log(v) if k in _LOGS else np.array(v)
        ).requires_grad_()
        for k, v in first.items()
        if k == "launch" or k.startswith(("network.", "contention."))
    }
    # Enough steps an epoch, even for small datasets.
    n_known = len(train_groups.measured)
    batch_size = max(1, min(config.batch_size, n_known // _LEAST_STEPS))
    # One cycle: the rate rises for a tenth of the steps, then falls to next to nothing.
    rate = config.learning_rate * (1 if start is None else _FINE_TUNING)
    optimizer = torch.optim.Adam(raw.values(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        rate,
        pct_start=0.1,
        # Of 10 steps, the rise would take none: torch divides by its length.
        total_steps=max(11, 1 + config.epochs * math.ceil(n_known / batch_size)),
    )
    # The order of batches. Initial weights come from another generator.
    rng = np.random.default_rng(config.seed)
    best, best_epoch, kept, loss = np.inf, 0, {}, np.nan
    # Early stopping: keep the weights with the best validation error.
    # Epoch 0 is the physical baseline, or the model to start from.
    for epoch in range(1 if is_final else config.epochs + 1):
        if epoch:
            loss = _train_epoch(train_groups, raw, tensors, optimizer, schedule, batch_size, rng)
        with torch.no_grad():
            if not epoch:
                # Before training, the loss is that of the whole training side.
                loss = float(
                    log_ratio_loss(
                        _predict_op_ms(train_groups, raw, tensors), torch.from_numpy(train_groups.measured)
                    )
                )
            # Forward and backward together: their sum is what a step costs.
            error = mape(
                _predict_op_ms(validation_groups, raw, tensors).sum(1).numpy(),
                validation_groups.measured.sum(1),
            )
        note("compute", epoch, {"train_loss": loss, "validation_mape": error})
        # A copy: the optimizer changes these tensors in place.
        if error < best:
            best, best_epoch, kept = error, epoch, {k: v.detach().clone() for k, v in raw.items()}
        # No better for `patience` epochs: later weights would fit the noise of training samples.
        elif epoch - best_epoch >= config.patience:
            break
    with torch.no_grad():
        # Errors on unseen ops: those on trained ones would be too small.
        predicted = _predict_op_ms(validation_groups, kept, tensors).sum(1).numpy()
    return {
        **fixed,
        **{k: v.numpy() for k, v in _exponentiated_weights(kept).items()},
        **quantiles.fit_error_quantiles(predicted, validation_groups.measured.sum(1)),
    }


_LOGS = ("launch", "contention.0.weight", "contention.1.weight")
"""Positive weights. Training moves their logarithms."""
_FIXED = ("rates", "condition_low", "condition_high", "condition_mean", "condition_sd", "load_typical")
"""Weights that training leaves as they are."""


def _initial_weights(train_groups: _Groups, config: FitConfig) -> dict[str, np.ndarray]:
    """Initial weights of the compute model.

    The network's last layer starts at 0, and contention starts near 0. So training begins at the physical
    baseline.
    """
    # [S, K] loads of ops.
    drivers = train_groups.sum_by_op(train_groups.drivers)
    launch, rates = _fit_linear_laws(train_groups, [drivers, drivers])
    spread = train_groups.conditions.std(0)
    # Conditions are standardised, and loads are relative to the median op.
    weights = {
        "launch": launch,
        "rates": rates,
        # Bounds of the correction: beyond them it stays constant.
        "condition_low": train_groups.conditions.min(0),
        "condition_high": train_groups.conditions.max(0),
        "condition_mean": train_groups.conditions.mean(0),
        # A condition that never varies has no spread, and would divide by 0.
        "condition_sd": np.where(spread > 1e-9, spread, 1.0),
        # At least 1, for drivers that most ops lack have a median of 0.
        "load_typical": np.maximum(np.median(drivers, 0), 1.0),
    }
    generator = torch.Generator().manual_seed(config.seed)

    def draw_normal(*shape: int) -> np.ndarray:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()

    # Scale by 1 / sqrt(inputs), so that activations start near unit variance.
    sizes = [len(features.CONDITIONS), *config.hidden, 2]
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        # The last layer starts at 0: a correction of exp(0) = 1.
        scale = 0.0 if i == len(config.hidden) else n_in**-0.5
        weights |= {
            f"network.{i}.weight": scale * draw_normal(n_in, n_out),
            f"network.{i}.bias": np.zeros(n_out),
        }
    return weights | {
        # Positive, near exp(-2), with some spread so that units differ.
        "contention.0.weight": np.exp(0.3 * draw_normal(len(features.DRIVERS), _CONTENTIONS) - 2),
        "contention.0.bias": draw_normal(_CONTENTIONS),
        # exp(-5): next to no contention at first.
        "contention.1.weight": np.full((_CONTENTIONS, 2), np.exp(-5.0)),
    }


def _distilled_model(
    profile: Profile, requests: Sequence[ComputeRequest], setting: Setting, config: FitConfig
) -> NeuralModel:
    """A model that imitates a hardware profile's prices of ops, to be fine-tuned. It has no rates of collectives.

    requests: ops of the measured groups. It learns from them and from each of their shards alone, priced by the
      profile.
    """
    # Shards by the batch of their op: replicas run at the local batch.
    shards = {s: r.batch for r in requests for s in r.shards}
    drawn = [*requests, *(ComputeRequest((s,), batch) for s, batch in shards.items())]
    model = ProfileModel(profile, replace(setting, hardware=profile.name))
    # Encodings add up, so an op is the sum over its shards.
    sums = np.stack([model.encode(r.shards, r.batch).sum(0) for r in drawn])
    groups = _Groups(*features.op_features(drawn), model.op_part_ms(sums)[:, :2])
    weights = _train_weights(groups, groups, config, lambda *_: None, None)
    # No ranges and no exchanges: both have to come from measurements.
    return NeuralModel(
        model.setting,
        weights,
        {"ranges": {}, "provenance": {"profile": NOT_MEASURED, "profile_digest": profile.digest}},
    )


def _fit_launch_and_rates(train_groups: _Groups, law: NeuralModel) -> dict[str, np.ndarray]:
    """Launch and rates fitted to ops under a trained model's correction and contention, with the ranges of both."""
    old = law.weights
    # Under both, costs are linear in rates and launch. So least squares still applies.
    # [N, 2] and [S, 2] factors that stay as learned.
    correction = nets.correction_factors(old, train_groups.conditions)
    contention = nets.contention_factors(old, train_groups.sum_by_op(train_groups.drivers))
    # Factors differ by direction, so terms do, too.
    terms = [
        train_groups.sum_by_op(train_groups.drivers * c[:, None]) * by[:, None]
        for c, by in zip(correction.T, contention.T, strict=True)
    ]
    launch, rates = _fit_linear_laws(train_groups, terms)
    return {
        "launch": launch,
        "rates": rates,
        # Both ranges: the old correction stays valid where it was learned.
        "condition_low": np.minimum(old["condition_low"], train_groups.conditions.min(0)),
        "condition_high": np.maximum(old["condition_high"], train_groups.conditions.max(0)),
    }


def _fit_linear_laws(train_groups: _Groups, terms: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Launch [2] and rates [K, 2] of a linear law of ops for each direction, from its terms [S, K]."""
    # The column of ones fits the launch.
    with_ones = [np.concatenate([np.ones((len(x), 1)), x], 1) for x in terms]
    laws = np.stack(
        [_fit_one_direction(train_groups, x, direction) for direction, x in enumerate(with_ones)], 1
    )
    # Least squares may give 0, which has no logarithm: a launch takes 0.1 us at least.
    return np.maximum(laws[0], 1e-4), laws[1:]


def _fit_one_direction(train_groups: _Groups, terms: np.ndarray, direction: int) -> np.ndarray:
    """[K + 1] launch time and rates of forward or backward ops, from terms [S, K + 1].

    On a CPU, a prior holds the rates of sequences where few were measured.
    """
    measured, column = train_groups.measured[:, direction], ("launch", *features.DRIVERS).index
    pooled = terms[:, column("unpooled_cells")] == 0
    prior = np.zeros((len(_PRIOR), terms.shape[1]))
    if train_groups.on_cpu and pooled.any() and np.sum(~pooled) < _SEQUENCES:
        per_ms = np.median(terms[pooled] / measured[pooled, None], 0)
        # Each row is an op of 1 ms, of a sequence's cells or distinct rows only. A row of zeros tells nothing.
        for row, (name, of_pooled, times) in zip(prior, _PRIOR, strict=True):
            row[column(name)] = per_ms[column(of_pooled)] / times[direction]
    return fit_nonnegative_rates(
        np.concatenate([terms, prior]), np.concatenate([measured, np.ones(len(prior))])
    )


def _exponentiated_weights(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with the logarithms of positive ones turned back."""
    return {k.removeprefix("log."): v.exp() if k.startswith("log.") else v for k, v in raw.items()}


def _predict_op_ms(
    groups: _Groups,
    raw: dict[str, torch.Tensor],
    fixed: dict[str, torch.Tensor],
    chosen: np.ndarray | None = None,
) -> torch.Tensor:
    """[S, 2] predicted ms, forward and backward, of all ops or the chosen ones."""
    chosen = np.arange(len(groups.measured)) if chosen is None else chosen
    firsts, ends = groups.starts[chosen], groups.starts[chosen + 1]
    rows = np.concatenate([np.arange(*of_op) for of_op in zip(firsts, ends, strict=True)])
    # Exponentials keep launch and contention positive, as proofs of bounds need.
    w = {**fixed, **_exponentiated_weights(raw)}
    drivers, conditions = torch.from_numpy(groups.drivers[rows]), torch.from_numpy(groups.conditions[rows])
    codes = nets.encode_shards(w, drivers, conditions, torch)
    # Sum shards by op.
    sums = torch.segment_reduce(codes, "sum", lengths=torch.from_numpy(ends - firsts))
    return nets.op_ms(w, sums, torch)


def _train_epoch(
    groups: _Groups,
    raw: dict[str, torch.Tensor],
    fixed: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batch_size: int,
    rng: np.random.Generator,
) -> float:
    """Train one pass over all ops. Returns the mean loss."""
    losses = []
    # A new order each epoch, so that batches differ.
    order = rng.permutation(len(groups.measured))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        # Weights are shared by all shards of the batch, so one backward pass serves all.
        loss = log_ratio_loss(
            _predict_op_ms(groups, raw, fixed, chosen), torch.from_numpy(groups.measured[chosen])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The rate changes with every step, not with every epoch.
        schedule.step()
        # Weighted by size: the last batch may be smaller.
        losses.append(loss.item() * len(chosen))
    return sum(losses) / len(order)


def log_ratio_loss(predicted: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Mean absolute log ratio of predicted and measured ms: of forward + backward, and of each.

    It is near the relative error, but counts errors in both directions equally. Outliers weigh little.
    """
    # Of the total, as searches add forward and backward.
    whole = (predicted.sum(1) / measured.sum(1)).log().abs().mean()
    # And of each direction, or the two could trade errors.
    return _WHOLE * whole + _PART * (predicted / measured).log().abs().mean(0).sum()
