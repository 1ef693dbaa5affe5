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
from shardcore.core.types import Problem, Setting, Shard
from shardcore.core.validation import require, require_type, shown
from shardcore.cost import collective_model, features, nets, quantiles, ranges, weight_checks
from shardcore.cost.composite import Composite, composed
from shardcore.cost.model import Compiled, round_encodings
from shardcore.io import files, model_files, schema
from shardcore.step.exchanges import ChannelTerms, ExchangeLaw
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload

_SOME_LOOKUPS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Lookups a sample that a shard without any is compared with."""
_AT_ONCE = 1 << 16
"""Shards encoded at a time. The network's layers take 100 times the memory of its result."""


@dataclass(frozen=True, eq=False)
class NeuralModel(ExchangeLaw):
    """A CostModel with the formulas of nets.py.

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

    setting: Setting
    weights: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]
    confidence: float | None = None

    def for_problem(self, problem: Problem) -> NeuralModel | Composite:
        """See model.CostModel."""
        return composed((self.in_device_memory(problem),), problem)

    def in_device_memory(self, problem: Problem) -> NeuralModel:
        """The model at the batch of a problem, and with its job's payloads, as if no rows were elsewhere."""
        job = problem.job
        return self.for_batch(problem.global_batch).for_payloads(job.forward_payload, job.backward_payload)

    def for_payloads(self, forward: str, backward: str) -> NeuralModel:
        """The model of jobs with these data types of outputs and gradients (types.PAYLOADS)."""
        setting = dataclasses.replace(self.setting, forward_payload=forward, backward_payload=backward)
        return dataclasses.replace(self, setting=setting)

    def for_batch(self, batch: int) -> NeuralModel:
        """The model of problems with another global batch.

        Raises SettingMismatch for a batch beyond those that it was measured at.
        """
        # Models without a range of batches were measured at the setting's alone.
        low, high = self.meta["ranges"].get("batch", (self.setting.batch,) * 2)
        if not low <= batch <= high:
            measured = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
            raise SettingMismatch(
                f"global batch {batch} was not measured; the cost model for ({self.setting}) is good for {measured}: "
                f"measure with --batch {batch}"
            )
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, batch=batch))

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, K + 2] drivers, forward ms and backward ms of shards in an op over `batch` samples.

        None: the setting's batch.
        """
        batch = batch or self.setting.batch

        def encoded(some: Sequence[Shard]) -> np.ndarray:
            return round_encodings(nets.encode(self.weights, *features.features(some, batch)))

        # In chunks, which bound the memory (see _AT_ONCE).
        # At least one chunk, so that no shards give an array of the right width.
        chunks = [encoded(shards[i : i + _AT_ONCE]) for i in range(0, max(1, len(shards)), _AT_ONCE)]
        codes = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        if idle := [i for i, shard in enumerate(shards) if not shard.table.pooling]:
            # No op without lookups was measured. It runs, and takes no longer than one with some.
            for pooling in _SOME_LOOKUPS:
                busy = encoded([_with_lookups(shards[i], pooling) for i in idle])
                codes[idle, -2:] = np.minimum(codes[idle, -2:], busy[:, -2:])
        return codes

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[...] ms, forward + backward, of ops from summed encodings [..., K + 2]. 0 for an empty op."""
        ms = nets.parts(self.weights, np.asarray(sums, dtype=float)).sum(-1)
        return ms if self.confidence is None else quantiles.quantile(self.weights, ms, self.confidence)

    def at_confidence(self, confidence: float | None) -> Self:
        """See model.ProbabilisticCostModel. Known are levels from 0.005 to 0.995. None: ops cost their mean."""
        return dataclasses.replace(self, confidence=confidence)

    @property
    def lower(self) -> Self | None:
        """The model of means, unless quantiles lie below them. See model.CostModel."""
        if self.confidence is None:
            return self
        return self.at_confidence(None) if quantiles.error(self.weights, self.confidence) >= 0 else None

    def interval(self, sums: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
        """[...] ms, low and high. A measurement of the op lies between them with probability `confidence`."""
        # A two-sided interval leaves half of the rest on each side.
        low, high = ((1 - confidence) / 2, (1 + confidence) / 2)
        return self.at_confidence(low).head(sums), self.at_confidence(high).head(sums)

    def compiled(self) -> Compiled:
        """`head` for one op at a time."""
        from shardcore.cost import compiled  # numba compiles on import

        w = self.weights
        error = 0.0 if self.confidence is None else quantiles.error(w, self.confidence)
        # The order of parameters is that of compiled.contended.
        # Sizes come first: compiled.contended computes offsets from them.
        numbers = [w["contention.0.bias"].size, w["band.log_ms"].size, nets.LOAD_FLOOR, error]
        arrays = (
            w["launch"],
            w["band.log_ms"],
            w["band.width"],
            1 / w["load_typical"],
            w["contention.0.weight"],
            w["contention.0.bias"],
            w["contention.1.weight"],
        )
        parameters, fetched = (
            np.concatenate([[*numbers, forward], *(np.ravel(x) for x in arrays)], dtype=float)
            for forward in (True, False)
        )
        return Compiled(compiled.ready(compiled.contended), parameters, fetched)

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        """[...] the share of forward in an op's ms, equal at each confidence. 0 for an empty op."""
        both = nets.parts(self.weights, np.asarray(sums, dtype=float))
        total = both.sum(-1)
        # An empty op would divide 0 by 0.
        return np.divide(both[..., 0], total, out=np.zeros_like(total), where=total > 0)

    def link_ms(self, sums: np.ndarray) -> np.ndarray:
        """[...] zeros: rows below device memory are priced beside the model (composite.LinkHead)."""
        return np.zeros(np.shape(sums)[:-1])

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel."""
        return ranges.out_of_range(self, workload)

    @property
    def launch_ms(self) -> float:
        """ms of a launch, forward and backward (see model.BoundableCostModel)."""
        return float(np.sum(self.weights["launch"]))

    def rates(self, least: np.ndarray) -> np.ndarray:
        """[..., K + 2] rates for model.BoundableCostModel: 0 for drivers, contention for both ms.

        Contention grows with the drivers, so its value at `least` is a lower bound.
        """
        # The last two entries are ms, not drivers.
        drivers = np.asarray(least, dtype=float)[..., :-2]
        return np.concatenate([np.zeros_like(drivers), nets.contention(self.weights, drivers)], -1)

    def exchange(self, channel: Channel, topology: Topology) -> ChannelTerms:
        """See model.CostModel. A collective that was not measured has the all-to-all's rates.

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
    """The shard of a table with so many lookups a sample."""
    # A table without lookups may lack a distribution. Zipf(1) stands in.
    access = shard.table.access if isinstance(shard.table.access, Zipf) else Zipf(1.0)
    return dataclasses.replace(shard, table=dataclasses.replace(shard.table, pooling=pooling, access=access))


# --- files --------------------------------------------------------------------------------------------------

_NAMES = {
    "drivers": list(features.DRIVERS),
    "conditions": list(features.CONDITIONS),
    "exchange_terms": list(collective_model.EXCHANGE_TERMS),
}


def save(model: NeuralModel, folder: str | Path) -> None:
    """Write model.json and weights.safetensors. Raises ShardCoreError for weights that `load` would refuse."""
    # What load would refuse is refused here, while the training's results still exist.
    weight_checks.require_weights(model.weights)
    meta = {**model.meta, **_NAMES, "setting": files.setting_to_json(model.setting)}
    model_files.write_model(folder, meta, model.weights)


def load(folder: str | Path) -> NeuralModel:
    """Read a model that `save` wrote, bit for bit.

    Raises ShardCoreError for a file that is missing, cut short or edited, and for a model trained on other
    features than this ShardCore computes.
    """
    require_type(folder, (str, os.PathLike), "folder of a model", "a path")
    meta, weights = model_files.read_model(folder)
    setting = files.setting_from_json(meta.pop("setting", None), f"{folder}: setting")
    # Weights are matrices by position, so names have to agree in order too.
    for noun, names in _NAMES.items():
        trained_on = meta.pop(noun, None)
        if trained_on != names:
            raise ShardCoreError(
                f"model in {folder} was trained on {noun} {shown(trained_on)}; this ShardCore computes "
                f"{shown(names)}: train again"
            )
    # Building _Meta checks types. Only provenance has further rules.
    files.require_provenance(schema.build(_Meta, meta, str(folder)).provenance, f"{folder}: provenance")
    with schema.errors_named(f"model in {folder}"):
        weight_checks.require_weights(weights)
    return NeuralModel(setting, weights, {"provenance": {}, **meta})


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
            require(low <= high, f"range of {shown(name)} is {low:g} to {high:g}; it needs to rise")
