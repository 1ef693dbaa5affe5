import multiprocessing

import pytest
import torch

from shardcore import sampling
from shardcore.measure import collectives
from shardcore.types import CommRequest, Setting, ShardCoreError

CONFIG = collectives.CommConfig(repeats=3, warmups=1, timeout_s=30)


def _rank(rank, ranks, address, requests, results):
    torch.set_num_threads(1)
    member = collectives.Rank(rank, ranks, address, "cpu", CONFIG)
    try:
        results.put((rank, member.measure(requests)))
    except ShardCoreError as error:
        results.put((rank, str(error)))
    member.close()


def run_gang(ranks, requests):
    context = multiprocessing.get_context("spawn")
    results, address = context.Queue(), f"tcp://127.0.0.1:{collectives.free_port()}"
    gang = [context.Process(target=_rank, args=(r, ranks, address, requests, results)) for r in range(ranks)]
    for process in gang:
        process.start()
    found = dict(results.get(timeout=120) for _ in gang)
    for process in gang:
        process.join(30)
    return [found[r] for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_are_timed_on_every_rank(ranks):
    requests = [sampling.comm_request(i, ranks, 24 * ranks, max_start_ms=30.0) for i in range(4)]
    times = run_gang(ranks, requests)
    for request, seen in zip(requests, zip(*times, strict=True), strict=True):
        sample = collectives.combine(Setting("test", request.batch), request, seen)
        assert len(sample.forward) == len(sample.backward) == len(sample.waiting_ms) == ranks
        assert all(s.median_ms > 0 and s.repeats == 3 for s in (*sample.forward, *sample.backward))
        assert all(w >= 0 for w in sample.waiting_ms)


def test_waiting_is_until_the_last_start_and_transfer_is_from_there():
    request = CommRequest((8, 4), 16, (0.0, 5.0))
    early = collectives.RankTimes(((1.000, 2.000), (1.009, 2.009)), ((3.000, 4.000), (3.004, 4.004)))
    late = collectives.RankTimes(((1.005, 2.005), (1.008, 2.010)), ((3.001, 4.001), (3.003, 4.005)))
    sample = collectives.combine(Setting("test", 16), request, [early, late])
    assert sample.waiting_ms == pytest.approx((5.0, 0.0))
    assert [s.median_ms for s in sample.forward] == pytest.approx([4.0, 4.0])
    assert [s.median_ms for s in sample.backward] == pytest.approx([3.0, 3.0])
    assert sample.id == collectives.dataset.comm_id(Setting("test", 16), request)


def test_a_request_for_another_number_of_ranks_is_refused():
    [first, _] = run_gang(2, [CommRequest((8, 8, 8), 24, (0.0, 0.0, 0.0))])
    assert "3 widths" in first and "2 ranks" in first
