"""Plans on drawn topologies, as TorchRec trains them beside the model that is not sharded.

    python -m bench.exact run --out exact.jsonl --cases 200       goes on where it was ended; a line is a case
    PYTHONPATH=$PWD:FOLDER python -m bench.exact run ...          another TorchRec (pip install --no-deps --target)
    python -m bench.exact report exact.jsonl ...                  a table of what the files have

A case is a topology of 1 to 16 gloo ranks: hosts and pods of one size or of several, devices in or out of order, and
rows over hosts, over pods, or as a search decides. Some train in groups (DMPCollection). Each has two plans,
drawn or searched, and one that divides rows over units that the topology does not have: it needs to be refused. In
groups one plan trains under two optimizers. Every rank compares outputs of three steps and its rows after them, and all
rows of all tables need to be on some rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import say
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import ROWS_OVER, links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.row_units import RowUnits
from shardcore.step.kinds import LAYOUTS, choices_of_rows, row_unit_of
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import Grouping, groupings, sizes

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import grouped_training
import training

MOST_RANKS = 16
UNEVEN, SHUFFLED, IN_GROUPS, SEARCHED, PODS = 0.15, 0.3, 0.15, 0.5, 0.9
"""Shares of cases."""
ROUNDING = 1e-5
LIMIT_S = 400
TOGETHER = 20
"""Cases that are drawn together, of which those of as many ranks share processes."""
OPTIMIZERS = ("exact_sgd", "rowwise_adagrad")


def drawn_topology(rng: np.random.Generator) -> Topology:
    """Hosts of as many devices, or not; in pods of as many hosts, or not. Links are given, for searches."""
    hosts = int(rng.choice([1, 2, 3, 4, 4, 4, 6, 8, 8]))
    each = [int(rng.choice([n for n in (1, 2, 3, 4, 5, 8) if n * hosts <= MOST_RANKS]))] * hosts
    if rng.random() < UNEVEN:
        each = [int(rng.integers(1, MOST_RANKS // hosts + 1)) for _ in each]
    between = [n for n in range(2, hosts) if hosts % n == 0]
    pods = int(rng.choice(between)) if between and rng.random() < PODS else int(rng.choice([1, hosts]))
    pod_of = [h * pods // hosts for h in range(hosts)]
    if rng.random() < UNEVEN:
        pod_of = sorted(rng.integers(0, pods, hosts).tolist())
    devices = [Device(10**9, host=f"p{pod_of[h]}/h{h}") for h, n in enumerate(each) for _ in range(n)]
    if rng.random() < SHUFFLED:
        devices = [devices[d] for d in rng.permutation(len(devices))]
    links = links_of(0.01, within_host=4.0, between_hosts=float(rng.choice([0.1, 1.0])))
    return Topology(tuple(devices), links=links)


def shape(topology: Topology) -> str:
    """Devices of each host, by pod."""
    pods: dict[str, dict[str, int]] = {}
    for device in topology.devices:
        pod, _, host = device.host.partition("/")
        of = pods.setdefault(pod, {})
        of[host] = of.get(host, 0) + 1
    return " | ".join(" ".join(map(str, of.values())) for of in pods.values())


def plans_of(given: Problem, rng: np.random.Generator, sequence: bool) -> tuple[Problem, list[Plan]]:
    """Two plans, and the problem with their unit of rows: one of both that it may have, or that of a search."""
    if sequence or rng.random() >= SEARCHED:
        unit, plans = str(rng.choice(choices_of_rows(given.topology))), []
    else:
        model = AnalyticModel(Setting("any", given.global_batch)).for_problem(given)
        plans = [decide(given, model, [RowUnits()], SHARDERS["anneal"], budget=Budget(evals=300)).plan]
        unit = row_unit_of(given.topology, plans[0].placements)
    given = replace(given, topology=replace(given.topology, rows_over=unit))
    while len(plans) < 2:
        plans.append(training.draw(given, rng))
    return given, plans


def impossible(given: Problem, rng: np.random.Generator) -> Plan | None:
    """A plan with the rows of a table over units that TorchRec does not divide them over there, by names of hosts."""
    topology, plan = given.topology, training.draw(given, rng)
    kinds = [k for k in LAYOUTS.values() if k.rows_over and not k.groups(topology)]
    pooled = [t for t in given.tables if t.name not in ("s", "t")]
    if not kinds or len(topology) == 1:
        return None
    kind, table = kinds[rng.integers(len(kinds))], pooled[rng.integers(len(pooled))]
    some = next(iter(topology.on_units(ROWS_OVER[kind.rows_over])))
    others = [p for p in plan.placements if p.shard.table is not table]
    return Plan((*others, Placement(kind.name, Shard.whole(table), some)))


def of_groups(topology: Topology, rng: np.random.Generator) -> Grouping | None:
    """A division into groups of several devices. None: there is none."""
    given = replace(grouped_training.problem(1, 1), topology=topology, global_batch=len(topology))
    able = [g for g in groupings(given, int(rng.integers(1, 4)), sizes(given)) if 1 < g.size < len(topology)]
    return able[rng.integers(len(able))] if able else None


def drawn(i: int) -> tuple[dict[str, Any], list[tuple[Problem, Plan, bool]]]:
    """A case as a row, and its plans to train with their problems. Those of groups are trained already."""
    rng = np.random.default_rng([44, i])
    topology = drawn_topology(rng)
    row: dict[str, Any] = {"case": i, "ranks": len(topology), "shape": shape(topology)}
    grouping = of_groups(topology, rng) if rng.random() < IN_GROUPS else None
    if grouping is not None:
        return row | {"grouping": f"{grouping.layout} {grouping.size}"} | _in_groups(topology, grouping), []
    sequence = bool(rng.random() < 0.5)
    given = replace(
        training.problem(1, 1, sequence), topology=topology, global_batch=training.BATCH * len(topology)
    )
    try:
        given, plans = plans_of(given, rng, sequence)
    except ShardCoreError as error:
        return row | {"refused": [str(error)]}, []
    row |= {
        "rows_over": given.topology.rows_over,
        "kinds": sorted({p.kind for plan in plans for p in plan.placements}),
    }
    refused = []
    if (wrong := impossible(given, rng)) is not None:
        try:
            lower(wrong, given)
            plans.append(wrong)
        except ShardCoreError as error:
            refused.append(str(error))
    return row | {"refused": refused}, [(given, plan, sequence) for plan in plans]


def trained(cases: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of cases with outcomes of their plans. Cases of as many ranks share processes, which take long to start."""
    waiting: dict[int, tuple[dict[str, Any], list[tuple[Problem, Plan, bool]]]] = {i: drawn(i) for i in cases}
    while waiting:
        ranks = min(row["ranks"] for row, _ in waiting.values())
        some = {i: case for i, case in waiting.items() if case[0]["ranks"] == ranks}
        jobs = {10 * i + k: job for i, (_, plans) in some.items() for k, job in enumerate(plans)}
        found = training.train_each(jobs, LIMIT_S) if jobs else {}
        for i, (row, plans) in some.items():
            outcomes = [found.get(10 * i + k) for k in range(len(plans))]
            # What follows a plan that fails is not trained. It waits for other processes.
            if None not in outcomes or any(outcomes):
                del waiting[i]
                words = ["not run" if x is None else x[:300] or "exact" for x in outcomes]
                yield row | ({"plans": words} if plans else {})


def _in_groups(topology: Topology, grouping: Grouping) -> dict[str, Any]:
    given = replace(
        grouped_training.problem(1, 1), topology=topology, global_batch=grouped_training.BATCH * len(topology)
    )
    try:
        plan = grouped_training.grouped(given, grouping)
        lower(plan.plan, plan.problem)
    except ShardCoreError as error:
        return {"refused": [str(error)]}
    row = {
        "rows_over": row_unit_of(plan.problem.topology, plan.plan.placements),
        "kinds": sorted({p.kind for p in plan.plan.placements}),
    }
    try:
        found = grouped_training.compare(given, [grouping], OPTIMIZERS, limit_s=LIMIT_S)
    except AssertionError as error:
        return row | {"refused": [], "plans": [str(error)[:300]]}
    return row | {
        "refused": [],
        "plans": ["exact" if x.replicas < ROUNDING else f"differs by {x.replicas:.1e}" for x in found],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By version: cases, plans, and what came of them."""
    shown = []
    for of in sorted({row["torchrec"] for row in rows}):
        for what, keep in (
            ("one plan for all", lambda row: "grouping" not in row),
            ("groups", lambda row: "grouping" in row),
        ):
            some = [row for row in rows if row["torchrec"] == of and keep(row)]
            outcomes = Counter(
                "exact" if x == "exact" else "failed" for row in some for x in row.get("plans", ())
            )
            units = Counter(
                row["rows_over"] for row in some if {"host_row", "pod_row"} & set(row.get("kinds", ()))
            )
            shown.append(
                (
                    of,
                    what,
                    len(some),
                    sum("|" in row["shape"] for row in some),
                    max((row["ranks"] for row in some), default=0),
                    f"{units['host']}, {units['pod']}",
                    outcomes["exact"],
                    outcomes["failed"],
                    sum(len(row["refused"]) for row in some),
                )
            )
    heads = (
        "TorchRec",
        "trains",
        "topologies",
        "several pods",
        "most ranks",
        "rows over hosts, pods",
        "exact",
    )
    return report.text_table((*heads, "failed", "refused before"), shown)


def main() -> int:
    parser = common.parser(__doc__)
    commands = parser.add_subparsers(required=True, dest="what")
    p = commands.add_parser("run")
    p.add_argument("--out", type=Path, required=True, help="a line of JSON for each case")
    p.add_argument("--cases", type=int, default=200)
    p = commands.add_parser("report")
    p.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    rows = [
        row for path in (args.files if args.what == "report" else [args.out]) for row in common.lines_of(path)
    ]
    if args.what == "run":
        done = {row["case"] for row in rows}
        left = [i for i in range(args.cases) if i not in done]
        for first in range(0, len(left), TOGETHER):
            for row in trained(left[first : first + TOGETHER]):
                rows.append({"torchrec": version("torchrec"), **row})
                common.write_lines(args.out, rows)
                say(*(f"{key} {value}" for key, value in rows[-1].items()))
    print(table(rows))
    return int(any(x != "exact" for row in rows for x in row.get("plans", ())))


if __name__ == "__main__":
    sys.exit(main())
