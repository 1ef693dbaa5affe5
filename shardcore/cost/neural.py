"""NeuralModel: the trained cost model, and its files.

Shapes: N shards, G ops, D devices; ... any leading dimensions.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.links import LEVELS
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Shard
from shardcore.core.validation import require, require_type, short_repr
from shardcore.cost import collective_model, features, nets, ranges, weight_checks
from shardcore.cost.composite import DeviceModel
from shardcore.cost.heads import ContendedHead, Head
from shardcore.cost.model import LOOKUPS, QUANTITIES, CorrectionFactor, PredictedQuantity, round_encodings
from shardcore.io import model_files, schema
from shardcore.step.exchanges import ChannelTerms
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload

_SOME_LOOKUPS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Lookups a sample that a shard without any is compared with."""
_AT_ONCE = 1 << 16
"""Shards encoded at a time. The network's layers take 100 times the memory of its result."""


@dataclass(frozen=True, eq=False)
class NeuralModel(DeviceModel):
    """A trained CostModel: networks for ops, and fitted linear laws for exchanges (formulas in nets.py).

    weights: arrays by name.
    meta: JSON, with these entries:
      ranges: smallest and largest measured value of each of ranges.RANGES.
      samples: numbers of samples that it was trained on.
      config: settings of the training.
      metrics: accuracy on the validation split, or as judged_by says.
      judged_by: for ops or exchanges, what their error in metrics is of, if it is not of the validation split.
      provenance: origin, from the trainer.
    confidence: an op costs the quantile of this level. None: the mean.
    """

    weights: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]
    confidence: float | None = None

    def in_device_memory(self, problem: Problem) -> Self:
        """The model at a problem's batch and payloads, as if all rows were in device memory.

        Raises SettingMismatch for a batch beyond those that it was measured at.
        """
        batch = problem.global_batch
        # Models without a range of batches were measured at the setting's alone.
        low, high = self.meta["ranges"].get("batch", (self.setting.batch,) * 2)
        if not low <= batch <= high:
            measured = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
            raise SettingMismatch(
                f"global batch {batch} was not measured; the cost model for ({self.setting}) is good for {measured}: "
                f"measure with --batch {batch}"
            )
        return super().in_device_memory(problem)

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, K + 2] drivers, forward ms and backward ms of shards in an op over `batch` samples.

        None: the setting's batch.
        """
        batch = batch or self.setting.batch

        def encode_chunk(some: Sequence[Shard]) -> np.ndarray:
            return round_encodings(nets.encode_shards(self.weights, *features.shard_features(some, batch)))

        # In chunks, which bound the memory (see _AT_ONCE).
        # At least one chunk, so that no shards give an array of the right width.
        chunks = [encode_chunk(shards[i : i + _AT_ONCE]) for i in range(0, max(1, len(shards)), _AT_ONCE)]
        codes = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        if idle := [i for i, shard in enumerate(shards) if not shard.table.pooling]:
            # No op without lookups was measured. It runs, and takes no longer than one with some.
            for pooling in _SOME_LOOKUPS:
                busy = encode_chunk([_with_lookups(shards[i], pooling) for i in idle])
                codes[idle, -2:] = np.minimum(codes[idle, -2:], busy[:, -2:])
        return codes

    @property
    def heads(self) -> Sequence[Head]:
        """The only head: the time of a fused op whose shards slow each other down."""
        return (ContendedHead(self.weights, self.confidence),)

    def at_confidence(self, confidence: float | None) -> Self:
        """The model that prices an op by a quantile, at a level from 0.005 to 0.995. None: by the mean."""
        return self if confidence == self.confidence else dataclasses.replace(self, confidence=confidence)

    def corrected_by(
        self, factors: Mapping[PredictedQuantity, CorrectionFactor], lineage: Mapping[str, Any] | None = None
    ) -> NeuralModel:
        """The model with launch, rates and collectives' factors in steps multiplied by factors of traced steps."""
        of_ops = np.array([factors[q].value for q in LOOKUPS])
        corrected = {name: self.weights[name] * of_ops for name in ("rates", "launch")}
        for q in QUANTITIES:
            if q.channel:
                corrected |= collective_model.corrected_weights(
                    self.weights, q.channel, q.direction, factors[q]
                )
        about = {} if lineage is None else {"job": dict(lineage)}
        meta = {**self.meta, "provenance": {**self.meta.get("provenance", {}), **about}}
        return dataclasses.replace(self, weights={**self.weights, **corrected}, meta=meta)

    def ms_interval(self, sums: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
        """[...] lower and upper ms of an op. A measurement lies between them with probability `confidence`."""
        # A two-sided interval leaves half of the rest on each side.
        low, high = ((1 - confidence) / 2, (1 + confidence) / 2)
        return self.at_confidence(low).op_ms(sums), self.at_confidence(high).op_ms(sums)

    def out_of_range(self, workload: Workload) -> list[str]:
        """Sentences on the parts of a step beyond the measured range. Empty if there are none."""
        return ranges.describe_out_of_range(self, workload)

    def channel_terms(self, channel: Channel, topology: Topology) -> ChannelTerms:
        """Terms of a channel's collective, from measured rates. An unmeasured collective has the all-to-all's rates.

        Raises ShardCoreError if all-to-alls were not measured and the topology states no links.
        """
        # One device exchanges nothing, so it needs no measured exchanges.
        if (
            len(topology) > 1
            and not collective_model.is_measured(self.weights, collective_model.ALL_TO_ALL)
            and not topology.link(first := next(iter(LEVELS))).gbps
        ):
            raise ShardCoreError(
                f"the cost model for ({self.setting}) has no measured exchanges: give the topology's links (of level "
                f"{first!r}, and of others that it has), or measure exchanges and train again"
            )
        return collective_model.channel_terms(self.weights, channel, topology, self.setting.payloads)


def _with_lookups(shard: Shard, pooling: float) -> Shard:
    """A shard whose table has another mean number of lookups per sample."""
    # A table without lookups may lack a distribution. Zipf(1) stands in.
    access = shard.table.access if isinstance(shard.table.access, Zipf) else Zipf(1.0)
    return dataclasses.replace(shard, table=dataclasses.replace(shard.table, pooling=pooling, access=access))


# --- files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meta:
    """model.json without the setting and the names of features."""

    ranges: Mapping[str, tuple[float, float]]
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    judged_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            require(low <= high, f"range of {short_repr(name)} is {low:g} to {high:g}; it needs to rise")


# Weights are matrices by position, so names have to agree in order too.
_FORMAT = model_files.TrainedFormat(
    "model",
    _Meta,
    {
        "drivers": features.DRIVERS,
        "conditions": features.CONDITIONS,
        "exchange_terms": collective_model.EXCHANGE_TERMS,
    },
)


def save(model: NeuralModel, folder: str | Path) -> None:
    """Write a model to model.json and weights.safetensors. Raises ShardCoreError for invalid weights."""
    # What load would refuse is refused here, while the training's results still exist.
    weight_checks.require_weights(model.weights)
    _FORMAT.write_trained(folder, model.setting, model.meta, model.weights)


def load(folder: str | Path) -> NeuralModel:
    """Read a model that `save` wrote, bit for bit. Raises ShardCoreError for invalid weights or metadata."""
    require_type(folder, (str, os.PathLike), "folder of a model", "a path")
    setting, meta, weights = _FORMAT.read_trained(folder)
    with schema.prefix_errors(f"model in {folder}"):
        weight_checks.require_weights(weights)
    return NeuralModel(setting, weights, {"provenance": {}, **meta})
