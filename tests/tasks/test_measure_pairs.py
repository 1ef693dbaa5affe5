import numpy as np
import pytest

from flows.topology import measure_pair_times
from shardcore.core.errors import ShardCoreError
from shardcore.measure.pairs import PairConfig
from tasks import ray_transport

QUICK = PairConfig(message_kib=16, sweeps=2, repeats=1, load_kib=64)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


def test_a_gang_of_the_cluster_times_its_pairs_wherever_there_is_room():
    """Each node has one CPU: two ranks share one."""
    found = measure_pair_times.fn(3, QUICK)
    own = np.eye(3, dtype=bool)
    assert (found.pair_ms[~own] > 0).all() and found.nodes == ("127.0.0.1",) * 3
    assert found.links.within_gbps > 0 and found.links.latency_ms > 0


def test_ranks_without_room_are_named(monkeypatch):
    monkeypatch.setattr(ray_transport, "_PLACE_S", 0.2)
    monkeypatch.setattr(ray_transport, "cpus_per_rank", lambda ranks, hosts: 1.0)
    with pytest.raises(ShardCoreError, match="3 ranks found no room within 0.2 s on the Ray cluster of 2 "):
        measure_pair_times.fn(3, QUICK)
