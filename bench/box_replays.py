"""Plans for a cluster in a box, predicted and replayed on it. Hosts and links are emulated, exchanges real.
Compute of each device was measured before, and ranks sleep for it (shardcore/measure/replay.py).

    python -m bench.box_replays MODEL --exchanges BOX --steps STEPS --measurements DIR --problems 20 \\
        --out FOLDER

Problems have 10 to 30 tables of the calibrated pool at dims up to 32. Links are slow, so that the network
decides. Exchanges are priced by rates fitted to those in BOX, which `measure --hosts` made at the same rate
of links (see bench.box); without BOX by given links, shared by the ranks of a host. STEPS, a FOLDER of other
problems, tells what exchanges take in a step. Without it they are priced as alone. All sharders get the same
model and topology. `torchrec` is TorchRec's planner, swept; it knows hosts. The rivals are it, NeuroShard's
search, and the greedy order that the model prefers.

FOLDER gets what bench.replays writes. A rerun goes on after the problems done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench import box, common
from bench import replays as one_host
from bench.common import say
from shardcore.core.job import Job
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost import collective_fit, neural, replay_metrics, replay_records, step_factors
from shardcore.cost.collective_model import OWN_WORK
from shardcore.cost.model import price
from shardcore.io import dataset, replays
from shardcore.measure import hosts
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search import SHARDERS, greedy
from shardcore.search.portfolio import annealing as anneal
from shardcore.step.lower import lower
from shardcore.step.scopes import SCOPES
from shardcore.tables.generate import generate_pool

BETWEEN_GBIT_S = 0.05
BOXES = ((2, 2), (4, 2), (2, 4), (4, 4), (8, 2))
"""Hosts, and ranks of each. `measure` need not have seen the last two."""
WITHIN_GBPS, LATENCY_MS = 0.5, 2.0
"""Given of links within a host: loopback among ranks that share cores. And what gloo takes at least."""
RIVALS = ("torchrec", "neuroshard", "best greedy")
MAX_DIM, MOST_BYTES = 32, 512 << 20


def of_box(
    model: neural.NeuralModel, exchanges: Path | None, steps: Path | None = None
) -> neural.NeuralModel:
    """The model with rates of exchanges fitted to those of boxes.

    steps: a FOLDER of this bench, whose replays tell what exchanges take in a step. None: as alone.
    """
    compute = {name: w for name, w in model.weights.items() if not name.startswith(("exchange_", *OWN_WORK))}
    measured = (
        []
        if exchanges is None
        else [
            s
            for shape, samples in box.read([exchanges], SCOPES).items()
            for s in samples
            if shape[:3] in box.KNOWN and shape[3].between_gbit_s == BETWEEN_GBIT_S
        ]
    )
    alone = dataclasses.replace(model, weights=compute | collective_fit.fit(measured, [], lambda *_: None))
    if steps is None:
        return alone
    told = [
        (lower(one.plans[name], one.problem, fits=False), cost.at_usual_speed())
        for one in replays.read_all(steps, model.setting)
        for name, cost in one.costs.items()
    ]
    fitted = step_factors.fit(alone, told)
    say(step_factors.summary(alone, fitted, len(told)))
    return fitted


def pool() -> list[Table]:
    """Tables that fit into what a rank may take."""
    widest = (dataclasses.replace(t, dim=MAX_DIM) for t in generate_pool())
    return [t for t in widest if t.bytes <= MOST_BYTES]


def problem_of(
    tables: Sequence[Table],
    model: neural.NeuralModel,
    index: int,
    seed: int,
    fitted: bool,
    boxes: Sequence[tuple[int, int]] = BOXES,
) -> tuple[Problem, hosts.Box]:
    where = hosts.Box(*boxes[index % len(boxes)], BETWEEN_GBIT_S)
    shape = ProblemConfig(where.ranks, 10, 30, MAX_DIM)
    drawn = draw_problem(tables, index, model.setting, seed, shape)
    memory = drawn.topology.devices[0].memory_bytes
    devices = (Device(memory, host=f"host-{rank // where.ranks_per_host}") for rank in range(where.ranks))
    topology = Topology(tuple(devices), links=links_of(within_host=WITHIN_GBPS))
    if not fitted:
        topology = dataclasses.replace(
            topology,
            links=links_of(
                LATENCY_MS, shared=True, within_host=WITHIN_GBPS, between_hosts=where.between_gbit_s / 8
            ),
        )
    return dataclasses.replace(drawn, topology=topology, job=Job("none")), where


def plans(problem: Problem, model: neural.NeuralModel) -> list[tuple[str, Plan]]:
    found = {"anneal": anneal(problem, model), "anneal_columns": anneal(problem, model, space="columns")}
    found |= {
        n: SHARDERS[n](problem, model) for n in ("neuroshard", "torchrec", *greedy.ORDERS) if n in SHARDERS
    }
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
    parser = common.parser(
        __doc__,
        {"model": "folder of a model of this machine"},
        out=...,
        exchanges=(Path, "dataset of emulated exchanges"),
        measurements=(Path, "the dataset of MODEL, whose reference op tells the machine's slowdown"),
        known=(False, "only shapes of boxes that exchanges are fitted to"),
        steps=(Path, "replays of other problems, which tell what exchanges take in a step"),
        problems=20,
        repeats=(9, "steps of each plan"),
        seed=(77, "of the problems"),
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, config, kept = neural.load(args.model), ReplayConfig(args.repeats, 2, arena_bytes=4 << 30), []
    model = of_box(model, args.exchanges, args.steps)
    reference = dataset.reference_op(args.measurements, model.setting) if args.measurements else None
    tables = pool()
    for i in range(args.problems):
        problem, where = problem_of(
            tables,
            model,
            i,
            args.seed,
            args.exchanges is not None,
            [b for b in BOXES if not args.known or (b[0], b[0] * b[1]) in box.KNOWN],
        )
        own = model.for_problem(problem)
        made = plans(problem, own)
        with hosts.box_of(where) as places:
            kept.append(
                replays.keep(
                    args.out / problem.name,
                    problem,
                    made,
                    own.setting,
                    config,
                    lambda w, own=own, places=places: replay_all(
                        w, own.setting, config, "cpu", reference, places
                    ),
                )
            )
        rows = replay_records.judge(kept[-1:], own)
        said = ", ".join(f"{r.algorithm} {r.replayed_ms:.1f} ({r.predicted_ms:.1f})" for r in rows)
        say(
            f"problem {i + 1} of {args.problems}, {where.hosts} x {where.ranks_per_host}: "
            f"{len(problem.tables)} tables: {said}"
        )
    rows = replay_records.judge(kept, model)
    noise = np.median([r.noise_ms / r.replayed_ms for r in rows])
    print(
        one_host.write(
            args.out,
            kept,
            model,
            (
                f"Emulated hosts; exchanges real, compute measured before and slept for. {len(kept)} problems, "
                f"{args.repeats} steps of each plan in alternation, seed {args.seed}; a replay is known to "
                f"±{noise:.1%} (median, 95%)."
            ),
        )
    )
    print(summary(rows))


if __name__ == "__main__":
    main()
