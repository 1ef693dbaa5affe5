"""The communication model's rates are recovered from exchanges, those of each collective and payload."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, exchange_law, linear_law, of_terms, ring_law, spread
from shapes import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, sends
from test_collective_model import QUICK, columns, fitted, on_hosts

from shardcore.core.links import make_links
from shardcore.cost import accuracy, collective_fit, collective_model, fit
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, EmulatedLinks
from shardcore.step.kinds import BUCKETIZED_IDS, IDS, Channel


def for_payloads(model, forward, backward):
    setting = dataclasses.replace(model.setting, forward_payload=forward, backward_payload=backward)
    return dataclasses.replace(model, setting=setting)


OF_IDS = IDS.collective, BUCKETIZED_IDS.collective


def test_exchanges_of_two_ranks_alone_fit_too():
    comm = comm_samples(60, ranks=(2,))
    model = fit.train(compute_samples(linear_law, 60), comm, SETTING, QUICK).model
    assert accuracy.evaluate_accuracy(model, [], comm)["forward_comm_mape"] < 0.5
    assert all(
        (model.weights[collective_model.rates_weight_name(ALL_TO_ALL, direction)] >= 0).all()
        for direction in ("forward", "backward")
    )


@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 6))])
def test_latency_beyond_one_number_of_ranks_grows_by_a_seventh_a_message(ranks):
    """Published all-to-alls, all-gathers and all-reduces do so. Half went to the message before."""
    comm = comm_samples(60, ranks=(ranks,))
    model = fitted(comm)
    rates = model.weights[collective_model.rates_weight_name(ALL_TO_ALL, "forward")]
    once, message = rates[collective_fit.ONCE], rates[collective_fit.MESSAGES]
    assert message == pytest.approx(once / 7)
    assert once + (ranks - 1) * message == pytest.approx(0.1 + 0.02 * (ranks - 1), rel=0.01)
    assert max(collective_fit.exchange_errors(model.weights, comm).values()) < 0.5
    # Of several numbers of ranks, the samples say.
    several = fitted(comm_samples(60, ranks=(2, 4))).weights[
        collective_model.rates_weight_name(ALL_TO_ALL, "forward")
    ]
    assert several[[collective_fit.ONCE, collective_fit.MESSAGES]] == pytest.approx([0.1, 0.02], rel=0.01)


def test_only_exchanges_that_the_model_prices_count():
    compute, comm = compute_samples(linear_law, 60), comm_samples(60, ranks=(2,))
    # TorchRec has no codec for all-reduces.
    slow = [
        dataclasses.replace(s, backward=tuple(spread(99.0) for _ in s.backward))
        for s in comm_samples(60, ranks=(2,), collective="all_reduce", payload="bf16")
    ]
    none = tuple(spread(0.0) for _ in comm[0].forward)
    early = dataclasses.replace(comm[0], id="early", forward=none)
    model, other = (fit.train(compute, c, SETTING, QUICK).model for c in (comm, [*comm, *slow, early]))
    assert all(np.array_equal(model.weights[k], other.weights[k]) for k in model.weights)
    assert accuracy.evaluate_accuracy(model, [], [*comm, *slow, early]) == accuracy.evaluate_accuracy(
        model, [], comm
    )
    assert not collective_model.is_measured(
        fit.train(compute, slow, SETTING, QUICK).model.weights, ALL_TO_ALL
    )


def test_each_collective_has_its_own_rates():
    rings = {c: comm_samples(collective=c) for c in ("reduce_scatter", "all_reduce")}
    model, without = fitted(comm_samples(), *rings.values()), fitted(comm_samples())
    found = collective_fit.exchange_errors(
        model.weights, [*comm_samples(), *rings["reduce_scatter"], *rings["all_reduce"]]
    )
    assert len(found) == 5 and max(found.values()) < 0.5
    owned, nothing = np.array([64, 0, 256, 128, 32, 640]) * 256 * 4.0, np.zeros(6)
    scattered = [m.comm_cost(sends(reduce_scatter=owned), nothing, on_hosts(6)) for m in (model, without)]
    forward, backward = ring_law("reduce_scatter", [640] * 6, 256)  # the others pad
    assert scattered[0].forward_ms == pytest.approx(forward, rel=0.01)
    assert scattered[0].backward_ms == pytest.approx(backward, rel=0.01)
    reduced = [
        m.comm_cost(sends(all_reduce=np.full(6, owned[5])), nothing, on_hosts(6)) for m in (model, without)
    ]
    assert reduced[0].backward_ms == pytest.approx(ring_law("all_reduce", [640] * 6, 256)[1], rel=0.01)
    assert not reduced[0].forward_ms.any()
    moved = owned[5] * 5 / 6  # at the all-to-all's rates, all busiest
    assert scattered[1].forward_ms == pytest.approx(
        np.full(6, 0.1 + 0.02 * 5 + moved / 1e6 + 2 * moved / 4e6), rel=0.01
    )
    assert reduced[1].backward_ms == pytest.approx(
        np.full(6, 0.1 + 0.02 * 5 + 2 * moved / 1e6 + 4 * moved / 2e6), rel=0.01
    )


def test_too_few_exchanges_of_a_collective_are_none():
    few = comm_samples(collective_fit.FEWEST_SAMPLES - 1, collective="all_reduce")
    model = fitted(comm_samples(), few)
    assert collective_model.is_measured(model.weights, ALL_TO_ALL) and not collective_model.is_measured(
        model.weights, ALL_REDUCE
    )
    assert collective_fit.exchange_errors(model.weights, few)["all_reduce_backward_mape"] > 1


def half(samples, payload):
    """Samples in a payload of 16 bits, in half of the time."""
    return [
        dataclasses.replace(
            s,
            request=dataclasses.replace(s.request, payload=payload),
            **{
                direction: tuple(spread(x.median_ms / 2) for x in getattr(s, direction))
                for direction in ("forward", "backward")
            },
        )
        for s in samples
    ]


def test_each_payload_has_its_own_rates():
    model, widths = fitted(comm_samples(), half(comm_samples(), "fp16")), [64, 0, 256, 128]
    found = collective_fit.exchange_errors(model.weights, [*comm_samples(), *half(comm_samples(), "fp16")])
    assert sorted(found) == [
        "backward_comm_fp16_mape",
        "backward_comm_mape",
        "forward_comm_fp16_mape",
        "forward_comm_mape",
    ]
    assert max(found.values()) < 0.5
    expected = exchange_law(widths, 256)
    for forward, backward in (("fp32", "fp16"), ("fp16", "fp32"), ("fp16", "fp16")):
        cost = for_payloads(model, forward, backward).comm_cost(columns(widths), np.zeros(4), on_hosts(4))
        for ms, direction, payload in zip(
            (cost.forward_ms, cost.backward_ms), expected, (forward, backward), strict=True
        ):
            assert ms == pytest.approx(direction / (2 if payload == "fp16" else 1), rel=0.01)


def test_a_payload_that_was_not_measured_has_the_rates_of_fp32_with_half_of_the_bytes():
    model, owned = fitted(comm_samples()), columns([64, 64, 64, 64])
    fixed = 0.1 + 0.02 * 3
    whole, short = (
        for_payloads(model, p, p).comm_cost(owned, np.zeros(4), on_hosts(4)) for p in ("fp32", "bf16")
    )
    assert short.forward_ms - fixed == pytest.approx((whole.forward_ms - fixed) / 2, rel=0.02)
    assert collective_model.has_payload_rates(model.weights, ALL_TO_ALL, "forward", "fp32")
    assert not collective_model.has_payload_rates(model.weights, ALL_TO_ALL, "forward", "bf16")
    known = fitted(comm_samples(), half(comm_samples(), "bf16"))
    assert collective_model.has_payload_rates(known.weights, ALL_TO_ALL, "forward", "bf16")
    assert not collective_model.has_payload_rates(known.weights, REDUCE_SCATTER, "forward", "bf16")


def test_links_that_a_topology_gives_carry_half_of_the_bytes_in_16_bits():
    model, owned = fitted(comm_samples()), columns([64, 64])
    given = on_hosts(2, links=make_links(within_host=1.0, latency_ms=0.0))
    whole, short = (for_payloads(model, p, p).comm_cost(owned, np.zeros(2), given) for p in ("fp32", "fp16"))
    assert whole.forward_ms == pytest.approx(np.full(2, 64 * 256 * 4 / 2 / 1e6))
    assert short.forward_ms == pytest.approx(whole.forward_ms / 2)
    assert short.backward_ms == pytest.approx(whole.backward_ms / 2)


def test_bucketized_ids_take_what_ids_take_and_the_time_to_put_them_in_buckets():
    ids, bucketized = (comm_samples(collective=c) for c in OF_IDS)
    model = fitted([*comm_samples(), *ids, *bucketized])
    once, per_byte = model.weights["bucketize_ids"]
    assert (once, per_byte) == (pytest.approx(0.3, rel=0.01), pytest.approx(1 / 4e6, rel=0.01))
    assert (
        collective_fit.exchange_errors(model.weights, bucketized)["all_to_all_ids_bucketized_forward_mape"]
        < 0.1
    )
    owned = np.array([1e6, 3e6])
    for topology in (on_hosts(2), on_hosts(2, links=make_links(within_host=10.0, latency_ms=0.1))):
        plain, divided = (
            model.comm_cost(sends(**{c: owned}), np.zeros(2), topology).input_ms for c in OF_IDS
        )
        assert divided == pytest.approx(plain + 0.3 + 2e6 / 4e6, rel=0.01)
    assert collective_model.is_measured(model.weights, BUCKETIZED_IDS)
    # Without such exchanges, or without those of other ids, nothing is known of buckets.
    for some in (ids, bucketized):
        less = fitted([*comm_samples(), *some])
        assert not collective_model.is_measured(less.weights, BUCKETIZED_IDS)
        assert "bucketize_ids" not in less.weights


def with_work(samples):
    """The samples with the time to put ids in order: 0.05 ms once, and 10 GB/s."""
    return [
        dataclasses.replace(s, work_ms=tuple(np.where(b > 0, 0.05 + b / 1e7, 0.0)))
        for s in samples
        for b in [collective_fit.rank_bytes(s)]
    ]


def test_what_devices_do_with_ids_is_known_where_samples_tell_it():
    """0.05 ms once and 10 GB/s to put in order what arrived, beside 0.3 ms and 4 GB/s for buckets."""
    ids, bucketized = (comm_samples(collective=c) for c in OF_IDS)
    owned, where = np.array([1e6, 3e6]), on_hosts(2)
    for samples, order_ms in ((ids, 0.0 * owned), (with_work(ids), 0.05 + owned / 1e7)):
        model = fitted([*comm_samples(), *samples, *bucketized])
        assert (collective_model.ORDER in model.weights) == bool(order_ms.any())
        plain, divided = (model.comm_cost(sends(**{c: owned}), np.zeros(2), where) for c in OF_IDS)
        assert plain.input_work_ms == pytest.approx(order_ms, rel=0.01)
        assert divided.input_work_ms == pytest.approx(order_ms + 0.3 + 2e6 / 4e6, rel=0.01)
        assert all((x.input_work_ms < x.input_ms).all() for x in (plain, divided))
        nothing = model.comm_cost(sends(**{c: 0 * owned for c in OF_IDS}), np.zeros(2), where)
        assert not nothing.input_work_ms.any()


@pytest.mark.parametrize(
    "given, once, by_bytes",
    [
        ({}, 0, 0),
        ({"links": make_links(latency_ms=0.1)}, 1, 0),
        ({"links": make_links(within_host=10.0)}, 0, 1),
        ({"links": make_links(within_host=10.0, latency_ms=0.1)}, 1, 1),
    ],
    ids=["measured", "latency", "links", "both"],
)
def test_given_links_leave_the_work_of_putting_ids_in_order(given, once, by_bytes):
    """Rates of measured links include it or not. The same samples, with that work told and not."""
    ids, bucketized = (comm_samples(collective=c) for c in OF_IDS)
    owned, where = np.array([1e6, 3e6]), on_hosts(2, **given)
    untold, known = (fitted([*comm_samples(), *samples, *bucketized]) for samples in (ids, with_work(ids)))
    for collective in OF_IDS:
        sent = sends(**{collective: owned})
        without, found = (model.comm_cost(sent, np.zeros(2), where) for model in (untold, known))
        assert found.input_ms - without.input_ms == pytest.approx(0.05 * once + owned / 1e7 * by_bytes)
        assert (found.input_ms > found.input_work_ms).all()
        # A device to which nothing comes has nothing to put in order.
        one = sends(**{collective: owned * [0, 1]})
        less, more = (model.comm_cost(one, np.zeros(2), where).input_ms[0] for model in (untold, known))
        assert less == more


def test_ids_and_gradients_of_replicas_have_no_payload():
    model, owned, nothing = fitted(comm_samples()), np.full(2, 1e6), np.zeros(2)
    for sent in (sends(all_reduce=owned), sends(all_to_all_ids=owned)):
        whole, short = (
            for_payloads(model, p, p).comm_cost(sent, nothing, on_hosts(2)) for p in ("fp32", "fp16")
        )
        np.testing.assert_array_equal(whole.backward_ms, short.backward_ms)
        np.testing.assert_array_equal(whole.input_ms, short.input_ms)
    assert collective_model.has_payload_rates(model.weights, ALL_REDUCE, "backward", "fp16")


def test_groups_of_a_collective_have_rates_of_their_own():
    """A reduce-scatter within hosts takes 3 ms and a byte's 1e-6 ms; among all ranks ten times as long."""

    def sample(width, group, factor):
        own = CollectiveRequest(
            (width,) * 4, 16, (0.0,) * 4, "reduce_scatter", hosts=2, group=group, emulated=EmulatedLinks(0.05)
        )
        # Half of what a device owns leaves it within a host of two.
        times = (spread(factor * (3.0 + 1e-6 * width * 16 * 4 / 2)),) * 4
        return CollectiveSample("id", SETTING, own, times, times, (0.0,) * 4, 0.0)

    widths = (8, 16, 64, 128, 4096, 65536)
    within, all_ranks = (
        [sample(w, group, factor) for w in widths] for group, factor in (("host", 1.0), ("world", 10.0))
    )
    rates = collective_fit.fit_exchange_rates([*within, *all_ranks])
    for samples, group in ((within, "host"), (all_ranks, "world")):
        assert collective_model.rates_weight_name(Channel("reduce_scatter", group), "forward") in rates
        predicted, found = collective_fit.predicted_and_measured_ms(rates, samples, "forward")
        assert predicted == pytest.approx(found, rel=0.05), group


def test_over_several_hosts_the_last_rank_counts():
    times = tuple(spread(ms) for ms in (3.0, 9.0, 5.0, 4.0))
    request = CollectiveRequest((8, 16, 8, 8), 16, (0.0,) * 4)
    one, two = (
        CollectiveSample(
            "id", SETTING, dataclasses.replace(request, hosts=hosts), times, times, (0.0,) * 4, 0.0
        )
        for hosts in (1, 2)
    )
    assert collective_fit.terms_and_measured_ms([one], "forward")[1].tolist() == [3.0, 9.0, 5.0, 4.0]
    terms, measured = collective_fit.terms_and_measured_ms([one, two], "backward")
    assert measured.tolist() == [3.0, 9.0, 5.0, 4.0, 9.0] and terms.shape[1] == 5
    rates = {collective_model.rates_weight_name(ALL_TO_ALL, "backward"): of_terms(far_bytes=1.0)}
    predicted, found = collective_fit.predicted_and_measured_ms(rates, [two], "backward")
    # The device of most bytes: 16 columns, half of them for the other host, and half of its 16 in return.
    assert (predicted.tolist(), found.tolist()) == ([16 * 4 * (16 / 2 + (8 + 8) / 4)], [9.0])
