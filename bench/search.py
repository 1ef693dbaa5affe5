"""Sharders against each other: the same problems, the same cost model, one run, one thread.

    python -m bench.search MODEL --problems 20 --devices 4

MODEL is a folder as `python -m shardcore train` writes it. Problems are drawn from the calibrated pool as NeuroShard's benchmark
draws them (10 to 60 tables for 4 devices, as many for each device on more), half of them with dims up to 32, half up to 128, with
explicit links (1 GB/s, 0.2 ms) as only two processes were measured. Costs are relative to neuroshard's, the mean over the
problems that all solved; so are the seconds. `halves` is the local search in NeuroShard's own space: columns, halved. `equal
work` is an estimate of what no plan without replicas gets far below, and no bound that was proved: all tables as one op, its
drivers divided evenly over the devices, and the exchange of columns divided likewise.
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
from shardcore.search import SHARDERS, Budget
from shardcore.search.local import local
from shardcore.types import OUTPUT_BYTES, Infeasible, Plan, Problem, Shard
from shardcore.workload import Traffic, lower

EVALS = (2_000, 20_000, 100_000, 500_000)


def problems(model: NeuralModel, n: int, devices: int, seed: int) -> list[Problem]:
    pool, per_device = tables.generate_pool(), max(1, devices // 4)
    found = []
    for i in range(n):
        shape = sampling.ProblemConfig(devices, 10 * per_device, 60 * per_device, 32 if i % 2 else 128)
        drawn = sampling.problem(pool, i, model.setting, seed, shape)
        found.append(replace(drawn, topology=replace(drawn.topology, within_host_gbps=1.0, latency_ms=0.2)))
    return found


def equal_work_ms(problem: Problem, model: NeuralModel) -> float:
    speed = np.array([d.speed for d in problem.topology.devices])
    sums = model.encode([Shard.whole(t) for t in problem.tables]).sum(0)
    compute = float(model.head(sums / len(speed))) * len(speed) / speed.sum()
    columns = sum(t.dim for t in problem.tables) * problem.global_batch * OUTPUT_BYTES / len(speed)
    even = Traffic.of_columns(np.full(len(speed), columns))
    return compute + float(model.comm(even, np.full(len(speed), compute), problem.topology).total_ms.max())


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
    cost, seconds = ({name: [] for name in [*arms, "equal work"]} for _ in range(2))
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
        cost["equal work"].append(equal_work_ms(problem, model))
        print(f"problem {i + 1} of {len(drawn)}: {len(problem.tables)} tables", file=sys.stderr, flush=True)
    costs = {name: np.array(v) for name, v in cost.items()}
    common = np.all([np.isfinite(v) for v in costs.values()], axis=0)
    theirs, their_s = costs["neuroshard"], np.array(seconds["neuroshard"])
    if not common.any():
        sys.exit(f"no problem was solved by all: {', '.join(f'{k} {np.isfinite(v).mean():.0%}' for k, v in costs.items())}")
    rows = []
    for name, v in costs.items():
        ratio = (v / theirs)[common]
        own_s = np.array(seconds[name])[common].mean() if seconds[name] else np.nan
        rows.append((name, f"{np.isfinite(v).mean():.0%}", f"{ratio.mean():.4f}", f"{ratio.max():.3f}", f"{own_s:.3f}",
                     f"{own_s / their_s[common].mean():.2f}"))
    print(f"{model.setting}; {len(drawn)} problems, {args.devices} devices; {common.sum()} solved by all\n")
    print(report.text_table(("sharder", "solved", "cost", "worst", "seconds", "of neuroshard's"), rows))


if __name__ == "__main__":
    main()
