"""DVC from Prefect: change parameters, rebuild stages that changed, share the result."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.io import schema, writing
from tasks import cache, console, owned, params, paths, processes
from tasks.artifacts import create_progress_artifact, update_progress_artifact
from tasks.commit import git, has_uncommitted_changes

_PREFECT_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d+ \| \w+ +\| ((Task|Flow) run '[^']*' - )?")
_DVC_STAGE = re.compile(r"(Running stage|Stage) '(\w+)'")
Stage = Literal["tables", "measure", "train", "evaluate", "train_policy"]
STAGES: tuple[Stage, ...] = ("tables", "measure", "train", "evaluate")
OPTIONAL: Stage = "train_policy"
AFTER = ("promote", "publish")
"""Stages after DVC's last one. They do not need OPTIONAL."""
SHIPPED = "shipped"
"""DVC's remote in the repository, .dvc/shipped: results of one run, which `dvc pull` brings."""
_LAST_WORDS_S = 3.0
"""Time in which an interrupted stage may end."""
_HOLDER = re.compile(r"\(PID (\d+)\): (.*)")
_DVC_LOCK, _DVC_USERS = Path(".dvc/tmp/lock"), Path(".dvc/tmp/rwlock")


@dataclass(frozen=True)
class StageRun:
    """Result of `dvc repro` for a stage.

    stage: name of the stage.
    ran: True if it ran, False if nothing had changed.
    seconds: time that it ran.
    """

    stage: str
    ran: bool
    seconds: float


# --- parameters ---------------------------------------------------------------------------------------------


def override_params(overrides: Mapping[str, Mapping[str, Any]], sections: Mapping[str, type]) -> bool:
    """Write parameter overrides into params.yaml, keeping comments. Returns True if the file changes.

    overrides: {section: {key: value}}.
    sections: config dataclass of each section.

    Raises ShardCoreError naming an unknown or wrong entry.
    """
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 130
    yaml.representer.add_representer(  # without this, `key: null` becomes `key:` on lines that nobody changed
        type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    # Checked before the overrides, which are not to blame for a section that is wrong already.
    for name, cls in sections.items():
        params.read_section(name, cls)
    document = yaml.load(paths.PARAMS) or {}
    unknown = sorted(set(overrides) - set(sections))
    if unknown:
        raise ShardCoreError(
            f"overrides have an unknown section {unknown[0]!r}; known are {', '.join(sections)}"
        )
    changed = False
    for name, values in overrides.items():
        section = document.get(name) or {}
        if not isinstance(values, Mapping):
            raise ShardCoreError(
                f"overrides, section {name!r} is {values!r}; it needs to be an object with keys"
            )
        changed |= merge_mappings(section, values)
        schema.build_record(sections[name], section, f"overrides, section {name!r}")
        document[name] = section
    if changed:
        text = io.StringIO()
        yaml.dump(document, text)
        writing.write_atomic(paths.PARAMS, text.getvalue().encode())
    return changed


def merge_mappings(into: MutableMapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Write values into a mapping, and into the mappings in it. Returns True if that changes it."""
    changed = False
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), MutableMapping):
            changed |= merge_mappings(into[key], value)
        elif key not in into or into[key] != value:
            into[key], changed = value, True
    return changed


# --- dvc ----------------------------------------------------------------------------------------------------


@task(task_run_name="dvc-repro-{target}")
def reproduce_stage(target: Stage, of: Stage | None = None, done: Sequence[StageRun] = ()) -> list[StageRun]:
    """Rebuild a stage and its dependencies by `dvc repro`. Returns the stages rebuilt or unchanged.

    Its lines go to the run's log, and its progress to the run's page. Raises ShardCoreError if a stage fails.

    of: the refresh's target, if it is a later stage.
    done: stages that were rebuilt before. They head the result.
    """
    if target not in get_args(Stage):
        raise ShardCoreError(f"stage {target!r} is not known; there are {', '.join(get_args(Stage))}")
    logger = get_run_logger()
    stages = [s for s in stages_of_refresh(target) if s not in (*AFTER, *(run.stage for run in done))]
    progress = create_progress_artifact(0.0, key="dvc-repro", description=f"stages {', '.join(stages)}")
    if not done:  # of one refresh, once: it starts a DVC, which takes seconds
        cache.remove_damaged_entries(logger)
    begun: dict[str, tuple[bool, float]] = {}  # by stage: True if it runs, and the time of its start
    errors: list[str] = []
    remove_ended_dvc_users()
    with owned.owned_run():
        process = _start_dvc("repro", target, **console.RELAYED)
        for message in _log_lines(process):
            if message:
                logger.info("%s", message)
            if errors or message.lower().startswith("error: "):
                errors.append(message)
            if (found := _DVC_STAGE.match(message)) and found[2] in stages:
                begun[found[2]] = (runs := found[1] == "Running stage", time.monotonic())
                logger.info(stage_heading(found[2], of or target, runs), extra=console.STAGE)
                percent = 100.0 * stages.index(found[2]) / len(stages)
                update_progress_artifact(progress, percent, description=f"stage {found[2]}")
        if process.wait():
            raise ShardCoreError(
                dvc_error_reason(errors) or f"dvc repro {target} ended with exit code {process.returncode}"
            )
    update_progress_artifact(progress, 100.0, description=f"stage {target} is up to date")
    return [*done, *_timed_stages(begun)]


def _timed_stages(begun: Mapping[str, tuple[bool, float]]) -> list[StageRun]:
    """Stages with seconds of each: from its start to the next stage's start, or until now."""
    ends = [since for _, since in begun.values()][1:] + [time.monotonic()]
    return [
        StageRun(stage, ran, end - since if ran else 0.0)
        for (stage, (ran, since)), end in zip(begun.items(), ends, strict=True)
    ]


def _log_lines(process: subprocess.Popen) -> Iterator[str]:
    """Output lines of a `dvc repro` process for the log. Lines marked for display are shown on the screen instead."""
    try:
        for line in process.stdout or ():
            if not console.show_if_marked(line):
                yield _PREFECT_PREFIX.sub("", line.rstrip())
    except KeyboardInterrupt:  # the stage was interrupted, too, and reports this to Prefect
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        raise


def remove_ended_dvc_users() -> None:
    """Remove ended processes from DVC's list of processes that use stage results (.dvc/tmp/rwlock).

    DVC checks only whether a process of that id exists, as a zombie does until it is reaped. If a kill has cut the list
    short, DVC refuses it for good.
    """
    if not _DVC_USERS.is_file():
        return
    with open(_DVC_USERS.with_name("rwlock.lock"), "a") as guard:
        # A DVC that runs now holds the lock and keeps the list itself.
        with suppress(BlockingIOError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                users = schema.read_json(_DVC_USERS)
                left = {
                    "write": {
                        path: user for path, user in users["write"].items() if _is_running(user["pid"])
                    },
                    "read": {
                        path: kept
                        for path, each in users["read"].items()
                        if (kept := [user for user in each if _is_running(user["pid"])])
                    },
                }
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                left = {}
            writing.write_atomic(_DVC_USERS, json.dumps(left).encode())


def _is_running(pid: int) -> bool:
    try:
        return processes.is_running(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def dvc_error_reason(errors: Sequence[str]) -> str:
    """First error of `dvc repro` in one line. An error about a lock also names the process that holds the lock.

    DVC names the holder on further lines or not at all. The lock's file does.
    """
    first = errors[0].split(": ", 1)[1] if errors else ""
    if first.endswith("is being blocked by:"):
        holders = [f"process {found[1]} ({found[2]})" for line in errors if (found := _HOLDER.search(line))]
        return f"{first} {', '.join(holders)}; wait until that has ended, or end it"
    if first.startswith("Unable to acquire lock") and _DVC_LOCK.exists():
        holder = schema.read_bytes(_DVC_LOCK, 4096).decode(errors="replace").strip()
        return (
            f"{_DVC_LOCK} is held by process {holder}, another DVC in this folder; wait until that has "
            "ended, or end it"
        )
    return first


def stages_of_refresh(target: Stage) -> tuple[str, ...]:
    """Names of all stages that a refresh of the stage `target` runs."""
    if target == OPTIONAL:
        return (*STAGES[: STAGES.index("train") + 1], OPTIONAL)
    return tuple(STAGES[: STAGES.index(target) + 1]) + (AFTER if target == STAGES[-1] else ())


def stage_heading(stage: str, target: Stage, runs: bool = True) -> str:
    """Heading of a stage of a refresh, such as "stage 2/6: measure"."""
    stages = stages_of_refresh(target)
    return f"stage {stages.index(stage) + 1}/{len(stages)}: {stage}{'' if runs else ', nothing changed'}"


def require_pushable() -> None:
    """Raise ShardCoreError unless DVC has a remote to push to and git a branch to commit on."""
    try:
        git("symbolic-ref", "HEAD")
    except ShardCoreError:
        raise ShardCoreError(
            f"{os.getcwd()} is on no branch of a git repository, so {paths.LOCK} cannot be "
            "committed; check one out, or refresh without push"
        ) from None
    process = _start_dvc("config", "core.remote")
    found, _ = process.communicate()
    # The shipped one is a folder of the repository, for what a clone pulls.
    if process.returncode or found.strip() in ("", SHIPPED):
        raise ShardCoreError(
            "DVC has no remote to push to; `dvc remote add --default NAME URL`, or refresh without push"
        )


@task(task_run_name="push-{target}")
def push_data(target: Stage) -> str | None:
    """Push the data of a stage and its dependencies to DVC's remote, and commit dvc.lock and params.yaml to git.

    Returns the commit. None if both were committed already. Pushing the branch is left to its owner.
    """
    process = _start_dvc("push", "--with-deps", target)
    output = process.communicate()[0].strip().splitlines() or ["it said nothing"]
    if process.returncode:
        raise ShardCoreError(f"dvc push ended with exit code {process.returncode}: {output[-1]}")
    kept = [str(paths.LOCK), str(paths.PARAMS)]
    git("add", "--", *kept)
    if not has_uncommitted_changes(*kept):
        get_run_logger().info("%s are committed already", " and ".join(kept))
        return None
    git("commit", "--quiet", "--only", "-m", f"Refresh of stage {target}", "--", *kept)
    commit = git("rev-parse", "HEAD")
    get_run_logger().info("pushed the data, and committed %s as %s", " and ".join(kept), commit)
    return commit


def _start_dvc(*arguments: str, **env: str) -> subprocess.Popen:
    # Stages run `python`, which has to be this one.
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-m", "dvc", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env, "PATH": here},
    )
