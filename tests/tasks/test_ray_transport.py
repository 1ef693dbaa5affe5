"""Gangs of a Ray cluster: where their ranks are, and what is said of one that fails."""

import os
import threading
import time

import pytest
import ray

from shardcore.core.errors import ShardCoreError
from shardcore.measure import local_ranks
from shardcore.measure.local_ranks import RankLost
from shardcore.measure.transport import NoRoom
from tasks import ray_transport
from tasks.ray_transport import RayTransport, cpus_per_rank, failure_reason

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


def where(rank, init_method, send):
    send(ray.get_runtime_context().get_node_id())
    send(os.getpid())


def behave(rank, init_method, send, *how):
    if how[rank] == "dies":
        os._exit(1)
    if how[rank] == "fails":
        raise ShardCoreError("it is broken")
    if how[rank] == "loses":
        raise RankLost("connection closed")
    if how[rank] == "hangs":
        threading.Event().wait()
    for i in range(8 if how[rank] == "works" else 1):
        time.sleep(0.2)
        send(i)


ray.cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])


def run(transport, work, *how, ranks=2, timeout_s=60.0, hosts=1):
    said = {rank: [] for rank in range(ranks)}
    for rank, value in transport.run("gang", work, ranks, how, timeout_s, hosts):
        said[rank].append(value)
    return said


def test_a_gang_is_spread_over_its_hosts_evenly_in_order_serves_again_and_ends(actor_processes):
    with RayTransport() as transport:
        assert transport.device == "cpu" and [host.devices for host in transport.hosts()] == [1, 1]
        first = run(transport, where, ranks=4, hosts=2)
        nodes = [first[rank][0] for rank in range(4)]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        names = {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)}
        assert names >= {f"measure rank {i} of 4" for i in range(4)}
        assert run(transport, where, ranks=4, hosts=2) == first
        assert len({run(transport, where)[rank][0] for rank in range(2)}) == 1
    deadline = time.monotonic() + 60
    while actor_processes("RankProcess"):
        assert time.monotonic() < deadline, "ranks outlive their gang"
        time.sleep(0.05)


def test_the_rank_that_fails_is_named_not_the_one_that_lost_it(monkeypatch):
    monkeypatch.setattr(ray_transport, "_LOOK_EVERY_S", 0.1)
    with RayTransport() as transport:
        assert run(transport, behave, "", "ok") == {0: [0], 1: [0]}
        # For longer than either may be silent.
        assert run(transport, behave, "works", "works", timeout_s=1.2) == {0: [*range(8)], 1: [*range(8)]}
        for how, message in (
            (("loses", "fails"), "^gang: rank 1 of 2 failed: it is broken$"),
            (("", "hangs"), "^gang: no word for 30 s from rank 1: it hangs"),
            (("loses", "hangs"), "^gang: rank 1 does not answer the others .*; rank 0: connection closed$"),
            (("loses", ""), "^gang: rank 0 does not answer the others .*; rank 0: connection closed$"),
            (("", "dies"), "^gang: rank 1 of 2 failed: its process died"),
        ):
            # A rank that reports has as long as a busy machine needs; one that hangs would take all of it.
            monkeypatch.setattr(local_ranks, "_GRACE_S", 0.2 if "hangs" in how else 60.0)
            if how == ("", "hangs"):  # by ranks that have started, which may take long on a busy machine
                run(transport, behave, "", "ok", timeout_s=120.0)
            with pytest.raises(ShardCoreError, match=message):
                run(transport, behave, *how, timeout_s=30.0 if how == ("", "hangs") else 120.0)
        assert run(transport, behave, "", "ok") == {0: [0], 1: [0]}  # by another gang


def test_what_finds_no_room_is_said(monkeypatch):
    monkeypatch.setattr(ray_transport, "_PLACE_S", 0.1)
    message = r"^3 ranks, 1 a host, found no room within 0.1 s on the Ray cluster of 2 nodes"
    with RayTransport() as transport, pytest.raises(NoRoom, match=message):
        run(transport, where, ranks=3, hosts=3)


def test_ranks_share_a_core_only_where_there_are_fewer():
    assert cpus_per_rank(1) == cpus_per_rank(2, hosts=2) == 1.0  # each host of this cluster has one
    assert cpus_per_rank(2) == cpus_per_rank(4, hosts=2) == 0.5
    with RayTransport() as transport:
        assert transport.shares_cores(2) and not transport.shares_cores(1)


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("of two\n  lines"), "of two lines"),
        (RuntimeError("x" * 500), "x" * 300),
        (RuntimeError("ray frames ShardCoreError: no FBGEMM"), "no FBGEMM"),
        (
            ray.exceptions.RayActorError(
                error_msg="The actor died because of a bug. Some common causes are many"
            ),
            "its process died: of a bug.",
        ),
    ],
)
def test_a_reason_is_one_line_without_rays_frames(error, message):
    assert failure_reason(error) == message
