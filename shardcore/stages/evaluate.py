"""Evaluate cost models on held-out samples, sharders on held-out problems, and both on replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from shardcore.core.progress import report_to_listener
from shardcore.core.types import Problem, Setting, Table
from shardcore.core.validation import Count, Repeats, Seed, number_within, require
from shardcore.cost import accuracy, replay_metrics, study, training
from shardcore.cost.model import CostModel
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset, replays, writing
from shardcore.measure.config import ReplayConfig
from shardcore.measure.replay import replay_all
from shardcore.measure.sampling import MOST_DRAWS
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.measure.transport import Transport
from shardcore.report import figures, model_report
from shardcore.search import BASELINES, DEFAULT_SHARDER, SHARDERS, compare
from shardcore.search.budget import Budget
from shardcore.stages.measure import Failures, replay_device_count
from shardcore.stages.progress import Progress, StageWork

HEADLINES = {
    "accuracy": ("compute_mape", "forward_comm_mape", "backward_comm_mape"),
    "sharders": (f"{DEFAULT_SHARDER}_solved", f"{DEFAULT_SHARDER}_relative_cost", "neuroshard_relative_cost"),
    "replays": ("mape", "bias", "noise", "explained_mape", "kendall_tau", "regret"),
}
"""The figures, of some hundred, that show how good a model is."""
COMPARED = tuple(name for name in SHARDERS if name != "torchrec")
"""Sharders that are compared. TorchRec's planner takes up to minutes a problem, so bench/search.py compares it."""
WORTH_REPLAYING = (
    DEFAULT_SHARDER,
    "anneal_columns",
    "neuroshard",
    *(n for n in BASELINES if n != "random"),
    *(n for n in SHARDERS if n == "torchrec"),
)
"""Sharders whose plans are worth a replay on devices."""
ARENA_BYTES = 512 << 20
"""Memory for weights of a rank that replays. Larger tables of a problem are left out."""
MOST_TABLES = 24
"""Most tables of a replayed problem, each of whose plans runs replay_repeats times."""


@dataclass(frozen=True)
class EvaluateConfig(ProblemConfig):
    """Held-out problems on which sharders are compared. Replays use at most as many devices of a host.

    problems: number of problems.
    seed: seed of the draws.
    budget_evals: plans that each search may price.
    replay_problems: number of problems whose plans also run on this host's devices, as far as no two share a core. 0:
      none.
    replay_repeats: steps of each replayed plan.
    """

    problems: Annotated[int, number_within(1, MOST_DRAWS)] = 6
    seed: Seed = 1
    budget_evals: Count = 20_000
    replay_problems: Annotated[int, number_within(0, MOST_DRAWS)] = 5
    replay_repeats: Repeats = 20


@dataclass(frozen=True, eq=False)
class CandidateModel:
    """A cost model to evaluate, with its data and config.

    pool: tables of drawn problems.
    measurements: folder of this machine's samples.
    """

    model: NeuralModel
    pool: Sequence[Table]
    measurements: Path
    config: EvaluateConfig
    progress: Progress

    def draw_problems(self, count: int, shape: ProblemConfig) -> list[Problem]:
        """Draw held-out problems of the config's seed."""
        setting, seed = self.model.setting, self.config.seed
        return [draw_problem(self.pool, i, setting, seed, shape) for i in range(count)]


def evaluate(
    candidate: CandidateModel, out: Path, transport: Callable[[], AbstractContextManager[Transport]]
) -> dict[str, dict[str, float]]:
    """Judge a cost model on held-out samples, sharders on held-out problems, and both on replays.

    transport: where plans run. It is made only if some are replayed.

    Returns figures of each section, "accuracy", "sharders" and, if plans ran, "replays". `out` gets tables and
    pictures, all figures as figures.json, and HEADLINES as metrics.json, which `dvc metrics show` prints in a row.
    """
    found = {"accuracy": judge_model(candidate, out), "sharders": compare_sharders(candidate, out)}
    if replayed := replay_plans(candidate, out / "replays", transport):
        found["replays"] = replayed
    writing.write_json(out / "figures.json", found)
    headlines = {
        section: {name: float(f"{of[name]:.4g}") for name in HEADLINES[section] if name in of}
        for section, of in found.items()
    }
    writing.write_json(out / "metrics.json", headlines)
    return found


def judge_model(candidate: CandidateModel, out: Path) -> dict[str, float]:
    """Accuracy of a cost model on the test split of this machine's measurements.

    Writes predictions.csv and predictions.png to `out`.
    """
    model = candidate.model
    known = training.read_held_out_samples(model, candidate.measurements)
    compute = [s for s in accuracy.held_out_samples(known.compute) if s.error is None]
    measured = np.array([s.total_ms for s in compute])
    predicted = accuracy.predict_op_ms(model, compute)
    rows = [
        {
            "shards": len(s.request.shards),
            "measured_ms": round(float(m), 5),
            "predicted_ms": round(float(p), 5),
        }
        for s, m, p in zip(compute, measured, predicted, strict=True)
    ]
    writing.write_csv(out / "predictions.csv", rows)
    writing.write_atomic(
        out / "predictions.png",
        figures.png_bytes(
            model_report.prediction_scatter_figure(measured, predicted, "held-out groups of this machine")
        ),
    )
    return study.judge_test_split(model, known)


def compare_sharders(candidate: CandidateModel, out: Path) -> dict[str, float]:
    """Compare the sharders in COMPARED on held-out problems. Returns metrics, and writes sharders.csv to `out`.

    They are, for each sharder, the share of problems solved, the cost relative to the best other sharder, and seconds.
    Cost and seconds are over problems that all sharders solved.
    """
    config, progress = candidate.config, candidate.progress
    problems = candidate.draw_problems(config.problems, config)
    rows: list[dict[str, Any]] = []
    work = StageWork(progress, "problems compared", len(problems))
    for i, problem in enumerate(problems):
        with report_to_listener(work.show_phase):
            # Their seconds are without compilation.
            outcomes = [
                compare.run_sharder(
                    name, problem, candidate.model, config.seed, Budget(evals=config.budget_evals)
                )
                for name in COMPARED
            ]
        rows += [
            {
                "problem": problem.name,
                "tables": len(problem.tables),
                "algorithm": o.algorithm,
                "total_ms": round(o.cost.total_ms, 5) if o.cost else "",
                "balance": round(compare.compute_balance(o.cost), 4) if o.cost else "",
                "seconds": round(o.seconds, 4),
            }
            for o in outcomes
        ]
        progress.info(
            "problem %d of %d: %s",
            i + 1,
            config.problems,
            ", ".join(f"{o.algorithm} {o.cost.total_ms:.2f} ms" for o in outcomes if o.cost),
        )
        work.show_done(i + 1)
    writing.write_csv(out / "sharders.csv", rows)
    return comparison_metrics(rows)


@dataclass(frozen=True)
class SharderStanding:
    """Result of one sharder over several problems.

    solved: the share of problems with a plan.
    common: the number of problems that every sharder solved. The other fields cover only these.
    cost: mean cost relative to the reference. nan if there are no common problems.
    worst: the largest relative cost.
    seconds: mean time.
    """

    solved: float
    common: int
    cost: float
    worst: float
    seconds: float


def compute_standings(
    costs: Mapping[str, Sequence[float | None]],
    seconds: Mapping[str, Sequence[float]],
    reference: str | None = None,
) -> dict[str, SharderStanding]:
    """Standing of each sharder over several problems: share solved, relative cost, time.

    costs: ms of each sharder on each problem; None or nan for no plan.
    seconds: search time of each; [] if unknown.
    reference: the sharder whose cost is 1. None: the best of the others, on each problem.
    """
    # [sharders, problems], nan without a plan.
    table = np.array([[np.nan if ms is None else ms for ms in row] for row in costs.values()], dtype=float)
    # Only problems that all solved compare fairly.
    common = np.isfinite(table).all(0)
    compared = {}
    for i, name in enumerate(costs):
        # Others without itself: otherwise no ratio could be below 1.
        others = (
            [list(costs).index(reference)] if reference else [k for k in range(len(table)) if k != i] or [i]
        )
        # [common] cost over the cheapest of the others on the same problem.
        ratios = table[i, common] / table[others][:, common].min(0) if common.any() else np.full(1, np.nan)
        # Of the same problems as the costs: hard ones take longer, and some sharders do not solve them.
        took_s = np.array(seconds[name], dtype=float)
        compared[name] = SharderStanding(
            solved=float(np.isfinite(table[i]).mean()),
            common=int(common.sum()),
            cost=float(ratios.mean()),
            worst=float(ratios.max()),
            seconds=float(took_s[common].mean()) if len(took_s) and common.any() else float("nan"),
        )
    return compared


def comparison_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat metrics of the rows of sharders.csv. Costs are compared on problems that all sharders solved."""
    rows_of = {name: [r for r in rows if r["algorithm"] == name] for name in COMPARED}
    found = compute_standings(
        {n: [None if r["total_ms"] == "" else r["total_ms"] for r in own] for n, own in rows_of.items()},
        {n: [r["seconds"] for r in own] for n, own in rows_of.items()},
    )
    metrics = {
        f"{name}_{key}": value
        for name, s in found.items()
        for key, value in (("solved", s.solved), ("seconds", s.seconds), ("relative_cost", s.cost))
    }
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def replay_plans(
    candidate: CandidateModel, out: Path, transport: Callable[[], AbstractContextManager[Transport]]
) -> dict[str, float]:
    """Replay plans of held-out problems on devices, and compare with the model. Returns metrics; {} if nothing can be
    replayed.

    Several plans of each of replay_problems held-out problems are priced, then run, with the measurements' reference op
    between their steps. `out` gets each problem's replays (see replays.replay_or_reuse), replays.csv and replays.png.
    Stored replays are not run again as long as the plans are the same.
    """
    config, progress, setting = candidate.config, candidate.progress, candidate.model.setting
    require(not out.is_symlink(), f"{out} is a symbolic link; replays are kept in a folder of their own")
    out.mkdir(parents=True, exist_ok=True)
    # Figures of an older model must not look like this one's.
    _remove_stale_results(
        out, problems=[path.name for path in out.iterdir()] if config.replay_problems else ()
    )
    if not config.replay_problems:
        progress.info("no plans are replayed: evaluate.replay_problems is 0")
        return {}
    with transport() as on:
        devices = replay_device_count(on, config.devices, setting.batch)
        problems = _draw_replay_problems(candidate, devices)
        if reason := _why_not_replayable(setting, devices, problems, on):
            progress.warning("no plans are replayed: %s", reason)
            return {}
        rows = replay_metrics.judge_replays(_replay_problems(candidate, problems, out, on), candidate.model)
    writing.write_csv(out / "replays.csv", replay_metrics.csv_rows(rows))
    picture = model_report.replay_scatter_figure(rows, f"Replayed, {setting.hardware}")
    writing.write_atomic(out / "replays.png", figures.png_bytes(picture))
    return replay_metrics.flat_metrics(rows)


def _why_not_replayable(
    setting: Setting, devices: int, problems: Sequence[Problem], transport: Transport
) -> str | None:
    """Reason why a transport cannot replay problems for a model of `setting`; None if it can."""
    if (here := transport.hardware()) != setting.hardware:
        return f"the model is for {setting.hardware}, the devices are {here}"
    if devices < 2:
        return "no host has two devices (cores or GPUs) that plans could run on, as many as divide the batch"
    return None if problems else f"all tables of the problems drawn are above {ARENA_BYTES >> 20} MiB"


def _draw_replay_problems(candidate: CandidateModel, devices: int) -> list[Problem]:
    """Draw held-out problems for replays, without tables that are too large for a rank."""
    config = candidate.config
    most = max(config.min_tables, min(config.max_tables, MOST_TABLES))
    shape = ProblemConfig(devices, config.min_tables, most, config.max_dim, config.slack)
    drawn = candidate.draw_problems(config.replay_problems, shape)
    fitting = [tuple(t for t in p.tables if t.bytes <= ARENA_BYTES) for p in drawn]
    return [dataclasses.replace(p, tables=tables) for p, tables in zip(drawn, fitting, strict=True) if tables]


def plans_to_replay(
    problem: Problem, model: CostModel, seed: int = 0, budget: Budget | None = None, random: int = 3
) -> list[compare.SharderOutcome]:
    """Plans of a problem to replay: of each sharder in WORTH_REPLAYING, and `random` random ones.

    The same seed gives the same plans.
    """
    # Other seeds give other random plans. All else is searched once.
    wanted = [(name, seed) for name in WORTH_REPLAYING] + [("random", seed + i) for i in range(random)]
    outcomes = [compare.run_sharder(name, problem, model, s, budget) for name, s in wanted]
    return [o for o in outcomes if o.plan]


def _replay_problems(
    candidate: CandidateModel, problems: Sequence[Problem], out: Path, transport: Transport
) -> list[replays.ReplaySet]:
    """Replay the plans of all problems, or load stored replays. Removes replays of other problems from `out`."""
    model, config, progress = candidate.model, candidate.config, candidate.progress
    steps, kept = ReplayConfig(repeats=config.replay_repeats, arena_bytes=ARENA_BYTES), []
    reference = dataset.reference_op(candidate.measurements, model.setting)
    work, failures = StageWork(progress, "problems replayed", len(problems)), Failures(progress.warning)
    if not all((out / problem.name).exists() for problem in problems):
        transport.prepare(len(problems[0].topology))  # beside the searches
    plans_of = [
        [
            (o.algorithm, o.plan)
            for o in plans_to_replay(p, model, config.seed, Budget(evals=config.budget_evals))
            if o.plan
        ]
        for p in problems
    ]
    _remove_stale_results(out, problems=[p.name for p in problems])
    replay = partial(
        replay_all, setting=model.setting, config=steps, transport=transport, reference=reference
    )
    for i, (problem, plans) in enumerate(zip(problems, plans_of, strict=True)):
        where = out / problem.name
        is_kept = replays.has_valid_replays(where, problem, plans, model.setting, steps)
        keep = partial(replays.replay_or_reuse, where, problem, plans, model.setting, steps, replay)
        if not failures.attempt(problem.name, lambda keep=keep: kept.append(keep())):
            continue
        found = replay_metrics.flat_metrics(replay_metrics.judge_replays(kept[-1:], model))
        progress.info(
            "problem %d of %d %s: %d plans of %d tables on %d devices, error %.1f%%, bias %+.1f%%, noise %.1f%%",
            i + 1,
            len(problems),
            "as kept" if is_kept else "replayed",
            found["plans"],
            len(problem.tables),
            len(problem.topology),
            found["mape"],
            found["bias"],
            found["noise"],
        )
        work.show_done(i + 1)
    failures.raise_if_any()
    return kept


def _remove_stale_results(out: Path, problems: Sequence[str]) -> None:
    """Remove results made with another model from a folder, and replays (measured runs of plans) of all problems but
    the given ones.

    Other files stay, as `out` may be a link to somebody's folder.
    """
    for name in ("replays.csv", "replays.png"):
        (out / name).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.name not in problems:
            replays.remove_replays(path)
