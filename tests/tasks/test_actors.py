import os
import time

import pytest
import ray

from shardcore.measure.gang import Lost
from shardcore.types import ShardCoreError
from tasks import actors

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote(max_restarts=0)
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
        time.sleep(60 if how == "hangs" else 0)
        return how


@pytest.mark.parametrize("ranks, hosts", [(2, 1), (2, 2), (4, 2)])
def test_a_gang_is_spread_over_its_hosts_evenly_and_in_order(ranks, hosts):
    with actors.gang(Member, "member", ranks, "cpu", hosts) as members:
        found = actors.answers("gang", [m.host.remote() for m in members], timeout_s=60)
    each = ranks // hosts
    assert len(set(found)) == hosts and all(len(set(found[i:i + each])) == 1 for i in range(0, ranks, each))


@pytest.mark.parametrize("how, said", [
    (("", "dies"), "gang: rank 1 of 2 failed: its process died"),
    (("loses", "fails"), "gang: rank 1 of 2 failed: it is broken"),
    (("loses", "hangs"), "gang: rank 1 does not answer the others; rank 0: connection closed"),
    (("", "hangs"), "gang: no word for 2 s from rank 1 of 2: it hangs"),
])
def test_the_rank_that_fails_is_named_not_the_one_that_lost_it(how, said):
    with actors.gang(Member, "member", 2, "cpu") as members, pytest.raises(ShardCoreError, match=said):
        actors.when_started([m.host.remote() for m in members])
        actors.answers("gang", [m.behave.remote(h) for m, h in zip(members, how, strict=True)], timeout_s=2)
