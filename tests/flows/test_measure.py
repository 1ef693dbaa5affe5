"""The measure flow on a Ray cluster of two raylets: its estimate, its metrics, the loss of a host, and cancelling."""

import contextlib
import re
import shutil
import signal
import subprocess
import time
import urllib.request

import psutil
import pytest
from ray.cluster_utils import Cluster
from scratch import timings, until

from shardcore import dataset

SAMPLES = 40
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


def measured(project):
    return len(dataset.read_ids(project.folder / "data/measurements", "compute"))


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
    with toy.started("flows.measure") as run:
        until(lambda: len(workers(cluster)) == 2)
        time.sleep(1)
        run.process.send_signal(signal.SIGTERM)  # as `prefect flow-run cancel` does
        run.process.wait(15)
        until(lambda: not workers(cluster), timeout_s=15)
    assert run.process.returncode != 0


@pytest.mark.long
def test_a_disk_full_while_a_part_is_written_loses_nothing_that_was(toy, rng, outcome):
    folder = toy.folder / "data/measurements"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", f"size={rng.randrange(16, 120, 4)}k", "tmpfs", str(folder)]
    if subprocess.run(small, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here (that takes root)")
    try:
        outcome.said = toy.error_of("flows.measure")
        assert re.search(r"cannot write data/measurements/\S+: No space left on device", outcome.said)
        outcome.hit = True
        assert not list(folder.glob(".*.tmp"))
        before = timings(toy)
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        toy.run("flows.measure")
        outcome.lost = len(before - timings(toy))
        outcome.completed = measured(toy) == SAMPLES + 1  # and the control group
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert outcome.lost == 0 and outcome.completed


@pytest.mark.long
def test_a_ray_node_killed_while_measuring_costs_what_it_had_in_hand(toy, cluster, rng, outcome):
    shutil.rmtree(toy.folder / "data/measurements", ignore_errors=True)
    toy.set_params("measure", compute_samples=SAMPLES)
    if len(cluster.list_all_nodes()) < 2:
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    head, other = cluster.list_all_nodes()
    there = rng.randrange(SAMPLES // 3)
    with toy.started("flows.measure") as run:
        until(lambda: measured(toy) > there, every_s=0.02)
        killed, outcome.hit = raylet(other), run.process.poll() is None
        for process in (*(p for p in workers(cluster) if p.info["ppid"] == killed.pid), killed):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed.wait()
        cluster.remove_node(other, allow_graceful=False)
        found = until(lambda: (m := served(head)) and METRICS <= set(m) and m, timeout_s=60)
        for name in ("samples_total", "kernel_share"):
            assert 'device="device 0",kind="compute"' in found[name]
        assert run.process.wait(90) == 0, run.log()[-3000:]
    [(outcome.said, again)] = re.findall(r"(its process died.*; (\d+) samples are measured again one by one)", run.log())
    assert 1 <= int(again) <= 4 + 4  # a chunk, and the window of ops that run in turn
    outcome.lost = SAMPLES + 1 - measured(toy)  # with the control group
    outcome.completed = outcome.lost == 0
    assert outcome.completed
    control, *disturbed = dataset.read_repeats(toy.folder / "data/measurements")
    assert len(control) > 2 and all(g[0].known_to > 0.9 for g in disturbed)  # nothing else was measured several times
    assert len(dataset.read_comm(toy.folder / "data/measurements")) == 6  # by two ranks that share what is left
    toy.set_params("measure", compute_samples=SAMPLES + 30)
    found = f"{SAMPLES + 30} samples wanted, {SAMPLES} there already, 30 missing, 1 devices; about .* at which the dataset grew"
    assert re.search(found, estimated(toy))
