"""The cost of rows in host memory: what their bytes take on the link of a device to it.

The link is given with the topology. Its time is added to that of the op, as if nothing hid it.

Shapes: N shards, F features, G ops, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcore.cost.model import BoundableCostModel, CommCost, Compiled
from shardcore.cost.ranges import and_more
from shardcore.tables.host_rows import link_bytes_of
from shardcore.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.types import Problem, Setting, Shard
from shardcore.workload import Workload


@dataclass(frozen=True, eq=False)
class HostMemoryModel:
    """A CostModel whose ops also take the time of the link. The rest is another model's.

    An encoding has two more features at its end: ms of the link, forward and backward. A device's speed
    counts for its link too.

    model: of ops in device memory, a ProbabilisticCostModel if `quantile` is asked for.
    gbps: GB/s between a device and its host's memory.
    optimizer: of the embeddings.
    """

    model: Any
    gbps: float
    optimizer: str

    @property
    def setting(self) -> Setting:
        return self.model.setting

    @property
    def meta(self) -> Any:
        return self.model.meta

    def for_problem(self, problem: Problem) -> Any:
        return self.model.for_problem(problem)

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, F + 2] the model's encodings, and ms of the link."""
        batch = batch or self.setting.batch
        link = [link_bytes_of(shard, batch, self.optimizer) for shard in shards]
        ms = np.array(link).reshape(-1, 2) / (self.gbps * BYTES_PER_MS_PER_GBPS)
        return np.concatenate([self.model.encode(shards, batch), ms], axis=1)

    def head(self, sums: np.ndarray) -> np.ndarray:
        own, link = _split(sums)
        return self.model.head(own) + link.sum(-1)

    def quantile(self, sums: np.ndarray, level: float) -> np.ndarray:
        """As if the link always took as long."""
        own, link = _split(sums)
        return self.model.quantile(own, level) + link.sum(-1)

    def is_above_head(self, level: float) -> bool:
        return self.model.is_above_head(level)

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        own, link = _split(sums)
        ms = np.asarray(self.model.head(own), dtype=float)
        forward, total = self.model.forward_share(own) * ms + link[..., 0], ms + link.sum(-1)
        return np.divide(forward, total, out=np.zeros_like(total), where=total > 0)

    def compiled(self, level: float | None = None) -> Compiled:
        from shardcore.cost import compiled

        inner = self.model.compiled(*([] if level is None else [level]))
        which = compiled.HEADS.index(inner.head)
        return Compiled(compiled.ready(compiled.beside_link),
                        np.concatenate([[float(which)], inner.parameters]))

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        return self.model.comm(traffic, compute_ms, topology)

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel."""
        names = {s.table.name: None for ops in workload.ops for op in ops for s in op.shards
                 if s.table.in_host_memory}
        of_link = [f"table {next(iter(names))!r}{and_more(names)} has rows in host memory: the topology "
                   f"gives the {self.gbps:g} GB/s of their link, not measured"] if names else []
        return [*self.model.out_of_range(workload), *of_link]

    @property
    def lower(self) -> _BoundableHostMemoryModel | None:
        lower = self.model.lower
        return None if lower is None else _BoundableHostMemoryModel(lower, self.gbps, self.optimizer)


class _BoundableHostMemoryModel(HostMemoryModel):
    """See model.BoundableCostModel. The link's time is linear, so fusing saves none of it."""

    model: BoundableCostModel

    @property
    def launch_ms(self) -> float:
        return self.model.launch_ms

    def rates(self, least: np.ndarray) -> np.ndarray:
        own, link = _split(least)
        return np.concatenate([self.model.rates(own), np.ones_like(link)], -1)

    def takes_all_alike(self, topology: Topology) -> bool:
        return self.model.takes_all_alike(topology)

    def even_is_least(self, topology: Topology) -> bool:
        return self.model.even_is_least(topology)


def with_host_memory(model: Any, problem: Problem) -> Any:
    """The model for a problem: with the link, if any of its tables has rows in host memory."""
    if not any(table.in_host_memory for table in problem.tables):
        return model
    return HostMemoryModel(model, problem.topology.memory[0].gbps, problem.optimizer)


def _split(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The model's own features [..., F], and ms of the link [..., 2]."""
    sums = np.asarray(sums, dtype=float)
    return sums[..., :-2], sums[..., -2:]
