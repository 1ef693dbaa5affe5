"""Plans for a cluster in a box, predicted and replayed on it. Hosts and links are emulated, exchanges real.
Compute of each device was measured before, and ranks sleep for it (shardcore/measure/replay.py).

    python -m bench.box_replays MODEL --exchanges BOX --steps STEPS --measurements DIR --problems 20 \\
        --out FOLDER [--pods]

Problems have 10 to 30 tables of the calibrated pool at dims up to 32. Links are slow, so that the network
decides. Exchanges are priced by rates fitted to those in BOX, which `bench.box measure` made at the same rate
of links (see bench.box); without BOX by given links, shared by the ranks of a host. STEPS, a FOLDER that
--known made, tells what exchanges take in a step. Without it they are priced as alone. All sharders get the
same model and topology. `torchrec` is TorchRec's planner, swept; it knows hosts and pods. The rivals are it,
NeuroShard's search, and the greedy order that the model prefers. With --pods hosts are in pods, and links have
three levels: every sharder plans with rows over hosts and with rows over pods, and has the cheaper by the model.
Exchanges in pods are those in BOX/pods.

With --known, drawn plans of several kinds are replayed on the shapes that exchanges are fitted to, and
nothing is searched.

FOLDER gets what bench.replays writes, and FOLDER-plans the plans. A rerun goes on after the problems done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import box, common, hosts
from bench import replays as one_host
from bench.common import print_progress
from shardcore.core import validation
from shardcore.core.job import Job
from shardcore.core.links import host_names, make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost import collective_fit, metrics, neural, replay_metrics, step_factors
from shardcore.cost.collective_model import OWN_WORK
from shardcore.cost.model import CostModel, price
from shardcore.io import dataset, files, replays
from shardcore.io.envelope import document_body, remove_digest
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.measure.sampling.steps import draw_random_plans
from shardcore.measure.transport import Transport
from shardcore.search import SHARDERS, Budget, greedy
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.step.lower import lower
from shardcore.step.scopes import SCOPES
from shardcore.tables.generate import generate_pool

BETWEEN_GBIT_S, POD_GBIT_S = 0.05, 0.2
BOXES = ((2, 2, 1), (4, 2, 1), (2, 4, 1), (4, 4, 1), (8, 2, 1))
"""Hosts, ranks of each, and pods. `measure` need not have seen the last two."""
BOXES_IN_PODS = ((4, 2, 2), (4, 1, 2), (8, 1, 2), (8, 1, 4), (8, 2, 2), (8, 2, 4), (4, 4, 2))
"""The same in pods. It need not have seen the last five."""
WITHIN_GBPS, LATENCY_MS = 0.5, 2.0
"""Given of links within a host: loopback among ranks that share cores. And what gloo takes at least."""
OURS = ("portfolio", "anneal")
RIVALS = ("torchrec", "neuroshard", "best greedy")
MAX_DIM, MOST_BYTES = 32, 512 << 20


def with_box_rates(
    model: neural.NeuralModel, exchanges: Path | None, steps: Path | None = None, pods: bool = False
) -> neural.NeuralModel:
    """Cost model with exchange rates fitted to measurements on emulated hosts.

    pods: True for those of boxes in pods, too.
    steps: a FOLDER of this bench, whose replays tell what exchanges take in a step. None: as alone.
    """
    compute = {name: w for name, w in model.weights.items() if not name.startswith(("exchange_", *OWN_WORK))}
    folders = [exchanges, exchanges / "pods"][: 1 + pods] if exchanges else []
    measured = [
        s
        for shape, samples in box.read_exchanges(folders, SCOPES).items()
        for s in samples
        if shape[:3] in box.KNOWN and shape[3].between_gbit_s == BETWEEN_GBIT_S
    ]
    alone = dataclasses.replace(model, weights=compute | collective_fit.fit_exchange_rates(measured))
    if steps is None:
        return alone
    told = [
        (lower(one.plans[name], one.problem, fits=False), cost.at_usual_speed())
        for one in replays.read_all_replays(steps, model.setting)
        for name, cost in one.costs.items()
    ]
    fitted = step_factors.fit_step_factors(alone, told)
    print_progress(step_factors.fit_summary(alone, fitted, len(told)))
    return fitted


def box_tables() -> list[Table]:
    """Pool of tables that fit into the memory of one rank."""
    return [
        widest
        for table in generate_pool()
        if (widest := dataclasses.replace(table, dim=MAX_DIM)).bytes <= MOST_BYTES
    ]


def draw_box_problem(
    tables: Sequence[Table],
    model: neural.NeuralModel,
    index: int,
    seed: int,
    fitted: bool,
    boxes: Sequence[tuple[int, int, int]] = BOXES,
) -> tuple[Problem, hosts.Box]:
    n_hosts, each, pods = boxes[index % len(boxes)]
    in_pods = {"pods": pods, "pod_gbit_s": POD_GBIT_S} if pods > 1 else {}
    where = hosts.Box(n_hosts, each, BETWEEN_GBIT_S, **in_pods)
    shape = ProblemConfig(where.ranks, 10, 30, MAX_DIM)
    drawn = draw_problem(tables, index, model.setting, seed, shape)
    memory = drawn.topology.devices[0].memory_bytes
    devices = (Device(memory, host=name) for name in host_names(where.ranks, n_hosts, pods))
    topology = Topology(tuple(devices), links=make_links(within_host=WITHIN_GBPS))
    if not fitted:
        topology = dataclasses.replace(
            topology,
            links=make_links(
                LATENCY_MS,
                shared=True,
                within_host=WITHIN_GBPS,
                within_pod=POD_GBIT_S / 8 if pods > 1 else None,
                between_hosts=BETWEEN_GBIT_S / 8,
            ),
        )
    return dataclasses.replace(drawn, topology=topology, job=Job("none")), where


def plans_by_name(problem: Problem, model: CostModel, budget: Budget) -> list[tuple[str, Plan]]:
    """Plans of several sharders, as (name, plan). With pods, also annealed plans with rows over hosts or pods."""
    names = (*OURS, "anneal_columns", *RIVALS[:2], *greedy.ORDERS, "random")
    chosen = {
        n: decide(problem, model, [RowDomains()], SHARDERS[n], budget=budget) for n in names if n in SHARDERS
    }
    found = {name: of.plan for name, of in chosen.items()}
    best = min((found.pop(n) for n in greedy.ORDERS), key=lambda p: price(lower(p, problem), model).total_ms)
    domains = {
        f"anneal, {x.proposal.words}": x.found.plan
        for x in chosen["anneal"].outcomes
        if x.found and len(chosen["anneal"].outcomes) > 1
    }
    return [*found.items(), (RIVALS[2], best), *domains.items()]


def random_plans(problem: Problem, *_: CostModel | Budget) -> list[tuple[str, Plan]]:
    """Random plans of several sharding types, as (name, plan)."""
    of_kinds = draw_random_plans(problem, np.random.default_rng(list(problem.name.encode())))
    return [(f"{i}: {names}", plan) for i, (names, plan) in enumerate(of_kinds)]


def replay_summary(replays: Sequence[replay_metrics.PlanReplay]) -> str:
    """Text on the replayed cost of our plans relative to rivals' plans, and by domain of row-wise sharding."""
    of: dict[str, dict[str, float]] = {}
    for row in replays:
        of.setdefault(row.problem, {})[row.algorithm] = row.replayed_ms
    lines = []
    for ours in OURS:
        for name in (*RIVALS, "anneal_columns"):
            ratios = [took[ours] / took[name] for took in of.values() if {ours, name} <= took.keys()]
            lines.append(f"{ours} over {name}: {_ratios_text(ratios)}" if ratios else "")
        best = [
            took[ours] / min(took[n] for n in RIVALS if n in took) for took in of.values() if ours in took
        ]
        lines.append(f"{ours} over the best of its rivals by problem: {_ratios_text(best)}" if best else "")
    over = [
        {name.split()[3]: ms for name, ms in took.items() if name.startswith("anneal, ")}
        | {"": took["anneal"]}
        for took in of.values()
    ]
    if chosen := [took[""] / min(took["hosts"], took["pods"]) for took in over if len(took) == 3]:
        lines.append(f"anneal over the better row domain: {_ratios_text(chosen)}")
    return "\n".join(filter(None, lines))


def _ratios_text(ratios: Sequence[float]) -> str:
    return f"{common.interval_text(metrics.mean_interval(np.array(ratios)))}, worst {max(ratios):.3f}"


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a model of this machine"},
        out=...,
        exchanges=(Path, "dataset of emulated exchanges"),
        measurements=(Path, "the dataset of MODEL, whose reference op tells the machine's slowdown"),
        known=(False, "drawn plans, on shapes of boxes that exchanges are fitted to"),
        pods=(False, "boxes in pods"),
        steps=(Path, "replays by --known, which tell what exchanges take in a step"),
        problems=20,
        repeats=(9, "steps of each plan"),
        evals=(int, "evaluations of each search; default: its own"),
        seed=(77, "of the problems"),
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, config, kept = neural.load(args.model), ReplayConfig(args.repeats, 2, arena_bytes=4 << 30), []
    model = with_box_rates(model, args.exchanges, args.steps, args.pods or args.known)
    reference = dataset.reference_op(args.measurements, model.setting) if args.measurements else None
    tables, boxes = box_tables(), BOXES_IN_PODS if args.pods else BOXES
    if args.known:
        boxes = sorted((n_hosts, ranks // n_hosts, pods) for n_hosts, ranks, pods in box.KNOWN)
    for i in range(args.problems):
        problem, where = draw_box_problem(tables, model, i, args.seed, args.exchanges is not None, boxes)
        if args.known:
            ample = (
                dataclasses.replace(d, memory_bytes=validation.MOST_BYTES) for d in problem.topology.devices
            )
            problem = dataclasses.replace(problem, topology=problem.topology.with_devices(ample))
        own = model.for_problem(problem)
        path, budget = Path(f"{args.out}-plans") / f"{problem.name}.json", Budget(evals=args.evals)
        make = partial(random_plans if args.known else plans_by_name, problem, own, budget)
        texts = common.read_or_make(
            path,
            lambda of=problem, make=make: {name: files.plan_to_json(plan, of) for name, plan in make()},
        )
        bodies = {
            name: remove_digest(document_body(text, "plan", path), path) for name, text in texts.items()
        }
        made = [(name, files.plan_from_json(body, problem, str(path))) for name, body in bodies.items()]
        with hosts.emulated_hosts(where) as places:
            kept.append(
                replays.replay_or_reuse(
                    args.out / problem.name,
                    problem,
                    made,
                    own.setting,
                    config,
                    lambda w, own=own, places=places: replay_all(
                        w, own.setting, config, Transport(places=places), reference
                    ),
                )
            )
        rows = replay_metrics.judge_replays(kept[-1:], own)
        said = ", ".join(f"{r.algorithm} {r.replayed_ms:.1f} ({r.predicted_ms:.1f})" for r in rows)
        print_progress(
            f"problem {i + 1} of {args.problems}, {where.hosts} x {where.ranks_per_host}"
            f"{f' in {where.pods} pods' if where.pods > 1 else ''}: "
            f"{len(problem.tables)} tables: {said}"
        )
    if args.known:
        return
    rows = replay_metrics.judge_replays(kept, model)
    noise = np.median([r.noise_ms / r.replayed_ms for r in rows])
    print(
        one_host.write_report(
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
    print(replay_summary(rows))


if __name__ == "__main__":
    main()
