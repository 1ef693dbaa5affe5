import pytest

from shardcore.errors import ShardCoreError
from shardcore.topology import Device, Topology

HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))


@pytest.mark.parametrize("make, named", [
    (lambda: Device(0), ["memory_bytes 0"]),
    (lambda: Topology(()), ["no devices"]),
    (lambda: Topology((Device(1),), latency_ms=-1.0), ["latency_ms -1.0"]),
    (lambda: Device(1, host="\x1b[31m"), ["a device's host has name"]),
    (lambda: Device(2**50 + 1), ["memory_bytes 1125899906842625"]),
    (lambda: Device(1, 1001.0), ["speed 1001.0"]),
    (lambda: Topology((Device(1),) * 65537), ["65537 devices"]),
    (lambda: Topology((Device(1),), "../x"), ["hardware '../x'"]),
    (lambda: Device(1, 0.0), ["speed 0.0"]),
    (lambda: Device(1, float("inf")), ["speed inf"]),
    (lambda: Device(1, float("nan")), ["speed nan"]),
    (lambda: Topology((Device(1),), within_host_gbps=0.0), ["within_host_gbps 0.0", "1e-09"]),
    (lambda: Topology((Device(1),), between_hosts_gbps=float("inf")), ["between_hosts_gbps inf"]),
    (lambda: Topology((Device(1),), latency_ms=float("inf")), ["latency_ms inf"]),
    (lambda: Topology((Device(1),), host_link_gbps=0.0), ["host_link_gbps 0.0"]),
    (lambda: Topology((Device(1),), between_hosts_gbps=2.0, host_link_gbps=8.0),
     ["between_hosts_gbps 2.0", "host_link_gbps 8.0", "share one"]),
])
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_values_at_their_limits_are_taken():
    links = {"within_host_gbps": 1e-3, "between_hosts_gbps": 1e9, "latency_ms": 0.0}
    assert Topology((Device(1, 0.001),), **links).latency_ms == 0


def test_what_is_not_said_has_its_default():
    assert (Device(1).speed, Device(1).host) == (1.0, "host-0")
    links = HOSTS.within_host_gbps, HOSTS.between_hosts_gbps, HOSTS.latency_ms, HOSTS.hardware
    assert links == (None,) * 4 and HOSTS.hosts == ("a", "b") and len(HOSTS) == 4


def test_some_devices_share_links_with_the_others():
    links = {"within_host_gbps": 10.0, "host_link_gbps": 4.0}
    whole = Topology(tuple(Device(d + 1, host="aabb"[d]) for d in range(4)), **links)
    assert whole.among((0, 1)) == Topology(whole.devices[:2], **links)
    assert whole.among((0, 2)).devices == (whole.devices[0], whole.devices[2])
    assert whole.among((0, 2)).host_link_gbps == 2
    assert whole.among((0, 1, 2)).host_link_gbps == 2
    assert HOSTS.among((0,)) == Topology(HOSTS.devices[:1]) and not HOSTS.gives_links and whole.gives_links
