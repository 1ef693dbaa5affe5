"""The stack on PostgreSQL: a server made for this, with passwords; a stack whose Prefect and MLflow are on
it; and a publish.

Measures, trains and promotes at toy size, then publishes through the deployment, in a scratch folder that is
removed at the end. Afterwards both databases must hold what was done, and the stack's folder no database of
Prefect's or MLflow's. Needs initdb and postgres (Debian: postgresql) and psycopg2; started by root,
PostgreSQL runs as the user postgres. About 2 minutes on 2 cores.

    python -m bench.postgres
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.toy_stack import toy_stack
from tasks import services

USER, PASSWORD = "shardcore", "correct-horse"


def program(name: str) -> str:
    found = shutil.which(name) or next(
        map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None
    )
    return found or sys.exit(f"{name} is not installed; Debian has it in the package postgresql")


@contextmanager
def postgres(folder: Path, port: int) -> Iterator[None]:
    """A running server with a database for each of the two."""
    folder.mkdir()
    (folder / "password").write_text(PASSWORD)
    who = []
    if os.getuid() == 0:
        who = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        for path in (folder, folder / "password"):
            shutil.chown(path, "postgres")
    subprocess.run(
        [
            *who,
            program("initdb"),
            "--pgdata",
            str(folder / "data"),
            "--username",
            USER,
            "--pwfile",
            str(folder / "password"),
            "--auth",
            "scram-sha-256",
            "--no-sync",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    command = [
        *who,
        program("postgres"),
        "-D",
        str(folder / "data"),
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-k",
        "",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        make_databases(port)
        yield
    finally:
        server.terminate()
        server.wait()


def make_databases(port: int) -> None:
    import psycopg2

    for _ in range(100):
        try:
            connection = psycopg2.connect(
                host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname="postgres"
            )
            break
        except psycopg2.OperationalError:
            time.sleep(0.2)
    else:
        sys.exit("PostgreSQL does not answer")
    connection.autocommit = True
    for name in ("prefect", "mlflow"):
        connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()


def count(port: int, database: str, query: str) -> int:
    import psycopg2

    with psycopg2.connect(
        host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname=database
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(query)
        return cursor.fetchone()[0]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pg-") as scratch, services.reserve_port() as held:
        folder, port = Path(scratch), held.getsockname()[1]
        folder.chmod(0o755)  # PostgreSQL may run as another user
        (folder / "pgpass").write_text(f"127.0.0.1:{port}:*:{USER}:{PASSWORD}\n")
        (folder / "pgpass").chmod(0o600)
        address = f"{USER}@127.0.0.1:{port}"
        urls = {
            "prefect_database": f"postgresql+asyncpg://{address}/prefect",
            "mlflow_database": f"postgresql+psycopg2://{address}/mlflow",
        }
        with (
            postgres(folder / "postgres", port),
            toy_stack({"PGPASSFILE": str(folder / "pgpass")}, **urls) as stack,
        ):
            stack.promote_a_model()
            stack.run("prefect", "deployment", "run", "publish/local", "--watch")
            [plan] = [p.name for p in (stack.project / "plans").iterdir() if p.is_dir()]
            runs = count(port, "prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'")
            versions = count(port, "mlflow", "SELECT count(*) FROM model_versions")
            print(
                f"\n{plan} is published; PostgreSQL holds {runs} completed flow runs and {versions} "
                "model version"
            )
            strays = [
                p for p in (stack.project / stack.config.folder).rglob("*.db") if p.name != "mlflow-auth.db"
            ]
            if runs < 4 or versions != 1 or strays:
                sys.exit(
                    "expected 4 runs or more, 1 version, and no database in the stack's folder, "
                    f"where there is {strays}"
                )


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m bench.postgres",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    main()
