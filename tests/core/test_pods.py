"""Pods: hosts that links of a level of their own join, by their names."""

from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology

HOSTS = Topology(tuple(Device(1, host=host) for host in "aabb"))
PODS = Topology(tuple(Device(1, host=f"p{d // 4}/h{d // 2}") for d in range(8)))


def test_a_pod_joins_hosts_that_its_name_begins():
    assert PODS.has_pods and not HOSTS.has_pods and "8 devices on 4 hosts in 2 pods" in repr(PODS)
    assert (
        PODS.on_units("within_pod") == ((0, 1, 2, 3), (4, 5, 6, 7)) and len(PODS.on_units("within_host")) == 4
    )
    assert HOSTS.on_units("within_pod") == HOSTS.on_units("within_host") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: replace(HOSTS, links=links_of(within_pod=9.0)),
            "no pod has several hosts; .* 'pod-0/host-1'",
        ),
        (
            lambda: replace(PODS, links=links_of(within_pod=9.0, between_hosts=10.0)),
            "links between_hosts of 10 GB/s and within_pod of 9; outer links .* no faster than inner ones",
        ),
        (lambda: replace(PODS, rows_over="rack"), "topology has rows_over 'rack'; known are pod, host"),
    ],
)
def test_levels_that_cannot_be_are_named(make, message):
    with pytest.raises(ShardCoreError, match=message):
        make()
