"""A grouped plan as TorchRec's DMPCollection takes it, and files of that.

    arguments, sync_every = read_dmp_collection("grouped.json")
    model = DMPCollection(model, device, global_pg=dist.group.WORLD, sharders=sharders, **arguments)
    ...
    if step % sync_every == 0:
        model.sync()

Each process reads the file itself: DMPCollection moves the plan's ranks to the process's own group, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.core.validation import MOST_DEVICES, Record, number_within, require
from shardcore.io import schema, writing
from shardcore.io.envelope import read_record, sealed_document
from shardcore.step.sharding_groups import CONTIGUOUS, GroupedPlan, SyncEvery, devices_per_domain
from shardcore.torchrec import fields
from shardcore.torchrec.plan_files import plan_from_json, plan_to_json
from shardcore.torchrec.sharding_plan import to_torchrec

if TYPE_CHECKING:
    from torch import nn

_SCHEMA = "dmp-collection"


@dataclass(frozen=True)
class Arguments(Record, noun="arguments"):
    """Arguments of DMPCollection that follow from a grouping.

    world_size: devices.
    sharding_group_size: devices of a group.
    node_group_size: consecutive ranks of a group that count as a host or pod, for rows divided over one.
    use_inter_host_allreduce: True if groups are contiguous.
    """

    world_size: Annotated[int, number_within(1, MOST_DEVICES)]
    sharding_group_size: int
    node_group_size: int
    use_inter_host_allreduce: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        # Groups divide the job, and hosts divide groups.
        for part, whole in (
            ("sharding_group_size", "world_size"),
            ("node_group_size", "sharding_group_size"),
        ):
            n, of = getattr(self, part), getattr(self, whole)
            require(
                1 <= n <= of and of % n == 0,
                f"arguments have {part} {n}; it needs to divide {whole} {of} evenly",
            )


def to_dmp_collection(
    grouped: GroupedPlan,
    problem: Problem,
    module: nn.Module | str,
    compute_device: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Keyword arguments of TorchRec's DMPCollection for a grouped plan: the plan of one group, sizes, and `others`.

    The parameters are those of `to_torchrec`, which raises the same. problem: the whole.
    others: further arguments of DMPCollection.

    Raises ShardCoreError for one of the others that follows from the plan, or under which its price does not
    hold (see `fields.FIELDS`).
    """
    arguments = Arguments(
        world_size=len(problem.topology),
        sharding_group_size=grouped.grouping.size,
        # Hosts of a group, which are smaller than hosts of the job where groups interleave.
        node_group_size=devices_per_domain(grouped.problem, grouped.plan),
        use_inter_host_allreduce=grouped.grouping.layout == CONTIGUOUS,
    )
    # The plan is one of a group, and its ranks count from 0 in each.
    plan = to_torchrec(grouped.plan, grouped.problem, module, compute_device)
    planned = {"plan": plan, **asdict(arguments)}
    # A second value would silently replace the planned one.
    if twice := sorted({"module", *planned} & set(others)):
        raise ShardCoreError(f"DMPCollection's {twice[0]} follows from the plan; leave it out")
    # TorchRec is imported only where its arguments are checked: that takes seconds.
    if others:
        from torchrec.distributed.model_parallel import DMPCollection

        fields.unpriced_field_lines(DMPCollection, others, "DMPCollection")
    return planned | others


def write_dmp_collection(path: str | Path, arguments: Mapping[str, Any], sync_every: int) -> None:
    """Write keyword arguments of TorchRec's DMPCollection to a file, with the steps between two synchronisations."""
    # The plan is written in the form of plan files, the rest as numbers.
    numbers = {name: value for name, value in arguments.items() if name != "plan"}
    body = {
        "arguments": asdict(schema.build_record(Arguments, numbers, "arguments")),
        "sync_every": sync_every,
        "modules": plan_to_json(arguments["plan"]),
    }
    writing.write_json(path, sealed_document(_SCHEMA, body))


def read_dmp_collection(path: str | Path) -> tuple[dict[str, Any], int]:
    """Read keyword arguments of TorchRec's DMPCollection from a file, and the steps between two calls of its `sync`.

    Raises ShardCoreError for a file that is foreign, damaged or edited.
    """
    # Checks schema, version and digest before anything is parsed.
    content = read_record(_File, path, _SCHEMA)
    return {
        "plan": plan_from_json(content.modules, str(path)),
        **asdict(content.arguments),
    }, content.sync_every


@dataclass(frozen=True)
class _File(Record):
    """A file's content without schema, version and digest."""

    arguments: Arguments
    sync_every: SyncEvery
    modules: Mapping[str, Mapping[str, Mapping[str, Any]]]
