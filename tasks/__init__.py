"""Prefect tasks. Each wraps shardcore for one of Ray, MLflow and DVC. They need the extra `pipeline`."""

import sys
from importlib.util import find_spec


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # A folder called ray in the working directory is found too, without a file of its own.
    return spec is not None and spec.origin is not None


if _missing := [name for name in ("prefect", "ray", "mlflow", "dvc") if not _is_installed(name)]:
    _message = (
        f"flows and tasks need {', '.join(_missing)}, not installed here: "
        "pip install 'shardcore[pipeline]' (in a checkout: make setup)"
    )
    # While `python -m flows.STAGE` looks for its module, argv starts with "-m": a person gets a line.
    raise SystemExit(f"error: {_message}") if sys.argv[:1] == ["-m"] else ImportError(_message)
