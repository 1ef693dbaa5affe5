"""Budgets: seconds that a search takes of those given, the first plan of an installation, and trials a second
beside another commit.

    python -m bench.budgets --processor            10 to 100,000 tables, and some that do not fit
    python -m bench.budgets --first-plan [MODEL]   seconds of the processor, compiling apart
    python -m bench.budgets --against d2d0de1      trials of annealing a second at 4, 128 and 1,024 devices

Problems of the first are those of kept.of_size. Rows are as in bench.production; 80% to 120% of a budget and
2 s more are allowed. Where tables do not fit, seconds are those until that is said. --processor: budgets and
seconds are the processor's, as on an idle machine.

--first-plan plans with a fresh copy of the library, whose compiled code has an empty folder, and plans again.
The model is that of a trained model's folder, or AnalyticModel.

--against runs both commits in turn, each in a process of its own, and counts only the compiled annealing.
`time` is what a trial takes now over what it took there, of the medians.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import common
from bench.kept import of_size, with_memory
from bench.production import HEADERS, compiled, row
from shardcore import report
from shardcore.core.constraints import Constraints
from shardcore.core.types import Problem

ROOT = Path(__file__).parents[1]
SIZES = {(10, 8): 3.0, (100, 8): 3.0, (1_000, 8): 5.0, (10_000, 8): 10.0, (100_000, 8): 30.0}
"""Tables and devices, and the budget in seconds."""
RATES = {(40, 4): 3_000_000, (856, 128): 2_000_000, (1_500, 1_024): 1_000_000}
"""Tables and devices, and evaluations of a search."""
BATCH, REPEATS = 2_048, 3
"""Samples of a batch. With many more, an op of 100,000 tables on 8 devices has more ids than FBGEMM runs."""
FIRST_PLAN = """
import json, sys, time
from types import SimpleNamespace
from shardcore.core import progress
from shardcore.cost import neural
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
progress.time = SimpleNamespace(monotonic=time.process_time)
model = neural.load(sys.argv[1]) if sys.argv[1] else AnalyticModel(Setting("gpu", 65536))
tables = tuple(Table(f"t{i}", 100_000 * (i + 1), 64, 10.0) for i in range(20))
problem = Problem("p", tables, Topology((Device(2**33),) * 4), model.setting.batch)
SHARDERS[DEFAULT_SHARDER](problem, model.for_problem(problem), budget=Budget(evals=1000))
print(json.dumps([time.process_time(), time.process_time() - progress.clock()]))
"""
"""Prints seconds of the processor, and those of compiling, in which the clock of searches stands still."""
RATE = """
import json, sys, time
from dataclasses import replace
import numpy as np
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal import compiled
from shardcore.tables.generate import generate_pool
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
anneal, pool = compiled.anneal, [t for t in generate_pool() if t.pooling > 0]
def timed(head, fixed, state, trials, *temperatures):
    began = time.process_time()
    found = anneal(head, fixed, state, trials, *temperatures)
    counted[:] = counted[0] + trials, counted[1] + time.process_time() - began
    return found
compiled.anneal = timed
for line in sys.stdin:
    n_tables, n_devices, evals = json.loads(line)
    rng, counted = np.random.default_rng(n_tables), [0, 0.0]
    tables = tuple(replace(pool[i % len(pool)], name=f"t{i}", dim=int(rng.choice([16, 32, 64, 128])))
                   for i in range(n_tables))
    each = int(3 * sum(t.bytes for t in tables) / n_devices) + 2**34
    devices = tuple(Device(each, host=f"h{d // 8}") for d in range(n_devices))
    problem = Problem("p", tables, Topology(devices), 65536)
    SHARDERS["anneal"](problem, AnalyticModel(Setting("gpu", 65536)), budget=Budget(evals=evals))
    print(json.dumps(counted), flush=True)
"""
"""For each line of tables, devices and evaluations prints the trials of annealing, and their seconds."""


def first_plans(model: str) -> Iterator[list[float]]:
    """Seconds of the processor, and those of compiling, of the first plan with a fresh copy of the library,
    and of the second."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT / "shardcore", Path(folder) / "shardcore", ignore=shutil.ignore_patterns("__pycache__")
        )
        env = {**os.environ, "PYTHONPATH": folder, "NUMBA_CACHE_DIR": f"{folder}/compiled"}
        for _ in range(2):
            yield json.loads(
                subprocess.run(
                    [sys.executable, "-c", FIRST_PLAN, model and str(Path(model).resolve())],
                    cwd=folder,
                    env=env,
                    check=True,
                    text=True,
                    stdout=subprocess.PIPE,
                ).stdout
            )


def sizes() -> Iterator[tuple[str, Problem, float]]:
    """Problems of each size, and of some that do not fit, and seconds."""
    for (n_tables, n_devices), seconds in SIZES.items():
        yield f"{n_tables:,} x {n_devices:,}", of_size(n_tables, n_devices, BATCH), seconds
    for n_tables, n_devices in ((10_000, 1_024), (100_000, 8)):
        problem = of_size(n_tables, n_devices, BATCH)
        yield f"{n_tables:,} x {n_devices:,}, a tenth of the memory", with_memory(problem, 0.1), 5.0
        first, *others = problem.tables
        rows = int(1.1 * problem.topology.devices[0].memory_bytes / (first.dim * 4))
        whole = Constraints(unsplit=(first.name,))
        yield (
            f"{n_tables:,} x {n_devices:,}, the largest stays whole",
            replace(problem, tables=(replace(first, rows=rows), *others), constraints=whole),
            5.0,
        )


@contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    """A folder with an earlier commit's files."""
    with tempfile.TemporaryDirectory(prefix="earlier-") as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "shardcore"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def rates(folders: list[Path]) -> Iterator[tuple[tuple[int, int], list[float]]]:
    """For each of RATES the trials a second with the code of each folder, which take turns."""
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

    def rate(worker: subprocess.Popen, n_tables: int, n_devices: int, evals: int) -> float:
        worker.stdin.write(json.dumps([n_tables, n_devices, evals]) + "\n")
        worker.stdin.flush()
        trials, seconds = json.loads(worker.stdout.readline())
        return trials / seconds

    for worker in workers:
        rate(worker, 20, 4, 1_000)  # to compile
    for size, evals in RATES.items():
        each = [[rate(worker, *size, evals) for worker in workers] for _ in range(REPEATS)]
        yield size, np.median(each, axis=0).tolist()
    for worker in workers:
        worker.communicate()


def main() -> None:
    parser = common.parser(
        __doc__,
        processor=(False, "count the processor's seconds"),
        most=(max(n for n, _ in SIZES), "leave out problems of more tables"),
        against=(str, "an earlier commit"),
    )
    parser.add_argument("--first-plan", nargs="?", const="", metavar="MODEL")
    args = parser.parse_args()
    if args.first_plan is not None:
        plans = zip(("first", "second"), first_plans(args.first_plan), strict=True)
        rows = [
            (name, *(f"{s:.1f}" for s in (total, compiling, total - compiling)))
            for name, (total, compiling) in plans
        ]
        print(report.text_table(("plan", "processor s", "compiling s", "without"), rows))
    elif args.against:
        rows = []
        with unpacked(args.against) as earlier:
            for (n_tables, n_devices), (before, now) in rates([earlier, ROOT]):
                rows.append(
                    (
                        f"{n_tables:,} x {n_devices:,}",
                        *(f"{r / 1e6:.2f} M" for r in (before, now)),
                        f"{before / now:.2f}",
                    )
                )
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        headers = ("tables x devices", f"trials a second at {args.against}", "now", "time")
        print(report.text_table(headers, rows))
    else:
        if args.processor:
            common.count_processor_seconds()
        compiled()
        rows = []
        for name, problem, seconds in sizes():
            if len(problem.tables) <= args.most:
                rows.append(row(name, problem, None, seconds))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        print(report.text_table(HEADERS, rows))


if __name__ == "__main__":
    main()
