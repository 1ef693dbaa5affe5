"""The stack's settings, commands and environments, each given to its service, and reports on services that died.

test_stack_runs.py starts a stack.
"""

import json
import logging.config
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml
from waiting import until

from shardcore.core.errors import ShardCoreError
from tasks import owned, services, stack, stack_services
from tasks.daemons import Daemon
from tasks.processes import is_running
from tasks.stack_config import StackConfig
from tasks.stack_services import Service, prefect_logging_config, ray_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # the services' own, which are imported here
SECRETS = ("token", "env.sh", "mlflow-auth.ini")
PORTS = ("prefect_port", "mlflow_port", "ray_port", "ray_client_port", "dashboard_port", "metrics_port")
SLEEP = (sys.executable, "-c", "import time; print('it is up', flush=True); time.sleep(600)")


@pytest.fixture(autouse=True)
def temporary(request, tmp_path_factory, monkeypatch):
    """Ray's folders of stacks with long paths go with the tests', unless a test is about where they are."""
    if "short" not in request.fixturenames:
        folder = str(tmp_path_factory.mktemp("temporary"))
        monkeypatch.setattr(owned, "short_temporary_folder", lambda: folder)


@pytest.fixture
def sleeper(tmp_path):
    """Makes daemons of a folder that sleep in place of the stack's services; they end with the test."""
    made = []

    def start(name, folder, command=SLEEP):
        made.append(Daemon(name, command, dict(os.environ), folder))
        made[-1].start()
        return made[-1]

    yield start
    for daemon in made:
        daemon.stop(5)


# --- who gets in --------------------------------------------------------------------------------------------


def mlflow_options(command):
    from mlflow.cli import cli

    assert command[:4] == (sys.executable, "-m", "mlflow", "server")
    return cli.commands["server"].make_context("server", list(command[4:])).params


def ray_options(command):
    from ray.scripts.scripts import cli

    assert command[:4] == (sys.executable, "-m", "ray.scripts.scripts", "start")
    return cli.commands["start"].make_context("start", list(command[4:])).params


@pytest.mark.parametrize(
    "host, node, listens_at_all",
    [
        ("127.0.0.1", "127.0.0.1", "0"),
        ("localhost", "localhost", "0"),
        ("10.0.0.7", "10.0.0.7", "1"),
        ("0.0.0.0", None, "1"),
    ],
)
def test_every_service_listens_at_the_host_only(tmp_path, host, node, listens_at_all):
    """Each service's own parser reads the stack's command. test_ray_cluster.py checks the addresses of Ray."""
    found = stack_services.stack_services(StackConfig(host=host), tmp_path, "secret")
    prefect = found["prefect"].daemon.command
    assert prefect[1:5] == ("-m", "prefect", "server", "start")
    assert dict(zip(prefect[5::2], prefect[6::2], strict=True)) == {"--host": host, "--port": "4200"}
    mlflow = mlflow_options(found["mlflow"].daemon.command)
    assert (mlflow["host"], mlflow["port"], mlflow["app_name"], mlflow["workers"]) == (
        host,
        5000,
        "basic-auth",
        "1",
    )
    ray = ray_options(found["ray"].daemon.command)
    assert (ray["node_ip_address"], ray["dashboard_host"], ray["head"], ray["block"]) == (
        node,
        host,
        True,
        True,
    )
    assert [ray[k] for k in ("port", "ray_client_server_port", "dashboard_port", "metrics_export_port")] == [
        "6379" if isinstance(ray["port"], str) else 6379,
        10001,
        8265,
        8080,
    ]
    assert ray["temp_dir"] == str(ray_folder(tmp_path)) and ray["object_store_memory"] == 256 << 20
    for service in found.values():
        assert service.daemon.env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == listens_at_all
        assert service.daemon.env["RAY_AUTH_MODE"] == "token"
        assert "secret" not in "".join(service.daemon.command)  # which everybody on this machine can see
        assert not service.ports or set(service.ports) <= set(PORTS)
    assert {p for s in found.values() for p in s.ports} == set(PORTS)


# --- settings -----------------------------------------------------------------------------------------------


def test_secrets_are_their_owners_only_from_the_first_moment(tmp_path):
    folder, everybody = tmp_path / ".stack", os.umask(0)
    try:
        with stack._stack_lock(folder):
            token = stack_services.write_service_files(StackConfig(), folder)
        (folder / "taken").mkdir()
        with pytest.raises(OSError):
            stack_services.write_private_file(
                folder / "taken", token
            )  # what is there before its name is changed
    finally:
        os.umask(everybody)
    [unfinished] = folder.glob(".taken.*.tmp")
    written = [unfinished, *(folder / name for name in SECRETS)]
    assert [stat.S_IMODE(p.stat().st_mode) for p in written] == [0o600] * 4
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "logs", ray_folder(folder))} == {0o700}
    assert len(token) >= 40 and (folder / "token").read_text() == token


def test_the_token_stays_until_its_file_is_deleted(tmp_path):
    first = stack_services.write_service_files(StackConfig(), tmp_path)
    (tmp_path / "mlflow-auth.db").write_text("knows the first")
    assert stack_services.write_service_files(StackConfig(), tmp_path) == first
    assert (tmp_path / "mlflow-auth.db").exists()
    (tmp_path / "token").unlink()
    second = stack_services.write_service_files(StackConfig(), tmp_path)
    assert second != first and not (tmp_path / "mlflow-auth.db").exists()
    assert first not in (tmp_path / "env.sh").read_text() and second in (tmp_path / "env.sh").read_text()


@pytest.mark.parametrize("wrong", [b"caf\xe9", b"two words", b"a:b", b"", b"x" * 2000, b"a\x1b[2J"])
def test_a_token_that_is_none_is_an_error_of_one_line(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".stack").mkdir()
    (tmp_path / ".stack/token").write_bytes(wrong)
    for command in (stack.stack_status, stack.start_stack):
        with pytest.raises(ShardCoreError, match="/token "):
            command(StackConfig())


def sourced(folder, names, **env):
    """The values of variables in a shell after `. env.sh`, twice."""
    shown = "; ".join(f'echo "${name}"' for name in names)
    output = subprocess.check_output(
        ["sh", "-euc", f"cd {shlex.quote(str(folder))}; . ./env.sh; . ./env.sh; {shown}"],
        text=True,
        env={"PATH": os.environ["PATH"], **env},
    )
    return output.splitlines()


def test_a_shell_becomes_a_client(tmp_path):
    token = stack_services.write_service_files(StackConfig(host="0.0.0.0", mlflow_port=5001), tmp_path)
    wanted = {
        "PREFECT_API_URL": "http://127.0.0.1:4200/api",
        "PREFECT_API_AUTH_STRING": f"shardcore:{token}",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:5001",
        "MLFLOW_TRACKING_USERNAME": "shardcore",
        "MLFLOW_TRACKING_PASSWORD": token,
        "RAY_ADDRESS": "127.0.0.1:6379",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265",
        "PREFECT_LOGGING_SETTINGS_PATH": str(tmp_path / "logging.yml"),
        "no_proxy": "127.0.0.1,localhost",
    }
    assert dict(zip(wanted, sourced(tmp_path, wanted), strict=True)) == wanted


def test_a_client_finds_the_programs_of_the_environment_once(tmp_path):
    stack_services.write_service_files(StackConfig(), tmp_path)
    programs = str(Path(sys.executable).parent)
    [path] = sourced(tmp_path, ["PATH"], PATH="/usr/bin:/bin")
    assert path == f"{programs}:/usr/bin:/bin"
    [path] = sourced(tmp_path, ["PATH"], PATH=f"/bin:{programs}")
    assert path == f"/bin:{programs}"


@pytest.mark.parametrize(
    "host, env, found",
    [
        ("127.0.0.1", {}, "127.0.0.1,localhost"),
        ("127.0.0.1", {"no_proxy": "example.org"}, "example.org,127.0.0.1,localhost"),
        ("10.0.0.7", {"NO_PROXY": "example.org"}, "example.org,127.0.0.1,localhost,10.0.0.7"),
        ("127.0.0.1", {"no_proxy": "*"}, "*"),
    ],
)
def test_services_of_the_stack_are_reached_without_a_proxy(tmp_path, host, env, found):
    config = StackConfig(host=host)
    with mock.patch.dict(os.environ, env):
        stack_services.write_service_files(config, tmp_path)
        for name in [] if found == "*" else ("no_proxy", "NO_PROXY"):
            assert stack_services.stack_services(config, tmp_path, "t")["worker"].daemon.env[name] == found
    assert sourced(tmp_path, ("no_proxy", "NO_PROXY"), **env) == [found, found]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"mlflow_port": 4200}, "stack.mlflow_port is 4200, as prefect_port; each port"),
        ({"ray_port": 65536}, "stack has ray_port 65536; it needs 1 to 65,535"),
        ({"ray_port": 12000}, "stack has ray_port 12000; Ray's workers have 10002 to 19999"),
        ({"metrics_port": 19999}, "stack has metrics_port 19999; Ray's workers"),
        ({"metrics_port": 0}, "metrics_port 0; it needs 1 to 65,535"),
        ({"object_store_mib": 79}, "stack has object_store_mib 79; it needs 80 to"),
        ({"folder": ""}, "stack has folder ''; the project is in it; it needs a folder of its own"),
        ({"folder": " "}, "stack has folder ' '; the project is in it"),
        ({"folder": "."}, "'.'; the project is in it; it needs a folder of its own"),
        ({"folder": ".."}, "the project is in it"),
        ({"folder": "/"}, "the project is in it"),
        ({"folder": "x" * 300}, r"'x+ \.\.\. x+'; a path may have 1000 bytes, and each"),
        ({"folder": "x/" * 600}, "a path may have 1000 bytes"),
        ({"folder": "a\0b"}, "becomes part of URLs"),
        ({"folder": "100%"}, "becomes part of URLs"),
        ({"host": ""}, "stack has host ''; it needs an address"),
        ({"prefect_database": "somewhere"}, "stack has prefect_database 'somewhere'; it needs a URL that"),
        (
            {"prefect_database": "postgresql://me:secret@db/p"},
            r"prefect_database 'postgresql://…@db/p'; it needs a URL",
        ),
        ({"mlflow_database": "mlflow.db"}, "mlflow_database 'mlflow.db'; it needs a URL"),
        ({"mlflow_database": "oracle://x"}, "stack has mlflow_database 'oracle://x'"),
        ({"mlflow_database": "mysql://"}, "mysql://'"),
        ({"allowed_hosts": ("example.org", "a,b")}, "stack has allowed_hosts 'a,b'; it needs names or"),
        ({"allowed_hosts": ("example.org:5000",)}, "'example.org:5000'; it needs names or addresses without"),
        ({"allowed_hosts": ("",)}, "stack has allowed_hosts ''"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ShardCoreError, match=message):
        StackConfig(**wrong)
    assert StackConfig(object_store_mib=80, ray_port=65535).object_store_mib == 80


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"host": "192.0.2.1"}, r"stack.host is '192.0.2.1', which is no IPv4 address of this machine"),
        ({"host": "::1"}, "stack.host is '::1', which is no IPv4 address"),
        ({"host": "no such host"}, "'no such host', which is no"),
        ({"host": "a\0b"}, "which is no IPv4 address"),
        ({"host": "x" * 300}, "which is no IPv4 address"),
        ({"host": "0"}, "stack.host is '0', which means all addresses; write 0.0.0.0 for that"),
        ({"object_store_mib": 10**9}, r"stack.object_store_mib is 1000000000; this machine has \d+$"),
        ({"folder": "docs"}, "stack.folder is 'docs', which holds other things"),
    ],
)
def test_what_this_machine_cannot_have_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, wrong, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").touch()
    with pytest.raises(ShardCoreError, match=message):
        stack.start_stack(StackConfig(**wrong))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "docs", tmp_path / "docs/page.md"]


@pytest.mark.parametrize(
    "config, reached, refused",
    [
        (StackConfig(), ["localhost", "127.0.0.1:5000", "10.1.2.3"], ["evil.example.org", "8.8.8.8:5000"]),
        (
            StackConfig(host="0.0.0.0"),
            [
                socket.gethostname(),
                f"{socket.gethostname()}:5000",
                "localhost:5000",
                "127.0.0.1",
                "192.168.1.5",
            ],
            ["evil.example.org", "8.8.8.8:5000"],
        ),
        (
            StackConfig(host="8.8.8.8", allowed_hosts=("ml.example.org", "*.corp")),
            ["8.8.8.8:5000", "ml.example.org", "ml.example.org:443", "a.corp:5000"],
            ["ml.example.com", "8.8.4.4"],
        ),
        (StackConfig(allowed_hosts=("*",)), ["anything:5000"], []),
    ],
)
def test_mlflow_is_reached_at_the_machines_names_and_those_that_are_allowed(
    tmp_path, config, reached, refused
):
    """Hosts are compared the way MLflow reads the environment of its service."""
    from mlflow.server import security, security_utils

    env = stack_services.stack_services(config, tmp_path, "t")["mlflow"].daemon.env
    with mock.patch.dict(os.environ, {k: v for k, v in env.items() if k.startswith("MLFLOW_")}):
        hosts, origins = security.get_allowed_hosts(), security.get_allowed_origins()
    for name in reached + refused:
        assert security_utils.is_allowed_host_header(hosts, name) is (name in reached), name
    # A page that MLflow serves may change things there; pages of others may not.
    blocked = security_utils.should_block_cors_request("http://evil.example.org", "POST", origins)
    assert blocked is bool(refused)
    if config.host != "127.0.0.1":
        at = config.host if config.host != "0.0.0.0" else socket.gethostname()
        assert not security_utils.should_block_cors_request(f"http://{at}:5000", "POST", origins)


def test_temporary_files_of_the_services_go_with_the_stack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, folder = StackConfig(), tmp_path / ".stack"
    stack_services.write_service_files(config, folder)
    for service in stack_services.stack_services(config, folder, "t").values():
        left = Path(service.daemon.env["TMPDIR"]) / "left"
        assert left.is_relative_to(ray_folder(folder))
    left.write_text("by a service that was killed")
    stack.stop_stack(config)
    assert left.parent.is_dir() and not left.exists()


def test_databases_and_artifacts_may_be_elsewhere(tmp_path):
    env = {n: s.daemon.env for n, s in stack_services.stack_services(StackConfig(), tmp_path, "t").items()}
    assert env["mlflow"]["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert env["mlflow"]["MLFLOW_ARTIFACTS_DESTINATION"] == f"{tmp_path}/mlflow-artifacts"
    assert env["prefect"]["PREFECT_HOME"] == f"{tmp_path}/prefect"
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in env["prefect"]
    config = StackConfig(
        prefect_database="postgresql+asyncpg://p", mlflow_database="postgresql://m", artifacts="s3://a"
    )
    env = {n: s.daemon.env for n, s in stack_services.stack_services(config, tmp_path, "t").items()}
    assert env["prefect"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://p"
    assert env["mlflow"]["MLFLOW_BACKEND_STORE_URI"] == "postgresql://m"
    assert env["mlflow"]["MLFLOW_ARTIFACTS_DESTINATION"] == "s3://a"
    assert env["ray"]["RAY_ADDRESS"] == "" and env["worker"]["RAY_ADDRESS"] == "127.0.0.1:6379"


def test_a_line_of_the_flows_log_has_what_the_message_has_in_extra(tmp_path):
    config = yaml.safe_load(prefect_logging_config(tmp_path / "flows.jsonl"))
    assert all(
        "lines" in config["loggers"][name]["handlers"] for name in ("prefect.flow_runs", "prefect.task_runs")
    )
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"lines": config["formatters"]["lines"]},
            "handlers": {"lines": config["handlers"]["lines"]},
            "loggers": {"test_stack": {"handlers": ["lines"], "propagate": False}},
        }
    )
    logging.getLogger("test_stack").warning("%s: no plan", "pool-7", extra={"problem": "pool-7"})
    [line] = map(json.loads, (tmp_path / "flows.jsonl").read_text().splitlines())
    wanted = {"message": "pool-7: no plan", "problem": "pool-7", "levelname": "WARNING", "name": "test_stack"}
    assert wanted.items() <= line.items() and line["timestamp"]


@pytest.fixture
def short():
    """A folder whose path has 20 bytes."""
    with tempfile.TemporaryDirectory(prefix="abc-", dir="/tmp") as made:
        yield Path(made + "x" * (20 - len(made)))
        shutil.rmtree(made + "x" * (20 - len(made)), ignore_errors=True)


def test_ray_is_kept_in_the_stack_unless_its_sockets_paths_would_be_too_long(short):
    fits = short / ("x" * 12)  # 33 bytes and /ray: 37, and Ray's 70 make 107
    far = [short / ("x" * 13), short / ("y" * 60)]
    for folder in (fits, *far):
        stack_services.write_service_files(StackConfig(), folder)
    assert ray_folder(fits) == fits / "ray"
    found = [ray_folder(folder) for folder in far]
    try:
        assert found == [ray_folder(folder) for folder in far]  # for other commands
        assert found[0] != found[1] and all(len(str(path)) <= 37 and path.is_dir() for path in found)
        assert {stat.S_IMODE(path.parent.stat().st_mode) for path in found} == {0o700}
        assert {path.parent.stat().st_uid for path in found} == {os.geteuid()}
    finally:
        for path in found:
            shutil.rmtree(path.parent)


@pytest.mark.parametrize("others", ["link", "open", "gone", "file"])
def test_a_temporary_folder_of_ray_that_others_may_have_is_not_used_again(short, others):
    far = short / ("x" * 40)
    stack_services.write_service_files(StackConfig(), far)
    before = ray_folder(far).parent
    shutil.rmtree(before)
    (short / "theirs/ray/tmp").mkdir(parents=True)
    (short / "theirs/ray/tmp/kept").touch()
    {
        "link": lambda: before.symlink_to(short / "theirs"),
        "file": before.touch,
        "gone": bool,
        "open": lambda: shutil.copytree(short / "theirs", before),
    }[others]()
    if others == "open":
        before.chmod(0o755)
    try:
        stack.stop_stack(StackConfig(str(far)))
        kept = before if others == "open" else short / "theirs"
        assert (kept / "ray/tmp/kept").exists()
        stack_services.write_service_files(StackConfig(), far)
        assert ray_folder(far).parent != before and stack_services.is_private_folder(ray_folder(far).parent)
    finally:
        shutil.rmtree(ray_folder(far).parent)
        shutil.rmtree(before, ignore_errors=True) if others == "open" else before.unlink(missing_ok=True)


def test_the_last_sessions_of_ray_are_kept(tmp_path):
    sessions = [tmp_path / f"session_2026-0{month}-01_00-00-00_000000_1" for month in range(1, 6)]
    for folder in sessions:
        (folder / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(sessions[-1])
    stack._remove_old_sessions(tmp_path)
    assert sorted(tmp_path.iterdir()) == [*sessions[2:], tmp_path / "session_latest"]


def test_rays_own_session_is_kept_though_its_clock_was_set_back(tmp_path):
    sessions = [tmp_path / f"session_2026-0{month}-01_00-00-00_000000_1" for month in range(1, 6)]
    for folder in sessions:
        (folder / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(sessions[0])
    stack._remove_old_sessions(tmp_path)
    assert sorted(tmp_path.glob("session_2*")) == [sessions[0], *sessions[3:]]


# --- up and status ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_named_with_its_holder_and_nothing_starts(tmp_path, monkeypatch, host):
    monkeypatch.chdir(tmp_path)
    held = {name: services.reserve_port() for name in PORTS}
    try:
        held["mlflow_port"].listen()
        port = held["mlflow_port"].getsockname()[1]
        config = StackConfig(host=host, **{name: kept.getsockname()[1] for name, kept in held.items()})
        with pytest.raises(
            ShardCoreError,
            match=(
                rf"^port {port} \(stack.mlflow_port in params.yaml\) cannot be used at {host}: "
                r"Address already in use, held by "
                rf"process {os.getpid()} \(.+\); end that, or choose another port$"
            ),
        ):
            stack.start_stack(config)
        assert stack._port_holder_text(held["ray_port"].getsockname()[1]) == ""
    finally:
        for kept in held.values():
            kept.close()
    assert not list(tmp_path.glob(".stack/*.pid"))


def test_what_is_killed_is_said_with_the_last_lines_of_its_log(tmp_path, monkeypatch, sleeper):
    monkeypatch.chdir(tmp_path)
    config = StackConfig(
        ".stack",
        **{
            f"{name}_port": 1 + i
            for i, name in enumerate(("prefect", "mlflow", "ray", "ray_client", "dashboard", "metrics"))
        },
    )  # where nobody answers
    folder = (tmp_path / ".stack").resolve()
    assert stack.stack_status(config)[1] is False
    stack_services.write_service_files(config, folder)
    started = {name: sleeper(name, folder) for name in ("mlflow", "ray", "watch")}
    until(lambda: all(d.last_log_lines(1) == ["it is up"] for d in started.values()))
    process = started["ray"].process()
    process.kill()
    until(started["ray"].has_died)
    output, healthy = stack.stack_status(config)
    assert dict(re.findall(r"^(\w+) +(healthy|silent|died|down) ", output, re.M)) == {
        "prefect": "down",
        "mlflow": "silent",
        "ray": "died",
        "worker": "down",
        "watch": "healthy",
    }
    assert healthy is False
    assert "\nray: died; the last lines of .stack/logs/ray.log:\n  it is up\n" in output
    assert "\nmlflow: silent; the last lines of .stack/logs/mlflow.log:\n  it is up\n" in output
    assert "watch: " not in output and "prefect: " not in output
    assert re.search(rf"^watch +healthy +\d{{4}}-\S+ \S+ +{started['watch'].process().pid} ", output, re.M)
    assert re.search(r"^clients +\. \.stack/env\.sh$", output, re.M) and str(config.metrics_port) in output


def test_up_waits_for_what_starts_and_names_what_ends_or_never_answers(tmp_path, monkeypatch, sleeper):
    looks, output = [], []

    def answers():
        looks.append(1)
        if len(looks) < 3:
            raise ConnectionRefusedError
        return len(looks) > 3

    starts = Service(sleeper("starts", tmp_path), {}, answers, "http://page")
    stack._wait_until_healthy([starts], time.monotonic(), output.append)
    assert (
        len(looks) == 4
        and len(output) == 1
        and re.fullmatch(
            r"starts: "
            r"healthy http://page after \d+ s",
            output[0],
        )
    )
    monkeypatch.setattr(stack, "PATIENCE_S", 0.1)
    never = Service(sleeper("never", tmp_path), {}, lambda: False)
    until(lambda: never.daemon.last_log_lines(1) == ["it is up"])
    with pytest.raises(
        ShardCoreError,
        match=r"^never runs but does not answer after 0 s; "
        r".*logs/never.log ends with: it is up$",
    ):
        stack._wait_until_healthy([never], time.monotonic() - 1)
    ends = Service(
        sleeper("ends", tmp_path, (sys.executable, "-c", "raise SystemExit('no such option')")),
        {},
        lambda: True,
    )
    until(ends.daemon.has_died)
    with pytest.raises(ShardCoreError, match=r"^ends ended; .*logs/ends.log ends with: no such option$"):
        stack._wait_until_healthy([ends], time.monotonic())


def test_down_ends_all_services_and_what_they_started(tmp_path, monkeypatch, sleeper):
    monkeypatch.chdir(tmp_path)
    stack.stop_stack(StackConfig())
    assert not (tmp_path / ".stack").exists()
    started = [
        sleeper(name, tmp_path.resolve() / ".stack")
        for name in ("prefect", "mlflow", "ray", "worker", "watch")
    ]
    processes = [d.process() for d in started]
    stack.stop_stack(StackConfig())
    assert not any(map(is_running, processes)) and not list(tmp_path.glob(".stack/*.pid"))


def test_what_a_killed_server_left_is_ended_and_the_flow_runs_of_a_worker_go_on(tmp_path, sleeper):
    parent = (sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '600'])")
    started = [sleeper(name, tmp_path, parent) for name in ("server", "worker")]
    with services.reserve_port() as held:
        config = StackConfig(ray_port=held.getsockname()[1])
        for daemon, ports in zip(started, ({"ray_port": config.ray_port}, {}), strict=True):
            until(daemon.leftover_processes)
            daemon.process().kill()
            until(daemon.has_died)
            stack._require_free_ports(Service(daemon, ports, lambda: True), config)
    assert [len(daemon.leftover_processes()) for daemon in started] == [0, 1]


def test_deployments_are_made_once_until_something_changes(tmp_path, monkeypatch):
    """A script stands where Prefect's command is, and keeps what it was asked."""
    monkeypatch.chdir(tmp_path)
    folder, asked, python = tmp_path / ".stack", tmp_path / "asked", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" $WHO >> {asked}\necho it failed because\nexit ${{CODE:-0}}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(
        ShardCoreError, match=f"^prefect.yaml is not in {tmp_path}: the stack is started in the "
    ):
        stack._deploy_if_changed(StackConfig(), folder, {})
    (tmp_path / "prefect.yaml").write_text("deployments: []")
    with pytest.raises(
        ShardCoreError,
        match=r"^prefect.yaml cannot be deployed; .*deploy.log ends with: "
        r"it failed because$",
    ):
        stack._deploy_if_changed(StackConfig(), folder, {"CODE": "1"})
    for _ in range(2):
        stack._deploy_if_changed(StackConfig(), folder, {"WHO": "me"})
    assert asked.read_text().splitlines() == [
        "-m prefect --no-prompt deploy --all",
        "-m prefect --no-prompt deploy --all me",
    ]
    (tmp_path / "flows").mkdir()
    for change in (
        lambda: (tmp_path / "prefect.yaml").write_text("deployments: [1]"),
        lambda: (tmp_path / "flows/new.py").write_text("new"),
        lambda: None,
    ):
        change()
        stack._deploy_if_changed(StackConfig(), folder, {})
    stack._deploy_if_changed(StackConfig(prefect_database="postgresql+asyncpg://p"), folder, {})
    assert len(asked.read_text().splitlines()) == 5


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_command_whose_reader_is_gone_ends_without_a_word(tmp_path, command):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    (tmp_path / "params.yaml").touch()
    running = subprocess.Popen(
        [sys.executable, "-m", "tasks.stack", command],
        cwd=tmp_path,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait() == (141 if command == "status" else 0)


def test_run_leaves_a_stack_of_another_configuration_running(tmp_path, sleeper, monkeypatch):
    running = sleeper("ray", tmp_path)
    other = Service(Daemon("ray", ("sleep", "1"), dict(os.environ), tmp_path), {}, lambda: True)
    monkeypatch.setattr(stack, "stack_services", lambda *_: {"ray": other})
    with pytest.raises(ShardCoreError, match="ray .* runs with other settings"):
        stack.run_stack(StackConfig(folder=str(tmp_path)))
    assert running.process() is not None


def test_run_starts_again_what_dies_and_ends_with_what_was_stopped(tmp_path, sleeper, monkeypatch):
    """Here `make down` stops it in another shell. test_stack_runs.py ends a whole stack by a signal."""
    found, said, begun = {}, [], []

    def up(config, note):
        begun.append(True)
        for name in ("ray", "watch"):
            if name not in found or found[name].daemon.process() is None:
                found[name] = Service(sleeper(name, tmp_path), {}, lambda: True)

    def look(_s):
        if len(begun) == 1:
            os.kill(found["ray"].daemon.process().pid, 9)
            until(lambda: found["ray"].daemon.has_died())
        else:
            found["watch"].daemon.stop()

    monkeypatch.setattr(stack, "start_stack", up)
    monkeypatch.setattr(stack, "stack_services", lambda *_: found)
    # The module's own name: `until` sleeps too.
    monkeypatch.setattr(stack, "time", mock.Mock(sleep=look))
    stack.run_stack(StackConfig(folder=str(tmp_path)), said.append)
    assert said == ["died, and are started again: ray"] and len(begun) == 2
    assert not [s for s in found.values() if s.daemon.process()]
