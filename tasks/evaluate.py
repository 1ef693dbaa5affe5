"""How good the cost models are on held-out samples, and the sharders on held-out problems."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger, task

from shardcore import files, model_report, sampling
from shardcore.cost import accuracy, neural, settle
from shardcore.search import SHARDERS, compare
from shardcore.search.budget import Budget
from shardcore.types import ShardCoreError

COMPARED = tuple(name for name in SHARDERS if name != "torchrec")
"""Where TorchRec is installed its planner is a sharder too, but takes seconds to minutes a problem: bench/search.py has it."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out problems to compare the sharders on, drawn as in sampling.ProblemConfig; budget_evals: of the searches."""

    problems: int = 6
    seed: int = 1
    devices: int = 4
    min_tables: int = 10
    max_tables: int = 60
    max_dim: int = 128
    budget_evals: int = 20_000

    def __post_init__(self) -> None:
        if self.problems < 1 or self.budget_evals < 1:
            raise ShardCoreError(f"evaluate config {self} needs at least 1 problem and 1 evaluation")


@task(task_run_name="evaluate-model")
def evaluate_model(folder: Path, measurements: Path, out: Path) -> dict[str, float]:
    """Accuracy on the test split of the measurements, and of the datasets that were joined to them in training: the metrics, and
    predictions.csv and predictions.png in `out`."""
    model = neural.load(folder)
    known = settle.read([measurements, *model.meta["provenance"].get("datasets", {})], model.setting)
    compute = [s for s in accuracy.held_out(known.compute) if s.error is None]
    if not compute:
        raise ShardCoreError(f"{measurements} holds no held-out samples for ({model.setting}); measure more")
    measured = np.array([s.total_ms for s in compute])
    predicted = accuracy.predict(model, compute)
    rows = [{"shards": len(s.request.shards), "measured_ms": round(float(m), 5), "predicted_ms": round(float(p), 5)}
            for s, m, p in zip(compute, measured, predicted, strict=True)]
    files.write_csv(out / "predictions.csv", rows)
    _write_figure(out / "predictions.png", model_report.predicted_against_measured(measured, predicted, "held-out groups"))
    return accuracy.evaluate(model, compute, accuracy.held_out(known.comm))


@task(task_run_name="compare-sharders")
def compare_sharders(folder: Path, pool_path: Path, config: EvaluateConfig, out: Path) -> dict[str, float]:
    """COMPARED sharders on the same held-out problems: sharders.csv in `out`, and per sharder the share of problems solved, the
    cost relative to the best of the others and the seconds, over the problems that all solved."""
    model, pool = neural.load(folder), files.read_pool(pool_path)
    shape = sampling.ProblemConfig(config.devices, config.min_tables, config.max_tables, config.max_dim)
    rows = []
    for i in range(config.problems):
        problem = sampling.problem(pool, i, model.setting, config.seed, shape)
        outcomes = [compare.run(name, problem, model, config.seed, Budget(evals=config.budget_evals)) for name in COMPARED]
        rows += [{"problem": problem.name, "tables": len(problem.tables), "algorithm": o.algorithm,
                  "total_ms": round(o.cost.total_ms, 5) if o.cost else "", "balance": round(compare.balance(o.cost), 4) if o.cost
                  else "", "seconds": round(o.seconds, 4)} for o in outcomes]
        get_run_logger().info("problem %d of %d: %s", i + 1, config.problems,
                              ", ".join(f"{o.algorithm} {o.cost.total_ms:.2f} ms" for o in outcomes if o.cost))
    files.write_csv(out / "sharders.csv", rows)
    return summary(rows)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat metrics of sharders.csv; costs are compared on the problems that all solved."""
    mine = {name: [r for r in rows if r["algorithm"] == name] for name in COMPARED}
    found = compare.standings({n: [None if r["total_ms"] == "" else r["total_ms"] for r in own] for n, own in mine.items()},
                              {n: [r["seconds"] for r in own] for n, own in mine.items()})
    metrics = {f"{name}_{key}": value for name, s in found.items()
               for key, value in (("solved", s.solved), ("seconds", s.seconds), ("relative_cost", s.cost))}
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


@task
def write_metrics(out: Path, accuracy: dict[str, float], sharders: dict[str, float]) -> None:
    files.write_json(out / "metrics.json", {"accuracy": accuracy, "sharders": sharders})


def _write_figure(path: Path, figure: Any) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    files.write_atomic(path, content.getvalue())
