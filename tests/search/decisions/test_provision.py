"""Which cluster is chosen, and what is refused."""

from dataclasses import replace

import pytest
from offers import write_offers

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.links import Link, make_links
from shardcore.core.progress import report_to_listener
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS
from shardcore.search.decisions.driver import FoundPlan, ProposalOutcome, decide
from shardcore.search.decisions.provision import (
    Cluster,
    Offer,
    Provision,
    ProvisionTarget,
    best_cluster_of_each_offer,
    candidate_clusters,
    read_offers,
)

GIB = 1 << 30
TABLES = tuple(Table(f"t{i}", 100_000, 16, 10.0) for i in range(12))
PROBLEM = Problem("p", TABLES, Topology((Device(GIB),)), 1536)
MODELS = {"m": AnalyticModel(Setting("cpu", 1536), lookup_ns=50.0)}
SMALL = Offer("small", 1, GIB, 1.0, "m", most_hosts=5)
PLAIN = {"name": "a", "devices": 1, "memory_bytes": 1, "price_per_hour": 1, "model": "m"}
LARGE = Offer("large", 4, GIB, 6.0, "m", most_hosts=2, links=make_links(within_host=100.0))


ANY = ProvisionTarget(step_ms=1e9)


def of(offer: Offer, hosts: int, ms: float) -> ProposalOutcome:
    problem = replace(PROBLEM, topology=offer.topology(hosts))
    cluster = Cluster(words=f"{hosts} x {offer.name!r}", problem=problem, offer=offer, hosts=hosts)
    return ProposalOutcome(proposal=cluster, found=FoundPlan(problem=problem, plan=Plan(()), ms=ms, evals=0))


def sweep(problem: Problem, offers, models, search, target: ProvisionTarget = ANY) -> list[ProposalOutcome]:
    return list(decide(problem, MODELS["m"], [Provision(offers, models, target)], search).outcomes)


def test_every_number_of_hosts_that_divides_the_batch_is_a_cluster():
    found = [
        (c.offer.name, c.hosts, len(c.problem.topology)) for c in candidate_clusters(PROBLEM, [SMALL, LARGE])
    ]
    # 1,536 samples are not divided evenly by 5 devices.
    assert found == [("small", n, n) for n in (1, 2, 3, 4)] + [("large", 1, 4), ("large", 2, 8)]
    two = list(candidate_clusters(PROBLEM, [LARGE]))[1].problem
    assert two.topology.hosts == ("host-0", "host-1") and two.topology.links == LARGE.links
    assert two.tables == PROBLEM.tables and two.global_batch == 1536
    [named] = candidate_clusters(PROBLEM, [replace(LARGE, name="8 x H100 (été)", most_hosts=1)])
    assert named.problem.name == "p.1x8-x-H100-t-" and named.words == "1 x '8 x H100 (été)'"


def test_more_machines_are_faster_and_the_cheapest_that_is_fast_enough_is_chosen():
    heard = []
    with report_to_listener(lambda phase, best_ms, left_s: heard.append(phase)):
        found = sweep(PROBLEM, [SMALL, LARGE], MODELS, SHARDERS["size_greedy"])
    assert [p for p in heard if p.endswith("begins")] == [f"{x.proposal.words}: begins" for x in found]
    assert len(found) == 6 and all(x.found for x in found)
    alone, four = found[0], found[3]
    assert four.ms < alone.ms and four.proposal.price_per_hour == 4
    assert four.proposal.samples_per_s(four.ms) == pytest.approx(1536e3 / four.ms)
    chosen = decide(
        PROBLEM,
        MODELS["m"],
        [Provision([SMALL, LARGE], MODELS, ProvisionTarget(step_ms=four.ms))],
        SHARDERS["size_greedy"],
    )
    assert chosen.ms <= four.ms and chosen.ledger.because.startswith("cheapest with step_ms ")
    assert chosen.chosen_proposal.price_per_hour == min(
        x.proposal.price_per_hour for x in found if x.ms <= four.ms
    )


def test_targets_of_time_speed_and_price():
    found = [of(SMALL, 1, 12.0), of(SMALL, 2, 6.0), of(SMALL, 4, 4.0), of(LARGE, 1, 3.0), of(LARGE, 2, 2.0)]

    def chosen(**target):
        best = best_cluster_of_each_offer(found, ProvisionTarget(**target))
        return [(x.proposal.offer.name, x.proposal.hosts) for x in best]

    assert chosen(step_ms=6.0) == [("small", 2), ("large", 1)]
    assert chosen(step_ms=3.5) == [("large", 1)]
    assert chosen(samples_per_s=1536 / 4e-3) == [("small", 4), ("large", 1)]
    assert chosen(price_per_hour=5.0) == [("small", 4)]
    assert chosen(price_per_hour=12.0) == [("large", 2), ("small", 4)]


def test_equally_cheap_clusters_rank_by_speed_and_equally_fast_ones_by_price():
    same, cheap = replace(SMALL, name="same"), replace(SMALL, name="cheap", price_per_hour=0.5)
    found = [of(SMALL, 2, 5.0), of(same, 2, 4.0), of(cheap, 2, 4.0)]
    names = [
        x.proposal.offer.name for x in best_cluster_of_each_offer(found[:2], ProvisionTarget(step_ms=7.0))
    ]
    assert names == ["same", "small"]
    assert best_cluster_of_each_offer(found, ProvisionTarget(price_per_hour=9.0))[0].proposal.offer is cheap


def test_a_cluster_without_room_says_why_and_a_target_out_of_reach_names_the_nearest():
    tight = replace(SMALL, memory_bytes=20 << 20)
    heard = []
    with pytest.raises(Infeasible, match="none of 2 proposals of clusters has a plan; 1 x 'small': "):
        decide(
            PROBLEM,
            MODELS["m"],
            [Provision([replace(tight, most_hosts=2)], MODELS, ANY)],
            SHARDERS["size_greedy"],
            heard=heard.append,
        )
    assert len(heard) == 2 and "MiB" in str(heard[0].error) and heard[0].ms == float("inf")
    with pytest.raises(ShardCoreError, match="no cluster of 2 reaches step_ms 1; the nearest, 2 x 'small'"):
        best_cluster_of_each_offer([of(SMALL, 1, 12.0), of(SMALL, 2, 6.0)], ProvisionTarget(step_ms=1.0))
    with pytest.raises(ShardCoreError, match="price_per_hour 0.5; the nearest, 1 x 'small', has 1"):
        best_cluster_of_each_offer(
            [of(SMALL, 1, 12.0), of(SMALL, 2, 6.0)], ProvisionTarget(price_per_hour=0.5)
        )


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: replace(SMALL, devices=0), "offer 'small' has devices 0"),
        (lambda: replace(SMALL, price_per_hour=-1.0), "price_per_hour -1.0"),
        (lambda: replace(LARGE, most_hosts=60_000), "most_hosts 60000 of 4 devices; a problem has 65536"),
        (lambda: replace(SMALL, links=(Link("within_host", 1.0),) * 2), "links of within_host, within_host"),
        (lambda: ProvisionTarget(), "the target has nothing"),
        (lambda: ProvisionTarget(1.0, 2.0), "it needs one of step_ms, samples_per_s, price_per_hour"),
        (
            lambda: list(
                candidate_clusters(replace(PROBLEM, constraints=Constraints(pinned=(("t0", (0,)),))), [SMALL])
            ),
            "constraints.pinned",
        ),
        (
            lambda: sweep(replace(PROBLEM, global_batch=7), [LARGE], MODELS, SHARDERS["random"]),
            "global_batch 7, which no number of hosts of offers large",
        ),
    ],
)
def test_what_makes_no_sense_is_named(make, said):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert said in str(error.value)


@pytest.mark.parametrize(
    "offers, said",
    [
        ([], "no offers"),
        ([{"name": "a"}], "lacks the key 'devices'"),
        ([PLAIN] * 2, "two offers 'a'"),
        ([PLAIN | {"gpus": 1}], "'gpus'"),
    ],
)
def test_a_file_of_offers_is_checked(offers, said, tmp_path):
    write_offers(tmp_path / "o.json", *offers)
    with pytest.raises(ShardCoreError) as error:
        read_offers(tmp_path / "o.json")
    assert said in str(error.value) and "o.json" in str(error.value)


def test_what_is_kept_free_by_default_follows_the_machines_that_are_offered():
    larger = replace(SMALL, name="larger", memory_bytes=8 * GIB)

    def kept(reserved):
        of = replace(PROBLEM, constraints=Constraints(reserved_bytes=reserved))
        return [
            c.problem.constraints.reserved_bytes
            for c in candidate_clusters(of, [SMALL, larger])
            if c.hosts == 1
        ]

    assert kept(int(0.15 * GIB)) == [int(0.15 * GIB), int(0.15 * 8 * GIB)]
    assert kept(1000) == [1000, 1000]


def test_a_model_of_another_setting_is_refused_before_any_search():
    models = {**MODELS, "other": AnalyticModel(Setting("cpu", 1536, optimizer="adam"))}

    def search(*_, **__):
        raise AssertionError("it searched")

    with pytest.raises(SettingMismatch, match="adam"):
        sweep(PROBLEM, [SMALL, replace(LARGE, model="other")], models, search)


def test_offers_have_hardware_of_their_own_and_constraints_may_fit_some_only():
    models = {"m": MODELS["m"], "n": AnalyticModel(Setting("another", 1536))}
    asked = replace(
        PROBLEM,
        topology=Topology(PROBLEM.topology.devices, "nvidia-h100"),
        constraints=Constraints(kinds=((TABLES[0].name, ("data_parallel",)),)),
    )
    found = sweep(
        asked,
        [replace(SMALL, most_hosts=1), replace(LARGE, model="n", most_hosts=1)],
        models,
        SHARDERS["size_greedy"],
    )
    assert [bool(x.found) for x in found] == [False, True] and "no devices share" in str(found[0].error)


def test_more_memory_is_never_dearer():
    """A search that does worse with more memory: the plan found with less stays possible."""

    def worse(problem, model, *, seed=0, budget=None):
        roomy = problem.topology.devices[0].memory_bytes > 2 * GIB
        return SHARDERS["random" if roomy else "size_lookup_greedy"](problem, model, seed=seed)

    found = sweep(PROBLEM, [SMALL, replace(SMALL, name="large", memory_bytes=8 * GIB)], MODELS, worse)
    by = {(x.proposal.offer.name, x.proposal.hosts): x.ms for x in found}
    assert all(by["large", hosts] <= ms for (name, hosts), ms in by.items() if name == "small")
    assert any(
        x.found.plan.provenance["algorithm"] != "random" for x in found if x.proposal.offer.name == "large"
    )
