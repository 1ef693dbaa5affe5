"""Settings of measuring. This module is free of torch, which takes seconds to import: commands are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shardcore.core.validation import (
    MOST_BYTES,
    MOST_REPEATS,
    MOST_ROWS,
    Record,
    Repeats,
    Seed,
    Wait,
    number_within,
    require,
)


@dataclass(frozen=True)
class KernelConfig(Record):
    """Settings for measuring ops.

    arena_bytes: weights shared by all ops, and so the largest shard that can be measured.
    tolerance: relative confidence interval (95%) to reach for a median of forward + backward; default: 0.02 on cpu,
      0.01 on cuda
    min_repeats: fewest repeats of an op
    max_repeats: most repeats of an op; three times as many where it is held out to judge models
    interleave: groups that run in turn
    state_rows: rows of the optimizer's state. Tables with more in all share them. None: as many as the arena
        has rows of the least width.
    """

    arena_bytes: Annotated[int, number_within(1, MOST_BYTES)] = 1 << 30
    tolerance: Annotated[float | None, number_within(0, 1, above=True, below=True, such_as="0.05")] = None
    min_repeats: Repeats = 6
    # The noise of held-out ops adds to every error that is shown, while that of training ops averages out.
    max_repeats: Repeats = 24
    interleave: Repeats = 16
    state_rows: Annotated[int | None, number_within(1, MOST_ROWS)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_repeats <= self.max_repeats,
            f"kernel config has max_repeats {self.max_repeats}; it needs its min_repeats, {self.min_repeats}, or more",
        )

    def timing_tolerance(self, device: str) -> float:
        """Relative confidence interval of a median at which a measured op is done, on a kind of device."""
        from shardcore.measure import devices  # imports torch

        return self.tolerance or devices.device_by_name(device).tolerance


@dataclass(frozen=True)
class ReplayConfig(Record):
    """Settings of replayed steps.

    repeats: steps of each plan that enter a median
    warmups: steps before those, which are not timed.
    batches: different batches, which steps take in turn.
    arena_bytes: weights of one rank, and so the largest shard that can be replayed. A reference op with
        larger shards gets more.
    evict_bytes: memory to overwrite before each step, more than the caches hold.
    timeout_s: time after which a round of steps, or building a plan's ops, counts as hung
    seed: seed of the batches
    """

    repeats: Repeats = 50
    warmups: Annotated[int, number_within(0, MOST_REPEATS)] = 4
    batches: Repeats = 4
    arena_bytes: Annotated[int, number_within(1, MOST_BYTES)] = 1 << 30
    evict_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 64 << 20
    timeout_s: Wait = 120.0
    seed: Seed = 0


@dataclass(frozen=True)
class CollectiveConfig(Record, noun="comm config"):
    """Settings of measured exchanges.

    repeats: timed runs of each exchange.
    warmups: runs before those, which are not timed.
    timeout_s: longest wait of a rank for another, after which it gives up.
    """

    repeats: Repeats = 7
    warmups: Annotated[int, number_within(0, MOST_REPEATS)] = 1
    timeout_s: Wait = 60.0


@dataclass(frozen=True)
class PairConfig(Record, noun="pairs"):
    """Settings for measuring messages between pairs of ranks.

    message_kib: size of the messages whose times show which ranks are near each other
    sweeps: sweeps over all pairs. The fastest counts, as a disturbance rarely meets a pair in all sweeps.
    repeats: repeats of each message, in each of three sweeps; the fastest counts
    load_kib: size of the messages whose times give bandwidths.
    timeout_s: longest wait of a rank, after which it gives up.
    """

    message_kib: Annotated[int, number_within(1, 1 << 20)] = 1024
    sweeps: Repeats = 3
    repeats: Repeats = 3
    load_kib: Annotated[int, number_within(1, 1 << 20)] = 4096
    timeout_s: Wait = 60.0
