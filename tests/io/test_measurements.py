import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io.measurements import (
    CollectiveRequest,
    ComputeRequest,
    ComputeSample,
    EmulatedLinks,
    StepSample,
    TimingSpread,
)

STILL = (0.0, 0.0)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: CollectiveRequest((8,), 4, (0.0,)), ["(8,)", "at least 2"]),
        (lambda: CollectiveRequest((0, 0), 4, STILL), ["(0, 0)", "above 0"]),
        (lambda: CollectiveRequest((8, 8), 5, STILL), ["batch 5", "2 ranks"]),
        (lambda: CollectiveRequest((8, 8), 4, (0.0,)), ["start_ms (0.0,)", "2 ranks"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, "broadcast"), ["'broadcast'", "reduce_scatter"]),
        (lambda: CollectiveRequest((8, 4), 4, STILL, "all_reduce"), ["(8, 4)", "one width"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, payload="fp9"), ["'fp9'", "bf16"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, "reduce_scatter", "int8"), ["'int8'", "summed"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, hosts=3), ["hosts 3", "2 ranks"]),
        (lambda: CollectiveRequest((8, -1), 4, STILL), ["(8, -1)"]),
        (lambda: CollectiveRequest((8, 8), 0, STILL), ["batch 0"]),
        (lambda: CollectiveRequest((8, 8), 4, (0.0, -1.0)), ["start_ms (0.0, -1.0)"]),
        (lambda: CollectiveRequest((8, 8), 4, (0.0, float("inf"))), ["inf"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, hosts=0), ["hosts 0"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, busy_ms=-1.0), ["busy_ms -1.0"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, group="rack"), ["'rack'", "world, host, cross"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, hosts=2, group="host"), ["'host'", "at least 2 ranks"]),
        (lambda: CollectiveRequest((8, 8), 4, STILL, group="cross"), ["'cross'", "at least 2 ranks"]),
        (lambda: CollectiveRequest((8, 0, 8, 0), 4, STILL * 2, hosts=2, group="cross"), ["a width above 0"]),
        (lambda: CollectiveRequest((8,) * 4, 3, STILL * 2, hosts=2, group="host"), ["batch 3", "2 ranks"]),
        (
            lambda: CollectiveRequest((8,) * 4, 4, STILL * 2, "all_to_all_ids", hosts=2, group="host"),
            ["'world'"],
        ),
        (lambda: CollectiveRequest((8, 8), 4, STILL, emulated=EmulatedLinks(0.4)), ["hosts 1", "at least 2"]),
        (lambda: EmulatedLinks(0.0), ["between_gbit_s 0.0", "0.001 to 100"]),
        (lambda: EmulatedLinks(0.4, -1.0), ["within_gbit_s -1.0", "0.001 to 100"]),
    ],
)
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_values_at_their_limits_are_taken():
    assert (
        CollectiveRequest((0, 4), 2, STILL, busy_ms=0).hosts == 1
        and CollectiveRequest((4, 4), 3, STILL, "all_reduce").batch == 3
    )
    assert (
        EmulatedLinks(0.001, 100.0).description == "emulated hosts, between 0.001 Gbit/s, within 100 Gbit/s"
    )


@pytest.mark.parametrize(
    "group, groups",
    [("world", ((0, 1, 2, 3, 4, 5),)), ("host", ((0, 1, 2), (3, 4, 5))), ("cross", ((0, 3), (1, 4), (2, 5)))],
)
def test_ranks_are_numbered_host_by_host(group, groups):
    assert CollectiveRequest((4,) * 6, 6, (0.0,) * 6, hosts=2, group=group).rank_groups == groups


def test_what_is_not_said_has_its_default():
    request = CollectiveRequest((4, 4), 2, STILL)
    assert (
        request.collective,
        request.payload,
        request.hosts,
        request.busy_ms,
        request.group,
        request.emulated,
    ) == ("all_to_all", "fp32", 1, 0.0, "world", None)
    sample = ComputeSample(
        "id",
        Setting("x", 1),
        ComputeRequest((), 1),
        TimingSpread(1.0, 1, 1, 3),
        TimingSpread(2.5, 2, 3, 3),
        0.0,
    )
    assert sample.total_ms == 3.5 and sample.slowdown == 1.0 and sample.error is None


def test_a_replay_on_a_slow_machine_is_corrected_to_its_usual_speed():
    parts = (1.0, 2.0), (3.0, 5.0), (0.5, 0.25), (0.125, 4.0), (7.0, 0.0)
    slow = StepSample(*parts, step=TimingSpread(12.0, 10.0, 14.0, 5), oversubscribed=True, slowdown=2.0)
    usual = slow.at_usual_speed()
    assert (
        usual.device_ms == (11.625 / 2, 11.25 / 2) and usual.waiting_ms == (3.5, 0.0) and usual.oversubscribed
    )
    assert usual.step == TimingSpread(6.0, 5.0, 7.0, 5) and usual.slowdown == 1.0 and slow.slowdown == 2.0


@pytest.mark.parametrize("q1_ms, median_ms, q3_ms", [(3.0, 2.0, 1.0), (1.0, 3.0, 2.0), (2.5, 2.0, 3.0)])
def test_a_timing_whose_quartiles_are_out_of_order_is_refused(q1_ms, median_ms, q3_ms):
    with pytest.raises(ShardCoreError, match="the median between its quartiles") as error:
        TimingSpread(median_ms, q1_ms, q3_ms, 3)
    assert f"a timing is {median_ms} ms (q1_ms {q1_ms} to q3_ms {q3_ms})" in str(error.value)
