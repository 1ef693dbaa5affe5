"""Plans on drawn topologies, as TorchRec trains them beside the model that is not sharded.

    SHARDCORE_EXAMPLES=200 python -m pytest -n 0 -m long tests/torchrec/test_drawn_topologies.py    so many topologies
    PYTHONPATH=$PWD:FOLDER SHARDCORE_EXAMPLES=…    another TorchRec (pip install --no-deps --target FOLDER)

A case is a topology of 1 to 16 gloo ranks: hosts and pods of one size or of several, devices in or out of order, and
rows over hosts, over pods, or as a search decides. Some train in groups (DMPCollection). Each has two plans,
drawn or searched, and one that divides rows over domains that the topology does not have: it needs to be refused. In
groups one plan trains under two optimizers. Every rank compares outputs of three steps and its rows after them, and all
rows of all tables need to be on some rank.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import grouped_training
import training

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import ROWS_OVER, make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.step.kinds import SHARDING_KINDS, row_domain_choices, row_domain_of
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import Grouping, possible_group_sizes, possible_groupings

MOST_RANKS = 16
UNEVEN, SHUFFLED, IN_GROUPS, SEARCHED, PODS = 0.15, 0.3, 0.15, 0.5, 0.9
"""Shares of cases."""
ROUNDING = 1e-5
LIMIT_S = 400
EXAMPLES = os.environ.get("SHARDCORE_EXAMPLES")
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
    links = make_links(0.01, within_host=4.0, between_hosts=float(rng.choice([0.1, 1.0])))
    return Topology(tuple(devices), links=links)


def plans_of(given: Problem, rng: np.random.Generator, sequence: bool) -> tuple[Problem, list[Plan]]:
    """Two plans, and the problem with their row domain: one of both that it may have, or that of a search."""
    if sequence or rng.random() >= SEARCHED:
        domain, plans = str(rng.choice(row_domain_choices(given.topology))), []
    else:
        model = AnalyticModel(Setting("any", given.global_batch)).for_problem(given)
        plans = [decide(given, model, [RowDomains()], SHARDERS["anneal"], budget=Budget(evals=300)).plan]
        domain = row_domain_of(given.topology, plans[0].placements)
    given = replace(given, topology=replace(given.topology, rows_over=domain))
    while len(plans) < 2:
        plans.append(training.draw(given, rng))
    return given, plans


def impossible(given: Problem, rng: np.random.Generator) -> Plan | None:
    """A plan with the rows of a table over domains that TorchRec does not divide them over there, by names of hosts."""
    topology, plan = given.topology, training.draw(given, rng)
    kinds = [k for k in SHARDING_KINDS.values() if k.rows_over and not k.device_groups(topology)]
    pooled = [t for t in given.tables if t.name not in ("s", "t")]
    if not kinds or len(topology) == 1:
        return None
    kind, table = kinds[rng.integers(len(kinds))], pooled[rng.integers(len(pooled))]
    some = next(iter(topology.devices_by_domain(ROWS_OVER[kind.rows_over])))
    others = [p for p in plan.placements if p.shard.table is not table]
    return Plan((*others, Placement(kind.name, Shard.whole(table), some)))


def of_groups(topology: Topology, rng: np.random.Generator) -> Grouping | None:
    """A division into groups of several devices. None: there is none."""
    given = replace(grouped_training.problem(1, 1), topology=topology, global_batch=len(topology))
    able = [
        g
        for g in possible_groupings(given, int(rng.integers(1, 4)), possible_group_sizes(given))
        if 1 < g.size < len(topology)
    ]
    return able[rng.integers(len(able))] if able else None


@pytest.mark.long
@pytest.mark.parametrize("case", range(int(EXAMPLES)) if EXAMPLES else (20, 25))
def test_a_drawn_plan_trains_as_the_whole_model_and_an_impossible_one_is_refused(case):
    rng = np.random.default_rng([44, case])
    topology = drawn_topology(rng)
    if rng.random() < IN_GROUPS and (grouping := of_groups(topology, rng)):
        train_in_groups(topology, grouping)
        return
    sequence = bool(rng.random() < 0.5)
    given = replace(
        training.problem(1, 1, sequence), topology=topology, global_batch=training.BATCH * len(topology)
    )
    try:
        given, plans = plans_of(given, rng, sequence)
    except ShardCoreError as error:
        pytest.skip(f"no plan: {error}")
    if (wrong := impossible(given, rng)) is not None:
        with pytest.raises(ShardCoreError):
            lower(wrong, given)
    jobs = {k: (given, plan, sequence) for k, plan in enumerate(plans)}
    assert training.train_each(jobs, LIMIT_S) == dict.fromkeys(jobs, "")


def train_in_groups(topology: Topology, grouping: Grouping) -> None:
    given = replace(
        grouped_training.problem(1, 1), topology=topology, global_batch=grouped_training.BATCH * len(topology)
    )
    try:
        plan = grouped_training.grouped(given, grouping)
        lower(plan.plan, plan.problem)
    except ShardCoreError as error:
        pytest.skip(f"no plan: {error}")
    found = grouped_training.compare(given, [grouping], OPTIMIZERS, limit_s=LIMIT_S)
    assert max(x.replicas for x in found) < ROUNDING
