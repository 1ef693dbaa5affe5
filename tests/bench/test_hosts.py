"""A cluster in a box: ranks on emulated hosts exchange over links of the rate that was asked for, and nothing
is left behind, whoever is killed."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from boxes import boxed

from bench.hosts import Box, emulated_hosts
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import local_ranks
from shardcore.measure.collectives import CollectiveConfig, Rank, measure_collectives
from shardcore.measure.exchanges import all_to_all, make_exchange
from shardcore.measure.hosts import EmulatedHost
from shardcore.measure.transport import Transport

ROOT = Path(__file__).parents[2]
SENT_BYTES = 1 << 20


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hosts": 1}, "box has hosts 1; it needs 2 to 64"),
        ({"ranks_per_host": 0}, "box has ranks_per_host 0; it needs 1 to 64"),
        ({"between_gbit_s": 0.0}, "box has between_gbit_s 0.0; it needs 0.001 to 100"),
        ({"within_gbit_s": float("nan")}, "box has within_gbit_s nan; it needs 0.001 to 100"),
        ({"pods": 0}, "emulated links has pods 0; it needs 1 to 64"),
    ],
)
def test_a_box_that_cannot_be_is_one_line(config, message):
    with pytest.raises(ShardCoreError) as refused:
        Box(**config)
    assert str(refused.value) == message


LEAVING = ((3, 0, 2, 5), (1, 4, 0, 2), (6, 1, 2, 0), (0, 3, 3, 1))
"""Elements from each of four ranks to each."""
SIDES = ((0, 2), (1, 3))


def exchange_all(rank, init_method, send):
    """Send what arrives of elements that differ by rank and place, by an all-to-all in a box, and by gloo's."""
    member = Rank(rank, 4, init_method, config=CollectiveConfig(timeout_s=30))
    sides = [dist.new_group(list(side)) for side in SIDES]
    arriving = [of[rank] for of in LEAVING]
    found = []
    for n_in, n_out, splits in (
        (8, 8, {}),
        (sum(arriving), sum(LEAVING[rank]), {"arriving": arriving, "leaving": LEAVING[rank]}),
        (6, 6, {"group": sides[rank % 2]}),
    ):
        sent, both = 100.0 * rank + torch.arange(n_out), [torch.empty(n_in) for _ in range(2)]
        all_to_all(both[0], sent, **splits)
        dist.all_to_all_single(
            both[1],
            sent,
            *(splits.get(name) and list(splits[name]) for name in ("arriving", "leaving")),
            splits.get("group"),
        )
        found.append([of.tolist() for of in both])
    member.close()
    send(found)


@boxed
def test_over_hosts_an_all_to_all_delivers_what_gloo_s_own_does():
    with emulated_hosts(Box()) as places:
        for _, found in local_ranks.run_ranks("box", exchange_all, 4, (), 60, places):
            for own, gloos in found:
                assert own == gloos


MAKER = """
import os, sys, time
from shardcore.core.errors import ShardCoreError
from shardcore.measure import local_ranks
from bench.hosts import Box, emulated_hosts

def wait_forever(rank, init_method, send):
    send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    try:
        with emulated_hosts(Box()) as places:
            said = local_ranks.run_ranks("box", wait_forever, 4, (), 600, places)
            print(*(next(said)[1] for _ in range(4)), flush=True)
            time.sleep(600)
    except ShardCoreError as error:
        sys.exit(f"error: {error}")
"""


@pytest.fixture
def maker(tmp_path):
    """Starts a process that makes a box, with a gang in it."""
    (tmp_path / "maker.py").write_text(MAKER)
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))

    def start():
        return subprocess.Popen(
            [sys.executable, tmp_path / "maker.py"],
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    return start


def test_without_its_tools_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(
            ShardCoreError, match="^a cluster in a box needs Linux' nsenter, ip, tc; here is no nsenter$"
        ),
        emulated_hosts(Box()),
    ):
        pass


@boxed
@pytest.mark.skipif(os.geteuid() != 0, reason="is root nowhere")
def test_without_root_it_says_so():
    code = (
        "import os\nfrom bench.hosts import Box, emulated_hosts\nos.setuid(65534)\n"
        "try:\n    emulated_hosts(Box()).__enter__()\nexcept Exception as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == ("a cluster in a box needs root, to make network namespaces; this is user 65534\n")


def _took_s(rank, source, to):
    """Seconds that bytes take from one rank to another."""
    sent = torch.zeros(SENT_BYTES // 4)
    dist.barrier()
    began = time.perf_counter()
    if rank == source:
        dist.send(sent, to)
    if rank == to:
        dist.recv(sent, source)
    return time.perf_counter() - began


def _seen(rank, init_method, send):
    """Hosts, whether ranks share cores, the sum of all ranks, seconds to a rank of the own host and of the
    other, the clock's offset."""
    member = Rank(rank, 4, init_method)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    send(
        (
            member.hosts,
            member._oversubscribed,
            total.item(),
            _took_s(rank, 2, 3),
            _took_s(rank, 0, 3),
            member._clock_offset_s(),
        )
    )
    member.close()


@boxed
def test_a_gang_sees_its_hosts_and_their_links():
    with (
        emulated_hosts(Box(2, 2, 0.1, within_gbit_s=0.2)) as places,
        emulated_hosts(Box()),
    ):  # two boxes stand side by side
        assert [p.host for p in places] == [0, 0, 1, 1]
        last = dict(local_ranks.run_ranks("box", _seen, 4, (), 60.0, places))
    for hosts, oversubscribed, total, *_ in last.values():
        assert (hosts, oversubscribed, total) == (2, 4 > len(os.sched_getaffinity(0)), 6.0)
    *_, within_s, between_s, offset_s = last[3]
    late_bits = (SENT_BYTES - 2 * 64e3) * 8  # what bursts let through at once comes off
    assert within_s > late_bits / 0.2e9 and between_s > late_bits / 0.1e9
    # they share a clock: what is found beyond 0 is the error of ping-pongs
    assert [last[r][-1] for r in (0, 1)] == [0.0, 0.0] and abs(offset_s) < 0.1


@boxed
def test_hosts_have_a_tcp_of_their_own_whatever_the_machine_has():
    with emulated_hosts(Box()) as places:
        for place in places:
            output = subprocess.run(
                [
                    "nsenter",
                    f"--net={place.namespace}",
                    "cat",
                    *(
                        f"/proc/sys/net/ipv4/tcp_{name}"
                        for name in ("congestion_control", "slow_start_after_idle", "early_retrans")
                    ),
                ],
                capture_output=True,
                text=True,
            ).stdout.split()
            assert output == ["reno", "0", "0"]


GROUPED = [
    ("all_to_all", "cross"),
    ("reduce_scatter", "host"),
    ("all_reduce", "host"),
    ("all_to_all", "world"),
]


def _delivered(rank, init_method, send):
    """Send what arrives of values that differ by rank, with two columns of each, among the ranks of a group."""
    member = Rank(rank, 4, init_method)
    for collective, group in GROUPED:
        request = over_links(collective, group)
        exchange = make_exchange(request, rank, member._process_group(request), torch.zeros)
        if "forward" in request.definition.directions:
            exchange.outputs.fill_(rank + 1)
            send(exchange.forward(None).tolist())
        exchange.gradients.fill_(rank + 1)
        send(exchange.backward(None, None).tolist())
    member.close()


def over_links(collective, group):
    return CollectiveRequest((2,) * 4, 4, (0.0,) * 4, collective, hosts=2, group=group, emulated=Box().links)


@boxed
def test_groups_exchange_within_hosts_and_across_them():
    with emulated_hosts(Box()) as places:
        output = list(local_ranks.run_ranks("box", _delivered, 4, (), 60.0, places))
    for rank in range(4):
        host, across = (
            [r + 1 for r in ranks] for ranks in ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
        )
        arrived = [across, across, [sum(host)], host, [sum(host)], [1, 2, 3, 4], [1, 2, 3, 4]]
        # equally much of each
        assert [[x for x in dict.fromkeys(values)] for r, values in output if r == rank] == arrived


@boxed
def test_exchanges_over_emulated_hosts_are_measured_at_their_rate():
    box = Box(between_gbit_s=0.1)
    request = CollectiveRequest((64,) * 4, 2048, (0.0, 0.0, 0.0, 5.0), hosts=2, emulated=box.links)
    grouped = [dataclasses.replace(over_links(*kind), emulated=box.links) for kind in GROUPED]
    config = CollectiveConfig(repeats=1)
    with emulated_hosts(box) as places:
        samples = list(
            measure_collectives(
                [request, *grouped], 4, Setting("test", 2048), config, Transport(places=places)
            )
        )
    assert [s.request for s in samples] == [request, *grouped]
    # each host sends half of two ranks' outputs
    physics_ms = (2 * 64 * 2048 * 4 / 2 - 64e3) * 8 / 0.1e9 * 1e3
    # bytes travel from the first rank's start on, as far as others have started
    assert max(samples[0].waiting_ms) + max(s.median_ms for s in samples[0].forward) > physics_ms
    assert all(s.oversubscribed == (4 > len(os.sched_getaffinity(0))) for s in samples)


@pytest.mark.parametrize(
    "of_hosts, links, message",
    [
        ((), Box().links, "hosts 2 does not fit"),
        ((0, 0, 1), Box().links, "3 places of ranks are given; the gang has 4 ranks"),
        ((0, 0, 1, 1), None, "exchange has links None; those here are EmulatedLinks"),
        (
            (0, 0, 1, 1),
            Box(between_gbit_s=0.1).links,
            "between_gbit_s=0.1.*those here are .*between_gbit_s=0.4",
        ),
    ],
)
def test_exchanges_of_other_hosts_are_refused(of_hosts, links, message):
    request = dataclasses.replace(over_links("all_to_all", "world"), emulated=links)
    places = [EmulatedHost(host, "", "", Box().links) for host in of_hosts]
    with pytest.raises(ShardCoreError, match=message):
        measure_collectives([request], 4, Setting("test", 4), transport=Transport(places=places))


def wait_forever(rank, init_method, send):
    send(os.getpid())
    time.sleep(600)


@boxed
def test_a_killed_rank_is_named_and_a_lost_host_is_one_line():
    with emulated_hosts(Box()) as places:
        with (
            closing(local_ranks.run_ranks("box", wait_forever, 4, (), 60.0, places)) as output,
            pytest.raises(ShardCoreError, match="^box: rank 2 of 4 failed: it was killed by SIGKILL"),
        ):
            os.kill(next(pid for rank, pid in output if rank == 2), signal.SIGKILL)
            list(output)
    with pytest.raises(ShardCoreError, match="host 1 of the box is gone"):
        places[2].enter_network()
    with pytest.raises(ShardCoreError, match="host 1 of the box cannot be entered: Invalid argument"):
        dataclasses.replace(places[2], namespace="/dev/null").enter_network()  # another file has its number


def _networks():
    """Namespaces that any process is in."""
    found = set()
    for pid in psutil.pids():
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


@boxed
@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_box_whose_maker_is_killed(maker, sign):
    links = subprocess.check_output(["ip", "-o", "link"])
    process = maker()
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    family = psutil.Process(process.pid).children(recursive=True)
    networks = {os.readlink(f"/proc/{p.pid}/ns/net") for p in family} - {os.readlink("/proc/self/ns/net")}
    assert len(ranks) == 4 and len(networks) == 2 and networks <= _networks()
    process.send_signal(sign)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [p for p in alive if p.is_running()]
    # What watches a maker ends on its own, a moment later on a busy machine.
    deadline = time.monotonic() + 60
    while networks & _networks() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not networks & _networks()
    assert subprocess.check_output(["ip", "-o", "link"]) == links  # all links were within
