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

Publishers that share a folder wait for each other (`turn`). An object store has no locks: run one publisher
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
from shardcore.core.validation import require, require_path_name, shown
from shardcore.io import files, schema, writing
from shardcore.io.envelope import seal, unseal
from shardcore.plans import decisions, places
from shardcore.plans.decisions import ROLLED_BACK, Decision
from shardcore.plans.places import Place
from shardcore.step.lower import require_plan

FEWEST_KEPT = 2
"""A reader may still be at the version before the current one."""
PATIENCE_S = 600.0
"""Time that a publisher waits for its turn. One plan never takes that long to publish."""
PAGE, COST, REPORT, MODELS, INDEX = "report.html", "cost.json", "report.md", "models.html", "index.html"
"""PAGE and COST, which has the page's digest, belong to a version. REPORT covers all plans, MODELS all
versions of the model, INDEX links them. These lie next to the plans (see `write`)."""
_POINTER = "current"
_LOOK_S = 0.02
"""Time between two attempts to take the lock."""


# --- reading ---------------------------------------------------------------------------------------------


def load_plan(
    root: str | Path, name: str, version: str | None = None, fits: bool = True
) -> tuple[Plan, Problem]:
    """A problem's current plan, or the given version, with its problem.

    root: folder or URL of published plans.
    name: name of the problem.
    version: one of those that `shardcore history` lists. None: the current one.

    Raises ShardCoreError if there is none, its files are damaged, or the plan is not valid. With `fits`, also
    if it exceeds a device's memory.
    """
    # Parsed before it is validated, so that a damaged file is reported as such.
    plan, problem = read_plan(root, name, version)
    with files.validating(f"plan of problem {name!r} in {root}"):
        require_plan(plan, problem, fits)
    return plan, problem


def read_plan(root: str | Path, name: str, version: str | None = None) -> tuple[Plan, Problem]:
    """Parse a plan without validating it, for a caller that lowers it. Otherwise the same as load_plan."""
    home = _home(root, name)
    while version is None:
        before = _pointer(home)
        try:
            return _load(_version(home, current(root, name)), name)
        except ShardCoreError:
            # A publisher may have pruned what was read, so a failure counts only if the pointer stayed.
            if _pointer(home) == before:
                raise
    if not files.DIGEST.fullmatch(version) or not has(root, name, version):
        raise ShardCoreError(
            f"problem {name!r} has no version {shown(version)} in {root}; there are "
            f"{', '.join(_versions(home)) or 'none'}"
        )
    return _load(_version(home, version), name)


def _load(folder: Place, name: str) -> tuple[Plan, Problem]:
    problem = files.read_problem(folder / "problem.json")
    # A folder copied to another name would be used for the wrong problem.
    require(
        problem.name == name, f"{folder} has the plan of problem {problem.name!r}; it needs that of {name!r}"
    )
    return files.read_plan(folder / "plan.json", problem), problem


def _version(home: Place, version: str) -> Place:
    files.require_digest(version, str(home), "version")
    return home / "versions" / version


def _versions(home: Place) -> list[str]:
    """Names of a problem's versions: of its folders, without links, which may lead out of the store."""
    folder = home / "versions"
    return [n for n in places.listed(folder) if files.DIGEST.fullmatch(n) and places.is_folder(folder / n)]


def current(root: str | Path, name: str) -> str:
    """A problem's current version. Raises ShardCoreError if nothing was published for it."""
    return current_decision(root, name).current


def current_decision(root: str | Path, name: str) -> Decision:
    """The decision that chose the current version. Raises ShardCoreError if nothing was published."""
    if (decision := last(root, name)) is None:
        raise ShardCoreError(
            f"no plan is published for problem {name!r} in {root}; there are {names(root) or 'none'}"
        )
    return decision


def last(root: str | Path, name: str) -> Decision | None:
    """The last decision on a problem's plan, or None."""
    # Decisions are never removed, and the pointer names them last.
    return next(history(root, name), None)


def history(root: str | Path, name: str) -> Iterator[Decision]:
    """Decisions on a problem's plan, newest first. Raises ShardCoreError if one is missing or edited."""
    home = _home(root, name)
    # From the pointer back along parents, like commits. Each file is checked by its digest.
    decision_id = _pointer(home)
    while decision_id:
        decision = _read(home, name, decision_id)
        yield decision
        decision_id = decision.parent


def adoption(root: str | Path, name: str, version: str) -> Decision | None:
    """The last decision that replaced the plan before by a version. None: there is none."""
    return next(
        (d for d in history(root, name) if d.outcome != "kept" and version == d.current == d.candidate), None
    )


def names(root: str | Path) -> list[str]:
    """Names of the problems with a published plan."""
    home = places.place(root)
    return [
        name for name in places.listed(home) if require_path_name.admits(name) and _has_pointer(home / name)
    ]


def _has_pointer(home: Place) -> bool:
    """True if there are plans of a problem, and not behind a link, which may lead in a circle."""
    with suppress(ShardCoreError):
        return not places.is_link(home) and places.exists(home / _POINTER)
    return False


def _pointer(home: Place) -> str | None:
    """The id in the pointer file. None: there is no such file."""
    path = home / _POINTER
    if not places.exists(path):
        return None
    # A damaged pointer may be long: decode no more than an id can need.
    decision_id = schema.read_bytes(path)[:100].decode(errors="replace").strip()
    require(bool(decision_id), f"{path} is empty; it was cut short or edited")
    files.require_digest(decision_id, str(path), "decision")
    return decision_id


def _read(home: Place, name: str, decision_id: str) -> Decision:
    path = home / "decisions" / f"{decision_id}.json"
    decision = decisions.from_document(schema.read_json(path), str(path))
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
def turn(root: str | Path, name: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a problem's lock while the context lasts, or until the process dies.

    So reading, deciding and writing are one step. Other publishers in the same folder wait. An object store
    has no lock.

    Raises ShardCoreError naming the holder after patience_s.
    """
    home = _home(root, name)
    # Object stores have no lock. `record` checks the parent instead.
    if not isinstance(home, Path):
        yield
        return
    import fcntl

    path, until = home / ".turn", time.monotonic() + patience_s
    with places.plain_errors(path):
        home.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: a link in a shared folder must not make us truncate another file.
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        lock = open(opened, "a+", errors="replace")  # emptied below, under the lock
    with lock:
        while True:
            # Non-blocking, because a blocking flock cannot time out.
            with places.plain_errors(path, (BlockingIOError,)):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                with places.plain_errors(path):
                    lock.seek(0)
                    holder = lock.read(4096).strip() or "a process that does not say which"
                raise ShardCoreError(
                    f"plans for problem {name!r} are being published by another, which has held {path} for "
                    f"{patience_s:.0f} s or more: {holder}; end it if it hangs, and publish again"
                )
            time.sleep(_LOOK_S)
        # Name the holder of the lock, for the message of those who wait.
        since = datetime.now().isoformat(" ", "seconds")
        with places.plain_errors(path):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            lock.flush()
        yield


def version_of(plan: Plan, problem: Problem) -> str:
    """The version that a plan of a problem has: a digest of both."""
    # The problem is part of it: a plan of changed tables is another version.
    return files.digest(files.plan_to_json(plan, problem))


def has(root: str | Path, name: str, version: str) -> bool:
    return places.exists(_version(_home(root, name), version) / "plan.json")


def is_whole(root: str | Path, name: str, version: str) -> bool:
    """True if a version is there and its files are as they were written."""
    folder = _version(_home(root, name), version)
    try:
        _load(folder, name)
        cost = unseal(schema.read(schema.read_json(folder / COST), Mapping[str, Any], COST), folder / COST)
        return (
            "page_sha256" not in cost
            or cost["page_sha256"] == sha256(schema.read_bytes(folder / PAGE)).hexdigest()
        )
    except Unreachable:
        raise
    except ShardCoreError:
        return False


def add(root: str | Path, problem: Problem, plan: Plan, cost: Mapping[str, Any], page: str = "") -> str:
    """Store a plan with its problem, costs and report page. Returns the version.

    Nobody uses it until a decision names it. An existing version is left as it is, unless it is damaged.
    """
    version = version_of(plan, problem)
    if not is_whole(root, problem.name, version):
        folder = _no_link(_home(root, problem.name) / "versions" / version)
        places.write(folder / "problem.json", writing.json_bytes(files.problem_to_json(problem)))
        # The page's digest is in the costs file, so that an edited page is noticed.
        if page:
            cost = {**cost, "page_sha256": sha256(page.encode()).hexdigest()}
            places.write(folder / PAGE, page.encode())
        places.write(folder / COST, writing.json_bytes(seal(cost)))
        # The plan comes last and completes the version.
        places.write(folder / "plan.json", writing.json_bytes(files.plan_to_json(plan, problem)))
    return version


def record(root: str | Path, decision: Decision) -> None:
    """Store a decision and make its version current.

    Raises ShardCoreError if the version is missing, or if another decision than its parent is the last one.
    """
    home, name = _home(root, decision.problem), decision.problem
    require(
        has(root, name, decision.current),
        f"problem {name!r} has no version {decision.current!r} in {root} to make current",
    )
    # An object store has no lock, so the parent is checked right before writing.
    before = _pointer(home)
    require(
        decision.parent == before,
        f"problem {name!r}: decision {decision.id} follows {decision.parent}, but {before} is the "
        f"last one in {root}; another publisher was faster, so publish again",
    )
    # The decision first, then the pointer: a kill between them leaves the old state.
    places.write(home / "decisions" / f"{decision.id}.json", writing.json_bytes(decision.document()))
    places.write(home / _POINTER, f"{decision.id}\n".encode())


def roll_back(root: str | Path, name: str, version: str, reason: str) -> Decision:
    """Make the version before one current again: a job has measured that it is slower than predicted.

    Raises ShardCoreError if the version is not the current one, or the first.
    """
    # Under the lock, or another publisher might decide in between.
    with turn(root, name):
        decided = list(history(root, name))
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
        adopted = adoption(root, name, version)
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
        record(root, decision)
        return decision


def prune(root: str | Path, name: str, keep: int) -> list[str]:
    """Remove versions that none of the last `keep` decisions names. Returns them.

    Decisions stay. Temporary files of killed publishers are removed. Call it within a `turn`.
    """
    require(
        keep >= FEWEST_KEPT,
        f"versions of the last {keep} decisions are to be kept; it needs {FEWEST_KEPT} or more, as a reader may "
        "still be at the one before",
    )
    # Candidates that were considered of late stay, too.
    named = {v for d in islice(history(root, name), keep) for v in (d.current, d.candidate)}
    home = _home(root, name)
    if isinstance(home, Path):
        with places.plain_errors(home):
            for path in list(home.rglob(".*.tmp")):  # rglob follows no links
                if writing.UNFINISHED.fullmatch(path.name):
                    writing.remove_unfinished(path)
    gone = [version for version in _versions(home) if version not in named]
    for version in gone:
        places.remove(_version(home, version) / "plan.json")  # first, as it makes the version
        places.remove(_version(home, version))
    return gone


def write(root: str | Path, name: str, content: bytes) -> None:
    """Write a file for people next to the plans, atomically."""
    places.write(places.place(root) / name, content)


# --- folders of a problem --------------------------------------------------------------------------------


def require_elsewhere(path: Path) -> None:
    """Raise ShardCoreError for a path among a problem's versions and decisions, which only publishers write."""
    for home in Path(os.path.realpath(path), "file").parents:
        require(
            not ((home / "versions").is_dir() and (home / "decisions").is_dir()),
            f"{path} is in {home}, where published plans are kept, which nothing else may change; it needs to be "
            "elsewhere",
        )


def jobs_folder(root: str | Path, name: str) -> Place:
    """The folder of reports of jobs that follow a problem's plan (see `followed`)."""
    return _no_link(_home(root, name) / "jobs")


def _home(root: str | Path, name: str) -> Place:
    """A problem's folder. Raises ShardCoreError for a link, and for a name that no problem can have."""
    name = name if isinstance(name, str) else repr(name)
    require(
        require_path_name.admits(name),
        f"problem {shown(name)} has no plans in {root}; names have letters, digits and . _ -",
    )
    require(
        name not in (REPORT, MODELS, INDEX),
        f"problem {name!r} has the name of the file beside the plans in {root}; it needs another",
    )
    # Files behind a link belong to somebody else.
    home = _no_link(places.place(root) / name)
    for folder in ("versions", "decisions"):
        _no_link(home / folder)
    return home


def _no_link(folder: Place) -> Place:
    """Return a folder of a problem. Raises ShardCoreError for a link."""
    require(
        not places.is_link(folder),
        f"{folder} is a symbolic link; a problem's plans are kept in folders of its own",
    )
    return folder
