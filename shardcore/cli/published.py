"""Commands on published plans: history, diff, drift, view."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardcore.cli.models import ModelOptions, load, source_of
from shardcore.cli.options import (
    Amount,
    Group,
    Natural,
    Output,
    PlanFile,
    Positive,
    ProblemFile,
    SearchOptions,
    require_outputs,
)
from shardcore.cli.progress_line import shown
from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import report
from shardcore.core.types import Plan, Problem
from shardcore.stages.screen import open_page

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.plans.decisions import Version

command = Group()


@dataclass(frozen=True)
class HistoryOptions:
    """Show which versions of a problem's published plan were current, since when and why.

    plans: folder or URL of published plans
    name: name of the problem
    last: number of decisions to show
    """

    plans: Annotated[str, "PLANS"]
    name: str
    _: KW_ONLY
    last: Annotated[Positive, "N"] = 20


@dataclass(frozen=True)
class DiffOptions(ModelOptions):
    """Show which tables move from one plan to another, and how many bytes of weights.

    problem: problem of both plans; default: problem.json beside each, as in the folders of published versions
    page: write a page that compares them device by device and table by table, for a browser; with a model
      or a profile, which prices both
    """

    REQUIRED = ()
    EXCLUSIVE = ModelOptions.REQUIRED
    old: Annotated[Path, "OLD.json"]
    new: Annotated[Path, "NEW.json"]
    _: KW_ONLY
    problem: ProblemFile | None = None
    page: Annotated[Path, "PAGE.html", Output()] | None = None


@dataclass(frozen=True)
class ViewOptions(ModelOptions):
    """Show a plan's page in a browser: its devices, its tables, and what moves would do.

    A published version has a page beside it, which is shown where neither a model nor a profile is given. For a plan
    by a profile that ships with ShardCore, it is the default.

    problem: problem of the plan; default: problem.json beside it
    out: write the page there; default: a temporary file
    """

    REQUIRED = ()
    EXCLUSIVE = ModelOptions.REQUIRED
    plan: PlanFile
    _: KW_ONLY
    problem: ProblemFile | None = None
    out: Annotated[Path, "PAGE.html", Output()] | None = None


@dataclass(frozen=True)
class DriftOptions(ModelOptions, SearchOptions):
    """Show how far a published plan is from the best, now that its tables' statistics have changed, and what a
    re-plan would save.

    plans: folder or URL of published plans
    name: name of the problem
    fresh: problem or pool of tables with the present shapes, pooling and access statistics
    max_moved_tables: most tables that the re-plan may move; default: any number
    threshold: share of the cost that the gain of a re-plan has to exceed, in addition to its margin, to pay
    out: write the re-plan there, with the present problem
    """

    plans: Annotated[str, "PLANS"]
    name: str
    _: KW_ONLY
    fresh: Annotated[Path, "FILE.json"]
    max_moved_tables: Annotated[Natural, "N"] | None = None
    threshold: Amount = 0.0
    out: Annotated[Path, "FOLDER", Output(("problem.json", "plan.json"))] | None = None


@command
def history(args: HistoryOptions) -> None:
    from shardcore.plans import store
    from shardcore.report import plan_report

    found = list(islice(store.history(args.plans, args.name), args.last))
    if not found:
        store.current(args.plans, args.name)  # raises, naming what is published
    print(plan_report.decision_history_text(found))


@command
def diff(args: DiffOptions) -> None:
    from shardcore.plans.diff import diff as moves_of
    from shardcore.report import plan_report

    if args.source and not args.page:
        given = "hardware" if args.hardware else "model"
        raise ShardCoreError(f"diff was given --{given} without --page, whose plans it prices; give both")
    require_outputs(args, [] if args.problem else [p.with_name("problem.json") for p in (args.old, args.new)])
    (old, _), (new, problem) = (_read(path, args.problem) for path in (args.old, args.new))
    print(plan_report.moves_by_table_text(moves_of(old, new, problem)))
    if args.page:
        model = load(source_of(args, args.new, new))
        _write_comparison(args.page, model, ((args.new, new), (args.old, old)), problem)
        print(f"{args.page}: both plans, for a browser")


def _write_comparison(
    page: Path, model: CostModel, plans: Sequence[tuple[Path, Plan]], problem: Problem
) -> None:
    """Write a page about two plans, both under `problem`, which is that of the new one."""
    from shardcore.io import writing
    from shardcore.report import plan_page
    from shardcore.search.anneal.reshard import rebind_tables
    from shardcore.search.decisions.towers import as_planned

    model = model.for_problem(problem)
    problem.require_setting(model.setting)
    versions = []
    for path, made in plans:
        plan = rebind_tables(made, problem)
        versions.append(_version(str(path), plan, as_planned(plan, problem), model))
    writing.write_atomic(page, plan_page.plan_comparison_page(problem, *versions).encode())


def _version(name: str, plan: Plan, problem: Problem, model: CostModel) -> Version:
    """A plan under a model, with what its moves would do. problem: as the plan has it (towers.as_planned)."""
    from shardcore.cost.model import price_plan
    from shardcore.plans.decisions import Version
    from shardcore.plans.what_if import what_if

    priced = price_plan(plan, problem, model, fits=False)
    report("pricing moves")
    return Version(name, plan, priced.cost, priced.workload.memory_bytes, what_if(priced, problem, model))


@command
def drift(args: DriftOptions) -> None:
    from shardcore.io import files
    from shardcore.plans import store
    from shardcore.plans.drift import drift as drift_of
    from shardcore.plans.replan import ReplanConfig
    from shardcore.report import plan_report

    plan, problem = store.read_plan(args.plans, args.name)
    now = _with_statistics_of(args.fresh, problem)
    model = load(args.source).for_problem(now)
    now.require_setting(model.setting)
    config = ReplanConfig(args.max_moved_tables, seed=args.seed, budget=args.budget())
    with shown():
        report("searching a re-plan")
        found = drift_of(plan, problem, now, model, config, args.threshold)
    print(plan_report.plan_drift_text(found))
    if args.out:
        files.write_problem(args.out / "problem.json", now)
        files.write_plan(args.out / "plan.json", found.replan, now)
        print(f"{args.out}/plan.json: the re-plan, for {args.out}/problem.json")


@command
def view(args: ViewOptions) -> None:
    from shardcore.io import writing
    from shardcore.plans.store import PAGE

    beside = args.plan.with_name(PAGE)
    if beside.exists() and not args.source:
        page = beside.read_bytes()
    else:
        require_outputs(args, [] if args.problem else [args.plan.with_name("problem.json")])
        with shown():
            report(f"reading {args.plan}")
            page = _page_of(args).encode()
    if args.out is None:
        handle, path = tempfile.mkstemp(prefix=f"{args.plan.stem}-", suffix=".html")
        os.close(handle)
    out = args.out or Path(path)
    writing.write_atomic(out, page)
    print(f"{out}: the page{', in your browser' if open_page(out) else ', for a browser'}")


def _page_of(args: ViewOptions) -> str:
    """The page of a plan that is priced now."""
    from shardcore.report import plan_page
    from shardcore.search.decisions.towers import as_planned

    plan, problem = _read(args.plan, args.problem)
    model = load(source_of(args, args.plan, plan)).for_problem(problem)
    problem.require_setting(model.setting)
    return plan_page.unpublished_plan_page(
        problem, _version(str(args.plan), plan, as_planned(plan, problem), model)
    )


def _read(path: Path, problem: Path | None) -> tuple[Plan, Problem]:
    """A valid plan with its problem: the given one, or problem.json beside it."""
    from shardcore.io import files, schema

    beside = path.with_name("problem.json")
    if not problem and not beside.exists():
        schema.require_file(path)  # a plan that is not there is named before its problem
        raise ShardCoreError(
            f"{path} has no problem.json beside it, its problem; give --problem, or "
            "the plans of published versions"
        )
    its_problem = files.read_problem(problem or beside)
    return files.read_valid_plan(path, its_problem), its_problem


def _with_statistics_of(path: Path, problem: Problem) -> Problem:
    """The problem with fresh shapes and statistics from a problem file or a pool."""
    from shardcore.io import files
    from shardcore.io.envelope import is_document
    from shardcore.plans.drift import refreshed, refreshed_by

    if is_document(path, "pool"):
        return refreshed(problem, files.read_pool(path))
    # A pool may lack tables of the problem. A problem may not: it would be another one.
    with files.validating(path):
        return refreshed_by(problem, files.read_problem(path))
