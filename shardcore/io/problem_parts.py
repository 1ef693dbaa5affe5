"""Digests of a problem's parts, kept with its plans. When a plan is for another problem, they show what differs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from shardcore.core.types import Problem, Table

DIGITS = 8
"""Hex digits of a part's digest. Few are enough, as the digest of the whole problem detects differences."""


def parts_of(problem: Problem) -> dict[str, str]:
    """Digest of each part: the problem's own fields, and those of its topology, devices and tables."""
    topology, by_name = problem.topology, sorted(problem.tables, key=lambda t: t.name)
    values: dict[str, Any] = {
        name: getattr(problem, name) for name in ("global_batch", "optimizer", "constraints")
    }
    values |= {f"job.{name}": value for name, value in dataclasses.asdict(problem.job).items()}
    values |= {
        f"topology.{f.name}": getattr(topology, f.name)
        for f in dataclasses.fields(topology)
        if f.name != "devices"
    }
    values["number of devices"] = len(topology)
    values |= {
        f"{name} of devices": [getattr(d, name) for d in topology.devices]
        for name in ("memory_bytes", "speed", "host")
    }
    values["name of tables"] = [t.name for t in by_name]
    values["order of tables"] = [t.name for t in problem.tables]
    values |= {
        f"{f.name} of tables": [getattr(t, f.name) for t in by_name]
        for f in dataclasses.fields(Table)
        if f.name != "name"
    }
    return {name: _digest(value) for name, value in values.items()}


def refusal(kept: Mapping[str, str], problem: Problem) -> str:
    """Names of the parts that differ, for the end of a message. "" if none differs.

    kept: digests of a problem's parts, from `parts_of`.
    """
    names = [name for name, digest in parts_of(problem).items() if kept.get(name, digest) != digest]
    # If names or the number of devices differ, so do all lists in their order.
    for first, rest in (("name of tables", " of tables"), ("number of devices", " of devices")):
        if first in names:
            names = [name for name in names if name == first or not name.endswith(rest)]
    return f"; they differ in {', '.join(names[:5])}{', ...' * (len(names) > 5)}" if names else ""


def _digest(value: Any) -> str:
    text = json.dumps(value, default=dataclasses.asdict, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
