"""A Ray cluster of two raylets with one CPU each on this machine."""

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster


@pytest.fixture(scope="package")
def cluster():
    made = Cluster()
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=100 << 20)
    ray.init(address=made.address, log_to_driver=False, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def actor_processes(cluster):
    """Finds the cluster's living processes of an actor class; one that works may be called after its call instead."""
    def find(*names: str) -> list[psutil.Process]:
        raylets = {info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]}
        return [p for p in psutil.process_iter(["cmdline", "ppid"])
                if p.info["ppid"] in raylets and any(name in "".join(p.info["cmdline"] or []) for name in names)]

    return find
