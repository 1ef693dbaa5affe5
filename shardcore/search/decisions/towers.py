"""Towers: hosts of tables, so that affine tables meet on one host (shardcore/io/towers.py).

Towers become constraints.pinned and job.tower_ratio: an ordinary problem, which every search, price and check
reads as it reads any other. TorchRec groups ranks in one way. So where a topology has rows over pods, each pod
has a tower, and is what "host" means here.

A local search finds the partition: the moves of Fiduccia and Mattheyses (1982) and the exchanges of
Kernighan and Lin (1970), from a greedy start and from random ones. It looks for, in this order:

1. memory that holds each host's tables;
2. hosts within a tolerance of their share of work and of memory: the sum of what is beyond it is least;
3. the most affinity within hosts;
4. even hosts.

Work is the predicted cost of each table in an op alone, divided by the speeds of a host's devices.

Shapes: U table groups (each of tables that have to share a host), H hosts; 2 resources: work in ms, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from shardcore.core.constraints import require_tower_domains
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import LEVELS, ROWS_OVER
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import CostModel, first_argmin, predicted_total_ms
from shardcore.io.towers import Towers
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.search.state.refusal import first_names_text
from shardcore.search.ties import min_by_cost
from shardcore.step.lower import lower
from shardcore.step.memory import local_batch_bytes, size_text, table_peak_bytes, usable_bytes
from shardcore.step.ways import must_be_on_all_devices
from shardcore.tables.hot_rows import cold_part_names, rename_to_cold_parts

MOST_TABLE_GROUPS = 4096
"""A search compares all pairs of table groups."""
_TOLERANCE = 0.1
"""A host's work or memory may exceed its share by this much before affinity stops counting."""
_OVERFULL, _UNBALANCED, _UNEVEN = 1e12, 1e6, 1e-6
"""Weights that put the aims in their order: affinity within hosts counts at most 1."""
_WORK, _MEMORY = range(2)
_ROUNDING = 1e-13
"""Changes of a cost by less than this share of it count as none."""
_MOST_PASSES = 100
"""Passes over all table groups, from one start. A few are enough."""
_MOST_STARTS, _PAIRS = 32, 500_000
"""Starts of the local search, and pairs of table groups over all starts: small problems have more starts."""


# --- problems and plans with towers -------------------------------------------------------------------------


def devices_by_tower_domain(topology: Topology) -> dict[str, tuple[int, ...]]:
    """Devices of each host, or pod, that may have a tower, by the domain's name."""
    domain_of = LEVELS[ROWS_OVER[topology.row_domain]].domain
    return {domain_of(topology.devices[domain[0]].host): domain for domain in topology.row_domains}


def pin_tables_to_towers(problem: Problem, host_of: Mapping[str, str], ratio: float) -> Problem:
    """Problem with its tables pinned to hosts, and with outputs that cross hosts `ratio` times smaller.

    Raises ShardCoreError for hosts that cannot have towers.
    """
    on_host = devices_by_tower_domain(problem.topology)
    pinned = tuple(
        (t.name, tuple(sorted({*on_host[host_of[t.name]]} & {*problem.allowed_devices(t.name)})))
        for t in problem.tables
        if not _is_outside_towers(t, problem)
    )
    return replace(
        problem,
        constraints=replace(problem.constraints, pinned=pinned),
        job=replace(problem.job, tower_ratio=float(ratio)),
    )


def with_towers_of_plan(plan: Plan, problem: Problem) -> Problem:
    """Problem with the towers of a plan: hosts by the plan's placements, and the ratio in its provenance.

    The problem itself for a plan without towers. Raises ShardCoreError for an entry that is no ratio, or a
    table on several hosts.
    """
    if "tower_ratio" not in plan.provenance:
        return problem
    ratio = plan.provenance["tower_ratio"]
    name_of = {d: name for name, domain in devices_by_tower_domain(problem.topology).items() for d in domain}
    require(
        isinstance(ratio, int | float) and not isinstance(ratio, bool),
        f"plan has tower_ratio {ratio!r} in its provenance; it needs a number, 1 or more",
    )
    host_of: dict[str, str] = {}
    for placement in plan.placements:
        name = placement.shard.table.name
        # A sequence's hot rows are on all devices, whatever its tower.
        if _is_outside_towers(placement.shard.table, problem):  # it is on no one host
            continue
        for host in (name_of[d] for d in placement.devices):
            require(
                host_of.setdefault(name, host) == host,
                f"plan has towers, but table {name!r} on {problem.topology.row_domain}s {host_of[name]!r} and "
                f"{host!r}; it needs one",
            )
    return pin_tables_to_towers(problem, host_of, ratio)


def _is_outside_towers(table: Table, problem: Problem) -> bool:
    """Tell if a table belongs to no tower: a sequence that is on all devices, such as hot rows."""
    return table.sequence and must_be_on_all_devices(table, problem)


def step_ms_without_towers(plan: Plan, problem: Problem, model: CostModel) -> float | None:
    """ms of a step of a plan if its job had no towers; None for a problem without towers."""
    if problem.job.tower_ratio is None:
        return None
    plain = replace(problem, job=replace(problem.job, tower_ratio=None))
    return predicted_total_ms(lower(plan, plain, fits=False), model)


# --- the decision -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TowerHosts(Proposal):
    """Proposal of a host for each table, such that affine tables share a host.

    problem: the problem with each table pinned to its host, and with the ratio in its job.
    host_of: the host of each table.
    affinity_inside: share of the matrix's affinity that lies within hosts. 1 where there is no matrix.
    loads: [H] a host's work and memory over its share of the whole. 1 is even.
    """

    host_of: Mapping[str, str]
    affinity_inside: float
    loads: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class OnTowers(Decision, noun="towers"):
    """Choose the host of each tower. A plan with towers is one of the problem without them.

    start: a plan that the search improves. Its tables may stay on their hosts.
    moves: True if they may also leave these.
    """

    towers: Towers
    start: Plan | None = None
    moves: bool = True

    name: ClassVar[str] = "towers"
    level: ClassVar[int] = 5
    against: ClassVar[Mapping[str, str]] = {"sharding groups": "towers are of all hosts of a problem"}

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[TowerHosts, ProposalOutcome, None]:
        """Hosts of the plan to start from, if any, and hosts found by a search in a third of the seconds.

        Raises ShardCoreError as `assign_tower_hosts` does.
        """
        towers, for_problem = (
            self.towers.with_renamed_tables(cold_part_names(problem)),
            model.for_problem(problem),
        )
        # The search for a plan needs the rest.
        third = seconds and seconds / 3
        kept = None
        if self.start:
            with suppress(ShardCoreError):  # the towers are against these hosts
                stays = _pin_to_hosts_of_plan(problem, rename_to_cold_parts(self.start, problem))
                kept = assign_tower_hosts(stays, towers, for_problem, third)
        if kept:
            yield replace(kept, words="hosts of the plan before", more=int(self.moves))
        if self.moves or not kept:
            yield assign_tower_hosts(problem, towers, for_problem, third)

    def adopt(self, proposal: TowerHosts, found: FoundPlan, problem: Problem, model: CostModel) -> FoundPlan:
        constraints = replace(found.problem.constraints, pinned=problem.constraints.pinned)
        whole = replace(found.problem, job=problem.job, constraints=constraints)
        loads = [list(host) for host in proposal.loads]
        towers = {"affinity_inside": proposal.affinity_inside, "loads": loads}
        ratio = {"tower_ratio": self.towers.compression_ratio}
        plan = replace(found.plan, provenance={**found.plan.provenance, **ratio, "towers": towers})
        return replace(found, problem=whole, plan=plan)

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        hosts: TowerHosts = outcome.proposal
        return {
            "affinity inside": f"{hosts.affinity_inside:.0%}",
            "fullest host": f"{max(map(max, hosts.loads)):.0%} of its share",
        }


def _pin_to_hosts_of_plan(problem: Problem, plan: Plan) -> Problem:
    """Problem with each table pinned to its host in a plan, where a table has exactly one allowed host."""
    placed = plan.placements_by_table()
    domain_of = {d: domain for domain in problem.topology.row_domains for d in domain}
    # Tables on several hosts, and new ones, stay free.
    pins = dict(problem.constraints.pinned)
    for name in (t.name for t in problem.tables):
        domains = {domain_of[d] for p in placed.get(name, ()) for d in p.devices if d in domain_of}
        if len(domains) == 1 and (allowed := set(*domains) & set(problem.allowed_devices(name))):
            pins[name] = tuple(sorted(allowed))
    return replace(problem, constraints=replace(problem.constraints, pinned=tuple(pins.items())))


def assign_tower_hosts(
    problem: Problem, towers: Towers, model: CostModel, seconds: float | None = None
) -> TowerHosts:
    """Assign tables to hosts such that towers share affine tables, within memory and with even work.

    Constraints of tables (pinned) are kept. Tables kept together count as a group.

    seconds: time after which a division that fits will do. None: no limit.

    Raises ShardCoreError for a table that the problem lacks, and where its hosts cannot have towers.
    Raises Infeasible, which names a group and by how much it does not fit, if memory is too small.
    """
    known, topology = {t.name for t in problem.tables}, problem.topology
    on_host = devices_by_tower_domain(topology)
    require_tower_domains({}, topology.row_domains, topology.row_domain, f"problem {problem.name!r}")
    for name in (*(n for group in towers.towers for n in group), *towers.tables):
        require(name in known, f"towers have table {name!r}, which problem {problem.name!r} does not have")
    require(
        problem.job.tower_ratio is None,
        f"problem {problem.name!r} has job.tower_ratio "
        f"{problem.job.tower_ratio}, so its towers are placed already; leave out one of the two",
    )
    table_groups = _tables_sharing_hosts(problem, towers)
    require(
        len(table_groups) <= MOST_TABLE_GROUPS,
        f"towers leave {len(table_groups)} groups of tables; at most {MOST_TABLE_GROUPS} are "
        "divided over hosts, so more tables need to be in groups",
    )
    allowed_of = {t.name: set(problem.allowed_devices(t.name)) for t in problem.tables}
    # A table group may live on a host if each of its tables may be on some device there.
    allowed = np.array(
        [
            [all({*host} & allowed_of[name] for name in table_group) for host in on_host.values()]
            for table_group in table_groups
        ]
    )
    for table_group, may in zip(table_groups, allowed, strict=True):
        require(
            bool(may.any()),
            f"towers keep tables {first_names_text(table_group)} on one host, "
            "but constraints.pinned leaves them none in common",
        )
    number = {name: i for i, table_group in enumerate(table_groups) for name in table_group}
    group_of = [number[t.name] for t in problem.tables]
    codes = model.encode([Shard.whole(t) for t in problem.tables])
    # [2, T] work and memory of the tables.
    of_tables = [np.asarray(model.op_ms(codes)), [table_peak_bytes(t, problem) for t in problem.tables]]
    load = np.stack([np.bincount(group_of, x, len(table_groups)) for x in of_tables], 1)  # [U, 2]
    affinity = np.zeros((len(table_groups), len(table_groups)))  # [U, U]
    in_matrix = [number[name] for name in towers.tables]
    # Affinity of a table to itself says nothing.
    np.add.at(affinity, np.ix_(in_matrix, in_matrix), towers.affinity_matrix() * (1 - np.eye(len(in_matrix))))
    # Each device has the local batch as well, so that much is not free for tables.
    local = local_batch_bytes(problem)
    free = [max(0, may_hold - local) for may_hold in usable_bytes(problem)]
    speeds = [sum(topology.devices[d].speed for d in host) for host in on_host.values()]
    # At least a byte: shares of nothing are not defined.
    room = [max(1, sum(free[d] for d in host)) for host in on_host.values()]
    capacity = np.array(list(zip(speeds, room, strict=True)), dtype=float)
    division = TowerDivision(affinity, load, capacity, allowed, seconds)
    of_groups = division.best_division()
    host = of_groups[len(on_host) :]
    _require_hosts_fit(table_groups, host, load[:, _MEMORY], capacity[:, _MEMORY], problem)
    host_of = {t.name: list(on_host)[host[number[t.name]]] for t in problem.tables}
    return TowerHosts(
        words="hosts found",
        problem=pin_tables_to_towers(problem, host_of, towers.compression_ratio),
        host_of=host_of,
        affinity_inside=division.affinity_share_inside(of_groups),
        loads=tuple(map(tuple, (division.host_totals(of_groups) / division.share).tolist())),
    )


def _tables_sharing_hosts(problem: Problem, towers: Towers) -> list[tuple[str, ...]]:
    """Tuples of tables that have to share a host: of a tower's group, or of constraints.together.

    Tables, and the groups, are in the problem's order.
    """
    number = {t.name: i for i, t in enumerate(problem.tables)}
    # The group of each table. Groups that have a table in common become one.
    table_groups = {name: [name] for name in number}
    for group in (*towers.towers, *problem.constraints.together):
        merged = sorted({n for name in group for n in table_groups[name]}, key=number.__getitem__)
        table_groups |= dict.fromkeys(merged, merged)
    # In the order of their first tables.
    return list(dict.fromkeys(map(tuple, table_groups.values())))


def _require_hosts_fit(
    table_groups: Sequence[Sequence[str]],
    host: np.ndarray,
    n_bytes: np.ndarray,
    room: np.ndarray,
    problem: Problem,
) -> None:
    """Raise Infeasible if tables on a host take more memory than the host has."""
    held = np.bincount(host, n_bytes, len(room))
    h = int(np.argmax(held - room))
    if held[h] > room[h]:
        # The largest group there. In smaller ones, it may fit.
        over, here = held[h] - room[h], np.flatnonzero(host == h)
        table_group = table_groups[int(here[np.argmax(n_bytes[here])])]
        what = (
            f"table {table_group[0]!r}"
            if len(table_group) == 1
            else f"the group {first_names_text(table_group)}"
        )
        raise Infeasible(
            f"problem {problem.name!r} does not fit: no division of its towers over "
            f"{len(room)} hosts was found. In the best one {what} is on host "
            f"{list(devices_by_tower_domain(problem.topology))[h]!r}, whose tables take {size_text(held[h])} with "
            f"outputs; it may hold {size_text(room[h])}, {size_text(over)} too little. It may fit in smaller groups, "
            "or with that much more memory on each host"
        )


# --- the division -------------------------------------------------------------------------------------------


class TowerDivision:
    """A division of table groups over hosts, by local search. The first groups are empty, one of each host.

    What changes places with an empty group moves, and the empty group stays where it is.

    affinity: [U, U] symmetric.
    load: [U, 2] work and memory.
    capacity: [H, 2] speed and memory.
    allowed: [U, H] hosts where a table group may be.
    seconds: time after which a division that fits will do. None: no limit.

    Affinity within a table group is not counted: no division changes that.
    """

    def __init__(
        self,
        affinity: np.ndarray,
        load: np.ndarray,
        capacity: np.ndarray,
        allowed: np.ndarray,
        seconds: float | None = None,
    ) -> None:
        n = len(capacity)
        self.load, self.affinity = np.pad(load, ((n, 0), (0, 0))), np.pad(affinity, ((n, 0), (n, 0)))
        self.allowed = np.pad(allowed, ((n, 0), (0, 0)), constant_values=True)
        self.memory, self.hosts = capacity[:, _MEMORY], np.arange(n)
        self._meter = Budget(seconds=seconds).start()
        self._inside_groups = float(np.trace(affinity)) / 2
        # A table group's own affinity is the same in every division, and would count as lost by each move.
        np.fill_diagonal(self.affinity, 0.0)
        self.all_affinity = float(self.affinity.sum()) / 2
        # [H, 2] what a host has if all have the same share.
        self.share = np.maximum(capacity / capacity.sum(0) * load.sum(0), 1e-300)

    def best_division(self) -> np.ndarray:
        """[H + U] host of each table group in the best division found from all starts."""
        # Fixed, so that equal problems and towers get equal hosts.
        rng, found = np.random.default_rng(0), list[np.ndarray]()
        starts = min(_MOST_STARTS, max(2, 1 + _PAIRS // len(self.load) ** 2))
        while len(found) < starts and (not found or self._meter.has_budget_left()):
            anywhere = [rng.choice(np.flatnonzero(may)) for may in self.allowed[len(self.hosts) :]]
            found.append(self._improve_division(np.concatenate([self.hosts, anywhere])))
        return min_by_cost(found, self.cost)

    def cost(self, host: np.ndarray) -> float:
        """Cost of a division that the search minimises: the weighted sum of overfull memory, imbalance and lost
        affinity.
        """
        return float(
            self._host_penalties(self.host_totals(host), self.hosts).sum()
            - self._pair_affinity_share_inside(host)
        )

    def affinity_share_inside(self, host: np.ndarray) -> float:
        """Share of the affinity between different tables that lies within hosts; 1 without affinity."""
        whole = self.all_affinity + self._inside_groups
        return (
            (self._pair_affinity_share_inside(host) * self.all_affinity + self._inside_groups) / whole
            if whole
            else 1.0
        )

    def host_totals(self, host: np.ndarray) -> np.ndarray:
        """[H, 2] total work and memory of each host."""
        return np.stack([np.bincount(host, x, len(self.share)) for x in self.load.T], 1)

    def _pair_affinity_share_inside(self, host: np.ndarray) -> float:
        same = self.affinity[host[:, None] == host].sum() / 2
        return float(same) / self.all_affinity if self.all_affinity else 1.0

    def _host_penalties(self, totals: np.ndarray, hosts: np.ndarray) -> np.ndarray:
        """[...] penalties of hosts [...] whose work and memory are totals [..., 2]."""
        relative = totals / self.share[hosts]  # [..., 2]
        overfull = np.maximum(0.0, totals[..., _MEMORY] / self.memory[hosts] - 1)
        beyond = np.maximum(0.0, relative - (1 + _TOLERANCE)).sum(-1)
        return _OVERFULL * overfull + _UNBALANCED * beyond + _UNEVEN * (relative**2).sum(-1) / len(self.share)

    def _improve_division(self, host: np.ndarray) -> np.ndarray:
        """Improve a division by swaps of table groups between hosts, until no swap makes the division cheaper."""
        totals, n = self.host_totals(host), len(self.hosts)
        # [H + U, H] affinity of a table group to those of a host.
        near = self.affinity @ np.eye(n)[host]
        for _ in range(_MOST_PASSES):
            before = host.copy()
            for u in range(n, len(host)):
                # What does not fit is worth waiting for.
                if not self._meter.has_budget_left() and (totals[:, _MEMORY] <= self.memory).all():
                    return host
                costs, here = self._exchange_costs(u, host, totals, near), host[u]
                v = first_argmin(costs)
                # Rounding errors of large penalties are no gain: the search would go round in circles.
                if costs[v] >= -(1e-12 + _ROUNDING * self._host_penalties(totals, self.hosts).sum()):
                    continue
                for w, new in ((u, host[v]), (v, here)):
                    near[:, host[w]] -= self.affinity[:, w]
                    near[:, new] += self.affinity[:, w]
                    host[w] = new
                host[:n] = self.hosts
                # Sums afresh: differences would gather rounding errors.
                totals = self.host_totals(host)
            if (host == before).all():
                break
        return host

    def _exchange_costs(self, u: int, host: np.ndarray, totals: np.ndarray, near: np.ndarray) -> np.ndarray:
        """[H + U] cost of swapping one table group with each; inf for groups that may not move or share its host."""
        here, now = host[u], self._host_penalties(totals, self.hosts)
        differs = self.load[u] - self.load  # [H + U, 2] that the other host gains
        # The affinity between both stays between hosts, but `near` counts it as gained, twice.
        others = near[np.arange(len(host)), host] - near[:, here]
        loses = near[u, here] - near[u, host] + others + 2 * self.affinity[u]
        first = self._host_penalties(totals[here] - differs, np.full(len(host), here)) - now[here]
        both = first + self._host_penalties(totals[host] + differs, host) - now[host]
        costs = both + loses / (self.all_affinity or 1.0)
        return np.where((host != here) & self.allowed[u, host] & self.allowed[:, here], costs, np.inf)
