"""Searching plans under the champion, and publishing those that are worth it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion
from prefect import get_run_logger, task

from shardcore import files, plan_page, plan_report, report, store
from shardcore.cost import neural
from shardcore.cost.model import price
from shardcore.diff import carried, diff, in_order, nearest
from shardcore.memory import require_fits
from shardcore.search import BASELINES, compare
from shardcore.search.budget import Budget
from shardcore.search.explain import explain
from shardcore.search.local import SPACE_OF, local
from shardcore.store import Decision
from shardcore.types import MOST_COUNT, MOST_SEED, Infeasible, Plan, Problem, ShardCoreError, StepCost, require_within
from shardcore.workload import lower
from tasks import console, links, paths, publication, registry
from tasks.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from tasks.setting import SettingConfig
from tasks.train import git_commit

HEADERS = ("problem", "tables", "devices", "published ms", "best baseline", "against it", "against random", "balance",
           "extrapolated", "decision")
_EXPLAIN = Budget(evals=10_000)
"""Of each search for a report page's alternatives."""


@dataclass(frozen=True)
class PublishConfig:
    """algorithm: of the published plans; the others are its baselines. budget_evals: see search.Budget. threshold: by what share
    a new plan has to be cheaper to take the place of the published one. keep_versions: of so many decisions on a problem the
    versions are kept. max_moved_tables: so many tables may move from a published plan that still fits (null: any number; an
    algorithm of local search needed). plans: the folder or object-store URL to publish in."""

    algorithm: str = "local_columns"
    seed: int = 0
    budget_evals: int = 200_000
    threshold: float = 0.02
    keep_versions: int = 20
    max_moved_tables: int | None = None
    plans: str = str(paths.PLANS)

    def __post_init__(self) -> None:
        compare.require_known([self.algorithm])
        require_within(self, "publish config", budget_evals=(1, MOST_COUNT), seed=(0, MOST_SEED),
                       keep_versions=(store.FEWEST_KEPT, MOST_COUNT), max_moved_tables=(0, MOST_COUNT))
        if not self.plans or not self.plans.isprintable():
            raise ShardCoreError(f"publish config has plans {self.plans!r}; it needs a folder or URL, such as 'plans'")
        if not 0 <= self.threshold < 1:
            raise ShardCoreError(f"publish config has threshold {self.threshold}; it needs a share within 0 and 1, such as 0.02")
        if self.max_moved_tables is not None and self.algorithm not in SPACE_OF:
            raise ShardCoreError(f"publish config has max_moved_tables {self.max_moved_tables} and algorithm {self.algorithm!r}; "
                                 f"it needs one of {', '.join(SPACE_OF)}")


@task(task_run_name="publish-plans")
@registry.plain_errors()
def publish_plans(problems: Sequence[Path], plans: str | Path, wanted: SettingConfig, config: PublishConfig,
                  everything: bool = False) -> str:
    """Search a plan for each problem file and publish it where it is worth it; a table of the plans that are published then.
    Raises ShardCoreError at the end where a problem could not be planned, the others being published. plans: a folder or URL, see
    store. everything: these are all problems, so that afterwards plans are published under this champion (see
    tasks.publication)."""
    logger = get_run_logger()
    client = registry.connect()
    model, version = registry.champion(client, wanted.of_dataset_or_local(paths.MEASUREMENTS).hardware)
    publisher = Publisher(model, plans, config, _provenance(model, version, config))
    progress = create_progress_artifact(0.0, key="publish-progress", description=f"{len(problems)} problems")
    rows, failures, failed, names = [], [], [], []
    work = console.Work("problems", len(problems))
    with publication.publishing(client, version, everything) as renew:
        for i, path in enumerate(problems):
            renew()
            work.done(i)
            try:
                problem = files.read_problem(path)
                if problem.name in names:
                    raise ShardCoreError(f"another problem of this run is named {problem.name!r} too; give it a name of its own")
                names.append(problem.name)
                problem.require_setting(model.setting)
                published = publisher.publish(problem)
                rows.append(published.row())
            except Exception as error:  # whatever it is, it is this problem's: the others are published
                plain = isinstance(error, ShardCoreError)
                said = str(error) if plain else repr(error)
                failures.append(str(ShardCoreError(said if said.startswith(str(path)) else f"{path}: {said}")))
                failed.append(path.stem)
                logger.warning("%s", failures[-1], extra={"problem": path.stem}, exc_info=None if plain else error)
                continue
            decision = published.decision
            logger.info("%s: %s, %s ms: %s", problem.name, decision.outcome, rows[-1][3], decision.reason,
                        extra={"problem": problem.name})
            done = f"{i + 1} of {len(problems)} problems"
            update_progress_artifact(progress, 100.0 * (i + 1) / len(problems), description=done)
    title, table = f"Plans under {version.name} version {version.version}", report.markdown_table(HEADERS, rows)
    lines = [f"# {title}", "", table, "", *(f"- no new plan: {f}" for f in failures)]
    store.write(plans, store.REPORT, "\n".join(lines).encode(errors="replace"))
    run = _log(plans, names, version, "\n".join(lines))
    create_markdown_artifact(f"Under {links.model_version(version.name, version.version)}, in {plans}; pages in MLflow's "
                             f"{links.mlflow_run(run.info.experiment_id, run.info.run_id)}\n\n{table}",
                             key="published-plans", description=title)
    if failures:
        logger.info("published:\n%s", report.text_table(HEADERS, rows))
        others = f"; {store.REPORT} and the log say why also of {', '.join(failed[1:4])}{' ...' * (len(failed) > 4)}"
        raise ShardCoreError(f"{len(failures)} of {len(problems)} problems have no new plan: {failures[0]}"
                             f"{others * (len(failed) > 1)}")
    outcomes = Counter(row[-1] for row in rows)
    logger.info("%d plans under %s version %s: %s", len(rows), version.name, version.version,
                ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()), extra=console.RESULT)
    return report.text_table(HEADERS, rows)


def _provenance(model: neural.NeuralModel, version: ModelVersion, config: PublishConfig) -> dict[str, Any]:
    """Of a plan: the model that it was searched under, that model's data, and the code and settings of the search."""
    trained = model.meta["provenance"]
    return {"model": version.name, "model_version": str(version.version), "setting": str(model.setting),
            "data_version": trained.get("data_version", "unversioned"), "model_git_commit": trained.get("git_commit", "no git"),
            "model_seed": trained.get("seed"),
            **({"datasets": dict(trained["datasets"])} if "datasets" in trained else {}), "git_commit": git_commit(),
            "algorithm": config.algorithm, "budget_evals": config.budget_evals, "seed": config.seed,
            **({} if config.max_moved_tables is None else {"max_moved_tables": config.max_moved_tables})}


def _log(plans: str | Path, names: Sequence[str], version: ModelVersion, table: str) -> mlflow.ActiveRun:
    """An MLflow run with the published plans' pages."""
    with registry.run(run_name=f"publish-{version.name}-{version.version}") as run:
        mlflow.set_tags({"stage": "publish", "model": version.name, "model_version": str(version.version), "plans": str(plans)})
        mlflow.set_tag("mlflow.note.content", table)
        for name in names:
            try:
                decision = store.last(plans, name)
                page = decision and store.load_page(plans, name, decision.current)
            except ShardCoreError:  # what is wrong with its files was said when it was its turn
                continue
            if decision and decision.total_ms is not None:
                mlflow.log_metric(f"{name}_ms", decision.total_ms)
            if page:
                mlflow.log_text(page.decode(errors="replace"), f"plans/{name}.html")
    return run


@dataclass(frozen=True)
class Published:
    """A problem's plan that is current after a decision, and its cost under the model of now. baselines: total ms of others, or
    why they found no plan."""

    problem: Problem
    decision: Decision
    cost: StepCost
    baselines: Mapping[str, float | str]
    extrapolated: bool

    def row(self) -> tuple[Any, ...]:
        total, found = self.cost.total_ms, {k: v for k, v in self.baselines.items() if isinstance(v, float)}
        best = min(found, key=found.get, default=None)
        return (self.problem.name, len(self.problem.tables), len(self.problem.topology), f"{total:.2f}",
                f"{found[best]:.2f} {best}" if best else "none found one",
                report.percent_change(total, found[best]) if best else "-",
                report.percent_change(total, found["random"]) if "random" in found else "-",
                f"{100 * compare.balance(self.cost):.0f}%", "yes" if self.extrapolated else "no", self.decision.outcome)


@dataclass(frozen=True)
class Before:
    """What was published of a problem: the last decision on it; its plan with the problem's tables as they are now; what that
    costs under the model of now, None where it is none of the problem any more, for which why_not says why."""

    decision: Decision
    plan: Plan
    cost: StepCost | None
    why_not: str = ""

    @property
    def total_ms(self) -> float | None:
        return self.cost.total_ms if self.cost else None


@dataclass(frozen=True)
class Publisher:
    """Decides on one problem's plan after the other, under one model."""

    model: neural.NeuralModel
    plans: str | Path
    config: PublishConfig
    provenance: Mapping[str, Any]

    def publish(self, problem: Problem) -> Published:
        """Raises Infeasible where no plan is found."""
        with store.turn(self.plans, problem.name):
            before = self._before(problem)
            published = self._restored(problem, before) or self._searched(problem, before)
            if not published.decision.repeats(before and before.decision):
                store.record(self.plans, published.decision)
            store.prune(self.plans, problem.name, self.config.keep_versions)
        return published

    def _before(self, problem: Problem) -> Before | None:
        decision = store.last(self.plans, problem.name)
        if decision is None:
            return None
        plan = carried(store.load_plan(self.plans, problem.name, fits=False)[0], problem)
        try:
            return Before(decision, plan, price(lower(plan, problem), self.model))
        except ShardCoreError as error:
            return Before(decision, plan, None, str(error))

    def _decision(self, problem: Problem, before: Before | None, outcome: str, reason: str, current: str, candidate: str,
                  candidate_ms: float) -> Decision:
        return Decision(
            problem=problem.name, outcome=outcome, reason=reason, current=current, candidate=candidate,
            problem_digest=files.problem_digest(problem), candidate_ms=candidate_ms, previous_ms=before and before.total_ms,
            threshold=self.config.threshold, decided_at=time.time(), parent=before and before.decision.id,
            provenance=dict(self.provenance))

    # --- the plan that there was under this model ----------------------------------------------------------------------

    def _restored(self, problem: Problem, before: Before | None) -> Published | None:
        """Where the champion has become what it was before: the plan of this very problem that was current under it then."""
        def model_of(x: Decision) -> tuple[Any, Any]:
            return x.provenance.get("model"), x.provenance.get("model_version")

        mine = self.provenance["model"], self.provenance["model_version"]
        if before is None or model_of(before.decision) == mine:
            return None
        then = next((x for x in islice(store.history(self.plans, problem.name), self.config.keep_versions)
                     if model_of(x) == mine and x.problem_digest == files.problem_digest(problem)), None)
        if then is None or not store.has(self.plans, problem.name, then.current):
            return None
        plan, _ = store.load_plan(self.plans, problem.name, then.current, fits=False)
        try:
            workload = lower(carried(plan, problem), problem)
        except ShardCoreError:
            return None
        cost = price(workload, self.model)
        reason = (f"the model is version {mine[1]} again, under which this plan was current on "
                  f"{plan_report.when(then.decided_at)}")
        decision = self._decision(problem, before, "restored", reason, then.current, then.current, cost.total_ms)
        return Published(problem, decision, cost, _totals(self._others(problem)), bool(neural.out_of_range(self.model, workload)))

    # --- a new plan ----------------------------------------------------------------------------------------------------

    def _searched(self, problem: Problem, before: Before | None) -> Published:
        others, found = self._others(problem), self._search(problem, before)
        if before:
            limited = self.config.max_moved_tables is not None
            found = in_order(found, before.plan) if limited else nearest(found, before.plan, problem)
        if before and before.cost and set(found.placements) == set(before.plan.placements):
            plan, cost = before.plan, before.cost
        else:
            plan = Plan(found.placements, {**found.provenance, **self.provenance})
            cost = price(lower(plan, problem), self.model)
        outcome, reason = self._judged(plan, cost, before)
        candidate = store.version_of(plan, problem)
        current = store.version_of(before.plan, problem) if outcome == "kept" else candidate
        decision = self._decision(problem, before, outcome, reason, current, candidate, cost.total_ms)
        self._add(problem, plan, cost, decision, before, others)
        if outcome == "kept":  # the old plan, for the problem as it is now: the same version where that has not changed
            plan, cost = before.plan, before.cost
            self._add(problem, plan, cost, decision, before, others)
        return Published(problem, decision, cost, _totals(others), bool(neural.out_of_range(self.model, lower(plan, problem))))

    def _others(self, problem: Problem) -> dict[str, compare.Outcome]:
        return {name: compare.run(name, problem, self.model, self.config.seed) for name in BASELINES
                if name != self.config.algorithm}

    def _search(self, problem: Problem, before: Before | None) -> Plan:
        """Also from what of the published plan is still possible, so that luck alone never makes another one look better, and few
        tables have to move where some are new."""
        space, limit = SPACE_OF.get(self.config.algorithm), self.config.max_moved_tables
        budget = Budget(evals=self.config.budget_evals)
        if before and space:
            from shardcore.search.space import Reshard  # compiled code, late

            tables, devices = set(problem.tables), len(problem.topology)
            old = Plan(tuple(p for p in before.plan.placements if p.shard.table in tables and max(p.devices) < devices))
            try:
                require_fits(old, problem)
                return local(problem, self.model, seed=self.config.seed, budget=budget, space=space, reshard=Reshard(old, limit))
            except ShardCoreError:  # nothing that the local search can start from
                if limit is not None and before.cost:
                    raise
        outcome = compare.run(self.config.algorithm, problem, self.model, self.config.seed, budget)
        if outcome.plan is None:
            raise Infeasible(outcome.error)
        return outcome.plan

    def _judged(self, plan: Plan, cost: StepCost, before: Before | None) -> tuple[str, str]:
        """Which outcome a candidate has, and why."""
        if before is None:
            return "first", "no plan was published for this problem"
        if before.cost is None:
            return "no longer fits", f"of the plan before: {before.why_not}"
        if plan is before.plan:
            return "kept", "the search finds no other plan"
        better = store.worth_it(cost.total_ms, before.total_ms, self.config.threshold)
        return "better" if better else "kept", (
            f"{cost.total_ms:.3f} ms instead of {before.total_ms:.3f} ms "
            f"({report.percent_change(cost.total_ms, before.total_ms)}, threshold {self.config.threshold:.1%}), moving "
            f"{plan_report.moved_words(diff(before.plan, plan))}")

    def _add(self, problem: Problem, plan: Plan, cost: StepCost, decision: Decision, before: Before | None,
             others: Mapping[str, compare.Outcome]) -> None:
        """Keep a plan as a version with its page, unless it is one."""
        if store.has(self.plans, problem.name, store.version_of(plan, problem)):
            return
        workload = lower(plan, problem)
        beyond = neural.out_of_range(self.model, workload)
        decisions = [decision, *islice(store.history(self.plans, problem.name), plan_page.MOST_ROWS)]
        explained = explain(plan, problem, self.model, _EXPLAIN, others)
        page = plan_page.page(plan, problem, explained, decisions, diff(before.plan, plan) if before else None, beyond)
        store.add(self.plans, problem, plan, {
            "predicted": dataclasses.asdict(cost), "total_ms": cost.total_ms, "memory_bytes": list(workload.memory_bytes),
            "baselines": _totals(others), "extrapolated": beyond}, page)


def _totals(outcomes: Mapping[str, compare.Outcome]) -> dict[str, float | str]:
    return {name: o.cost.total_ms if o.cost else o.error for name, o in outcomes.items()}
