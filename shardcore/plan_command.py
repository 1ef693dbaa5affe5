"""The commands on plans: plan, price and replay; history, diff and drift of published ones (their arguments are in __main__)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from shardcore import files, plan_report, schema, store
from shardcore.cost import neural
from shardcore.cost.model import CostModel, at_confidence
from shardcore.cost.model import price as predicted
from shardcore.cost.neural import NeuralModel
from shardcore.diff import diff as moves_of
from shardcore.diff import in_order, nearest
from shardcore.drift import drift as drift_of
from shardcore.drift import refreshed
from shardcore.search import SHARDERS, choose, compare
from shardcore.search.budget import Budget
from shardcore.search.explain import explain
from shardcore.search.local import SPACE_OF, local
from shardcore.types import Plan, Problem, Setting, ShardCoreError
from shardcore.workload import lower


def plan(args: argparse.Namespace) -> None:
    compare.require_known([args.algorithm])
    if args.start and (args.algorithm not in SPACE_OF or args.second_model):
        raise ShardCoreError(f"--start is for --algorithm {' and '.join(SPACE_OF)} alone; got {args.algorithm}"
                             f"{' and --second-model' if args.second_model else ''}")
    for name in ("start_problem", "max_moved_tables", "max_moved_gib"):
        if getattr(args, name) is not None and not args.start:
            raise ShardCoreError(f"--{name.replace('_', '-')} {getattr(args, name)} needs --start, the plan to start from")
    problem, model = files.read_problem(args.problem), neural.load(args.model)
    problem.require_setting(model.setting)
    cautious, provenance = at_confidence(model, args.confidence), {"model_digest": files.model_digest(args.model)}
    if args.confidence:
        provenance["confidence"] = args.confidence
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    began = time.monotonic()
    if args.second_model:
        found, why = _chosen(args, problem, model, budget)
        provenance |= found.provenance
    elif args.start:
        found, why = _resharded(args, problem, cautious, budget)
    else:
        found, why = SHARDERS[args.algorithm](problem, cautious, seed=args.seed, budget=budget), ""
    found = Plan(found.placements, {**found.provenance, **provenance})
    seconds, cost = time.monotonic() - began, found.provenance["predicted_ms"]
    files.write_plan(args.out, found, problem)
    sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
    print(f"{args.out}: {cost:.3f} ms predicted{sure}, found in {seconds:.2f} s by {args.algorithm}{why}")
    if args.explain:
        _say_explained(found, problem, cautious, budget)
    _say_extrapolated(neural.out_of_range(model, lower(found, problem)))


_SEEDS = 4
"""Plans that each model's search gives to choose among."""


def _chosen(args: argparse.Namespace, problem: Problem, model: NeuralModel, budget: Budget | None) -> tuple[Plan, str]:
    """The plan that both models find good, priced by the first; and how it came to be chosen, in words."""
    second = neural.physical(model) if args.second_model == "physical" else neural.load(args.second_model)
    problem.require_setting(second.setting)
    models = [at_confidence(model, args.confidence), second]
    plans = choose.candidates(problem, models, args.algorithm, range(args.seed, args.seed + _SEEDS), budget)
    choice = choose.choose(plans, problem, models)
    (first_ms, second_ms), alone = choice.total_ms[choice.chosen], choice.total_ms[choice.cheapest]
    why = f"\nchosen among {len(plans)} plans by both models: the second says {second_ms:.3f} ms"
    if choice.chosen != choice.cheapest:
        why += f", and of the plan that the first finds cheapest {alone[1]:.3f} ms (the first: {alone[0]:.3f} ms)"
    provenance = {**choice.plan.provenance, "predicted_ms": first_ms, "setting": str(model.setting), "candidates": len(plans),
                  "second_model": str(args.second_model), "second_ms": second_ms}
    return Plan(choice.plan.placements, provenance), why


def _resharded(args: argparse.Namespace, problem: Problem, model: CostModel, budget: Budget | None) -> tuple[Plan, str]:
    """The plan improved from the one to start from, and by how much, in words."""
    from shardcore.search.space import Reshard  # compiled code, late

    old_problem = files.read_problem(args.start_problem) if args.start_problem else problem
    old = files.read_plan(args.start, old_problem)
    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    found = local(problem, model, seed=args.seed, budget=budget, space=SPACE_OF[args.algorithm],
                  reshard=Reshard(old, args.max_moved_tables, most_bytes))
    found = nearest(found, old, problem) if args.max_moved_tables is None and most_bytes is None else in_order(found, old)
    before = "" if args.start_problem else f", which cost {predicted(lower(old, problem), model).total_ms:.3f} ms"
    return found, f", starting from {args.start}{before}; {plan_report.moves_text(moves_of(old, found))}"


def _say_explained(plan: Plan, problem: Problem, model: CostModel, budget: Budget | None) -> None:
    print(f"\n{plan_report.text(explain(plan, problem, model, budget))}")


def price(args: argparse.Namespace) -> None:
    problem, model = files.read_problem(args.problem), neural.load(args.model)
    problem.require_setting(model.setting)
    found = files.read_plan(args.plan, problem)
    workload = lower(found, problem)
    cost, beyond = predicted(workload, at_confidence(model, args.confidence)), neural.out_of_range(model, workload)
    body = {"total_ms": cost.total_ms, **dataclasses.asdict(cost), "memory_bytes": list(workload.memory_bytes),
            "extrapolated": beyond}
    if args.out:
        files.write_json(args.out, body)
    elif not args.explain:
        print(json.dumps(body, indent=1))
    if args.explain:
        _say_explained(found, problem, at_confidence(model, args.confidence), None)
    _say_extrapolated(beyond)


def replay(args: argparse.Namespace) -> None:
    from shardcore import dataset, replays  # with torch
    from shardcore.measure import hardware
    from shardcore.measure.replay import ReplayConfig, replay_all

    device = args.device or hardware.detect_device()
    hardware.require_device(device)
    problem = files.read_problem(args.problem)
    setting = Setting(args.hardware or hardware.hardware_name(device), problem.global_batch, problem.precision, problem.optimizer)
    plans = [files.read_plan(path, problem) for path in args.plans]
    workloads = [lower(plan, problem) for plan in plans]
    config = ReplayConfig(repeats=args.repeats, arena_bytes=int(args.arena_gib * 2**30), timeout_s=args.timeout_s, seed=args.seed)
    if args.append:
        made = [(plan.provenance.get("algorithm", path.stem), plan) for path, plan in zip(args.plans, plans, strict=True)]
        control = dataset.control(args.append, setting)
        known = replays.append(args.append, problem, made, setting, config,
                               lambda w: replay_all(w, setting, config, device, control))
        costs = [known[replays.plan_digest(plan, problem)] for plan in plans]
    else:
        costs = replay_all(workloads, setting, config, device)
    body = {"setting": files.setting_to_json(setting), "replays": [
        {"plan": str(path), "total_ms": cost.total_ms, **dataclasses.asdict(cost), "memory_bytes": list(workload.memory_bytes)}
        for path, cost, workload in zip(args.plans, costs, workloads, strict=True)]}
    if args.out:
        files.write_json(args.out, body)
    else:
        print(json.dumps(body, indent=1))
    if any(cost.oversubscribed for cost in costs):
        print(f"oversubscribed: {len(problem.topology)} processes on fewer cores measure the scheduler too", file=sys.stderr)


def _say_extrapolated(sentences: Sequence[str]) -> None:
    for sentence in sentences[:5]:
        print(f"extrapolated: {sentence}", file=sys.stderr)
    if len(sentences) > 5:
        print(f"extrapolated: and {len(sentences) - 5} more", file=sys.stderr)


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
    found = schema.read_json(path)
    if isinstance(found, dict) and found.get("schema") == "shardcore/pool":
        return refreshed(problem, files.read_pool(path))
    fresh = files.read_problem(path)
    if missing := {t.name for t in problem.tables} - {t.name for t in fresh.tables}:
        raise ShardCoreError(f"{path} lacks table {min(missing)!r} of problem {problem.name!r}; other tables need a new plan")
    return refreshed(problem, fresh.tables)
