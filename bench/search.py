"""Sharders against each other: the same problems, the same cost model, one run, one thread.

    python -m bench.search MODEL --problems 100 --devices 4
    python -m bench.search MODEL --problems 10 --devices 64 --seconds 5 --unequal
    python -m bench.search MODEL --problems 20 --memory 1.1
    python -m bench.search MODEL --problems 30 --two-ranks 128 --seed 901 --no-bound

MODEL is a folder as `python -m shardcore train` writes it. Problems are drawn from the calibrated pool as
NeuroShard's benchmark draws them (10 to 60 tables for 4 devices, as many for each device on more), half of
them with dims up to 32, half up to 128, with explicit links (1 GB/s, 0.2 ms; above 8 devices in hosts of 8,
0.5 GB/s between them) as only two processes were measured. Without --seconds each sharder takes the time it
takes, annealing in several spaces and lengths; with it all searches have as long (a sweep finishes its
first run). Costs are relative to neuroshard's, the mean over the problems that all solved; so are the
seconds. Nothing is compiled or imported while a clock runs: all sharders run once before. `best greedy` is
the cheapest of the greedy orders, with the seconds of all.
`halves` is annealing in NeuroShard's own space: columns, halved. The bound is that of
search/bound/lower_bound.py.
--two-ranks plans what bench.replays replays, with the links of MODEL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from bench import common, replays
from bench.common import print_progress
from bench.kept import with_memory_times
from bench.peers import PEERS
from shardcore import report
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost import neural
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search import SHARDERS, Budget, greedy
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.search.portfolio import search_with_annealing as anneal
from shardcore.stages import evaluate
from shardcore.step.lower import lower
from shardcore.tables.generate import generate_pool

EVALS = (2_000, 20_000, 200_000)


def draw_problems(
    model: NeuralModel,
    n: int,
    devices: int,
    seed: int,
    unequal: bool = False,
    pool: Sequence[Table] | None = None,
) -> list[Problem]:
    """unequal: every second device has half the speed and half the memory."""
    pool, per_device = pool or generate_pool(), max(1, devices // 4)
    found = []
    for i in range(n):
        shape = ProblemConfig(devices, 10 * per_device, 60 * per_device, 32 if i % 2 else 128)
        drawn = draw_problem(pool, i, model.setting, seed, shape)
        large = drawn.topology.devices[0].memory_bytes * (4 if unequal else 3) // 3
        weaker = [1 + unequal * (d % 2) for d in range(devices)]
        found_devices = tuple(Device(large // w, 1 / w, f"host-{d // 8}") for d, w in enumerate(weaker))
        links = {
            "links": make_links(within_host=1.0, latency_ms=0.2, between_hosts=0.5 if devices > 8 else None)
        }
        found.append(replace(drawn, topology=Topology(found_devices, **links)))
    return found


def warm_up(problem: Problem, model: NeuralModel, arms: Mapping[str, Callable[[Problem], Plan]]) -> None:
    """Run all sharding arms on a tiny problem, so that compiling and imports precede the timing."""
    few = replace(problem, name="warm-up", tables=problem.tables[:2])
    for arm in arms.values():
        common.timed_plan(arm, few)


def add_best_greedy(cost: dict[str, list[float]], seconds: dict[str, list[float]]) -> None:
    """Add an arm to the results: the best greedy order on each problem, with the seconds of all orders."""
    costs = np.array([cost[name] for name in greedy.ORDERS], dtype=float)
    cost["best greedy"] = np.fmin.reduce(costs, 0).tolist()
    seconds["best greedy"] = np.sum([seconds[name] for name in greedy.ORDERS], 0).tolist()


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a trained model"},
        problems=20,
        devices=4,
        seed=(2026, "of the problems"),
        seconds=(float, "all searches have as long (default: each as long as it takes)"),
        unequal=(False, "every second device has half the speed and half the memory"),
        two_ranks=(int, "problems of bench.replays, with dims up to MAX_DIM"),
        memory=(float, "memory of all devices over what the tables need, such as 1.02 (default: ample)"),
        no_bound=(False, "leave out the bound, which takes longer than all sharders together"),
    )
    parser.add_argument("--sharders", nargs="+", metavar="NAME", help="no others; neuroshard is always there")
    args = parser.parse_args()
    if args.two_ranks and (args.unequal or args.devices != parser.get_default("devices")):
        parser.error("--two-ranks has its own devices: leave out --devices and --unequal")
    torch.set_num_threads(1)
    model = neural.load(args.model)
    args.devices = 2 if args.two_ranks else args.devices
    planners = {**SHARDERS, **PEERS}
    sharders = [
        n
        for n in planners
        if not n.startswith("anneal") and (not n.startswith("torchrec") or args.devices <= 4 or args.seconds)
    ]
    limit = Budget(seconds=args.seconds) if args.seconds else None
    arms: dict[str, Callable[[Problem], Plan]] = {
        n: lambda p, n=n: planners[n](p, model, budget=limit) for n in sharders
    }
    for space in ("halves", "columns", "all"):
        for budget in (limit,) if limit else map(Budget, EVALS):
            name = f"anneal, {space}" + (f", {budget.evals:,} evals" if budget.evals else "")
            arms[name] = lambda p, b=budget, space=space: anneal(p, model, budget=b, space=space)
    if args.sharders:
        if unknown := sorted(set(args.sharders) - set(arms)):
            parser.error(f"no sharder {unknown[0]!r}; there are {', '.join(map(repr, arms))}")
        arms = {name: arm for name, arm in arms.items() if name in {"neuroshard", *args.sharders}}
    warm_up(draw_problems(model, 1, args.devices, 0)[0], model, arms)
    bounds = [] if args.no_bound else ["lower bound"]
    cost, seconds = ({name: [] for name in [*arms, *bounds]} for _ in range(2))
    drawn = (
        replays.draw_problems(model, args.problems, args.seed, args.two_ranks)
        if args.two_ranks
        else draw_problems(model, args.problems, args.devices, args.seed, args.unequal)
    )
    drawn = [with_memory_times(p, args.memory) for p in drawn] if args.memory else drawn
    for i, problem in enumerate(drawn):
        for name, arm in arms.items():
            plan, took = common.timed_plan(arm, problem, time.perf_counter)
            cost[name].append(price(lower(plan, problem), model).total_ms if plan else np.nan)
            seconds[name].append(took)
        if not args.no_bound:
            least = prove_lower_bound(problem, model)
            cost["lower bound"].append(least.proved_ms if least else None)
        print_progress(f"problem {i + 1} of {len(drawn)}: {len(problem.tables)} tables")
    if set(greedy.ORDERS) <= set(arms):
        add_best_greedy(cost, seconds)
    if None in cost.get("lower bound", []):
        del cost["lower bound"]
    found = evaluate.compute_standings(cost, seconds, "neuroshard")
    theirs = found["neuroshard"]
    rows = [
        (
            name,
            f"{s.solved:.0%}",
            f"{s.cost:.4f}",
            f"{s.worst:.3f}",
            f"{s.seconds:.3f}",
            f"{s.seconds / theirs.seconds:.2f}",
        )
        for name, s in found.items()
    ]
    devices = f"{args.devices} {'unequal ' if args.unequal else ''}devices" + (
        f", memory {args.memory:g} times the tables" if args.memory else ""
    )
    print(f"{model.setting}; {len(drawn)} problems, {devices}; {theirs.common} solved by all\n")
    print(report.text_table(("sharder", "solved", "cost", "worst", "seconds", "of neuroshard's"), rows))


if __name__ == "__main__":
    main()
