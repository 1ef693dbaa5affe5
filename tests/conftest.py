"""Shared by the tests: small tables and problems with known statistics."""

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "cost"))  # laws.py, for all
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker of the suite, and what it starts, is one core
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the processes that tests start would ignore it too

from shardcore.types import Device, Problem, Reuse, Table, Topology, Zipf  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def tables() -> tuple[Table, ...]:
    """Six small tables: reuse histograms and power laws, hot and cold, one never accessed."""
    cold = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
    hot = Reuse((0.2, 0.2, 0.2, 0.2, 0.2) + (0.0,) * 12, 256)
    return (
        Table("cold", 50_000, 16, 4.0, cold), Table("hot", 3_000, 32, 20.0, hot), Table("wide", 2_000, 64, 2.5, cold),
        Table("zipf", 10_000, 8, 10.0, Zipf(1.1)), Table("one", 1, 4, 1.0, Zipf(0.0)),
        Table("empty", 500, 16, 0.0, Reuse((0.0,) * 17, 256)),
    )


@pytest.fixture
def problem(tables) -> Problem:
    return Problem("small", tables, Topology((Device(16 * MIB),) * 4), 256)


@dataclass
class Outcome:
    """What a failure came to: whether the work still ran when it struck, the line that tells of it, what was lost, and whether
    the next run completed."""

    hit: bool = False
    said: str = ""
    lost: int | None = None
    completed: bool = False


@pytest.fixture
def seed() -> int:
    """Of the instants at which tests strike (bench/failures.py gives them); said where a test fails."""
    return time.time_ns() % 10**6


@pytest.fixture
def rng(seed) -> random.Random:
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()
