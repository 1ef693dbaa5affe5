"""Remedies: how much more memory, or how many more devices, make a problem fit."""

from __future__ import annotations

import math
from dataclasses import replace

from shardcore.core.constraints import Constraints
from shardcore.core.topology import DEFAULT_RESERVE, default_reserve
from shardcore.core.types import Problem
from shardcore.search.state.packing import roomiest
from shardcore.step.memory import gib

MOST_DEVICES = 256
"""The largest number of further devices that a remedy suggests."""


def remedy(problem: Problem) -> str:
    """How much more memory per device, or how many more devices, would be enough, by the exact count.

    The problem must not fit.
    """
    lacks = roomiest(problem)[1]
    reserved_by_default = problem.constraints.reserved_bytes == default_reserve(problem.topology.devices)
    # Of more memory, more is kept free.
    more = round(lacks / (1 - DEFAULT_RESERVE)) if reserved_by_default else lacks
    remedies = [f"{_enough(more)} more per device"]
    if n := _more_devices(problem):
        remedies.append(f"{n} more device{'s' * (n > 1)} like the largest")
    # Would it fit without pins and bundles?
    loose = replace(
        problem,
        job=replace(problem.job, tower_ratio=None),
        constraints=Constraints(problem.constraints.reserved_bytes, problem.constraints.unsplit),
    )
    eased = loose.constraints != problem.constraints and _fits(loose)
    return (
        f"By the exact count {_enough(lacks)} are lacking. It would fit with {' or '.join(remedies)}, "
        "or with less in the tables"
        + ", or without its pins and groups" * eased
        + ", or with rows in host memory (python -m shardcore tiers)"
        * (not any(t.in_host_memory for t in problem.tables))
    )


def _fits(problem: Problem) -> bool:
    plan, lacks = roomiest(problem, quick=True)
    return plan is not None and lacks <= 0


def _more_devices(problem: Problem) -> int | None:
    """How many more devices like the largest are enough. As many as divide the batch. None if too many."""
    devices = problem.topology.devices
    largest = replace(max(devices, key=lambda d: d.memory_bytes), host=devices[-1].host)
    numbers = [n for n in range(1, MOST_DEVICES + 1) if problem.global_batch % (len(devices) + n) == 0]

    def enough(n: int) -> bool:
        return _fits(replace(problem, topology=replace(problem.topology, devices=(*devices, *[largest] * n))))

    # What is enough stays enough with more. Doubling first, for many devices take long to try.
    low, high = 0, 1
    while high <= len(numbers) and not enough(numbers[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(numbers))
    if high <= low or (low and not enough(numbers[high - 1])):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(numbers[middle - 1]) else (middle, high)
    return numbers[high - 1]


def _enough(n_bytes: int) -> str:
    """A size for people that is not less, whatever its digits."""
    if n_bytes < 0.1 * 2**20:
        return gib(n_bytes)
    unit = 2**30 if n_bytes >= 0.1 * 2**30 else 2**20
    return gib(math.ceil(10 * n_bytes / unit) / 10 * unit)
