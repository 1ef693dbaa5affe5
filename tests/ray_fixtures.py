"""One Ray cluster for the tests of a worker, started as the stack starts Ray: it asks for a token and listens
at loopback."""

import os
import shutil
from unittest import mock

import psutil
import pytest

from tasks import stack_services
from tasks.stack_config import StackConfig

METRICS_MS = 1000
"""Between two exports of metrics, of which there are ten times as many as usual."""


@pytest.fixture(scope="session")
def written_stack(tmp_path_factory):
    """The config, folder and token of a stack whose settings are written, and which does not run."""
    folder = tmp_path_factory.mktemp("written") / ".stack"
    config = StackConfig(str(folder))
    folder.mkdir()
    yield config, folder, stack_services.write_service_files(config, folder)
    shutil.rmtree(stack_services.ray_folder(folder).parent)  # it is elsewhere where the folder's path is long


@pytest.fixture(scope="session")
def ray_env(written_stack):
    """The environment of the cluster's processes and of its clients."""
    ray_head = stack_services.stack_services(*written_stack)["ray"].daemon
    found = {k: v for k, v in ray_head.env.items() if k.startswith("RAY_") and k != "RAY_ADDRESS"}
    return {**found, "RAY_metrics_report_interval_ms": str(METRICS_MS)}


@pytest.fixture(scope="session")
def cluster(ray_env):
    """A cluster of two raylets with one CPU each on this machine, to which this process is connected."""
    import ray
    from ray._private import ray_constants
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    made = Cluster()
    with mock.patch.dict(os.environ, ray_env), mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        reset_auth_token_state()  # this process read both settings when it imported Ray
        for _ in range(2):
            add_node(made)
        ray.init(address=made.address, log_to_driver=False, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster):
    """A raylet with one CPU. Its agent chooses its port: the usual one may be that of another cluster on this
    machine."""
    return cluster.add_node(
        num_cpus=1,
        object_store_memory=80 << 20,
        node_ip_address="127.0.0.1",
        include_dashboard=False,
        dashboard_agent_listen_port=None,
    )


@pytest.fixture
def second_node(cluster, ray_env):
    """One of the two raylets. A test may kill it: then the tests after it have a fresh one."""
    _, found = cluster.list_all_nodes()
    yield found
    if found not in cluster.list_all_nodes():
        with mock.patch.dict(os.environ, ray_env):
            add_node(cluster)


@pytest.fixture
def another_node(cluster, ray_env):
    """A third raylet for as long as a test lasts."""
    with mock.patch.dict(os.environ, ray_env):
        made = add_node(cluster)
    yield made
    if made in cluster.list_all_nodes():
        cluster.remove_node(made)


def raylet(node) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


@pytest.fixture
def actor_processes(cluster):
    """Finds the cluster's living processes of an actor class; one that works may be called after its call
    instead."""

    def find(*names: str) -> list[psutil.Process]:
        raylets = {
            info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]
        }
        return [
            p
            for p in psutil.process_iter(["cmdline", "ppid"])
            if p.info["ppid"] in raylets and any(name in "".join(p.info["cmdline"] or []) for name in names)
        ]

    return find
