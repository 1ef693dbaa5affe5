"""The stack on PostgreSQL: a server made for this, with passwords; a stack whose Prefect and MLflow are on it; and a publish.

Measures, trains and promotes at toy size, then publishes through the deployment, in a scratch folder that is removed at the end.
Afterwards both databases must hold what was done, and the stack's folder no database of Prefect's or MLflow's. Needs initdb and
postgres (Debian: postgresql) and psycopg2; started by root, PostgreSQL runs as the user postgres. About 2 minutes on 2 cores.

  python bench/postgres.py
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import yaml

from shardcore import report
from tasks.stack import StackConfig

ROOT = Path(__file__).parents[1]
USER, PASSWORD = "shardcore", "correct-horse"
PARAMS = {
    "setting": {"batch": 64},
    "tables": {"tables": 40},
    "measure": {"compute_samples": 120, "comm_samples": 24, "max_shards": 6, "arena_bytes": 1 << 28, "min_repeats": 3,
                "max_repeats": 3, "comm_repeats": 3},
    "train": {"epochs": 8, "learning_curve": False},
    "publish": {"budget_evals": 200},
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def program(name: str) -> str:
    found = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None)
    return found or sys.exit(f"{name} is not installed; Debian has it in the package postgresql")


def postgres(folder: Path, port: int) -> subprocess.Popen:
    """A running server with a database for each of the two."""
    import psycopg2

    folder.mkdir()
    (folder / "password").write_text(PASSWORD)
    who = []
    if os.getuid() == 0:
        who = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        for path in (folder, folder / "password"):
            shutil.chown(path, "postgres")
    subprocess.run([*who, program("initdb"), "--pgdata", str(folder / "data"), "--username", USER, "--pwfile",
                    str(folder / "password"), "--auth", "scram-sha-256", "--no-sync"], check=True, stdout=subprocess.DEVNULL)
    command = [*who, program("postgres"), "-D", str(folder / "data"), "-h", "127.0.0.1", "-p", str(port), "-k", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        try:
            connection = psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname="postgres")
            break
        except psycopg2.OperationalError:
            time.sleep(0.2)
    else:
        sys.exit("PostgreSQL does not answer")
    connection.autocommit = True
    for name in ("prefect", "mlflow"):
        connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return server


def count(port: int, database: str, query: str) -> int:
    import psycopg2

    with psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname=database) as connection:
        cursor = connection.cursor()
        cursor.execute(query)
        return cursor.fetchone()[0]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that all of it ends
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="pg-")))
        folder.chmod(0o755)  # PostgreSQL may run as another user
        port = free_port()
        server = postgres(folder / "postgres", port)
        at_end.callback(lambda: (server.terminate(), server.wait()))
        project = folder / "project"
        shutil.copytree(ROOT / "flows", project / "flows")
        shutil.copy(ROOT / "prefect.yaml", project)
        ports = {f"{name}_port": free_port() for name in ("prefect", "mlflow", "ray", "ray_client", "dashboard", "metrics")}
        address = f"{USER}@127.0.0.1:{port}"
        stack = {**ports, "prefect_database": f"postgresql+asyncpg://{address}/prefect",
                 "mlflow_database": f"postgresql+psycopg2://{address}/mlflow"}
        (project / "params.yaml").write_text(yaml.safe_dump({**PARAMS, "stack": stack}))
        (project / "pgpass").write_text(f"127.0.0.1:{port}:*:{USER}:{PASSWORD}\n")
        (project / "pgpass").chmod(0o600)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
        env |= {"PYTHONPATH": str(ROOT), "PGPASSFILE": str(project / "pgpass"), "PYTHONWARNINGS": "ignore"}
        rows = []

        def run(*command: str, client: bool = True) -> str:
            line = ["sh", "-c", f'{f". {StackConfig().folder}/env.sh; " if client else ""}exec "$@"', "sh", sys.executable, "-m",
                    *command]
            began = time.monotonic()
            done = subprocess.run(line, cwd=project, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            rows.append((" ".join(command), f"{time.monotonic() - began:.1f}"))
            if done.returncode:
                sys.exit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")
            return done.stdout

        at_end.callback(lambda: subprocess.run([sys.executable, "-m", "tasks.stack", "down"], cwd=project, env=env))
        run("tasks.stack", "up", client=False)
        run("flows.tables")
        run("shardcore", "problem", "data/pool.json", "--draw", "0", "--batch", "64", "--devices", "2", "--max-dim", "32",
            "--out", "problems/draw-0.json")
        for stage in ("measure", "train", "promote"):
            run(f"flows.{stage}")
        run("prefect", "deployment", "run", "publish/local", "--watch")
        [plan] = [p.name for p in (project / "plans").iterdir() if p.is_dir()]
        print(report.text_table(("command", "seconds"), rows))
        runs = count(port, "prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'")
        versions = count(port, "mlflow", "SELECT count(*) FROM model_versions")
        print(f"\n{plan} is published; PostgreSQL holds {runs} completed flow runs and {versions} model version")
        strays = [p for p in (project / ".stack").rglob("*.db") if p.name not in ("mlflow-auth.db",)]
        if runs < 4 or versions != 1 or strays:
            sys.exit(f"expected 4 runs or more, 1 version, and no database in the stack's folder, where there is {strays}")


if __name__ == "__main__":
    main()
