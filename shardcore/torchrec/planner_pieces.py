"""Our pieces of TorchRec's planner: what its extension points take (see sharder.py)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardcore.core.progress import tick, ticking
from shardcore.core.types import Problem, Shard, Table
from shardcore.search.budget import Meter
from shardcore.step.kinds import WHOLE_ROWS, layout_of_torchrec, run_of
from shardcore.step.memory_account import own_peaks

COLUMN_TYPES = ("table_wise", "column_wise")
ALL_TYPES = (*COLUMN_TYPES, "row_wise", "data_parallel")
HOST_TYPES = ("table_row_wise", "table_column_wise", "grid_shard")
"""For several hosts. On one host they equal row- and column-wise sharding."""


@dataclass(frozen=True)
class Busy:
    """The work of a device, in ms. It replaces a planner's Perf, which has no speed."""

    speed: float
    total: float

    def __add__(self, other: Any) -> Busy:
        # Speed divides compute, not communication.
        compute = (other.fwd_compute + other.bwd_compute) / self.speed
        return Busy(self.speed, self.total + compute + other.fwd_comms + other.bwd_comms)


@dataclass(frozen=True)
class Slowest:
    """A PerfModel: the work of the busiest device."""

    topology: Any

    def rate(self, plan: Sequence[Any]) -> float:
        """ms of the busiest device under a plan; lower is better."""
        # Work of tables placed before is what devices start with.
        busy = [device.perf for device in self.topology.devices]
        for option in plan:
            for shard in option.shards:
                busy[shard.rank] = busy[shard.rank] + shard.perf
        return max(b.total for b in busy)


@dataclass(frozen=True)
class Ticking:
    """A ShardEstimator that runs another one option by option, so that a budget may end it: it takes seconds."""

    estimator: Any

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        for option in sharding_options:
            tick()
            self.estimator.estimate([option], sharder_data_map)


@dataclass(frozen=True)
class OurBytes:
    """A ShardEstimator that counts each shard's own largest phase as its storage.

    It also sorts the options. TorchRec takes them from sets of strings, whose order varies by process.
    """

    problem: Problem
    tables: Mapping[str, Table]

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        from torchrec.distributed.planner.types import Storage

        # Names are t0, t1, ... in the order of the problem's tables.
        sharding_options.sort(
            key=lambda o: (int(o.name[1:]), (*ALL_TYPES, *HOST_TYPES).index(o.sharding_type))
        )
        # TorchRec adds storage up, so each shard counts with its own peak.
        bytes_of = own_peaks(self.problem)
        for option in ticking(sharding_options):
            layout = layout_of_torchrec(option.sharding_type, self.problem.topology)
            if layout is None or option.num_shards == 1:
                layout = WHOLE_ROWS
            for theirs in option.shards:
                (row, column), (rows, columns) = theirs.offset, theirs.size
                n_bytes = 0
                if rows and columns:
                    ours = Shard(self.tables[option.name], row, row + rows, column, column + columns)
                    n_bytes = bytes_of(run_of(layout.name, ours.table), ours)
                theirs.storage = Storage(hbm=n_bytes, ddr=0)


@dataclass
class Metered:
    """Several proposers as one, each after the other, until the budget is used up.

    It continues beyond the budget until some proposal can be placed.

    spare_s: seconds of the budget that are kept for what follows the last proposal.
    """

    waiting: list[Any]
    meter: Meter
    spare_s: float = 0.0
    placeable: bool = False

    def load(self, **search_space: Any) -> None:
        for proposer in self.waiting:
            proposer.load(**search_space)

    def propose(self) -> Any:
        while self.waiting and (
            not self.placeable or (self.meter.left() and self.meter.has_time(self.spare_s))
        ):
            if proposal := self.waiting[0].propose():
                self.meter.evals += 1
                return proposal
            # This proposer is exhausted.
            self.waiting.pop(0)
        return None

    def feedback(self, partitionable: bool, **rest: Any) -> None:
        self.placeable |= partitionable
        # The proposer that made the proposal learns from it.
        self.waiting[0].feedback(partitionable=partitionable, **rest)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence TorchRec: it logs every call, and warns of each table that it replicates or does not cut."""
    from torchrec.distributed.logger import method_logger

    root, loggers = logging.getLogger(), [logging.getLogger("torchrec"), method_logger]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    # The warning about replicas comes from the root logger.
    root.addFilter(_not_of_replicas)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        root.removeFilter(_not_of_replicas)


def _not_of_replicas(record: logging.LogRecord) -> bool:
    """A log filter that drops the warning about replicated tables."""
    return not str(record.msg).startswith("Sharding spec not found")
