from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import Link, links_of
from shardcore.core.topology import Device, Topology

HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: Device(0), ["memory_bytes 0"]),
        (lambda: Topology(()), ["no devices"]),
        (lambda: Link("within_host", latency_ms=-1.0), ["link within_host has latency_ms -1.0"]),
        (lambda: Device(1, host="\x1b[31m"), ["a device's host has name"]),
        (lambda: Device(2**50 + 1), ["memory_bytes 1125899906842625"]),
        (lambda: Device(1, 1001.0), ["speed 1001.0"]),
        (lambda: Topology((Device(1),) * 65537), ["65537 devices"]),
        (lambda: Topology((Device(1),), "../x"), ["hardware '../x'"]),
        (lambda: Device(1, 0.0), ["speed 0.0"]),
        (lambda: Device(1, float("inf")), ["speed inf"]),
        (lambda: Device(1, float("nan")), ["speed nan"]),
        (lambda: Link("within_host", 0.0), ["link within_host has gbps 0.0", "1e-09"]),
        (lambda: Link("between_hosts", float("inf")), ["link between_hosts has gbps inf"]),
        (lambda: Link("between_hosts", 1.0, latency_ms=float("inf")), ["latency_ms inf"]),
        (lambda: Link("between_hosts", None, True), ["shared True and gbps None"]),
        (lambda: Link("within_host", 2.0, True), ["within_host has shared True", "only links of hosts and pods"]),
        (lambda: Link("on_the_moon", 2.0), ["level 'on_the_moon'", "known are within_host, "]),
        (lambda: links_of(on_the_moon=2.0), ["level 'on_the_moon'", "known are within_host, "]),
        (
            lambda: Topology((Device(1),), links=(Link("within_host", 2.0), Link("within_host", 3.0))),
            ["links of within_host, within_host", "at most one of each level"],
        ),
    ],
)
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_values_at_their_limits_are_taken():
    links = links_of(0.0, within_host=1e9, between_hosts=1e-3)
    assert Topology((Device(1, 0.001),), links=links).slowest.latency_ms == 0


def test_what_is_not_said_has_its_default():
    assert (Device(1).speed, Device(1).host) == (1.0, "host-0")
    assert (HOSTS.links, HOSTS.hardware, HOSTS.link("within_host")) == ((), None, Link("within_host"))
    assert HOSTS.hosts == ("a", "b") and len(HOSTS) == 4


def test_some_devices_share_links_with_the_others():
    links = links_of(shared=True, within_host=10.0, between_hosts=4.0)
    whole = Topology(tuple(Device(d + 1, host="aabb"[d]) for d in range(4)), links=links)
    assert whole.among((0, 1)) == Topology(whole.devices[:2], links=links)
    assert whole.among((0, 2)).devices == (whole.devices[0], whole.devices[2])
    assert whole.among((0, 2)).links == (links[0], Link("between_hosts", 2.0, shared=True))
    assert whole.among((0, 1, 2)).link("between_hosts").gbps == 2
    assert HOSTS.among((0,)) == Topology(HOSTS.devices[:1])


PODS = Topology(tuple(Device(1, host=f"p{d // 4}/h{d // 2}") for d in range(8)))


def test_a_pod_joins_hosts_that_its_name_begins():
    assert PODS.has_pods and not HOSTS.has_pods and "8 devices on 4 hosts in 2 pods" in repr(PODS)
    assert PODS.on_units("within_pod") == ((0, 1, 2, 3), (4, 5, 6, 7)) and len(PODS.on_units("within_host")) == 4
    assert HOSTS.on_units("within_pod") == HOSTS.on_units("within_host") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: replace(HOSTS, links=links_of(within_pod=9.0)), "no pod has several hosts; .* 'pod-0/host-1'"),
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


def test_links_are_those_of_the_outermost_level_that_joins_devices():
    links = links_of(within_host=10.0, between_hosts=4.0)
    whole = Topology(HOSTS.devices, links=links[::-1])
    assert whole == Topology(HOSTS.devices, links=links)  # in the order of levels
    assert whole.slowest == links[1] and whole.among((0, 1)).slowest == links[0]
    assert whole.outermost(whole.units[:, [0, 1]]) == whole.outermost(whole.units[:, [2]]) == links[0]
    assert "within_host 10 GB/s, between_hosts 4 GB/s" in repr(whole)
