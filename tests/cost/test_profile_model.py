"""ProfileModel: the promises of a cost model, and what its law says of ops, collectives and memory."""

import dataclasses
import math

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import (
    group_op_ms,
    predicted_total_ms,
    price,
    price_plan,
    with_predicted_dense_ms,
)
from shardcore.cost.profile import load_profile, profile_names
from shardcore.cost.profile_law import collective_ms
from shardcore.search import SHARDERS, Budget
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.lower import lower
from shardcore.testing.cost_models import CostModelConformance

H100 = load_profile("nvidia-h100-sxm")
TABLE = Table("t", 1_000_000, 128, 20.0, Zipf(1.05))


class TestH100(CostModelConformance):
    def model(self):
        return H100.cost_model()


class TestMI350(CostModelConformance):
    def model(self):
        return load_profile("amd-mi350").cost_model()


class TestCPU(CostModelConformance):
    def model(self):
        return load_profile("cpu").cost_model()


class TestDrawn(CostModelConformance):
    def model(self):
        return H100.with_sampled_rates(np.random.default_rng(3)).cost_model()


def problem(hosts=1, devices=8, tables=(TABLE,), profile=H100, **fields):
    fields = {"global_batch": 65_536, **fields}
    return Problem("p", tuple(tables), profile.topology(hosts, devices, 1 << 40), **fields)


def ms(table=TABLE, profile=H100, batch=65_536, **fields):
    """ms of an op with one table."""
    model = profile.cost_model().for_problem(
        problem(tables=[table], profile=profile, global_batch=batch, **fields)
    )
    return float(group_op_ms([[Shard.whole(table)]], model)[0])


@pytest.mark.parametrize("batch", [8, 1024, 1 << 20])
@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_any_setting_has_a_price(batch, optimizer, precision):
    of = problem(
        tables=[dataclasses.replace(TABLE, precision=precision)], global_batch=batch, optimizer=optimizer
    )
    model = H100.cost_model().for_problem(of)
    assert (model.setting.batch, model.setting.optimizer, model.setting.precision) == (
        batch,
        optimizer,
        precision,
    )
    workload = lower(SHARDERS["random"](of, model), of)
    cost = price(workload, model)
    assert cost.total_ms > 0
    assert cost.extrapolated[0].startswith("profile: published measurements, not of your machine (band ±")


@pytest.mark.parametrize(
    "more",
    [
        {"pooling": 30.0},
        {"dim": 256},
        {"rows": 4_000_000},
        {"access": Zipf(0.5)},
        {"weighted": True},
        {"features": 2},
        {"load_factor": 0.1},
        {"load_factor": 0.0},
    ],
)
def test_more_work_never_takes_less_time(more):
    assert ms(dataclasses.replace(TABLE, **more)) > ms()


def test_optimizers_cost_what_their_state_moves():
    sgd, rowwise, adagrad, adam = (
        ms(optimizer=name) for name in ("exact_sgd", "rowwise_adagrad", "exact_adagrad", "adam")
    )
    assert sgd < rowwise < adagrad < adam
    assert ms(dataclasses.replace(TABLE, precision="fp16")) < sgd


def test_narrow_rows_and_small_batches_are_less_efficient():
    narrow = dataclasses.replace(TABLE, dim=4)
    assert ms(narrow) > ms() / 8  # 32 times fewer bytes
    assert ms(batch=64) > 10 * (ms(batch=65_536) - ms(batch=32_768)) / 512


def test_backward_is_no_fixed_multiple_of_forward():
    shares = []
    for optimizer in ("exact_sgd", "adam"):
        model = H100.cost_model().for_problem(problem(optimizer=optimizer))
        forward, backward, _ = model.op_part_ms(model.encode([Shard.whole(TABLE)]))[0]
        shares.append(forward / (forward + backward))
    assert 0.2 < shares[1] < shares[0] < 0.6


def test_a_faster_card_is_faster_and_its_memory_holds_more():
    h200 = load_profile("nvidia-h200")
    assert ms(profile=h200) < ms() < ms(profile=load_profile("nvidia-a100-80"))
    assert h200.memory_bytes > H100.memory_bytes


def test_host_memory_follows_the_link_that_the_topology_gives():
    far = dataclasses.replace(TABLE, load_factor=0.0)
    own = problem(tables=[far])
    halved = dataclasses.replace(
        own.topology,
        memory=(dataclasses.replace(own.topology.memory[0], gbps=H100.rate_values["host_read_gbps"] / 2),),
    )
    slow = dataclasses.replace(own, topology=halved)
    fast_ms, slow_ms = (
        float(group_op_ms([[Shard.whole(far)]], H100.cost_model().for_problem(p))[0]) for p in (own, slow)
    )
    assert fast_ms < slow_ms < 2 * fast_ms


def test_rows_on_ssd_are_as_slow_as_the_link_to_it():
    """Prices are those of host memory behind a link of as many GB/s, whatever link it has itself."""
    below = {t: dataclasses.replace(TABLE, load_factor=0.01, tier=t) for t in ("host", "ssd")}
    topology = problem().topology

    def ms_of(tier, **gbps):
        memory = tuple(Memory(name, 1 << 40, x) for name, x in gbps.items())
        of = dataclasses.replace(topology, memory=memory)
        asked = Problem("p", (below[tier],), of, 65_536, "rowwise_adagrad")
        return float(group_op_ms([[Shard.whole(below[tier])]], H100.cost_model().for_problem(asked))[0])

    slow = ms_of("ssd", ssd=2.0)
    assert slow == pytest.approx(ms_of("host", host=2.0)) == pytest.approx(ms_of("ssd", host=40.0, ssd=2.0))
    assert slow > 2 * ms_of("ssd", ssd=20.0)


def transfers(collective, n_bytes, hosts=1, devices=8, job=Job(), **links):
    """ms forward and backward of one collective over all devices."""
    of = problem(hosts, devices, job=job)
    of = dataclasses.replace(of, topology=dataclasses.replace(of.topology, links=make_links(**links)))
    traffic = np.zeros((len(CHANNELS), hosts * devices))
    traffic[CHANNELS.index(Channel(collective))] = n_bytes
    cost = H100.cost_model().for_problem(of).comm_cost(traffic, np.zeros(hosts * devices), of.topology)
    return float(cost.forward_ms.max()), float(cost.backward_ms.max())


def test_large_messages_approach_the_bandwidth_and_small_ones_the_latency():
    gbps = H100.rate_values["all_to_all_within_host_gbps"]
    assert transfers("all_to_all", 1 << 34)[0] == pytest.approx((1 << 34) * 7 / 8 / gbps / 1e6, rel=0.02)
    assert transfers("all_to_all", 8)[0] == pytest.approx(
        H100.rate_values["all_to_all_within_host_latency_us"] / 1e3, rel=0.01
    )


@pytest.mark.parametrize("collective", ["all_to_all", "reduce_scatter"])
def test_networks_are_slower_than_hosts_and_given_links_count(collective):
    n = 1 << 26
    assert transfers(collective, n, 2)[0] > transfers(collective, n, 1, 16)[0]
    assert transfers(collective, n, 2, between_hosts=5.0)[0] > 3 * transfers(collective, n, 2)[0]
    shared = transfers(collective, n, 2, between_hosts=5.0, shared=True)[0]
    assert shared > 5 * transfers(collective, n, 2, between_hosts=5.0)[0]
    assert transfers(collective, 8, 2, latency_ms=3.0)[0] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(
    "collective, grows", [("all_gather", 127 / 15), ("reduce_scatter", 127 / 15), ("all_reduce", 8**0.5)]
)
def test_a_ring_starts_up_in_each_round(collective, grows):
    """Time that large messages take once, over 16 hosts and over two."""
    name = f"{collective}_between_hosts_ramp_us"

    def ramp_ms(hosts):
        domains, n_bytes = H100.topology(hosts, 8).domain_numbers, np.full(hosts * 8, float(1 << 50))
        more = H100.rate_values | {name: 1e9}
        return float(
            np.ptp([collective_ms(rates, collective, n_bytes, domains) for rates in (H100.rate_values, more)])
        )

    assert ramp_ms(16) == pytest.approx(grows * ramp_ms(2), rel=0.01)


def test_payloads_of_two_bytes_take_about_half():
    n = 1 << 30
    whole, half = (transfers("all_to_all", n, job=Job(forward_payload=p)) for p in ("fp32", "fp16"))
    assert half[0] == pytest.approx(whole[0] / 2, rel=0.1) and half[1] == whole[1]


def test_replicas_pay_for_their_dense_update():
    n = 1 << 28
    model = H100.cost_model().for_problem(problem())
    adam = dataclasses.replace(model, replica_optimizer="adam")
    traffic = np.zeros((len(CHANNELS), 8))
    traffic[CHANNELS.index(Channel("all_reduce"))] = n
    topology = problem().topology
    plain, of_adam = (m.comm_cost(traffic, np.zeros(8), topology).backward_ms.max() for m in (model, adam))
    assert of_adam - plain == pytest.approx(8 * n / H100.rate_values["dense_gbps"] / 1e6)


def test_switches_that_sum_make_all_reduces_cheaper():
    def ms_of(generation):
        rate = dataclasses.replace(H100.rates["switch_generation"], value=generation)
        profile = dataclasses.replace(H100, rates={**H100.rates, "switch_generation": rate})
        of = problem(2)
        traffic = np.zeros((len(CHANNELS), 16))
        traffic[CHANNELS.index(Channel("all_reduce"))] = 1 << 30
        return (
            profile.cost_model()
            .for_problem(of)
            .comm_cost(traffic, np.zeros(16), of.topology)
            .backward_ms.max()
        )

    assert ms_of(3.0) < ms_of(2.0)


def test_the_band_grows_with_uncertainty():
    def band(factor):
        rates = {
            name: dataclasses.replace(rate, uncertainty=min(3.0, factor * rate.uncertainty))
            for name, rate in H100.rates.items()
        }
        profile, of = dataclasses.replace(H100, rates=rates), problem(2)
        model = profile.cost_model().for_problem(of)
        return model.step_error_band(lower(SHARDERS["random"](of, model), of))

    assert 0 < band(0.5) < band(1.0) < band(2.0)
    assert band(0.0) == 0.0


@pytest.mark.parametrize("kind", ["row", "data_parallel"])
def test_the_band_has_each_rate_that_a_step_depends_on(kind):
    table = dataclasses.replace(TABLE, load_factor=0.5 if kind == "row" else 1.0)
    of = problem(2, 2, tables=[table])
    workload = lower(Plan((Placement(kind, Shard.whole(table), of.topology.ranks),)), of)
    base_ms = predicted_total_ms(workload, H100.cost_model().for_problem(of))
    sure = {name: dataclasses.replace(rate, uncertainty=0.0) for name, rate in H100.rates.items()}
    for name, rate in H100.rates.items():
        one = dataclasses.replace(
            H100, rates={**sure, name: dataclasses.replace(rate, uncertainty=0.3)}
        ).cost_model()
        moved = H100.with_values({**H100.rate_values, name: rate.value * math.exp(0.3)}).cost_model()
        error = abs(math.log(predicted_total_ms(workload, moved.for_problem(of)) / base_ms))
        assert one.for_problem(of).step_error_band(workload) == pytest.approx(error, abs=1e-7), (
            name
        )  # encodings are rounded


# --- the dense part -----------------------------------------------------------------------------------------

FLOPS = Job(dense_mflops=32.06)


def test_operations_of_a_dense_part_take_the_ms_of_their_number_and_rate():
    for devices, hosts in ((8, 1), (4, 2)):
        of, plain = (problem(hosts, devices, job=job) for job in (FLOPS, Job()))
        model = H100.cost_model().for_problem(of)
        # Three passes of 32.06 million operations on 8,192 samples.
        dense_ms = 3 * 32.06e6 * 65_536 / (devices * hosts) / (H100.rate_values["dense_tflops"] * 1e12) * 1e3
        given = with_predicted_dense_ms(of, model)
        assert given.job.dense_ms == pytest.approx(dense_ms) and given.job.dense_mflops is None
        assert given.job.dense_backward_ms == pytest.approx(2 * given.job.dense_forward_ms)
        plan = SHARDERS["random"](plain, model)
        cost, same = (price(lower(plan, x), model) for x in (of, given))
        assert cost.dense_ms == pytest.approx(dense_ms)
        assert dataclasses.replace(cost, extrapolated=()) == dataclasses.replace(same, extrapolated=())
        # Ids travel behind it.
        assert cost.total_ms < price(lower(plan, plain), model).total_ms + dense_ms
        assert price_plan(plan, of, model).workload.job == given.job
    assert with_predicted_dense_ms(plain, model) is plain


@pytest.mark.parametrize("pipeline", ["sparse_dist", "prefetch"])
@pytest.mark.parametrize("algorithm", ["portfolio", "size_greedy"])
def test_a_search_sees_the_ms_of_a_dense_part_s_operations(algorithm, pipeline):
    tables = [dataclasses.replace(TABLE, name=f"t{i}", load_factor=(0.2, 1.0)[i % 2]) for i in range(6)]
    of = problem(1, 4, tables=tables, job=dataclasses.replace(FLOPS, pipeline=pipeline))
    model = H100.cost_model().for_problem(of)
    plans = [
        SHARDERS[algorithm](x, model, budget=Budget(evals=200))
        for x in (of, with_predicted_dense_ms(of, model))
    ]
    assert plans[0] == plans[1]


def test_the_band_is_of_the_whole_step():
    of = problem(job=FLOPS)
    model, plain = H100.cost_model().for_problem(of), problem()
    plan = SHARDERS["random"](of, model)
    workload = lower(plan, of)
    cost, embeddings = price(workload, model), model.embeddings_error_band(workload)
    assert embeddings == model.step_error_band(lower(plan, plain))
    dense = H100.rates["dense_tflops"].uncertainty
    shares = (cost.total_ms - cost.dense_ms) / cost.total_ms, cost.dense_ms / cost.total_ms
    assert model.step_error_band(workload) == pytest.approx(
        math.hypot(shares[0] * embeddings, shares[1] * dense)
    )
    # Given ms are taken as they are.
    given = lower(plan, with_predicted_dense_ms(of, model))
    assert model.step_error_band(given) == pytest.approx(shares[0] * embeddings)


def test_every_profile_has_a_rate_of_dense_parts_below_its_card_s_peak():
    for name in profile_names():
        values = load_profile(name).rate_values
        assert 0 < values["dense_tflops"] < 0.6 * values["peak_tflops"], name


@pytest.mark.parametrize("algorithm", ["random", "portfolio"])
@pytest.mark.parametrize("pipeline", ["sparse_dist", "prefetch"])
def test_a_step_under_many_models_costs_what_each_of_them_says(algorithm, pipeline):
    tables = [dataclasses.replace(TABLE, name=f"t{i}", dim=32 << i % 3, pooling=1.0 + i) for i in range(9)]
    tables[3:5] = [dataclasses.replace(t, load_factor=0.01) for t in tables[3:5]]
    of = problem(2, 2, tables, global_batch=4096, job=Job(pipeline))
    slow = dataclasses.replace(of.topology.memory[0], gbps=1.0)
    of = dataclasses.replace(of, topology=dataclasses.replace(of.topology, memory=(slow,)))
    model, rng = H100.cost_model().for_problem(of), np.random.default_rng(0)
    workload = lower(SHARDERS[algorithm](of, model, budget=Budget(evals=200)), of)
    drawn = [dataclasses.replace(model, profile=model.profile.with_sampled_rates(rng)) for _ in range(5)]
    models = [model, *drawn, model]
    several = model.steps_ms(workload, models)
    assert any(price(workload, model.for_problem(of)).fetch_wait_ms) == (pipeline == "prefetch")
    assert several == pytest.approx(
        [predicted_total_ms(workload, one) for one in models], rel=1e-7
    )  # encodings are rounded
    assert several[0] == several[-1] == pytest.approx(model.steps_ms(workload, models)[0])


def test_tables_of_an_op_share_the_cache():
    hot = Table("hot", 60_000, 128, 20.0, Zipf(0.0))  # its rows fit into L2
    many = [dataclasses.replace(hot, name=f"t{i}") for i in range(32)]
    alone, among = (
        float(group_op_ms([[Shard.whole(hot)]], H100.cost_model().for_problem(problem(1, 1, tables)))[0])
        for tables in ([hot], [hot, *many])
    )
    assert among > 1.1 * alone


@pytest.mark.parametrize("name", ["aws-efa-4x100g", "slingshot-11"])
def test_the_network_that_a_topology_names_sets_the_rates_between_hosts(name):
    """By the topology, or with the profile: one cost. Ops, and exchanges within a host, are the card's."""
    model, named = H100.cost_model(), load_profile(f"{H100.name}@{name}")
    whole = Plan((Placement("column", Shard.whole(TABLE), (0,)),))

    def cost(hosts, profile):
        given = problem(hosts, 8 // hosts, profile=profile)
        on_network = dataclasses.replace(given, topology=dataclasses.replace(given.topology, network=name))
        costs = [
            price(lower(whole, on_network), m.for_problem(on_network)) for m in (model, named.cost_model())
        ]
        assert costs[0] == costs[1]
        return costs[0], price(
            lower(whole, problem(hosts, 8 // hosts)), model.for_problem(problem(hosts, 8 // hosts))
        )

    (two, own), (one, same) = cost(2, H100), cost(1, H100)
    assert two.compute_ms == own.compute_ms and two.total_ms > 1.3 * own.total_ms
    assert one.total_ms == pytest.approx(same.total_ms, rel=1e-9)


def test_another_network_than_the_profiles_is_refused():
    other = problem(profile=load_profile(f"{H100.name}@slingshot-11"))
    with pytest.raises(
        SettingMismatch,
        match="problem 'p' is on network 'slingshot-11', the profile on 'aws-efa-4x100g'; give nvidia",
    ):
        load_profile(f"{H100.name}@aws-efa-4x100g").cost_model().for_problem(other)
    unknown = dataclasses.replace(other, topology=dataclasses.replace(other.topology, network="ours"))
    with pytest.raises(ShardCoreError, match="network 'ours' is not known; known are aws-efa"):
        H100.cost_model().for_problem(unknown)
