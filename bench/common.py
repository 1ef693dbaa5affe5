"""Shared by the benches: command lines, progress, lines of JSON, drawn problems, arms and intervals."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.types import Plan, Problem, Setting
from shardcore.cost.metrics import MeanInterval
from shardcore.io import dataset, writing

LINKS = {"links": make_links(within_host=1.0, latency_ms=0.2)}
"""Given where only two processes were measured."""
Arm = Callable[[Problem], Plan]


# --- the command line ---------------------------------------------------------------------------------------


def bench_parser(
    doc: str | None, arguments: Mapping[str, Any] | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Argument parser of a benchmark, with its module docstring as help.

    arguments: positional ones by name: the help, or a type and the help.
    options: by name the default, or the default and the help. A type in the place of the default: there is
        none. `...`: the option is needed, and a path. False: a switch. A tuple: one or more values.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in (arguments or {}).items():
        kind, words = (str, given) if isinstance(given, str) else given
        made.add_argument(name, type=kind, help=words)
    for name, given in options.items():
        default, words = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        flag, words = f"--{name.replace('_', '-')}", (words or "").replace("%", "%%")
        if default is False:
            made.add_argument(flag, action="store_true", help=words)
        elif default is ...:
            made.add_argument(flag, type=Path, required=True, help=words)
        elif isinstance(default, type):
            made.add_argument(flag, type=default, help=words)
        elif isinstance(default, list):
            made.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=words)
        else:
            shown = f"{words} ({default})" if words else f"({default})"
            made.add_argument(flag, type=type(default), default=default, help=shown)
    return made


def print_progress(*words: Any) -> None:
    """Print the progress of a benchmark on standard error."""
    print(*words, file=sys.stderr, flush=True)


# --- files --------------------------------------------------------------------------------------------------


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """Read the rows that a benchmark run wrote. [] without a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def read_rows_of_settings(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the rows of a benchmark run. Raises ShardCoreError if the run had different settings."""
    rows = read_rows(path)
    for name, value in settings.items():
        if other := next((row for row in rows if row.get(name) != value), None):
            raise ShardCoreError(
                f"{path} holds rows with {name} {other.get(name)}; this run has {value} and needs another --out"
            )
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a benchmark run atomically."""
    writing.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def write_png(path: Path, figure: Any) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    writing.write_atomic(path, content.getvalue())


def read_or_make(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read a JSON file, or make and write its content if missing."""
    if not path.exists():
        writing.write_json(path, make())
    return json.loads(path.read_text())


def single_setting(folder: str | Path) -> Setting:
    """Only setting of a dataset's samples. Raises ShardCoreError for several settings."""
    settings = dataset.dataset_settings(folder)
    if len(settings) != 1:
        words = "; ".join(map(str, settings))
        raise ShardCoreError(f"{folder} holds samples of [{words}]; this bench needs one setting")
    return settings[0]


# --- arms and figures ---------------------------------------------------------------------------------------


def timed_plan(
    arm: Arm, problem: Problem, clock: Callable[[], float] = time.process_time
) -> tuple[Plan | None, float]:
    """Plan of a sharding arm, None if infeasible, and seconds of the search."""
    began = clock()
    try:
        plan = arm(problem)
    except Infeasible:
        plan = None
    return plan, clock() - began


def interval_text(found: MeanInterval, form: str = "{:.3f}") -> str:
    return f"{form.format(found.mean)} ({form.format(found.low)} to {form.format(found.high)})"
