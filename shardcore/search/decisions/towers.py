"""Towers: hosts of tables, so that those that belong together meet on one (shardcore/io/towers.py).

The partition is found by local search: the moves of Fiduccia and Mattheyses (1982) and the exchanges of
Kernighan and Lin (1970), from a greedy start and from random ones. It looks for, in this order:

1. memory that holds each host's tables;
2. hosts within a tolerance of their share of work and of memory: the sum of what is beyond it is least;
3. the most affinity within hosts;
4. even hosts.

Work is the predicted cost of each table in an op of its own, divided by the speeds of a host's devices.

Shapes: U units (tables that have to share a host), H hosts; 2 resources: work in ms, memory in bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from shardcore.core.constraints import require_tower_hosts
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Plan, Problem, Shard
from shardcore.core.validation import require, require_types, require_within
from shardcore.cost.model import CostModel
from shardcore.io.towers import Towers
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.decisions.tower_plans import as_towers
from shardcore.search.state.refusal import shown
from shardcore.step.memory import gib, held_bytes
from shardcore.step.memory_account import local_batch_bytes, table_bytes
from shardcore.tables.hot_rows import as_cold, cold_names

MOST_UNITS = 4096
"""A search compares all pairs of units."""
_OVERFULL, _UNBALANCED, _UNEVEN = 1e12, 1e6, 1e-6
"""Weights that put the aims in their order: affinity within hosts counts at most 1."""
_WORK, _MEMORY = range(2)
_ROUNDING = 1e-13
"""Changes of a cost by less than this share of it count as none."""
_MOST_PASSES = 100
"""Over all units, from one start. A few are enough."""
_PAIRS = 1_000_000
"""Pairs of units over all starts: small problems have more starts."""


@dataclass(frozen=True)
class TowerConfig:
    """tolerance: by how much a host's work or memory may exceed its share before affinity stops counting;
    most_starts: of the local search; seed: of the random ones; seconds: when a division that fits will do."""

    tolerance: float = 0.1
    most_starts: int = 16
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        require_within(self, "towers", tolerance=(0, 1e6), most_starts=(1, 10_000))


@dataclass(frozen=True)
class TowerHosts:
    """Hosts of towers.

    problem: the problem with each table pinned to its host, and with the ratio in its job.
    host_of: the host of each table.
    affinity_inside: the share of the matrix's affinity that lies within hosts. 1 where there is no matrix.
    loads: [H] a host's work and memory over its share of the whole. 1 is even.
    """

    problem: Problem
    host_of: Mapping[str, str]
    affinity_inside: float
    loads: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class OnHosts(Proposal):
    """A problem whose tables are pinned to hosts. whole: the problem without towers."""

    whole: Problem
    hosts: TowerHosts


@dataclass(frozen=True)
class OnTowers(Decision):
    """Choose the host of each tower. A plan with towers is one of the problem without them.

    start: a plan that the search improves. Its tables may stay on their hosts.
    moves: whether they may also leave these.
    """

    towers: Towers
    start: Plan | None = None
    moves: bool = True

    name: ClassVar[str] = "towers"
    level: ClassVar[int] = 4
    against: ClassVar[Mapping[str, str]] = {"sharding groups": "towers are of all hosts of a problem"}

    def __post_init__(self) -> None:
        require_types(self, "towers")

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[OnHosts, Outcome, None]:
        """The hosts of the plan to start from, if any, and the hosts found within a third of the seconds.

        Raises as `tower_hosts`.
        """
        towers, fitting = self.towers.renamed(cold_names(problem)), model.for_problem(problem)
        config = TowerConfig(seconds=seconds and seconds / 3)
        kept = self._kept(problem, towers, fitting, config)
        if kept:
            yield OnHosts(
                words="hosts of the plan before",
                problem=kept.problem,
                more=int(self.moves),
                whole=problem,
                hosts=kept,
            )
        if self.moves or not kept:
            hosts = tower_hosts(problem, towers, fitting, config)
            yield OnHosts(words="hosts found", problem=hosts.problem, whole=problem, hosts=hosts)

    def _kept(
        self, problem: Problem, towers: Towers, model: CostModel, config: TowerConfig
    ) -> TowerHosts | None:
        """Hosts where no table leaves its own. None: there is no such plan, or the towers are against it."""
        if self.start is None:
            return None
        topology, hosts_of = problem.topology, defaultdict(set)
        for p in as_cold(self.start, problem).placements:
            hosts_of[p.shard.table.name] |= {topology.devices[d].host for d in p.devices if d < len(topology)}
        pins = dict(problem.constraints.pinned)
        for table in problem.tables:
            if len(hosts_of[table.name]) == 1:
                on_host = topology.on_hosts[topology.hosts.index(*hosts_of[table.name])]
                if allowed := set(on_host) & set(problem.allowed_devices(table.name)):
                    pins[table.name] = tuple(sorted(allowed))
        asked = replace(problem.constraints, pinned=tuple(pins.items()))
        try:
            return tower_hosts(replace(problem, constraints=asked), towers, model, config)
        except ShardCoreError:
            return None

    def adopt(self, proposal: OnHosts, found: Found | None, model: CostModel) -> Found | None:
        if found is None:
            return None
        whole, hosts = proposal.whole, proposal.hosts
        asked = replace(found.problem.constraints, pinned=whole.constraints.pinned)
        inside = {"affinity_inside": hosts.affinity_inside, "loads": [list(host) for host in hosts.loads]}
        plan = replace(
            found.plan,
            provenance={
                **found.plan.provenance,
                "tower_ratio": self.towers.compression_ratio,
                "towers": inside,
            },
        )
        return replace(found, problem=replace(found.problem, job=whole.job, constraints=asked), plan=plan)

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        hosts = outcome.proposal.hosts
        return {
            "affinity inside": f"{hosts.affinity_inside:.0%}",
            "fullest host": f"{max(map(max, hosts.loads)):.0%} of its share",
        }


def tower_hosts(
    problem: Problem, towers: Towers, model: CostModel, config: TowerConfig | None = None
) -> TowerHosts:
    """Assign tables to hosts.

    A table's own pins (constraints.pinned) are kept. Tables kept together count as a group.

    Raises ShardCoreError for a table that the problem lacks, and where its hosts cannot have towers.
    Raises Infeasible, which names a group and by how much it does not fit, if memory is too small.
    """
    config = config or TowerConfig()
    known, topology = {t.name for t in problem.tables}, problem.topology
    require_tower_hosts({}, topology.on_hosts, f"problem {problem.name!r}")
    for name in (*(n for group in towers.towers for n in group), *towers.tables):
        require(name in known, f"towers have table {name!r}, which problem {problem.name!r} does not have")
    require(
        problem.job.tower_ratio is None,
        f"problem {problem.name!r} has job.tower_ratio "
        f"{problem.job.tower_ratio}, so its towers are placed already; leave out one of the two",
    )
    units = _units(problem, towers)
    require(
        len(units) <= MOST_UNITS,
        f"towers leave {len(units)} groups of tables; at most {MOST_UNITS} are "
        "divided over hosts, so more tables need to be in groups",
    )
    number = {name: i for i, unit in enumerate(units) for name in unit}
    on_hosts = [frozenset(devices) for devices in topology.on_hosts]
    allowed = np.array(
        [
            [all(on_host & set(problem.allowed_devices(name)) for name in unit) for on_host in on_hosts]
            for unit in units
        ]
    )
    for unit, where in zip(units, allowed, strict=True):
        require(
            where.any(),
            f"towers keep tables {shown(unit)} on one host, but constraints.pinned leaves "
            "them none in common",
        )
    load = np.zeros((len(units), 2))
    at = [number[t.name] for t in problem.tables]
    shards = [Shard.whole(t) for t in problem.tables]
    np.add.at(load[:, _WORK], at, np.asarray(model.head(model.encode(shards)), dtype=float))
    np.add.at(load[:, _MEMORY], at, [float(table_bytes(s.table, problem)) for s in shards])
    affinity = np.zeros((len(units), len(units)))
    of = [number[name] for name in towers.tables]
    np.add.at(affinity, np.ix_(of, of), towers.matrix() * (1 - np.eye(len(of))))
    local = local_batch_bytes(problem)
    free = [may_hold - local for may_hold in held_bytes(problem)]
    capacity = np.array(
        [
            (sum(topology.devices[d].speed for d in host), max(1, sum(max(0, free[d]) for d in host)))
            for host in topology.on_hosts
        ],
        dtype=float,
    )
    _require_each_fits(units, load[:, _MEMORY], np.where(allowed, capacity[:, _MEMORY], 0).max(1), problem)
    division = Division(affinity, load, capacity, allowed, config)
    host = division.best()
    _require_all_fit(units, host, load[:, _MEMORY], capacity[:, _MEMORY], problem)
    host_of = {t.name: topology.hosts[host[number[t.name]]] for t in problem.tables}
    return TowerHosts(
        as_towers(problem, host_of, towers.compression_ratio),
        host_of,
        division.inside(host),
        tuple(map(tuple, division.loads(host).tolist())),
    )


# --- units --------------------------------------------------------------------------------------------------


def _units(problem: Problem, towers: Towers) -> list[tuple[str, ...]]:
    """Tables that have to share a host: those of a group, and those of constraints.together.

    Tables and units are in the problem's order.
    """
    unit_of: dict[str, list[str]] = {t.name: [t.name] for t in problem.tables}
    for group in (*towers.towers, *problem.constraints.together):
        for name in group[1:]:
            mine, other = unit_of[group[0]], unit_of[name]
            if mine is not other:
                small, large = sorted((mine, other), key=len)
                large += small
                unit_of.update(dict.fromkeys(small, large))
    found: dict[int, list[str]] = {}
    for table in problem.tables:
        found.setdefault(id(unit_of[table.name]), []).append(table.name)
    return list(map(tuple, found.values()))


def _group(unit: Sequence[str]) -> str:
    return f"table {unit[0]!r}" if len(unit) == 1 else f"the group {shown(unit)}"


def _require_each_fits(
    units: Sequence[Sequence[str]], n_bytes: np.ndarray, most: np.ndarray, problem: Problem
) -> None:
    for unit, needed, largest in zip(units, n_bytes, most, strict=True):
        if needed > largest:
            raise Infeasible(
                f"problem {problem.name!r} does not fit: {_group(unit)} of the towers takes "
                f"{gib(needed)} with outputs; the largest host where it may live may hold "
                f"{gib(largest)}, {gib(needed - largest)} too little. It would fit in smaller "
                "groups, or with that much more memory on a host"
            )


def _require_all_fit(
    units: Sequence[Sequence[str]], host: np.ndarray, n_bytes: np.ndarray, most: np.ndarray, problem: Problem
) -> None:
    held = np.bincount(host, n_bytes, len(most))
    h = int(np.argmax(held - most))
    if held[h] > most[h]:
        # The smallest group without which the rest fits: it found no host.
        over, here = held[h] - most[h], np.flatnonzero(host == h)
        enough = here[n_bytes[here] >= over]
        unit = units[min(enough if len(enough) else here, key=lambda u: n_bytes[u])]
        raise Infeasible(
            f"problem {problem.name!r} does not fit: no division of its towers over "
            f"{len(most)} hosts was found. In the best one {_group(unit)} is on host "
            f"{problem.topology.hosts[h]!r}, whose tables take {gib(held[h])} with outputs; it "
            f"may hold {gib(most[h])}, {gib(over)} too little. It may fit in smaller groups, "
            "or with that much more memory on each host"
        )


# --- the division -------------------------------------------------------------------------------------------


class Division:
    """A division of units over hosts, found by local search.

    affinity: [U, U] symmetric.
    load: [U, 2] work and memory.
    capacity: [H, 2] speed and memory.
    allowed: [U, H] where a unit may be.

    Affinity within units is no part of it: no division changes that.
    """

    def __init__(
        self,
        affinity: np.ndarray,
        load: np.ndarray,
        capacity: np.ndarray,
        allowed: np.ndarray,
        config: TowerConfig,
    ) -> None:
        self.config, self.load, self.allowed, self.memory = config, load, allowed, capacity[:, _MEMORY]
        self.affinity, self._meter = affinity.copy(), Budget(seconds=config.seconds).start()
        self._inside_units = float(np.trace(affinity)) / 2
        np.fill_diagonal(self.affinity, 0.0)
        self.all_affinity = float(self.affinity.sum()) / 2
        # [H, 2] what a host has if all have the same share.
        self.share = np.maximum(capacity / capacity.sum(0) * load.sum(0), 1e-300)

    def best(self) -> np.ndarray:
        """[U] the host of each unit in the best division found."""
        rng = np.random.default_rng(self.config.seed)
        n = len(self.load)
        found = [self._improved(self._greedy())]
        # A random start often ends better than the greedy one where units are many.
        for _ in range(min(self.config.most_starts, max(2, 1 + _PAIRS // n**2)) - 1):
            if not self._meter.left():
                break
            found.append(self._improved(np.array([rng.choice(np.flatnonzero(w)) for w in self.allowed])))
        return min(found, key=self.cost)

    def cost(self, host: np.ndarray) -> float:
        """The sum that the search minimises: the aims of the module, weighted."""
        hosts = np.arange(len(self.share))
        return float(self._penalty(self._totals(host), hosts).sum() - self._share_inside(host))

    def inside(self, host: np.ndarray) -> float:
        """The share of affinity between different tables that lies within hosts. 1 where there is none."""
        whole = self.all_affinity + self._inside_units
        return (self._share_inside(host) * self.all_affinity + self._inside_units) / whole if whole else 1.0

    def loads(self, host: np.ndarray) -> np.ndarray:
        """[H, 2] of work and memory, relative to a host's share."""
        return self._totals(host) / self.share

    def _totals(self, host: np.ndarray) -> np.ndarray:
        totals = np.zeros_like(self.share)
        np.add.at(totals, host, self.load)
        return totals

    def _share_inside(self, host: np.ndarray) -> float:
        same = self.affinity[host[:, None] == host].sum() / 2
        return float(same) / self.all_affinity if self.all_affinity else 1.0

    def _penalty(self, totals: np.ndarray, hosts: np.ndarray) -> np.ndarray:
        """[...] of hosts [...] that hold totals [..., 2]."""
        relative = totals / self.share[hosts]
        overfull = np.maximum(0.0, totals[..., _MEMORY] / self.memory[hosts] - 1)
        beyond = np.maximum(0.0, relative - (1 + self.config.tolerance)).sum(-1)
        return _OVERFULL * overfull + _UNBALANCED * beyond + _UNEVEN * (relative**2).sum(-1) / len(self.share)

    def _greedy(self) -> np.ndarray:
        """[U] hosts: units by falling load, each where it costs least."""
        n_units, hosts = len(self.load), np.arange(len(self.share))
        order = np.argsort(-(self.load / self.share.sum(0)).max(1), kind="stable")
        host, totals = np.full(n_units, -1), np.zeros_like(self.share)
        near, per_unit = np.zeros(self.allowed.shape), 1 / (self.all_affinity or 1.0)
        for u in order:
            grows = (
                self._penalty(totals + self.load[u], hosts)
                - self._penalty(totals, hosts)
                - near[u] * per_unit
            )
            host[u] = h = int(np.argmin(np.where(self.allowed[u], grows, np.inf)))
            totals[h] += self.load[u]
            near[:, h] += self.affinity[:, u]
        return host

    def _improved(self, host: np.ndarray) -> np.ndarray:
        """The division after moves and exchanges of units, until none makes it cheaper."""
        host, changed, passes = host.copy(), True, 0
        totals, hosts = self._totals(host), np.arange(len(self.share))
        # [U, H] affinity of a unit to those of a host.
        near = self.affinity @ np.eye(len(hosts))[host]
        while changed and passes < _MOST_PASSES:
            changed, passes = False, passes + 1
            for u in range(len(host)):
                # What does not fit is worth waiting for.
                if not self._meter.left() and (totals[:, _MEMORY] <= self.memory).all():
                    return host
                here, now = host[u], self._penalty(totals, hosts)
                by_move = self._by_move(u, here, totals, now, near)
                by_swap = self._by_swap(u, host, totals, now, near)
                v, to = int(np.argmin(by_swap)), int(np.argmin(by_move))
                # Rounding errors of large penalties are no gain: the search would go round in circles.
                if min(by_swap[v], by_move[to]) >= -(1e-12 + _ROUNDING * now.sum()):
                    continue
                moves = (
                    [(u, here, to)] if by_move[to] <= by_swap[v] else [(u, here, host[v]), (v, host[v], here)]
                )
                for w, old, new in moves:
                    host[w], changed = new, True
                    near[:, old] -= self.affinity[:, w]
                    near[:, new] += self.affinity[:, w]
                # Sums afresh: differences would gather rounding errors.
                totals = self._totals(host)
        return host

    def _by_move(
        self, u: int, here: int, totals: np.ndarray, now: np.ndarray, near: np.ndarray
    ) -> np.ndarray:
        """[H] what it costs to move a unit to each host. inf where it may not be, or is."""
        hosts = np.arange(len(now))
        leaves = self._penalty(totals[here] - self.load[u], hosts[here]) - now[here]
        costs = (
            leaves
            + self._penalty(totals + self.load[u], hosts)
            - now
            - (near[u] - near[u, here]) / (self.all_affinity or 1.0)
        )
        return np.where(self.allowed[u] & (hosts != here), costs, np.inf)

    def _by_swap(
        self, u: int, host: np.ndarray, totals: np.ndarray, now: np.ndarray, near: np.ndarray
    ) -> np.ndarray:
        """[U] what it costs to exchange a unit with each other one. inf where they may not, or share one."""
        here, v = host[u], np.arange(len(host))
        differs = self.load[u] - self.load
        loses = near[u, here] - near[u, host] + near[v, host] - near[v, here] + 2 * self.affinity[u]
        costs = (
            self._penalty(totals[here] - differs, np.full(len(host), here))
            - now[here]
            + self._penalty(totals[host] + differs, host)
            - now[host]
            + loses / (self.all_affinity or 1.0)
        )
        return np.where((host != here) & self.allowed[u, host] & self.allowed[:, here], costs, np.inf)
