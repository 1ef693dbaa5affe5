"""Services of the stack: their commands, their environments, and the files that they read."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from shardcore.core.errors import ShardCoreError
from shardcore.io import schema
from tasks import owned, paths
from tasks.daemons import ALLOWED_HOSTS, Daemon
from tasks.lost_runs import AT_ONCE, POOL, WORKER, PrefectApi
from tasks.services import LOOPBACK, bypass_proxy, http_request
from tasks.stack_config import StackConfig

USER = "shardcore"
_SOCKET_PATH_BYTES = 107
"""Most bytes of a socket's path."""
_RAY_LINK = "ray-sessions"
"""Name of a link to the temporary folder of Ray's sessions."""
_MOST_TOKEN = 1000
"""Most bytes of the token's file."""
_RAY_SOCKET_BYTES = 70
"""Bytes that Ray adds to its folder in the paths of its sockets."""
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_PRIVATE = ("10.*", "192.168.*", *(f"172.{n}.*" for n in range(16, 32)))
"""Patterns of private addresses, which MLflow allows by default."""
_PROGRAMS = """case ":$PATH:" in *:FOLDER:*) ;; *) PATH=FOLDER:$PATH; export PATH ;; esac
"""
"""Lines of shell that put this environment's `prefect` and `mlflow` on the path, even if it is not active."""
_NO_PROXY = """case "${no_proxy:=${NO_PROXY:-}}" in
*'*'* | *HOSTS*) ;;
*) no_proxy="${no_proxy:+$no_proxy,}HOSTS" ;;
esac
export no_proxy NO_PROXY="$no_proxy"
"""
"""Lines of shell that do what services.bypass_proxy does."""


@dataclass(frozen=True)
class Service:
    """A service of the stack (such as MLflow or Prefect): its command, port and health check.

    daemon: process of the service.
    ports: ports at which it listens, by the names in StackConfig.
    answers: function that returns False or raises OSError unless the service works.
    page: URL for people.
    """

    daemon: Daemon
    ports: dict[str, int]
    answers: Callable[[], bool]
    page: str = ""

    def state(self) -> str:
        """State of the service: down, died, silent (starting or hanging), or healthy."""
        if self.daemon.process() is None:
            return "died" if self.daemon.has_died() else "down"
        try:
            return "healthy" if self.answers() else "silent"
        except (OSError, ValueError):
            return "silent"


def client_environment(config: StackConfig, folder: Path, token: str) -> dict[str, str]:
    """Environment variables of the stack's clients: flows, the worker and users' shells."""
    env = {
        **_QUIET,
        "PREFECT_API_URL": f"{config.url(config.prefect_port)}/api",
        "PREFECT_API_AUTH_STRING": f"{USER}:{token}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_SETTINGS_PATH": str(folder / "logging.yml"),
        "MLFLOW_TRACKING_URI": config.url(config.mlflow_port),
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": token,
        "RAY_ADDRESS": f"{config.client_host}:{config.ray_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_API_SERVER_ADDRESS": config.url(config.dashboard_port),
    }
    # Ray's switch for clusters of several machines makes it listen at all addresses. On Linux it is on by default.
    return {**env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if config.is_on_loopback else "1"}


def stack_services(config: StackConfig, folder: Path, token: str) -> dict[str, Service]:
    """Services of the stack by name, in the order in which they start."""
    client = client_environment(config, folder, token)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    base = {**os.environ, **client, "PATH": path, "TMPDIR": str(temporary_folder(folder))}
    bypass_proxy(base, config.client_host)
    python = (sys.executable, "-m")

    def make_daemon(name: str, *command: str, **env: str) -> Daemon:
        return Daemon(name, command, {**base, **env}, folder)

    prefect = {"PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{token}"}
    if config.prefect_database:
        prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = config.prefect_database
    mlflow = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "mlflow-auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": token,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # It is derived from the token, so that sessions survive a restart.
        "MLFLOW_FLASK_SERVER_SECRET_KEY": hashlib.sha256(token.encode()).hexdigest(),
        "MLFLOW_BACKEND_STORE_URI": config.mlflow_database or f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": config.artifacts or str(folder / "mlflow-artifacts"),
        **mlflow_host_variables(config),
    }
    ray = {
        "port": config.ray_port,
        "ray-client-server-port": config.ray_client_port,
        "dashboard-host": config.host,
        "dashboard-port": config.dashboard_port,
        "metrics-export-port": config.metrics_port,
        "temp-dir": ray_folder(folder),
        "object-store-memory": config.object_store_mib << 20,
        "log-color": "false",
    }
    if config.host != "0.0.0.0":
        ray["node-ip-address"] = config.host
    api, bearer = client["PREFECT_API_URL"], {"Authorization": f"Bearer {token}"}
    dashboard, metrics = config.url(config.dashboard_port), config.url(config.metrics_port)
    worker_command = f"prefect worker start --pool {POOL} --type process --name {WORKER} --limit {AT_ONCE}"
    worker = make_daemon("worker", *python, *worker_command.split(), PREFECT_WORKER_QUERY_SECONDS="2")
    watch = make_daemon("watch", *python, "tasks.watch")
    at = ("--host", config.host, "--port")
    stack = [
        Service(
            make_daemon(
                "prefect", *python, *"prefect server start".split(), *at, str(config.prefect_port), **prefect
            ),
            {"prefect_port": config.prefect_port},
            lambda: http_request(f"{api}/health") == b"true",
            config.url(config.prefect_port),
        ),
        Service(
            make_daemon(
                "mlflow",
                *python,
                *"mlflow server --workers 1 --app-name basic-auth".split(),
                *at,
                str(config.mlflow_port),
                "--uvicorn-opts",
                "--log-level warning",
                **mlflow,
            ),
            {"mlflow_port": config.mlflow_port},
            lambda: http_request(f"{config.url(config.mlflow_port)}/health") == b"OK",
            config.url(config.mlflow_port),
        ),
        Service(
            make_daemon(
                "ray",
                *python,
                *"ray.scripts.scripts start --head --block --disable-usage-stats".split(),
                *(f"--{k}={v}" for k, v in ray.items()),
                RAY_ADDRESS="",
                # Each call has a name of its own, which would make too many values of a label.
                RAY_metric_cardinality_level="low",
            ),
            {
                k: getattr(config, k)
                for k in ("ray_port", "ray_client_port", "dashboard_port", "metrics_port")
            },
            lambda: bool(
                http_request(f"{dashboard}/api/version", bearer) and http_request(f"{metrics}/metrics")
            ),
            dashboard,
        ),
        Service(worker, {}, lambda: _has_polled(worker, prefect_api(config, token))),
        Service(watch, {}, lambda: watch.process() is not None),
    ]
    return {s.daemon.name: s for s in stack}


def mlflow_host_variables(config: StackConfig) -> dict[str, str]:
    """Environment variables with the host names and addresses to which MLflow answers.

    MLflow answers 403 to any other. By default it allows loopback and private addresses. A page
    of another origin may not change anything.
    """
    if config.is_on_loopback and not config.allowed_hosts:
        return {}
    ours = [config.host]
    if config.host == "0.0.0.0":
        ours = [
            socket.gethostname(),
            *(
                address.address
                for addresses in psutil.net_if_addrs().values()
                for address in addresses
                if address.family == socket.AF_INET
            ),
        ]
    named = list(dict.fromkeys([*LOOPBACK, *ours, *config.allowed_hosts]))
    origins = [
        origin
        for name in named
        for origin in (f"http://{name}:{config.mlflow_port}", f"http://{name}", f"https://{name}")
    ]
    hosts = [host for name in (*named, *_PRIVATE) for host in (name, f"{name}:*")]
    return {
        "MLFLOW_SERVER_ALLOWED_HOSTS": os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join(hosts)),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": os.environ.get(
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(origins)
        ),
        ALLOWED_HOSTS: ",".join(config.allowed_hosts),
    }


def ray_folder(folder: Path) -> Path:
    """Folder of Ray's sessions: in the stack's folder, unless socket paths become too long there.

    Then it is in a temporary folder with a name that nobody can guess. A link in the stack's folder leads there.
    """
    inside, link = folder / "ray", folder / _RAY_LINK
    if len(os.fsencode(inside)) + _RAY_SOCKET_BYTES <= _SOCKET_PATH_BYTES or not link.is_symlink():
        return inside
    return link.readlink() / "ray"


def is_private_folder(folder: Path) -> bool:
    """Tell if a path is a folder that only this user owns and can access."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _link_ray_folder(folder: Path) -> None:
    """Create and link a temporary folder for Ray's sessions, if the stack's own path is too long for sockets.

    After a reboot it is gone, and its name may be another user's.
    """
    link = folder / _RAY_LINK
    too_long = len(os.fsencode(folder / "ray")) + _RAY_SOCKET_BYTES > _SOCKET_PATH_BYTES
    if too_long and not (link.is_symlink() and is_private_folder(link.readlink())):
        link.unlink(missing_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix="ray-", dir=owned.short_temporary_folder()))


def temporary_folder(folder: Path) -> Path:
    """Temporary folder (TMPDIR) of the stack's services, with a path short enough for sockets."""
    return ray_folder(folder) / "tmp"


def read_token(folder: Path) -> str:
    """Read the stack's token. "" before the first start. Raises ShardCoreError for an invalid token file."""
    file = folder / "token"
    if not file.exists():
        return ""
    token = schema.read_text(file, _MOST_TOKEN).strip()
    if not re.fullmatch(r"[!-9;-~]+", token):
        raise ShardCoreError(
            f"{file} holds no token; it needs printable characters without spaces and "
            "colons. Delete it, and make up writes another"
        )
    return token


def write_service_files(config: StackConfig, folder: Path) -> str:
    """Write the files that the stack's services and clients read. Returns the stack's token."""
    (folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
    # Ray opens its folder to everybody, so its parent is closed.
    folder.chmod(0o700)
    _link_ray_folder(folder)
    for made in (ray_folder(folder), temporary_folder(folder)):
        made.mkdir(exist_ok=True, mode=0o700)
    if not (folder / "token").exists():
        # This database keeps its first password, so a new token needs a new one.
        (folder / "mlflow-auth.db").unlink(missing_ok=True)
        write_private_file(folder / "token", secrets.token_urlsafe(32))
    token = read_token(folder)
    env = client_environment(config, folder, token)
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in env.items())
    hosts = ",".join(dict.fromkeys((*LOOPBACK, config.client_host)))
    programs = shlex.quote(str(Path(sys.executable).parent))
    write_private_file(
        folder / "env.sh", exports + _NO_PROXY.replace("HOSTS", hosts) + _PROGRAMS.replace("FOLDER", programs)
    )
    write_private_file(
        folder / "mlflow-auth.ini",
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{folder / 'mlflow-auth.db'}\n"
        # Without it, each request hashes the password, which takes 0.1 s.
        "auth_cache_ttl_seconds = 60\n"
        "authorization_function = "
        "mlflow.server.auth:authenticate_request_basic_auth\n",
    )
    write_private_file(folder / "logging.yml", prefect_logging_config(folder / "logs" / "flows.jsonl"))
    return token


def prefect_logging_config(lines: Path) -> str:
    """Prefect's logging configuration as YAML, with logs of flows and tasks also written to the JSON file `lines`."""
    import yaml

    config = yaml.safe_load((paths.package_folder("prefect") / "logging" / "logging.yml").read_text())
    config["formatters"]["lines"] = {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "timestamp": True,
        "format": "%(levelname)s %(name)s %(message)s",
    }
    config["handlers"]["lines"] = {
        "class": "logging.handlers.WatchedFileHandler",
        "filename": str(lines),
        "delay": True,
        "formatter": "lines",
    }
    for logger in ("prefect.flow_runs", "prefect.task_runs"):
        config["loggers"][logger]["handlers"].append("lines")
    return yaml.safe_dump(config)


def prefect_api(config: StackConfig, token: str) -> PrefectApi:
    return PrefectApi(f"{config.url(config.prefect_port)}/api", f"{USER}:{token}")


def _has_polled(worker: Daemon, api: PrefectApi) -> bool:
    """Tell if a Prefect worker has asked the server for work since the worker started."""
    began = worker.start_time()
    seen = [
        datetime.fromisoformat(w["last_heartbeat_time"]).timestamp()
        for w in api.workers()
        if w["name"] in worker.command and w["last_heartbeat_time"]
    ]
    return began is not None and any(s > began for s in seen)


def write_private_file(path: Path, text: str) -> None:
    """Write a text file that only its owner can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    temporary.replace(path)
