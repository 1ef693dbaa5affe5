"""Plans for a cluster in a box, predicted and replayed on it. Hosts and links are emulated, exchanges real.
Compute of each device was measured before, and ranks sleep for it (shardcore/measure/replay.py).

    python -m bench.box_replays MODEL --measurements DIR --problems 20 --out FOLDER

Problems have 10 to 30 tables of the calibrated pool at dims up to 32. Links are slow, so that the network
decides. The topology gives their bandwidth, so the explicit link model prices exchanges. Nothing of it was
fitted. All sharders get the same model and topology. `torchrec` is TorchRec's planner, swept; it knows
hosts. The rivals are it, NeuroShard's search, and the greedy order that the model prefers.

FOLDER gets what bench.replays writes. A rerun goes on after the problems done.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench import replays as one_host
from shardcore.cost import neural, replay_metrics, replay_records
from shardcore.cost.model import price
from shardcore.draws.problems import ProblemConfig, draw_problem
from shardcore.job import Job
from shardcore.measure import hosts
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.samples import dataset, replays
from shardcore.search import SHARDERS, greedy
from shardcore.search.anneal.sharder import anneal
from shardcore.tables.generate import generate_pool
from shardcore.topology import Device, Topology
from shardcore.types import Plan, Problem
from shardcore.workload import lower

BOXES = ((2, 2, 0.2), (4, 2, 0.4), (2, 4, 0.4), (4, 1, 0.2))
"""Hosts, ranks of each, and Gbit/s of a host's link."""
WITHIN_GBPS, LATENCY_MS = 0.5, 2.0
"""Given to the explicit link model: loopback among ranks that share cores, and what gloo takes at least."""
RIVALS = ("torchrec", "neuroshard", "best greedy")
MAX_DIM, MOST_BYTES = 32, 512 << 20


def problem_of(pool, model: neural.NeuralModel, index: int, seed: int) -> tuple[Problem, hosts.Box]:
    box = hosts.Box(*BOXES[index % len(BOXES)])
    shape = ProblemConfig(box.ranks, 10, 30, MAX_DIM)
    drawn = draw_problem(pool, index, model.setting, seed, shape)
    memory = drawn.topology.devices[0].memory_bytes
    devices = (Device(memory, host=f"host-{rank // box.ranks_per_host}") for rank in range(box.ranks))
    topology = Topology(tuple(devices), None, WITHIN_GBPS, box.between_gbit_s / 8 / box.ranks_per_host,
                        LATENCY_MS)
    return dataclasses.replace(drawn, topology=topology, job=Job("none")), box


def plans(problem: Problem, model: neural.NeuralModel) -> list[tuple[str, Plan]]:
    found = {"anneal": anneal(problem, model), "anneal_columns": anneal(problem, model, space="columns")}
    found |= {n: SHARDERS[n](problem, model) for n in ("neuroshard", "torchrec", *greedy.ORDERS)
              if n in SHARDERS}
    best = min((found.pop(n) for n in greedy.ORDERS), key=lambda p: price(lower(p, problem), model).total_ms)
    return [*found.items(), ("best greedy", best), ("random", SHARDERS["random"](problem, model, seed=0))]


def summary(rows: Sequence[replay_metrics.ReplayRecord]) -> str:
    """Replayed cost of `anneal`, which uses all kinds, over its rivals', and over the best of them."""
    of: dict[str, dict[str, float]] = {}
    for row in rows:
        of.setdefault(row.problem, {})[row.algorithm] = row.replayed_ms
    lines = []
    for name in (*RIVALS, "anneal_columns"):
        ratios = [took["anneal"] / took[name] for took in of.values() if name in took]
        lines.append(f"anneal over {name}: {_said(ratios)}")
    best = [took["anneal"] / min(took[n] for n in RIVALS if n in took) for took in of.values()]
    return "\n".join([*lines, f"anneal over the best of its rivals by problem: {_said(best)}"])


def _said(ratios: Sequence[float]) -> str:
    found = replay_metrics.bootstrap(np.array(ratios))
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f}), worst {max(ratios):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.box_replays", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of this machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measurements", type=Path, help="the dataset of MODEL, whose reference op tells "
                        "the machine's slowdown")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9, help="steps of each plan (9)")
    parser.add_argument("--seed", type=int, default=77, help="of the problems (77)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, config, kept = neural.load(args.model), ReplayConfig(args.repeats, 2, arena_bytes=4 << 30), []
    reference = dataset.reference_op(args.measurements, model.setting) if args.measurements else None
    pool = [dataclasses.replace(t, dim=MAX_DIM) for t in generate_pool()]
    pool = [t for t in pool if t.bytes <= MOST_BYTES]
    for i in range(args.problems):
        problem, box = problem_of(pool, model, i, args.seed)
        own = model.for_problem(problem)
        made = plans(problem, own)
        with hosts.box_of(box) as places:
            kept.append(replays.keep(
                args.out / problem.name, problem, made, own.setting, config,
                lambda w: replay_all(w, own.setting, config, "cpu", reference, places)))  # noqa: B023
        rows = replay_records.judge(kept[-1:], own)
        said = ", ".join(f"{r.algorithm} {r.replayed_ms:.1f} ({r.predicted_ms:.1f})" for r in rows)
        print(f"problem {i + 1} of {args.problems}, {box}: {len(problem.tables)} tables: {said}",
              file=sys.stderr, flush=True)
    rows = replay_records.judge(kept, model)
    noise = np.median([r.noise_ms / r.replayed_ms for r in rows])
    print(one_host.write(args.out, kept, model, (
        f"Emulated hosts; exchanges real, compute measured before and slept for. {len(kept)} problems, "
        f"{args.repeats} steps of each plan in alternation, seed {args.seed}; a replay is known to "
        f"±{noise:.1%} (median, 95%).")))
    print(summary(rows))


if __name__ == "__main__":
    main()
