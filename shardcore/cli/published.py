"""Commands on published plans: history, diff, drift, view."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from shardcore.cli.commands import DiffOptions, DriftOptions, HistoryOptions, ViewOptions
from shardcore.cli.models import load_model_for_problem, model_source
from shardcore.cli.options import require_writable_outputs
from shardcore.cli.progress_line import showing_progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import report
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require
from shardcore.cost.model import CostModel, price_plan
from shardcore.io import files, schema, writing
from shardcore.io.envelope import is_document
from shardcore.plans import store
from shardcore.plans.decisions import PlanVersion
from shardcore.plans.diff import diff_plans as moves_of
from shardcore.plans.drift import plan_drift as drift_of
from shardcore.plans.drift import with_fresh_problem, with_fresh_tables
from shardcore.plans.replan import ReplanConfig
from shardcore.plans.store import PAGE
from shardcore.plans.what_if import price_single_moves
from shardcore.report import plan_page, plan_report
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.decisions.towers import with_towers_of_plan
from shardcore.stages.screen import open_page


def history(args: HistoryOptions) -> None:
    found = list(islice(store.decision_history(args.plans, args.name), args.last))
    if not found:
        store.current_version(args.plans, args.name)  # raises, naming what is published
    print(plan_report.decision_history_text(found))


def diff(args: DiffOptions) -> None:
    require(
        args.page is not None or not args.source,
        f"diff was given --{'hardware' if args.hardware else 'model'} without --page, whose plans it prices; give both",
    )
    require_writable_outputs(
        args, [] if args.problem else [p.with_name("problem.json") for p in (args.old, args.new)]
    )
    (old, _), (new, problem) = (_read_plan_and_problem(path, args.problem) for path in (args.old, args.new))
    print(plan_report.moves_by_table_text(moves_of(old, new, problem)))
    if args.page:
        model = load_model_for_problem(model_source(args, args.new, new), problem)
        # Both for the problem of the new plan.
        versions = [
            _priced_version(str(path), rebind_tables(plan, problem), problem, model)
            for path, plan in ((args.new, new), (args.old, old))
        ]
        writing.write_atomic(args.page, plan_page.plan_comparison_page(problem, *versions).encode())
        print(f"{args.page}: both plans, for a browser")


def _priced_version(name: str, plan: Plan, problem: Problem, model: CostModel) -> PlanVersion:
    """A plan priced by a model, with the effect of single moves. problem: without towers, even if the plan has some."""
    problem = with_towers_of_plan(plan, problem)
    priced = price_plan(plan, problem, model, fits=False)
    report("pricing moves")
    return PlanVersion(
        name, plan, priced.cost, priced.workload.memory_bytes, price_single_moves(priced, problem, model)
    )


def drift(args: DriftOptions) -> None:
    plan, problem = store.read_plan(args.plans, args.name)
    now = _with_statistics_of_file(args.fresh, problem)
    model = load_model_for_problem(args.source, now)
    with showing_progress("searching a re-plan"):
        found = drift_of(
            plan,
            problem,
            now,
            model,
            ReplanConfig(args.max_moved_tables, seed=args.seed, budget=args.budget()),
            args.threshold,
        )
    print(plan_report.plan_drift_text(found))
    if args.out:
        files.write_problem(args.out / "problem.json", now)
        files.write_plan(args.out / "plan.json", found.replan, now)
        print(f"{args.out}/plan.json: the re-plan, for {args.out}/problem.json")


def view(args: ViewOptions) -> None:
    beside = args.plan.with_name(PAGE)
    if beside.exists() and not args.source:
        page = beside.read_bytes()
    else:
        require_writable_outputs(args, [] if args.problem else [args.plan.with_name("problem.json")])
        with showing_progress(f"reading {args.plan}"):
            plan, problem = _read_plan_and_problem(args.plan, args.problem)
            model = load_model_for_problem(model_source(args, args.plan, plan), problem)
            version = _priced_version(str(args.plan), plan, problem, model)
            page = plan_page.unpublished_plan_page(problem, version).encode()
    out = args.out or Path(tempfile.mkdtemp(prefix=f"{args.plan.stem}-")) / PAGE
    writing.write_atomic(out, page)
    print(f"{out}: the page{', in your browser' if open_page(out) else ', for a browser'}")


def _read_plan_and_problem(path: Path, problem: Path | None) -> tuple[Plan, Problem]:
    """Read a plan and its problem: a given file, or problem.json beside the plan."""
    beside = path.with_name("problem.json")
    if not problem and not beside.exists():
        schema.require_file(path)  # a plan that is not there is named before its problem
        raise ShardCoreError(
            f"{path} has no problem.json beside it, its problem; give --problem, or "
            "the plans of published versions"
        )
    its_problem = files.read_problem(problem or beside)
    return files.read_valid_plan(path, its_problem), its_problem


def _with_statistics_of_file(path: Path, problem: Problem) -> Problem:
    """Problem with table shapes and access statistics updated from a problem file or a pool of tables."""
    if is_document(path, "pool"):
        return with_fresh_tables(problem, files.read_pool(path))
    # A pool may lack tables of the problem. A problem may not: it would be another one.
    with files.name_file_in_errors(path):
        return with_fresh_problem(problem, files.read_problem(path))
