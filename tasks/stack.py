"""`python -m tasks.stack up|run|down|status`: the long-lived services that flows need, on one machine.

The stack has a Prefect server with a worker and the deployments of prefect.yaml, an MLflow server, a Ray head
with its dashboard, and the watch, which publishes when the champion changes. One folder has data, logs and the
token. `. .stack/env.sh` makes a shell a client. `up` leaves them running and ends. `run` stays, restarts
services that die, and ends them all when it is ended. Containers and systemd use it (deploy/).
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil

from shardcore import report
from shardcore.core.errors import ShardCoreError
from tasks import lost_runs, owned, params, paths, processes
from tasks.stack_config import StackConfig, require_usable
from tasks.stack_services import (
    USER,
    Service,
    is_private_folder,
    prefect_api,
    ray_folder,
    read_token,
    stack_services,
    temporary_folder,
    write_private_file,
    write_service_files,
)

PATIENCE_S = 180.0
"""Longest time in which services start."""
_SUBMITTING_S = 30.0
"""Longest wait for flow runs that a killed worker was starting."""
_LOOK_EVERY_S = 2.0
"""Time between two checks for services that have died."""
_KEPT_SESSIONS = 3
"""Number of Ray's sessions whose logs are kept."""
_PRINT = partial(print, flush=True)


def start_stack(config: StackConfig, note: Callable[[str], None] = _PRINT) -> None:
    """Start all services of the stack and wait until they are healthy. note: receives each status line.

    Raises ShardCoreError if a port is taken or a service ends.
    """
    folder = Path(config.folder).resolve()
    require_usable(config, folder)
    owned.end_abandoned_runs()
    with _stack_lock(folder):
        began = time.monotonic()
        token = write_service_files(config, folder)
        stack = stack_services(config, folder, token)
        missing = [n for n, s in stack.items() if not s.daemon.runs_as_configured()]
        # If no service runs, nobody uses the temporary files.
        if len(missing) == len(stack):
            _empty_folder(temporary_folder(folder))
        for name in missing:
            _require_free_ports(stack[name], config)
        _remove_old_sessions(ray_folder(folder))
        for name in missing:
            if name in ("worker", "watch"):
                # Both fail without a Prefect server.
                _wait_until_healthy([stack["prefect"]], began)
            stack[name].daemon.start()
        _wait_until_healthy([stack["worker"]], began)
        api = prefect_api(config, token)
        for run in _find_lost_runs(stack, api, _SUBMITTING_S):
            if lost_runs.crash_lost_run(api, run):
                note(f"ended {run}")
        if _deploy_if_changed(config, folder, stack["worker"].daemon.env):
            lost_runs.limit_concurrent_runs(api)
        _wait_until_healthy(stack.values(), began, note)


def run_stack(config: StackConfig, note: Callable[[str], None] = _PRINT) -> None:
    """Start all services of the stack, restart services that die, and end all when this process ends.

    What cannot be started again, as on a busy machine, is tried again.
    note: receives each status line. Returns after `make down` has ended them.

    Raises ShardCoreError as `start_stack` does at first. A stack of another configuration then goes on running.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = Path(config.folder).resolve()
    # Checked before `try`, as it is not this process's to end.
    require_usable(config, folder)
    for service in stack_services(config, folder, read_token(folder)).values():
        service.daemon.runs_as_configured()
    try:
        start_stack(config, note)
        stack = stack_services(config, folder, read_token(folder))
        while True:
            time.sleep(_LOOK_EVERY_S)
            gone = {name: s.daemon.has_died() for name, s in stack.items() if s.daemon.process() is None}
            # A service that was stopped has no id any more, so it has not died.
            if not all(gone.values()):
                return
            if gone:
                note(f"died, and are started again: {', '.join(gone)}")
                try:
                    start_stack(config, note)
                except ShardCoreError as error:  # what has not started has died, so the next look finds it
                    note(f"{error}; it is tried again")
    finally:
        stop_stack(config)


def stop_stack(config: StackConfig) -> None:
    """End all services of the stack, and its worker's flow runs."""
    folder = Path(config.folder).resolve()
    if folder.exists():
        with _stack_lock(folder):
            for service in reversed(stack_services(config, folder, "").values()):
                service.daemon.stop()
            if is_private_folder(ray_folder(folder).parent):
                _empty_folder(temporary_folder(folder))


def stack_status(config: StackConfig) -> tuple[str, bool]:
    """Status text of the stack's services, and whether all are healthy."""
    folder = Path(config.folder).resolve()
    token = read_token(folder)
    rows, ends, healthy = [], [], True
    stack = stack_services(config, folder, token)
    for name, service in stack.items():
        state, process = service.state(), service.daemon.process()
        healthy = healthy and state == "healthy"
        began = service.daemon.start_time()
        since = datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M:%S") if began else "-"
        rows.append(
            (
                name,
                state,
                since,
                process.pid if process else "-",
                service.page or "-",
                _shown_path(service.daemon.log_path),
            )
        )
        if state in ("died", "silent"):
            ends += [f"\n{name}: {state}; the last lines of {_shown_path(service.daemon.log_path)}:"]
            ends += [f"  {line[:200]}" for line in service.daemon.last_log_lines(8)]
    ends += [f"\nstuck: {run}; make up ends it" for run in _find_lost_runs(stack, prefect_api(config, token))]
    text = report.text_table(("service", "state", "since", "process", "page", "log"), rows)
    where = {
        "clients": f". {_shown_path(folder / 'env.sh')}",
        "login": f"{USER}, with the password in {_shown_path(folder / 'token')}; Ray's page asks for that alone",
        "metrics": f"{config.url(config.metrics_port)}/metrics",
        "flows' logs": _shown_path(folder / "logs" / "flows.jsonl"),
        "Ray's logs": _shown_path(ray_folder(folder) / "session_latest" / "logs"),
    }
    return "\n".join([text, *ends, "", *(f"{k:<12} {v}" for k, v in where.items() if token)]), healthy


def _empty_folder(folder: Path) -> None:
    """Delete the content of a folder, if the folder exists."""
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True, mode=0o700)


def _remove_old_sessions(ray: Path) -> None:
    """Delete folders of Ray's sessions, except the last few."""
    # Names sort by time, and a clock may have been ahead: Ray's link names the last one.
    others = set(ray.glob("session_2*")) - {(ray / "session_latest").resolve()}
    for session in sorted(others)[: 1 - _KEPT_SESSIONS]:
        shutil.rmtree(session, ignore_errors=True)


def _require_free_ports(service: Service, config: StackConfig) -> None:
    """End processes that a killed service left, and require the service's ports to be free."""
    if service.ports:
        owned.end_processes(service.daemon.leftover_processes, 5.0)
    for name, port in service.ports.items():
        _require_free_port(config.host, port, name, 10.0 if service.daemon.has_died() else 0.0)


def _wait_until_healthy(
    stack: Iterable[Service], began: float, note: Callable[[str], None] = lambda line: None
) -> None:
    """Wait until services are healthy. Raises ShardCoreError if a service ends, or takes longer than PATIENCE_S."""
    waiting = list(stack)
    while waiting:
        for service in list(waiting):
            state, name = service.state(), service.daemon.name
            if state == "healthy":
                waiting.remove(service)
                note(f"{name}: healthy {service.page}".rstrip() + f" after {time.monotonic() - began:.0f} s")
            elif state != "silent" or time.monotonic() - began > PATIENCE_S:
                how = "ended" if state != "silent" else f"runs but does not answer after {PATIENCE_S:.0f} s"
                last = " ".join(service.daemon.last_log_lines(1))[:200]
                raise ShardCoreError(
                    f"{name} {how}; {_shown_path(service.daemon.log_path)} ends with: {last}"
                )
        time.sleep(0.2)


def _find_lost_runs(
    stack: dict[str, Service], api: lost_runs.PrefectApi, patience_s: float = 0.0
) -> list[lost_runs.LostRun]:
    """Flow runs that an ended worker of the stack has left. [] if Prefect does not answer."""
    began = stack["worker"].daemon.start_time()
    try:
        return lost_runs.find_lost_runs(api, math.inf if began is None else began, patience_s)
    except (OSError, ValueError):
        return []


def _deploy_if_changed(config: StackConfig, folder: Path, env: dict[str, str]) -> bool:
    """Deploy prefect.yaml if the file, the flows or the database have changed since the last deployment.

    Returns True if it deployed.

    Deploying each time would switch off a schedule that was switched on in Prefect's page.
    """
    file = Path("prefect.yaml")
    if not file.exists():
        raise ShardCoreError(
            f"prefect.yaml is not in {os.getcwd()}: the stack is started in the project's folder"
        )
    sources = [path.read_text() for path in (file, *sorted(Path("flows").glob("*.py")))]
    version = hashlib.sha256("\n".join([config.prefect_database, os.getcwd(), *sources]).encode()).hexdigest()
    if (known := folder / "deployed").exists() and known.read_text() == version:
        return False
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    (folder / "logs" / "deploy.log").write_text(done.stdout)
    if done.returncode:
        last = " ".join(done.stdout.split())[-200:]
        raise ShardCoreError(
            f"prefect.yaml cannot be deployed; {_shown_path(folder / 'logs' / 'deploy.log')} ends with: {last}"
        )
    write_private_file(known, version)
    return True


def _require_free_port(host: str, port: int, name: str, patience_s: float) -> None:
    # What a killed Ray has left ends by itself after some time.
    until = time.monotonic() + patience_s
    while True:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return s.bind((host, port))
            except OSError as error:
                reason = error.strerror
        if time.monotonic() > until:
            raise ShardCoreError(
                f"port {port} (stack.{name} in {paths.PARAMS}) cannot be used at {host}: "
                f"{reason}{_port_holder_text(port)}; end that, or choose another port"
            )
        time.sleep(0.2)


def _port_holder_text(port: int) -> str:
    """Text that names the process listening at a port, for an error message. "" if unknown."""
    with suppress(psutil.Error):
        for c in psutil.net_connections("tcp"):
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid:
                return f", held by process {c.pid} ({' '.join(psutil.Process(c.pid).cmdline())[:80].strip()})"
    return ""


@contextmanager
def _stack_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the stack's folder, so that one command at a time changes the stack."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with processes.exclusive_lock(folder / "lock"):
        yield


def _shown_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def show_status(config: StackConfig) -> None:
    """Print the status of the stack. Exit code 0 if all services are healthy, else 1."""
    text, healthy = stack_status(config)
    print(text, flush=True)
    raise SystemExit(0 if healthy else 1)


COMMANDS = {"up": start_stack, "run": run_stack, "down": stop_stack, "status": show_status}


def main() -> None:
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command not in COMMANDS:
        raise SystemExit(f"usage: python -m tasks.stack {'|'.join(COMMANDS)}")
    try:
        COMMANDS[command](params.read_section("stack", StackConfig))
    except BrokenPipeError:
        # The reader has what it wanted. Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None  # a shell's exit code for SIGPIPE
    except (ShardCoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
