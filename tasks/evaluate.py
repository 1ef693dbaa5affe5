"""How good the cost models are on held-out samples, the sharders on held-out problems, and both where plans
run."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger, task

from shardcore import files
from shardcore.cost import accuracy, drift_correction, neural, replay_metrics, replay_records
from shardcore.draws import MOST_DRAWS
from shardcore.draws.problems import ProblemConfig, draw_problem
from shardcore.errors import ShardCoreError
from shardcore.limits import MOST_COUNT, MOST_REPEATS, MOST_SEED, require_within
from shardcore.measure.replay import ReplayConfig
from shardcore.report import model_report
from shardcore.samples import dataset, replays
from shardcore.search import SHARDERS, compare
from shardcore.search.budget import Budget
from shardcore.types import Problem, Setting, Table
from tasks import console
from tasks.measure import cluster_setting
from tasks.replay import EachProblem, Run, devices_of_a_host, replaying
from tasks.setting import SettingConfig

COMPARED = tuple(name for name in SHARDERS if name != "torchrec")
"""Where TorchRec is installed its planner is a sharder too, but takes up to minutes a problem:
bench/search.py has it."""
ARENA_BYTES = 512 << 20
"""Weights of a rank that replays: what problems have of larger tables is left out there."""
MOST_TABLES = 24
"""Of a problem that is replayed: each plan of it runs replay_repeats times."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out problems to compare the sharders on, drawn as in ProblemConfig; budget_evals: of the searches.
    replay_problems: whose plans also run, on at most `devices` devices of a host (0: none); replay_repeats:
    steps of each."""

    problems: int = 6
    seed: int = 1
    devices: int = 4
    min_tables: int = 10
    max_tables: int = 60
    max_dim: int = 128
    budget_evals: int = 20_000
    replay_problems: int = 5
    replay_repeats: int = 20

    def __post_init__(self) -> None:
        require_within(self, "evaluate config", problems=(1, MOST_DRAWS), budget_evals=(1, MOST_COUNT),
                       replay_problems=(0, MOST_DRAWS), replay_repeats=(1, MOST_REPEATS), seed=(0, MOST_SEED))
        self.shape()

    def shape(self) -> ProblemConfig:
        return ProblemConfig(self.devices, self.min_tables, self.max_tables, self.max_dim)


@task(task_run_name="evaluate-model")
def evaluate_model(folder: Path, measurements: Path, out: Path) -> dict[str, float]:
    """Accuracy on the test split of the measurements, and of the datasets that were joined to them in
    training: the metrics, and predictions.csv and predictions.png in `out`."""
    model = neural.load(folder)
    known = drift_correction.read([measurements, *model.meta["provenance"].get("datasets", {})],
                                  model.setting)
    compute = [s for s in accuracy.held_out(known.compute) if s.error is None]
    if not compute:
        raise ShardCoreError(f"{measurements} holds no held-out samples for ({model.setting}); measure more")
    measured = np.array([s.total_ms for s in compute])
    predicted = accuracy.predict(model, compute)
    rows = [{"shards": len(s.request.shards), "measured_ms": round(float(m), 5),
             "predicted_ms": round(float(p), 5)}
            for s, m, p in zip(compute, measured, predicted, strict=True)]
    files.write_csv(out / "predictions.csv", rows)
    _write_figure(out / "predictions.png", model_report.predicted_against_measured(measured, predicted,
                                                                                   "held-out groups"))
    return accuracy.evaluate(model, compute, accuracy.held_out(known.comm))


@task(task_run_name="compare-sharders")
def compare_sharders(folder: Path, pool_path: Path, config: EvaluateConfig, out: Path) -> dict[str, float]:
    """COMPARED sharders on the same held-out problems: sharders.csv in `out`, and per sharder the share of
    problems solved, the cost relative to the best of the others and the seconds, over the problems that all
    solved."""
    model, pool = neural.load(folder), files.read_pool(pool_path)
    shape = config.shape()
    problems, rows = [draw_problem(pool, i, model.setting, config.seed, shape)
                      for i in range(config.problems)], []
    console.progress(0.0, "compiling the searches: half a minute, once for an installation")
    compare.compile_searches(problems[0], model)
    work = console.Work("problems compared", len(problems))
    for i, problem in enumerate(problems):
        outcomes = [compare.run(name, problem, model, config.seed, Budget(evals=config.budget_evals))
                    for name in COMPARED]
        rows += [{"problem": problem.name, "tables": len(problem.tables), "algorithm": o.algorithm,
                  "total_ms": round(o.cost.total_ms, 5) if o.cost else "",
                  "balance": round(compare.balance(o.cost), 4) if o.cost
                  else "", "seconds": round(o.seconds, 4)} for o in outcomes]
        get_run_logger().info("problem %d of %d: %s", i + 1, config.problems,
                              ", ".join(f"{o.algorithm} {o.cost.total_ms:.2f} ms" for o in outcomes
                                        if o.cost))
        work.done(i + 1)
    files.write_csv(out / "sharders.csv", rows)
    return summary(rows)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat metrics of sharders.csv; costs are compared on the problems that all solved."""
    mine = {name: [r for r in rows if r["algorithm"] == name] for name in COMPARED}
    found = compare.standings({n: [None if r["total_ms"] == "" else r["total_ms"] for r in own]
                               for n, own in mine.items()},
                              {n: [r["seconds"] for r in own] for n, own in mine.items()})
    metrics = {f"{name}_{key}": value for name, s in found.items()
               for key, value in (("solved", s.solved), ("seconds", s.seconds), ("relative_cost", s.cost))}
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


@task(task_run_name="replay-plans")
def replay_plans(folder: Path, pool_path: Path, measurements: Path, config: EvaluateConfig,
                 out: Path) -> dict[str, float]:
    """Several plans of each of replay_problems held-out problems, priced and run on devices of the connected
    cluster beside the measurements' reference op: figures as replay_metrics.figures, and in `out` what
    replays.keep keeps of each problem, replays.csv and replays.png. What is kept is not run again while the
    plans are the same. {} where the parameters want none or the cluster cannot: a line says why."""
    logger = get_run_logger()
    if out.is_symlink():
        raise ShardCoreError(f"{out} is a symbolic link; replays are kept in a folder of their own")
    out.mkdir(parents=True, exist_ok=True)
    _remove(out, but=[path.name for path in out.iterdir()] if config.replay_problems else ())
    if not config.replay_problems:
        logger.info("no plans are replayed: evaluate.replay_problems is 0")
        return {}
    model, pool = neural.load(folder), files.read_pool(pool_path)
    devices = devices_of_a_host(config.devices, model.setting.batch)
    problems = _to_replay(pool, model.setting, devices, config)
    if reason := _why_not(model.setting, devices, problems):
        logger.warning("no plans are replayed: %s", reason)
        return {}
    rows = replay_records.judge(_replayed(model, problems, dataset.reference_op(measurements, model.setting),
                                          config, out), model)
    files.write_csv(out / "replays.csv", replay_records.csv_rows(rows))
    _write_figure(out / "replays.png", model_report.predicted_against_replayed(rows, f"Replayed, "
                                                                               f"{model.setting.hardware}"))
    return replay_metrics.figures(rows)


def _why_not(setting: Setting, devices: int, problems: Sequence[Problem]) -> str | None:
    """Why the connected cluster cannot replay problems that a model of `setting` prices, or None."""
    asked = {k: v for k, v in dataclasses.asdict(setting).items() if k != "hardware"}
    here = cluster_setting(SettingConfig(**asked))
    if here != setting:
        return f"the model is for ({setting}), the cluster's devices are {here.hardware}"
    if devices < 2:
        return "no host has two devices (cores or GPUs) that plans could run on, as many as divide the batch"
    return None if problems else f"all tables of the problems drawn are above {ARENA_BYTES >> 20} MiB"


def _to_replay(pool: Sequence[Table], setting: Setting, devices: int,
               config: EvaluateConfig) -> list[Problem]:
    """Held-out problems, without their tables that no rank could hold; one with none left is left out."""
    most = max(config.min_tables, min(config.max_tables, MOST_TABLES))
    shape = ProblemConfig(devices, config.min_tables, most, config.max_dim)
    drawn = [draw_problem(pool, i, setting, config.seed, shape) for i in range(config.replay_problems)]
    fitting = [tuple(t for t in p.tables if t.bytes <= ARENA_BYTES) for p in drawn]
    return [dataclasses.replace(p, tables=tables) for p, tables in zip(drawn, fitting, strict=True) if tables]


def _replayed(model: neural.NeuralModel, problems: Sequence[Problem], reference: dataset.ReferenceOp | None,
              config: EvaluateConfig,
              out: Path) -> list[replays.ReplaySet]:
    """The replays of all problems, kept or made now; what `out` keeps of other problems is removed."""
    budget = Budget(evals=config.budget_evals)
    made = [[(o.algorithm, o.plan) for o in compare.plans(p, model, config.seed, budget)] for p in problems]
    _remove(out, but=[p.name for p in problems])
    steps, kept = ReplayConfig(repeats=config.replay_repeats, arena_bytes=ARENA_BYTES), []
    work = console.Work("problems replayed", len(problems))
    with EachProblem(lambda: replaying(len(problems[0].topology), model.setting, steps, reference)) as gang:
        for i, (problem, plans) in enumerate(zip(problems, made, strict=True)):
            where = out / problem.name
            again = "as kept" if replays.is_kept(where, problem, plans, model.setting, steps) else "replayed"
            found: dict[str, float] = {}

            def one(run: Run, where: Path = where, problem: Problem = problem, plans: replays.Made = plans,
                    found: dict[str, float] = found) -> None:
                made_now = replays.keep(where, problem, plans, model.setting, steps, run)
                found.update(replay_metrics.figures(replay_records.judge([made_now], model)))
                kept.append(made_now)

            if not gang.run(problem.name, one):
                continue
            get_run_logger().info("problem %d of %d %s: %d plans of %d tables on %d devices, error %.1f%%, "
                                  "regret %.1f%%", i + 1,
                                  len(problems), again, found["plans"], len(problem.tables),
                                  len(problem.topology),
                                  found["mape"], found["regret"])
            work.done(i + 1)
    return kept


def _remove(out: Path, but: Sequence[str]) -> None:
    """Remove what was said of another model, and the replays that `out` keeps of problems, `but` some. What
    else is there stays: `out` may lead to a folder of somebody's."""
    for name in ("replays.csv", "replays.png"):
        (out / name).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.name not in but:
            replays.remove(path)


@task
def write_metrics(out: Path, accuracy: dict[str, float], sharders: dict[str, float],
                  reality: dict[str, float]) -> None:
    """metrics.json; without replays it has no section "reality"."""
    sections = {"accuracy": accuracy, "sharders": sharders} | ({"reality": reality} if reality else {})
    files.write_json(out / "metrics.json", sections)


def _write_figure(path: Path, figure: Any) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    files.write_atomic(path, content.getvalue())
