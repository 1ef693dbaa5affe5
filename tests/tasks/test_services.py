import http.server
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import httpx
import psutil
import pytest
import requests

from shardcore.core.errors import ShardCoreError
from tasks import console, owned, services

ROOT = Path(__file__).parents[2]
NOWHERE = "127.0.0.1:9"
PROXIES = {
    name: f"http://{NOWHERE}"
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
}


class Page(http.server.BaseHTTPRequestHandler):
    """Answers with what it was sent."""

    def do_GET(self):
        status = {"/refused": 401}.get(self.path, 200)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(f"{self.headers.get('who')}".encode())

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_our_own_services_are_asked_without_a_proxy(page):
    with mock.patch.dict(os.environ, PROXIES):
        os.environ.pop("no_proxy", None)
        assert (
            services.http_request(f"{page}/", {"who": "me"}) == b"me"
            and services.http_request(f"{page}/", data=b"{}") == b"{}"
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            services.http_request(f"{page}/refused")
        with pytest.raises(OSError):
            services.http_request(f"http://{NOWHERE}/")


def test_what_speaks_no_http_is_an_oserror():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="does not speak HTTP"):
            services.http_request(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout_s=60)
        thread.join()


def test_clients_reach_this_machine_without_the_proxy_that_is_for_the_world(page):
    """Clients of Prefect, MLflow and Python each read their environment."""
    with mock.patch.dict(os.environ, PROXIES):
        for name in ("no_proxy", "NO_PROXY"):
            os.environ.pop(name, None)
        with pytest.raises(httpx.ConnectError):
            httpx.get(page)
        services.bypass_proxy(os.environ)
        assert httpx.get(page, headers={"who": "me"}).text == "me"
        assert requests.get(page, headers={"who": "me"}).text == "me"
        assert urllib.request.urlopen(page).read() == b"None"
        with pytest.raises(httpx.ConnectError):  # the world is still asked through it
            httpx.get("http://example.org")


@pytest.mark.parametrize(
    "env, hosts, found",
    [
        ({}, (), "127.0.0.1,localhost"),
        ({"NO_PROXY": "a"}, (), "a,127.0.0.1,localhost"),
        ({"no_proxy": "a, localhost", "NO_PROXY": "b"}, ("c", "a"), "a,localhost,127.0.0.1,c"),
        ({"no_proxy": "*"}, ("c",), "*"),
    ],
)
def test_what_was_excepted_from_the_proxy_stays_so(env, hosts, found):
    services.bypass_proxy(env, *hosts)
    assert env["no_proxy"] == found and env.get("NO_PROXY", "*") == found


def test_a_reserved_port_is_given_to_nobody_but_the_server_that_names_it():
    with services.reserve_port() as held:
        port = held.getsockname()[1]
        assert held.getsockname()[0] == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        if sys.platform == "linux" and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 3):
            with socket.socket() as other:  # one that asks for any port of which there is only this
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # IP_LOCAL_PORT_RANGE
                other.setsockopt(socket.IPPROTO_IP, 51, struct.pack("I", port | port << 16))
                with pytest.raises(OSError):
                    other.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
    with services.reserve_port("") as held:
        assert held.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "http://:80", "tcp://127.0.0.1:99999", f"http://{NOWHERE}/api", NOWHERE]
)
def test_an_address_that_does_not_answer_is_named(address):
    with pytest.raises(
        ShardCoreError,
        match=rf"^It \(OF_IT\) does not answer at {re.escape(address)}: .+; "
        r"start it, or unset",
    ):
        services.require_reachable(address, "It (OF_IT)")


def test_an_address_that_answers_is_good_whatever_its_form(page):
    for address in (page, f"{page}/api", page.removeprefix("http://"), page.replace("http", "ray")):
        services.require_reachable(address, "It")


@pytest.fixture
def in_project(tmp_path, monkeypatch):
    """A project's folder, in which flows print as ever (tests/tasks/test_console.py has them print to a
    person)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "start_program", lambda name: console.Program(None, None, sys.stderr))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "params.yaml").touch()
    with mock.patch.dict(os.environ):
        yield


def fails(error):
    def flow():
        raise error

    return flow


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ShardCoreError("no pool"), 1, "error: no pool\n"),
        (OSError("disk full"), 1, "error: disk full\n"),
        (
            httpx.ReadTimeout(""),
            1,
            "error: Prefect does not answer any more at None: ReadTimeout; "
            "what was finished is kept, and a rerun goes on from there\n",
        ),
        (KeyboardInterrupt(), 130, "stopped; what was finished is kept, and a rerun goes on from there\n"),
    ],
)
def test_a_flow_that_fails_says_why_in_one_line(in_project, capsys, error, code, message):
    with pytest.raises(SystemExit) as ended:
        services.run_flow(fails(error), needs_prefect=False)
    assert ended.value.code == code and capsys.readouterr().err == message


def test_a_flow_that_works_ends_well(in_project):
    ran = []
    services.run_flow(lambda: ran.append(os.environ["no_proxy"]), needs_prefect=False)
    assert ran == ["127.0.0.1,localhost"]


def test_a_flow_without_a_server_starts_again_with_one(in_project, monkeypatch):
    """It has the same command, and has done nothing before."""

    def became(program, command):
        raise SystemExit(command)

    monkeypatch.setattr(os, "execv", became)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "flows.measure"])
    with pytest.raises(SystemExit) as ended:
        services.run_flow(fails(AssertionError))
    assert ended.value.code == [
        sys.executable,
        "-m",
        "tasks.services",
        sys.executable,
        *"-X dev -m flows.measure".split(),
    ]


def test_what_a_flow_needs_is_looked_at_before_it_begins(in_project, tmp_path, capsys, monkeypatch):
    begun = []
    monkeypatch.setenv("PREFECT_API_URL", f"http://{NOWHERE}/api")
    with pytest.raises(SystemExit):
        services.run_flow(lambda: begun.append(1))
    assert (
        "error: Prefect (PREFECT_API_URL) does not answer at "
        f"http://{NOWHERE}/api: " in capsys.readouterr().err
    )
    (tmp_path / "params.yaml").unlink()
    with pytest.raises(SystemExit):
        services.run_flow(lambda: begun.append(1))
    assert (
        f"error: params.yaml is not in {tmp_path}: "
        "flows run in the project's folder" in capsys.readouterr().err
    )
    assert not begun


def test_a_flow_waits_for_a_server_that_still_starts(in_project, monkeypatch):
    """The server answers a while after the flow's imports."""
    begun = []
    with services.reserve_port() as held:
        port = held.getsockname()[1]
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
        monkeypatch.setenv("SHARDCORE_PREFECT_STARTS", "1")
        flow = threading.Thread(
            target=services.run_flow,
            args=(lambda: begun.append("flow"),),
            kwargs={"meanwhile": lambda: begun.append("meanwhile")},
        )
        flow.start()
        flow.join(0.5)
        assert flow.is_alive() and begun == ["meanwhile"]
        server = http.server.HTTPServer(("127.0.0.1", port), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flow.join(60)
        server.shutdown()
    assert begun == ["meanwhile", "flow"]


# --- commands with a server ---------------------------------------------------------------------------------


def with_server(*command, **env):
    """`python -m tasks.services`, its server one that is named."""
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.services", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PREFECT_API_URL": "http://there/api", **env},
    )


@pytest.mark.parametrize(
    "code, message",
    [
        ("sys.exit(3)", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL; what was finished is kept"),
    ],
)
def test_a_command_s_end_is_told(code, message):
    run = with_server(sys.executable, "-c", f"import os, signal, sys; {code}")
    _, error = run.communicate(timeout=60)
    assert run.returncode == (1 if message else 3) and message in error and error.count("\n") == bool(message)


def test_a_command_ends_with_its_run_that_is_asked_to():
    run = with_server(
        sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    )
    command = int(run.stdout.readline())
    run.terminate()
    assert run.wait(60) == 128 + signal.SIGTERM and not psutil.pid_exists(command)


def test_a_server_that_ends_before_its_command_is_told():
    with subprocess.Popen(["false"]) as server:
        with (
            owned.owned_run(),
            pytest.raises(ShardCoreError, match="^the Prefect server of this run ended with exit code 1; "),
        ):
            services._run_command(["sleep", "20"], server)
