"""Annealing: trials a second beside another commit, and seconds of an installation's first plan.

    python -m bench.annealing --against d2d0de1        trials a second on 4, 128 and 1,024 devices
    python -m bench.annealing --first-plan             seconds of the processor, of which compiling

--against runs both commits in turn, each in a process of its own. It counts only the compiled search, and takes
the best of some runs, as a machine that others use only ever adds to them.

--first-plan plans with a fresh copy of the library, which has no compiled code, and plans again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench import common
from shardcore import report

ROOT = Path(__file__).parents[1]
TRIALS = {(40, 4): 1_000_000, (856, 128): 1_000_000, (1_500, 1_024): 150_000}
"""Tables and devices, and evaluations of a search."""
RATE = """
import importlib, json, sys, time
from dataclasses import replace
import numpy as np
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal import compiled
from shardcore.tables.generate import generate_pool
anneal, pool = compiled.anneal, [t for t in generate_pool() if t.pooling > 0]
# Earlier commits have one thread.
one = {"threads": 1} if "threads" in Budget.__dataclass_fields__ else {}
# Folders had other names in earlier commits.
types = sys.modules[type(pool[0]).__module__]
topology = importlib.import_module(types.__name__.replace("types", "topology"))
def timed(head, problem, state, trials, *temperatures):
    began = time.process_time()
    found = anneal(head, problem, state, trials, *temperatures)
    counted[:] = counted[0] + trials, counted[1] + time.process_time() - began
    return found
compiled.anneal = timed
for line in sys.stdin:
    n_tables, n_devices, evals = json.loads(line)
    rng, counted = np.random.default_rng(n_tables), [0, 0.0]
    tables = tuple(replace(pool[i % len(pool)], name=f"t{i}", dim=int(rng.choice([16, 32, 64, 128])))
                   for i in range(n_tables))
    each = int(3 * sum(t.bytes for t in tables) / n_devices) + 2**34
    devices = tuple(topology.Device(each, host=f"h{d // 8}") for d in range(n_devices))
    problem = types.Problem("p", tables, topology.Topology(devices), 65536)
    SHARDERS["anneal"](problem, AnalyticModel(types.Setting("gpu", 65536)), budget=Budget(evals, **one))
    print(json.dumps(counted), flush=True)
"""
"""For each line of tables, devices and evaluations prints the trials of annealing, and their seconds."""
FIRST_PLAN = """
import json, time
from types import SimpleNamespace
from shardcore.core import progress
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
progress.time = SimpleNamespace(monotonic=time.process_time)
model = AnalyticModel(Setting("gpu", 65536))
tables = tuple(Table(f"t{i}", 100_000 * (i + 1), 64, 10.0) for i in range(20))
problem = Problem("p", tables, Topology((Device(2**33),) * 4), model.setting.batch)
SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=1000))
print(json.dumps([time.process_time(), time.process_time() - progress.clock()]))
"""
"""Prints seconds of the processor, and those of compiling, in which the clock of searches stands still."""


def trial_rates(folders: list[Path], repeats: int) -> list[tuple[str, list[float]]]:
    """Annealing trials a second with each library copy, for each problem size of TRIALS."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", RATE],
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        for folder in folders
    ]

    def trial_rate(worker: subprocess.Popen, *size: int) -> float:
        worker.stdin.write(json.dumps(size) + "\n")
        worker.stdin.flush()
        trials, seconds = json.loads(worker.stdout.readline())
        return trials / seconds

    for worker in workers:
        trial_rate(worker, 20, 4, 1_000)  # to compile
    found = []
    for size, evals in TRIALS.items():
        common.print_progress("tables, devices:", *size)
        each = [[trial_rate(worker, *size, evals) for worker in workers] for _ in range(repeats)]
        found.append((f"{size[0]:,} × {size[1]:,}", np.max(each, axis=0).tolist()))
    for worker in workers:
        worker.communicate()
    return found


def first_plan_seconds(folder: Path) -> list[list[float]]:
    """CPU seconds, and seconds of compiling, of the first and second search with a library copy."""
    shutil.copytree(ROOT / "shardcore", folder / "shardcore", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", FIRST_PLAN]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return [
        json.loads(
            subprocess.run(command, cwd=folder, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout
        )
        for _ in range(2)
    ]


def main() -> None:
    parser = common.bench_parser(
        __doc__, against=(str, "an earlier commit"), repeats=5, first_plan=(False, "time the first plan")
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.first_plan:
            rows = [
                (name, f"{total:.1f}", f"{compiling:.1f}")
                for name, (total, compiling) in zip(
                    ("first", "second"), first_plan_seconds(Path(folder)), strict=True
                )
            ]
            print(report.text_table(("plan", "processor s", "of these compiling"), rows))
        if args.against:
            command = ["git", "archive", args.against, "shardcore"]
            archive = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
            earlier = Path(folder) / "earlier"
            earlier.mkdir()
            subprocess.run(["tar", "-x", "-C", earlier], input=archive, check=True)
            rows = [
                (size, f"{before / 1e6:.2f} M", f"{now / 1e6:.2f} M", f"{before / now:.2f}")
                for size, (before, now) in trial_rates([earlier, ROOT], args.repeats)
            ]
            print(report.text_table(("tables × devices", args.against, "now", "time of a trial"), rows))


if __name__ == "__main__":
    main()
