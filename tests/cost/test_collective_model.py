"""The communication model is recovered from exchanges, each collective's own, and goes beyond the ranks and
hosts measured."""

from dataclasses import replace

import numpy as np
import pytest
import simulated_cluster as exchanges
from laws import SETTING, collective_ms, comm_samples, exchange_law, of_terms, spread
from shapes import ALL_REDUCE, ALL_TO_ALL, column, host_row, replica, row, sends

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import LEVELS, domain_numbers, make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost import collective_fit, collective_model, fit, neural, ranges
from shardcore.cost.analytic import AnalyticModel
from shardcore.io.measurements import CollectiveRequest, CollectiveSample
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.exchanges import CollectiveTerms, transfer_ms
from shardcore.step.kinds import CHANNELS, IDS, SHARDING_KINDS, Channel
from shardcore.step.lower import lower

QUICK = fit.FitConfig(epochs=3)


def fitted(*samples) -> neural.NeuralModel:
    return neural.NeuralModel(
        SETTING, collective_fit.fit_exchange_rates([x for s in samples for x in s]), {"ranges": {}}
    )


def on_hosts(*devices: int, **given) -> Topology:
    """A topology of so many devices on each host."""
    return Topology(
        tuple(Device(1 << 30, host=f"host-{h}") for h, n in enumerate(devices) for _ in range(n)), **given
    )


def columns(widths) -> np.ndarray:
    return sends(all_to_all=np.array(widths) * 256 * 4.0)


# --- terms


OF_HOSTS = {*collective_model.LATENCY_TERMS, *LEVELS["within_host"].terms, *LEVELS["between_hosts"].terms}


def terms(collective: str, owned, hosts=(0, 0, 0), skew_ms=0.0) -> dict[str, list[float]]:
    """Those that are not 0, by name, of each device, in bytes as given."""
    found = collective_fit.exchange_terms(
        Channel(collective), np.array(owned, dtype=float), domain_numbers([str(h) for h in hosts]), skew_ms
    )
    return {
        name: np.broadcast_to(t, len(owned)).round(9).tolist()
        for name, t in zip(collective_model.EXCHANGE_TERMS, found, strict=True)
        if name in OF_HOSTS and np.any(t)
    }


def test_terms_of_an_all_to_all_on_one_host_by_hand():
    assert terms("all_to_all", [6, 0, 9], skew_ms=4.0) == {
        "once": [1] * 3,
        "messages": [2] * 3,
        "skew_ms": [4] * 3,
        "near_bytes": [4 + 3, 0 + 5, 6 + 2],  # two thirds of the own go out, a third of the others' comes in
        "near_busiest_bytes": [6] * 3,
    }
    assert terms("all_to_all", [6, 6, 0])["near_busiest_bytes"] == [4] * 3
    assert terms("all_to_all", [6, 6, 6, 0], hosts=(0,) * 4)["near_busiest_bytes"] == [4.5] * 4
    assert terms("all_to_all", [6, 6, 6, 0], hosts=(0,) * 4)["near_bytes"] == [4.5 + 3] * 3 + [4.5]
    assert terms("all_to_all", [6, 0, 9], skew_ms=70.0)["skew_ms"] == [10] * 3


def test_terms_of_an_all_to_all_on_two_hosts_by_hand():
    """Devices 0 and 2 on one host, 1 alone: of each device's bytes a third goes to every device."""
    assert terms("all_to_all", [6, 12, 0], hosts=(7, 3, 7)) == {
        "once": [1] * 3,
        "messages": [2] * 3,
        "far_rounds": [1] * 3,
        "near_bytes": [2, 0, 2],
        "near_busiest_bytes": [2] * 3,
        "far_bytes": [2 + 4, 8 + 2, 0 + 4],
        "far_busiest_bytes": [8] * 3,
        "port_busiest_bytes": [8] * 3,
        "uplink_bytes": [8] * 3,
        "head_start": [-1] * 3,
    }
    assert terms("all_to_all", [8, 8, 0, 0], hosts=(0, 0, 1, 1)) == {
        "once": [1] * 4,
        "messages": [3] * 4,
        "far_rounds": [1] * 4,
        "near_bytes": [4, 4, 0, 0],
        "near_busiest_bytes": [2] * 4,
        "far_bytes": [4] * 4,
        "far_busiest_bytes": [4] * 4,
        "port_busiest_bytes": [6] * 4,
        "uplink_bytes": [8] * 4,
        "head_start": [-1] * 4,
    }
    assert (
        terms("all_to_all", [0, 6, 6], hosts=(1, 0, 0))["far_busiest_bytes"] == [4] * 3
    )  # what the first receives
    assert terms("all_to_all", [0, 0, 0, 8], hosts=(0, 0, 1, 2))["uplink_bytes"] == [6] * 4
    assert (
        terms("all_to_all", [8, 8, 0, 0], hosts=(0, 1, 2, 2))["uplink_bytes"] == [8] * 4
    )  # what the last two receive


def test_terms_of_rings_by_hand():
    """All give a reduce-scatter as much as the one with most; an all-reduce is one and an all-gather."""
    ring = {
        "once": [1] * 3,
        "messages": [2] * 3,
        "near_bytes": [12] * 3,
        "near_busiest_bytes": [6] * 3,
    }
    of_links = ("far_busiest_bytes", "port_busiest_bytes", "uplink_bytes", "shared_uplink_bytes")
    apart = {"far_rounds": [2] * 3, "far_bytes": [12] * 3, "head_start": [-2] * 3}
    assert terms("reduce_scatter", [6, 0, 9]) == ring
    assert terms("reduce_scatter", [6, 0, 9], hosts=(0, 0, 1)) == ring | apart | dict.fromkeys(
        of_links, [6] * 3
    )
    assert terms("all_reduce", [4.5] * 3) == ring


def test_a_late_start_is_that_of_the_first_exchange_measured():
    at = collective_model.EXCHANGE_TERMS.index("skew_ms")
    for collective, of in COLLECTIVES.items():
        request = CollectiveRequest((8, 8), 16, (2.0, 5.0), collective)
        timed = [
            (spread(ms),) * 2 if direction in of.directions else None
            for direction, ms in (("forward", 1.0), ("backward", 2.0))
        ]
        sample = CollectiveSample("id", SETTING, request, *timed, (0.0, 0.0), 0.0)
        for direction in of.directions:
            found, measured = collective_fit.terms_and_measured_ms([sample] * 2, direction)
            assert found[at].tolist() == [3.0 if direction == of.directions[0] else 0.0] * 4
            assert measured.tolist() == [1.0 if direction == "forward" else 2.0] * 4


def test_ids_take_what_gradients_take_backward_but_three_latencies():
    """Numbers, lengths and ids are sent. Bytes count on the device that receives them."""
    owned = np.array([6e6, 0.0, 9e6, 3e6])
    for domains in (domain_numbers(list("aaaa")), domain_numbers(list("aabb"))):
        ids, back = (
            dict(
                zip(
                    collective_model.EXCHANGE_TERMS,
                    collective_fit.exchange_terms(c, owned, domains, 0.0),
                    strict=True,
                )
            )
            for c in (IDS, Channel("all_to_all"))
        )
        for name in back:
            times = 3 if name in ("once", "messages", "far_rounds") else 1
            assert np.asarray(ids[name]) == pytest.approx(times * np.asarray(back[name])), name
    # Without measurements of ids, the all-to-all's rates stand in.
    model, topology = fitted(comm_samples()), on_hosts(4)
    ms, nothing = collective_ms(model.weights, IDS, owned, topology)
    assert not nothing.any() and not collective_model.is_measured(model.weights, IDS)
    forward, _ = collective_ms(model.weights, Channel("all_to_all"), owned, topology)
    assert ms - forward == pytest.approx(2 * (0.1 + 0.02 * 3), rel=1e-3)


def test_a_transfer_takes_its_latency_and_the_slower_links():
    levels = [{"bytes": 2.0}, {}, {"bytes": 1.0, "uplink": 0.5}]
    terms = CollectiveTerms(0.5, levels, skew=0.1)
    for near, slowest in ((1.5, 4.0), (9.0, 18.0)):
        counts = [{"bytes": near}, {}, {"bytes": 2.0, "uplink": 4.0}]
        assert transfer_ms(terms, counts, np.ones(1), np.array(3.0)) == pytest.approx(0.8 + slowest)
        smooth = transfer_ms(replace(terms, sharpness=3.0, ramp_ms=2.0, ramp_bytes=3.0), counts, np.ones(1))
        assert smooth == pytest.approx(0.5 + 2 / 4 + ((2 * near) ** 3 + 4.0**3) ** (1 / 3))


def test_only_who_replicates_reduces():
    model = fitted(comm_samples(collective="all_reduce"), comm_samples())
    owned = np.array([4e6, 4e6, 0.0])
    forward, backward = collective_ms(model.weights, ALL_REDUCE, owned, on_hosts(3))
    assert not forward.any() and (backward[:2] > 0).all() and backward[2] == 0
    forward, backward = collective_ms(model.weights, ALL_TO_ALL, owned, on_hosts(3))
    assert (forward > 0).all() and (backward > 0).all()


def test_links_that_a_topology_gives_replace_what_was_fitted():
    law = of_terms(**{name: 1.0 + i for i, name in enumerate(collective_model.EXCHANGE_TERMS)})
    laws = {collective_model.rates_weight_name(ALL_TO_ALL, "forward"): law}

    def forward(laws, **given):
        topology = on_hosts(1, 1, links=make_links(**given))
        return collective_model.channel_terms(laws, ALL_TO_ALL, topology).directions["forward"]

    measured = forward(laws)
    near, _, far = measured.levels
    assert near and far and measured.skew and measured.once_ms > 0.25
    for given, levels in (
        ({"within_host": 2.0}, {0: {"busiest": 1 / 2e6}, 2: far}),
        ({"between_hosts": 0.5}, {0: near, 2: {"busiest": 1 / 5e5}}),
        ({"between_hosts": 0.5, "shared": True}, {0: near, 2: {"uplink": 1 / 5e5}}),
        ({"latency_ms": 0.25}, {0: near, 2: far}),
        ({"latency_ms": 0.0}, {0: near, 2: far}),
    ):
        found = forward(laws, **given)
        assert {k: found.levels[k] for k in levels} == levels
        latency = given.get("latency_ms", measured.once_ms), 0.0 if "latency_ms" in given else measured.skew
        assert (found.once_ms, found.skew) == latency
    far_only = {name: 1.0 for name in LEVELS["between_hosts"].terms}
    laws = {collective_model.rates_weight_name(ALL_TO_ALL, "forward"): of_terms(**far_only)}
    # Within hosts no faster.
    assert forward(laws, between_hosts=0.5, shared=True).levels == [
        {"busiest": 1 / 5e5},
        {},
        {"uplink": 1 / 5e5},
    ]


def test_links_that_are_all_as_busy_may_take_longer_and_start_ahead():
    """A mean of all links beside the busiest one, less what early ranks sent; never below 0."""
    law = of_terms(uplink_bytes=0.8, shared_uplink_bytes=0.2, head_start=1.5)
    laws = {
        collective_model.rates_weight_name(ALL_TO_ALL, direction): law
        for direction in ("forward", "backward")
    }
    hosts = on_hosts(1, 1, 1)
    even, uneven, few = (
        collective_ms(laws, ALL_TO_ALL, np.array(owned), hosts)[0]
        for owned in ([9.0] * 3, [9.0, 0.0, 0.0], [0.1] * 3)
    )
    # Of 6 bytes that leave a host, 3 share links with those of a third host.
    assert even == pytest.approx([6 * 0.8 + 3 * 0.2 - 1.5] * 3)
    assert uneven == pytest.approx([6 * 0.8 + 1 * 0.2 - 1.5] * 3) and few.tolist() == [0.0] * 3
    of_fp16 = dict.fromkeys(("forward", "backward"), "fp16")
    halved, _ = collective_ms(laws, ALL_TO_ALL, np.array([9.0] * 3), hosts, of_fp16)
    assert halved == pytest.approx([(6 * 0.8 + 3 * 0.2) / 2 - 1.5] * 3)  # half the bytes, the same head start
    two, _ = collective_ms(laws, ALL_TO_ALL, np.array([8.0, 8.0]), on_hosts(1, 1))
    assert two == pytest.approx([4 * 0.8 - 1.5] * 2)


def test_links_within_pods_that_never_decided_are_known_where_others_lie_beyond():
    """Four hosts in two pods. A pod's link carries what both its hosts send, not a host's what leaves it."""
    hosts, laws = Topology(tuple(Device(1, host=f"{pod}/{i}") for pod in "ab" for i in "xy")), {}
    for of_pods, ms in (({"pod_busiest_bytes": collective_model.TRACE}, 8.0), ({}, 6.0)):
        law = of_terms(uplink_bytes=1.0, **of_pods)
        laws = {
            collective_model.rates_weight_name(ALL_TO_ALL, direction): law
            for direction in ("forward", "backward")
        }
        assert collective_ms(laws, ALL_TO_ALL, np.full(4, 8.0), hosts)[0] == pytest.approx([ms] * 4)
    # Within a pod nothing lies beyond: its own bytes have the rate of the links that were measured.
    laws |= {
        collective_model.rates_weight_name(ALL_TO_ALL, "forward"): of_terms(uplink_bytes=1.0, pod_bytes=1e-12)
    }
    in_pods = Channel(ALL_TO_ALL.collective, "pod")
    assert collective_ms(laws, in_pods, np.full(4, 8.0), hosts)[0] == pytest.approx([4.0] * 4)


# --- fit


def test_numbers_of_ranks_and_hosts_never_trained_on():
    model = fitted(exchanges.simulated(exchanges.Cluster(), exchanges.KNOWN, 30, seed=0))
    for shape in ((3, 1), (6, 3), (12, 1), (16, 4), (32, 4)):
        found = collective_fit.exchange_errors(
            model.weights, exchanges.simulated(exchanges.Cluster(), [shape], 3, seed=1)
        )
        assert len(found) == 5 and np.mean(list(found.values())) < 10, (shape, found)


# --- prices


def test_exchange_law_beyond_the_ranks_trained_on(model):
    widths = [64, 0, 256, 128, 32, 640, 8, 100]
    cost = model.comm_cost(columns(widths), np.zeros(8), Topology((Device(1),) * 8))
    forward, backward = exchange_law(widths, 256)
    assert cost.forward_ms == pytest.approx(forward, rel=0.01)
    assert cost.backward_ms == pytest.approx(backward, rel=0.01)


def test_a_late_start_costs_the_first_forward_exchange(model):
    widths, compute_ms = [64, 0, 256, 128], np.array([[0.0, 3.0, 1.0, 1.0], [0.0, 90.0, 1.0, 1.0]])
    cost = model.comm_cost(columns([widths] * 2), compute_ms, on_hosts(4))
    expected = [exchange_law(widths, 256, skew) for skew in (3.0, 90.0)]
    assert cost.forward_ms == pytest.approx(np.array([e[0] for e in expected]), rel=0.01)
    assert cost.backward_ms == pytest.approx(np.array([e[1] for e in expected]), rel=0.01)
    once = sends(all_to_all=cost.forward_ms * 1e6, reduce_scatter=cost.forward_ms * 1e6)
    late, together = (model.comm_cost(once, x, on_hosts(4)).forward_ms for x in (compute_ms, 0 * compute_ms))
    assert late - together == pytest.approx(np.array([[0.15] * 4, [0.5] * 4]), rel=0.01)


@pytest.fixture(scope="module")
def of_hosts() -> neural.NeuralModel:
    """Trained on simulated exchanges over one and two hosts."""
    return fitted(exchanges.simulated(exchanges.Cluster(), ((2, 1), (4, 1), (4, 2), (8, 2)), 15, seed=0))


def test_permuting_devices_with_their_hosts_permutes_costs(of_hosts):
    rng, topology = np.random.default_rng(0), on_hosts(3, 1, 2)
    owned, compute, order = rng.random((len(CHANNELS), 6)) * 1e6, rng.random(6), rng.permutation(6)
    permuted = Topology(tuple(topology.devices[d] for d in order))
    a = of_hosts.comm_cost(owned, compute, topology)
    b = of_hosts.comm_cost(owned[:, order], compute[order], permuted)
    for name in ("forward_ms", "backward_ms", "waiting_ms"):
        assert getattr(b, name) == pytest.approx(getattr(a, name)[order])


def test_more_bytes_never_take_less_time(of_hosts):
    rng = np.random.default_rng(0)
    for topology in (
        on_hosts(5),
        on_hosts(3, 2),
        on_hosts(1, 1, 4),
        on_hosts(16, 16),
        on_hosts(2, 2, links=make_links(between_hosts=1.0)),
    ):
        n, c = len(topology), len(CHANNELS)
        owned = (
            rng.random((c, 200, n)) * 10.0 ** rng.uniform(2, 7, (c, 200, 1)) * (rng.random((c, 200, n)) < 0.7)
        )
        more = owned + rng.random((c, 200, n)) * 1e6 * (rng.random((c, 200, n)) < 0.3)
        compute = rng.random((200, n))
        before, after = (of_hosts.comm_cost(x, compute, topology) for x in (owned, more))
        assert (after.forward_ms >= before.forward_ms - 1e-12).all() and (
            after.backward_ms >= before.backward_ms - 1e-12
        ).all()
        totals = [(compute + x.total_ms).max(-1) for x in (before, after)]
        assert (totals[1] >= totals[0] - 1e-9).all()


def test_what_is_empty_or_alone_takes_no_time(of_hosts):
    nothing = of_hosts.comm_cost(np.zeros((len(CHANNELS), 2, 4)), np.ones((2, 4)), on_hosts(2, 2))
    alone = of_hosts.comm_cost(np.ones((len(CHANNELS), 1)), np.ones(1), on_hosts(1))
    assert nothing.total_ms.shape == (2, 4) and not nothing.total_ms.any() and not alone.total_ms.any()


def test_links_never_measured_count_as_those_that_were(of_hosts):
    traffic, compute = columns([64, 0, 256, 128]), np.zeros(4)
    within = fitted(comm_samples())
    between = fitted(exchanges.simulated(exchanges.Cluster(), ((2, 2), (4, 4)), 30, seed=0))
    for model, same in ((within, on_hosts(4)), (between, on_hosts(1, 1, 1, 1))):
        a, b = (model.comm_cost(traffic, compute, topology) for topology in (on_hosts(2, 2), same))
        assert np.array_equal(a.forward_ms, b.forward_ms) and np.array_equal(a.backward_ms, b.backward_ms)
    cost = [
        of_hosts.comm_cost(traffic, compute, topology).forward_ms.max()
        for topology in (on_hosts(4), on_hosts(2, 2))
    ]
    assert cost[0] < cost[1]


# --- what was not measured is named


def said(model: neural.NeuralModel, topology: Topology) -> str:
    """Sentences on a plan with a table of each kind that this topology has."""
    a, b, c, d = (Table(name, 100, 8, 1.0) for name in "abcd")
    of_host = [
        host_row(d, g) for g in SHARDING_KINDS["host_row"].device_groups(topology)[:1] if len(g) > 1
    ] or [column(d, 0)]
    placements = (column(a, 0), row(b, topology), replica(c, topology), *of_host)
    problem = Problem("p", (a, b, c, d), replace(topology, hardware=model.setting.hardware), 256)
    return "\n".join(
        line
        for line in ranges.describe_out_of_range(model, lower(Plan(placements), problem))
        if "is replicated" not in line
    )


def test_what_was_not_measured_is_named(of_hosts):
    within = fitted(comm_samples())
    assert said(of_hosts, on_hosts(2)) == said(of_hosts, on_hosts(1, 1)) == ""
    alone = said(within, on_hosts(2))
    assert (
        "row shards: their reduce-scatter is priced with the rates of the all-to-all, not measured" in alone
    )
    assert (
        "data_parallel shards: their all-reduce is priced with the rates of the all-to-all, not measured"
        in alone
    )
    two = said(of_hosts, on_hosts(2, 2))
    assert two == "\n".join(
        [
            "host_row shards: their reduce-scatter within a host is priced with the rates of the reduce-scatter, "
            "not measured",
            "host_row shards: their all-to-all across hosts is priced with the rates of the all-to-all, not measured",
        ]
    )
    assert "within a host is priced with the rates of the all-to-all" in said(within, on_hosts(2, 2))
    proxy = "links between hosts were not measured: they count as those within hosts"
    assert proxy in said(within, on_hosts(1, 1))
    between = fitted(exchanges.simulated(exchanges.Cluster(), ((2, 2),), 30, seed=0))
    proxy = "links within hosts were not measured: they count as those between hosts"
    assert proxy in said(between, on_hosts(2))
    given = said(of_hosts, on_hosts(1, 1, links=make_links(between_hosts=3.0)))
    assert given == (
        "the topology gives between_hosts 3 GB/s: the explicit link model prices its exchanges from there, not "
        "measured"
    )


def test_a_collective_without_a_law_is_refused_not_taken_for_a_ring(of_hosts, monkeypatch):
    other, topology, owned = Channel("broadcast"), on_hosts(2), np.ones(2)
    said = "collective 'broadcast' is not known; known are all_to_all, reduce_scatter, all_reduce"
    with pytest.raises(ShardCoreError, match=said):
        collective_fit.exchange_terms(other, owned, topology.domain_numbers, 0.0)
    with pytest.raises(ShardCoreError, match=said):
        collective_ms(of_hosts.weights, other, owned, topology)
    monkeypatch.setattr(
        "shardcore.step.exchanges.channels_of_traffic", lambda traffic: (other, *CHANNELS[1:])
    )
    with pytest.raises(ShardCoreError, match=said):
        AnalyticModel(SETTING).comm_cost(np.ones((len(CHANNELS), 2)), np.zeros(2), topology)
