"""Scratch copies of the project, services that can be killed, and what the tests of flows do with both."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from shardcore.core.jit import copy_compiled_code
from shardcore.io import dataset
from tasks import services

ROOT = Path(__file__).parents[2]
TOY = {
    "setting": {"hardware": "auto", "batch": 64},
    "tables": {"tables": 40},
    "measure": {
        "compute_samples": 120,
        "comm_samples": 24,
        "chunk": 10,
        "kernels": {"arena_bytes": 1 << 28, "min_repeats": 3, "max_repeats": 3},
        "groups": {"max_shards": 6},
        "exchanges": {"repeats": 3},
        "step_samples": 0,
        "steps": {"repeats": 3},
    },
    "train": {"epochs": 8, "learning_curve": False},
    "train_policy": {"algorithm": None},
    "evaluate": {
        "problems": 2,
        "min_tables": 5,
        "max_tables": 8,
        "budget_evals": 200,
        "replay_problems": 0,
        "replay_repeats": 3,
    },
    "publish": {"budget_evals": 200, "torchrec_s": 0.0},
}


def until(condition: Callable[[], object], timeout_s: float = 300, every_s: float = 0.1) -> object:
    """Wait for what is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(every_s)
    return found


def kill_group(process: subprocess.Popen) -> None:
    """SIGKILL for a process that leads a session, and all that it started there."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@dataclass
class Server:
    """A service on a port that stays its own; tests kill it and start it again on the same data. A context
    manager."""

    command: list[str]
    folder: Path
    env: dict[str, str]
    held: socket.socket
    health: str
    process: subprocess.Popen | None = None

    @classmethod
    def of_prefect(cls, folder: Path) -> Server:
        held = services.reserve_port()
        command = ["prefect", "server", "start", "--port", str(held.getsockname()[1]), "--no-ui"]
        return cls(command, folder, {"PREFECT_HOME": str(folder)}, held, "/api/health")

    @classmethod
    def of_mlflow(cls, folder: Path) -> Server:
        held = services.reserve_port()
        command = (
            f"mlflow server --port {held.getsockname()[1]} --workers 1 --backend-store-uri "
            f"sqlite:///{folder}/mlflow.db --artifacts-destination {folder / 'artifacts'}"
        ).split()
        return cls(command, folder, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, held, "/health")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.held.getsockname()[1]}"

    def start(self) -> None:
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                cwd=self.folder,
                start_new_session=True,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until(self._healthy, timeout_s=240)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        try:
            return bool(services.http_request(self.url + self.health, timeout_s=2))
        except OSError:
            return False

    def kill(self) -> None:
        kill_group(self.process)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.held.close()


def timings(project: Project) -> set[tuple[str, float]]:
    """Id and time of each of a project's compute samples."""
    return {(s.id, s.measured_at) for s in dataset.read_compute_timings(project.folder / "data/measurements")}


@dataclass(frozen=True)
class Run:
    """A command of a project under way, its output in a file."""

    process: subprocess.Popen
    output: Path

    def log(self) -> str:
        return with_logs(self.output.read_text(), self.output.parent)

    def error(self) -> str:
        """The one line with which it failed, without a traceback."""
        return one_error(self.process.returncode, self.log())


def with_logs(message: str, folder: Path) -> str:
    """Output of commands in a project's folder, with the log files that it names (see tasks.console)."""
    return "\n".join(
        [message, *((folder / log).read_text() for log in re.findall(r" goes to (logs/\S+)", message))]
    )


def one_error(code: int, log: str) -> str:
    assert code == 1 and "Traceback" not in log, log
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, log
    return lines[0]


@dataclass(frozen=True)
class Project:
    """A scratch project; every command runs in its folder, with its own MLflow store."""

    folder: Path
    env: dict[str, str]

    def run(
        self, *command: str, check: bool = True, timeout: float = 900, **env: str
    ) -> subprocess.CompletedProcess:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env={**self.env, **env},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as late:
            shown = with_logs((late.stdout or b"").decode(), self.folder)
            raise AssertionError(f"{command} still runs after {timeout} s:\n{shown[-4000:]}") from late
        assert not check or done.returncode == 0, done.stdout[-4000:]
        return done

    def error_of(self, *command: str, **options: object) -> str:
        """The one line with which a command fails, without a traceback."""
        done = self.run(*command, check=False, **options)
        return one_error(done.returncode, done.stdout)

    @contextmanager
    def started(self, *command: str, **env: str) -> Iterator[Run]:
        """A command that runs meanwhile; what it leaves running ends with the context."""
        output = self.folder / f"{time.time_ns()}.log"
        with open(output, "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env={**self.env, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Run(process, output)
        finally:
            kill_group(process)

    def set_params(self, section: str, **values) -> None:
        path = self.folder / "params.yaml"
        params = yaml.safe_load(path.read_text())
        params[section] = {**(params.get(section) or {}), **values}
        path.write_text(yaml.safe_dump(params))

    def edit(self, path: str) -> None:
        """A comment-only edit."""
        with open(self.folder / path, "a") as f:
            f.write("# a comment\n")

    def mlflow(self):
        import mlflow

        return mlflow.MlflowClient(
            tracking_uri=self.env["MLFLOW_TRACKING_URI"], registry_uri=self.env["MLFLOW_TRACKING_URI"]
        )


def copy_project(folder: Path, api: str, home: Path) -> Project:
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("datasets/", "docs/", "tests/", "dvc.lock")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    copy_compiled_code(ROOT / "shardcore", folder / "shardcore")  # or each project compiles for half a minute
    (folder / "datasets").mkdir()
    for path in (folder / "problems").glob("*.json"):
        path.unlink()
    (folder / "params.yaml").write_text(yaml.safe_dump(TOY))
    env = {
        **os.environ,
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home),
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    env.pop("RAY_ADDRESS", None)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "scratch"]):
        subprocess.run([*git, *command], cwd=folder, check=True, env=env)
    return Project(folder, env)
