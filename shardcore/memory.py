"""What a device must hold for the shards placed on it."""

from __future__ import annotations

from shardcore.errors import Infeasible
from shardcore.layouts import Layout, layout_of, shards_on
from shardcore.types import OUTPUT_BYTES, PRECISION_BYTES, Plan, Problem, Shard, Table

OPTIMIZER_BYTES_PER_ROW = {"exact_sgd": 0, "rowwise_adagrad": 4}


def shard_bytes(shard: Shard, batch: int, optimizer: str, dense_gradient: bool = False) -> int:
    """Bytes that a shard takes on a device that runs it over `batch` samples.

    Weights, optimizer state (row-wise Adagrad keeps one FP32 a row), the pooled output and its gradient; and a dense gradient,
    where its kind keeps one for the all-reduce.
    """
    dense_bytes = shard.rows * shard.width * OUTPUT_BYTES if dense_gradient else 0
    state = shard.rows * OPTIMIZER_BYTES_PER_ROW[optimizer]
    return shard.bytes + state + 2 * batch * shard.width * OUTPUT_BYTES + dense_bytes


def bytes_as(layout: Layout, shard: Shard, problem: Problem) -> int:
    """Bytes of what one device has of a shard, run as this kind."""
    return shard_bytes(shard, layout.batch(problem), problem.optimizer, layout.dense_gradient)


def table_bytes(table: Table, batch: int, optimizer: str, width: int | None = None) -> int:
    """What `shard_bytes` says of the whole table, or so many of its columns, without a Shard for each of many tables."""
    width = width or table.dim
    weights_and_state = width * PRECISION_BYTES[table.precision] + OPTIMIZER_BYTES_PER_ROW[optimizer]
    return table.rows * weights_and_state + 2 * batch * width * OUTPUT_BYTES


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """Bytes per device that a plan takes, [D]."""
    used = [0] * len(problem.topology)
    for placement in plan.placements:
        layout = layout_of(placement.kind)
        for device, shard in shards_on(placement):
            used[device] += bytes_as(layout, shard, problem)
    return used


def free_bytes(problem: Problem) -> list[int]:
    """Bytes per device that embeddings may use, [D]: the device's memory less what the constraints reserve."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


def require_fits(plan: Plan, problem: Problem) -> list[int]:
    """What `used_bytes` says; raises Infeasible naming the first device that holds more than it may."""
    held = used_bytes(plan, problem)
    for device, (used, free) in enumerate(zip(held, free_bytes(problem), strict=True)):
        if used > max(0, free):
            raise Infeasible(f"device {device} of problem {problem.name!r} would hold {gib(used)}; it may hold {gib(free)}")
    return held


def gib(n_bytes: float) -> str:
    """A size for people, in GiB (MiB below 0.1 GiB, bytes below 0.1 MiB)."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB" if abs(n_bytes) >= 0.1 * 2**20 else f"{n_bytes:.0f} bytes"
