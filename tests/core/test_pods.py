"""Pods: hosts that links of a level of their own join, by their names."""

from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology

HOSTS = Topology(tuple(Device(1, host=host) for host in "aabb"))
PODS = Topology(tuple(Device(1, host=f"p{d // 4}/h{d // 2}") for d in range(8)))


def test_a_pod_joins_hosts_that_its_name_begins():
    assert PODS.joins_devices("within_pod") and not HOSTS.joins_devices("within_pod")
    assert "8 devices on 4 hosts in 2 pods" in repr(PODS) and "pods" not in repr(HOSTS)
    assert (
        PODS.devices_by_domain("within_pod") == ((0, 1, 2, 3), (4, 5, 6, 7))
        and len(PODS.devices_by_domain("within_host")) == 4
    )
    assert HOSTS.devices_by_domain("within_pod") == HOSTS.devices_by_domain("within_host") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: replace(HOSTS, links=make_links(within_pod=9.0)),
            "no pod has several hosts; .* 'pod-0/host-1'",
        ),
        (
            lambda: replace(PODS, links=make_links(within_pod=9.0, between_hosts=10.0)),
            "links between_hosts of 10 GB/s a device and within_pod of 9; outer ones need to be no faster than inner",
        ),
        (
            lambda: replace(
                PODS, links=make_links(shared=True, within_host=9.0, within_pod=12.0, between_hosts=32.0)
            ),
            "links between_hosts of 8 GB/s a device and within_pod of 6; outer ones need",
        ),
        (
            lambda: replace(PODS, links=make_links(within_host=9.0, between_hosts=3.0)[::-1]),
            "links between_hosts, within_host; it needs them from the innermost out: within_host, between_hosts",
        ),
        (lambda: replace(PODS, rows_over="rack"), "topology has rows_over 'rack'; known are host, pod"),
        (lambda: replace(PODS, rows_over=["pod"]), "topology: rows_over is .'pod'.; it needs"),
        (
            lambda: replace(HOSTS, rows_over="pod"),
            "rows_over 'pod', and no pod has several hosts; it needs 'host', or hosts with names such as",
        ),
        (
            lambda: Topology(PODS.devices[:6], rows_over="pod"),
            "rows_over 'pod', and a pod has 2 or 4 devices; TorchRec needs as many in each, or rows_over 'host'",
        ),
        (
            lambda: Topology(
                tuple(Device(1, host=h) for h in ("p/a", "p/b", "p/b", "q/c", "q/d", "q/d")), rows_over="pod"
            ),
            "rows_over 'pod', and a host has 1 or 2 devices; TorchRec needs as many in each",
        ),
    ],
)
def test_levels_that_cannot_be_are_named(make, message):
    with pytest.raises(ShardCoreError, match=message):
        make()


def test_some_devices_share_a_links_of_pods_by_their_pod():
    """Half of a pod has half of its link. Of devices of which no two share a pod, no links join any within one."""
    links = make_links(shared=True, within_host=90.0, within_pod=12.0, between_hosts=8.0)
    whole = replace(PODS, links=links, rows_over="pod")
    near, far = whole.restricted_to((0, 1, 4, 5)), whole.restricted_to((0, 4))
    assert [x.gbps for x in near.links] == [90.0, 8.0 / 2] and near.rows_over is None
    assert [x.gbps for x in far.links] == [90.0, 8.0 / 4]
    assert whole.restricted_to(range(8)) == whole
