"""The memory that shards take on a device.

Shapes: D devices.
"""

from __future__ import annotations

from shardcore.errors import Infeasible
from shardcore.fused import OPTIMIZERS
from shardcore.layouts import Layout, layout_of, shards_on
from shardcore.outputs import output_bytes
from shardcore.types import OUTPUT_BYTES, PRECISION_BYTES, Plan, Problem, Shard, Table

OPTIMIZER_BYTES_PER_ROW = {name: optimizer.state_bytes("row") for name, optimizer in OPTIMIZERS.items()}
OPTIMIZER_BYTES_PER_CELL = {name: optimizer.state_bytes("cell") for name, optimizer in OPTIMIZERS.items()}


def shard_bytes(shard: Shard, batch: int, optimizer: str, dense_gradient: bool = False) -> int:
    """Bytes that a shard takes on a device that runs it over `batch` samples.

    It sums the weights, the optimizer state, the pooled output and its gradient.
    A kind with an all-reduce also keeps a dense gradient.
    """
    dense_bytes = shard.rows * shard.width * OUTPUT_BYTES if dense_gradient else 0
    state = shard.rows * (OPTIMIZER_BYTES_PER_ROW[optimizer]
                          + shard.width * OPTIMIZER_BYTES_PER_CELL[optimizer])
    # 2: the output and its gradient, both FP32.
    return shard.bytes + state + 2 * output_bytes(shard, batch) + dense_bytes


def bytes_as(layout: Layout, shard: Shard, problem: Problem) -> int:
    """Bytes of one device's part of a shard, run as this kind."""
    return shard_bytes(shard, layout.batch(problem), problem.optimizer, layout.dense_gradient)


def table_bytes(table: Table, batch: int, optimizer: str, width: int | None = None) -> int:
    """`shard_bytes` of a whole table, or of some of its columns. Faster than to create a Shard."""
    width = width or table.dim
    # Bytes per row.
    weights_and_state = (width * (PRECISION_BYTES[table.precision] + OPTIMIZER_BYTES_PER_CELL[optimizer])
                         + OPTIMIZER_BYTES_PER_ROW[optimizer])
    outputs = max(1, round(batch * table.pooling)) if table.sequence else batch * table.features
    return table.rows * weights_and_state + 2 * outputs * width * OUTPUT_BYTES


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] bytes that a plan takes on each device."""
    used = [0] * len(problem.topology)
    for placement in plan.placements:
        layout = layout_of(placement.kind)
        for device, shard in shards_on(placement):
            used[device] += bytes_as(layout, shard, problem)
    return used


def free_bytes(problem: Problem) -> list[int]:
    """[D] bytes that embeddings may use: the device's memory less what constraints reserve."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


def require_fits(plan: Plan, problem: Problem) -> list[int]:
    """[D] `used_bytes` of a plan. Raises Infeasible, naming the first device that holds more than it may."""
    held = used_bytes(plan, problem)
    for device, (used, free) in enumerate(zip(held, free_bytes(problem), strict=True)):
        # A reservation larger than the device leaves negative bytes: nothing fits then.
        if used > max(0, free):
            raise Infeasible(f"device {device} of problem {problem.name!r} would hold {gib(used)}; "
                             f"it may hold {gib(free)}")
    return held


def gib(n_bytes: float) -> str:
    """A size for people, in GiB. MiB below 0.1 GiB, bytes below 0.1 MiB."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB" if abs(n_bytes) >= 0.1 * 2**20 else f"{n_bytes:.0f} bytes"
