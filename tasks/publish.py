"""Searching plans under the champion, and publishing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact

from shardcore import files, report, store
from shardcore.cost import neural
from shardcore.search import BASELINES, compare
from shardcore.search.budget import Budget
from shardcore.types import Infeasible, Plan, Problem, ShardCoreError
from shardcore.workload import lower
from tasks import paths, registry
from tasks.setting import SettingConfig

HEADERS = ("problem", "tables", "devices", "published ms", "best baseline", "against it", "against random", "balance",
           "extrapolated")


@dataclass(frozen=True)
class PublishConfig:
    """algorithm: of the published plans; the others are its baselines. budget_evals: see search.Budget."""

    algorithm: str = "local"
    seed: int = 0
    budget_evals: int = 200_000

    def __post_init__(self) -> None:
        compare.require_known([self.algorithm])


@task(task_run_name="publish-plans")
def publish_plans(problems: Sequence[Path], plans: Path, wanted: SettingConfig, config: PublishConfig) -> str:
    """Search and publish a plan for each problem file; a table of the results. Raises ShardCoreError at the end where a problem
    could not be planned, the others being published."""
    logger = get_run_logger()
    model, version = registry.champion(registry.connect(), wanted.of_dataset_or_local(paths.MEASUREMENTS).hardware)
    provenance = {"model": version.name, "model_version": str(version.version), **model.meta["provenance"]}
    rows, failures, names = [], [], set()
    for path in problems:
        try:
            problem = files.read_problem(path)
            if problem.name in names:
                raise ShardCoreError(f"another problem of this run is named {problem.name!r} too; give it a name of its own")
            names.add(problem.name)
            problem.require_setting(model.setting)
            row, where = _publish_one(problem, model, plans, config, provenance)
        except ShardCoreError as error:
            failures.append(f"{path}: {error}")
            logger.warning(failures[-1])
            continue
        rows.append(row)
        logger.info("%s: %s ms, %s", problem.name, row[3], where)
    title = f"Plans under {version.name} version {version.version}"
    create_markdown_artifact(report.markdown_table(HEADERS, rows), key="published-plans", description=title)
    lines = [f"# {title}", "", report.markdown_table(HEADERS, rows), "", *(f"- no new plan: {f}" for f in failures)]
    files.write_atomic(plans / "report.md", "\n".join(lines).encode())
    if failures:
        logger.info("published:\n%s", report.text_table(HEADERS, rows))
        raise ShardCoreError(f"{len(failures)} of {len(problems)} problems have no new plan: {'; '.join(failures)}")
    return report.text_table(HEADERS, rows)


def _publish_one(problem: Problem, model: neural.NeuralModel, plans: Path, config: PublishConfig,
                 provenance: dict[str, Any]) -> tuple[tuple[Any, ...], Path]:
    budget = Budget(evals=config.budget_evals)
    outcomes = {name: compare.run(name, problem, model, config.seed, budget) for name in (*BASELINES, config.algorithm)}
    mine = outcomes[config.algorithm]
    if mine.plan is None:
        raise Infeasible(mine.error)
    plan = Plan(mine.plan.placements, {**mine.plan.provenance, **provenance})
    workload = lower(plan, problem)
    beyond = neural.out_of_range(model, workload)
    baseline = compare.best_baseline(outcomes.values(), config.algorithm)
    cost = {
        "predicted": dataclasses.asdict(mine.cost), "total_ms": mine.cost.total_ms, "memory_bytes": list(workload.memory_bytes),
        "baselines": {n: o.cost.total_ms if o.cost else o.error for n, o in outcomes.items() if n != config.algorithm},
        "extrapolated": beyond,
    }
    store.publish(plans, problem, plan, cost)
    total, random = mine.cost.total_ms, outcomes["random"].cost
    row = (problem.name, len(problem.tables), len(problem.topology), f"{total:.2f}",
           f"{baseline.cost.total_ms:.2f} {baseline.algorithm}" if baseline else "none found one",
           report.percent_change(total, baseline.cost.total_ms) if baseline else "-",
           report.percent_change(total, random.total_ms) if random else "-",
           f"{100 * compare.balance(mine.cost):.0f}%", "yes" if beyond else "no")
    return row, store.current(plans, problem.name)
