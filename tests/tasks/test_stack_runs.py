"""One stack, started, used, killed and brought back as its users do: `python -m tasks.stack`, and `.
.stack/env.sh`."""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from shardcore.core.access_statistics import Reuse
from shardcore.core.types import Table
from shardcore.io import files
from tasks import services
from tasks.stack_services import ray_folder

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PORTS = ("prefect_port", "mlflow_port", "ray_port", "ray_client_port", "dashboard_port", "metrics_port")
SERVICES = ("prefect", "mlflow", "ray", "worker", "watch")
BOARD = json.loads((ROOT / "monitoring/grafana.json").read_text())


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
    """held: the sockets that keep its ports."""

    folder: Path
    held: dict[str, socket.socket]

    @property
    def ports(self):
        return {name: kept.getsockname()[1] for name, kept in self.held.items()}

    def run(self, *command, timeout=240):
        """`python -m …` in the project's folder."""
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=self._env(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )

    @contextlib.contextmanager
    def client(self, *command):
        """The same with the environment of env.sh, while it runs; it ends with the context. What it said is
        in `said`."""
        line = ["sh", "-c", '. .stack/env.sh; exec "$@"', "sh", sys.executable, "-m", *command]
        with open(self.folder / "said", "w") as output:
            process = subprocess.Popen(
                line, cwd=self.folder, env=self._env(), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _env(self):
        """The environment of a user behind a proxy, which the stack must not ask."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
        proxies = {
            name: "http://127.0.0.1:9"
            for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY")
        }
        return {**clean, **proxies, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def ids(self):
        return {name: int((self.folder / f".stack/{name}.pid").read_text()) for name in SERVICES}

    def states(self):
        """The state of each service, and what status says."""
        output = self.run("tasks.stack", "status")
        return dict(re.findall(r"^(\w+) +(healthy|silent|died|down) ", output.stdout, re.M)), output

    def token(self):
        return (self.folder / ".stack/token").read_text()

    def get(self, port, path, data=None, **headers):
        return services.http_request(
            f"http://127.0.0.1:{self.ports[port]}{path}", headers, data, timeout_s=30
        ).decode()

    def lines(self):
        """Lines that flows have logged."""
        return [
            json.loads(line) for line in (self.folder / ".stack/logs/flows.jsonl").read_text().splitlines()
        ]

    def processes(self):
        """All of the stack's: each service leads a session."""
        leaders = set(self.ids().values())
        return [p for p in psutil.process_iter() if session_of(p) in leaders]


def make_project(folder):
    held = {name: services.reserve_port() for name in PORTS}
    shutil.copy(ROOT / "prefect.yaml", folder)
    measure = {
        "compute_samples": 6,
        "comm_samples": 1,
        "chunk": 3,
        "step_samples": 1,
        "kernels": {"arena_bytes": 1 << 27, "min_repeats": 3, "max_repeats": 3},
        "groups": {"max_shards": 4},
        "exchanges": {"repeats": 3},
        "steps": {"repeats": 3},
    }
    made = Project(folder, held)
    (folder / "params.yaml").write_text(
        yaml.safe_dump(
            {"setting": {"batch": 64}, "measure": measure, "stack": {**made.ports, "object_store_mib": 80}}
        )
    )
    reuse = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
    files.write_pool(
        folder / "data/pool.json", [Table(f"t{i}", 1000 * (i + 1), 16, 2.0, reuse) for i in range(8)]
    )
    (folder / "problems").mkdir()
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = make_project(tmp_path_factory.mktemp("stack"))
    try:
        up = made.run("tasks.stack", "up")
        assert up.returncode == 0, up.stdout
        yield made
    finally:
        made.run("tasks.stack", "down")
        shutil.rmtree(ray_folder(made.folder / ".stack").parent)  # it may be elsewhere
        for kept in made.held.values():
            kept.close()


def queries():
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$run", ".*").replace("$__rate_interval", "1m")
            assert "$" not in expression, f"{panel['title']}: a variable that this test does not fill in"
            yield f"{panel['title']}: {expression}", expression


def answered(expression, samples):
    """Tell if an endpoint's samples have the names and labels of a query."""
    by = re.findall(r" by \(([^)]+)\)", expression)
    selectors = re.findall(r"(ray_\w+)(?:\{([^}]*)\})?", expression)
    assert by and selectors, expression
    for name, matchers in selectors:
        wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', matchers)
        labels = {label.strip() for group in by for label in group.split(",")}
        wanted += [(label, "=~", ".+") for label in labels]
        if not any(
            n == name
            and all(
                re.fullmatch(value if op == "=~" else re.escape(value), has.get(label, ""))
                for label, op, value in wanted
            )
            for n, has in samples
        ):
            return False
    return True


@contextlib.contextmanager
def prometheus(metrics_port, folder):
    """A function that tells if a query has an answer, by a server with monitoring/prometheus.yml."""
    config = yaml.safe_load((ROOT / "monitoring/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{metrics_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with services.reserve_port() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        server = subprocess.Popen(
            (
                f"prometheus --config.file={folder / 'prometheus.yml'} --storage.tsdb.path={folder} "
                f"--web.listen-address={address}"
            ).split(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def has_answer(expression):
            assert server.poll() is None, "prometheus ended"
            try:
                query = urllib.parse.urlencode({"query": expression})
                return bool(
                    json.loads(services.http_request(f"http://{address}/api/v1/query?{query}"))["data"][
                        "result"
                    ]
                )
            except urllib.error.HTTPError as error:
                # which it says while it starts
                assert error.code == 503, f"{expression}: {error.read().decode()}"
                return False
            except OSError:
                return False  # it starts

        try:
            yield has_answer
        finally:
            server.kill()
            server.wait()


@dataclass(frozen=True)
class Measured:
    """The name of the run; the dashboard's queries that the endpoint never answered, and Prometheus (None:
    there is none)."""

    run: str
    unanswered: list[str]
    unanswered_by_prometheus: list[str] | None


@pytest.fixture(scope="module")
def measured(project, tmp_path_factory):
    """The toy measure, run as a client of the stack. Ray serves a gauge for 20 s after it was last set, so
    metrics are looked at while it runs, as Prometheus would, and for a while after."""
    left, samples = dict(queries()), set()
    with contextlib.ExitStack() as stack:
        asked, has_answer = {}, None
        if shutil.which("prometheus"):
            has_answer = stack.enter_context(
                prometheus(project.ports["metrics_port"], tmp_path_factory.mktemp("prometheus"))
            )
            asked = dict(queries())
        run, deadline = stack.enter_context(project.client("flows.measure")), None
        while (left or asked or run.poll() is None) and (deadline is None or time.monotonic() < deadline):
            for family in text_string_to_metric_families(project.get("metrics_port", "/metrics")):
                samples |= {(s.name, frozenset(s.labels.items())) for s in family.samples}
            left = {
                k: q for k, q in left.items() if not answered(q, [(n, dict(labels)) for n, labels in samples])
            }
            asked = {k: q for k, q in asked.items() if not has_answer(q)}
            if run.poll() is not None and deadline is None:
                deadline = time.monotonic() + 60
            time.sleep(0.5)
        assert run.returncode == 0, (project.folder / "said").read_text()
    [name] = {line["flow_run_name"] for line in project.lines() if line["flow_name"] == "measure"}
    return Measured(name, list(left), list(asked) if has_answer else None)


def test_up_twice_is_one_stack_and_status_says_where_things_are(project):
    states, output = project.states()
    assert states == dict.fromkeys(SERVICES, "healthy") and output.returncode == 0, output.stdout
    for name in SERVICES:
        assert (
            f".stack/logs/{name}.log" in output.stdout
            and (project.folder / f".stack/logs/{name}.log").exists()
        )
    before = project.ids()
    assert project.run("tasks.stack", "up").returncode == 0
    assert project.ids() == before


def test_it_listens_at_loopback_alone_and_its_secrets_are_its_owners(project):
    addresses = {
        c.laddr.ip.removeprefix("::ffff:")
        for p in project.processes()
        for c in p.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
    for name in ("token", "env.sh", "mlflow-auth.ini"):
        assert (project.folder / ".stack" / name).stat().st_mode & 0o077 == 0
    assert project.token() not in "".join("".join(p.cmdline()) for p in project.processes())


@pytest.mark.parametrize(
    "port, path, data",
    [
        ("prefect_port", "/api/deployments/filter", b"{}"),
        ("mlflow_port", "/api/2.0/mlflow/experiments/search?max_results=1", None),
        ("dashboard_port", "/api/v0/actors", None),
    ],
)
def test_who_has_no_token_is_refused(project, port, path, data):
    wrong = base64.b64encode(b"shardcore:wrong").decode()
    for who in ({}, {"Authorization": "Bearer wrong" if port == "dashboard_port" else f"Basic {wrong}"}):
        with pytest.raises(urllib.error.HTTPError, match="40[13]"):
            project.get(port, path, data, **{"Content-Type": "application/json", **who})


def test_what_a_flow_logs_is_kept_as_json_lines(project, measured):
    lines = [line for line in project.lines() if line["flow_run_name"] == measured.run]
    assert any(
        re.fullmatch(r"measured 6 groups, 1 exchanges and \d+ steps of plans", line["message"])
        for line in lines
    )
    assert any(re.match(r"6 compute samples wanted, 6 of them to measure", line["message"]) for line in lines)
    assert all(line["timestamp"] and line["levelname"] and line["flow_run_id"] for line in lines)
    assert {line["task_run_name"] for line in lines if "compute samples wanted" in line["message"]} == {
        "measure"
    }


def test_actors_are_named_after_what_they_do_where_and_for_which_run(project, measured):
    def listed(what):
        answer = project.get(
            "dashboard_port", f"/api/v0/{what}?limit=1000", Authorization=f"Bearer {project.token()}"
        )
        return json.loads(answer)["data"]["result"]["result"]

    actors = {a["name"]: a["ray_namespace"] for a in listed("actors")}
    assert any(name.startswith("measure[compute] device ") for name in actors) and set(actors.values()) == {
        measured.run
    }
    # Ray tells of calls a moment later
    until(
        lambda: any(
            re.fullmatch(r"measure\[compute\] device \d+, \d+ waiting", call["name"])
            for call in listed("tasks")
        )
    )


def test_every_query_of_the_dashboard_has_data(measured):
    """The names and labels of each against the live endpoint."""
    assert not measured.unanswered


@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus")
def test_prometheus_answers_every_query_of_the_dashboard(measured):
    assert not measured.unanswered_by_prometheus


def test_what_is_killed_is_said_and_up_brings_it_back(project, measured):
    before, token = project.ids(), project.token()
    killed = ("ray", "watch")
    for name in killed:
        os.kill(before[name], 9)
    wanted = {n: "died" if n in killed else "healthy" for n in SERVICES}
    _states, output = until(lambda: (found := project.states())[0] == wanted and found)
    assert output.returncode == 1 and "ray: died; the last lines of .stack/logs/ray.log:\n  " in output.stdout
    up = project.run("tasks.stack", "up")
    assert up.returncode == 0, up.stdout
    after = project.ids()
    assert {n for n in SERVICES if after[n] != before[n]} == set(killed) and project.token() == token


def flow_runs(project, *ids):
    """The state of runs, by id."""
    user = f"shardcore:{project.token()}".encode()
    answer = project.get(
        "prefect_port",
        "/api/flow_runs/filter",
        json.dumps({"flow_runs": {"id": {"any_": list(ids)}}}).encode(),
        Authorization=f"Basic {base64.b64encode(user).decode()}",
        **{"Content-Type": "application/json"},
    )
    return {run["id"]: run["state_type"] for run in json.loads(answer)}


def ask(project, deployment):
    """The id of a new run."""
    with project.client("prefect", "deployment", "run", deployment) as asked:
        assert asked.wait(120) == 0
    return re.search(r"UUID: (\S+)", (project.folder / "said").read_text())[1]


@pytest.mark.parametrize("how", ["worker and engine", "down"])
def test_a_run_caught_while_it_is_submitted_does_not_hold_up_the_next(project, how):
    first = ask(project, "promote/local")
    until(lambda: flow_runs(project, first)[first] in {"PENDING", "RUNNING"})
    if how == "down":
        assert project.run("tasks.stack", "down").returncode == 0
    else:
        worker = project.ids()["worker"]
        engines = [p for p in psutil.process_iter() if first in str(environment(p))]
        os.kill(worker, 9)
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
    up = project.run("tasks.stack", "up")
    assert up.returncode == 0, up.stdout
    assert flow_runs(project, first)[first] == "CRASHED", up.stdout
    second = ask(project, "promote/local")
    until(lambda: flow_runs(project, second)[second] == "FAILED")
    assert "stuck" not in project.run("tasks.stack", "status").stdout


def environment(process):
    with contextlib.suppress(psutil.Error):
        return process.environ().get("PREFECT__FLOW_RUN_ID")


def test_down_ends_everything(project):
    running = project.processes()
    assert len(running) > len(SERVICES)
    assert project.run("tasks.stack", "down").returncode == 0
    assert not [p for p in running if runs(p)]
    states, output = project.states()
    assert states == dict.fromkeys(SERVICES, "down") and output.returncode == 1


def test_run_keeps_the_stack_until_it_is_ended(project):
    """A container and systemd run the stack in this way."""
    with open(project.folder / "run.log", "w") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "tasks.stack", "run"],
            cwd=project.folder,
            env=project._env(),
            stdout=log,
            stderr=log,
        )
    log = project.folder / "run.log"
    healthy = dict.fromkeys(SERVICES, "healthy")
    # What dies while services start is an error, which ends it.
    until(lambda: running.poll() is None and "watch: healthy" in log.read_text(), 400)
    watch = project.ids()["watch"]
    os.kill(watch, 9)
    until(lambda: "died, and are started again: watch" in log.read_text())
    until(lambda: project.states()[0] == healthy)
    running.terminate()
    assert running.wait(120) == 0, log.read_text()
    assert project.states()[0] == dict.fromkeys(SERVICES, "down")
