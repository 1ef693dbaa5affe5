"""A rank's rows of TorchRec's sharded collections, with their optimizer state, as views of the job's memory.

FBGEMM's fused ops hold the weights and state of what is sharded. Replicas are parameters of a dense op, and
the state of theirs is in the job's dense optimizer. Both go by the names of torch.optim here: a fused
Adagrad's momentum is "sum".

Shapes: N rows, W columns of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require
from shardcore.torchrec.modules import Collection

WEIGHTS, STEP = "weights", "step"
STATES = {1: ("sum",), 2: ("exp_avg", "exp_avg_sq")}
"""Names of optimizer state in torch.optim, by how many moments an optimizer keeps."""
_DENSE = {
    "SGD": (),
    "Adagrad": (("sum", "cell"),),
    "RowWiseAdagrad": (("sum", "row"),),
    "Adam": (("exp_avg", "cell"), ("exp_avg_sq", "cell")),
    "AdamW": (("exp_avg", "cell"), ("exp_avg_sq", "cell")),
}
"""State of dense optimizers by class: name and granularity of each moment."""
_KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "dense")
"""TorchRec's kernels whose rows are tensors."""

Key = tuple[str, str]
"""Path of a collection in the model, and a table's name in it."""


def key_name(key: Key) -> str:
    """Text of a table's key: collection path and table name, joined by a dot."""
    return ".".join(filter(None, key))


@dataclass(frozen=True)
class RowFormat:
    """The tensors of a table: its weights' type, and granularity and type of each state.

    weights: torch's type of the weights.
    states: pairs of name and "row" or "cell".
    state: torch's type of all states.
    """

    weights: torch.dtype
    states: tuple[tuple[str, str], ...]
    state: torch.dtype

    def tensor_formats(self) -> dict[str, tuple[bool, torch.dtype]]:
        """Granularity and type of each tensor of a table, by name: True if it has one number a row, and its dtype."""
        return {WEIGHTS: (False, self.weights)} | {
            name: (per == "row", self.state) for name, per in self.states
        }

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of weights and optimizer state of a number of rows and columns."""
        return sum(
            rows * (1 if flat else columns) * of.itemsize for flat, of in self.tensor_formats().values()
        )


@dataclass(frozen=True)
class TablePart:
    """Rows and columns of a table on this rank.

    key: collection and name of the table.
    rows, columns: [lo, hi).
    tensors: by name, [N, W] weights, and states of cells [N, W] or of rows [N]. They share memory with the
      job's own.
    step: steps that its optimizer has counted. None: it counts none.
    set_step: sets that count, for all tables of its fused op.
    ids: [N] of the rows, rising, where they are not `rows`: of hot rows, and of those that the hot ones left.
    """

    key: Key
    rows: tuple[int, int]
    columns: tuple[int, int]
    tensors: dict[str, torch.Tensor]
    step: int | None = None
    set_step: Callable[[int], None] | None = None
    ids: np.ndarray | None = None

    @property
    def row_ids(self) -> np.ndarray:
        """[N] ids in the whole table of this part's rows."""
        return np.arange(*self.rows) if self.ids is None else self.ids

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class DenseOptimizer:
    """The job's optimizer of replicas, which may be wrapped by TorchRec's.

    given: optimizer as the job has it. None: it was not given.
    """

    given: Any = None
    plain: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        # The dataclass is frozen, and this field follows from another.
        object.__setattr__(self, "plain", list(_torch_optimizers(self.given)))

    def parameter_group(self, weight: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
        """Optimizer and parameter group that train a parameter; None if no optimizer does."""
        for optimizer in self.plain:
            for group in optimizer.param_groups:
                # Identity: comparing tensors would compare their values.
                if any(p is weight for p in group["params"]):
                    return optimizer, group
        return None

    def parameter_state(self, weight: torch.Tensor) -> dict[str, Any]:
        """Optimizer state of a parameter; empty before its first step."""
        return next((o.state[weight] for o in self.plain if weight in o.state), {})


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch.optim optimizers within TorchRec's wrappers, without fused ones."""
    from torchrec.optim.fused import FusedOptimizer

    if hasattr(optimizer, "optimizers"):  # CombinedOptimizer
        for _, inner in optimizer.optimizers:
            yield from _torch_optimizers(inner)
    elif hasattr(optimizer, "_optimizer"):  # KeyedOptimizerWrapper, OptimizerWrapper
        yield from _torch_optimizers(optimizer._optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        if not isinstance(optimizer, FusedOptimizer):
            yield optimizer
    elif optimizer is not None:
        raise ShardCoreError(
            f"the optimizer is a {type(optimizer).__name__}; it needs to be torch's, or TorchRec's wrapper of one"
        )


def dense_state_granularity(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Pairs of name and granularity ("row" or "cell") of the state that a dense optimizer keeps.

    Raises ShardCoreError for an optimizer whose state is not known.
    """
    kind = type(optimizer).__name__
    require(
        kind in _DENSE and not group.get("momentum") and not group.get("amsgrad"),
        f"replicas train under {kind}{' with momentum or amsgrad' if kind in _DENSE else ''}; rows with state "
        f"are known of {', '.join(_DENSE)}, without momentum and amsgrad",
    )
    return _DENSE[kind]


def fused_state_granularity(optimizer: str) -> tuple[tuple[str, str], ...]:
    """Pairs of name and granularity ("row" or "cell") of the state that a fused optimizer keeps.

    optimizer: FBGEMM's name.

    Raises ShardCoreError for an unknown optimizer.
    """
    # By FBGEMM's names, as ops report them.
    known = {o.theirs: o.states for o in OPTIMIZERS.values()}
    require(
        optimizer in known,
        f"tables train under {optimizer}; known are {', '.join(known)}",
    )
    states = known[optimizer]
    return tuple(zip(STATES[len(states)], states, strict=True)) if states else ()


def movable_kernels(collection: Collection) -> Iterator[Any]:
    """Kernels of a sharded collection on this rank. Raises ShardCoreError for a kernel whose rows are not plain
    tensors.
    """
    for kernel in collection.fused_ops():
        name = kernel._config.compute_kernel.value
        require(
            name in _KERNELS,
            f"tables {', '.join(t.name for t in kernel._config.embedding_tables[:5])} have kernel {name}; rows "
            f"can be read and written of {', '.join(_KERNELS)}",
        )
        yield kernel


def fused_kernels(collection: Collection) -> Iterator[Any]:
    """Kernels of a sharded collection on this rank whose tables train under a fused optimizer."""
    return (kernel for kernel in movable_kernels(collection) if not is_dense_kernel(kernel))


def is_dense_kernel(kernel: Any) -> bool:
    return kernel._config.compute_kernel.value == "dense"


def parts_on_rank(
    collection: Collection, optimizer: DenseOptimizer, new_state: dict[nn.Parameter, dict] | None = None
) -> Iterator[TablePart]:
    """Rows and columns of a collection's tables that this rank holds, with optimizer state.

    new_state: state of replicas by their parameter, which the optimizer does not have yet.
    """
    if not collection.is_sharded:
        for name, module in collection.table_modules.items():
            yield replicated_part((collection.path, name), module.weight, optimizer)
        return
    for kernel in movable_kernels(collection):
        kernel.flush()  # rows in a cache
        op = kernel.emb_module
        tables, weights = kernel._config.embedding_tables, op.split_embedding_weights()
        if is_dense_kernel(kernel):
            for table in tables:
                require(
                    collection.is_replicated(table.name),
                    f"table {table.name!r} of {collection.path!r} has kernel dense, and is not on every rank; its rows "
                    "can be read and written under a fused kernel, or as replicas",
                )
                weight = collection.table_modules[table.name].weight
                state = None if new_state is None else new_state.get(weight, {})
                yield replicated_part((collection.path, table.name), weight, optimizer, state)
            continue
        # Without state FBGEMM returns nothing: an empty state for each table then.
        of_tables = op.get_optimizer_state() or [{} for _ in tables]
        for table, tensor, of_table in zip(tables, weights, of_tables, strict=True):
            shard = table.local_metadata
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            # Ranks without rows of a table have an empty shard.
            if not rows or not columns:
                continue
            states = {k: view_by_row(v, rows) for k, v in of_table.items() if v.numel()}
            yield TablePart(
                (collection.path, table.name),
                (row, row + rows),
                (column, column + columns),
                {WEIGHTS: tensor.detach(), **states},
                # FBGEMM counts steps only for optimizers that need the count.
                int(op.iter) if hasattr(op, "iter") else None,
                partial(set_fused_step, op),
            )


def replicated_part(
    key: Key, weight: torch.Tensor, optimizer: DenseOptimizer, state: Mapping[str, Any] | None = None
) -> TablePart:
    """Part with a whole replicated table under a dense optimizer.

    state: the weight's optimizer state. None: as the optimizer has it.
    """
    state = optimizer.parameter_state(weight) if state is None else state
    # A count is no state of rows.
    states = {k: view_by_row(v, len(weight)) for k, v in state.items() if torch.is_tensor(v) and k != STEP}
    ends = (0, weight.shape[0]), (0, weight.shape[1])
    if STEP not in state:
        return TablePart(key, *ends, {WEIGHTS: weight.detach(), **states})
    count = state[STEP]
    return TablePart(key, *ends, {WEIGHTS: weight.detach(), **states}, int(count), count.fill_)


def set_fused_step(op: Any, step: int) -> None:
    """Set the step count of a fused FBGEMM op, if the op keeps one."""
    if hasattr(op, "iter"):
        # FBGEMM keeps the count on the device and on the CPU.
        op.iter.fill_(step)
        op.iter_cpu.fill_(step)


def zero_optimizer_state(
    kind: Any, group: Mapping[str, Any], weight: torch.Tensor, step: int
) -> dict[str, Any]:
    """State of a dense optimizer for a new parameter: zeros, after a number of steps."""
    states = dense_state_granularity(kind, group)
    if not states:
        return {}
    # Torch keeps the count on the device only for kernels that run there as a whole.
    device = weight.device if group.get("capturable") or group.get("fused") else "cpu"
    tensors = {
        name: torch.zeros((len(weight), 1), dtype=weight.dtype, device=weight.device)
        if per == "row"
        else torch.zeros_like(weight.detach())
        for name, per in states
    }
    return {STEP: torch.tensor(float(step), device=device), **tensors}


def view_by_row(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """View of optimizer state by row: [N, W] for state of cells, [N] for state of rows."""
    tensor = tensor.detach()
    return tensor.view(rows) if tensor.numel() == rows else tensor.view(rows, -1)
