"""The optimizer that a model's tables train under, whichever way a job set it.

TorchRec takes, for each table: what `apply_optimizer_in_backward` set on its weights, or else the `optimizer`
of its sharder's fused_params, or else FBGEMM's default, EXACT_SGD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardcore.core.catalog import OPTIMIZERS, shardcore_name
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.validation import require
from shardcore.cost.composite import Composite
from shardcore.cost.model import CostModel
from shardcore.torchrec import fields
from shardcore.torchrec.modules import ModelTable

if TYPE_CHECKING:
    from torchrec.distributed.types import ModuleSharder


def optimizer_of_tables(
    tables: Mapping[str, ModelTable], sharders: Iterable[ModuleSharder[Any]] = ()
) -> str | None:
    """Name of the one optimizer that all of a model's tables train under; None if the job sets none.

    Raises ShardCoreError for one that is not in the catalog, several on one table, and tables that differ.
    """
    of_table = _fbgemm_optimizer_by_table(tables, sharders)
    stated = {name: theirs for name, theirs in of_table.items() if theirs}
    if not stated:
        return None
    # FBGEMM's own default runs where others have none.
    by_name = {name: theirs or OPTIMIZERS["exact_sgd"].theirs for name, theirs in of_table.items()}
    for name, theirs in by_name.items():
        require(
            shardcore_name(theirs, OPTIMIZERS) is not None,
            f"table {name!r} trains under {theirs}; known are {', '.join(o.theirs for o in OPTIMIZERS.values())}",
        )
    # A step is priced under one optimizer.
    first, *others = dict.fromkeys(by_name.values())
    if others:
        pairs = [(next(n for n, t in by_name.items() if t == kind), kind) for kind in (first, others[0])]
        of = " and ".join(
            f"table {name!r} under {theirs}" + " (FBGEMM's default)" * (of_table[name] is None)
            for name, theirs in pairs
        )
        raise ShardCoreError(
            f"the model trains {of}; ShardCore counts and prices one optimizer for all tables: set the same on each"
        )
    return shardcore_name(first, OPTIMIZERS)


def _fbgemm_optimizer_by_table(
    tables: Mapping[str, ModelTable], sharders: Iterable[ModuleSharder[Any]]
) -> dict[str, str | None]:
    """FBGEMM's optimizer name of each sharded table; None where the job sets none."""
    fused_params = fused_params_by_table(tables, sharders)
    optimizers: dict[str, str | None] = {}
    for name, table in tables.items():
        if (collection := table.collection) is None or collection.is_replicated(table.sharded_name):
            continue
        # What is set in backward takes precedence, as in TorchRec. Sharding puts it into fused_params.
        fused = fused_params[name].get("optimizer")
        stated = None if fused is None else str(getattr(fused, "name", fused))
        weight = collection.table_modules[table.sharded_name].weight
        optimizers[name] = stated if collection.is_sharded else _optimizer_in_backward(name, weight) or stated
    return optimizers


def fused_params_by_table(
    tables: Mapping[str, ModelTable], sharders: Iterable[ModuleSharder[Any]]
) -> dict[str, Mapping[str, Any]]:
    """fused_params of each table: of its sharded collection, or of the sharder that takes the collection."""
    # Sharders are found by the type of module that they take.
    by_type = {sharder.module_type: getattr(sharder, "fused_params", None) or {} for sharder in sharders}
    fused_params: dict[str, Mapping[str, Any]] = {}
    for name, table in tables.items():
        if (collection := table.collection) is None:
            fused_params[name] = {}
        elif collection.is_sharded:
            fused_params[name] = collection.fused_params[table.sharded_name]
        else:
            fused_params[name] = by_type.get(collection.shardable_type, {})
    return fused_params


def _optimizer_in_backward(name: str, weight: Any) -> str | None:
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    kinds = getattr(weight, "_optimizer_classes", ())
    require(
        len(kinds) <= 1,
        f"table {name!r} has optimizers {', '.join(k.__name__ for k in kinds)} in backward; TorchRec takes one",
    )
    if not kinds:
        return None
    [kind], [given] = kinds, getattr(weight, "_optimizer_kwargs", ({},))
    try:
        theirs = given.get("optimizer") or optimizer_type_to_emb_opt_type(kind)
    except ValueError:  # TorchRec has none of that type
        theirs = None
    return getattr(theirs, "name", kind.__name__)


def relabel_optimizer(model: CostModel, optimizer: str) -> CostModel:
    """Cost model with its setting's optimizer replaced, to price a job under an optimizer that was not measured."""
    if model.setting.optimizer == optimizer:
        return model
    if isinstance(model, Composite):
        return replace(model, models=tuple(relabel_optimizer(m, optimizer) for m in model.models))
    setting = replace(model.setting, optimizer=optimizer)
    return replace(model, setting=setting)  # type: ignore[type-var]  # all other models are dataclasses


def unpriced_fused_params(sharders: Iterable[ModuleSharder[Any]]) -> list[str]:
    """A line for each of the sharders' fused_params whose effect the price leaves out.

    Raises ShardCoreError for one that is refused (`fields.FIELDS`).
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    return [
        line
        for sharder in sharders
        for line in fields.unpriced_field_lines(
            SplitTableBatchedEmbeddingBagsCodegen,
            getattr(sharder, "fused_params", None) or {},
            f"fused_params of {type(sharder).__name__}",
        )
    ]


def replication_note(optimizer: str, job: Job) -> str:
    """Line that says why no table is replicated by default, and which setting allows replicas."""
    of_job = f"({job.replica_optimizer})" if job.replica_optimizer else "(nobody says which)"
    return (
        f"no table is replicated by default: replicas leave the fused {optimizer} for the job's dense optimizer "
        f"{of_job}. Job(replica_optimizer={OPTIMIZERS[optimizer].dense!r}) says that it is the same, and "
        "'data_parallel' among a table's sharding_types allows it in any case"
    )


def optimizer_notes(model: CostModel, optimizer: str | None, counted: str) -> list[str]:
    """Lines that say which optimizer prices and memory assume, where the job's own differs or is not set.

    optimizer: the job's. None: it sets none.
    counted: the optimizer whose state memory counts.
    """
    lines = []
    if optimizer is None:
        lines.append(
            f"no optimizer is set on the tables' weights or in fused_params; their state counts as "
            f"under {counted}, the cost model's"
        )
    elif optimizer != model.setting.optimizer:
        lines.append(
            f"tables are priced as under {model.setting.optimizer}, for which the cost model is; "
            f"they train under {optimizer}, whose state memory counts"
        )
    return lines
