"""The measure flow on a Ray cluster of two raylets: its estimate, its metrics, the loss of a host, and cancelling."""

import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from ray.cluster_utils import Cluster

from shardcore import dataset

SAMPLES = 60
METRICS = {"samples_total", "kernel_share", "wanted", "samples_per_s", "left_s"}


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=100 << 20)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def toy(new_project, cluster):
    project = new_project()
    project.set_params("setting", batch=2048)
    project.set_params("measure", compute_samples=SAMPLES, comm_samples=6, chunk=4, interleave=4, min_repeats=12, tolerance=0.9,
                       max_repeats=12, comm_repeats=3)
    project.run("flows.tables")
    project.env["RAY_ADDRESS"] = cluster.address
    return project


def start(project):
    """The flow as a program, its output in the project's file `log`."""
    with open(project.folder / "log", "w") as log:
        return subprocess.Popen([sys.executable, "-m", "flows.measure"], cwd=project.folder, env=project.env, stdout=log,
                                stderr=subprocess.STDOUT)


def measured(project):
    return len(dataset.read_ids(project.folder / "data/measurements", "compute"))


def until(condition, timeout_s=60, every_s=0.2):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(every_s)
    return found


def raylet(node):
    return node.all_processes["raylet"][0].process


def workers(cluster):
    """The cluster's living processes that measure; one that works is called after its call."""
    raylets = {raylet(node).pid for node in cluster.list_all_nodes()}
    return [p for p in psutil.process_iter(["cmdline", "ppid"]) if p.info["ppid"] in raylets
            and "".join(p.info["cmdline"] or []).startswith(("ray::DeviceWorker", "ray::measure["))]


def served(node):
    """Our metrics at a node's Prometheus endpoint: name -> its lines, one after the other."""
    with urllib.request.urlopen(f"http://{node.node_ip_address}:{node.metrics_export_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = [m for line in lines if (m := re.match(r"ray_shardcore_measure_(\w+)\{.*\} \S+", line))]
    return {m[1]: "".join(other[0] for other in found if other[1] == m[1]) for m in found}


def estimated(project):
    return project.run("flows.measure", "--dry-run").stdout


def test_a_dry_run_estimates_and_takes_nothing(toy, cluster):
    assert "--dry-run" in toy.run("flows.measure", "-h").stdout
    said = estimated(toy)
    assert f"compute: {SAMPLES} samples wanted, 0 there already, {SAMPLES} missing, 2 devices; about " in said
    assert "a physical estimate" in said
    assert not (toy.folder / "data/measurements").exists() and not workers(cluster)


def test_a_cancelled_run_frees_the_devices(toy, cluster):
    run = start(toy)
    until(lambda: len(workers(cluster)) == 2)
    time.sleep(1)
    run.send_signal(signal.SIGTERM)  # as `prefect flow-run cancel` does
    run.wait(15)
    until(lambda: not workers(cluster), timeout_s=15)
    assert run.returncode != 0


def test_a_lost_host_costs_what_it_had_in_hand_and_every_sample_is_there_once(toy, cluster):
    shutil.rmtree(toy.folder / "data/measurements", ignore_errors=True)
    run = start(toy)
    head, other = cluster.list_all_nodes()
    until(lambda: measured(toy) > SAMPLES // 3)
    killed = raylet(other)
    killed.kill()
    killed.wait()  # its worker ends when that pid is gone
    found = until(lambda: (m := served(head)) and METRICS <= set(m) and m, timeout_s=60)
    for name in ("samples_total", "kernel_share"):
        assert 'device="device 0",kind="compute"' in found[name]
    assert run.wait(90) == 0, (toy.folder / "log").read_text()[-3000:]
    log = (toy.folder / "log").read_text()
    again = int(re.search(r"(\d+) samples are measured again one by one", log)[1])
    assert 1 <= again <= 4 + 4  # a chunk, and the window of ops that run in turn
    assert measured(toy) == SAMPLES + 1  # and the control group
    control, *disturbed = dataset.read_repeats(toy.folder / "data/measurements")
    assert len(control) > 2 and all(g[0].known_to > 0.9 for g in disturbed)  # nothing else was measured several times
    assert len(dataset.read_comm(toy.folder / "data/measurements")) == 6  # by two ranks that share what is left
    toy.set_params("measure", compute_samples=SAMPLES + 30)
    found = f"{SAMPLES + 30} samples wanted, {SAMPLES} there already, 30 missing, 1 devices; about .* at which the dataset grew"
    assert re.search(found, estimated(toy))
