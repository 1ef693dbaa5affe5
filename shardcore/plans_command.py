"""The commands on published plans: history, diff and drift (their arguments are in __main__)."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from shardcore import files, plan_report, store
from shardcore.cost import neural
from shardcore.diff import diff as moves_of
from shardcore.drift import drift as drift_of
from shardcore.drift import refreshed
from shardcore.search.budget import Budget
from shardcore.types import Plan, Problem, ShardCoreError


def history(args: argparse.Namespace) -> None:
    found = list(islice(store.history(args.plans, args.name), args.last))
    if not found:
        store.current(args.plans, args.name)  # says what there is instead
    print(plan_report.history_text(found))


def diff(args: argparse.Namespace) -> None:
    old, new = (_read(path, args.problem) for path in (args.old, args.new))
    print(plan_report.diff_text(moves_of(old, new)))


def drift(args: argparse.Namespace) -> None:
    plan, problem = store.load_plan(args.plans, args.name)
    now, model = _with_statistics_of(args.fresh, problem), neural.load(args.model)
    now.require_setting(model.setting)
    budget = Budget(args.budget_evals) if args.budget_evals else None
    found = drift_of(plan, problem, now, model, args.max_moved_tables, args.threshold, args.seed, budget)
    print(plan_report.drift_text(found))
    if args.out:
        files.write_problem(args.out / "problem.json", now)
        files.write_plan(args.out / "plan.json", found.replan, now)
        print(f"{args.out}/plan.json: the re-plan, for {args.out}/problem.json")


def _read(path: Path, problem: Path | None) -> Plan:
    """A plan with its problem: the one that is given, or problem.json beside it, as in a version's folder."""
    return files.read_plan(path, files.read_problem(problem or path.with_name("problem.json")))


def _with_statistics_of(path: Path, problem: Problem) -> Problem:
    """The problem with fresh statistics, from a problem's file or a pool of tables."""
    schema = files.read_json(path)
    if isinstance(schema, dict) and schema.get("schema") == "shardcore/pool":
        return refreshed(problem, files.read_pool(path))
    fresh = files.read_problem(path)
    if missing := {t.name for t in problem.tables} - {t.name for t in fresh.tables}:
        raise ShardCoreError(f"{path} lacks table {min(missing)!r} of problem {problem.name!r}; other tables need a new plan")
    return refreshed(problem, fresh.tables)
