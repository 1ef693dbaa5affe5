"""What do ids cost, and do searches cut less when they know? Predicted, under a trained model.

    python -m bench.ids MODEL --problems 20

Problems are drawn from the calibrated pool: 20 to 80 tables at dims up to 128, on hosts of 4 devices. Links
between hosts, and ms of a dense part, are given. Each problem is planned twice by `anneal_columns`: as it is,
and blind, as if ids travelled for nothing. Both plans are priced as the problem is. No figure here is
measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from shardcore import report
from shardcore.core.job import Job
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost import neural
from shardcore.cost.model import CostModel, price
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search.budget import Budget
from shardcore.search.portfolio import annealing as anneal
from shardcore.step.id_bytes import expected_bytes
from shardcore.step.lower import lower
from shardcore.tables.generate import generate_pool

PER_HOST = 4
BUDGET = Budget(evals=200_000)
_HIDDEN = Job(dense_forward_ms=1e6, dense_backward_ms=1e6)
"""A dense part that hides all ids."""
HEADERS = (
    "hosts",
    "GB/s between them",
    "dense part, ms",
    "ids in a step",
    "blind plan's cost over ours",
    "worst",
    "ids that it sends over ours",
    "shards over tables, blind",
    "ours",
)


def problems(model: CostModel, n: int, hosts: int, gbps: float, job: Job) -> list[Problem]:
    """n problems on so many hosts."""
    pool, found = generate_pool(), []
    shape = ProblemConfig(hosts * PER_HOST, 20, 80, 128)
    for i in range(n):
        drawn = draw_problem(pool, i, model.setting, 41, shape)
        devices = tuple(
            Device(d.memory_bytes, d.speed, f"host-{k // PER_HOST}")
            for k, d in enumerate(drawn.topology.devices)
        )
        links = Topology(devices, links=links_of(between_hosts=gbps)) if hosts > 1 else Topology(devices)
        found.append(replace(drawn, topology=links, job=job))
    return found


def row(model: CostModel, n: int, hosts: int, gbps: float, dense_ms: float) -> tuple[str, ...]:
    """A row under HEADERS. Means over problems."""
    job = Job(dense_forward_ms=dense_ms / 3, dense_backward_ms=2 * dense_ms / 3)
    cost, sent, share, cuts = [], [], [], []
    for given in problems(model, n, hosts, gbps, job):
        plans = [anneal(replace(given, job=j), model, budget=BUDGET, space="columns") for j in (_HIDDEN, job)]
        blind, own = (price(lower(plan, given), model) for plan in plans)
        cost.append((blind.total_ms - dense_ms) / (own.total_ms - dense_ms))
        share.append(own.input_ms[0] / (own.total_ms - dense_ms))
        sent.append(np.divide(*(sum(expected_bytes(plan, given).values()).sum() for plan in plans)))
        cuts.append([_shards(plan) / len(given.tables) for plan in plans])
    blind_cuts, own_cuts = np.mean(cuts, axis=0)
    return (
        str(hosts),
        f"{gbps:g}" if hosts > 1 else "-",
        f"{dense_ms:g}",
        f"{np.mean(share):.0%}",
        f"{np.mean(cost):.3f}",
        f"{max(cost):.3f}",
        f"{np.mean(sent):.2f}",
        f"{blind_cuts:.2f}",
        f"{own_cuts:.2f}",
    )


def _shards(plan: Plan) -> int:
    return len({(p.shard.table.name, d) for p in plan.placements for d in p.devices})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ids", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gbps", type=float, nargs="+", default=[1.25, 0.125], help="between hosts, in GB/s")
    parser.add_argument("--dense-ms", type=float, nargs="+", default=[0.0, 3.0])
    args = parser.parse_args()
    model = neural.load(args.model)
    rows = [
        row(model, args.problems, hosts, gbps, dense_ms)
        for hosts in args.hosts
        for gbps in (args.gbps if hosts > 1 else [0.0])
        for dense_ms in args.dense_ms
    ]
    print(f"{model.setting}; {args.problems} problems a row, {PER_HOST} devices a host\n")
    print(report.markdown_table(HEADERS, rows))


if __name__ == "__main__":
    main()
