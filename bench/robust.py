"""Does the search exploit the model's errors? Plans of the search and random ones, predicted and replayed on two processes.

    python -m shardcore measure --samples 700 --exchanges 120 --tolerance 0.05 --max-repeats 8 --minutes 10 --out DATA
    python -m shardcore train DATA --out MODEL
    python -m bench.robust MODEL --problems 12

MODEL must be of this machine and for two processes. Problems are drawn from the calibrated pool: 8 to 24 tables of 1 to 512 MiB
at dims up to 16. All plans of a problem are replayed in alternation. The gap is |predicted / replayed - 1|; tau, Kendall's,
over all plans of a problem. `chosen` is the plan that the physical model finds good too (search/choose.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import torch

from shardcore import report, sampling, tables
from shardcore.cost import neural
from shardcore.cost.metrics import kendall_tau
from shardcore.cost.model import at_confidence, price
from shardcore.measure import replay
from shardcore.search import SHARDERS, Budget, choose
from shardcore.search.local import local
from shardcore.types import Plan, Problem
from shardcore.workload import lower

SMALLEST, LARGEST = 1 << 20, 512 << 20
BUDGET = Budget(evals=100_000)


def problems(model: neural.NeuralModel, n: int, seed: int) -> list[Problem]:
    pool = [dataclasses.replace(t, dim=16) for t in tables.generate_pool()]
    small = [t for t in pool if SMALLEST <= t.bytes <= LARGEST]
    return [sampling.problem(small, i, model.setting, seed, sampling.ProblemConfig(2, 8, 24, 16)) for i in range(n)]


def plans(problem: Problem, model: neural.NeuralModel) -> dict[str, Plan]:
    models = [model, neural.physical(model)]
    sure = at_confidence(model, 0.9)
    found = {"local": local(problem, model, budget=BUDGET), "local, 90% confidence": local(problem, sure, budget=BUDGET),
             "local_all": local(problem, model, budget=BUDGET, space="all"),
             "local_all, 90% confidence": local(problem, sure, budget=BUDGET, space="all"),
             "chosen": choose.choose(choose.candidates(problem, models, "local", range(3), BUDGET), problem, models).plan}
    found |= {n: SHARDERS[n](problem, model) for n in ("neuroshard", "size_lookup_greedy", "dim_greedy")}
    return found | {f"random {seed}": SHARDERS["random"](problem, model, seed=seed) for seed in range(3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of this machine")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seed", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = neural.load(args.model)
    gaps, costs, taus = {}, {}, []
    for i, problem in enumerate(problems(model, args.problems, args.seed)):
        found = plans(problem, model)
        workloads = [lower(plan, problem) for plan in found.values()]
        predicted = np.array([price(w, model).total_ms for w in workloads])
        config = replay.ReplayConfig(repeats=args.repeats)
        replayed = np.array([c.total_ms for c in replay.replay_all(workloads, model.setting, config, "cpu")])
        taus.append(kendall_tau(predicted, replayed))
        for name, p, r in zip(found, predicted, replayed, strict=True):
            kind = name.split(" ")[0] if name.startswith("random") else name
            gaps.setdefault(kind, []).append(p / r - 1)
            costs.setdefault(kind, []).append(r / replayed[0])
        print(f"problem {i + 1} of {args.problems}: {len(problem.tables)} tables, local {replayed[0]:.2f} ms replayed, "
              f"{predicted[0]:.2f} predicted", file=sys.stderr, flush=True)
    print(f"{model.setting}; {args.problems} problems, 2 processes; tau {np.mean(taus):.3f}\n")
    rows = [(kind, len(g), f"{100 * np.mean(np.abs(g)):.1f}%", f"{100 * np.mean(g):+.1f}%", f"{np.mean(costs[kind]):.3f}",
             f"{np.std(costs[kind]) / np.sqrt(len(g)):.3f}") for kind, g in gaps.items()]
    print(report.text_table(("plans", "replays", "gap", "bias", "replayed cost over local's", "standard error"), rows))


if __name__ == "__main__":
    main()
