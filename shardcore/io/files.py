"""Problems, pools of tables, plans and settings on disk. (Models: model_files.py. Measurements: samples/.)

Each file carries `schema` and `version`. It is read through schema.py, then checked against the rules of what
it holds: an unknown key, a missing one, a wrong type, a file cut short or (where a program wrote it) edited
by hand is refused by name. A plan is parsed only: whoever uses it lowers or validates it. Writing goes to a
temporary name and renames.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Overfull, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.tiers import BELOW
from shardcore.core.topology import Device, Topology, default_reserve
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.core.validation import MOST_DEVICES, require, require_type, shown
from shardcore.io import problem_parts
from shardcore.io.envelope import digest, document, open_document, seal, unseal
from shardcore.io.schema import Readable, build, read
from shardcore.step.kinds import LAYOUTS, layout_of

DIGEST = re.compile(r"[0-9a-f]{16}")
"""What `digest` makes. A name of a file or folder that is none was not written by ShardCore."""
UNFINISHED = re.compile(r"\..+\.\d+\.tmp")
"""Names of what `write_atomic` has not renamed yet."""

_MOST_LINKS = 40
"""That are followed, as the kernel does."""


# --- reading and writing ------------------------------------------------------------------------------------


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file whole or not at all, creating its folder; raises ShardCoreError naming it where that
    cannot be done. A device or pipe (/dev/null, /dev/stdout) is written to: to rename a file over it would
    take it from everybody. Temporary files that killed writers of the same file left are removed."""
    require_type(path, (str, Path), "path", "a path of a file")
    require("\0" not in str(path) and str(path) != "", f"cannot write {shown(str(path))}: no name of a file")
    path = Path(path)
    temporary = _temporary(path.parent, path.name)
    try:
        if _is_written_through(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            for name in os.listdir(path.parent):
                if name.startswith(f".{path.name}.") and UNFINISHED.fullmatch(name):
                    remove_unfinished(path.parent / name)
        # of another process that had this number; or a link, which leads anywhere
        temporary.unlink(missing_ok=True)
        with _held(temporary) as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell of
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ShardCoreError(f"cannot write {path}: {error.strerror}") from None
        raise


def _held(temporary: Path) -> BinaryIO:
    """A new file, locked as long as it is open: its writer lives."""
    import fcntl

    while True:
        f = open(temporary, "xb")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(f, fcntl.LOCK_EX)
        if os.fstat(f.fileno()).st_nlink:
            return f
        f.close()  # another writer removed it before it was locked


def remove_unfinished(path: Path) -> None:
    """Remove a temporary file whose writer was killed: nobody holds its lock."""
    import fcntl

    with contextlib.suppress(OSError), open(path, "rb", opener=_no_link) as f:
        if stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def require_writable(path: str | Path, what: str, folder: bool = False) -> None:
    """Raise ShardCoreError if a file, or files in a folder, could not be written there.

    what: its name, for messages. It tries, for permissions do not tell all. What is not there yet stays so.
    """
    path = Path(path)
    try:
        if path.exists() and path.is_dir() != folder:
            kinds = ("file", "folder") if folder else ("folder", "file")
            raise ShardCoreError("{} {} is a {}; it needs to be a {}".format(what, path, *kinds))
        if _is_written_through(path):
            return
        at = path if folder else path.parent
        while not os.path.lexists(at):
            at = at.parent
        temporary = _temporary(at, path.name)
        temporary.unlink(missing_ok=True)
        open(temporary, "xb").close()
        temporary.unlink()
    except OSError as error:
        raise ShardCoreError(f"{what} {path} cannot be written: {error.strerror}") from None


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}.tmp"


def _is_written_through(path: Path) -> bool:
    """Tell if a path is a device or pipe, or leads to an open file of a process."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _is_open_file(path))


def _is_open_file(path: Path) -> bool:
    """Whether a link leads to what a process has open, as /dev/stdout does, also where that is a file."""
    for _ in range(_MOST_LINKS):
        if path.parent.resolve().match("/proc/*/fd"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def write_json(path: str | Path, value: Any) -> None:
    write_atomic(path, json_bytes(value))


_dumps = json.JSONEncoder(allow_nan=False).encode
"""On one line, by C code: with `indent`, json is pure Python."""


def json_bytes(value: Any) -> bytes:
    """JSON that people read and compare: a line for each key, and for each record in a list (a placement, a
    table)."""
    return (_lines(value, "\n") + "\n").encode()


def _lines(value: Any, end: str) -> str:
    inner = end + " "
    if isinstance(value, Mapping) and value:
        return (
            "{"
            + ",".join(f"{inner}{_dumps(str(k))}: {_lines(v, inner)}" for k, v in value.items())
            + end
            + "}"
        )
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple) for entry in value):
        return "[" + ",".join(inner + _dumps(entry) for entry in value) + end + "]"
    return _dumps(value)


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row; the columns are those of the first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())


# --- tables, problems ---------------------------------------------------------------------------------------


def table_to_json(table: Table) -> dict[str, Any]:
    access = (
        {"reuse": {"bins": list(table.access.bins), "batch": table.access.batch}}
        if isinstance(table.access, Reuse)
        else {"zipf_alpha": table.access.alpha}
    )
    optional = {
        k: v
        for k, v, default in (
            ("precision", table.precision, "fp32"),
            ("ordered", table.ordered, False),
            ("features", table.features, 1),
            ("weighted", table.weighted, False),
            ("sequence", table.sequence, False),
            ("dedup", table.dedup, 1.0),
            ("collection", table.collection, ""),
            ("load_factor", table.load_factor, 1.0),
            ("tier", table.tier, BELOW[0]),
            ("row_shares", table.row_shares, None),
            ("managed_collision", table.managed_collision, None),
        )
        if v != default
    }
    optional |= {k: dataclasses.asdict(v) for k, v in optional.items() if dataclasses.is_dataclass(v)}
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "pooling": table.pooling,
        **access,
        **optional,
    }


def table_from_json(data: Any, what: str) -> Table:
    if not isinstance(data, Mapping):
        raise ShardCoreError(
            f"{what} is {shown(data)}; it needs to be a table: name, rows, dim, pooling and access statistics"
        )
    what = f"{what}, table {shown(data.get('name'))}"
    rest = {k: v for k, v in data.items() if k not in ("reuse", "zipf_alpha")}
    if "reuse" in data and "zipf_alpha" in data:
        raise ShardCoreError(f"{what} has both reuse and zipf_alpha; it needs one of them")
    given: dict[str, Any] = {}
    if "reuse" in data:
        given["access"] = build(Reuse, data["reuse"], f"{what}: reuse")
    elif "zipf_alpha" in data:
        given["access"] = build(Zipf, {"alpha": data["zipf_alpha"]}, what)
    elif "access" in data:
        raise ShardCoreError(f"{what} has a key 'access'; it needs 'reuse' or 'zipf_alpha'")
    return build(Table, rest, what, also=("reuse", "zipf_alpha"), **given)


def problem_to_json(problem: Problem) -> dict[str, Any]:
    topology = dataclasses.asdict(problem.topology)
    topology["devices"] = [dataclasses.asdict(d) for d in problem.topology.devices]
    topology["links"] = [
        {k: v for k, v in link.items() if v is not None and v is not False} for link in topology["links"]
    ]
    for name in ("links", "memory"):
        if not topology[name]:  # only where given: older problems keep their digest
            del topology[name]
    return document(
        "problem",
        {
            "name": problem.name,
            "global_batch": problem.global_batch,
            "optimizer": problem.optimizer,
            "topology": {**topology, "devices": _counted(topology["devices"])},
            "constraints": _constraints_to_json(problem.constraints),
            **_job_to_json(problem.job),
            "tables": [table_to_json(t) for t in problem.tables],
        },
    )


def _job_to_json(job: Job) -> dict[str, Any]:
    """Only what differs from the defaults, so that older problems keep the digest that their plans know."""
    given = {k: v for k, v in dataclasses.asdict(job).items() if v != getattr(Job(), k)}
    return {"job": given} if given else {}


_OPTIONAL = ("pinned", "together", "kinds", "min_widths")
"""Constraints that only some problems have."""


def _constraints_to_json(constraints: Constraints) -> dict[str, Any]:
    """Pins and groups only where there are any, so that problems without them keep the digest that their
    plans know."""
    optional = {
        "pinned": {name: list(where) for name, where in constraints.pinned},
        "together": [list(group) for group in constraints.together],
        "kinds": {name: list(kinds) for name, kinds in constraints.kinds},
        "min_widths": dict(constraints.min_widths),
    }
    return {
        "reserved_bytes": constraints.reserved_bytes,
        "unsplit": list(constraints.unsplit),
        **{k: v for k, v in optional.items() if v},
    }


def _constraints_from_json(data: Any, what: str) -> Constraints:
    given: dict[str, Any] = {}
    if isinstance(data, Mapping):
        given = {k: data[k] for k in _OPTIONAL if k in data}
        data = {k: v for k, v in data.items() if k not in given}
    pinned, together, kinds = given.get("pinned", {}), given.get("together", []), given.get("kinds", {})
    min_widths = given.get("min_widths", {})
    if not isinstance(pinned, Mapping):
        raise ShardCoreError(
            f"{what}: pinned is {shown(pinned)}; it needs to be an object of tables and "
            "their devices or hosts, "
            'such as {"t0": [0, 1], "t1": ["host-1"]}'
        )
    if not isinstance(together, list):
        raise ShardCoreError(
            f"{what}: together is {shown(together)}; "
            "it needs to be a list of groups of tables, such as "
            '[["t0", "t1"]]'
        )
    if not isinstance(kinds, Mapping):
        raise ShardCoreError(
            f"{what}: kinds is {shown(kinds)}; it needs to be an object of tables and the "
            'kinds that may run them, such as {"t0": ["row", "column"]}'
        )
    for name, some in kinds.items():
        if isinstance(some, list) and (
            unknown := [kind for kind in some if isinstance(kind, str) and kind not in LAYOUTS]
        ):
            raise ShardCoreError(
                f"{what}: kinds of table {shown(name)} has {shown(unknown[0])}; known are {', '.join(LAYOUTS)}"
            )
    if not isinstance(min_widths, Mapping):
        raise ShardCoreError(
            f"{what}: min_widths is {shown(min_widths)}; it needs to be an object of tables "
            'and the fewest columns of a shard, such as {"t0": 64}'
        )
    return build(
        Constraints,
        data,
        what,
        also=_OPTIONAL,
        pinned=tuple(pinned.items()),
        together=tuple(together),
        kinds=tuple(kinds.items()),
        min_widths=tuple(min_widths.items()),
    )


def _counted(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of equal devices as one entry with a count."""
    runs: list[dict[str, Any]] = []
    for device in devices:
        if runs and {k: v for k, v in runs[-1].items() if k != "count"} == device:
            runs[-1]["count"] += 1
        else:
            runs.append({"count": 1, **device})
    return runs


def read_problem(path: str | Path | Readable) -> Problem:
    data = open_document(path, "problem")
    what = str(path)
    topology = data.pop("topology", None)
    if not isinstance(topology, Mapping) or not isinstance(topology.get("devices"), list):
        raise ShardCoreError(
            f"{what} has topology {str(topology)[:80]}; it needs a list of 'devices', "
            "such as "
            '{"devices": [{"count": 8, "memory_bytes": 80000000000}]}'
        )
    devices: list[Device] = []
    for entry in topology["devices"]:
        entry = dict(entry) if isinstance(entry, Mapping) else {"": entry}
        count = entry.pop("count", 1)
        if (
            not isinstance(count, int)
            or isinstance(count, bool)
            or not 1 <= count <= MOST_DEVICES - len(devices)
        ):
            raise ShardCoreError(
                f"{what}: a device entry has count {shown(count)}; it needs a whole number "
                f"from 1, and a problem has {MOST_DEVICES} devices at most"
            )
        devices += [build(Device, entry, f"{what}: device", also=("count",))] * count
    tables = data.pop("tables", None)
    if not isinstance(tables, list):
        raise ShardCoreError(f"{what} lacks the list 'tables'")
    constraints = data.get("constraints", {})
    if isinstance(constraints, Mapping) and "reserved_bytes" not in constraints and devices:
        # What ShardCore wrote always says it. Who wrote a file by hand, and did not think of it, needs some.
        constraints = {"reserved_bytes": default_reserve(devices), **constraints}
    return build(
        Problem,
        {k: v for k, v in data.items() if k not in ("constraints", "job")},
        what,
        also=("schema", "version", "topology", "tables", "constraints", "job"),
        topology=build(
            Topology,
            {k: v for k, v in topology.items() if k != "devices"},
            f"{what}: topology",
            also=("devices",),
            devices=tuple(devices),
        ),
        tables=tuple(table_from_json(t, what) for t in tables),
        constraints=_constraints_from_json(constraints, f"{what}: constraints"),
        job=build(Job, data.get("job", {}), f"{what}: job"),
    )


def write_problem(path: str | Path, problem: Problem) -> None:
    require_type(problem, Problem, "problem", "a Problem")
    write_json(path, problem_to_json(problem))


def write_pool(path: str | Path, tables: Iterable[Table]) -> None:
    write_json(path, document("pool", seal({"tables": [table_to_json(t) for t in tables]})))


def read_pool(path: str | Path) -> tuple[Table, ...]:
    data = unseal(open_document(path, "pool"), path)
    found = build(_Pool, data, str(path)).tables
    names = [t["name"] for t in found if isinstance(t, Mapping) and isinstance(t.get("name"), str)]
    if len(set(names)) < len(names):
        raise ShardCoreError(
            f"{path} has several tables named {shown(max(names, key=names.count))}; names need to differ"
        )
    return tuple(table_from_json(t, str(path)) for t in found)


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A pool's file."""

    tables: tuple[Any, ...]


# --- plans --------------------------------------------------------------------------------------------------


def problem_digest(problem: Problem) -> str:
    require_type(problem, Problem, "problem", "a Problem")
    return digest(problem_to_json(problem))


def plan_to_json(plan: Plan, problem: Problem) -> dict[str, Any]:
    require_type(plan, Plan, "plan", "a Plan, as a sharder gives")
    require_type(problem, Problem, "problem", "a Problem")
    placements = [
        {
            "table": p.shard.table.name,
            "kind": p.kind,
            "columns": [p.shard.col_lo, p.shard.col_hi],
            "devices": list(p.devices),
        }
        for p in plan.placements
    ]
    return document(
        "plan",
        seal(
            {
                "problem": problem.name,
                "problem_digest": problem_digest(problem),
                "problem_parts": problem_parts.parts_of(problem),
                "provenance": dict(plan.provenance),
                "placements": placements,
            }
        ),
    )


def write_plan(path: str | Path, plan: Plan, problem: Problem) -> None:
    write_json(path, plan_to_json(plan, problem))


def read_plan(path: str | Path | Readable, problem: Problem) -> Plan:
    """A plan for `problem`, parsed: it is for the caller to lower it, or to validate it by `require_plan`.

    Raises ShardCoreError where it was made for another problem, or was edited.
    """
    return plan_from_json(unseal(open_document(path, "plan"), path), problem, str(path))


@contextlib.contextmanager
def validating(path: str | Path) -> Iterator[None]:
    """Name the file of a plan in what its validation raises."""
    try:
        yield
    except Overfull as error:
        raise Overfull(
            f"{path}: {error}. ShardCore may have counted less when the plan was made; "
            "python -m shardcore plan --start PLAN.json searches one that fits, from it",
            error.too_much,
        ) from None
    except ShardCoreError as error:
        raise type(error)(f"{path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Placement:
    """A placement in a plan's file: all rows, and columns [low, high), of a table."""

    table: str
    kind: str
    columns: tuple[int, int]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A plan's file."""

    problem: str
    problem_digest: str
    provenance: Mapping[str, Any]
    placements: tuple[_Placement, ...]
    problem_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)


_PROVENANCE = {
    "algorithm": str,
    "space": str,
    "predicted_ms": float | None,
    "model": str,
    "model_version": str,
    "tower_ratio": float,
    "extrapolated": tuple[str, ...],
    "datasets": Mapping[str, str],
    "torchrec": Mapping[str, Mapping[str, Any]],
}
"""What others read of provenance; the rest is for people."""


def require_provenance(data: Mapping[str, Any], what: str) -> None:
    """Raise ShardCoreError naming an entry that ShardCore uses and that is not of its kind."""
    for name in sorted(set(data) & set(_PROVENANCE)):
        read(data[name], _PROVENANCE[name], f"{what}: {name}")


def plan_from_json(data: Any, problem: Problem, what: str) -> Plan:
    """The plan of a file's content, not yet checked against the problem's tables and devices."""
    found = build(_Plan, data, what)
    if found.problem_digest != (own := problem_digest(problem)):
        raise ShardCoreError(
            f"{what} is a plan for problem {shown(found.problem)} with digest "
            f"{shown(found.problem_digest)}; problem {problem.name!r} here has {own}"
            f"{problem_parts.refusal(found.problem_parts, problem)}"
        )
    tables = {t.name: t for t in problem.tables}
    for p in found.placements:
        if p.table not in tables:
            raise ShardCoreError(
                f"{what} places table {shown(p.table)}, which problem {problem.name!r} does not have"
            )
    require_provenance(found.provenance, f"{what}: provenance")
    try:
        return Plan(
            tuple(
                Placement(
                    layout_of(p.kind).name,
                    Shard(tables[p.table], 0, tables[p.table].rows, *p.columns),
                    p.devices,
                )
                for p in found.placements
            ),
            found.provenance,
        )
    except ShardCoreError as error:
        raise ShardCoreError(f"{what}: {error}") from None


# --- settings -----------------------------------------------------------------------------------------------


def setting_to_json(setting: Setting) -> dict[str, Any]:
    # Without payloads that are the default: most settings are older than they are.
    return {
        f.name: getattr(setting, f.name)
        for f in dataclasses.fields(setting)
        if not f.name.endswith("_payload") or getattr(setting, f.name) != f.default
    }


def setting_from_json(data: Any, what: str) -> Setting:
    return build(Setting, data, what)
