"""A Ray gang over several hosts: raylets on the emulated hosts of a box, one on each."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from boxes import boxed

from bench.hosts import Box, emulated_hosts
from shardcore.measure.hosts import HOST_VARIABLE

BOX = Box(hosts=2, ranks_per_host=2, between_gbit_s=0.04)
DRIVER = """
import json, sys
import ray
from shardcore.measure.collectives import CollectiveConfig, measure_collectives
from shardcore.measure.pairs import PairConfig
from shardcore.io.measurements import CollectiveRequest
from shardcore.core.types import Setting
from tasks.ray_transport import RayTransport
from flows.topology import measure_pair_times

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="warning")
config = CollectiveConfig(repeats=3)
requests = [CollectiveRequest((64,) * 4, 1024, (0.0,) * 4, collective, hosts=2)
            for collective in ("all_to_all", "all_reduce")]
with RayTransport() as transport:
    samples = list(measure_collectives(requests, 4, Setting("cpu", 1024), config, transport, hosts=2))
found = measure_pair_times.fn(4, PairConfig(message_kib=256, load_kib=512))
print(json.dumps({"ms": [max(x.median_ms for x in s.backward) for s in samples],
                  "levels": found.levels, "placed": found.nodes, "link_gbps": found.links.outward[0].shared_gbps}))
"""


def clean_environment():
    """Without settings of a Ray that an earlier test ran in this process, and without the token of the user.
    Ray asks for that token as soon as it lies in the home folder.
    """
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "disabled",
    }


def ray_on(place, *options):
    """A node of Ray on a host, in a session of its own."""
    env = {**clean_environment(), "GLOO_SOCKET_IFNAME": "eth0", HOST_VARIABLE: str(place.host)}
    command = [
        sys.executable,
        *(
            f"-m ray.scripts.scripts start --block --num-cpus=2 --node-ip-address={place.address} "
            f"--object-store-memory={80 << 20}"
        ).split(),
        *options,
    ]
    return subprocess.Popen(
        ["nsenter", f"--net={place.namespace}", *command],
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


@boxed
@pytest.mark.long
def test_a_gang_of_two_hosts_exchanges_over_their_link_and_finds_them(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    with emulated_hosts(BOX) as places, contextlib.ExitStack() as ends:
        first, second = places[0], places[2]
        for place, options in (
            (first, ["--head", "--port=6379", "--include-dashboard=false"]),
            (second, [f"--address={first.address}:6379"]),
        ):
            node = ray_on(place, *options)
            ends.callback(os.killpg, node.pid, signal.SIGKILL)
            assert any("Ray runtime started" in line for line in node.stdout)
        done = subprocess.run(
            [
                "nsenter",
                f"--net={first.namespace}",
                sys.executable,
                str(tmp_path / "driver.py"),
                f"{first.address}:6379",
            ],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout.splitlines()[-1])
    placed = output["placed"]
    [hosts] = output["levels"]
    assert len(hosts) == 2 and all(placed[a] == placed[b] for a, b in hosts) and len(set(placed)) == 2
    assert 0.5 < output["link_gbps"] / (BOX.between_gbit_s / 8) < 2
    # Half of what a host's two ranks own leaves it: 256 KiB each, at 5 MB/s. Loopback takes a few ms.
    assert output["ms"][0] > 0.7 * 256 * 1024 / 5e3
