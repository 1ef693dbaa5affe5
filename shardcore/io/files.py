"""Problems, pools of tables, plans and settings on disk.

Each file carries `schema` and `version`. An unknown key, a missing one, a wrong type, a file cut short or
(where a program wrote it) edited by hand is refused by name. A plan is only parsed: its user lowers or
validates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Overfull, ShardCoreError, message_with_name
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology, default_reserved_bytes
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.core.validation import (
    MOST_DEVICES,
    Rule,
    entry_count_within,
    require,
    require_type,
    short_repr,
)
from shardcore.io.envelope import is_document, json_digest, read_document, read_record, sealed_document
from shardcore.io.schema import (
    MOST_VALUES,
    Readable,
    build_record,
    convert_value,
    is_whole_number,
    map_collecting_errors,
    prefix_errors,
    require_unique,
)
from shardcore.io.writing import write_json
from shardcore.step.kinds import SHARDING_KINDS, sharding_kind_by_name
from shardcore.step.lower import require_valid_plan
from shardcore.step.sharding_groups import GroupedPlan, Grouping, problem_of_group

DIGEST = re.compile(r"[0-9a-f]{16}")
"""Form of a `digest`. ShardCore writes no other names of versions."""
require_digest = Rule(lambda text: DIGEST.fullmatch(text) is not None, "it needs 16 hex digits")


# --- tables, problems ---------------------------------------------------------------------------------------


def _non_default_fields(
    record: Any, always: Collection[str] = (), never: Collection[str] = ()
) -> dict[str, Any]:
    """JSON of the fields of a record that differ from their defaults.

    Files written before a field was added thus keep the digest that their plans know.

    always: fields that are written in any case. never: fields that are left out.
    """
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in never}
    defaults = {f.name: f.default for f in dataclasses.fields(record)}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(type(value)) else value
        for name, value in values.items()
        if value != defaults[name] or name in always
    }


def table_to_json(table: Table) -> dict[str, Any]:
    """JSON object of an embedding table."""
    if isinstance(table.access, Reuse):
        access = {"reuse": {"bins": list(table.access.bins), "batch": table.access.batch}}
    else:
        access = {"zipf_alpha": table.access.alpha}
    required = {name: getattr(table, name) for name in ("name", "rows", "dim", "pooling")}
    return {**required, **access, **_non_default_fields(table, never=(*required, "access"))}


def table_from_json(data: Any, what: str) -> Table:
    """Embedding table of a JSON object. Raises ShardCoreError naming the table and what is wrong."""
    if not isinstance(data, Mapping):
        raise ShardCoreError(
            f"{what} is {short_repr(data)}; it needs to be a table: name, rows, dim, pooling and access statistics"
        )
    what = f"{what}, table {short_repr(data.get('name'))}"
    require(
        "reuse" not in data or "zipf_alpha" not in data,
        f"{what} has both reuse and zipf_alpha; it needs one of them",
    )
    given: dict[str, Any] = {}
    if "reuse" in data:
        given["access"] = partial(build_record, Reuse, data["reuse"], f"{what}: reuse")
    elif "zipf_alpha" in data:
        given["access"] = partial(build_record, Zipf, {"alpha": data["zipf_alpha"]}, what)
    elif "access" in data:
        raise ShardCoreError(f"{what} has a key 'access'; it needs 'reuse' or 'zipf_alpha'")
    return build_record(
        Table,
        {k: v for k, v in data.items() if k not in ("reuse", "zipf_alpha")},
        what,
        extra_keys=("reuse", "zipf_alpha"),
        **given,
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """JSON document of a problem."""
    topology, constraints = problem.topology, problem.constraints
    job = _non_default_fields(problem.job)
    return sealed_document(
        "problem",
        {
            "name": problem.name,
            "global_batch": problem.global_batch,
            "optimizer": problem.optimizer,
            "topology": {
                # Runs of equal devices are one entry with a count.
                "devices": [
                    {"count": len(list(run)), **dataclasses.asdict(device)}
                    for device, run in itertools.groupby(topology.devices)
                ],
                "hardware": topology.hardware,
                **{name: given for name in ("rows_over", "network") if (given := getattr(topology, name))},
                **({"links": [_non_default_fields(x) for x in topology.links]} if topology.links else {}),
                **({"memory": [_non_default_fields(x) for x in topology.memory]} if topology.memory else {}),
            },
            "constraints": {
                **_non_default_fields(constraints, always=("reserved_bytes", "unsplit")),
                **{
                    name: dict(getattr(constraints, name)) for name in _BY_TABLE if getattr(constraints, name)
                },
            },
            **({"job": job} if job else {}),
            "tables": [table_to_json(t) for t in problem.tables],
        },
    )


_BY_TABLE = {
    "pinned": 'their devices or hosts, such as {"t0": [0, 1], "t1": ["host-1"]}',
    "kinds": 'the kinds that may run them, such as {"t0": ["row", "column"]}',
    "min_widths": 'the fewest columns of a shard, such as {"t0": 64}',
}
"""Constraints that files give as objects by table, with the form of their values for messages."""


def _constraints_from_json(data: Any, what: str) -> Constraints:
    """Constraints of the JSON object in a problem's file."""
    if not isinstance(data, Mapping):
        return build_record(Constraints, data, what)
    pairs = {name: data[name] for name in _BY_TABLE if name in data}
    for name, by_table in pairs.items():
        require(
            isinstance(by_table, Mapping),
            f"{what}: {name} is {short_repr(by_table)}; it needs to be an object of tables and {_BY_TABLE[name]}",
        )

    def require_known_kind(entry: tuple[str, Any]) -> None:
        table, kind = entry
        require(
            not isinstance(kind, str) or kind in SHARDING_KINDS,
            f"{what}: kinds of table {short_repr(table)} has {short_repr(kind)}; known are {', '.join(SHARDING_KINDS)}",
        )

    map_collecting_errors(
        require_known_kind,
        [
            (table, kind)
            for table, kinds in pairs.get("kinds", {}).items()
            if isinstance(kinds, list)
            for kind in kinds
        ],
    )
    given = {name: tuple(by_table.items()) for name, by_table in pairs.items()}
    return build_record(
        Constraints, {k: v for k, v in data.items() if k not in pairs}, what, extra_keys=_BY_TABLE, **given
    )


def read_problem(path: str | Path | Readable) -> Problem:
    """Read a problem's file. Raises ShardCoreError naming the file and what is wrong."""
    data, what = read_document(path, "problem"), str(path)
    topology, tables = data.pop("topology", None), data.pop("tables", None)
    constraints, job = data.pop("constraints", {}), data.pop("job", {})
    devices: list[Device] = []

    def add_devices(entry: Any) -> None:
        entry = dict(entry) if isinstance(entry, Mapping) else entry
        count = entry.pop("count", 1) if isinstance(entry, dict) else 1
        if not (is_whole_number(count) and 1 <= count <= MOST_DEVICES - len(devices)):
            raise ShardCoreError(
                f"{what}: a device entry has count {short_repr(count)}; it needs a whole number "
                f"from 1, and a problem has {MOST_DEVICES} devices at most"
            )
        devices.extend([build_record(Device, entry, f"{what}: device", extra_keys=("count",))] * count)

    def build_topology() -> Topology:
        if not isinstance(topology, Mapping) or not isinstance(topology.get("devices"), list):
            raise ShardCoreError(
                f"{what} {_describe_key('topology', topology)}; it needs a list of 'devices', such as "
                '{"devices": [{"count": 8, "memory_bytes": 80000000000}]}'
            )
        map_collecting_errors(add_devices, topology["devices"])
        return build_record(
            Topology,
            {k: v for k, v in topology.items() if k != "devices"},
            f"{what}: topology",
            extra_keys=("devices",),
            devices=tuple(devices),
        )

    # Called after `topology_of_file`, which makes the devices.
    def build_constraints() -> Constraints:
        if isinstance(constraints, dict):
            # ShardCore always writes it. A file written by hand may lack it, but the dense part needs some
            # memory, unless the job says how much.
            measured = isinstance(job, Mapping) and job.get("dense_bytes")
            constraints.setdefault(
                "reserved_bytes", 0 if measured or not devices else default_reserved_bytes(devices)
            )
        return _constraints_from_json(constraints, f"{what}: constraints")

    def build_tables() -> tuple[Table, ...]:
        require(
            isinstance(tables, list), f"{what} {_describe_key('tables', tables)}; it needs a list of them"
        )
        require_unique(tables, ("name",), f"{what} has several tables of a name")
        return tuple(map_collecting_errors(lambda table: table_from_json(table, what), tables))

    return build_record(
        Problem,
        data,
        what,
        extra_keys=("schema", "version", "topology", "tables", "constraints", "job"),
        topology=build_topology,
        tables=build_tables,
        constraints=build_constraints,
        job=lambda: build_record(Job, job, f"{what}: job"),
    )


def _describe_key(key: str, value: Any) -> str:
    """Describe a wrong or missing key of a JSON object, for error messages."""
    return f"lacks {key!r}" if value is None else f"has {key} {short_repr(value)}"


def write_problem(path: str | Path, problem: Problem) -> None:
    """Write a problem's file."""
    require_type(problem, Problem, "problem", "a Problem")
    write_json(path, problem_to_json(problem))


def write_pool(path: str | Path, tables: Iterable[Table]) -> None:
    """Write a pool of tables to a file."""
    write_json(path, sealed_document("pool", {"tables": [table_to_json(t) for t in tables]}))


def read_pool(path: str | Path) -> tuple[Table, ...]:
    """Read a pool of tables from a file."""
    pool = read_record(_Pool, path, "pool")
    require_unique(pool.tables, ("name",), f"{path} has several tables of a name")
    return tuple(map_collecting_errors(lambda table: table_from_json(table, str(path)), pool.tables))


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Content of a file with a pool of tables."""

    tables: tuple[Any, ...]


# --- parts of a problem ----------------------------------------------------------------------------------------
# Their digests are kept with plans. When a plan is for another problem, they show what differs.

_PART_DIGITS = 8
"""Hex digits of a part's digest. Few are enough, as the digest of the whole problem detects differences."""


def problem_part_digests(problem: Problem) -> dict[str, str]:
    """Digest of each part of a problem: its own fields, and those of its topology, devices and tables."""
    topology, by_name = problem.topology, sorted(problem.tables, key=lambda t: t.name)
    fields_of_table = [f.name for f in dataclasses.fields(Table) if f.name != "name"]
    values = {
        **{name: getattr(problem, name) for name in ("global_batch", "optimizer", "constraints")},
        **{f"job.{name}": value for name, value in dataclasses.asdict(problem.job).items()},
        **{
            f"topology.{f.name}": getattr(topology, f.name)
            for f in dataclasses.fields(topology)
            if f.name != "devices"
        },
        "number of devices": len(topology),
        **{
            f"{name} of devices": [getattr(d, name) for d in topology.devices]
            for name in ("memory_bytes", "speed", "host")
        },
        "name of tables": [t.name for t in by_name],
        "order of tables": [t.name for t in problem.tables],
        **{f"{name} of tables": [getattr(t, name) for t in by_name] for name in fields_of_table},
    }
    texts = {
        name: json.dumps(value, default=dataclasses.asdict, sort_keys=True) for name, value in values.items()
    }
    return {name: hashlib.sha256(text.encode()).hexdigest()[:_PART_DIGITS] for name, text in texts.items()}


def describe_changed_parts(kept: Mapping[str, str], problem: Problem) -> str:
    """Names of the parts in which a problem differs from an earlier version, for the end of a message; "" if none
    differs.

    kept: digests of a problem's parts, from `problem_part_digests`.
    """
    names = [
        name for name, digest in problem_part_digests(problem).items() if kept.get(name, digest) != digest
    ]
    # If names or the number of devices differ, so do all lists in their order.
    for first, rest in (("name of tables", " of tables"), ("number of devices", " of devices")):
        if first in names:
            names = [name for name in names if name == first or not name.endswith(rest)]
    return f"; they differ in {', '.join(names[:5])}{', ...' * (len(names) > 5)}" if names else ""


# --- plans --------------------------------------------------------------------------------------------------


def problem_digest(problem: Problem) -> str:
    """Digest of a problem's JSON."""
    require_type(problem, Problem, "problem", "a Problem")
    return json_digest(problem_to_json(problem))


def plan_to_json(plan: Plan, problem: Problem) -> dict[str, Any]:
    """JSON document of a plan, with the digests of its problem."""
    require_type(plan, Plan, "plan", "a Plan, as a sharder gives")
    require_type(problem, Problem, "problem", "a Problem")
    return sealed_document(
        "plan",
        {
            "problem": problem.name,
            "problem_digest": problem_digest(problem),
            "problem_parts": problem_part_digests(problem),
            "provenance": dict(plan.provenance),
            "placements": [
                {
                    "table": p.shard.table.name,
                    "kind": p.kind,
                    "columns": [p.shard.col_lo, p.shard.col_hi],
                    "devices": list(p.devices),
                }
                for p in plan.placements
            ],
        },
    )


def write_plan(path: str | Path, plan: Plan, problem: Problem) -> None:
    """Write a plan's file, with the digests of its problem."""
    write_json(path, plan_to_json(plan, problem))


def read_plan(path: str | Path | Readable, problem: Problem) -> Plan:
    """Read the file of a plan for `problem`, without validating its placements.

    The caller lowers the plan, or validates it by `require_plan`.

    Raises ShardCoreError if it was made for another problem, or was edited.
    """
    return plan_from_json(read_document(path, "plan"), problem, str(path))


def read_valid_plan(path: str | Path | Readable, problem: Problem, fits: bool = True) -> Plan:
    """Read the file of a plan for `problem`, and validate its placements.

    fits: False for a plan that may take more memory than there is.

    Raises ShardCoreError as `read_plan` and `require_valid_plan` do.
    """
    plan = read_plan(path, problem)
    with name_file_in_errors(path):
        require_valid_plan(plan, problem, fits)
    return plan


@contextlib.contextmanager
def name_file_in_errors(path: str | Path | Readable) -> Iterator[None]:
    """Context manager: add the path of a plan's file to errors of the plan's validation."""
    try:
        yield
    except Overfull as error:
        raise Overfull(
            f"{path}: {error}. ShardCore may have counted less when the plan was made; "
            "python -m shardcore plan --start PLAN.json searches one that fits, from it"
        ) from None
    except ShardCoreError as error:
        raise type(error)(message_with_name(path, error)) from None


@dataclasses.dataclass(frozen=True)
class _Placement:
    """A placement in a plan's file: columns [low, high) of all rows of a table."""

    table: str
    kind: str
    columns: tuple[int, int]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForProblem:
    """Content of a file that was written for a problem, with the problem's digests."""

    problem: str
    problem_digest: str
    problem_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan(ForProblem):
    """JSON content of a plan's file."""

    provenance: Mapping[str, Any]
    placements: Annotated[tuple[_Placement, ...], entry_count_within(1, MOST_VALUES)]


_PROVENANCE = {
    "algorithm": str,
    "setting": str,
    "space": str,
    "predicted_ms": float | None,
    "within": float | None,
    "model": str,
    "model_version": str,
    "tower_ratio": float,
    "extrapolated": tuple[str, ...],
    "datasets": Mapping[str, str],
    "lent": Mapping[str, Mapping[str, Any]],
    "torchrec": Mapping[str, Mapping[str, Any]],
}
"""Types of the entries of provenance that code reads. Others are for people."""


def require_provenance(data: Mapping[str, Any], what: str) -> None:
    """Raise ShardCoreError naming an entry of a plan's or model's provenance that has a wrong type."""
    map_collecting_errors(
        lambda x: convert_value(data[x], _PROVENANCE[x], f"{what}: {x}"), sorted(set(data) & set(_PROVENANCE))
    )


def plan_from_json(data: Any, problem: Problem, what: str) -> Plan:
    """Plan of a JSON document, not yet checked against the problem's tables and devices."""
    require_unique(data.get("placements"), ("table", "columns"), f"{what}: plan places cells twice")
    read_plan = build_record(_Plan, data, what)
    require_same_problem(read_plan, problem, f"{what} is a plan")
    require_provenance(read_plan.provenance, f"{what}: provenance")
    tables = {t.name: t for t in problem.tables}

    def build_placement(p: _Placement) -> Placement:
        if p.table not in tables:
            raise ShardCoreError(
                f"{what} places table {short_repr(p.table)}, which problem {problem.name!r} does not have"
            )
        table = tables[p.table]
        with prefix_errors(what):
            return Placement(
                sharding_kind_by_name(p.kind).name, Shard(table, 0, table.rows, *p.columns), p.devices
            )

    return Plan(tuple(map_collecting_errors(build_placement, read_plan.placements)), read_plan.provenance)


def require_same_problem(written: ForProblem, problem: Problem, what: str) -> None:
    """Raise ShardCoreError unless a file (such as a plan's) was written for this problem.

    what: such as "x.json is a plan".
    """
    if written.problem_digest != (own := problem_digest(problem)):
        raise ShardCoreError(
            f"{what} for problem {short_repr(written.problem)} with digest {short_repr(written.problem_digest)}; "
            f"problem {problem.name!r} here has {own}{describe_changed_parts(written.problem_parts, problem)}"
        )


# --- grouped plans ------------------------------------------------------------------------------------------
# The plan of one sharding group, and the division of devices into groups. Their schema is separate, so that no reader
# of plans takes one for a plan of all devices. A file has the digest of the whole problem, and that of a group's
# problem, which follows from it.

_GROUPED = "grouped-plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupedPlan(ForProblem):
    """JSON content of a grouped plan's file."""

    groups: Mapping[str, Any]
    plan: Mapping[str, Any]


def is_grouped_plan(path: str | Path) -> bool:
    """Tell if a file has the schema of a grouped plan (one plan for each sharding group)."""
    return is_document(path, _GROUPED)


def write_grouped_plan(path: str | Path, grouped: GroupedPlan, problem: Problem) -> None:
    """Write a grouped plan's file.

    problem: the whole problem, of all devices.
    """
    of_group = plan_to_json(grouped.plan, grouped.problem)
    write_json(
        path,
        sealed_document(
            _GROUPED,
            {
                "problem": problem.name,
                "problem_digest": problem_digest(problem),
                "problem_parts": problem_part_digests(problem),
                "groups": dataclasses.asdict(grouped.grouping),
                "plan": {k: v for k, v in of_group.items() if k not in ("schema", "version", "digest")},
            },
        ),
    )


def read_grouped_plan(path: str | Path, problem: Problem) -> GroupedPlan:
    """Read the grouped plan of a whole problem from a file.

    Raises ShardCoreError if it was made for another one, was edited, or would be refused by `lower`.
    """
    written = read_record(_GroupedPlan, path, _GROUPED)
    require_same_problem(written, problem, f"{path} is a grouped plan")
    grouping = build_record(Grouping, written.groups, f"{path}: groups")
    with prefix_errors(path):
        of_group = problem_of_group(problem, grouping)
        plan = plan_from_json(dict(written.plan), of_group, "its plan")
        require_valid_plan(plan, of_group)
    return GroupedPlan(grouping, plan, of_group)


# --- settings -----------------------------------------------------------------------------------------------


def setting_to_json(setting: Setting) -> dict[str, Any]:
    """JSON object of a setting."""
    return _non_default_fields(setting, always=("precision", "optimizer"))
