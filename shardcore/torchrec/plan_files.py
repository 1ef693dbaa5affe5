"""Files of TorchRec's ShardingPlans, without loss. TorchRec itself can neither write nor read them.

A file has the ParameterSharding of each table, by module path. That is sharding type, kernel, ranks, and each
shard's offsets, sizes and placement. Other settings (cache, SSD, bounds checks, output type) are written if
they are given.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_DEVICES, shown
from shardcore.io import files, schema, writing

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
    from torchrec.distributed.types import ParameterSharding, ShardingPlan

_PLACEMENT = re.compile(r"rank:(?P<rank>\d{1,6})/.+")
SCHEMA, VERSION = "shardcore/torchrec-plan", 2
"""Version 1 had no qcomms. Its digest covered only the modules."""


def write_torchrec(path: str | Path, plan: ShardingPlan, qcomms: QCommsConfig | None = None) -> None:
    """Write a plan.

    qcomms: precision of the job's collectives. TorchRec keeps it in sharders, not in the plan.
    """
    body = {"modules": to_json(plan)} | ({"qcomms": encode(qcomms, "qcomms")} if qcomms else {})
    writing.write_json(path, {"schema": SCHEMA, "version": VERSION, "digest": files.digest(body), **body})


def read_torchrec(path: str | Path, module: nn.Module | None = None) -> ShardingPlan:
    """A plan for DistributedModelParallel.

    module: the model that it is for. Without it TorchRec trains on where the plan names other modules: their
      tables are then not sharded at all.

    Raises ShardCoreError for a file that is foreign, damaged or edited, and for a plan of another model.
    """
    found = from_json(_read(path)["modules"], str(path))
    if module is not None:
        _require_of(found, module, str(path))
    return found


def _require_of(plan: ShardingPlan, module: nn.Module, what: str) -> None:
    from shardcore.torchrec.modules import tables_of

    of_path: dict[str, set[str]] = {}
    for table in tables_of(module).values():
        of_path.setdefault(table.path, set()).add(table.name)
    for path in sorted(set(plan.plan) | set(of_path)):
        planned, there = set(plan.plan.get(path, {})), of_path.get(path)
        if there is None:
            raise ShardCoreError(
                f"{what} shards module {path!r}, which is no collection of the model; those "
                f"are {sorted(of_path)[:5]}: export with --module"
            )
        if missing := sorted(there ^ planned):
            raise ShardCoreError(f"{what} and the model differ in tables {missing[:5]} of module {path!r}")


def read_qcomms(path: str | Path) -> QCommsConfig | None:
    """The QCommsConfig in a plan's file, for get_qcomm_codecs_registry. Raises as `read_torchrec` does."""
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig

    return decode(QCommsConfig, _read(path).get("qcomms"), f"{path}, qcomms")


def _read(path: str | Path) -> dict[str, Any]:
    data = schema.read_json(path)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "modules" not in data:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ShardCoreError(f"{path} has schema {shown(found)}; expected {SCHEMA!r}")
    if data.get("version") not in (1, VERSION):
        raise ShardCoreError(
            f"{path} has version {shown(data.get('version'))} of {SCHEMA}; this ShardCore reads up to {VERSION}"
        )
    body = {k: v for k, v in data.items() if k not in ("schema", "version", "digest")}
    # An edited plan could shard a table in a way that nobody priced.
    if data.get("digest") != files.digest(body["modules"] if data["version"] == 1 else body):
        raise ShardCoreError(
            f"{path} does not match its digest {shown(data.get('digest'))}; it was "
            "edited after ShardCore wrote it"
        )
    schema.read(body["modules"], Mapping[str, Mapping[str, Mapping[str, Any]]], f"{path}, modules")
    return body


def to_json(plan: ShardingPlan) -> dict[str, Any]:
    """A plan as JSON, by module path and table. Raises ShardCoreError for a setting that JSON cannot hold."""
    return {
        path: {
            name: encode(sharding, f"table {name!r} of module {path!r}") for name, sharding in module.items()
        }
        for path, module in plan.plan.items()
    }


def from_json(modules: Mapping[str, Mapping[str, Any]], what: str = "the plan") -> ShardingPlan:
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    name: _sharding(value, f"{what}, table {name!r} of module {path!r}")
                    for name, value in tables.items()
                }
            )
            for path, tables in modules.items()
        }
    )


def _sharding(value: Any, what: str) -> ParameterSharding:
    """A table's sharding, with type, kernel and ranks checked. TorchRec checks them only when it builds a
    model."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.types import ParameterSharding, ShardingType

    made = decode(ParameterSharding, value, what)
    for name, kinds in (("sharding_type", ShardingType), ("compute_kernel", EmbeddingComputeKernel)):
        # Quantised kernels are for inference: none of a training plan's collections has them.
        known = [kind.value for kind in kinds if not kind.value.startswith("quant")]
        if getattr(made, name) not in known:
            raise ShardCoreError(
                f"{what}, {name} is {shown(getattr(made, name))}; TorchRec knows {', '.join(known)}"
            )
    if wrong := [rank for rank in made.ranks or () if not 0 <= rank < MOST_DEVICES]:
        raise ShardCoreError(f"{what}, ranks has {wrong[0]}; ranks are 0 to {MOST_DEVICES - 1}")
    if made.ranks is not None and made.sharding_spec is not None:
        placed = {shard.placement.rank() for shard in made.sharding_spec.shards}
        if set(made.ranks) != placed:
            raise ShardCoreError(
                f"{what} has ranks {shown(made.ranks)}; its shards are on {shown(sorted(placed))}"
            )
    if made.sharding_spec is not None:
        _require_shape(made, what)
    return made


def _require_shape(sharding: ParameterSharding, what: str) -> None:
    """Raise ShardCoreError for shards that are not as their sharding type has them."""
    kind, shards = sharding.sharding_type, sharding.sharding_spec.shards
    ranges = [{(s.shard_offsets[i], s.shard_sizes[i]) for s in shards} for i in (0, 1)]
    right = {
        "table_wise": (len(shards) == 1, "one shard"),
        "grid_shard": (len(shards) > 1, "shards on several ranks"),
        **dict.fromkeys(
            ("column_wise", "table_column_wise"), (len(ranges[0]) == 1, "all rows in each shard")
        ),
        **dict.fromkeys(("row_wise", "table_row_wise"), (len(ranges[1]) == 1, "all columns in each shard")),
    }
    holds, needed = right.get(kind, (True, ""))
    if not holds:
        raise ShardCoreError(
            f"{what} is {kind} in {len(shards)} shards of other rows or columns; it needs {needed}"
        )


def encode(value: Any, what: str) -> Any:
    """A setting of TorchRec as JSON. Raises ShardCoreError for one that JSON cannot hold."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [encode(v, what) for v in value]
    # Compared by name: TorchRec takes seconds to import.
    if type(value).__name__ == "EnumerableShardingSpec":
        return [
            {"offsets": list(s.shard_offsets), "sizes": list(s.shard_sizes), "placement": str(s.placement)}
            for s in value.shards
        ]
    if dataclasses.is_dataclass(value) and not type(value).__name__.endswith("ShardingSpec"):
        return {
            f.name: encode(v, f"{what}, {f.name}")
            for f in dataclasses.fields(value)
            if (v := getattr(value, f.name)) is not None
        }
    raise ShardCoreError(
        f"{what} is a {type(value).__name__}; a file can hold numbers, text, lists and plain settings"
    )


def decode(kind: Any, value: Any, what: str) -> Any:
    """A value of the annotated kind, strictly checked."""
    options = (
        [k for k in get_args(kind) if k is not type(None)]
        if get_origin(kind) in (Union, UnionType)
        else [kind]
    )
    # Fields are X or X | None: one kind is left.
    kind = options[0]
    if value is None:
        return None
    if get_origin(kind) in (list, tuple):
        if not isinstance(value, list):
            raise ShardCoreError(f"{what} is {shown(value)}; it needs to be a list")
        inner = [k for k in get_args(kind) if k is not Ellipsis]
        # A tuple of fixed length has a kind per entry. A list has one for all.
        kinds = inner if len(inner) == len(value) and get_origin(kind) is tuple else [inner[0]] * len(value)
        return get_origin(kind)(decode(k, v, what) for k, v in zip(kinds, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not isinstance(value, str) or value not in kind.__members__:
            raise ShardCoreError(f"{what} is {shown(value)}; known are {', '.join(kind.__members__)}")
        return kind[value]
    if getattr(kind, "__name__", "") == "ShardingSpec":
        return _spec(value, what)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ShardCoreError(f"{what} is {shown(value)}; it needs to be an object with keys")
        # TorchRec's own annotations are the schema, so new settings need no code here.
        hints, known = get_type_hints(kind), {f.name for f in dataclasses.fields(kind)}
        if unknown := sorted(set(value) - known):
            raise ShardCoreError(
                f"{what} has {shown(unknown[0])}; TorchRec's {kind.__name__} has {', '.join(sorted(known))}"
            )
        needed = [
            f.name
            for f in dataclasses.fields(kind)
            if f.init and f.default is f.default_factory is dataclasses.MISSING
        ]
        if missing := [name for name in needed if name not in value]:
            raise ShardCoreError(f"{what} lacks the key {missing[0]!r}")
        try:
            made = kind(**{k: decode(hints[k], v, f"{what}, {k}") for k, v in value.items()})
            share = getattr(made, "load_factor", None)
            if share is not None and not 0 < share <= 1:
                raise ShardCoreError(f"{what}, load_factor is {share}; it needs to be above 0, at most 1")
            return made
        except (ValueError, TypeError) as error:  # TorchRec checks its settings itself
            raise ShardCoreError(
                str(error) if isinstance(error, ShardCoreError) else f"{what}: {error}"
            ) from None
    if kind in (int, float, str, bool):
        found = schema.read(value, kind, what)
        if kind in (int, float) and found < 0:
            raise ShardCoreError(f"{what} is {found}; it needs to be 0 or more")
        return found
    if kind is Any and not isinstance(value, list | Mapping):
        return value
    raise ShardCoreError(f"{what} is {shown(value)}; a file can hold no {getattr(kind, '__name__', kind)}")


def _spec(shards: Any, what: str) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.types import EnumerableShardingSpec

    found = schema.read(shards, tuple[_ShardOfSpec, ...], what)
    try:
        return EnumerableShardingSpec(
            [ShardMetadata(list(s.offsets), list(s.sizes), s.placement) for s in found]
        )
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # PyTorch checks shards itself
        raise ShardCoreError(f"{what}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _ShardOfSpec:
    """A shard of a ShardingSpec.

    offsets: first row and column.
    sizes: rows and columns.
    placement: such as "rank:0/cpu".
    """

    offsets: tuple[int, int]
    sizes: tuple[int, int]
    placement: str

    def __post_init__(self) -> None:
        if not _PLACEMENT.fullmatch(self.placement):
            raise ShardCoreError(
                f"a shard has placement {shown(self.placement)}; it needs a rank and "
                "a device, such as rank:0/cuda:0"
            )

    @property
    def rank(self) -> int:
        return int(_PLACEMENT.fullmatch(self.placement)["rank"])
