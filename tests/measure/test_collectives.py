import dataclasses
import multiprocessing
import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import collectives, local_ranks
from shardcore.measure.exchanges import make_exchange
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.step.collectives import COLLECTIVES

SETTING = Setting("test", 48)
CONFIG = collectives.CollectiveConfig(repeats=3, warmups=1, timeout_s=60)
STILL = (0.0, 0.0)


def in_gang(work, ranks, *arguments):
    """The last message of each rank."""
    last = dict(local_ranks.run_ranks("test", work, ranks, arguments, CONFIG.timeout_s))
    return [last[rank] for rank in range(ranks)]


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("exchange-rank")]


def test_a_gang_measures_every_kind_of_exchange_until_a_rank_is_killed(tmp_path):
    late = CollectiveRequest((8, 8), 96, (0.0, 50.0))
    each = [
        CollectiveRequest((16, 16), 96, STILL, c, p)
        for c, row in COLLECTIVES.items()
        for p in ("fp32", "bf16")
        if not row.ids or p == "fp32"
    ]
    requests, found = [late, *each, draw_collective_request(1, 2, 96, max_start_ms=10.0)], []
    with pytest.raises(ShardCoreError, match="exchange: rank 1 of 2 failed: it was killed by SIGKILL"):
        for sample in collectives.measure_collectives(
            [*requests, *[CollectiveRequest((8, 12), 48, STILL)] * 100_000], 2, SETTING, CONFIG
        ):
            found.append(sample)
            if len(found) == len(requests) + 2:  # in the middle of those that follow
                [victim] = [p for p in children() if p.name == "exchange-rank-1"]
                os.kill(victim.pid, signal.SIGKILL)
    assert not children()
    found = found[: len(requests)]
    assert [s.request for s in found] == requests and [s.order for s in found] == list(range(len(requests)))
    for sample in found:
        for direction in ("forward", "backward"):
            timed = getattr(sample, direction)
            assert (timed is not None) == (direction in COLLECTIVES[sample.request.collective].directions)
            assert timed is None or [s.repeats for s in timed] == [3, 3]
            assert min((s.median_ms for s in timed or ()), default=0) >= 0
        assert len(sample.waiting_ms) == 2 and min(sample.waiting_ms) >= 0
        assert sample.oversubscribed == (2 > len(os.sched_getaffinity(0)))
        assert (sample.work_ms is not None) == sample.request.definition.ids
        assert sample.work_ms is None or min(sample.work_ms) > 0
        assert sample.id == dataset.collective_id(SETTING, sample.request)
    assert found[0].waiting_ms[0] > max(10.0, found[0].waiting_ms[1])
    dataset.write_collective_samples(tmp_path, found)
    assert {s.id for s in dataset.read_collective_samples(tmp_path)} == {s.id for s in found}


def test_requests_that_do_not_fit_the_gang_are_refused_before_it_starts():
    with pytest.raises(ShardCoreError, match="3 widths.*2 ranks"):
        collectives.measure_collectives([CollectiveRequest((8, 8, 8), 24, (0.0,) * 3)], 2, SETTING)
    with pytest.raises(ShardCoreError, match="hosts 2.*hosts 1"):
        collectives.measure_collectives([CollectiveRequest((8, 8), 24, STILL, hosts=2)], 2, SETTING)
    assert list(collectives.measure_collectives([], 2, SETTING)) == []


# --- what travels, and when ---------------------------------------------------------------------------------


WIDTHS = (8, 12, 4)
THREE = [
    CollectiveRequest((WIDTHS, WIDTHS, (8,) * 3)[i], 6, (0.0,) * 3, c, p)
    for p in ("fp32", "bf16")
    for i, c in enumerate(["all_to_all", "reduce_scatter", "all_reduce"])
]
SCALED = {"int8": 1e-3, "mx4": 0.5}
"""Payloads with scales, and by how much a value changes on its way, at most."""
THREE += [CollectiveRequest(WIDTHS, 96, (0.0,) * 3, payload=p) for p in SCALED]
PINGS = [(10.0 * k, 1.0 if k == 7 else 5.0) for k in range(collectives._PINGS)]
"""Time at which a rank other than the first sends, and time until the answer."""


def _one_of_three(rank, init_method, send, folder):
    """Send what one of three ranks sees: its hosts, clocks and idle time, and what arrives by each exchange.

    Values differ by rank and position, and BF16 rounds them.
    """
    host_id, collectives.host_id = collectives.host_id, lambda: f"host-{rank == 2}"
    try:
        collectives.Rank(rank, 3, f"file://{folder}/uneven", "cpu", CONFIG)
    except ShardCoreError as error:
        uneven = str(error)
    dist.destroy_process_group()
    collectives.host_id = lambda: f"host-{rank}"
    member = collectives.Rank(rank, 3, f"file://{folder}/several", "cpu", CONFIG)
    going_on = _going_on(member)
    member.close()
    collectives.host_id = host_id
    member = collectives.Rank(rank, 3, init_method, "cpu", CONFIG)
    arrived = []
    for request in THREE:
        exchange = make_exchange(request, rank, None, torch.zeros)
        for direction in request.definition.directions:
            source = exchange.outputs if direction == "forward" else exchange.gradients
            source.copy_(rank + 1 + torch.arange(source.numel()) / 1000)
            result = exchange.forward(None) if direction == "forward" else exchange.backward(None, None)
            arrived.append(result.tolist())
    member.measure([dataclasses.replace(THREE[0], busy_ms=0.0)])
    idle = float(member._scratch.max())
    member.measure([dataclasses.replace(THREE[0], busy_ms=1.0)])
    busy = float(member._scratch.min())
    times = iter([t for sent, took in PINGS for t in (sent, sent + took)])
    exact = collectives.estimate_clock_offset(clock=lambda: 1000.0 if rank == 0 else next(times))
    listening = {
        c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN
    }
    send(
        (
            listening,
            uneven,
            member.hosts,
            arrived,
            (idle, busy),
            exact,
            collectives.estimate_clock_offset(),
            (going_on, _going_on(member)),
        )
    )
    member.close()


def _going_on(member):
    """Time at which a rank meets the others, and times until which it then waits, on rank 0's clock."""
    due, wait_until = [], collectives.sleep_until
    collectives.sleep_until = lambda due_s: due.append(due_s + member._offset_s)
    began = time.perf_counter() + member._offset_s
    member.wait_for_all_ranks()
    collectives.sleep_until = wait_until
    return began, due


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The messages of three ranks."""
    return in_gang(_one_of_three, 3, tmp_path_factory.mktemp("uneven"))


def values(rank, elements, payload):
    sent = rank + 1 + torch.arange(elements) / 1000
    return sent.bfloat16().float() if payload == "bf16" else sent


def test_ranks_of_several_hosts_go_on_at_one_time(three):
    began, due = zip(*(ranks[-1][0] for ranks in three), strict=True)
    [first], *others = due
    assert first > max(began) and others == [[pytest.approx(first, abs=1e-6)]] * 2
    assert [due for _, (_, due) in (ranks[-1] for ranks in three)] == [[]] * 3  # of one host
    now = time.perf_counter()
    collectives.sleep_until(now + 0.01)
    collectives.sleep_until(now)
    assert time.perf_counter() >= now + 0.01


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_collective_delivers_what_it_says(three, rank):
    """Each rank has two of six rows: with 8, 12 and 4 columns in all-to-alls, and with those of the widest in rings."""
    expected, (_, _, _, found, *_) = [], three[rank]
    for payload in ("fp32", "bf16"):
        outputs = [values(r, 6 * w, payload) for r, w in enumerate(WIDTHS)]
        gradients, given, partial, dense = (
            [values(r, n, payload) for r in range(3)] for n in (2 * sum(WIDTHS), 2 * 12, 6 * 12, 6 * 8)
        )
        expected += [
            torch.cat([outputs[d].chunk(3)[rank] for d in range(3)]),
            torch.cat([gradients[d].split([2 * w for w in WIDTHS])[rank] for d in range(3)]),
            sum(partial).chunk(3)[rank],
            torch.cat(given),
            sum(dense),
        ]
    for payload, most in SCALED.items():
        *_, there, back = found[: 10 + 2 * (1 + list(SCALED).index(payload))]
        outputs = [values(r, 96 * w, payload).chunk(3)[rank] for r, w in enumerate(WIDTHS)]
        gradients = [values(r, 32 * sum(WIDTHS), payload) for r in range(3)]
        back_here = [gradients[d].split([32 * w for w in WIDTHS])[rank] for d in range(3)]
        assert torch.tensor(there) == pytest.approx(torch.cat(outputs), abs=most)
        assert torch.tensor(back) == pytest.approx(torch.cat(back_here), abs=most)
    for i, (got, wanted) in enumerate(zip(found[:10], expected, strict=True)):
        cast_once_more = 1e-2 if i in (7, 9) else 1e-6  # sums of BF16 are BF16
        assert torch.tensor(got) == pytest.approx(wanted, rel=cast_once_more)


def test_the_fastest_answer_tells_a_clocks_offset(three):
    """Rank 0's clock stands at 1000 s: it was read half-way between 70 and 71 s of the others'."""
    assert [exact for *_, exact, _, _ in three] == [(0.0, 0.0), (1.0, 1000 - 70.5), (1.0, 1000 - 70.5)]
    for *_, (round_trip, offset), _ in three:  # of one host
        assert abs(offset) <= round_trip / 2 + 1e-9


def test_ranks_tell_their_hosts_and_compute_when_they_are_to_be_busy(three):
    for _, uneven, hosts, _, (idle, busy), *_ in three:
        assert uneven == "the gang's hosts have [1, 2] of its 3 ranks; each needs as many"
        assert hosts == 1 and idle == 0 < busy


def test_ranks_of_one_host_listen_at_its_loopback_only(three):
    assert set.union(*(listening for listening, *_ in three)) == {"127.0.0.1"}


def test_waiting_is_until_the_last_start_and_transfer_is_from_there():
    request = CollectiveRequest((8, 4), 16, (0.0, 5.0))
    early = collectives.RankTimes(((1.000, 2.000), (1.009, 2.009)), ((3.000, 4.000), (3.004, 4.004)))
    late = collectives.RankTimes(
        ((1.005, 2.005), (1.008, 2.010)), ((3.001, 4.001), (3.003, 4.005)), oversubscribed=True
    )
    sample = collectives.combine_rank_times(Setting("test", 16), request, [early, late], order=7)
    assert sample.waiting_ms == pytest.approx((5.0, 0.0))
    assert [s.median_ms for s in sample.forward] == pytest.approx([4.0, 4.0])
    assert [s.median_ms for s in sample.backward] == pytest.approx([3.0, 3.0])
    assert sample.id == dataset.collective_id(Setting("test", 16), request)
    assert sample.order == 7 and sample.oversubscribed
    reduce = CollectiveRequest((8, 8), 16, (0.0, 1.0), "all_reduce")
    backward = [collectives.RankTimes(None, r.backward) for r in (early, late)]
    sample = collectives.combine_rank_times(Setting("test", 16), reduce, backward)
    assert (
        sample.forward is None
        and sample.waiting_ms == pytest.approx((1.0, 0.0))
        and not sample.oversubscribed
    )
