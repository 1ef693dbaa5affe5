"""MLflow in a folder. What takes it long, and is no promise of ours, is done once for all tests of a process."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import httpx
import mlflow
import prefect.artifacts
from mlflow.store.db import utils

log_model, newest_schema = mlflow.pyfunc.log_model, cache(utils._get_latest_schema_revision)


EMPTY = Path(__file__).parent / f"__pycache__/mlflow-{mlflow.__version__}.db"


@cache
def empty_database() -> bytes:
    """A database without a run. MLflow takes seconds to make one, in 50 migrations: it is kept for other processes."""
    EMPTY.parent.mkdir(exist_ok=True)
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that one of several workers makes it
        if not EMPTY.exists():
            with tempfile.TemporaryDirectory(dir=EMPTY.parent) as folder:
                mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_registered_models()
                Path(folder, "mlflow.db").rename(EMPTY)
        return EMPTY.read_bytes()


def without_code(**options):
    """`mlflow.pyfunc.log_model` without the package's 300 files, which only a server of the model needs."""
    return log_model(**{**options, "code_paths": None})


@contextlib.contextmanager
def quick_mlflow() -> Iterator[None]:
    """MLflow keeps models without code, and reads its 50 migrations once instead of for each database."""
    with (
        mock.patch.object(mlflow.pyfunc, "log_model", without_code),
        mock.patch.object(utils, "_get_latest_schema_revision", newest_schema),
    ):
        yield


@contextlib.contextmanager
def tracked(folder: Path, code: bool = False) -> Iterator[Path]:
    """The folder is the current one, and keeps what MLflow is given.

    code: models come with the package's code, as they do without tests.
    """
    (folder / "mlflow.db").write_bytes(empty_database())
    with (
        contextlib.nullcontext() if code else quick_mlflow(),
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db"),
    ):
        yield folder


def no_pages() -> contextlib.AbstractContextManager:
    """Prefect does not answer, which its own client takes 1.5 s to find out."""
    away = httpx.ConnectError("no server")
    return mock.patch.object(prefect.artifacts, "create_markdown_artifact", side_effect=away)
