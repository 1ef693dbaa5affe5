"""A scratch copy of the project with toy parameters, built once through the same commands that a user gives.

Only one file uses the fixture `project`: files are what the suite's workers share out, and each would build its own.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tasks import services

ROOT = Path(__file__).parents[2]
TOY = {
    "setting": {"hardware": "auto", "batch": 64},
    "tables": {"tables": 40},
    "measure": {"compute_samples": 120, "comm_samples": 24, "chunk": 10, "max_shards": 6, "arena_bytes": 1 << 28,
                "min_repeats": 3, "max_repeats": 3, "comm_repeats": 3},
    "train": {"epochs": 8, "learning_curve": False},
    "evaluate": {"problems": 2, "min_tables": 5, "max_tables": 8, "budget_evals": 200},
    "publish": {"budget_evals": 200},
}


@dataclass(frozen=True)
class Project:
    """A scratch project; every command runs in its folder, with its own MLflow store."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, check: bool = True, timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
        done = subprocess.run([sys.executable, "-m", *command], cwd=self.folder, env={**self.env, **env}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
        assert not check or done.returncode == 0, done.stdout[-4000:]
        return done

    def error_of(self, *command: str, **options: object) -> str:
        """The one line with which a command fails, without a traceback."""
        done = self.run(*command, check=False, **options)
        assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
        lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, done.stdout
        return lines[0]

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

        return mlflow.MlflowClient(tracking_uri=self.env["MLFLOW_TRACKING_URI"], registry_uri=self.env["MLFLOW_TRACKING_URI"])


def copy_project(folder: Path, api: str, home: Path) -> Project:
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("datasets/", "docs/", "tests/", "dvc.lock")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for compiled in (ROOT / "shardcore").glob("**/__pycache__/*.nb?"):  # what numba made, or each project compiles for itself
        target = folder / compiled.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, target)
    (folder / "datasets").mkdir()
    for path in (folder / "problems").glob("*.json"):
        path.unlink()
    (folder / "params.yaml").write_text(yaml.safe_dump(TOY))
    env = {**os.environ, "PREFECT_API_URL": api, "PREFECT_HOME": str(home), "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(folder),
           "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "GIT_CONFIG_GLOBAL": "/dev/null",
           "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("RAY_ADDRESS", None)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "scratch"]):
        subprocess.run([*git, *command], cwd=folder, check=True, env=env)
    return Project(folder, env)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory):
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_api(prefect_home):
    os.environ["PREFECT_HOME"] = str(prefect_home)
    with services.prefect_server() as url:
        yield url


@pytest.fixture(scope="session")
def new_project(tmp_path_factory, prefect_api, prefect_home):
    """Makes scratch projects in which nothing was run yet."""
    return lambda: copy_project(tmp_path_factory.mktemp("project"), prefect_api, prefect_home)


@pytest.fixture(scope="session")
def project(new_project):
    """A project with two problems, refreshed once; `log` in its folder holds what that printed."""
    made = new_project()
    made.run("flows.tables")
    for i in range(2):
        made.run("shardcore", "problem", "data/pool.json", "--draw", str(i), "--batch", "64", "--devices", "2",
                 "--max-dim", "32", "--out", f"problems/draw-{i}.json")
    (made.folder / "log").write_text(made.run("flows.refresh").stdout)
    return made
