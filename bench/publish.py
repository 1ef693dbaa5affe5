"""How long publishing takes: many problems in one run of the flow, from a start to the published plans.

    python -m bench.publish MODEL --problems 100

MODEL is a folder as `python -m shardcore train` writes it. In a scratch project, with a Prefect server and an
MLflow store of its own, the model becomes champion, and `python -m flows.publish` runs three times for
problems drawn from the calibrated pool: with nothing published, again, and with other statistics of every
table. Times are of the whole command.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from shardcore import report
from shardcore.core.types import Problem, Setting
from shardcore.cost import neural
from shardcore.io import files
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.plans import store
from shardcore.tables.generate import generate_pool

ROOT = Path(__file__).parents[1]
RUNS = ("first", "again", "other statistics")
REGISTER = """
import sys
from pathlib import Path
from tasks import registry
client = registry.connect()
version = registry.register(client, Path(sys.argv[1]), None, {})
client.set_registered_model_alias(version.name, registry.CHAMPION, version.version)
"""


def problems(setting: Setting, n: int, seed: int) -> list[Problem]:
    """4 devices, 12 to 60 tables each."""
    pool, shape = generate_pool(), ProblemConfig(min_tables=12, max_tables=60)
    return [replace(draw_problem(pool, i, setting, seed, shape), name=f"problem-{i:03}") for i in range(n)]


def shifted(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same tables, looked up 0.5 to 2 times as much each."""
    return replace(
        problem,
        tables=tuple(replace(t, pooling=t.pooling * float(rng.uniform(0.5, 2))) for t in problem.tables),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a trained model")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3, help="the first so many of them (3)")
    parser.add_argument("--seed", type=int, default=7, help="of the problems (7)")
    args = parser.parse_args()
    setting = neural.load(args.model).setting
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("shardcore", "tasks", "flows"):
            shutil.copytree(ROOT / name, folder / name)
        (folder / "params.yaml").write_text(
            yaml.safe_dump({"setting": {"hardware": setting.hardware, "batch": setting.batch}})
        )
        env = {
            **os.environ,
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "PYTHONPATH": str(folder),
            "PREFECT_HOME": str(folder / "prefect"),
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(
            [sys.executable, "-c", REGISTER, str(args.model.resolve())],
            cwd=folder,
            env=env,
            check=True,
            capture_output=True,
        )
        found, rng, rows = problems(setting, args.problems, args.seed), np.random.default_rng(args.seed), []
        for what in RUNS[: args.runs]:
            if what == "other statistics":
                found = [shifted(p, rng) for p in found]
            for problem in found:
                files.write_problem(folder / "problems" / f"{problem.name}.json", problem)
            began, used = time.monotonic(), cpu_s()
            subprocess.run(
                [sys.executable, "-m", "tasks.services", sys.executable, "-m", "flows.publish"],
                cwd=folder,
                env=env,
                check=True,
                capture_output=True,
            )
            seconds = time.monotonic() - began
            last = [store.last(folder / "plans", p.name) for p in found]
            outcomes = Counter(d.outcome for d in last)
            rows.append(
                (
                    what,
                    f"{seconds:.0f}",
                    f"{cpu_s() - used:.0f}",
                    ", ".join(f"{n} {k}" for k, n in outcomes.items()),
                )
            )
        size = sum(p.stat().st_size for p in (folder / "plans").rglob("*") if p.is_file())
        print(report.text_table(("run", "s", "CPU s", "outcomes"), rows))
        print(
            f"{args.problems} problems, {sum(len(p.tables) for p in found)} tables; {os.cpu_count()} "
            f"cores, load {os.getloadavg()[1]:.1f}; {size / 2**20:.1f} MiB of plans, decisions and pages"
        )


def cpu_s() -> float:
    """That ended subprocesses have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
