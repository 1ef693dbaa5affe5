import os
import threading
import time

import pytest
import ray

from shardcore.core.errors import ShardCoreError
from shardcore.measure.local_ranks import Lost
from tasks import actors

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


@ray.remote(max_restarts=0, max_concurrency=8)  # so that one that hangs in a call takes others
class Member:
    def host(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def behave(self, how: str) -> str:
        if how == "dies":
            os._exit(1)
        if how == "fails":
            raise ShardCoreError("it is broken")
        if how == "loses":
            raise Lost("connection closed")
        if how == "hangs":
            threading.Event().wait()
        if how == "works":
            time.sleep(0.5)
        return how


def ends(member) -> bool:
    """Tell if an actor stops answering within a minute. Ray may deliver a call for a moment after killing it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ray.get(member.host.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return True
    return False


def test_a_gang_is_spread_over_its_hosts_evenly_in_order_and_ends():
    with actors.gang(Member, "member", 4, "cpu", hosts=2) as members:
        found = actors.answers("gang", [m.host.remote() for m in members], timeout_s=300)
        assert found[0] == found[1] != found[2] == found[3]
        assert {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)} >= {
            f"member rank {i}" for i in range(4)
        }
    assert all(map(ends, members))


def test_the_rank_that_fails_is_named_not_the_one_that_lost_it(monkeypatch):
    with actors.gang(Member, "member", 2, "cpu") as members:
        assert len(set(actors.when_started([m.host.remote() for m in members]))) == 1

        def answer(*how, timeout_s=60.0, silent_s=None):
            """The answers of a call to each rank, once the calls that end have ended."""
            calls = [m.behave.remote(h) for m, h in zip(members, how, strict=True)]
            ray.wait(
                [c for c, h in zip(calls, how, strict=True) if h != "hangs"],
                num_returns=sum(h != "hangs" for h in how),
            )
            return actors.answers("gang", calls, timeout_s, silent_s)

        assert answer("", "ok") == ["", "ok"]
        calls = [m.behave.remote("works") for m in members]  # for longer than either may be silent
        assert actors.answers("gang", calls, timeout_s=0.1, silent_s=lambda rank: 0.0) == ["works", "works"]
        with pytest.raises(ShardCoreError, match="^gang: rank 1 of 2 failed: it is broken$"):
            answer("loses", "fails")
        with pytest.raises(ShardCoreError, match="^gang: no word for 0.2 s from rank 1 of 2: it hangs$"):
            answer("", "hangs", timeout_s=0.2)
        with pytest.raises(ShardCoreError, match="^gang: no word for 60 s from rank 0 of 2: it hangs$"):
            answer("hangs", "", silent_s={0: 60.1, 1: 1e9}.get)  # what ended needs to say nothing
        monkeypatch.setattr(actors, "_GRACE_S", 0.2)
        with pytest.raises(
            ShardCoreError, match="^gang: rank 1 does not answer the others; rank 0: connection closed$"
        ):
            answer("loses", "hangs")
        with pytest.raises(
            ShardCoreError, match="^gang: rank 0 does not answer the others; rank 0: connection closed$"
        ):
            answer("loses", "")
        with pytest.raises(ShardCoreError, match="^gang: rank 1 of 2 failed: its process died"):
            answer("", "dies")


def test_what_finds_no_room_is_said(monkeypatch):
    monkeypatch.setattr(actors, "_PLACE_S", 0.1)
    with (
        pytest.raises(
            ShardCoreError,
            match=r"^3 ranks, 1 a host, found no room within 0.1 s on the Ray "
            r"cluster of 2 nodes",
        ),
        actors.gang(Member, "member", 3, "cpu", hosts=3),
    ):
        pass
    monkeypatch.setattr(actors, "START_S", 0.1)
    elsewhere = Member.options(num_gpus=1).remote()
    with pytest.raises(ShardCoreError, match=r"^1 measuring actors found no free device in 0.1 s"):
        actors.when_started([elsewhere.host.remote()])
    ray.kill(elsewhere)


def test_ranks_share_a_core_only_where_there_are_fewer():
    assert actors.rank_cpus(1) == actors.rank_cpus(2, hosts=2) == 1.0  # each host of this cluster has one
    assert actors.rank_cpus(2) == actors.rank_cpus(4, hosts=2) == 0.5


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
    assert actors.reason(error) == message
