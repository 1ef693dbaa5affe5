"""Services that flows need: checks that they answer, and a temporary Prefect server if there is none.

`python -m tasks.services COMMAND …` runs a command with a Prefect server: PREFECT_API_URL, or one that lives as long as
the command. The command is a separate process, as Prefect reads the address when it is imported, and sends its last
logs when it exits. It begins at once, and flows wait for the server (`run_flow`): their imports take as long as half of
its start. Everything that it starts ends with it (tasks.owned).
"""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse

import httpx
import psutil

from shardcore.core.errors import ShardCoreError
from tasks import console, owned, paths

LOOPBACK = ("127.0.0.1", "localhost")
_PATIENCE_S = 5.0
"""Longest wait for a connection to a service."""
_HEALTHY_S = 120.0
"""Longest time in which a Prefect server starts."""
_STARTS = "SHARDCORE_PREFECT_STARTS"
"""Environment variable of what may run before its Prefect server answers."""
_EMPTY_DATABASE = Path(sys.prefix, f"prefect-{version('prefect')}.db")
"""Database of Prefect without runs, with which temporary servers start. Making its tables takes a server up to 13 s."""
_LOOK_EVERY_S = 0.5
_LAST_WORDS_S = 4.0
"""Time in which an interrupted command may end."""


def bypass_proxy(env: MutableMapping[str, str], *hosts: str) -> None:
    """Set no_proxy so that clients reach this machine and `hosts` without a proxy.

    A proxy to other networks cannot reach our loopback.
    """
    given = env.get("no_proxy") or env.get("NO_PROXY") or ""
    known = [h.strip() for h in given.split(",") if h.strip()]
    if "*" not in known:
        env["no_proxy"] = env["NO_PROXY"] = ",".join(dict.fromkeys([*known, *LOOPBACK, *hosts]))


def http_request(
    url: str,
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
    timeout_s: float = 5.0,
    method: str | None = None,
) -> bytes:
    """Send an HTTP request to a service on this machine, without a proxy. Returns the body of the response.

    method: method of HTTP. None: GET, or POST if there are data. Raises OSError if the service refuses or is silent.
    """
    request = urllib.request.Request(url, data, dict(headers or {}), method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=timeout_s
        ) as answer:
            return answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url} does not speak HTTP: {error!r}") from None


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a socket to a free port of a host's address ("": all addresses), to reserve the port for a server.

    It does not listen. While it is open, the kernel gives the port to nobody who asks for any free port. A server that
    asks for this port gets it, as both use SO_REUSEADDR (on Linux).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def require_reachable(address: str, what: str) -> None:
    """Raise ShardCoreError unless a service accepts connections at an address. what: name of the service.

    address: "scheme://host:port/…" or "host:port".
    """
    url = urlparse(address if "://" in address else f"tcp://{address}")
    try:
        port = url.port or {"https": 443, "http": 80, "ray": 10001}.get(url.scheme)
        if not url.hostname or port is None:
            raise OSError("it needs a host and a port")
        socket.create_connection((url.hostname, port), timeout=_PATIENCE_S).close()
    except (OSError, ValueError) as error:
        raise ShardCoreError(
            f"{what} does not answer at {address}: {error}; start it, or unset the address to use a local one"
        ) from None


def make_empty_database() -> None:
    """Make the database with which temporary servers start, once for an installation (install.py).

    Without it each server makes its own. So it is left out where Prefect cannot make it.
    """
    with (
        suppress(OSError, subprocess.CalledProcessError),
        # In the same folder, so that the whole file gets its name at once.
        tempfile.TemporaryDirectory(dir=_EMPTY_DATABASE.parent) as folder,
    ):
        part = Path(folder, "prefect.db")
        subprocess.run(
            [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
            env={**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{part}"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        part.replace(_EMPTY_DATABASE)


@contextmanager
def temporary_prefect_server(wait: bool = True) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a Prefect server while the context lasts. Yields its API's URL and its process.

    wait: whether the context begins when it answers. If not, flows within wait for it.

    In an owned run it ends after the flows. Its database is removed with it. It asks for a password, which this process
    and those that it starts know.
    """
    held = reserve_port()
    port = held.getsockname()[1]
    url, user = f"http://127.0.0.1:{port}/api", f"shardcore:{secrets.token_urlsafe(32)}"
    client = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": user, _STARTS: "1"}
    folder = tempfile.mkdtemp(prefix="prefect-")
    with suppress(FileNotFoundError):
        shutil.copyfile(_EMPTY_DATABASE, f"{folder}/prefect.db")
    with owned.marking_servers():
        server = subprocess.Popen(
            [
                *(sys.executable, "-m"),
                *f"prefect server start --host 127.0.0.1 --port {port} --no-ui".split(),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PREFECT_SERVER_API_AUTH_STRING": user,
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
            },
            # A terminal's interrupt must not end it, as runs still report to it how they ended.
            start_new_session=True,
        )
    try:
        if wait:
            _wait_until_healthy(url, server)
        with owned.environment(client):
            yield url, server
    finally:
        held.close()
        # In an owned run the guardian ends it and removes its database, after the flows.
        if not os.environ.get(owned.RUN):
            # `poll` also reaps it.
            owned.end_processes(lambda: [psutil.Process(server.pid)] if server.poll() is None else [], 10.0)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_until_healthy(url: str, server: subprocess.Popen | None = None) -> None:
    """Wait until a Prefect server is healthy. server: its process, if started here; None otherwise."""
    deadline = time.monotonic() + _HEALTHY_S
    while time.monotonic() < deadline and (server is None or server.poll() is None):
        try:
            http_request(f"{url}/health", timeout_s=2.0)
            return
        except OSError:
            time.sleep(0.2)
    ended = (
        f"ended with exit code {server.returncode}"
        if server and server.returncode is not None
        else f"was not up within {_HEALTHY_S:.0f} s"
    )
    raise ShardCoreError(f"a Prefect server of our own at {url} {ended}; `prefect server start` shows why")


def unreachable_prefect_text(error: httpx.HTTPError) -> str:
    """Message that Prefect does not answer any more, with the error of its client."""
    return (
        f"Prefect does not answer any more at {os.environ.get('PREFECT_API_URL')}: "
        f"{str(error) or type(error).__name__}"
    )


def _drop_user_traceback(record: logging.LogRecord) -> bool:
    """Logging filter that reduces a ShardCoreError with traceback to its message."""
    if record.exc_info and isinstance(record.exc_info[1], ShardCoreError):
        record.msg, record.args, record.exc_info = "%s", (str(record.exc_info[1]),), None
    return True


def run_flow(
    flow: Callable[[], object], needs_prefect: bool = True, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Run a Prefect flow as a program. Exit code 0, or 1 with a one-line error.

    tasks.console describes what is printed. Everything that the flow starts ends with it. If it needs Prefect and there
    is no server, this process restarts itself under `python -m tasks.services`.

    meanwhile: work that needs no Prefect, done while a server starts.
    """
    program = console.Program(None, None, sys.stderr)
    try:
        if not paths.PARAMS.exists():
            raise ShardCoreError(f"{paths.PARAMS} is not in {os.getcwd()}: flows run in the project's folder")
        if console.is_relayed():
            owned.end_with_parent()
        elif needs_prefect and not os.environ.get("PREFECT_API_URL"):
            os.execv(
                sys.executable, [sys.executable, "-m", "tasks.services", sys.executable, *sys.orig_argv[1:]]
            )
        with owned.owned_run():
            bypass_proxy(os.environ)
            for name in ("prefect.flow_runs", "prefect.task_runs"):
                logging.getLogger(name).addFilter(_drop_user_traceback)
            # Prefect says in one line of its own that its server is away.
            logging.getLogger("websockets.client").setLevel(logging.CRITICAL)
            program = console.start_program(Path(sys.argv[0]).stem)
            if url := os.environ.get("PREFECT_API_URL"):
                if os.environ.get(_STARTS):
                    meanwhile()
                    _wait_until_healthy(url)
                require_reachable(url, "Prefect (PREFECT_API_URL)")
            flow()
        program.print_end()
    except KeyboardInterrupt:
        program.print_failure(f"stopped; {owned.GOES_ON}")
        raise SystemExit(130) from None
    except Exception as error:
        program.print_failure(f"error: {_one_line_error(error)}")
        raise SystemExit(1) from None


def _one_line_error(error: Exception) -> str:
    """Message of an error in one line. Prints the traceback of an unexpected error."""
    if isinstance(error, (ShardCoreError, OSError)):
        return str(error)
    if isinstance(error, httpx.HTTPError):
        return f"{unreachable_prefect_text(error)}; {owned.GOES_ON}"
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A signal that nohup ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if "MAKELEVEL" in os.environ:
        owned.end_with_parent()
    bypass_proxy(os.environ)
    try:
        with owned.owned_run():
            if os.environ.get("PREFECT_API_URL"):
                code = _run_command(sys.argv[1:])
            else:
                print("starting a Prefect server for as long as this runs", flush=True)
                with temporary_prefect_server(wait=False) as (_, server):
                    code = _run_command(sys.argv[1:], server)
    except (ShardCoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)


def _run_command(command: list[str], server: subprocess.Popen | None = None) -> int:
    """Run a command and return its exit code.

    A terminal interrupts the command, too. It then has some time to end.

    Raises ShardCoreError if it is killed, or if its server ends first.
    """
    process = subprocess.Popen(command)
    try:
        while (code := process.poll()) is None:
            if server and server.poll() is not None:
                raise ShardCoreError(f"the Prefect server of this run {_exit_text(server)}; {owned.GOES_ON}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        raise
    if code < 0:
        raise ShardCoreError(f"{' '.join(command)} {_exit_text(process)}; {owned.GOES_ON}")
    return code


def _exit_text(process: subprocess.Popen) -> str:
    """Text on how a process ended: by a signal, or with an exit code."""
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


if __name__ == "__main__":
    main()
