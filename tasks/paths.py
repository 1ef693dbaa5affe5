"""Paths of the stages' results, relative to the project's folder. DVC runs every stage there."""

from pathlib import Path

PARAMS = Path("params.yaml")
LOCK = Path("dvc.lock")
POOL = Path("data/pool.json")
MEASUREMENTS = Path("data/measurements")
DATASETS = Path("datasets")
MODEL = Path("data/model")
POLICY = Path("data/policy")
EVALUATION = Path("data/evaluation")
REPLAYS = EVALUATION / "replays"
PROBLEMS = Path("problems")
