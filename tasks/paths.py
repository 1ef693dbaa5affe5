"""Paths of the stages' results, relative to the project's folder, in which DVC runs every stage."""

from importlib.util import find_spec
from pathlib import Path

PARAMS = Path("params.yaml")
LOCK = Path("dvc.lock")
POOL = Path("data/pool.json")
MEASUREMENTS = Path("data/measurements")
DATASETS = Path("datasets")
TRACED = DATASETS / "jobs"
"""Dataset of the traced steps of running jobs."""
MODEL = Path("data/model")
POLICY = Path("data/policy")
EVALUATION = Path("data/evaluation")
REPLAYS = EVALUATION / "replays"
PROBLEMS = Path("problems")
JOBS = Path("data/jobs")


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it. Raises ImportError if it is not installed."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"{name} is not installed")
    return Path(spec.origin).parent
