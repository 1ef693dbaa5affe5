"""Ray in the environment of the stack, with which ray_fixtures.py starts a cluster, and connections to it."""

import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import grpc
import psutil
import pytest
import ray

from shardcore.core.errors import ShardCoreError
from tasks import ray_cluster, services

NOWHERE = "127.0.0.1:9"


def sessions(cluster):
    """All processes of a cluster's nodes, and what they started."""
    pids = {
        info.process.pid
        for node in cluster.list_all_nodes()
        for infos in node.all_processes.values()
        for info in infos
    }
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return {p.pid: p for parent in found for p in (parent, *parent.children(recursive=True))}.values()


@pytest.fixture
def agent(cluster):
    """The address of the head's agent, which answers once it is up: some seconds after its node."""
    url = f"http://127.0.0.1:{cluster.list_all_nodes()[0].dashboard_agent_listen_port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            assert services.http_request(f"{url}/api/healthz", timeout_s=30)
            return url
        except OSError:
            assert time.monotonic() < deadline, "Ray's agent does not come up"
            time.sleep(0.1)


@pytest.mark.long
def test_it_listens_at_loopback_only(cluster, agent):
    listening = {}
    for process in sessions(cluster):
        try:
            addresses = {
                c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
            }
        except psutil.Error:  # it ended meanwhile
            continue
        listening[process.pid] = {a.removeprefix("::ffff:") for a in addresses}
    assert set.union(*listening.values()) == {"127.0.0.1"}
    assert sum(bool(found) for found in listening.values()) >= 4  # the head, two raylets, an agent at least


@pytest.mark.long
@pytest.mark.parametrize("who", ["nobody", "wrong", "its owner"])
def test_who_has_no_token_is_refused(cluster, agent, written_stack, who):
    _, _, token = written_stack
    given = {
        "nobody": {},
        "wrong": {"authorization": "Bearer wrong"},
        "its owner": {"authorization": f"Bearer {token}"},
    }[who]
    with grpc.insecure_channel(cluster.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        try:
            answer = call(b"", metadata=tuple(given.items()), timeout=60)
        except grpc.RpcError as error:
            answer = error.code()
    try:
        services.http_request(f"{agent}/", given, timeout_s=60)
    except urllib.error.HTTPError as error:
        page = error.code
    if who == "its owner":
        assert token.encode() not in answer and page == 404  # nothing is there, but it may look
    else:
        assert answer == grpc.StatusCode.UNAUTHENTICATED and page in (401, 403)


@pytest.mark.parametrize(
    "address, message",
    [
        (NOWHERE, r"^Ray \(RAY_ADDRESS\) does not answer at 127.0.0.1:9: .*; start it, or unset the address"),
        ("nonsense", r"^Ray \(RAY_ADDRESS\) does not answer at nonsense: it needs a host and a port"),
        (f"ray://{NOWHERE}", r"^Ray \(RAY_ADDRESS\) does not answer at ray://127.0.0.1:9: "),
    ],
)
def test_an_address_that_does_not_answer_is_named(address, message):
    with (
        mock.patch.dict(os.environ, RAY_ADDRESS=address),
        pytest.raises(ShardCoreError, match=message),
        ray_cluster.ray_cluster(),
    ):
        pass


def test_it_connects_to_the_address_or_starts_a_small_ray_and_ends_the_connection(monkeypatch):
    asked = []
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("ended"))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.8:6379"))
    monkeypatch.setattr(
        services, "require_reachable", lambda address, what: "RAY_ADDRESS" in what and asked.append(address)
    )
    monkeypatch.setattr(ray_cluster, "secure_local_ray", lambda: asked.append("closed"))
    for address in ("10.0.0.7:6379", "auto", "local", None):
        env = {} if address is None else {"RAY_ADDRESS": address}
        with mock.patch.dict(os.environ, env):
            if address is None:
                os.environ.pop("RAY_ADDRESS", None)
            with pytest.raises(ValueError), ray_cluster.ray_cluster():
                raise ValueError("of the work")
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": None}
    local = {
        "address": "local",
        "object_store_memory": 256 << 20,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        **quiet,
    }
    assert asked == [
        "10.0.0.7:6379",
        {"address": "10.0.0.7:6379", **quiet},
        "ended",
        {"address": "auto", **quiet},
        "ended",
        "closed",
        local,
        "ended",
        "closed",
        local,
        "ended",
    ]


LOCAL = """
import json, os, signal
import flows.measure  # which imports Ray before it knows how it is to listen
import psutil, ray
from tasks.ray_cluster import ray_cluster

@ray.remote
def environment():
    return dict(os.environ)

with ray_cluster():
    worker = ray.get(environment.remote())
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {c.laddr.ip for p in ours for c in p.net_connections("inet")
                 if c.status == psutil.CONN_LISTEN}
    print(json.dumps({"environment": worker, "pids": [p.pid for p in ours[1:]],
                      "listening": sorted(listening), "address": ray.get_runtime_context().gcs_address,
                      "folder": os.environ["SHARDCORE_OWNED"]}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_local_ray_is_closed_to_others_and_ends_with_the_flow_that_is_killed():
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    flow = subprocess.Popen(
        [sys.executable, "-c", LOCAL], cwd=root, env=env, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(flow.stdout.readline())
    assert {address.removeprefix("::ffff:") for address in found["listening"]} == {"127.0.0.1"}
    assert found["environment"]["RAY_AUTH_MODE"] == "token" and len(found["pids"]) > 3
    assert Path(found["environment"]["RAY_AUTH_TOKEN_PATH"]).is_relative_to(found["folder"])
    assert flow.wait(60) != 0
    deadline = time.monotonic() + 60  # 15 s are promised; and a machine may be four times as slow
    while left := [p for p in found["pids"] if psutil.pid_exists(p)] + [
        p for p in [found["folder"]] if os.path.exists(p)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


WAITS = """
import os, signal, sys, threading, time
import psutil, ray
from shardcore.core.errors import ShardCoreError
from tasks.ray_cluster import ray_cluster

@ray.remote
class Waits:
    def works(self):
        time.sleep(600)

def kill():
    while not (found := [p for p in psutil.Process().children() if p.name() == sys.argv[1]]):
        time.sleep(0.1)
    time.sleep(float(sys.argv[2]))
    print("killed", flush=True)
    found[0].kill()

if float(sys.argv[2]):
    threading.Thread(target=kill).start()
try:
    with ray_cluster():
        call = Waits.remote().works.remote()
        ray.wait([call], timeout=1)
        if not float(sys.argv[2]):
            kill()
        ray.get(call)
except ShardCoreError as error:
    print(f"error: {error}", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "needed, after_s",
    [("gcs_server", 1.0), ("raylet", 0.0)],
    ids=["head, while it starts", "raylet, while it works"],
)
def test_work_ends_soon_after_the_head_or_raylet_of_a_local_ray(needed, after_s):
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    flow = subprocess.Popen(
        [sys.executable, "-c", WAITS, needed, str(after_s)],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = iter(flow.stdout.readline, "")
    assert any(line == "killed\n" for line in lines)
    flow.wait(60)  # 15 s are promised; and a machine may be four times as slow
    output = [line for line in lines if line.startswith("error: ")]
    ours = (
        rf"error: this run('s Ray has lost its .*{needed}.*| was ended before its end); "
        r".*a rerun goes on from there\n"
    )
    # the latter where Ray's native code ends the process
    assert output and all(re.fullmatch(ours, line) for line in output), output


HEAD = """
import os, psutil, ray, time
from tasks.ray_cluster import ray_cluster

with ray_cluster():
    [head] = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN_PATH"], head.pid, flush=True)
    time.sleep(600)
"""
USES = """
import ray, sys, time
from shardcore.core.errors import ShardCoreError
from tasks.ray_cluster import ray_cluster

@ray.remote
class Waits:
    def works(self):
        time.sleep(600)

try:
    with ray_cluster():
        call = Waits.remote().works.remote()
        ray.wait([call], timeout=1)
        print("works", flush=True)
        if sys.argv[1] == "waits":
            ray.get(call)
        ray.nodes(), time.sleep(600)
except ShardCoreError as error:
    print(f"error: {error}", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["waits", "sleeps"])
def test_work_on_a_cluster_ends_soon_after_its_head_and_names_it(what):
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], cwd=root, env=env, stdout=subprocess.PIPE, text=True
    ) as cluster:
        address, token, head = cluster.stdout.readline().split()
        client = {
            **env,
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        flow = subprocess.Popen(
            [sys.executable, "-c", USES, what],
            cwd=root,
            env=client,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert any(line == "works\n" for line in flow.stdout)
        os.kill(int(head), signal.SIGKILL)
        output, _ = flow.communicate(timeout=55)  # Ray itself takes a minute; some ten seconds are promised
        cluster.kill()
    assert f"error: Ray's head at {address} does not answer any more; what was finished is kept" in output


FAILS = """
import time
from tasks import ray_cluster

with ray_cluster.ray_cluster():
    time.sleep(5 * ray_cluster._LOOK_EVERY_S)  # until its processes are known
    raise ValueError("of the work")
"""


@pytest.mark.long
def test_work_that_fails_is_not_taken_for_a_lost_ray():
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    flow = subprocess.run(
        [sys.executable, "-c", FAILS], cwd=Path(__file__).parents[2], env=env, text=True, capture_output=True
    )
    assert flow.stderr.endswith("ValueError: of the work\n")


def test_the_token_of_a_local_ray_is_its_owner_s_only(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    everybody = os.umask(0)
    try:
        token = ray_cluster._write_token()
    finally:
        os.umask(everybody)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) >= 40
    assert token.is_relative_to(tmp_path)
