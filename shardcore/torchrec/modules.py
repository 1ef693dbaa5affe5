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
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardcore.core.access_statistics import HASH_FORMS, ManagedCollision
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, require_type, short_repr
from shardcore.tables.hot_rows import COLD, HOT, INSIDE, REPLICA

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan


_HISTORY = 1.25
"""Ids that managed collision keeps until it evicts, over those of its steps (MCHManagedCollisionModule)."""


def is_replicated(sharding: ParameterSharding) -> bool:
    """Tell if a ParameterSharding replicates its table on every rank."""
    return sharding.sharding_type in REPLICA.torchrec


def quote_first_names(names: Sequence[str]) -> str:
    """The first five names, quoted and joined by commas, for messages."""
    return ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)


@dataclass(frozen=True)
class Collection:
    """A collection of tables of a model, sharded or not.

    path: the path in the module tree of what a plan names: the collection, or what wraps it.
    module: the EmbeddingBagCollection or EmbeddingCollection, or TorchRec's sharded form of one.
    wrapper: the module that wraps it and is sharded in its place. None: nothing does.
    divider: the HotColdEmbeddingCollection whose cold rows it has. None: it has whole tables.
    """

    path: str
    module: Any
    wrapper: Any = None
    divider: Any = None

    @property
    def is_sharded(self) -> bool:
        return hasattr(self.module, "module_sharding_plan")

    @property
    def is_pooled(self) -> bool:
        return hasattr(self.module, "embedding_bags")

    @property
    def table_configs(self) -> list[Any]:
        """TorchRec's EmbeddingConfig or EmbeddingBagConfig of each table in the collection."""
        if self.is_sharded:
            return self.module._embedding_bag_configs if self.is_pooled else self.module._embedding_configs
        return self.module.embedding_bag_configs() if self.is_pooled else self.module.embedding_configs()

    @property
    def table_modules(self) -> Any:
        """Modules by table name, each with the table's weight."""
        return self.module.embedding_bags if self.is_pooled else self.module.embeddings

    def weights_name(self, table: str) -> str:
        """Name of a table's weights in the model's state_dict."""
        form = "embedding_bags" if self.is_pooled else "embeddings"
        return ".".join(filter(None, (self.path, form, table, "weight")))

    def is_replicated(self, table: str) -> bool:
        """Tell if a sharded collection has a table replicated on every rank."""
        return self.is_sharded and is_replicated(self.module.module_sharding_plan[table])

    @property
    def shardable_type(self) -> type:
        """Type of the module that a TorchRec sharder takes: the collection's, or that of its wrapper."""
        return type(self.module if self.wrapper is None else self.wrapper)

    def fused_ops(self) -> Iterator[Any]:
        """FBGEMM ops of a sharded collection on this rank."""
        for lookup in getattr(self.module, "_lookups", ()):
            # Data-parallel lookups are wrapped in DDP, hence `module`.
            yield from getattr(lookup, "module", lookup)._emb_modules

    @cached_property
    def fused_params(self) -> dict[str, dict[str, Any]]:
        """Settings of the fused op of each table in a sharded collection, of all ranks' tables."""
        # EmbeddingBagCollections and EmbeddingCollections keep shardings under different names.
        shardings = getattr(self.module, "_embedding_shardings", None)
        if shardings is None:
            shardings = self.module._sharding_type_to_sharding.values()
        return {
            table.name: dict(table.fused_params or {})
            for sharding in shardings
            for groups in sharding._grouped_embedding_configs_per_rank
            for group in groups
            for table in group.embedding_tables
        }


@dataclass(frozen=True)
class ModelTable:
    """An embedding table of a TorchRec model, with its collection and path.

    path: the path in the module tree of what is sharded: its collection, or what wraps that.
    name: its name in the collection.
    config: its TorchRec config: rows, dim, features, data type.
    pooled: True if the collection pools, as an EmbeddingBagCollection does.
    weighted: True if lookups have weights.
    replica: True if the model itself has it on every rank, so that no TorchRec plan names it.
    hot_rows: number of its rows that a HotColdEmbeddingCollection has on every rank. Given of whole tables.
    collection: the collection. None: the model is not here.
    sharding_types: types that TorchRec has for what wraps its collection. (): all.
    managed_collision: memory of what maps its raw ids to rows. None: nothing does.
    """

    path: str
    name: str
    config: Any
    pooled: bool
    weighted: bool = False
    replica: bool = False
    hot_rows: int = 0
    collection: Collection | None = None
    sharding_types: tuple[str, ...] = ()
    managed_collision: ManagedCollision | None = None

    @property
    def sharded_name(self) -> str:
        """Name in its collection of the table's sharded rows: the cold ones if the table has hot rows."""
        return self.name + COLD if self.hot_rows else self.name

    @property
    def wrapper_name(self) -> str:
        """Type name of the module that wraps the table's collection; "" without a wrapper."""
        wrapper = self.collection and self.collection.wrapper
        return type(wrapper).__name__ if wrapper else ""


def tables_of_model(module: nn.Module, whole: bool = False) -> dict[str, ModelTable]:
    """Tables of all embedding collections in a model, sharded or not, keyed by the names that a Problem has for them.

    Our name is the table's own, or path.name if another collection has that name too. Hot rows of a
    HotColdEmbeddingCollection are tables, named as `with_hot_rows` does; not so if `whole`: then its tables
    count as they are without hot rows.

    Raises as `collections_of_model`.
    """
    from torch import nn

    require_type(module, nn.Module, "module", "a torch.nn.Module, the model")
    collections = collections_of_model(module)
    tables = [t for c in collections for t in _tables_of_collection(c, whole)]
    # Two collections may have tables of one name.
    uses = Counter(t.name for t in tables)
    # Both parts of a table go by one path, that of the module that divides it, if the table does.
    uses_of_whole = Counter(t.name for c in collections for t in _tables_of_collection(c, True))
    divided = {t.path + INSIDE: t.path for t in tables if t.replica}
    hot = {(t.path, t.name.removesuffix(HOT)) for t in tables if t.replica}

    def our_name(table: ModelTable) -> str:
        path = divided.get(table.path, table.path)
        base = table.name.removesuffix(HOT if table.replica else COLD)
        unique = uses[table.name] == uses_of_whole[base if (path, base) in hot else table.name] == 1
        return table.name if unique else f"{path}.{table.name}"

    return {our_name(t): t for t in tables}


def collections_of_model(model: nn.Module, refuses_others: bool = True) -> list[Collection]:
    """Embedding collections of a model, sharded or not, in the order of the module tree.

    model: a model, or a job's: what DistributedModelParallel and data parallelism wrap around it does not count.
    refuses_others: False to leave out modules with tables that ShardCore cannot plan.

    Raises ShardCoreError for such modules: embedding towers, those that prune or evict rows, quantized
    collections, and collections of a class of the user's own.
    """
    from torchrec.distributed.model_parallel import get_unwrapped_module

    from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection  # loads torch

    found: list[Collection] = []
    seen: set[int] = set()
    plain, wrappers, others = _collection_types(), _wrapper_types(), _refused_types()

    def walk(module: nn.Module, path: str, divider: Any = None) -> None:
        module = get_unwrapped_module(module)
        # A module that is used twice has one set of tables.
        if id(module) in seen:
            return
        seen.add(id(module))
        # Exact types: a subclass may do anything to ids or weights.
        if attribute := wrappers.get(type(module)):
            found.append(Collection(path, getattr(module, attribute), module))
        elif type(module) in plain:
            found.append(Collection(path, module, divider=divider))
        elif not isinstance(module, others):
            divider = module if isinstance(module, HotColdEmbeddingCollection) else None
            for name, child in module.named_children():
                walk(child, f"{path}.{name}" if path else name, divider)
        elif refuses_others:
            raise ShardCoreError(
                f"module {path!r} is a {type(module).__name__}; ShardCore plans "
                f"{', '.join(_supported_type_names())}, and no subclasses of these"
            )

    walk(model, "")
    return found


def _tables_of_collection(collection: Collection, whole: bool) -> list[ModelTable]:
    hot, types = [], ()
    if (divider := collection.divider) is not None:
        path, counts = collection.path.removesuffix(INSIDE), divider.hot_table_configs()
        if whole:
            return [
                ModelTable(
                    path,
                    name,
                    config,
                    False,
                    collection=collection,
                    hot_rows=counts[name].num_embeddings if name in counts else 0,
                )
                for name, config in divider.whole_table_configs().items()
            ]
        hot = [ModelTable(path, name + HOT, config, False, replica=True) for name, config in counts.items()]
    if collection.wrapper is not None and not collection.is_sharded:
        from torchrec.distributed.sharding_plan import get_module_to_default_sharders

        # TorchRec's own sharder states which types it has for a wrapper.
        sharder = get_module_to_default_sharders()[collection.shardable_type]
        types = tuple(sorted(sharder.sharding_types("cuda")))
    module = collection.module
    # A sharded collection keeps the argument of its constructor.
    weighted = module._is_weighted if collection.is_pooled else False
    return hot + [
        ModelTable(
            collection.path,
            config.name,
            config,
            collection.is_pooled,
            weighted,
            collection=collection,
            sharding_types=types,
            managed_collision=None
            if collection.is_sharded
            else _managed_collision_memory(collection.wrapper, config),
        )
        for config in collection.table_configs
    ]


def _managed_collision_memory(wrapper: nn.Module | None, config: Any) -> ManagedCollision | None:
    """Memory that a managed-collision module takes for a table; None if the wrapper has no such module."""
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
    form, eviction = _hash_form_and_eviction_policy(module)
    if eviction in HASH_FORMS[form].row_bytes:
        same |= {"form": form, "eviction": eviction}
    if not isinstance(module, MCHManagedCollisionModule):  # a hash table, which keeps no history
        return ManagedCollision(**same, buckets=module.buckets())
    # Sharded, it has a bucket for each rank. An id is hashed before if the module has a function for it.
    if module._input_hash_func is not None:
        same["routing"] = "hashed"
    # Of each id of the history it keeps the id and the metadata that eviction needs, 8 bytes each.
    fields = 1 + sum(of_history for _, _, of_history in module._eviction_policy.metadata_info)
    return ManagedCollision(**same, lookup_bytes=math.ceil(_HISTORY * module._eviction_interval * fields * 8))


def _hash_form_and_eviction_policy(module: nn.Module) -> tuple[str, str]:
    """Hash-table form and eviction policy of a managed-collision module; the policy may be a user's own class."""
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    if isinstance(module, MCHManagedCollisionModule):
        policy = type(module._eviction_policy).__name__
        return "managed_collision", policy.removesuffix("_EvictionPolicy").lower()
    name = getattr(module, "_eviction_policy_name", None)
    return "mpzch", name.value.removesuffix("_EVICTION").lower() if name else "none"


def _collection_types() -> tuple[type, ...]:
    """TorchRec's types of embedding collections, plain and sharded."""
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    return (
        EmbeddingBagCollection,
        EmbeddingCollection,
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
    )


def _wrapper_types() -> dict[type, str]:
    """TorchRec's types of modules that wrap a collection, and the attribute in which each keeps the collection."""
    from torchrec.distributed import fp_embeddingbag, mc_embedding, mc_embeddingbag
    from torchrec.modules import fp_embedding_modules, mc_embedding_modules

    of_processors, of_collision = "_embedding_bag_collection", "_embedding_module"
    return {
        fp_embedding_modules.FeatureProcessedEmbeddingBagCollection: of_processors,
        mc_embedding_modules.ManagedCollisionEmbeddingBagCollection: of_collision,
        mc_embedding_modules.ManagedCollisionEmbeddingCollection: of_collision,
        fp_embeddingbag.ShardedFeatureProcessedEmbeddingBagCollection: of_processors,
        mc_embeddingbag.ShardedManagedCollisionEmbeddingBagCollection: of_collision,
        mc_embedding.ShardedManagedCollisionEmbeddingCollection: of_collision,
    }


def _refused_types() -> tuple[type, ...]:
    """Types of modules with tables that ShardCore refuses to plan. Exact planned types are checked before."""
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules import embedding_modules, embedding_tower, itep_embedding_modules

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
        # Subclasses of the user's own, and quantized collections.
        embedding_modules.EmbeddingBagCollectionInterface,
        embedding_modules.EmbeddingCollectionInterface,
        *_wrapper_types(),
        ShardedModule,
    )


def _supported_type_names() -> list[str]:
    """Names of the module types that ShardCore plans."""
    return [
        t.__name__ for t in (*_collection_types(), *_wrapper_types()) if not t.__name__.startswith("Sharded")
    ]


def require_sharders(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> None:
    """Raise ShardCoreError if a model has an embedding module that none of the sharders takes."""
    require_type(sharders, Iterable, "sharders", "a list of TorchRec's sharders, or None")
    for sharder in sharders:
        require(
            hasattr(sharder, "module_type"),
            f"sharders has {short_repr(sharder)}; it needs TorchRec's sharders, "
            "such as EmbeddingBagCollectionSharder()",
        )
    kinds = {sharder.module_type for sharder in sharders}
    for collection in collections_of_model(module):
        if (kind := collection.shardable_type) not in kinds:
            raise ShardCoreError(
                f"module {collection.path!r} is an {kind.__name__}, which no sharder takes; there are "
                f"{sorted(type(s).__name__ for s in sharders)}: add {kind.__name__}Sharder()"
            )


def applicable_sharders(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> list[ModuleSharder[Any]]:
    """The sharders whose type of module occurs among a model's collections."""
    types = {collection.shardable_type for collection in collections_of_model(module)}
    return [sharder for sharder in sharders if sharder.module_type in types]


def require_all_modules_planned(
    plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> None:
    """Raise ShardCoreError if a plan leaves out a module that a sharder would shard.

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
    require(
        not missing,
        f"modules {missing[:5]} are not present in the sharding plan; ShardCore plans "
        f"{', '.join(_supported_type_names())}",
    )


def weight_gradient_notes(tables: Mapping[str, ModelTable], compute_device: str) -> list[str]:
    """A line for each weighted collection on GPUs in whose backward a gradient is computed that nobody reads.

    FBGEMM computes it wherever ids have weights, and TorchRec does not say that they need none (TorchRec 4712, 4749).
    Feature processors train weights, so they read it.
    """
    paths = {t.path: None for t in tables.values() if t.weighted and not t.wrapper_name}
    return [
        f"module {path!r} has weights of ids: FBGEMM's backward computes their gradient even where they are data and "
        "nobody reads it, 4.9% of a step on 8 B200 (TorchRec 4749); feature_requires_grad of zeros for its ops saves it"
        for path in paths
        if compute_device == "cuda"
    ]


def unpriced_wrappers(tables: Mapping[str, ModelTable]) -> list[str]:
    """A line for each module that wraps a collection and whose own work the price leaves out."""
    wrappers = {t.path: t.wrapper_name for t in tables.values() if t.wrapper_name}
    return [
        f"module {path!r} is priced as the collection within; what its {kind} does to ids and weights is not"
        for path, kind in wrappers.items()
    ]
