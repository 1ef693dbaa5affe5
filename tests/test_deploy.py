"""Files that run ShardCore elsewhere, read without an engine: image, compose, systemd, Ray job, CI, alerts."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tasks.stack_config import StackConfig

ROOT = Path(__file__).parents[1]
DEPLOY, MONITORING = ROOT / "deploy", ROOT / "monitoring"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CODE = "".join(
    p.read_text() for folder in ("tasks", "flows", "shardcore") for p in (ROOT / folder).rglob("*.py")
)
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
JOB = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def instructions(name):
    """Arguments of an instruction of the Dockerfile, each in one line."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def require_usable(command):
    """Require that `python -m MODULE …` names a module of ours, and that a command of the stack is one."""
    assert command[:2] == ["python", "-m"], command
    assert importlib.util.find_spec(command[2]), command
    if command[2] == "tasks.stack":
        done = subprocess.run(
            [sys.executable, "-m", "tasks.stack", "nonsense"], cwd=ROOT, text=True, capture_output=True
        )
        usage = done.stderr.strip().removeprefix("usage: python -m tasks.stack ")
        assert len(command) == 4 and command[3] in usage.split("|"), done.stderr


def test_the_image_installs_extras_that_there_are_and_runs_a_command_that_there_is():
    [(installed, *_)] = [
        re.findall(r"python install\.py (.*)", line) for line in instructions("RUN") if "install.py" in line
    ]
    [default] = [line.removeprefix("EXTRA=") for line in instructions("ARG")]
    extras = installed.replace("${EXTRA}", default).split()
    assert (
        set(extras) <= set(PROJECT["optional-dependencies"])
        and "measure-gpu" in PROJECT["optional-dependencies"]
    )
    [base] = instructions("FROM")
    version = re.match(r"python:(\d+\.\d+)-", base)
    assert version and version[1] in SpecifierSet(PROJECT["requires-python"])
    require_usable(json.loads(instructions("CMD")[0]))
    # The checkout is mounted where it was installed from.
    assert instructions("WORKDIR") == ["/project"] and instructions("COPY") == [". ."]
    assert COMPOSE["services"]["stack"]["volumes"] == ["..:/project"]


def test_what_is_not_in_the_image_is_what_git_ignores_or_generates():
    """Or an installation in the image would lack code."""
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, text=True, check=True, capture_output=True
    ).stdout.split()
    assert not [f for f in tracked for name in ignored if f == name or f.startswith(f"{name}/")]


def test_the_services_of_compose_run_what_there_is():
    stack, prometheus = COMPOSE["services"]["stack"], COMPOSE["services"]["prometheus"]
    require_usable(stack["command"])
    require_usable(stack["healthcheck"]["test"][1:])
    assert (
        DEPLOY / stack["build"]["context"] / stack["build"]["dockerfile"]
    ).resolve() == DEPLOY / "Dockerfile"
    # Addresses and ports are those of params.yaml, and of Prometheus's configuration.
    assert {s["network_mode"] for s in COMPOSE["services"].values()} == {"host"}
    [folder, inside, _mode] = prometheus["volumes"][0].split(":")
    options = dict(option.removeprefix("--").split("=") for option in prometheus["command"])
    config = Path(options["config.file"]).relative_to(inside)
    assert (DEPLOY / folder / config).resolve() == MONITORING / "prometheus.yml"
    volumes = [v.split(":")[0] for s in COMPOSE["services"].values() for v in s["volumes"]]
    assert {v for v in volumes if not v.startswith(".")} == set(COMPOSE["volumes"])


@pytest.mark.skipif(
    subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0
    if shutil.which("docker")
    else True,
    reason="no docker compose",
)
def test_docker_reads_the_compose_file():
    subprocess.run(["docker", "compose", "-f", DEPLOY / "compose.yaml", "config", "--quiet"], check=True)


def test_the_unit_of_systemd_runs_the_stack():
    text = (DEPLOY / "shardcore.service").read_text()
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    python, *rest = shlex.split(unit["ExecStart"])
    assert python == f"{unit['WorkingDirectory']}/.venv/bin/python"
    require_usable(["python", *rest])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    text = (DEPLOY / "shardcore.service").read_text()
    (tmp_path / "shardcore.service").write_text(
        text.replace("/opt/shardcore/.venv/bin/python", sys.executable)
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "shardcore.service"], text=True, capture_output=True
    )
    assert done.returncode == 0 and "shardcore.service" not in done.stderr, done.stderr


def test_the_ray_job_runs_a_flow_that_there_is_at_the_locked_version_of_ray():
    spec = JOB["spec"]
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    [needed] = [r for r in PROJECT["optional-dependencies"]["pipeline"] if r.startswith("ray[")]
    assert needed.endswith(f"=={spec['rayClusterSpec']['rayVersion']}")
    shell, option, line = shlex.split(spec["entrypoint"])
    folder, command = line.split(" && ")
    assert (shell, option) == ("bash", "-c")
    require_usable(command.split())
    assert command.split()[2] == "flows.measure" and folder == f"cd {instructions('WORKDIR')[0]}"


def pods():
    cluster = JOB["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("group", pods(), ids=lambda group: group.get("groupName", "head"))
def test_pods_of_the_ray_job_mount_what_they_have_and_set_what_is_read(group):
    pod = group["template"]["spec"]
    for container in pod["containers"]:
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        for variable in container["env"]:
            assert variable["name"] in CODE
        usual = {f.default for f in StackConfig.__dataclass_fields__.values() if f.name.endswith("_port")}
        assert {p["containerPort"] for p in container["ports"]} <= usual
    assert group["rayStartParams"]["metrics-export-port"] == str(StackConfig.metrics_port)


def test_the_workflow_runs_what_ci_runs_the_lowest_versions_and_a_release():
    commands = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in WORKFLOW["jobs"].items()
    }
    assert ".ci/run" in commands["checks"] and "make minimum" in commands["minimum-versions"]
    for command in (c for each in commands.values() for c in each):
        program, *arguments = command.split()
        if program == "make":
            done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
        elif program.startswith("."):
            assert os.access(ROOT / program, os.X_OK)
        else:
            assert command.startswith("git config --global --add safe.directory")
    given = [
        s["with"]["python-version"]
        for j in WORKFLOW["jobs"].values()
        for s in j["steps"]
        if "setup-python" in s.get("uses", "")
    ]
    [image] = [j["container"]["image"] for j in WORKFLOW["jobs"].values() if "container" in j]
    for version in [*given, re.match(r"python:([\d.]+)-", image)[1]]:
        assert version in SpecifierSet(PROJECT["requires-python"])


# --- alerts -------------------------------------------------------------------------------------------------


ALERTS = [r for g in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for r in g["rules"]]


def test_alerts_ask_for_metrics_that_the_dashboard_shows_and_each_is_tried():
    """test_stack_runs.py has the test that the stack serves the dashboard's metrics."""
    shown = set(re.findall(r"ray_\w+", (MONITORING / "grafana.json").read_text()))
    asked = {name for rule in ALERTS for name in re.findall(r"ray_\w+", rule["expr"])}
    assert asked and asked <= shown
    tried = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    fired = {t["alertname"] for one in tried for t in one["alert_rule_test"] if t["exp_alerts"]}
    assert fired == {rule["alert"] for rule in ALERTS}
    jobs = {
        job["job_name"]
        for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    }
    named = {name for rule in ALERTS for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert named == jobs


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_prometheus_reads_its_configuration_and_the_alerts_fire(command):
    done = subprocess.run(["promtool", *command.split()], cwd=MONITORING, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
