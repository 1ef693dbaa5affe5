"""Does a plan ever cost more with a larger budget, more memory or more devices?

    python -m bench.rises --problems 200
    python -m bench.rises --problems 20 --model MODEL

Random problems of pooled tables, of sequences, and of both, on 4 to 64 devices. Each is searched

- with 1%, 10% and 100% of the default budget;
- with 1.02 to 4 times the memory that its tables need, divided evenly;
- on twice and four times the devices.

A rise is a cost of more than 0.1% above that with less. Each search runs by itself: no plan of another one is
given to it. `best kind` compares with every other search under the same budget of evaluations. Costs are
predicted, by AnalyticModel or a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardcore import report
from shardcore.cost import composite
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible
from shardcore.memory import every_plan_bytes
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.search.packing import least_bytes
from shardcore.search.portfolio import DEFAULT
from shardcore.tables.generate import generate_pool
from shardcore.topology import Device, Topology
from shardcore.types import Problem, Setting, Table

RISE = 1e-3
KINDS = ("pooled", "sequences", "both")
BUDGETS = (0.01, 0.1, 1.0)
MEMORY = (1.02, 1.1, 1.5, 2.0, 4.0)
DEVICES = (1, 2, 4)
PART = 0.2
"""Share of the default budget for searches of other memory and devices."""


def drawn(i: int, seed: int) -> tuple[Problem, str]:
    """Problem i with ample memory, and its kind."""
    rng, kind = np.random.default_rng([seed, i]), KINDS[i % len(KINDS)]
    n = int(rng.choice([4, 8, 16]))
    live = [t for t in generate_pool() if t.pooling > 0]
    tables = []
    for j, k in enumerate(rng.choice(len(live), n * int(rng.integers(1, 8)))):
        sequence = kind == "sequences" or (kind == "both" and rng.random() < 0.3)
        pooling = (float(rng.choice([1, 10, 50, 200, 500], p=[0.4, 0.3, 0.15, 0.1, 0.05])) if sequence
                   else live[k].pooling)
        rows = int(rng.choice([2, 10, 1000])) if rng.random() < 0.1 else live[k].rows
        tables.append(replace(live[k], name=f"t{j}", rows=rows, dim=int(rng.choice([16, 32, 64, 128])),
                              pooling=pooling, sequence=sequence))
    batch = int(rng.choice([2048, 8192] if kind != "pooled" else [2048, 8192, 65_536]))
    return on(tables, f"{kind}-{i}", n, batch, bool(rng.random() < 0.5)), kind


def on(tables: Sequence[Table], name: str, n: int, batch: int, hosts: bool) -> Problem:
    """Tables on n devices with ample memory, in hosts of 8 or on one."""
    devices = tuple(Device(1 << 50, host=f"host-{d // 8 if hosts else 0}") for d in range(n))
    between = 25.0 if hosts and n > 8 else None
    return Problem(name, tuple(tables), Topology(devices, None, 200.0, between), batch)


def with_memory(problem: Problem, slack: float) -> Problem:
    """The problem with `slack` times the memory that its tables need, divided evenly."""
    each = int(slack * least_bytes(problem) / len(problem.topology)) + every_plan_bytes(problem)
    devices = tuple(replace(d, memory_bytes=each) for d in problem.topology.devices)
    return replace(problem, topology=replace(problem.topology, devices=devices))


def cost(problem: Problem, model: CostModel, algorithm: str, budget: Budget) -> float:
    """Cost of the plan that a search finds; infinite without one."""
    try:
        found = SHARDERS[algorithm](problem, model.for_problem(problem), budget=budget)
    except Infeasible:
        return np.inf
    return found.provenance["predicted_ms"]


def rises(costs: Sequence[float]) -> list[float]:
    """Each cost over the least of those before, less 1."""
    least = np.minimum.accumulate(costs)
    return [b / a - 1 for a, b in zip(least[:-1], costs[1:], strict=True) if np.isfinite(a)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--model", help="folder of a trained model; default: AnalyticModel")
    args = parser.parse_args()
    loaded = composite.load([args.model]) if args.model else None
    part = Budget(evals=int(PART * DEFAULT.evals))
    found: dict[str, list[float]] = {"budget": [], "memory": [], "devices": [], "best other": []}
    for i in range(args.problems):
        ample, kind = drawn(i, args.seed)
        if loaded:
            ample = replace(ample, global_batch=loaded.setting.batch)
        model = loaded or AnalyticModel(Setting("gpu", ample.global_batch))
        problem = with_memory(ample, float(np.random.default_rng([args.seed, i, 1]).choice(MEMORY)))
        n, batch, hosts = len(ample.topology), ample.global_batch, len(ample.topology.hosts) > 1
        by = {
            "budget": [cost(problem, model, DEFAULT_SHARDER, Budget(evals=int(share * DEFAULT.evals)))
                       for share in BUDGETS],
            "memory": [cost(with_memory(ample, slack), model, DEFAULT_SHARDER, part) for slack in MEMORY],
            "devices": [cost(on(ample.tables, ample.name, n * k, batch, hosts), model, DEFAULT_SHARDER, part)
                        for k in DEVICES],
        }
        others = min(cost(problem, model, name, DEFAULT) for name in SHARDERS
                     if name not in (DEFAULT_SHARDER, "torchrec"))
        by["best other"] = [others, by["budget"][-1]]
        for name, costs in by.items():
            found[name] += rises(costs)
        print(f"{problem.name}: {len(problem.tables)} x {n}, "
              + "; ".join(f"{name} {' '.join(f'{c:.4g}' for c in costs)}" for name, costs in by.items()),
              flush=True)
    print(report.text_table(("more of", "pairs", f"rises above {RISE:.1%}", "largest"), [
        (name, str(len(r)), str(sum(x > RISE for x in r)), f"{max(r):.2%}") for name, r in found.items()]))


if __name__ == "__main__":
    main()
