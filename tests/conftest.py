"""Shared by the tests: what they need of the machine, how they are dealt to workers, and small tables and
problems."""

import fcntl
import gc
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

HERE = Path(__file__).parent
WARM_UP = HERE / "warm_up.py"
sys.path += [str(HERE / room) for room in ("cost", "search", "torchrec")]  # modules for all
# What a person has set for other work must not reach the tests, nor the processes that they start.
OTHERS = (
    "PREFECT_",
    "MLFLOW_",
    "RAY_",
    "DVC_",
    "SHARDCORE_OWNED",
    "DISPLAY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "PYTHONDONTWRITEBYTECODE",
)
for name in [n for n in os.environ if n.upper().startswith(OTHERS)]:
    del os.environ[name]
sys.dont_write_bytecode = False  # or each of some hundred processes compiles what it imports anew
os.environ |= {
    "OMP_NUM_THREADS": "1",  # a worker of the suite, and what it starts, is one core
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

MEMORY = "/dev/shm"
if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1 << 30:
    # A disk lets databases wait for each of their commits.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    os.environ["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "true"  # or git's last line is of the file system's end

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts into the background
    # or the processes that tests start would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("shardcore.testing")
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("any machine")

from boxes import can_box  # noqa: E402
from ray_fixtures import (  # noqa: E402, F401
    actor_processes,
    another_node,
    cluster,
    ray_env,
    second_node,
    written_stack,
)

from shardcore.core.access_statistics import Reuse, Zipf  # noqa: E402
from shardcore.core.topology import Device, Topology  # noqa: E402
from shardcore.core.types import Problem, Table  # noqa: E402

MIB = 1 << 20

# --- what the machine has -----------------------------------------------------------------------------------


def can_mount() -> bool:
    """Tell if a small file system can be mounted, in a separate mount namespace."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


HAS = {
    "box": can_box,
    "chromium": lambda: bool(shutil.which("chromium")),
    "mount": can_mount,
    "prometheus": lambda: bool(shutil.which("prometheus")),
    "torchrec": lambda: bool((spec := importlib.util.find_spec("torchrec")) and spec.origin),
    # no tests/torchrec
}
"""Needs of some tests, which are skipped without them. CI names all in SHARDCORE_REQUIRE, so that it skips none."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    required = os.environ.get("SHARDCORE_REQUIRE", "").split()
    if unknown := sorted(set(required) - set(HAS)):
        pytest.exit(f"SHARDCORE_REQUIRE names {unknown[0]!r}; known are {', '.join(HAS)}", returncode=4)
    if missing := [name for name in required if not HAS[name]()]:
        pytest.exit(
            f"SHARDCORE_REQUIRE names {', '.join(missing)}, which this machine lacks; "
            "its tests would be skipped",
            returncode=4,
        )
    # Compiles while workers collect and measure. It inherits the lock, which is free again when it has ended.
    with open(WARM_UP) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.Popen(
            [sys.executable, WARM_UP],
            cwd=HERE.parent,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            pass_fds=[lock.fileno()],
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without looking for garbage, and never look through what was imported then: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@cache
def compiled() -> None:
    """Wait until what the suite uses is compiled."""
    with open(WARM_UP) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Most tests of gangs, which begin, need nothing compiled. They run meanwhile.
    if not item.path.is_relative_to(HERE / "measure") or item.path.is_relative_to(HERE / "measure/sampling"):
        compiled()


# --- how tests are dealt to the workers ---------------------------------------------------------------------

RAY = (
    "flows/test_measure.py",
    "tasks/test_measure_pairs.py",
    "tasks/test_measure_tasks.py",
    "tasks/test_ray_cluster.py",
    "tasks/test_ray_replay.py",
    "tasks/test_ray_transport.py",
    "tasks/test_workers.py",
)
"""These use one Ray cluster, and all other flows one Prefect server. So they are `long`."""
FIRST = (
    "flows/test_pipeline.py",
    "flows/test_failures.py",
    "tasks/test_stack_runs.py",
    *RAY,
    "measure/test_",  # not its sampling, which needs what is compiled
    "torchrec",
    "cost",
    "search/test_conformance_sharders.py",
    "test_testing.py",
    "measure/sampling",
    "flows",
    "tasks",
    "plans/test_publisher.py",
    "test_docs.py",
    "test_fuzz.py",
    "search",
)
"""The longest begin first, so that the workers end together."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file stay on one worker, which has the fixtures that they share; so do all that use Ray, all
    that use one Prefect server, all that train in processes, which are forked from one server, those of the
    room cost, which use one model, and those that compare with the cheapest of all plans."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            if file in RAY:
                return "ray"
            if file.startswith("flows/") and file != "flows/test_failures.py":  # which kills its own servers
                return "prefect"
            if file in ("test_testing.py", "search/test_conformance_sharders.py"):
                return "optima"
            if file.startswith("cost/"):
                return "cost"
            return "torchrec" if file.startswith("torchrec/") or file == "step/test_memory.py" else file

    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        path = str(item.path.relative_to(HERE))
        return next((i for i, start in enumerate(FIRST) if path.startswith(start)), len(FIRST))

    items.sort(key=turn)


# --- tables and problems ------------------------------------------------------------------------------------


@pytest.fixture
def tables() -> tuple[Table, ...]:
    """Six small tables: reuse histograms and power laws, hot and cold, one never accessed."""
    cold = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
    hot = Reuse((0.2, 0.2, 0.2, 0.2, 0.2) + (0.0,) * 12, 256)
    return (
        Table("cold", 50_000, 16, 4.0, cold),
        Table("hot", 3_000, 32, 20.0, hot),
        Table("wide", 2_000, 64, 2.5, cold),
        Table("zipf", 10_000, 8, 10.0, Zipf(1.1)),
        Table("one", 1, 4, 1.0, Zipf(0.0)),
        Table("empty", 500, 16, 0.0, Reuse((0.0,) * 17, 256)),
    )


@pytest.fixture
def problem(tables) -> Problem:
    return Problem("small", tables, Topology((Device(16 * MIB),) * 4), 256)


@pytest.fixture(scope="session")
def bound_once() -> Callable[..., Any]:
    """The bound of a problem under a model, found once however many pages show it. It is one of plans by columns,
    which takes least time."""
    from shardcore.search.bound.lower_bound import prove_lower_bound

    found: dict[tuple[Problem, int], Any] = {}

    def once(problem: Problem, model: Any) -> Any:
        key = problem, id(model)
        if key not in found:
            found[key] = (
                prove_lower_bound(problem, model, ()),
                model,
            )  # kept, so that no other model gets its id
        return found[key][0]

    return once


@pytest.fixture
def short_explanations(monkeypatch, bound_once) -> None:
    """Pages of published plans compare with short searches, and not with more memory or devices."""
    from shardcore.search import Budget

    monkeypatch.setattr("shardcore.plans.publisher._EXPLAIN", Budget(evals=10))
    monkeypatch.setattr("shardcore.search.explain.MORE_MEMORY", ())
    monkeypatch.setattr("shardcore.search.explain.MOST_TIMES_DEVICES", 1)
    monkeypatch.setattr("shardcore.search.explain.prove_lower_bound", bound_once)


@dataclass
class Outcome:
    """Outcome of a failure.

    hit: True if the work still ran when it struck.
    said: line that reports it.
    lost: number of samples that were lost.
    completed: True if the next run completed.
    """

    hit: bool = False
    said: str = ""
    lost: int | None = None
    completed: bool = False


@pytest.fixture
def seed() -> int:
    """Seed of the instants at which tests strike; shown where a test fails."""
    return time.time_ns() % 10**6


@pytest.fixture
def rng(seed) -> random.Random:
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()
