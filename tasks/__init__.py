"""Prefect tasks, which run shardcore on Ray, MLflow and DVC. They need the extra `pipeline`."""

import sys
from importlib.util import find_spec


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # A mere folder named ray in the working directory is found, too. It has no origin.
    return spec is not None and spec.origin is not None


if _missing := [name for name in ("prefect", "ray", "mlflow", "dvc") if not _is_installed(name)]:
    _message = (
        f"flows and tasks need {', '.join(_missing)}, not installed here: "
        "pip install 'shardcore[measure,pipeline]' (in a checkout: make setup)"
    )
    # argv begins with "-m" while `python -m flows.STAGE` imports its package. A person then gets one line.
    raise SystemExit(f"error: {_message}") if sys.argv[:1] == ["-m"] else ImportError(_message)
