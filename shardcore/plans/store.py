"""Published plans on disk: versions and decisions of each problem, and one atomic pointer.

  PLANS/<problem>/versions/<version>/{problem,plan,cost}.json, report.html
      a plan, named by its digest; immutable
  PLANS/<problem>/decisions/<id>.json
      which version to use from then on, and why; each names its parent, as commits do
  PLANS/<problem>/current
      the id of the last decision
  PLANS/<problem>/jobs/<job>.json
      reports of jobs that follow the plan (see `followed`)

PLANS is a folder or a URL such as s3://bucket/plans (see `places`).

Only the pointer is ever overwritten, and always last. So a killed publisher leaves the old state or the new
one. At worst it leaves files that nothing names. A reader sees either state, whole.
tests/plans/test_store_operations.py checks this at every single operation.

Publishers that share a folder wait for each other (`publishing_lock`). An object store has no locks: run one publisher
at a time there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require, require_path_name, short_repr
from shardcore.io import files, schema, writing
from shardcore.io.envelope import add_digest, remove_digest
from shardcore.plans import decisions, places
from shardcore.plans.decisions import ROLLED_BACK, Decision
from shardcore.plans.places import StorePath
from shardcore.step.lower import require_valid_plan

FEWEST_KEPT = 2
"""A reader may still be at the version before the current one."""
PATIENCE_S = 600.0
"""Time that a publisher waits for its turn. One plan never takes that long to publish."""
PAGE, COST, REPORT, MODELS, INDEX = "report.html", "cost.json", "report.md", "models.html", "index.html"
"""PAGE and COST, which has the page's digest, belong to a version. REPORT covers all plans, MODELS all
versions of the model, INDEX links them. These lie next to the plans (see `write_store_file`)."""
_POINTER = "current"
_LOOK_S = 0.02
"""Time between two attempts to take the lock."""


# --- reading ---------------------------------------------------------------------------------------------


def load_plan(
    root: str | Path, name: str, version: str | None = None, fits: bool = True
) -> tuple[Plan, Problem]:
    """Current or given version of a problem's published plan, with its problem.

    root: folder or URL of published plans.
    name: name of the problem.
    version: one of those that `shardcore history` lists. None: the current one.

    Raises ShardCoreError if there is none, its files are damaged, or the plan is not valid. With `fits`, also
    if it exceeds a device's memory.
    """
    # Parsed before it is validated, so that a damaged file is reported as such.
    plan, problem = read_plan(root, name, version)
    with files.name_file_in_errors(f"plan of problem {name!r} in {root}"):
        require_valid_plan(plan, problem, fits)
    return plan, problem


def read_plan(root: str | Path, name: str, version: str | None = None) -> tuple[Plan, Problem]:
    """Published plan with its problem, parsed but not validated. Arguments as in `load_plan`."""
    home = _problem_folder(root, name)
    while version is None:
        before = _current_decision_id(home)
        try:
            return _load_version(_version_folder(home, current_version(root, name)), name)
        except ShardCoreError:
            # A publisher may have pruned what was read, so a failure counts only if the pointer stayed.
            if _current_decision_id(home) == before:
                raise
    if not files.DIGEST.fullmatch(version) or not has_version(root, name, version):
        raise ShardCoreError(
            f"problem {name!r} has no version {short_repr(version)} in {root}; there are "
            f"{', '.join(_list_versions(home)) or 'none'}"
        )
    return _load_version(_version_folder(home, version), name)


def _load_version(folder: StorePath, name: str) -> tuple[Plan, Problem]:
    problem = files.read_problem(folder / "problem.json")
    # A folder copied to another name would be used for the wrong problem.
    require(
        problem.name == name, f"{folder} has the plan of problem {problem.name!r}; it needs that of {name!r}"
    )
    return files.read_plan(folder / "plan.json", problem), problem


def _version_folder(home: StorePath, version: str) -> StorePath:
    files.require_digest(version, str(home), "version")
    return home / "versions" / version


def _list_versions(home: StorePath) -> list[str]:
    """Names of a problem's version folders. Links are left out, as they may lead out of the store."""
    folder = home / "versions"
    return [
        n for n in places.list_names(folder) if files.DIGEST.fullmatch(n) and places.is_folder(folder / n)
    ]


def current_version(root: str | Path, name: str) -> str:
    """Current version of a problem's plan. Raises ShardCoreError if nothing was published for the problem."""
    return current_decision(root, name).current


def current_decision(root: str | Path, name: str) -> Decision:
    """Decision that chose the current version. Raises ShardCoreError if nothing was published for the problem."""
    if (decision := last_decision(root, name)) is None:
        raise ShardCoreError(
            f"no plan is published for problem {name!r} in {root}; there are {published_problem_names(root) or 'none'}"
        )
    return decision


def last_decision(root: str | Path, name: str) -> Decision | None:
    """Last decision on a problem's plan; None before the first."""
    # Decisions are never removed, and the pointer names them last.
    return next(decision_history(root, name), None)


def decision_history(root: str | Path, name: str) -> Iterator[Decision]:
    """Decisions on a problem's plan, newest first. Raises ShardCoreError if a decision is missing or edited."""
    home = _problem_folder(root, name)
    # From the pointer back along parents, like commits. Each file is checked by its digest.
    decision_id = _current_decision_id(home)
    while decision_id:
        decision = _read_decision(home, name, decision_id)
        yield decision
        decision_id = decision.parent


def adopting_decision(root: str | Path, name: str, version: str) -> Decision | None:
    """Last publishing decision by which a version replaced another version; None if there is none."""
    return next(
        (
            d
            for d in decision_history(root, name)
            if d.outcome != "kept" and version == d.current == d.candidate
        ),
        None,
    )


def published_problem_names(root: str | Path) -> list[str]:
    """Names of the problems with a published plan."""
    home = places.open_place(root)
    return [
        name
        for name in places.list_names(home)
        if require_path_name.admits(name) and _has_published_plan(home / name)
    ]


def _has_published_plan(home: StorePath) -> bool:
    """Tell if a problem's folder has published plans and is no link, as a link may lead in a circle."""
    with suppress(ShardCoreError):
        return not places.is_link(home) and places.path_exists(home / _POINTER)
    return False


def _current_decision_id(home: StorePath) -> str | None:
    """Id of the current decision, from the problem's pointer file; None without such a file."""
    path = home / _POINTER
    if not places.path_exists(path):
        return None
    # A damaged pointer may be long: decode no more than an id can need.
    decision_id = schema.read_bytes(path)[:100].decode(errors="replace").strip()
    require(bool(decision_id), f"{path} is empty; it was cut short or edited")
    files.require_digest(decision_id, str(path), "decision")
    return decision_id


def _read_decision(home: StorePath, name: str, decision_id: str) -> Decision:
    path = home / "decisions" / f"{decision_id}.json"
    decision = decisions.decision_from_json(schema.read_json(path), str(path))
    require(
        decision.id == decision_id, f"{path} does not match its name; it was edited after ShardCore wrote it"
    )
    require(
        decision.problem == name,
        f"{path} is a decision on problem {decision.problem!r}; it needs to be one on {name!r}",
    )
    return decision


# --- writing ---------------------------------------------------------------------------------------------


@contextmanager
def publishing_lock(root: str | Path, name: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Context that holds a problem's publishing lock, until its end or the death of the process.

    So reading, deciding and writing are one step. Other publishers in the same folder wait. An object store
    has no lock.

    Raises ShardCoreError naming the holder after patience_s.
    """
    home = _problem_folder(root, name)
    # Object stores have no lock. `record_decision` checks the parent instead.
    if not isinstance(home, Path):
        yield
        return
    import fcntl

    path, until = home / ".turn", time.monotonic() + patience_s
    with places.raise_plain_errors(path):
        home.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: a link in a shared folder must not make us truncate another file.
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        lock = open(opened, "a+", errors="replace")  # emptied below, under the lock
    with lock:
        while True:
            # Non-blocking, because a blocking flock cannot time out.
            with places.raise_plain_errors(path, (BlockingIOError,)):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                with places.raise_plain_errors(path):
                    lock.seek(0)
                    holder = lock.read(4096).strip() or "a process that does not say which"
                raise ShardCoreError(
                    f"plans for problem {name!r} are being published by another, which has held {path} for "
                    f"{patience_s:.0f} s or more: {holder}; end it if it hangs, and publish again"
                )
            time.sleep(_LOOK_S)
        # Name the holder of the lock, for the message of those who wait.
        since = datetime.now().isoformat(" ", "seconds")
        with places.raise_plain_errors(path):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            lock.flush()
        yield


def plan_version(plan: Plan, problem: Problem) -> str:
    """Version name of a plan: a digest of the plan and its problem."""
    # The problem is part of it: a plan of changed tables is another version.
    return files.json_digest(files.plan_to_json(plan, problem))


def has_version(root: str | Path, name: str, version: str) -> bool:
    return places.path_exists(_version_folder(_problem_folder(root, name), version) / "plan.json")


def is_version_intact(root: str | Path, name: str, version: str) -> bool:
    """Tell if a version is stored and its files are as they were written."""
    folder = _version_folder(_problem_folder(root, name), version)
    try:
        _load_version(folder, name)
        cost = remove_digest(
            schema.convert_value(schema.read_json(folder / COST), Mapping[str, Any], COST), folder / COST
        )
        return (
            "page_sha256" not in cost
            or cost["page_sha256"] == sha256(schema.read_bytes(folder / PAGE)).hexdigest()
        )
    except Unreachable:
        raise
    except ShardCoreError:
        return False


def add_version(
    root: str | Path, problem: Problem, plan: Plan, cost: Mapping[str, Any], page: str = ""
) -> str:
    """Store a plan with its problem, costs and report page. Returns the version.

    Nobody uses it until a decision names it. An existing version is left as it is, unless it is damaged.
    """
    version = plan_version(plan, problem)
    if not is_version_intact(root, problem.name, version):
        folder = _require_no_link(_problem_folder(root, problem.name) / "versions" / version)
        places.write_file(folder / "problem.json", writing.json_bytes(files.problem_to_json(problem)))
        # The page's digest is in the costs file, so that an edited page is noticed.
        if page:
            cost = {**cost, "page_sha256": sha256(page.encode()).hexdigest()}
            places.write_file(folder / PAGE, page.encode())
        places.write_file(folder / COST, writing.json_bytes(add_digest(cost)))
        # The plan comes last and completes the version.
        places.write_file(folder / "plan.json", writing.json_bytes(files.plan_to_json(plan, problem)))
    return version


def record_decision(root: str | Path, decision: Decision) -> None:
    """Store a decision and make its version current.

    Raises ShardCoreError if the version is missing, or if another decision than its parent is the last one.
    """
    home, name = _problem_folder(root, decision.problem), decision.problem
    require(
        has_version(root, name, decision.current),
        f"problem {name!r} has no version {decision.current!r} in {root} to make current",
    )
    # An object store has no lock, so the parent is checked right before writing.
    before = _current_decision_id(home)
    require(
        decision.parent == before,
        f"problem {name!r}: decision {decision.id} follows {decision.parent}, but {before} is the "
        f"last one in {root}; another publisher was faster, so publish again",
    )
    # The decision first, then the pointer: a kill between them leaves the old state.
    places.write_file(home / "decisions" / f"{decision.id}.json", writing.json_bytes(decision.to_json()))
    places.write_file(home / _POINTER, f"{decision.id}\n".encode())


def roll_back_version(root: str | Path, name: str, version: str, reason: str) -> Decision:
    """Make the previous version current again, after a job has measured a version to be slower than predicted.

    Raises ShardCoreError if the version is not the current one, or the first.
    """
    # Under the lock, or another publisher might decide in between.
    with publishing_lock(root, name):
        decided = list(decision_history(root, name))
        require(
            bool(decided) and decided[0].current == version,
            f"problem {name!r} has another version than {version!r} current in {root}; nothing is rolled back",
        )
        before = next((d.current for d in decided if d.current != version), None)
        if before is None:
            raise ShardCoreError(
                f"problem {name!r} has no version before {version!r} in {root} to go back to"
            )
        # A later decision to keep the version compared it with another candidate.
        adopted = adopting_decision(root, name, version)
        decision = replace(
            decided[0],
            outcome=ROLLED_BACK,
            reason=reason,
            current=before,
            candidate=version,
            candidate_ms=decided[0].total_ms,
            previous_ms=adopted and adopted.previous_ms,
            margin_ms=adopted and adopted.margin_ms,
            decided_at=time.time(),
            parent=decided[0].id,
        )
        record_decision(root, decision)
        return decision


def prune_versions(root: str | Path, name: str, keep: int) -> list[str]:
    """Remove versions that none of the last `keep` decisions names. Returns the removed versions.

    Decisions stay. Temporary files of killed publishers are removed. Call it within a `publishing_lock`.
    """
    require(
        keep >= FEWEST_KEPT,
        f"versions of the last {keep} decisions are to be kept; it needs {FEWEST_KEPT} or more, as a reader may "
        "still be at the one before",
    )
    # Candidates that were considered of late stay, too.
    named = {v for d in islice(decision_history(root, name), keep) for v in (d.current, d.candidate)}
    home = _problem_folder(root, name)
    if isinstance(home, Path):
        with places.raise_plain_errors(home):
            for path in list(home.rglob(".*.tmp")):  # rglob follows no links
                if writing.UNFINISHED.fullmatch(path.name):
                    writing.remove_unfinished(path)
    gone = [version for version in _list_versions(home) if version not in named]
    for version in gone:
        places.remove_file_or_folder(
            _version_folder(home, version) / "plan.json"
        )  # first, as it makes the version
        places.remove_file_or_folder(_version_folder(home, version))
    return gone


def write_store_file(root: str | Path, name: str, content: bytes) -> None:
    """Write a file for people next to the published plans, atomically."""
    places.write_file(places.open_place(root) / name, content)


# --- folders of a problem --------------------------------------------------------------------------------


def require_outside_versions(path: Path) -> None:
    """Raise ShardCoreError for a path among a problem's versions and decisions, which only publishers write."""
    for home in Path(os.path.realpath(path), "file").parents:
        require(
            not ((home / "versions").is_dir() and (home / "decisions").is_dir()),
            f"{path} is in {home}, where published plans are kept, which nothing else may change; it needs to be "
            "elsewhere",
        )


def jobs_folder(root: str | Path, name: str) -> StorePath:
    """Folder with the reports of jobs that follow a problem's plan (see `followed`)."""
    return _require_no_link(_problem_folder(root, name) / "jobs")


def _problem_folder(root: str | Path, name: str) -> StorePath:
    """Folder of a problem's plans. Raises ShardCoreError for a link, and for a name that no problem can have."""
    name = name if isinstance(name, str) else repr(name)
    require(
        require_path_name.admits(name),
        f"problem {short_repr(name)} has no plans in {root}; names have letters, digits and . _ -",
    )
    require(
        name not in (REPORT, MODELS, INDEX),
        f"problem {name!r} has the name of the file beside the plans in {root}; it needs another",
    )
    # Files behind a link belong to somebody else.
    home = _require_no_link(places.open_place(root) / name)
    for folder in ("versions", "decisions"):
        _require_no_link(home / folder)
    return home


def _require_no_link(folder: StorePath) -> StorePath:
    """Return a problem's folder unchanged. Raises ShardCoreError for a link."""
    require(
        not places.is_link(folder),
        f"{folder} is a symbolic link; a problem's plans are kept in folders of its own",
    )
    return folder
