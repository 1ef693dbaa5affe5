"""Commands on published plans: history, diff, drift."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from shardcore.cli.options import amount, command, natural, positive, require_outputs
from shardcore.cli.progress_line import shown
from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import report
from shardcore.core.types import Plan, Problem


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        history,
        "Say which versions of a problem's published plan were current, since when and why.",
    )
    p.add_argument("plans", metavar="PLANS", help="folder or URL of published plans")
    p.add_argument("name", help="of the problem")
    p.add_argument("--last", type=positive(int), default=20, metavar="N", help="decisions to show")

    p = command(
        commands,
        diff,
        "Say which tables move from one plan to another, and how many bytes of weights.",
        outputs=("page",),
    )
    p.add_argument("old", type=Path, metavar="OLD.json")
    p.add_argument("new", type=Path, metavar="NEW.json")
    p.add_argument(
        "--problem",
        type=Path,
        metavar="PROBLEM.json",
        help="of both plans; default: problem.json beside each, as in the folders of published versions",
    )
    p.add_argument(
        "--page",
        type=Path,
        metavar="PAGE.html",
        help="write a page that compares them device by "
        "device and table by table, for a browser; with --model",
    )
    p.add_argument("--model", type=Path, action="append", help="folder of a trained model, which prices both")

    p = command(
        commands,
        drift,
        "Say how far a published plan is from the best, now that its tables' "
        "statistics changed, and what a re-plan would save.",
        folders={"out": ("problem.json", "plan.json")},
    )
    p.add_argument("plans", metavar="PLANS", help="folder or URL of published plans")
    p.add_argument("name", help="of the problem")
    p.add_argument(
        "--fresh",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="a problem or a pool of tables with the shapes, pooling and access statistics of now",
    )
    p.add_argument(
        "--model",
        type=Path,
        required=True,
        action="append",
        help="folder of a trained model; where weights of tables differ in precision, give it for each",
    )
    p.add_argument(
        "--max-moved-tables",
        type=natural,
        metavar="N",
        help="most tables that the re-plan may move; default: any number",
    )
    p.add_argument(
        "--threshold",
        type=amount,
        default=0.0,
        help="a re-plan pays if its gain exceeds both its margin and this share of the cost",
    )
    p.add_argument("--budget-evals", type=positive(int), help="plans to price in each of the searches")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the re-plan there, with the problem of now"
    )


def history(args: argparse.Namespace) -> None:
    from shardcore.plans import store
    from shardcore.report import plan_report

    found = list(islice(store.history(args.plans, args.name), args.last))
    if not found:
        store.current(args.plans, args.name)  # raises, naming what is published
    print(plan_report.history_text(found))


def diff(args: argparse.Namespace) -> None:
    from shardcore.plans.diff import diff as moves_of
    from shardcore.report import plan_report

    if bool(args.page) != bool(args.model):
        raise ShardCoreError(
            f"diff was given --{'page' if args.page else 'model'} alone; it needs --page "
            "and --model, or neither"
        )
    require_outputs(args, [] if args.problem else [p.with_name("problem.json") for p in (args.old, args.new)])
    (old, _), (new, problem) = (_read(path, args.problem) for path in (args.old, args.new))
    print(plan_report.diff_text(moves_of(old, new, problem)))
    if args.page:
        _write_comparison(args, old, new, problem)
        print(f"{args.page}: both plans, for a browser")


def _write_comparison(args: argparse.Namespace, old: Plan, new: Plan, problem: Problem) -> None:
    """Both plans under the problem of the new one."""
    from shardcore import load_model
    from shardcore.cost.model import price
    from shardcore.io import files
    from shardcore.plans.decisions import Version
    from shardcore.report import plan_page
    from shardcore.search.anneal.reshard import rebind_tables
    from shardcore.search.decisions.towers import as_planned
    from shardcore.step.lower import lower

    model = load_model(args.model).for_problem(problem)
    problem.require_setting(model.setting)
    versions = []
    for path, made in ((args.new, new), (args.old, old)):
        plan = rebind_tables(made, problem)
        work = lower(plan, as_planned(plan, problem), fits=False)
        versions.append(Version(str(path), plan, price(work, model), work.memory_bytes))
    files.write_atomic(args.page, plan_page.comparison(problem, *versions).encode())


def drift(args: argparse.Namespace) -> None:
    from shardcore import load_model
    from shardcore.io import files
    from shardcore.plans import store
    from shardcore.plans.drift import drift as drift_of
    from shardcore.plans.replan import ReplanConfig
    from shardcore.report import plan_report
    from shardcore.search.budget import Budget

    plan, problem = store.read_plan(args.plans, args.name)
    now = _with_statistics_of(args.fresh, problem)
    model = load_model(args.model).for_problem(now)
    now.require_setting(model.setting)
    budget = Budget(args.budget_evals) if args.budget_evals else None
    config = ReplanConfig(args.max_moved_tables, seed=args.seed, budget=budget)
    with shown():
        report("searching a re-plan")
        found = drift_of(plan, problem, now, model, config, args.threshold)
    print(plan_report.drift_text(found))
    if args.out:
        files.write_problem(args.out / "problem.json", now)
        files.write_plan(args.out / "plan.json", found.replan, now)
        print(f"{args.out}/plan.json: the re-plan, for {args.out}/problem.json")


def _read(path: Path, problem: Path | None) -> tuple[Plan, Problem]:
    """A valid plan with its problem: the given one, or problem.json beside it."""
    from shardcore.io import files
    from shardcore.step.lower import require_plan

    beside = path.with_name("problem.json")
    if not problem and not beside.exists():
        raise ShardCoreError(
            f"{path} has no problem.json beside it, its problem; give --problem, or "
            "the plans of published versions"
        )
    of = files.read_problem(problem or beside)
    plan = files.read_plan(path, of)
    with files.validating(path):
        require_plan(plan, of)
    return plan, of


def _with_statistics_of(path: Path, problem: Problem) -> Problem:
    """The problem with fresh shapes and statistics from a problem file or a pool."""
    from shardcore.io import files
    from shardcore.io.envelope import is_document
    from shardcore.plans.drift import refreshed, refreshed_by

    if is_document(path, "pool"):
        return refreshed(problem, files.read_pool(path))
    # A pool may lack tables. A problem that lacks some is another problem.
    with files.validating(path):
        return refreshed_by(problem, files.read_problem(path))
