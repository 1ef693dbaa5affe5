"""The composite cost model: models whose ms add up.

A model is trained for one precision. TorchRec runs the shards of a kind as one fused op for each precision,
one after another. Rows below device memory cross a link. So the cost of an op is a sum:
of a model of each precision, over the shards that have it, and of the links over all shards.

Shapes: N shards, F features of all parts side by side, G ops, D devices; ... any leading dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardcore.core.errors import SettingMismatch
from shardcore.core.tiers import TIERS
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import Problem, Setting, Shard
from shardcore.core.validation import describe_differences, require, require_type
from shardcore.cost.collective_model import ALL_TO_ALL, is_measured
from shardcore.cost.heads import Head, LinearHead
from shardcore.cost.model import CorrectionFactor, CostModel, PredictedQuantity
from shardcore.cost.ranges import more_entries_suffix
from shardcore.io.model_files import model_folders
from shardcore.step.exchanges import ChannelTerms
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload
from shardcore.tables.host_rows import link_bytes_of_shard

if TYPE_CHECKING:
    from shardcore.cost.neural import NeuralModel


@dataclass(frozen=True, eq=False)
class MemoryLinks:
    """The links to memory below the devices, as a part of a model. It encodes ms: forward, backward, and of rows
    fetched ahead.

    gbps: GB/s of a device, by tier.
    optimizer: optimizer of the embeddings.
    batch: samples of an op, where a call gives none.
    fetches_ahead: whether caches fetch the next batch's rows during a step (model.fetch_wait_ms).
    """

    gbps: Mapping[str, float]
    optimizer: str
    batch: int
    fetches_ahead: bool = False

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, 3] ms of shards on the link to host memory: forward, backward, and fetched ahead by caches."""
        codes = np.zeros((len(shards), 3))
        for i, shard in enumerate(shards):
            # Shards without rows below device memory have no bytes on links, whatever GB/s stands in.
            gbps = self.gbps.get(shard.table.tier, 1.0)
            ms = link_bytes_of_shard(shard, batch or self.batch, self.optimizer) / (
                gbps * BYTES_PER_MS_PER_GBPS
            )
            # Without a cache, lookups themselves read the link, so nothing is fetched ahead.
            codes[i, [2 if self.fetches_ahead and shard.table.load_factor > 0 else 0, 1]] = ms
        return codes

    @property
    def heads(self) -> Sequence[Head]:
        """One linear head with rates of 1, as encodings are ms already."""
        terms = np.column_stack([np.zeros(3), np.eye(3)])
        # Lookups without a cache read the link before the update, too.
        terms[2, 1] = self.fetches_ahead
        return (LinearHead(terms),)

    def out_of_range(self, workload: Workload) -> list[str]:
        tables: dict[str, dict[str, None]] = {}
        # Dicts keep names once and in order, for replicas list a table on every device.
        for shard in (s for ops in workload.ops for op in ops for s in op.shards if s.table.in_host_memory):
            tables.setdefault(shard.table.tier, {})[shard.table.name] = None
        return [
            f"table {next(iter(names))!r}{more_entries_suffix(names)} has rows in {TIERS[tier].words}: the topology "
            f"gives the {self.gbps[tier]:g} GB/s of their link, not measured"
            for tier, names in tables.items()
        ]


@dataclass(frozen=True, eq=False)
class DeviceModel(CostModel):
    """A CostModel of rows in device memory, of one precision and one optimizer. Links to other memory join it.

    setting: what the model was measured for, or is used for.
    """

    setting: Setting

    def in_device_memory(self, problem: Problem) -> Self:
        """The model at a problem's batch and payloads, as if all rows were in device memory."""
        own = self.setting
        setting = replace(problem.setting(own.hardware), precision=own.precision, optimizer=own.optimizer)
        return replace(self, setting=setting)

    def for_problem(self, problem: Problem) -> CostModel:
        """The model for a problem's batch and payloads (bytes per value sent), with the link to host memory if it has
        rows there."""
        return compose_models((self.in_device_memory(problem),), problem)


@dataclass(frozen=True, eq=False)
class Composite(CostModel):
    """A CostModel of several models: one for each precision, and links.

    models: one for each precision, in the order of their names; or one for all shards.
    links: None: all rows are in device memory.

    Raises SettingMismatch for models that differ in more than the precision.
    """

    models: tuple[Any, ...]
    links: MemoryLinks | None = None
    setting: Setting = field(init=False)

    def __post_init__(self) -> None:
        first, *others = (m.setting for m in self.models)
        for other in others:
            # Batch is no obstacle: each model has a range of batches, checked in for_problem.
            if (alike := replace(other, precision=first.precision, batch=first.batch)) != first:
                raise SettingMismatch(
                    f"models of two settings cannot be mixed ({describe_differences(first, alike)}); they need the "
                    "same hardware and optimizer"
                )
        precisions = [m.setting.precision for m in self.models]
        # A precision identifies a model, so two of one precision would be ambiguous.
        if precisions != sorted(set(precisions)):
            raise SettingMismatch(
                f"models for {' and '.join(precisions)} weights cannot be mixed; they need a precision each"
            )
        object.__setattr__(self, "setting", replace(first, precision="+".join(precisions)))

    def for_problem(self, problem: Problem) -> CostModel:
        """The models of a problem's precisions, at its batch and payloads; a single model for one precision."""
        models = [m.in_device_memory(problem) for m in self.models]
        # Models of precisions that the problem lacks would only cost time.
        needed = [m for m in models if m.setting.precision in problem.precision.split("+")]
        # Exchanges may have been measured for another precision's model only.
        measured = [m for m in models if len(models) > 1 and is_measured(m.weights, ALL_TO_ALL)]
        if not needed or (len(needed) > 1 and measured and not any(m in measured for m in needed)):
            needed = models  # so that exchanges are priced as they were measured
        return compose_models(needed, problem)

    @cached_property
    def _priced_parts(self) -> tuple[Any, ...]:
        return (*self.models, self.links) if self.links else self.models

    @cached_property
    def heads(self) -> Sequence[Head]:
        return [head for part in self._priced_parts for head in part.heads]

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, F] encodings of shards: each model's numbers for the shards of its precision, and 0 elsewhere."""
        encoded = []
        for part in self._priced_parts:
            # A single model takes shards of any precision. Links take all shards.
            of_all = len(self.models) == 1 or part is self.links
            own = [i for i, s in enumerate(shards) if of_all or s.table.precision == part.setting.precision]
            # One call a part, for its own shards only: an encoding by the wrong model would not be 0.
            codes = part.encode([shards[i] for i in own], batch)
            encoded.append(np.zeros((len(shards), codes.shape[1])))
            encoded[-1][own] = codes
        return np.concatenate(encoded, axis=1)

    def at_confidence(self, confidence: float | None) -> Composite:
        """The composite of the models at a confidence. The sum of their quantiles is an upper bound of the quantile of
        the sum.
        """
        return replace(self, models=tuple(m.at_confidence(confidence) for m in self.models))

    def corrected_by(
        self, factors: Mapping[PredictedQuantity, CorrectionFactor], lineage: Mapping[str, Any] | None = None
    ) -> Composite:
        """The composite of the models, each corrected by factors of traced steps."""
        return replace(self, models=tuple(m.corrected_by(factors, lineage) for m in self.models))

    def launch_ms(self) -> float:
        # An op may have shards of any one precision only.
        return min(model.launch_ms() for model in self.models)

    @property
    def exchange_model(self) -> Any:
        """The first of the models with measured collectives. Outputs are FP32 for all precisions."""
        if len(self.models) == 1:
            return self.models[0]
        measured = (m for m in self.models if is_measured(m.weights, ALL_TO_ALL))
        return next(measured, self.models[0])

    def channel_terms(self, channel: Channel, topology: Topology) -> ChannelTerms:
        return self.exchange_model.channel_terms(channel, topology)

    def out_of_range(self, workload: Workload) -> list[str]:
        """Sentences of each model on the shards of its precision that are beyond its measured range."""
        sentences: dict[str, None] = {}
        for part in self._priced_parts:
            step = workload
            if len(self.models) > 1 and part is not self.links:
                step = _workload_of_precision(part.setting.precision, workload, part is self.exchange_model)
            sentences |= dict.fromkeys(part.out_of_range(step))
        return list(sentences)


def compose_models(models: Sequence[Any], problem: Problem) -> Any:
    """One cost model from several: one for each precision of a problem's tables, and host links if rows are below
    device memory.
    """
    below = any(table.in_host_memory for table in problem.tables)
    if len(models) == 1 and not below:
        return models[0]
    gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
    links = MemoryLinks(gbps, problem.optimizer, problem.global_batch, problem.job.fetches_ahead)
    # Without rows below device memory, links would only add columns of zeros.
    return Composite(tuple(models), links if below else None)


def load_models(folders: str | Path | Sequence[str | Path]) -> NeuralModel | Composite:
    """Load the cost model of a folder, or of several folders of different precisions.

    A folder may have one model, or a subfolder with one for each precision, as the registry keeps them.
    """
    from shardcore.cost import neural

    folders = [folders] if isinstance(folders, str | Path) else folders
    require_type(folders, (list, tuple), "folder of a model", "a path, or a list of paths")
    require(len(folders) > 0, "folders of models are []; they need one or more paths")
    for folder in folders:
        require_type(folder, (str, os.PathLike), "folder of a model", "a path")
    models = [neural.load(one) for folder in folders for one in model_folders(folder)]
    # Sorted by precision, as Composite requires.
    models.sort(key=lambda m: m.setting.precision)
    return models[0] if len(models) == 1 else Composite(tuple(models))


def save_models(model: NeuralModel | Composite, folder: str | Path) -> None:
    """Write a cost model to a folder, or each of several to a subfolder named by its precision."""
    from shardcore.cost import neural

    models = model.models if isinstance(model, Composite) else (model,)
    for one in models:
        neural.save(one, Path(folder) / one.setting.precision if len(models) > 1 else folder)


def _workload_of_precision(precision: str, workload: Workload, exchanges: bool) -> Workload:
    """A workload with the shards of one precision only, and with or without exchanges."""
    of_devices = []
    for ops in workload.ops:
        # Devices whose op has no shard of the precision run no op of it.
        kept = [(op, tuple(s for s in op.shards if s.table.precision == precision)) for op in ops]
        of_devices.append(tuple(replace(op, shards=shards) for op, shards in kept if shards))
    # Traffic of all precisions is judged once, by the model whose exchanges are used.
    return replace(workload, ops=tuple(of_devices), traffic=workload.traffic * exchanges)
