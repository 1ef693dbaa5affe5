"""Dense optimizers of a job whose tables move: which one trains a replica, and how its parameters are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardcore.core.validation import require
from shardcore.torchrec.modules import Collection, collections_of_model
from shardcore.torchrec.moves.rows import DenseOptimizer


def replica_parameter_groups(model: nn.Module, optimizer: DenseOptimizer) -> list[tuple[Any, dict[str, Any]]]:
    """Dense optimizers and parameter groups that could train a job's replicated tables: one entry if that is clear."""
    replicas = [
        module.weight
        for collection in collections_of_model(model, refuses_others=False)
        for name, module in collection.table_modules.items()
        if collection.is_replicated(name)
    ]
    # The optimizer of replicas that exist is the one for new replicas, too.
    if found := [of for weight in replicas if (of := optimizer.parameter_group(weight)) is not None]:
        return found[:1]
    # Otherwise an empty group is meant for them, or the only group there is.
    groups = [(o, group) for o in optimizer.plain for group in o.param_groups]
    return [of for of in groups if not of[1]["params"]] or groups


def replica_parameter_group(
    collection: Collection, table: str, optimizer: DenseOptimizer, groups: list[tuple[Any, dict[str, Any]]]
) -> tuple[Any, dict[str, Any]]:
    """Dense optimizer and parameter group that train a table's replica, before or after a move.

    Raises ShardCoreError if there is none, or if several could be meant.
    """
    # A replica keeps the group that it has.
    if collection.is_replicated(table):
        own = optimizer.parameter_group(collection.table_modules[table].weight)
        groups = [] if own is None else [own]
    require(
        len(groups) == 1,
        f"table {table!r} of {collection.path!r} is or becomes a replica, and {len(groups)} groups of the "
        "optimizer's parameters may have it; give an optimizer that has replicas, one group in all, or one without "
        "parameters",
    )
    return groups[0]


def replace_parameter(
    given: Any, group: tuple[Any, dict[str, Any]], parameters: tuple[Any, Any], name: str
) -> None:
    """Replace a parameter in an optimizer's group and in TorchRec's wrappers of the optimizer; None adds or removes
    one.
    """
    before, after = parameters
    optimizer, params = group[0], group[1]["params"]
    # In place, so that the group and its order stay, and other references see the change.
    at = next((i for i, p in enumerate(params) if p is before), len(params))
    params[at : at + 1] = [] if after is None else [after]
    # State belongs to the old parameter and would stay in memory.
    optimizer.state.pop(before, None)
    # TorchRec's wrappers keep parameters by name, in separate mappings.
    for keyed in _optimizer_wrappers(given):
        if getattr(keyed, "_optimizer", None) is optimizer:
            of_keyed = {k: p for k, p in keyed.params.items() if p is not before}
            keyed.params = of_keyed if after is None else {**of_keyed, name: after}


def _optimizer_wrappers(optimizer: Any) -> Iterator[Any]:
    """TorchRec's wrappers around an optimizer, innermost first."""
    if hasattr(optimizer, "optimizers"):
        for _, inner in optimizer.optimizers:
            yield from _optimizer_wrappers(inner)
    elif hasattr(optimizer, "_optimizer"):
        # Inner first: outer wrappers copy what the inner ones have.
        yield from _optimizer_wrappers(optimizer._optimizer)
        yield optimizer


def refresh_optimizer_wrappers(optimizer: Any) -> None:
    """Copy parameters, state and groups of inner optimizers to TorchRec's wrappers around them."""
    from torchrec.optim.keyed import OptimizerWrapper

    for keyed in _optimizer_wrappers(optimizer):
        if isinstance(keyed, OptimizerWrapper):
            inner = keyed._optimizer
            keyed.params, keyed.state, keyed.param_groups = inner.params, inner.state, inner.param_groups


def renew_fused_optimizer(model: Any) -> None:
    """Rebuild the model's fused optimizer from the new shards, in the list that the job's wrappers refer to."""
    from torchrec.distributed.model_parallel import get_unwrapped_module

    # The list is changed in place, as the job's wrappers refer to it.
    model._optim._optims[:] = model._init_optim(get_unwrapped_module(model))._optims
