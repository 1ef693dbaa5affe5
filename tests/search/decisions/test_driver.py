"""The driver of decisions: how they nest, what the ledger says, and how time is divided."""

import json
from dataclasses import replace

import pytest

from shardcore.core import progress
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.io import files
from shardcore.io.towers import Towers
from shardcore.plans.replan import ReplanConfig, Start
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions import provision
from shardcore.search.decisions.driver import Decision, Proposal, decide, ledger_from_provenance
from shardcore.search.decisions.groups import FoundGroups, Groups
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.search.decisions.memory_tiers import MemoryTiers
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.search.decisions.towers import OnTowers, with_towers_of_plan
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import problem_of_group
from shardcore.tables.hot_rows import COLD, HOT

MIB = 1 << 20
MODEL = AnalyticModel(Setting("any", 512), exchange_gbps=0.5, exchange_latency_ms=0.01)
EVALS = Budget(evals=300)


def problem(memory_bytes: int = 64 * MIB, sequences: int = 0, **links) -> Problem:
    """Eight devices on two hosts, and tables of which the first are sequences."""
    tables = tuple(
        Table(f"t{i}", 20_000, 32, 4.0 + 12 * (i < sequences), Zipf(1.2), sequence=i < sequences)
        for i in range(8)
    )
    devices = tuple(Device(memory_bytes, host=f"h{i // 4}") for i in range(8))
    return Problem("p", tables, Topology(devices, **links), 512)


def found(of: Problem, *decisions: Decision, search: str = "anneal", budget: Budget | None = EVALS):
    return decide(of, MODEL, decisions, SHARDERS[search], budget=budget)


class Memories(Decision):
    """The problem with each of several memories, proposed one after another until one has no plan."""

    name, level = "memories", 0

    def __init__(self, *mib: int) -> None:
        self.mib, self.seconds = mib, []

    def proposals(self, problem, model, seconds):
        for i, mib in enumerate(self.mib):
            devices = (Device(mib * MIB),) * len(problem.topology)
            own = replace(problem, topology=replace(problem.topology, devices=devices))
            self.outcome = yield Proposal(words=f"{mib} MiB", problem=own, more=len(self.mib) - 1 - i)
            if not self.outcome.found:
                return


class Borrows(Decision):
    """The problem, which may have a plan that is known already."""

    name, level = "borrows", 0

    def __init__(self, plan) -> None:
        self.plan = plan

    def proposals(self, problem, model, seconds):
        self.outcome = yield Proposal(words="again", problem=problem, plans=(self.plan,))


# --- one decision -------------------------------------------------------------------------------------------


def test_without_decisions_it_is_the_sharder():
    plain = found(problem())
    assert plain.plan == SHARDERS["anneal"](problem(), MODEL, budget=EVALS)
    assert plain.problem == problem() and plain.ledger is None and "decisions" not in plain.plan.provenance


def test_a_decision_hears_what_came_of_each_proposal_and_the_ledger_has_it():
    asked = Memories(64, 32, 1, 16)
    best = found(problem(), asked)
    assert asked.outcome.found is None and isinstance(asked.outcome.error, Infeasible)
    ledger = ledger_from_provenance(json.loads(json.dumps(best.plan.provenance)))
    assert ledger == best.ledger
    assert (ledger.decision, ledger.chosen) == ("memories", "64 MiB")
    assert ledger.because == "least ms of 2 with a plan"
    assert [entry.proposed for entry in ledger.entries] == ["64 MiB", "32 MiB", "1 MiB"]
    assert [entry.ms is None for entry in ledger.entries] == [False, False, True]
    assert "does not fit" in ledger.entries[2].why and not ledger.entries[0].why
    assert [entry.evals for entry in ledger.entries[:2]] == [300, 300] and best.evals == 600
    assert all(entry.seconds >= 0 for entry in ledger.entries)


def test_a_ledger_of_another_form_is_named():
    with pytest.raises(ShardCoreError, match="provenance: decisions.* 'chosen'"):
        ledger_from_provenance({"decisions": {"decision": "memories"}})


def test_what_no_proposal_can_is_one_error_that_names_the_first():
    with pytest.raises(Infeasible, match="^problem 'p' does not fit"):
        found(problem(), Memories(1))
    small = replace(problem(), topology=replace(problem().topology, devices=(Device(MIB),) * 8))
    with pytest.raises(Infeasible, match="none of 6 proposals of .* has a plan; all 8 devices as one"):
        found(small, Groups())
    other = replace(problem(), optimizer="adam")
    with pytest.raises(SettingMismatch, match="none of 6 proposals of .*; all 8 devices .* adam"):
        found(other, Groups())


def test_seconds_are_of_all_searches_together_and_what_one_leaves_the_others_get():
    given = []

    def search(problem, model, *, seed=0, budget=None):
        given.append(budget.seconds)
        return SHARDERS["size_greedy"](problem, model)

    decide(problem(), MODEL, [Memories(64, 32, 16)], search, budget=Budget(seconds=30))
    # A search that takes no time leaves all of it.
    assert given == pytest.approx([10, 15, 30], rel=0.1)
    decide(problem(), MODEL, [Memories(64, 32), Groups("8")], search, budget=Budget(evals=7))
    assert given[3:] == [None, None]


def test_out_of_time_it_ends_with_what_it_has(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])

    def search(problem, model, *, seed=0, budget=None):
        now[0] += 7  # more than its share
        return SHARDERS["size_greedy"](problem, model)

    best = decide(problem(), MODEL, [Memories(64, 32, 16)], search, budget=Budget(seconds=6))
    assert [entry.why for entry in best.ledger.entries] == ["", "no time was left for it"]


@pytest.mark.parametrize(
    "make",
    [
        lambda of: Groups("8"),
        lambda of: RowDomains(),
        lambda of: HotRows(),
        lambda of: MemoryTiers(),
        lambda of: OnTowers(Towers(2.0, (("t6", "t7"),))),
        lambda of: Start(SHARDERS["random"](of, MODEL), of, algorithm="anneal"),
    ],
    ids=["groups", "row domains", "hot rows", "tiers", "towers", "start"],
)
def test_every_decision_gives_a_plan_of_its_problem_at_its_cost_and_a_ledger_that_files_keep(make, tmp_path):
    asked = problem(sequences=2)
    best = found(asked, make(asked))
    own = with_towers_of_plan(best.plan, best.problem)
    assert price(lower(best.plan, own), MODEL.for_problem(own)).total_ms == pytest.approx(best.ms)
    assert best.ms == min(x.ms for x in best.outcomes) and best.chosen_proposal in [
        x.proposal for x in best.outcomes
    ]
    files.write_plan(tmp_path / "plan.json", best.plan, best.problem)
    read = files.read_plan(tmp_path / "plan.json", best.problem)
    assert read == best.plan and ledger_from_provenance(read.provenance) == best.ledger
    assert best.ledger.winning_entry.ms == best.ms and best.evals >= best.ledger.winning_entry.evals > 0


# --- decisions within decisions -----------------------------------------------------------------------------


def test_groups_whose_tables_do_not_fit_have_rows_in_the_memory_of_their_share_of_a_host():
    tight = problem(4 * MIB, memory=(Memory("host", 64 * MIB, 25.0),))
    with pytest.raises(Infeasible):
        found(tight, Groups("2"))
    best = found(tight, MemoryTiers(), Groups("2"))  # in any order
    assert isinstance(best, FoundGroups) and best.grouping.size == 2
    assert any(table.in_host_memory for table in best.problem.tables)
    # Of a host of four devices a group has one half, or a quarter on each of two.
    layout = best.grouping.layout
    assert best.problem.topology.memory_of("host").bytes == (32 if layout == "contiguous" else 16) * MIB
    assert problem_of_group(best.whole, best.grouping) == best.problem
    assert best.whole.topology == tight.topology
    lower(best.plan, best.problem)
    inner = next(e for e in best.ledger.entries if e.proposed == best.ledger.chosen).within
    assert inner.decision == "memory tiers" and len(inner.entries) > 1
    assert best.cost.total_ms == best.ms == pytest.approx(best.cost.step_ms + best.cost.sync_ms)


def test_towers_hold_the_cold_rows_of_their_sequences_and_hot_ones_are_everywhere():
    asked = problem(sequences=3, links=make_links(within_host=5.0, between_hosts=0.5, latency_ms=0.01))
    towers = Towers(4.0, (("t0", "t4"), ("t1", "t5")))
    best = found(asked, OnTowers(towers), HotRows())
    hot = {table.name.removesuffix(HOT) for table in best.problem.tables if table.name.endswith(HOT)}
    assert hot and best.problem.job == asked.job and not best.problem.constraints.pinned
    own = with_towers_of_plan(best.plan, best.problem)
    assert own.job.tower_ratio == 4.0
    assert price(lower(best.plan, own), MODEL.for_problem(own)).total_ms == pytest.approx(best.ms)
    devices, host_of = asked.topology.devices, {}
    for p in best.plan.placements:
        host_of.setdefault(p.shard.table.name, set()).update(devices[d].host for d in p.devices)
    for one, other in towers.towers:
        together = host_of[one + COLD if one in hot else one] | host_of[other]
        assert len(together) == 1
    assert all(len(host_of[name + HOT]) == 2 for name in hot)
    assert [e.within.decision for e in best.ledger.entries if e.within] == ["towers"] * len(
        [e for e in best.ledger.entries if e.ms]
    )


@pytest.mark.long
def test_towers_may_have_rows_in_host_memory():
    tight = problem(2 * MIB, memory=(Memory("host", 64 * MIB, 25.0),))
    best = found(tight, OnTowers(Towers(2.0, (("t0", "t1"),))), MemoryTiers())
    assert any(table.in_host_memory for table in best.problem.tables) and not best.problem.constraints.pinned
    own = with_towers_of_plan(best.plan, best.problem)
    assert price(lower(best.plan, own), MODEL.for_problem(own)).total_ms == pytest.approx(best.ms)


@pytest.mark.parametrize(
    "decisions, why",
    [
        ([Groups(), OnTowers(Towers(2.0, (("t0",),)))], "sharding groups and towers .* towers are of all"),
        (
            [provision.Provision([], {}, provision.ProvisionTarget(1.0)), MemoryTiers()],
            "clusters and memory tiers ",
        ),
        ([MemoryTiers(), MemoryTiers()], "memory tiers were asked for twice"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_any_search(decisions, why):
    def search(*_, **__):
        raise AssertionError("it searched")

    with pytest.raises(ShardCoreError, match=why):
        decide(problem(), MODEL, decisions, search)


# --- from a plan that there is ------------------------------------------------------------------------------


def test_hot_rows_are_taken_out_of_a_plan_and_cold_ones_stay():
    asked = problem(sequences=3)
    old = SHARDERS["random"](asked, MODEL)
    best = found(asked, HotRows(), Start(old, asked, algorithm="anneal_columns", config=ReplanConfig(0)))
    assert best.problem != asked
    was = {p.shard.table.name: p.devices for p in old.placements}
    now = {p.shard.table.name.removesuffix(COLD): p.devices for p in best.plan.placements}
    assert {name: now[name] for name in was} == was
    assert best.plan.provenance["moved"]["chosen"]["tables"] == []


def test_a_plan_of_groups_is_improved_and_other_groups_are_searched_afresh():
    asked = problem()
    old = found(asked, Groups("4"), search="random")
    start = Start(old.plan, old.problem, algorithm="anneal", group=old.problem)
    best = found(asked, Groups("4"), start)
    words = [[e.proposed for e in entry.within.entries] for entry in best.ledger.entries]
    assert sorted(words) == [["afresh"], ["from the plan before"]]
    same = next(x.found for x in best.outcomes if x.found.grouping == old.grouping)
    assert same.ms <= old.ms and "moved" in same.plan.provenance
    limited = replace(start, config=ReplanConfig(1))
    kept = found(asked, Groups("4"), limited)
    assert kept.grouping == old.grouping and len(kept.plan.provenance["moved"]["chosen"]["tables"]) <= 1
    assert [e.why for e in kept.ledger.entries if e.ms is None] == [
        "at most 1 tables may move; in groups of another size or layout every table does"
    ]


def test_towers_may_keep_the_hosts_of_a_plan():
    asked = problem()
    towers = OnTowers(Towers(2.0, (("t0", "t1"), ("t2", "t3"))))
    old = found(asked, towers, search="random")
    again = replace(towers, start=old.plan)
    best = found(asked, again, Start(old.plan, asked, algorithm="anneal"))
    assert [e.proposed for e in best.ledger.entries] == ["hosts of the plan before", "hosts found"]
    assert best.ms <= old.ms
    fixed = found(asked, replace(again, moves=False), Start(old.plan, asked, config=ReplanConfig(0)))
    assert fixed.plan == old.plan


def test_a_start_needs_an_algorithm_that_anneals_and_the_towers_of_its_plan():
    asked = problem()
    old = found(asked, OnTowers(Towers(2.0, (("t0", "t1"),)))).plan
    with pytest.raises(ShardCoreError, match="is for algorithm portfolio, anneal, .* got neuroshard"):
        Start(old, asked, algorithm="neuroshard")
    with pytest.raises(ShardCoreError, match="the plan to start from has towers; give the towers, too"):
        found(asked, Start(old, asked))


def test_a_plan_that_is_known_counts_where_the_search_finds_none_and_only_the_search_counts_evaluations():
    known = found(problem()).plan
    assert known.provenance["evals"] > 0

    def fails(of, model, **_):
        raise Infeasible("no plan")

    decision = Borrows(known)
    again = decide(problem(), MODEL, [decision], fails, budget=EVALS)
    assert again.plan.placements == known.placements and decision.outcome.found.evals == 0

    def breaks(of, model, **_):
        raise ShardCoreError("the model has no such payload")

    with pytest.raises(ShardCoreError, match="no such payload"):
        decide(problem(), MODEL, [Borrows(known)], breaks, budget=EVALS)
