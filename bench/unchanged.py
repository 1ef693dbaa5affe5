"""Do searches find what an earlier commit's found, and as fast? Both versions plan the same problems, each
problem right after the other version, in processes of their own; the cost is what each version itself says of
its plan.

  python -m bench.unchanged MODEL --commit facde50                     100 problems, every search that both
                                                                       have
  python -m bench.unchanged MODEL --commit facde50 --problems 10 --sharders local neuroshard

Problems are drawn from the pool: 2 to 16 devices, some on two hosts with given links, some of unequal speed,
some with constraints. A search has a budget in evaluations, so the same version finds the same plan again.
Exit code 1 where a plan is dearer by more than 0.1%, or only one version finds any.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.peers import PEERS
from shardcore import files, report
from shardcore.constraints import Constraints
from shardcore.cost import neural
from shardcore.draws.problems import ProblemConfig, draw_problem
from shardcore.search import SHARDERS
from shardcore.step.links import links_of
from shardcore.tables.generate import generate_pool
from shardcore.topology import Topology
from shardcore.types import Problem, Table

ROOT = Path(__file__).parents[1]
DEVICES = (2, 4, 4, 8, 8, 16)
DEARER = 1e-3
EVALS = {"anneal": 100_000, "anneal_columns": 100_000}
FEW_EVALS = 2_000
"""Of the other searches."""
_WORKER = """
import json, sys, time
from shardcore import files
from shardcore.cost import neural
from shardcore.search import SHARDERS, Budget
planners = dict(SHARDERS)
try:
    from bench.peers import PEERS
    planners |= PEERS
except ImportError:
    pass  # before they were there
model = neural.load(sys.argv[1])
for line in sys.stdin:
    path, name, evals = json.loads(line)
    problem, began = files.read_problem(path), time.process_time()
    name = name if name in planners else name.replace("anneal", "local")  # as it was called before
    if name not in planners:
        found = None
    else:
        try:
            plan = planners[name](problem, model, seed=0, budget=Budget(evals=evals))
            found = plan.provenance["predicted_ms"]
        except Exception as error:
            found = type(error).__name__
    print("=" + json.dumps([found, time.process_time() - began]), flush=True)
"""


def drawn(pool: list[Table], i: int, model: neural.NeuralModel) -> Problem:
    """Problem i: its devices, memory, hosts, speeds and constraints follow from i."""
    rng = np.random.default_rng([18, i])
    n = int(rng.choice([d for d in DEVICES if model.setting.batch % d == 0]))
    shape = ProblemConfig(n, max(4, 2 * n), max(20, 6 * n), 128, float(rng.choice([1.1, 1.5, 3.0])))
    problem = draw_problem(pool, i, model.setting, 18, shape)
    devices, names, links = problem.topology.devices, [t.name for t in problem.tables], {}
    if i % 5 == 1 and n >= 4:
        devices = tuple(dataclasses.replace(d, host=f"h{2 * j // n}") for j, d in enumerate(devices))
        links = {"links": links_of(between_hosts=1.0, within_host=5.0)}
    if i % 7 == 3:
        devices = tuple(dataclasses.replace(d, speed=1.0 if j % 2 else 1.5) for j, d in enumerate(devices))
    constraints = Constraints()
    if i % 6 == 2:
        constraints = Constraints(unsplit=tuple(names[:3]),
                                  together=(tuple(names[4:6]),) if len(names) > 6 else ())
    if i % 9 == 4:
        constraints = Constraints(pinned=((names[0], (0,)), (names[1], (0, 1))))
    return dataclasses.replace(problem, name=f"kept-{i:03}", topology=Topology(devices, **links),
                               constraints=constraints)


@dataclasses.dataclass
class Version:
    """A process that plans with the code of a folder."""

    folder: Path
    model: str

    def __post_init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-c", _WORKER, self.model], cwd=self.folder,
                                        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def plan(self, path: Path, name: str, evals: int) -> tuple[float | str | None, float]:
        """The plan's cost in ms, or why there is none; and the processor's seconds."""
        self.process.stdin.write(json.dumps([str(path), name, evals]) + "\n")
        self.process.stdin.flush()
        said = next(line for line in self.process.stdout if line.startswith("="))  # solvers print, too
        found, seconds = json.loads(said[1:])
        return found, seconds


def compared(versions: tuple[Version, Version], paths: list[Path],
             names: list[str]) -> Iterator[tuple[str, str, list[tuple[float | str | None, float]]]]:
    """Of each problem and sharder, what both versions found. Each version plans once before, to compile."""
    for path in [paths[0], *paths]:
        for name in names:
            evals = EVALS.get(name, FEW_EVALS)
            yield path.stem, name, [version.plan(path, name, evals) for version in versions]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unchanged", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a trained model that both versions read")
    parser.add_argument("--commit", required=True, help="the earlier version")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--sharders", nargs="*", default=[*SHARDERS, *PEERS])
    args = parser.parse_args()
    model, pool = neural.load(args.model), list(generate_pool())
    costs, times, worse = defaultdict(list), defaultdict(list), []
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        earlier = Path(folder) / "earlier"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(earlier), args.commit],
                       cwd=ROOT, check=True)
        try:
            paths = [Path(folder) / f"kept-{i:03}.json" for i in range(args.problems)]
            for i, path in enumerate(paths):
                files.write_problem(path, drawn(pool, i, model))
            versions = (Version(earlier, os.path.abspath(args.model)),
                        Version(ROOT, os.path.abspath(args.model)))
            found = compared(versions, paths, args.sharders)
            for n, (problem, name, (before, after)) in enumerate(found):
                if n < len(args.sharders) or before[0] is None:  # the first, to compile; and what is new
                    continue
                if isinstance(before[0], str) or isinstance(after[0], str):
                    if before[0] != after[0]:
                        worse.append(f"{problem}, {name}: {before[0]}, now {after[0]}")
                    continue
                costs[name].append(after[0] / before[0] - 1)
                times[name].append((before[1], after[1]))
                if costs[name][-1] > DEARER:
                    worse.append(f"{problem}, {name}: {before[0]:.4f} ms, now {after[0]:.4f} ms")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(earlier)], cwd=ROOT, check=True)
    rows = []
    for name, of in costs.items():
        cost, seconds = np.array(of), np.array(times[name]).sum(0)
        rows.append((name, len(cost), f"{np.mean(np.abs(cost) < 1e-9):.0%}", f"{cost.mean():+.2%}",
                     f"{cost.min():+.2%}", f"{cost.max():+.2%}", f"{seconds[1] / seconds[0]:.2f}"))
    print(report.text_table(("sharder", "problems", "same cost", "mean", "least", "most", "time"), rows))
    print("\n".join(["", "dearer or not found:", *worse] if worse else []))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
