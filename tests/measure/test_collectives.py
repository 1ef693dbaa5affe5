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
        last = max(range(ranks), key=lambda r: request.start_ms[r])
        if max(request.start_ms) > 0:  # the rank that starts last does not wait, the first one does
            assert sample.waiting_ms[last] < max(sample.waiting_ms)


def test_a_request_for_another_number_of_ranks_is_refused():
    [first, _] = run_gang(2, [CommRequest((8, 8, 8), 24, (0.0, 0.0, 0.0))])
    assert "3 widths" in first and "2 ranks" in first
