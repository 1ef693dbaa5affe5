import multiprocessing
import os
import signal
import time

import pytest
import torch

from shardcore import dataset, sampling
from shardcore.measure import collectives, gang
from shardcore.types import CommRequest, Setting, ShardCoreError

SETTING = Setting("test", 48)
CONFIG = collectives.CommConfig(repeats=3, warmups=1, timeout_s=60)
STILL = (0.0, 0.0)
EACH = [CommRequest((8, 12), 48, STILL), CommRequest((8, 12), 48, STILL, "reduce_scatter"),
        CommRequest((8, 8), 48, STILL, "all_reduce")]


def in_gang(work, ranks, *arguments):
    """What each rank said last."""
    last = dict(gang.run("test", work, ranks, arguments, CONFIG.timeout_s))
    return [last[rank] for rank in range(ranks)]


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("exchange-rank")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gang_measures_every_kind_of_exchange(ranks):
    # Ten draws that hold all collectives and payloads.
    requests = [sampling.comm_request(i, ranks, 48 * ranks, max_start_ms=10.0) for i in range(4)]
    width = (16,) * ranks
    requests += [CommRequest(width, 48 * ranks, (0.0,) * ranks, c, p) for c in ("all_to_all", "reduce_scatter", "all_reduce")
                 for p in ("fp32", "bf16")]
    samples = list(collectives.measure_all(requests, ranks, SETTING, CONFIG))
    assert [s.request for s in samples] == requests and [s.order for s in samples] == list(range(len(requests)))
    for sample in samples:
        assert (sample.forward is None) == (sample.request.collective == "all_reduce")
        assert len(sample.backward) == len(sample.waiting_ms) == ranks and min(sample.waiting_ms) >= 0
        assert all(s.median_ms >= 0 and s.repeats == 3 for s in (*(sample.forward or ()), *sample.backward))
        assert sample.oversubscribed == (ranks > len(os.sched_getaffinity(0)))
        assert sample.id == dataset.comm_id(SETTING, sample.request)
    assert not children()


def test_a_rank_killed_in_the_middle_ends_the_gang_and_samples_stay(tmp_path):
    found = []
    with pytest.raises(ShardCoreError, match="exchange: rank 1 of 2 failed: it was killed by SIGKILL"):
        for sample in collectives.measure_all([EACH[0]] * 100_000, 2, SETTING, CONFIG):
            found.append(sample)
            if len(found) == 3:
                [victim] = [p for p in children() if p.name == "exchange-rank-1"]
                os.kill(victim.pid, signal.SIGKILL)
    assert not children()
    assert len(found) >= 3 and all(s.error is None and s.backward for s in found)
    dataset.write_comm(tmp_path, found[:3])
    [kept] = dataset.read_comm(tmp_path)
    assert kept.request == EACH[0]


def test_requests_that_do_not_fit_the_gang_are_refused_before_it_starts():
    with pytest.raises(ShardCoreError, match="3 widths.*2 ranks"):
        collectives.measure_all([CommRequest((8, 8, 8), 24, (0.0,) * 3)], 2, SETTING)
    with pytest.raises(ShardCoreError, match="hosts 2.*hosts 1"):
        collectives.measure_all([CommRequest((8, 8), 24, STILL, hosts=2)], 2, SETTING)
    assert list(collectives.measure_all([], 2, SETTING)) == []


# --- what travels ------------------------------------------------------------------------------------------------------


def _deliver(rank, init_method, say, requests):
    """What arrives of values that tell rank and position, and that BF16 cannot hold."""
    member = collectives.Rank(rank, 2, init_method, "cpu", CONFIG)
    arrived = []
    for request in requests:
        for transfer in collectives.transfers(request, rank):
            if transfer is not None:
                transfer.source.copy_(rank + 1 + torch.arange(transfer.source.numel()) / 1000)
                transfer.run()
                arrived.append(transfer.into.tolist())
    say(arrived)
    member.close()


def values(rank, elements, payload):
    sent = rank + 1 + torch.arange(elements) / 1000
    return sent.bfloat16().float() if payload == "bf16" else sent


def test_each_collective_delivers_what_it_says():
    found = in_gang(_deliver, 2, [CommRequest(r.widths, 4, r.start_ms, r.collective, p) for p in ("fp32", "bf16") for r in EACH])
    for rank in (0, 1):
        expected = []
        for payload in ("fp32", "bf16"):
            outputs, gradients = ([values(r, n, payload) for r, n in enumerate(sizes)] for sizes in ((32, 48), (40, 40)))
            partial, given, dense = ([values(r, n, payload) for r in (0, 1)] for n in (48, 24, 32))
            expected += [
                torch.cat([outputs[0].chunk(2)[rank], outputs[1].chunk(2)[rank]]),  # B / D rows of 8, then of 12 columns
                torch.cat([gradients[d].split([16, 24])[rank] for d in (0, 1)]),
                sum(partial).chunk(2)[rank],
                torch.cat(given),
                sum(dense),
            ]
        for i, (got, wanted) in enumerate(zip(found[rank], expected, strict=True)):
            cast_once_more = 1e-2 if i in (7, 9) else 1e-6  # sums of BF16 are BF16
            assert torch.tensor(got) == pytest.approx(wanted, rel=cast_once_more)


# --- clocks ------------------------------------------------------------------------------------------------------------


def _clocks(rank, init_method, say):
    member = collectives.Rank(rank, 3, init_method, "cpu", CONFIG)
    same = collectives.estimate_clock_offset()
    other = collectives.estimate_clock_offset(clock=lambda: time.perf_counter() - 100.0 * rank)  # booted 100 s later each
    say((member.hosts, same, other))
    member.close()


def test_clock_offsets_are_found_within_half_a_round_trip():
    for rank, (hosts, (round_trip, offset), (other_round_trip, other_offset)) in enumerate(in_gang(_clocks, 3)):
        assert hosts == 1
        assert abs(offset) <= round_trip / 2 + 1e-9 < 0.5
        assert abs(other_offset - 100.0 * rank) <= other_round_trip / 2 + 1e-9 < 0.5


def test_waiting_is_until_the_last_start_and_transfer_is_from_there():
    request = CommRequest((8, 4), 16, (0.0, 5.0))
    early = collectives.RankTimes(((1.000, 2.000), (1.009, 2.009)), ((3.000, 4.000), (3.004, 4.004)))
    late = collectives.RankTimes(((1.005, 2.005), (1.008, 2.010)), ((3.001, 4.001), (3.003, 4.005)), oversubscribed=True)
    sample = collectives.combine(Setting("test", 16), request, [early, late], order=7)
    assert sample.waiting_ms == pytest.approx((5.0, 0.0))
    assert [s.median_ms for s in sample.forward] == pytest.approx([4.0, 4.0])
    assert [s.median_ms for s in sample.backward] == pytest.approx([3.0, 3.0])
    assert sample.id == dataset.comm_id(Setting("test", 16), request)
    assert sample.order == 7 and sample.oversubscribed
    reduce = CommRequest((8, 8), 16, (0.0, 1.0), "all_reduce")
    backward = [collectives.RankTimes(None, r.backward) for r in (early, late)]
    sample = collectives.combine(Setting("test", 16), reduce, backward)
    assert sample.forward is None and sample.waiting_ms == pytest.approx((1.0, 0.0)) and not sample.oversubscribed
