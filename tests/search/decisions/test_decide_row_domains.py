"""The choice between rows over hosts and rows over pods, on links whose costs say which is better."""

from dataclasses import replace

import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.plans.replan import Start
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.groups import Groups
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.step.lower import lower

MODEL = AnalyticModel(Setting("any", 512))
BOTH = ("host_row", "pod_row")


def problem(*kinds: str, within_pod: float = 40.0, **given) -> Problem:
    """Two pods of two hosts of two devices. Tables have their rows divided by some kinds."""
    devices = tuple(Device(64 << 20, host=f"p{d // 4}/h{d // 2}") for d in range(8))
    links = make_links(0.01, within_host=40.0, within_pod=within_pod, between_hosts=2.0)
    tables = tuple(Table(f"t{i}", 40_000, 64, 20.0) for i in range(2))
    constraints = Constraints(kinds=tuple((t.name, kinds) for t in tables if kinds))
    return Problem("pods", tables, Topology(devices, links=links, **given), 512, constraints=constraints)


def found(of: Problem, *decisions, **budget):
    model = MODEL.for_problem(of)
    return decide(
        of, model, decisions or [RowDomains()], SHARDERS["anneal"], budget=Budget(**budget or {"evals": 200})
    )


@pytest.mark.parametrize("within_pod, domain", [(40.0, "pod"), (2.0, "host")])
def test_rows_are_divided_over_the_domains_whose_links_are_fast_enough(within_pod, domain):
    of = problem(*BOTH, within_pod=within_pod)
    best = found(of)
    assert {p.kind for p in best.plan.placements} == {f"{domain}_row"}
    assert best.ledger.chosen.startswith(f"rows over {domain}s of ") and best.ms == min(
        x.ms for x in best.outcomes
    )
    assert [entry.facts for entry in best.ledger.entries] == [{"tables divided so": 2}] * 2
    # The plan is one of the problem that leaves it open, at its cost.
    assert best.problem == of
    assert price(lower(best.plan, of), MODEL.for_problem(of)).total_ms == pytest.approx(best.ms)


def test_what_one_domain_cannot_run_the_other_does():
    best = found(problem("pod_row", within_pod=2.0))
    assert best.ledger.chosen == "rows over pods of 4 devices" and best.ledger.entries[0].why
    with pytest.raises(ShardCoreError, match="none of 2 proposals of row domains has a plan"):
        found(replace(problem(*BOTH), optimizer="adam"))


@pytest.mark.parametrize("domain", ["host", "pod"])
def test_a_topology_that_says_it_has_no_choice(domain):
    best = found(problem(*BOTH, within_pod=2.0 if domain == "pod" else 40.0, rows_over=domain))
    assert [entry.proposed.split()[2] for entry in best.ledger.entries] == [f"{domain}s"]
    assert {p.kind for p in best.plan.placements} == {f"{domain}_row"}


def test_a_plan_to_start_from_keeps_the_domains_of_its_job():
    of = problem(*BOTH)
    over_hosts = found(replace(of, topology=replace(of.topology, rows_over="host"))).plan
    best = found(of, RowDomains(over_hosts), Start(over_hosts, of, algorithm="anneal"))
    assert {p.kind for p in best.plan.placements} == {"host_row"} and len(best.ledger.entries) == 1
    assert "price" in best.plan.provenance["moved"]


def test_each_size_of_groups_has_domains_of_its_own():
    best = found(problem(*BOTH), Groups(), RowDomains())
    domains = {
        x.proposal.words: x.found and [e.proposed for e in x.found.ledger.entries] for x in best.outcomes
    }
    assert len(domains["all 8 devices as one group"]) == 2
    assert best.grouped_plan.problem.topology.rows_over is None
