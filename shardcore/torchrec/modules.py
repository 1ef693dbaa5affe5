"""The tables of a TorchRec model, by the modules that sharders take.

A module that wraps a collection (feature processors, managed collision) is sharded in its place. Plans name
the wrapper, and its sharder hands the tables on to the collection within. A plan of what is within would
leave out the wrapper: each rank would then map ids to rows alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardcore.core.access_statistics import HASH_FORMS, ManagedCollision
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, require_type, shown
from shardcore.tables.hot_rows import COLD, HOT, INSIDE

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ModuleSharder, ShardingPlan


_HISTORY = 1.25
"""Ids that managed collision keeps until it evicts, over those of its steps (MCHManagedCollisionModule)."""


def few(names: Sequence[str]) -> str:
    """The first five names, for messages."""
    return ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)


@dataclass(frozen=True)
class ModelTable:
    """A table of a model.

    path: the path in the module tree of what is sharded: its collection, or what wraps that.
    name: its name in the collection.
    config: its TorchRec config: rows, dim, features, data type.
    pooled: True if the collection pools, as an EmbeddingBagCollection does.
    weighted: True if lookups have weights.
    replica: True if the model itself has it on every rank, so that no TorchRec plan names it.
    within: the type of what wraps its collection. "": nothing does.
    sharding_types: types that TorchRec has for what wraps its collection. (): all.
    managed_collision: memory of what maps its raw ids to rows. None: nothing does.
    """

    path: str
    name: str
    config: Any
    pooled: bool
    weighted: bool = False
    replica: bool = False
    within: str = ""
    sharding_types: tuple[str, ...] = ()
    managed_collision: ManagedCollision | None = None


def tables_of(module: nn.Module, whole: bool = False) -> dict[str, ModelTable]:
    """The tables of all collections in a module, wrapped ones too, by our names.

    Our name is the table's own, or path.name if another collection has that name too. Hot rows of a
    HotColdEmbeddingCollection are tables, named as `with_hot_rows` does; not so if `whole`: then its tables
    count as they are without hot rows.

    Raises ShardCoreError for modules with tables that ShardCore cannot plan: embedding towers, those that
    prune or evict rows, collections of a class of the user's own, and those that are sharded already.
    """
    from torch import nn

    require_type(module, nn.Module, "module", "a torch.nn.Module, the model")
    tables = list(_tables(module, "", set(), whole))
    # Two collections may have tables of one name.
    uses = Counter(t.name for t in tables)
    # Both parts of a table go by one path, that of the module that divides it, if the table does.
    uses_of_whole = Counter(t.name for t in _tables(module, "", set(), True))
    divided = {t.path + INSIDE: t.path for t in tables if t.replica}
    hot = {(t.path, t.name.removesuffix(HOT)) for t in tables if t.replica}

    def name_of(table: ModelTable) -> str:
        path = divided.get(table.path, table.path)
        base = table.name.removesuffix(HOT if table.replica else COLD)
        unique = uses[table.name] == uses_of_whole[base if (path, base) in hot else table.name] == 1
        return table.name if unique else f"{path}.{table.name}"

    return {name_of(t): t for t in tables}


def _tables(module: nn.Module, path: str, seen: set[int], whole: bool) -> Iterator[ModelTable]:
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules import embedding_modules as plain

    from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection

    # A module that is used twice has one set of tables.
    if id(module) in seen:
        return
    seen.add(id(module))
    # A wrapper is sharded in place of its collection, so its path counts.
    if inner := _inner().get(type(module)):
        yield from _of_collection(getattr(module, inner), path, module)
        return
    # Exact types: a subclass may do anything to ids or weights.
    if type(module) in (plain.EmbeddingBagCollection, plain.EmbeddingCollection):
        yield from _of_collection(module, path)
        return
    if isinstance(module, ShardedModule):
        raise ShardCoreError(
            f"module {path!r} is a {type(module).__name__}, so it is sharded already; give the model as it was before "
            "DistributedModelParallel"
        )
    # A subclass may do anything to ids or weights.
    if isinstance(
        module, (*_refused(), plain.EmbeddingBagCollectionInterface, plain.EmbeddingCollectionInterface)
    ):
        raise ShardCoreError(
            f"module {path!r} is a {type(module).__name__}; ShardCore plans "
            f"{', '.join(_planned())}, and no subclasses of these"
        )
    if isinstance(module, HotColdEmbeddingCollection):
        if whole:
            yield from (ModelTable(path, name, c, False) for name, c in module.whole_tables().items())
            return
        yield from (
            ModelTable(path, name + HOT, c, False, replica=True) for name, c in module.hot_tables().items()
        )
    # Children in order of the module tree, so that tables have a stable order.
    for name, child in module.named_children():
        yield from _tables(child, f"{path}.{name}" if path else name, seen, whole)


def _of_collection(collection: Any, path: str, wrapper: nn.Module | None = None) -> list[ModelTable]:
    pooled = hasattr(collection, "embedding_bag_configs")
    configs = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    weighted = pooled and collection.is_weighted()
    within, types = "", ()
    if wrapper is not None:
        from torchrec.distributed.sharding_plan import get_module_to_default_sharders

        # TorchRec's own sharder states which types it has for a wrapper.
        sharder = get_module_to_default_sharders()[type(wrapper)]
        within, types = type(wrapper).__name__, tuple(sorted(sharder.sharding_types("cuda")))
    return [
        ModelTable(
            path,
            c.name,
            c,
            pooled,
            weighted,
            within=within,
            sharding_types=types,
            managed_collision=_managed_collision(wrapper, c),
        )
        for c in configs
    ]


def _managed_collision(wrapper: nn.Module | None, config: Any) -> ManagedCollision | None:
    """Memory of the module that maps raw ids of a table to rows. None: the wrapper has no such."""
    if (collection := getattr(wrapper, "_managed_collision_collection", None)) is None:
        return None
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    module = collection._managed_collision_modules[config.name]
    rows = config.num_embeddings
    # A parameter of MPZCH is a buffer, too, by the same name: one tensor.
    tensors = list((dict(module.named_buffers()) | dict(module.named_parameters())).values())
    # Tensors with an entry for each row: the maps from ids to rows, and what eviction needs.
    of_rows = sum(x.element_size() * x.numel() for x in tensors if len(x.shape) and x.shape[0] == rows)
    size = module.input_size()
    same: dict[str, Any] = {
        "row_bytes": -(-of_rows // rows),
        "bytes": sum(x.element_size() * x.numel() for x in tensors) - of_rows,
        "input_size": size,
        "routing": "contiguous" if size else "round_robin",
    }
    form, eviction = _form(module)
    if eviction in HASH_FORMS[form].row_bytes:
        same |= {"form": form, "eviction": eviction}
    if not isinstance(module, MCHManagedCollisionModule):  # a hash table, which keeps no history
        return ManagedCollision(**same, buckets=module.buckets(), probes=module.max_probe)
    # Sharded, it has a bucket for each rank. An id is hashed before if the module has a function for it.
    if module._input_hash_func is not None:
        same["routing"] = "hashed"
    # Of each id of the history it keeps the id and the metadata that eviction needs, 8 bytes each.
    fields = 1 + sum(of_history for _, _, of_history in module._eviction_policy.metadata_info)
    return ManagedCollision(**same, lookup_bytes=math.ceil(_HISTORY * module._eviction_interval * fields * 8))


def _form(module: nn.Module) -> tuple[str, str]:
    """Form of a managed-collision module, and its eviction policy, which may be the user's own."""
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    if isinstance(module, MCHManagedCollisionModule):
        policy = type(module._eviction_policy).__name__
        return "managed_collision", policy.removesuffix("_EvictionPolicy").lower()
    name = getattr(module, "_eviction_policy_name", None)
    return "mpzch", name.value.removesuffix("_EVICTION").lower() if name else "none"


def _inner() -> dict[type, str]:
    """TorchRec's modules that wrap a collection, and their attribute that has it."""
    from torchrec.modules import fp_embedding_modules, mc_embedding_modules

    return {
        fp_embedding_modules.FeatureProcessedEmbeddingBagCollection: "_embedding_bag_collection",
        mc_embedding_modules.ManagedCollisionEmbeddingBagCollection: "_embedding_module",
        mc_embedding_modules.ManagedCollisionEmbeddingCollection: "_embedding_module",
    }


def _refused() -> tuple[type, ...]:
    """TorchRec's modules with tables that follow other sharding rules."""
    from torchrec.modules import embedding_tower, itep_embedding_modules

    try:
        from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
    except ImportError:  # before TorchRec 1.7
        pec = ()
    else:
        pec = (PECEmbeddingCollection,)
    return (
        embedding_tower.EmbeddingTower,
        embedding_tower.EmbeddingTowerCollection,
        itep_embedding_modules.ITEPEmbeddingBagCollection,
        itep_embedding_modules.ITEPEmbeddingCollection,
        *pec,
        # Wrappers of exactly these types are planned above. Here are their subclasses.
        *_inner(),
    )


def _planned() -> list[str]:
    return ["EmbeddingBagCollection", "EmbeddingCollection", *(t.__name__ for t in _inner())]


def path_in_model(path: str, job: nn.Module) -> str:
    """The path of a sharded module in the model, from the path of its collection in a job.

    It leaves out the wrappers that the job puts around the model, and the attribute of a wrapper.
    job: a DistributedModelParallel.
    """
    module, parts = job, []
    for part in filter(None, path.split(".")):
        # Attributes of wrappers are no names in the model.
        if part not in (name for kind, name in _attributes().items() if isinstance(module, kind)):
            parts.append(part)
        module = getattr(module, part)
    return ".".join(parts)


def _attributes() -> dict[type, str]:
    """TorchRec's and torch's modules of a job that have another within, and their attribute of it."""
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
    from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection

    return {
        DistributedModelParallel: "_dmp_wrapped_module",
        DistributedDataParallel: "module",
        ShardedFeatureProcessedEmbeddingBagCollection: "_embedding_bag_collection",
        BaseShardedManagedCollisionEmbeddingCollection: "_embedding_module",
    }


def require_sharders(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> None:
    """Raise ShardCoreError for a module with tables that none of the sharders takes."""
    require_type(sharders, Iterable, "sharders", "a list of TorchRec's sharders, or None")
    for sharder in sharders:
        require(
            hasattr(sharder, "module_type"),
            f"sharders has {shown(sharder)}; it needs TorchRec's sharders, such as EmbeddingBagCollectionSharder()",
        )
    kinds = {sharder.module_type for sharder in sharders}
    for table in (t for t in tables_of(module).values() if not t.replica):
        if (kind := type(module.get_submodule(table.path))) not in kinds:
            raise ShardCoreError(
                f"module {table.path!r} is an {kind.__name__}, which no sharder takes; there are "
                f"{sorted(type(s).__name__ for s in sharders)}: add {kind.__name__}Sharder()"
            )


def sharders_of(
    module: nn.Module, tables: Mapping[str, ModelTable], sharders: Sequence[ModuleSharder[Any]]
) -> list[ModuleSharder[Any]]:
    """The sharders that take a module with tables."""
    # Replicas of hot rows have no sharder.
    types = {type(module.get_submodule(t.path)) for t in tables.values() if not t.replica}
    return [sharder for sharder in sharders if sharder.module_type in types]


def require_all(plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> None:
    """Raise ShardCoreError for a module that a sharder takes and the plan leaves out.

    TorchRec checks the same, in `validate_modules_inclusion_in_sharding_plan` of 1.7 and later.

    sharders: sharders of DistributedModelParallel. Empty: its defaults.
    """
    from torchrec.distributed.sharding_plan import get_default_sharders

    by_type = {sharder.module_type: sharder for sharder in sharders or get_default_sharders()}
    # A planned module's sharder takes what is within, too.
    planned = tuple(f"{path}." if path else "" for path in plan.plan)
    missing = [
        path
        for path, child in module.named_modules()
        if (sharder := by_type.get(type(child))) and sharder.shardable_parameters(child)
        if path not in plan.plan and not path.startswith(planned)
    ]
    if missing:
        raise ShardCoreError(
            f"modules {missing[:5]} are not present in the sharding plan; ShardCore plans {', '.join(_planned())}"
        )


def unpriced_wrappers(tables: Mapping[str, ModelTable]) -> list[str]:
    """A line for each module that wraps a collection: a price leaves out its effects."""
    wrappers = {t.path: t.within for t in tables.values() if t.within}
    return [
        f"module {path!r} is priced as the collection within; what its {kind} does to ids and weights is not"
        for path, kind in wrappers.items()
    ]
