"""A cluster in a box: real processes on hosts that are network namespaces, with links of a given rate."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shapes import column, host_row, on_hosts, replica

from shardcore.errors import ShardCoreError
from shardcore.layouts import CHANNELS, Channel
from shardcore.measure import collectives, hosts, local_ranks, pairs
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measurements import CollectiveRequest, ComputeRequest
from shardcore.types import Plan, Problem, Setting, Shard, Table
from shardcore.workload import lower


def lacking():
    """Why no box can be made here. Empty where one can."""
    try:
        with hosts.box(hosts.BoxConfig(1)):
            return ""
    except ShardCoreError as error:
        return str(error)


LACKING = lacking()
needs_box = pytest.mark.skipif(bool(LACKING), reason=LACKING)
SETTING = Setting("emulated", 64)
MBIT = 80
QUICK = hosts.BoxConfig(hosts=2, ranks_per_host=2, link_mbit=MBIT)


def networks():
    """All network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return found


def holders(maker):
    """The processes that hold the networks of a maker's boxes."""
    found = subprocess.run(["pgrep", "-P", str(maker), "-x", "sleep"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def gone(spaces):
    """Whether these networks end within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if networks().isdisjoint(spaces):
            return True
        time.sleep(0.05)
    return False


def spaces_of(pids):
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}


def _told(rank, init_method, say):
    member = collectives.Rank(rank, 4, init_method)
    both = torch.full((1,), float(rank))
    dist.all_reduce(both)
    say((member.hosts, both.item(), collectives.host_id(), os.readlink("/proc/self/ns/net"),
         abs(member._offset_s), member._oversubscribed))
    dist.barrier()
    member.close()


def _sent(rank, init_method, say, n_bytes):
    """s in which ranks 0 and 2, on different hosts, and then 0 and 1, on one, exchange so many bytes."""
    collectives.Rank(rank, 4, init_method)
    message, found = torch.zeros(n_bytes, dtype=torch.uint8), []
    for other in (2, 1):
        took = []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                dist.send(message, other)
                dist.recv(message[:1], other)
            elif rank == other:
                dist.recv(message, 0)
                dist.send(message[:1], 0)
            took.append(time.perf_counter() - began)
        found.append(min(took))
    say(found)
    dist.barrier()


def _waits(rank, init_method, say):
    collectives.Rank(rank, 4, init_method)
    say(os.getpid())
    time.sleep(600)


@needs_box
def test_a_gang_is_on_the_hosts_of_a_box_and_nothing_is_left():
    own, links = os.readlink("/proc/self/ns/net"), set(os.listdir("/sys/class/net"))
    with hosts.box(QUICK) as on:
        made = spaces_of(holders(os.getpid()))
        where = [hosts.host_of_rank(rank, on, 4) for rank in range(4)]
        assert [h.address for h in where] == ["10.88.0.1"] * 2 + ["10.88.0.2"] * 2
        told = dict(local_ranks.run("box", _told, 4, (), 60.0, where))
        seen = [told[rank] for rank in range(4)]
        assert set(os.listdir("/sys/class/net")) == links
        took = dict(local_ranks.run("box", _sent, 4, (1 << 20,), 60.0, where))[0]
    assert [(n, total) for n, total, *_ in seen] == [(2, 6.0)] * 4
    names, spaces = ([told[k] for told in seen] for k in (2, 3))
    assert names[0] == names[1] != names[2] == names[3]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3] != own
    assert len(made) == 3 and set(spaces) < made and own not in made
    # One machine, so one clock: what ping-pongs over the links make of it. And its cores are shared.
    assert max(offset for *_, offset, _ in seen) < 0.05
    assert all(x[-1] == (4 > len(os.sched_getaffinity(0))) for x in seen)
    # What exceeds a burst passes no faster than the link carries. Within a host there is no link.
    least = ((1 << 20) - (hosts._BURST_KIB << 10)) * 8 / (MBIT * 1e6)
    assert took[0] > 0.95 * least > 3 * took[1]
    assert gone(made) and not holders(os.getpid())


@needs_box
def test_exchanges_are_measured_over_hosts_and_shuffled_ranks_are_found():
    with hosts.box(QUICK) as on, hosts.box(QUICK) as other:
        requests = [CollectiveRequest((16, 8, 16, 12), 64, (0.0,) * 4, c, hosts=2)
                    for c in ("all_to_all", "reduce_scatter", "all_to_all_ids_bucketized")]
        config = collectives.CollectiveConfig(repeats=2)
        found = list(collectives.measure_all(requests, 4, SETTING, config, on=on))
        assert [s.request for s in found] == requests and all(s.forward for s in found)
        with pytest.raises(ShardCoreError, match="hosts 1 does not fit a gang of 4 ranks with hosts 2"):
            collectives.measure_all([CollectiveRequest((8,) * 4, 64, (0.0,) * 4)], 4, SETTING, on=on)
        # Two boxes do not meet, though they have the same addresses.
        where = [other[h] for h in (0, 1, 1, 0)]
        near = pairs.measure(4, pairs.PairConfig(sweeps=2, repeats=2, load_kib=64), on=where)
    assert near.levels == [((0, 3), (1, 2))]
    assert near.links.between_gbps < 2 * MBIT / 8e3 and near.links.within_gbps > near.links.between_gbps


@needs_box
def test_plans_are_replayed_over_hosts_with_their_compute_measured_before():
    setting = Setting("cpu", 1024)
    tables = tuple(Table(f"t{i}", 2000, 32, 20.0) for i in range(3))
    problem = Problem("p", tables, on_hosts("aabb", 1 << 30), 1024)
    config = ReplayConfig(repeats=4, warmups=1, batches=2, evict_bytes=1 << 20)
    apart = Plan((column(tables[0], 0), host_row(tables[1], (2, 3)), replica(tables[2], problem.topology)))
    near = Plan((column(tables[0], 0), column(tables[1], 0), replica(tables[2], problem.topology)))
    workloads = [lower(plan, problem) for plan in (apart, near)]
    reference = ComputeRequest((Shard.whole(tables[0]),), 1024), 1.0
    with hosts.box(QUICK) as on:
        both = replay_all(workloads, setting, config, reference=reference, on=on)
        with pytest.raises(ShardCoreError, match="hosts a, b and speeds .1.0.; a replay needs one host"):
            replay_all(workloads, setting, config)
        alone = lower(near, Problem("p", tables, on_hosts("aaaa", 1 << 30), 1024))
        with pytest.raises(ShardCoreError, match="a replay needs the box's 2 hosts"):
            replay_all([alone], setting, config, on=on)
    for found, workload in zip(both, workloads, strict=True):
        assert found.slowdown == 1
        # A device that holds nothing but its replica computes less.
        assert found.forward_compute_ms[1] < found.forward_compute_ms[0]
        assert min(found.backward_compute_ms) > 0
        # Device 0 sends half of its outputs, and half of a half again, to the other host.
        n_bytes = workload.traffic[CHANNELS.index(Channel("all_to_all")), 0] / 2
        assert max(found.forward_comm_ms) > 0.8 * 8e3 * (n_bytes - (hosts._BURST_KIB << 10)) / (MBIT * 1e6)
    assert both[1].backward_compute_ms[0] > both[0].backward_compute_ms[0]


@needs_box
def test_a_rank_that_dies_is_named_and_nothing_is_left():
    with pytest.raises(ShardCoreError, match="box: rank 3 of 4 failed: it was killed by SIGKILL"), \
            hosts.box(QUICK) as on:
        made = spaces_of(holders(os.getpid()))
        where = [hosts.host_of_rank(rank, on, 4) for rank in range(4)]
        for rank, pid in local_ranks.run("box", _waits, 4, (), 60.0, where):
            if rank == 3:
                os.kill(pid, signal.SIGKILL)
    assert gone(made) and not [p for p in multiprocessing.active_children() if p.name.startswith("box")]


@needs_box
def test_a_maker_that_is_killed_leaves_nothing():
    made = subprocess.Popen([sys.executable, "-c", "import time\nfrom shardcore.measure import hosts\n"
                             "with hosts.box(hosts.BoxConfig(3)) as on:\n"
                             "    print(*(h.network for h in on), flush=True)\n    time.sleep(600)"],
                            stdout=subprocess.PIPE, text=True)
    held = made.stdout.readline().split()
    spaces = spaces_of(holders(made.pid))
    assert len(held) == 3 and len(spaces) == 4 and {os.readlink(path) for path in held} < spaces
    made.kill()
    made.communicate()
    assert gone(spaces)


@needs_box
def test_what_cannot_be_made_is_said_in_one_line(monkeypatch):
    with pytest.raises(ShardCoreError, match="`ip link add x type nonsense` failed: .*[Uu]nknown") as error:
        hosts._run(os.getpid(), "ip", "link", "add", "x", "type", "nonsense")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(hosts, "_NEW_NETWORK", 0x10000000)  # CLONE_NEWUSER: not what the file is
    with hosts.box(hosts.BoxConfig(1)) as (host,), pytest.raises(ShardCoreError, match="cannot enter /proc"):
        host.enter()
    os.seteuid(65534)
    try:
        with pytest.raises(ShardCoreError, match="needs root; this is user 65534"), hosts.box(QUICK):
            pass
    finally:
        os.seteuid(0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ShardCoreError, match="needs the command ip, of the package iproute2"), \
            hosts.box(QUICK):
        pass
    monkeypatch.undo()
    assert not holders(os.getpid())


@pytest.mark.parametrize(("field", "value"), [("hosts", 0), ("hosts", 65), ("ranks_per_host", 0),
                                              ("link_mbit", 0), ("link_mbit", 100_001)])
def test_a_box_beyond_its_limits_is_refused(field, value):
    with pytest.raises(ShardCoreError, match=f"box has {field} {value}; it needs"):
        hosts.BoxConfig(**{field: value})


def test_ranks_are_dealt_host_by_host():
    on = [hosts.Host(name, name) for name in "ab"]
    assert [hosts.host_of_rank(rank, on, 6).address for rank in range(6)] == list("aaabbb")
    config = hosts.BoxConfig(4, 2, 400)
    assert config.ranks == 8
    assert config.words == "4 emulated hosts of 2 ranks, links of 400 Mbit/s"
    assert np.prod([config.hosts, config.ranks_per_host]) == 8
