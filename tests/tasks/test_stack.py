"""One stack, started, used, killed and brought back as its users do: `python -m tasks.stack`, and `. .stack/env.sh`."""

import json
import logging.config
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from shardcore import files
from shardcore.types import Reuse, ShardCoreError, Table
from tasks.stack import StackConfig, logging_config, ray_folder

ROOT = Path(__file__).parents[2]
PORTS = ("prefect_port", "mlflow_port", "ray_port", "ray_client_port", "dashboard_port", "metrics_port")
SERVICES = ("prefect", "mlflow", "ray", "worker", "watch")
BOARD = json.loads((ROOT / "monitoring/grafana.json").read_text())


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def session_of(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None  # it ended meanwhile


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Project:
    folder: Path
    ports: dict[str, int]

    def run(self, *command, client=False, timeout=180):
        """`python -m …` in the project's folder, with the environment of env.sh where it is a client."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
        line = [sys.executable, "-m", *command]
        if client:
            line = ["sh", "-c", '. .stack/env.sh; exec "$@"', "sh", *line]
        env = {**clean, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        return subprocess.run(line, cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=timeout)

    def ids(self):
        return {name: int((self.folder / f".stack/{name}.pid").read_text()) for name in SERVICES}

    def states(self):
        """The state of each service, and what status says."""
        said = self.run("tasks.stack", "status")
        return dict(re.findall(r"^(\w+) +(healthy|silent|died|down) ", said.stdout, re.M)), said

    def token(self):
        return (self.folder / ".stack/token").read_text()

    def get(self, port, path, data=None, **headers):
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[port]}{path}", data, {**headers})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    def processes(self):
        """All of the stack's: each service leads a session."""
        leaders = set(self.ids().values())
        return [p for p in psutil.process_iter() if session_of(p) in leaders]


def make_project(folder, ports):
    shutil.copy(ROOT / "prefect.yaml", folder)
    measure = {"compute_samples": 6, "comm_samples": 1, "chunk": 3, "max_shards": 4, "arena_bytes": 1 << 27, "min_repeats": 3,
               "max_repeats": 3, "comm_repeats": 3}
    (folder / "params.yaml").write_text(yaml.safe_dump({"setting": {"batch": 64}, "measure": measure,
                                                        "stack": {**ports, "object_store_mib": 80}}))
    reuse = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
    files.write_pool(folder / "data/pool.json", [Table(f"t{i}", 1000 * (i + 1), 16, 2.0, reuse) for i in range(8)])
    (folder / "problems").mkdir()
    return Project(folder, ports)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = make_project(tmp_path_factory.mktemp("stack"), dict(zip(PORTS, free_ports(len(PORTS)), strict=True)))
    try:
        up = made.run("tasks.stack", "up")
        assert up.returncode == 0, up.stdout
        yield made
    finally:
        made.run("tasks.stack", "down")
        shutil.rmtree(ray_folder(made.folder / ".stack"))  # it may be elsewhere


@pytest.fixture(scope="module")
def measured(project):
    """The toy measure, run as a client of the stack; what it printed."""
    done = project.run("flows.measure", client=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_up_twice_is_one_stack_and_status_says_where_things_are(project):
    states, said = project.states()
    assert states == dict.fromkeys(SERVICES, "healthy") and said.returncode == 0, said.stdout
    for name in SERVICES:
        assert f".stack/logs/{name}.log" in said.stdout and (project.folder / f".stack/logs/{name}.log").exists()
    before = project.ids()
    assert project.run("tasks.stack", "up").returncode == 0
    assert project.ids() == before


@pytest.mark.long
def test_it_listens_at_loopback_alone_and_its_secrets_are_its_owners(project):
    addresses = {c.laddr.ip.removeprefix("::ffff:") for p in project.processes() for c in p.net_connections("tcp")
                 if c.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}
    for name in ("token", "env.sh", "mlflow-auth.ini"):
        assert (project.folder / ".stack" / name).stat().st_mode & 0o077 == 0
    assert project.token() not in "".join("".join(p.cmdline()) for p in project.processes())


@pytest.mark.parametrize("port, path, data", [
    ("prefect_port", "/api/deployments/filter", b"{}"), ("mlflow_port", "/api/2.0/mlflow/experiments/search?max_results=1", None),
    ("dashboard_port", "/api/v0/actors", None)])
@pytest.mark.long
def test_who_has_no_token_is_refused(project, port, path, data):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        project.get(port, path, data, **{"Content-Type": "application/json"})


@pytest.mark.long
def test_what_a_flow_logs_is_kept_as_json_lines(project, measured):
    lines = [json.loads(line) for line in (project.folder / ".stack/logs/flows.jsonl").read_text().splitlines()]
    [run] = set(re.findall(r"Flow run '([\w-]+)' - Beginning", measured))
    assert {line["flow_run_name"] for line in lines} == {run}
    assert any(re.fullmatch(r"measured \d+ groups and \d+ exchanges", line["message"]) for line in lines)
    assert all(line["timestamp"] and line["levelname"] and line["flow_run_id"] for line in lines)


@pytest.mark.long
def test_actors_are_named_after_what_they_do_where_and_for_which_run(project, measured):
    [run] = set(re.findall(r"Flow run '([\w-]+)' - Beginning", measured))

    def listed(what):
        answer = project.get("dashboard_port", f"/api/v0/{what}?limit=100", Authorization=f"Bearer {project.token()}")
        return json.loads(answer)["data"]["result"]["result"]

    actors = {a["name"]: a["ray_namespace"] for a in listed("actors")}
    assert any(name.startswith("measure[compute] device ") for name in actors) and set(actors.values()) == {run}
    assert any(re.fullmatch(r"measure\[compute\] device \d+, \d+ waiting", call["name"]) for call in listed("tasks"))


def queries():
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$run", ".*").replace("$__rate_interval", "1m")
            assert "$" not in expression, f"{panel['title']}: a variable that this test does not fill in"
            yield panel["title"], expression


@pytest.mark.long
def test_every_query_of_the_dashboard_has_data(project, measured):
    """The names and labels of each against the live endpoint; and the whole query in Prometheus, where that is installed."""
    found = [(s.name, s.labels) for family in text_string_to_metric_families(project.get("metrics_port", "/metrics"))
             for s in family.samples]
    for title, expression in queries():
        by = re.findall(r" by \(([^)]+)\)", expression)
        selectors = re.findall(r"(ray_\w+)(?:\{([^}]*)\})?", expression)
        assert by and selectors, f"{title}: {expression}"
        for name, matchers in selectors:
            wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', matchers)
            labels = {label.strip() for group in by for label in group.split(",")}
            wanted += [(label, "=~", ".+") for label in labels]
            assert any(n == name and all(re.fullmatch(value if op == "=~" else re.escape(value), has.get(label, ""))
                                         for label, op, value in wanted) for n, has in found), f"{title}: {expression}"


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus")
def test_prometheus_answers_every_query_of_the_dashboard(project, measured, tmp_path):
    config = yaml.safe_load((ROOT / "monitoring/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{project.ports['metrics_port']}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    server = subprocess.Popen(["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path}",
                               f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def missing():
        for title, expression in queries():
            try:
                query = urllib.parse.urlencode({"query": expression})
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=5) as answer:
                    if not json.load(answer)["data"]["result"]:
                        yield f"{title}: {expression}"
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{title}: {expression}: {error.read().decode()}") from None
            except OSError as error:
                yield f"{title}: {error}"

    try:
        deadline = time.monotonic() + 30
        while left := list(missing()):
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_what_is_killed_is_said_and_up_brings_it_back(project, measured):
    before, token = project.ids(), project.token()
    killed = ("ray", "watch")
    for name in killed:
        os.kill(before[name], 9)
    deadline = time.monotonic() + 30
    while (found := project.states())[0] != {n: "died" if n in killed else "healthy" for n in SERVICES}:
        assert time.monotonic() < deadline, found[1].stdout
    assert found[1].returncode == 1 and "ray: died; the last lines of .stack/logs/ray.log:\n  " in found[1].stdout
    up = project.run("tasks.stack", "up")
    assert up.returncode == 0, up.stdout
    after = project.ids()
    assert {n for n in SERVICES if after[n] != before[n]} == set(killed) and project.token() == token


@pytest.mark.long
def test_down_ends_everything(project):
    running = project.processes()
    assert len(running) > len(SERVICES)
    assert project.run("tasks.stack", "down").returncode == 0
    assert not [p for p in running if runs(p)]
    states, said = project.states()
    assert states == dict.fromkeys(SERVICES, "down") and said.returncode == 1


def test_a_port_that_is_taken_is_named_with_its_holder_and_nothing_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True)) | {"mlflow_port": port}
        up = make_project(tmp_path, ports).run("tasks.stack", "up")
    assert up.returncode == 1 and re.fullmatch(
        rf"error: port {port} \(stack.mlflow_port in params.yaml\) cannot be used at 127.0.0.1: Address already in use, held by "
        rf"process {os.getpid()} \(.+\); end that, or choose another port\n", up.stdout), up.stdout
    assert not list(tmp_path.glob(".stack/*.pid"))


@pytest.mark.parametrize("wrong, said", [({"mlflow_port": 4200}, "prefect_port is 4200; each port"),
                                         ({"ray_port": 70000}, "ray_port is 70000"), ({"object_store_mib": 1}, "needs 80")])
def test_a_config_that_cannot_work_is_refused(wrong, said):
    with pytest.raises(ShardCoreError, match=said):
        StackConfig(**wrong)


def test_a_line_of_the_flows_log_has_what_the_message_has_in_extra(tmp_path):
    config = yaml.safe_load(logging_config(tmp_path / "flows.jsonl"))
    assert all("lines" in config["loggers"][name]["handlers"] for name in ("prefect.flow_runs", "prefect.task_runs"))
    logging.config.dictConfig({
        "version": 1, "disable_existing_loggers": False, "formatters": {"lines": config["formatters"]["lines"]},
        "handlers": {"lines": config["handlers"]["lines"]},
        "loggers": {"test_stack": {"handlers": ["lines"], "propagate": False}}})
    logging.getLogger("test_stack").warning("%s: no plan", "pool-7", extra={"problem": "pool-7"})
    [line] = (tmp_path / "flows.jsonl").read_text().splitlines()
    assert {"message": "pool-7: no plan", "problem": "pool-7", "levelname": "WARNING"}.items() <= json.loads(line).items()


def test_ray_is_kept_in_the_stack_unless_its_sockets_paths_would_be_too_long(tmp_path):
    assert ray_folder(Path("/srv/shardcore/.stack")) == Path("/srv/shardcore/.stack/ray")
    far = Path("/home/somebody/projects/recommendation/models/sharding/.stack")
    assert far not in ray_folder(far).parents and ray_folder(far) == ray_folder(far) != ray_folder(far / "other")
