"""Sharders against each other: the same problems, the same cost model, one run, one thread.

    python -m bench.search MODEL --problems 20 --devices 4

MODEL is a folder as `python -m shardcore train` writes it. Problems are drawn from the calibrated pool as NeuroShard's benchmark
draws them (10 to 60 tables for 4 devices, as many for each device on more), half of them with dims up to 32, half up to 128, with
explicit links (1 GB/s, 0.2 ms) as only two processes were measured. Costs are relative to neuroshard's, the mean over the
problems that all solved; so are the seconds. `halves` is the local search in NeuroShard's own space: columns, halved. `lower
bound` and `estimate` are those of search/bound.py, rows and replicas included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from shardcore import report, sampling, tables
from shardcore.cost import neural
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.search import SHARDERS, Budget, compare
from shardcore.search.bound import bound
from shardcore.search.local import local
from shardcore.types import Infeasible, Plan, Problem
from shardcore.workload import lower

EVALS = (2_000, 20_000, 100_000, 500_000)


def problems(model: NeuralModel, n: int, devices: int, seed: int) -> list[Problem]:
    pool, per_device = tables.generate_pool(), max(1, devices // 4)
    found = []
    for i in range(n):
        shape = sampling.ProblemConfig(devices, 10 * per_device, 60 * per_device, 32 if i % 2 else 128)
        drawn = sampling.problem(pool, i, model.setting, seed, shape)
        found.append(replace(drawn, topology=replace(drawn.topology, within_host_gbps=1.0, latency_ms=0.2)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=2026, help="of the problems (2026)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = neural.load(args.model)
    arms: dict[str, Callable[[Problem], Plan]] = {n: lambda p, n=n: SHARDERS[n](p, model) for n in SHARDERS if n != "local"}
    for space in ("halves", "columns", "all"):
        arms |= {f"local, {space}, {n:,} evals": lambda p, n=n, space=space: local(p, model, budget=Budget(evals=n), space=space)
                 for n in EVALS}
    cost, seconds = ({name: [] for name in [*arms, "lower bound", "estimate"]} for _ in range(2))
    drawn = problems(model, args.problems, args.devices, args.seed)
    for i, problem in enumerate(drawn):
        for name, arm in arms.items():
            began = time.perf_counter()
            try:
                plan = arm(problem)
                cost[name].append(price(lower(plan, problem), model).total_ms)
            except Infeasible:
                cost[name].append(np.nan)
            seconds[name].append(time.perf_counter() - began)
        least = bound(problem, model)
        cost["lower bound"].append(least.proved_ms)
        cost["estimate"].append(least.estimate_ms)
        print(f"problem {i + 1} of {len(drawn)}: {len(problem.tables)} tables", file=sys.stderr, flush=True)
    if None in cost["lower bound"]:
        del cost["lower bound"]
    found = compare.standings(cost, seconds, "neuroshard")
    theirs = found["neuroshard"]
    rows = [(name, f"{s.solved:.0%}", f"{s.cost:.4f}", f"{s.worst:.3f}", f"{s.seconds:.3f}", f"{s.seconds / theirs.seconds:.2f}")
            for name, s in found.items()]
    print(f"{model.setting}; {len(drawn)} problems, {args.devices} devices; {theirs.common} solved by all\n")
    print(report.text_table(("sharder", "solved", "cost", "worst", "seconds", "of neuroshard's"), rows))


if __name__ == "__main__":
    main()
