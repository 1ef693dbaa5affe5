"""`python -m tasks.stack up|down|status`: the long-lived services that flows need, on one machine.

The stack has a Prefect server with a worker and the deployments of prefect.yaml, an MLflow server, a Ray head
with its dashboard, and the watch that publishes when the champion changes. One folder has data, logs and the
token. `. .stack/env.sh` makes a shell a client.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from shardcore import report
from shardcore.errors import ShardCoreError
from tasks import daemons, params, paths
from tasks.daemons import Daemon
from tasks.services import LOOPBACK, get, reach_directly
from tasks.stack_config import StackConfig, require_usable

USER = "shardcore"
POOL = "local"
"""The work pool of prefect.yaml's deployments."""
PATIENCE_S = 180.0
_SOCKET_PATH_BYTES = 107
_RAY_SOCKET_BYTES = 70
"""Bytes that Ray adds to its folder in the paths of its sockets."""
_QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1",
          "MLFLOW_DISABLE_TELEMETRY": "true",
          "DVC_NO_ANALYTICS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_PROGRAMS = """case ":$PATH:" in *:FOLDER:*) ;; *) PATH=FOLDER:$PATH; export PATH ;; esac
"""
"""Shell lines that find `prefect` and `mlflow` of this environment, whether it is active or not."""
_NO_PROXY = """case "${no_proxy:=${NO_PROXY:-}}" in
*'*'* | *HOSTS*) ;;
*) no_proxy="${no_proxy:+$no_proxy,}HOSTS" ;;
esac
export no_proxy NO_PROXY="$no_proxy"
"""
"""reach_directly, for a shell."""
_KEPT_SESSIONS = 3
"""Sessions of Ray whose logs are kept."""


@dataclass(frozen=True)
class Service:
    """A service of the stack.

    daemon: its process.
    ports: where it listens, by the names in StackConfig.
    answers: raises OSError or returns false unless it works.
    page: URL for people.
    """

    daemon: Daemon
    ports: dict[str, int]
    answers: Callable[[], bool]
    page: str = ""

    def state(self) -> str:
        """down, died, silent (it starts or hangs), or healthy."""
        if self.daemon.process() is None:
            return "died" if self.daemon.died() else "down"
        try:
            return "healthy" if self.answers() else "silent"
        except (OSError, ValueError):
            return "silent"


# --- what the stack is --------------------------------------------------------------------------------------


def client_env(config: StackConfig, folder: Path, token: str) -> dict[str, str]:
    """The environment of the stack's clients: flows, worker, a user's shell."""
    env = {**_QUIET, "PREFECT_API_URL": f"{config.url(config.prefect_port)}/api",
           "PREFECT_API_AUTH_STRING": f"{USER}:{token}",
           "PREFECT_HOME": str(folder / "prefect"),
           "PREFECT_LOGGING_SETTINGS_PATH": str(folder / "logging.yml"),
           "MLFLOW_TRACKING_URI": config.url(config.mlflow_port), "MLFLOW_TRACKING_USERNAME": USER,
           "MLFLOW_TRACKING_PASSWORD": token,
           "RAY_ADDRESS": f"{config.client_host}:{config.ray_port}", "RAY_AUTH_MODE": "token",
           "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
           "RAY_API_SERVER_ADDRESS": config.url(config.dashboard_port)}
    # Ray's switch for clusters of several machines. It is on by default on Linux, and makes Ray listen at all
    # addresses.
    return {**env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if config.on_loopback else "1"}


def services(config: StackConfig, folder: Path, token: str) -> dict[str, Service]:
    """All services by name, in the order in which they start."""
    client = client_env(config, folder, token)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    base = {**os.environ, **client, "PATH": path, "TMPDIR": str(temporary_folder(folder))}
    reach_directly(base, config.client_host)
    python = (sys.executable, "-m")

    def daemon(name: str, *command: str, **env: str) -> Daemon:
        return Daemon(name, command, {**base, **env}, folder)

    prefect = {"PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{token}",
               # What waits for its turn looks again so often.
               "PREFECT_DEPLOYMENT_CONCURRENCY_SLOT_WAIT_SECONDS": "5"}
    if config.prefect_database:
        prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = config.prefect_database
    mlflow = {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "mlflow-auth.ini"), "MLFLOW_AUTH_ADMIN_USERNAME": USER,
              "MLFLOW_AUTH_ADMIN_PASSWORD": token, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
              # Derived from the token, so that sessions survive a restart.
              "MLFLOW_FLASK_SERVER_SECRET_KEY": hashlib.sha256(token.encode()).hexdigest(),
              "MLFLOW_BACKEND_STORE_URI": config.mlflow_database or f"sqlite:///{folder / 'mlflow.db'}",
              "MLFLOW_ARTIFACTS_DESTINATION": config.artifacts or str(folder / "mlflow-artifacts")}
    ray = {"port": config.ray_port, "ray-client-server-port": config.ray_client_port,
           "dashboard-host": config.host, "dashboard-port": config.dashboard_port,
           "metrics-export-port": config.metrics_port, "temp-dir": ray_folder(folder),
           "object-store-memory": config.object_store_mib << 20, "log-color": "false"}
    if config.host != "0.0.0.0":
        ray["node-ip-address"] = config.host
    api, bearer = client["PREFECT_API_URL"], {"Authorization": f"Bearer {token}"}
    dashboard, metrics = config.url(config.dashboard_port), config.url(config.metrics_port)
    worker = daemon("worker", *python, "prefect", "worker", "start", "--pool", POOL, "--type", "process",
                    "--name",
                    f"stack@{socket.gethostname()}", PREFECT_WORKER_QUERY_SECONDS="2")
    watch = daemon("watch", *python, "tasks.watch")
    found = [
        Service(daemon("prefect", *python, "prefect", "server", "start", "--host", config.host, "--port",
                       str(config.prefect_port), **prefect),
                {"prefect_port": config.prefect_port}, lambda: get(f"{api}/health") == b"true",
                config.url(config.prefect_port)),
        Service(daemon("mlflow", *python, "mlflow", "server", "--host", config.host, "--port",
                       str(config.mlflow_port), "--workers", "1", "--app-name", "basic-auth",
                       "--uvicorn-opts", "--log-level warning", **mlflow),
                {"mlflow_port": config.mlflow_port},
                lambda: get(f"{config.url(config.mlflow_port)}/health") == b"OK",
                config.url(config.mlflow_port)),
        Service(daemon("ray", *python, "ray.scripts.scripts", "start", "--head", "--block",
                       "--disable-usage-stats",
                       *(f"--{k}={v}" for k, v in ray.items()), RAY_ADDRESS="",
                       # Calls have names of their own, too many for a label.
                       RAY_metric_cardinality_level="low"),
                {k: getattr(config, k)
                 for k in ("ray_port", "ray_client_port", "dashboard_port", "metrics_port")},
                lambda: bool(get(f"{dashboard}/api/version", bearer) and get(f"{metrics}/metrics")),
                dashboard),
        Service(worker, {}, lambda: _polls(worker, api, client["PREFECT_API_AUTH_STRING"])),
        Service(watch, {}, lambda: watch.process() is not None),
    ]
    return {s.daemon.name: s for s in found}


def ray_folder(folder: Path) -> Path:
    """Folder of Ray's sessions: in the stack's folder, unless the paths of its sockets become too long."""
    inside = folder / "ray"
    if len(os.fsencode(inside)) + _RAY_SOCKET_BYTES <= _SOCKET_PATH_BYTES:
        return inside
    return Path(tempfile.gettempdir()) / f"ray-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def temporary_folder(folder: Path) -> Path:
    """TMPDIR of the services. It is short, because sockets are there too."""
    return ray_folder(folder) / "tmp"


def write_settings(config: StackConfig, folder: Path) -> str:
    """Write the files that services and clients read. Returns the token, which the first call creates."""
    for made in (folder / "logs", ray_folder(folder), temporary_folder(folder)):
        made.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "token").exists():
        # This database keeps the password that it was created with.
        (folder / "mlflow-auth.db").unlink(missing_ok=True)
        _write_private(folder / "token", secrets.token_urlsafe(32))
    token = (folder / "token").read_text().strip()
    env = client_env(config, folder, token)
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in env.items())
    hosts = ",".join(dict.fromkeys((*LOOPBACK, config.client_host)))
    programs = shlex.quote(str(Path(sys.executable).parent))
    _write_private(folder / "env.sh", exports + _NO_PROXY.replace("HOSTS", hosts)
                   + _PROGRAMS.replace("FOLDER", programs))
    _write_private(folder / "mlflow-auth.ini", f"[mlflow]\ndefault_permission = NO_PERMISSIONS\n"
                                               f"database_uri = sqlite:///{folder / 'mlflow-auth.db'}\n"
                                               # Or each request hashes the password: 0.1 s.
                                               "auth_cache_ttl_seconds = 60\n"
                                               "authorization_function = "
                                               "mlflow.server.auth:authenticate_request_basic_auth\n")
    _write_private(folder / "logging.yml", logging_config(folder / "logs" / "flows.jsonl"))
    return token


def logging_config(lines: Path) -> str:
    """Prefect's logging configuration, extended to write logs of flows and tasks as JSON lines too."""
    import yaml

    # Importing Prefect takes seconds.
    prefect = Path(importlib.util.find_spec("prefect").origin).parent
    config = yaml.safe_load((prefect / "logging" / "logging.yml").read_text())
    config["formatters"]["lines"] = {"()": "pythonjsonlogger.json.JsonFormatter", "timestamp": True,
                                     "format": "%(levelname)s %(name)s %(message)s"}
    config["handlers"]["lines"] = {"class": "logging.handlers.WatchedFileHandler", "filename": str(lines),
                                   "delay": True,
                                   "formatter": "lines"}
    for logger in ("prefect.flow_runs", "prefect.task_runs"):
        config["loggers"][logger]["handlers"].append("lines")
    return yaml.safe_dump(config)


# --- up, down, status ---------------------------------------------------------------------------------------


def up(config: StackConfig, say: Callable[[str], None] = print) -> None:
    """Start all services and wait for them. Raises ShardCoreError if a port is taken or a service ends."""
    folder = Path(config.folder).resolve()
    require_usable(config, folder)
    with _alone(folder):
        began = time.monotonic()
        stack = services(config, folder, write_settings(config, folder))
        missing = [n for n, s in stack.items() if not s.daemon.runs_as_told()]
        # Nothing runs, so nobody uses the temporary files.
        if len(missing) == len(stack):
            _empty(temporary_folder(folder))
        for name in missing:
            _make_way(stack[name], config)
        _forget_sessions(ray_folder(folder))
        for name in missing:
            if name in ("worker", "watch"):
                # Worker and watch fail without a Prefect server.
                _wait([stack["prefect"]], began)
            stack[name].daemon.start()
        _wait([stack["worker"]], began)
        _deploy(config, folder, stack["worker"].daemon.env)
        _wait(stack.values(), began, say)


def down(config: StackConfig) -> None:
    """End all services, and the worker's flow runs."""
    folder = Path(config.folder).resolve()
    if folder.exists():
        with _alone(folder):
            daemons.stop([s.daemon for s in reversed(services(config, folder, "").values())])
            _empty(temporary_folder(folder))


def status(config: StackConfig) -> tuple[str, bool]:
    """A text for the user, and whether all services are healthy."""
    folder = Path(config.folder).resolve()
    token = (folder / "token").read_text().strip() if (folder / "token").exists() else ""
    rows, ends, healthy = [], [], True
    for name, service in services(config, folder, token).items():
        state, process = service.state(), service.daemon.process()
        healthy = healthy and state == "healthy"
        since = (datetime.fromtimestamp(process.create_time()).strftime("%Y-%m-%d %H:%M:%S")
                 if process else "-")
        rows.append((name, state, since, process.pid if process else "-", service.page or "-",
                     _shown(service.daemon.log)))
        if state in ("died", "silent"):
            ends += [f"\n{name}: {state}; the last lines of {_shown(service.daemon.log)}:"]
            ends += [f"  {line[:200]}" for line in service.daemon.last_lines(8)]
    text = report.text_table(("service", "state", "since", "process", "page", "log"), rows)
    where = {"clients": f". {_shown(folder / 'env.sh')}",
             "login": f"{USER}, with the password in {_shown(folder / 'token')}; "
             "Ray's page asks for that alone", "metrics": f"{config.url(config.metrics_port)}/metrics",
             "flows' logs": _shown(folder / "logs" / "flows.jsonl"),
             "Ray's logs": _shown(ray_folder(folder) / "session_latest" / "logs")}
    return "\n".join([text, *ends, "", *(f"{k:<12} {v}" for k, v in where.items() if token)]), healthy


def _empty(folder: Path) -> None:
    """Delete the content of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _forget_sessions(ray: Path) -> None:
    """Delete logs of Ray's sessions, except the last few."""
    for session in sorted(ray.glob("session_2*"))[:-_KEPT_SESSIONS]:
        shutil.rmtree(session, ignore_errors=True)


def _make_way(service: Service, config: StackConfig) -> None:
    """End what a killed server left, and require its ports to be free. A worker's flow runs go on."""
    if service.ports:
        daemons.end_leftovers(service.daemon, 5.0)
    for name, port in service.ports.items():
        _require_free(config.host, port, name, 10.0 if service.daemon.died() else 0.0)


def _wait(waited: Iterable[Service], began: float, say: Callable[[str], None] = lambda line: None) -> None:
    """Wait until all are healthy. Raises ShardCoreError if one ends, or takes longer than PATIENCE_S."""
    waiting = list(waited)
    while waiting:
        for service in list(waiting):
            state, name = service.state(), service.daemon.name
            if state == "healthy":
                waiting.remove(service)
                say(f"{name}: healthy {service.page}".rstrip() + f" after {time.monotonic() - began:.0f} s")
            elif state != "silent" or time.monotonic() - began > PATIENCE_S:
                how = "ended" if state != "silent" else f"runs but does not answer after {PATIENCE_S:.0f} s"
                last = " ".join(service.daemon.last_lines(1))[:200]
                raise ShardCoreError(f"{name} {how}; {_shown(service.daemon.log)} ends with: {last}")
        time.sleep(0.2)


def _deploy(config: StackConfig, folder: Path, env: dict[str, str]) -> None:
    """Deploy prefect.yaml if it, the flows or the database changed since the last time.

    Otherwise a schedule that was switched on in Prefect's page would be switched off.
    """
    file = Path("prefect.yaml")
    if not file.exists():
        raise ShardCoreError(f"prefect.yaml is not in {os.getcwd()}: the stack is started in the project's "
                             "folder")
    texts = [config.prefect_database, *(p.read_text() for p in (file, *sorted(Path("flows").glob("*.py"))))]
    version = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    if (known := folder / "deployed").exists() and known.read_text() == version:
        return
    done = subprocess.run([sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"], env=env,
                          text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (folder / "logs" / "deploy.log").write_text(done.stdout)
    if done.returncode:
        last = " ".join(done.stdout.split())[-200:]
        raise ShardCoreError(f"prefect.yaml cannot be deployed; {_shown(folder / 'logs' / 'deploy.log')} "
                             f"ends with: {last}")
    _write_private(known, version)


def _require_free(host: str, port: int, name: str, patience_s: float) -> None:
    # Remains of a killed Ray end by themselves.
    until = time.monotonic() + patience_s
    while True:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return s.bind((host, port))
            except OSError as error:
                reason = error.strerror
        if time.monotonic() > until:
            raise ShardCoreError(f"port {port} (stack.{name} in {paths.PARAMS}) cannot be used at {host}: "
                                 f"{reason}{_holder(port)}; end that, or choose another port")
        time.sleep(0.2)


def _holder(port: int) -> str:
    """Who listens at a port, as far as this user may see."""
    try:
        for c in psutil.net_connections("tcp"):
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid:
                return f", held by process {c.pid} ({' '.join(psutil.Process(c.pid).cmdline())[:80].strip()})"
    except psutil.Error:
        pass
    return ""


def _polls(worker: Daemon, api: str, user: str) -> bool:
    """Whether the worker asked the server for work since it started."""
    process = worker.process()
    headers = {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}",
               "Content-Type": "application/json"}
    known = json.loads(get(f"{api}/work_pools/{POOL}/workers/filter", headers, b"{}"))
    seen = [datetime.fromisoformat(w["last_heartbeat_time"]).timestamp() for w in known
            if w["name"] in worker.command and w["last_heartbeat_time"]]
    return process is not None and any(s > process.create_time() for s in seen)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the stack's lock: one command at a time changes a stack."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    temporary.replace(path)


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> None:
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        config = params.section("stack", StackConfig)
        if command == "up":
            up(config, lambda line: print(line, flush=True))
        elif command == "down":
            down(config)
        elif command == "status":
            text, healthy = status(config)
            print(text)
            raise SystemExit(0 if healthy else 1)
        else:
            raise SystemExit("usage: python -m tasks.stack up|down|status")
    except (ShardCoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
