"""Files of TorchRec's ShardingPlans, without loss. TorchRec itself can neither write nor read them.

A file has the ParameterSharding of each table, by module path. That is sharding type, kernel, ranks, and each
shard's offsets, sizes and placement. Other settings (cache, SSD, bounds checks, output type) are written if
they are given.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_DEVICES, require, short_repr
from shardcore.io import schema, writing
from shardcore.io.envelope import read_record, sealed_document
from shardcore.step.kinds import kinds_of_torchrec_type

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

_PLACEMENT = re.compile(r"rank:\d{1,6}/.+")
_SCHEMA = "torchrec-plan"


@dataclasses.dataclass(frozen=True)
class _File:
    """A file's content without schema, version and digest.

    modules: settings of a ParameterSharding, by module path and table.
    qcomms: settings of a QCommsConfig.
    """

    modules: Mapping[str, Mapping[str, Mapping[str, Any]]]
    qcomms: Mapping[str, Any] | None = None


def shardings_by_module(plan: ShardingPlan) -> dict[str, EmbeddingModuleShardingPlan]:
    """Modules of a ShardingPlan by path, each with the ParameterSharding of its tables by name."""
    return plan.plan  # type: ignore[return-value]  # declared of a base class that has no tables


def write_torchrec(path: str | Path, plan: ShardingPlan, qcomms: QCommsConfig | None = None) -> None:
    """Write a TorchRec ShardingPlan to a file.

    qcomms: precision of the job's collectives. TorchRec keeps it in sharders, not in the plan.
    """
    # Optional keys are left out, so that files without them stay the same.
    body = {"modules": plan_to_json(plan)} | ({"qcomms": encode_setting(qcomms, "qcomms")} if qcomms else {})
    writing.write_json(path, sealed_document(_SCHEMA, body))


def read_torchrec(path: str | Path, module: nn.Module | None = None) -> ShardingPlan:
    """Read a TorchRec ShardingPlan for DistributedModelParallel from a file.

    module: the model that it is for. Without it TorchRec trains on where the plan names other modules: their
      tables are then not sharded at all.

    Raises ShardCoreError for a file that is foreign, damaged or edited, and for a plan of another model.
    """
    plan = plan_from_json(_read_plan_file(path).modules, str(path))
    if module is not None:
        require_same_tables(plan, module, str(path))
    return plan


def require_same_tables(plan: ShardingPlan, module: nn.Module, what: str) -> None:
    """Raise ShardCoreError unless a ShardingPlan and a model have the same tables in the same modules.

    what: the plan, for messages.
    """
    from shardcore.torchrec.modules import tables_of_model

    # Modules by path, as the plan names them.
    tables: dict[str, set[str]] = {}
    for table in (t for t in tables_of_model(module).values() if not t.replica):
        tables.setdefault(table.path, set()).add(table.name)
    planned = {path: set(shardings) for path, shardings in shardings_by_module(plan).items()}
    # Both directions: tables that only one of the two has would train unsharded.
    for path in sorted({*planned, *tables}):
        require(
            path in tables,
            f"{what} shards module {path!r}, which is no collection of the model; those are "
            f"{sorted(tables)[:5]}: export with --module",
        )
        if differing := sorted(tables[path] ^ planned.get(path, set())):
            raise ShardCoreError(f"{what} and the model differ in tables {differing[:5]} of module {path!r}")


def read_qcomms(path: str | Path) -> QCommsConfig | None:
    """Read the QCommsConfig in a plan's file, for get_qcomm_codecs_registry; None if there is none.

    Raises as `read_torchrec`.
    """
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig

    return decode_setting(QCommsConfig, _read_plan_file(path).qcomms, f"{path}, qcomms")


def _read_plan_file(path: str | Path) -> _File:
    # Without the digest an edited plan could shard a table in a way that nobody priced.
    return read_record(_File, path, _SCHEMA)


def plan_to_json(plan: ShardingPlan) -> dict[str, Any]:
    """ShardingPlan as JSON, by module path and table. Raises ShardCoreError for a setting that JSON cannot hold."""
    return {
        path: {
            name: encode_setting(sharding, f"table {name!r} of module {path!r}")
            for name, sharding in module.items()
        }
        for path, module in shardings_by_module(plan).items()
    }


def plan_from_json(modules: Mapping[str, Mapping[str, Any]], what: str = "the plan") -> ShardingPlan:
    """ShardingPlan from JSON, by module path and table, strictly checked. what: the source, for messages."""
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    plan = ShardingPlan({path: EmbeddingModuleShardingPlan() for path in modules})
    for path, tables in modules.items():
        for name, value in tables.items():
            sharding = _decode_sharding(value, f"{what}, table {name!r} of module {path!r}")
            shardings_by_module(plan)[path][name] = sharding
    return plan


def _decode_sharding(value: Any, what: str) -> ParameterSharding:
    """Decode and check one table's ParameterSharding. TorchRec checks it only when it builds a model."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.types import ParameterSharding, ShardingType

    sharding = decode_setting(ParameterSharding, value, what)
    for name, kinds in (("sharding_type", ShardingType), ("compute_kernel", EmbeddingComputeKernel)):
        # Quantised kernels are for inference: no collection of a training plan has them.
        known = [kind.value for kind in kinds if not kind.value.startswith("quant")]
        require(
            getattr(sharding, name) in known,
            f"{what}, {name} is {short_repr(getattr(sharding, name))}; TorchRec knows {', '.join(known)}",
        )
    # TorchRec uses ranks and shards in different places, so they have to agree.
    ranks, spec = sharding.ranks, sharding.sharding_spec
    if wrong := [rank for rank in ranks or () if not 0 <= rank < MOST_DEVICES]:
        raise ShardCoreError(f"{what}, ranks has {wrong[0]}; ranks are 0 to {MOST_DEVICES - 1}")
    if spec is None:
        return sharding
    # A model would take ranks from one and shards from the other.
    if ranks is not None and set(ranks) != (placed := {shard.placement.rank() for shard in spec.shards}):
        raise ShardCoreError(
            f"{what} has ranks {short_repr(ranks)}; its shards are on {short_repr(sorted(placed))}"
        )
    _require_shard_ranges(sharding.sharding_type, spec.shards, what)
    return sharding


def _require_shard_ranges(kind: str, shards: Sequence[ShardMetadata], what: str) -> None:
    """Raise ShardCoreError for shards whose rows and columns their sharding type cannot have."""
    rows, columns = ({(s.shard_offsets[i], s.shard_sizes[i]) for s in shards} for i in (0, 1))
    sharding_kind = next(iter(kinds_of_torchrec_type(kind)), None)
    if sharding_kind is None or sharding_kind.dense_gradient:
        return
    holds, needed = {
        (True, True): (len(shards) > 1, "shards on several ranks"),
        (True, False): (len(columns) == 1, "all columns in each shard"),
        (False, True): (len(rows) == 1, "all rows in each shard"),
        (False, False): (len(shards) == 1, "one shard"),
    }[sharding_kind.divides_rows, kind != sharding_kind.torchrec_type(cut=False)]
    require(
        holds,
        f"{what} is {kind} in {len(shards)} shards of other rows or columns; it needs {needed}",
    )


def encode_setting(value: Any, what: str) -> Any:
    """Encode a TorchRec setting as JSON. Raises ShardCoreError for a setting that JSON cannot hold."""
    # Members of enums that are also texts are written by name, like others.
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [encode_setting(v, what) for v in value]
    # Compared by name: TorchRec takes seconds to import.
    if type(value).__name__ == "EnumerableShardingSpec":
        return [
            {"offsets": list(s.shard_offsets), "sizes": list(s.shard_sizes), "placement": str(s.placement)}
            for s in value.shards
        ]
    # Records of plain fields. None is the default of all optional ones, and left out.
    if dataclasses.is_dataclass(value) and not type(value).__name__.endswith("ShardingSpec"):
        return {
            f.name: encode_setting(v, f"{what}, {f.name}")
            for f in dataclasses.fields(value)
            if (v := getattr(value, f.name)) is not None
        }
    raise ShardCoreError(
        f"{what} is a {type(value).__name__}; a file can hold numbers, text, lists and plain settings"
    )


def decode_setting(kind: Any, value: Any, what: str) -> Any:
    """Decode a JSON value to an annotated type, strictly checked."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):  # fields are X or X | None
        kind = next(k for k in get_args(kind) if k is not NoneType)
    origin, inner = get_origin(kind), [k for k in get_args(kind) if k is not Ellipsis]
    if origin in (list, tuple):
        require(isinstance(value, list), f"{what} is {short_repr(value)}; it needs to be a list")
        # A tuple of fixed length has a kind per entry. A list has one for all.
        kinds = inner if len(inner) == len(value) and origin is tuple else [inner[0]] * len(value)
        return origin(decode_setting(k, v, what) for k, v in zip(kinds, value, strict=True))
    if getattr(kind, "__name__", "") == "ShardingSpec":
        return _decode_sharding_spec(value, what)
    # Files name members of enums (see `encode_setting`).
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        require(
            isinstance(value, str) and value in kind.__members__,
            f"{what} is {short_repr(value)}; known are {', '.join(kind.__members__)}",
        )
        return kind[value]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, what)
    if kind in (int, float, str, bool):
        plain = schema.convert_value(value, kind, what)
        require(
            kind not in (int, float) or plain >= 0,
            f"{what} is {value}; it needs to be 0 or more",
        )
        return plain
    if kind is Any and not isinstance(value, list | Mapping):
        return value
    raise ShardCoreError(
        f"{what} is {short_repr(value)}; a file can hold no {getattr(kind, '__name__', kind)}"
    )


def _decode_record(kind: type, value: Any, what: str) -> Any:
    """Decode a TorchRec record. Its annotations are the schema, so new settings need no code here."""
    hints = get_type_hints(kind)
    given = {name: v for name, v in value.items() if name in hints} if isinstance(value, Mapping) else {}
    decoded = {name: decode_setting(hints[name], v, f"{what}, {name}") for name, v in given.items()}
    share = decoded.get("load_factor")
    if share is not None and not 0 < share <= 1:
        raise ShardCoreError(f"{what}, load_factor is {share:g}; it needs to be above 0, at most 1")
    rest = {name: v for name, v in value.items() if name not in hints} if given else value
    try:
        return schema.build_record(kind, rest, what, sorted(hints), **decoded)
    except ShardCoreError:
        raise
    except (ValueError, TypeError) as error:  # TorchRec checks its settings itself
        raise ShardCoreError(f"{what}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _ShardOfSpec:
    """JSON form of one shard of a torch ShardingSpec.

    offsets: first row and column.
    sizes: rows and columns.
    placement: rank and device, such as "rank:0/cpu".
    """

    offsets: tuple[int, int]
    sizes: tuple[int, int]
    placement: str

    def __post_init__(self) -> None:
        require(
            _PLACEMENT.fullmatch(self.placement) is not None,
            f"a shard has placement {short_repr(self.placement)}; it needs a rank and a device, "
            "such as rank:0/cuda:0",
        )


def _decode_sharding_spec(shards: Any, what: str) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    schema.require_unique(shards, ("offsets",), f"{what} has several shards of the same cells")
    parsed = schema.convert_value(shards, tuple[_ShardOfSpec, ...], what)
    try:
        return EnumerableShardingSpec(
            [ShardMetadata(list(s.offsets), list(s.sizes), s.placement) for s in parsed]
        )
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # PyTorch checks shards itself
        raise ShardCoreError(f"{what}: {error}") from None
