"""Settings of measuring. This module is free of torch, which takes seconds to import: a command is made from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from shardcore.core.validation import (
    MOST_BYTES,
    MOST_COUNT,
    WAITS_S,
    Count,
    Record,
    Repeats,
    Seed,
    Wait,
    number_within,
    require,
)
from shardcore.measure.config import CollectiveConfig, KernelConfig, ReplayConfig
from shardcore.measure.sampling import MOST_DRAWS, MOST_RANKS
from shardcore.measure.sampling.groups import GroupConfig

Samples = Annotated[int, number_within(0, MOST_DRAWS), "N"]


@dataclass(frozen=True)
class SampledStepConfig(ReplayConfig):
    """Settings of replayed steps that become samples: fewer repeats, and smaller tables, than of other replays."""

    repeats: Repeats = 20
    arena_bytes: Annotated[int, number_within(1, MOST_BYTES)] = 512 << 20


@dataclass(frozen=True)
class MeasureConfig(Record):
    """Samples to measure, and the devices to use.

    compute_samples: number of groups. None: until the time is over.
    comm_samples: number of exchanges.
    step_samples: number of random plans, each of which is replayed as a step of training.
    again: measure the first N draws again, even if they are known, to show how far timings agree
    minutes: time to spend on ops, including start and end
    seed: seed of the draws
    actors: number of processes, each of which measures one device. 0: one for each GPU; without GPUs, one for each CPU
      core, as far as memory allows. Using all cores at once does not disturb medians.
    ranks: processes (GPUs) of an exchange or a step; 0: the most devices of the hosts that divide the batch
    hosts: number of hosts that the ranks are spread over evenly.
    chunk: samples that are written at once; a kill loses at most these and those that run
    hang_s: time without a finished op after which the measuring process is replaced, and its group recorded
      as failed; at least so long do ranks of exchanges wait, and twice as long those of steps
    held_out: draw groups only from the tables that are kept for testing, a twentieth of all
    kernels: how ops run. Its arena also limits shards of groups and of steps.
    groups: how groups are drawn.
    exchanges: how exchanges run.
    steps: how steps run.
    """

    compute_samples: Samples | None = 200
    comm_samples: Samples = 150
    step_samples: Samples = 16
    again: Samples = 0
    minutes: Annotated[float | None, number_within(0, MOST_COUNT, above=True)] = None
    seed: Seed = 0
    actors: Annotated[int, number_within(0, MOST_RANKS)] = 0
    ranks: Annotated[int, number_within(0, MOST_RANKS)] = 0
    hosts: Annotated[int, number_within(1, MOST_RANKS)] = 1
    chunk: Count = 16
    hang_s: Wait = 60.0
    held_out: bool = False
    kernels: KernelConfig = KernelConfig()
    groups: GroupConfig = GroupConfig()
    exchanges: CollectiveConfig = CollectiveConfig()
    steps: SampledStepConfig = SampledStepConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.groups.max_shard_bytes == GroupConfig.max_shard_bytes,
            f"measure.groups.max_shard_bytes is {self.groups.max_shard_bytes}; kernels.arena_bytes limits shards",
        )
        require(
            self.ranks % self.hosts == 0,
            f"measure.ranks is {self.ranks}, which does not spread evenly over {self.hosts} measure.hosts",
        )

    @property
    def group_config(self) -> GroupConfig:
        """Config of drawn groups of shards, limited to shards that fit the arena."""
        return replace(self.groups, max_shard_bytes=self.kernels.arena_bytes)

    @property
    def step_config(self) -> ReplayConfig:
        """Config of replayed steps: an arena at most as large as that of ops, and twice as long until a step hangs."""
        arena_bytes = min(self.steps.arena_bytes, self.kernels.arena_bytes)
        timeout_s = min(max(self.steps.timeout_s, 2 * self.hang_s), WAITS_S[1])
        return replace(self.steps, arena_bytes=arena_bytes, timeout_s=timeout_s)

    @property
    def exchange_config(self) -> CollectiveConfig:
        """Config of exchanges, with a rank's time limit for the others no shorter than that of an op."""
        return replace(self.exchanges, timeout_s=max(self.exchanges.timeout_s, self.hang_s))
