"""The measure flow on a Ray cluster of two raylets: its estimate, its metrics, the loss of a host, and
cancelling."""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from unittest import mock

import psutil
import pytest
from laws import pool, spread
from ray_fixtures import raylet
from scratch import copy_project, timings, until

import flows.measure
from shardcore.core.topology import Device, Topology
from shardcore.io import dataset, files
from shardcore.io.measurements import ComputeSample
from shardcore.measure.sampling.groups import reference_request
from tasks import console, services
from tasks.setting import SettingConfig

pytestmark = pytest.mark.long
SAMPLES = 40
BATCH = 2048
TOY = {
    "compute_samples": SAMPLES,
    "comm_samples": 6,
    "chunk": 4,
    "kernels": {"interleave": 4, "min_repeats": 12, "tolerance": 0.9, "max_repeats": 12},
    "exchanges": {"repeats": 3},
}
BOARD = (Path(__file__).parents[2] / "monitoring/grafana.json").read_text()


def with_pool(project):
    project.set_params("setting", batch=BATCH)
    project.set_params("measure", **TOY)
    files.write_pool(project.folder / "data/pool.json", pool())
    return project


@pytest.fixture(scope="module")
def toy(new_project, cluster, ray_env):
    """A project with a pool, whose flows run on the cluster."""
    project = with_pool(new_project())
    project.env.update(ray_env, RAY_ADDRESS=cluster.address)
    return project


@pytest.fixture
def without_prefect(tmp_path):
    """A project with a pool, and no server."""
    return with_pool(copy_project(tmp_path, "", tmp_path))


def measured(project):
    return len(dataset.read_timed_ids(project.folder / "data/measurements", "compute"))


def workers(cluster):
    """The cluster's living processes that measure; one that works is called after its call."""
    raylets = {raylet(node).pid for node in cluster.list_all_nodes()}
    return [
        p
        for p in psutil.process_iter(["cmdline", "ppid"])
        if p.info["ppid"] in raylets
        and "".join(p.info["cmdline"] or []).startswith(("ray::DeviceWorker", "ray::measure["))
    ]


def served(node):
    """The labels of our metrics at a node's Prometheus endpoint, by name."""
    text = services.http_request(
        f"http://{node.node_ip_address}:{node.metrics_export_port}/metrics", timeout_s=30
    ).decode()
    return {
        m[1]: dict(re.findall(r'(\w+)="([^"]*)"', m[2]))
        for line in text.splitlines()
        if (m := re.match(r"(ray_shardcore_measure_\w+)\{(.*)\} \S+", line))
    }


def estimated(project, monkeypatch, capsys):
    """The output of a dry run. This process is already connected to the cluster."""
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(flows.measure, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr(console, "show", lambda kind, text: print(text))
    flows.measure.dry_run()
    return capsys.readouterr().out


def test_a_dry_run_estimates_and_takes_nothing(without_prefect, cluster, monkeypatch, capsys):
    with mock.patch("sys.argv", ["measure", "-h"]), pytest.raises(SystemExit):
        flows.measure.main()
    assert "--dry-run" in capsys.readouterr().out
    output = estimated(without_prefect, monkeypatch, capsys)
    assert f"groups: {SAMPLES} of {SAMPLES} are missing, 2 devices, about " in output
    assert "at the usual rate of two CPU cores" in output
    assert not (without_prefect.folder / "data/measurements").exists() and not workers(cluster)


def test_a_run_shows_its_metrics_and_frees_the_devices_when_it_is_cancelled(toy, cluster):
    """Every metric of ours that the dashboard asks for, with the labels that it groups by."""
    asked = {name: set() for name in re.findall(r"ray_shardcore_measure_\w+", BOARD)}
    for panel in json.loads(BOARD)["panels"]:
        for expression in (target["expr"] for target in panel.get("targets", [])):
            for name in set(re.findall(r"ray_shardcore_measure_\w+", expression)):
                asked[name] |= {
                    label.strip()
                    for by in re.findall(r" by \(([^)]+)\)", expression)
                    for label in by.split(",")
                }
    setting = SettingConfig(batch=BATCH).setting()
    reference = reference_request([t for t in pool() if t.pooling], setting)
    known = ComputeSample(
        dataset.compute_id(setting, reference), setting, reference, spread(1.0), spread(1.0), 0.0
    )
    folder, head, seen = toy.folder / "data/measurements", cluster.list_all_nodes()[0], {}
    # so that it need not calibrate
    dataset.write_compute_samples(folder, [known] * 3, dataset.write_pool(folder, pool()))
    toy.set_params("measure", compute_samples=3000)  # so that they still work when all metrics are served

    def all_there():
        assert run.process.poll() is None, run.log()
        seen.update(served(head))
        return asked.keys() <= seen.keys()

    with toy.started("flows.measure") as run:
        until(all_there)
        assert len(workers(cluster)) == 2
        run.process.send_signal(signal.SIGTERM)  # as `prefect flow-run cancel` does
        run.process.wait(60)
        until(lambda: not workers(cluster), timeout_s=60)
    assert run.process.returncode != 0
    for name, labels in asked.items():
        assert labels <= seen[name].keys() and all(seen[name][label] for label in labels), name
        assert seen[name]["kind"] == "compute"
        assert seen[name].get("device", "device 0") in ("device 0", "device 1")
    shutil.rmtree(folder)


def test_links_between_devices_of_the_cluster_are_found(toy, problem):
    path, alone = toy.folder / "p.json", toy.folder / "alone.json"
    files.write_problem(path, problem)
    files.write_problem(alone, dataclasses.replace(problem, topology=Topology((Device(1 << 30),))))
    output = toy.run("flows.topology", str(path), "--out", "found.json", "--ranks", "ranks.json").stdout
    assert "Device i of the new problem is that of the i-th rank in this order." in output
    assert files.read_problem(toy.folder / "found.json").topology.link("within_host").gbps > 0
    ranks = json.loads((toy.folder / "ranks.json").read_text())
    assert sorted(ranks["order"]) == [0, 1, 2, 3] and ranks["nodes"] == ["127.0.0.1"] * 4
    assert "has one device; links need 2" in toy.error_of("flows.topology", str(alone), "--out", "x.json")


def test_a_disk_full_while_a_part_is_written_loses_nothing_that_was(toy, rng, outcome):
    folder = toy.folder / "data/measurements"
    toy.set_params("measure", compute_samples=SAMPLES)
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
        outcome.completed = measured(toy) == SAMPLES + 1  # and the reference op
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert outcome.lost == 0 and outcome.completed


def test_a_ray_node_killed_while_measuring_costs_what_it_had_in_hand(
    toy, cluster, second_node, rng, outcome, monkeypatch, capsys
):
    shutil.rmtree(toy.folder / "data/measurements", ignore_errors=True)
    toy.set_params("measure", compute_samples=SAMPLES)
    there = rng.randrange(SAMPLES // 3)
    with toy.started("flows.measure") as run:
        until(lambda: measured(toy) > there, every_s=0.02)
        killed, outcome.hit = raylet(second_node), run.process.poll() is None
        for process in (*(p for p in workers(cluster) if p.info["ppid"] == killed.pid), killed):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed.wait()
        cluster.remove_node(second_node, allow_graceful=False)
        assert run.process.wait(240) == 0, run.log()[-3000:]
    [(outcome.said, again)] = set(
        re.findall(
            r"(its process died.*; "
            r"(\d+) samples are measured again one by one)",
            run.log(),
        )
    )
    assert 1 <= int(again) <= 4 + 4  # a chunk, and the window of ops that run in turn
    outcome.lost = SAMPLES + 1 - measured(toy)  # with the reference op
    outcome.completed = outcome.lost == 0
    assert outcome.completed
    reference, *disturbed = dataset.repeated_samples(
        dataset.read_compute_timings(toy.folder / "data/measurements")
    )
    # nothing else was measured several times
    assert len(reference) > 2 and all(g[0].relative_ci > 0.9 for g in disturbed)
    # by two ranks that share what is left
    assert len(dataset.read_collective_samples(toy.folder / "data/measurements")) == 6
    toy.set_params("measure", compute_samples=SAMPLES + 30)
    found = f"groups: 30 of {SAMPLES + 30} are missing, 1 devices, about .* at which the dataset grew"
    # Ray forgets a lost node after a while
    until(lambda: re.search(found, estimated(toy, monkeypatch, capsys)), every_s=1.0)
