"""MLflow in a folder: its database is made once for all tests of a process, and copied, for making one takes
a second."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import mlflow


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_registered_models()
        return Path(folder, "mlflow.db").read_bytes()


@contextlib.contextmanager
def tracked(folder: Path) -> Iterator[Path]:
    """The folder is the current one, and keeps what MLflow is given."""
    (folder / "mlflow.db").write_bytes(_empty_database())
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db"),
    ):
        yield folder
