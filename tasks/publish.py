"""Search plans under the champion or a profile, and publish plans that are worth a move."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import mlflow
from prefect import get_run_logger, task

from shardcore import report
from shardcore.core.errors import ShardCoreError, redact_urls
from shardcore.core.types import Problem, Table
from shardcore.cost import known_errors
from shardcore.cost.known_errors import NOT_MEASURED
from shardcore.cost.model import CostModel
from shardcore.cost.profile import load_profile, profile_names
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.decisions import Decision
from shardcore.plans.publisher import PublishConfig, Publisher
from shardcore.report import history_pages, plan_page, published_report
from shardcore.search import DEFAULT_SHARDER, LEARNED, SHARDERS
from shardcore.search.budget import Budget
from shardcore.stages.publish import publish, publish_plan_of_problem
from tasks import console, model_history, owned, paths, policy_registry, publish_claim, registry
from tasks.artifacts import create_markdown_artifact
from tasks.commit import git_commit
from tasks.pricing import Pricing, choose_pricing
from tasks.progress import RunProgress
from tasks.setting import SettingConfig


@task(task_run_name="publish-plans")
@registry.one_line_errors()
def publish_plans(
    problems: Sequence[Path],
    plans: str | Path,
    setting_config: SettingConfig,
    config: PublishConfig,
    everything: bool = False,
    profile: Path | None = None,
) -> str:
    """Search a plan for each problem file, and publish plans that are worth a change. Returns a table of results.

    The champion of a problem's hardware prices its plans. If there is none, a profile does, and the table, the pages
    and the log say so.

    plans: folder or URL (see plans.store).
    everything: True if these are all problems. The champion then counts as published (see publish_claim).
    profile: file of a profile that is preferred to shipped ones.

    Raises ShardCoreError at the end if some problem could not be planned; the others are published. Raises Unreachable
    if a disk or service did not answer; the champion then does not count as published.
    """
    client, progress = registry.connect_to_mlflow(), RunProgress()
    here = setting_config.dataset_or_local_setting(paths.MEASUREMENTS).hardware
    priced = cache(lambda hardware: _pricing_and_publisher(client, hardware, profile, plans, config))
    by, _ = priced(here)
    name = registry.registered_model_name(here)
    if by.champion:
        model_history.record_champion(client, by.champion)
    # In an owned run the guardian ends processes, and `end_with_parent` would not know a parent that owns itself.
    begin = None if owned.RUN in os.environ else owned.end_with_parent
    # Under a profile nothing is claimed: plans are published again under the first champion. If a disk or service did
    # not answer, the version does not count as published, and the watch tries again.
    with publish_claim.claimed_publishing(client, by.champion, everything) if by.champion else nullcontext():
        results = publish(
            problems, lambda hardware: priced(hardware or here)[1], config.processes, progress, begin
        )
        # Pages are written before the claim ends: once a version counts as published, its pages are there.
        # Without a champion, the page of models shows the challenger that waits or was refused.
        refused = model_history.refusal_reason(client, name)
        models = model_history.version_records(client, name) if by.champion or refused else []
        first = [*([refused] if refused else []), *known_errors.error_warnings(by.model)]
        errors = [history_pages.errors_sentence(x) for x in models if by.champion and x.version == by.version]
        store.write_store_file(
            plans, store.MODELS, history_pages.model_versions_page(name, models, first).encode()
        )
        model = f"Model: {by.name} version {by.version}, {known_errors.model_label(by.model)}"
        sentences = [f"{x}." for x in (*first, model, *errors)]
        notes = [
            *results.profile_notes,
            *(f"no new plan: {results.failures[i]}" for i in sorted(results.failures)),
        ]
        rows = results.decision_rows
        table = report.markdown_table(published_report.HEADERS, rows)
        page = "\n\n".join(
            [
                f"# Plans under {by.origin_text}",
                *(f"**{x}**" for x in sentences[: len(first)]),
                *sentences[len(first) :],
                table,
                *(f"- {note}" for note in notes),
            ]
        )
        store.write_store_file(plans, store.REPORT, page.encode(errors="replace"))
        store.write_store_file(
            plans, store.INDEX, published_report.store_index_page(_last_decisions(plans)).encode()
        )
        create_markdown_artifact(
            f"Under {by.origin_markdown}, in {redact_urls(str(plans))}\n\n{page}",
            key="published-plans",
            description=f"Plans under {by.origin_text}",
        )
    shown = "\n".join(
        [*sentences, "", report.text_table(published_report.HEADERS, rows), *results.profile_notes]
    )
    if results.failures:
        progress.info("published:\n%s", shown)
    results.require_all_published()
    outcomes = Counter(found.decision.outcome for found in results.published.values())
    progress.info(
        "%d plans under %s: %s",
        len(rows),
        by.origin_text,
        ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()),
        extra=console.RESULT,
    )
    return shown


@task(task_run_name="publish-first")
@registry.one_line_errors()
def publish_first_plan(problems: Sequence[Path], plans: str | Path, config: PublishConfig) -> str | None:
    """Publish a first plan, priced by a shipped hardware profile, if a store has no plans yet.

    So a first run has a plan, and its page, before it has measured. Returns the problem's name. None: there are plans,
    or no problem is of a profile's hardware.
    """
    if store.published_problem_names(plans):
        return None
    # TorchRec's planner takes its seconds when the plan is published again.
    config = dataclasses.replace(config, torchrec_s=0.0)
    for problem in map(files.read_problem, problems):
        if problem.topology.hardware not in profile_names():
            continue
        by, publisher = _pricing_and_publisher(
            registry.connect_to_mlflow(), problem.topology.hardware, None, plans, config
        )
        decision = publish_plan_of_problem(publisher, problem).decision
        get_run_logger().info(
            "a first plan, under %s: %s, %.2f ms a step; %s",
            by.origin_text,
            problem.name,
            decision.total_ms,
            f"{redact_urls(str(plans))}/{problem.name}/versions/{decision.current}/{store.PAGE}",
            extra=console.RESULT,
        )
        return problem.name
    return None


def compile_searches() -> None:
    """Compile the search code, which takes some 20 s once, by searching a plan of a small problem."""
    profile = load_profile(profile_names()[0])
    problem = Problem("compile", (Table("t", 64, 4, 1.0),), profile.topology(1, 2), 2)
    SHARDERS[DEFAULT_SHARDER](problem, profile.cost_model().for_problem(problem), budget=Budget(evals=1))


def _pricing_and_publisher(
    client: mlflow.MlflowClient, hardware: str, profile: Path | None, plans: str | Path, config: PublishConfig
) -> tuple[Pricing, Publisher]:
    """Cost model and publisher of plans for a hardware. Raises ShardCoreError if either is missing."""
    logger, by, policy = get_run_logger(), choose_pricing(client, hardware, profile), None
    if not by.champion:
        logger.warning("no model of %s is champion: plans for it are under %s", hardware, by.origin_text)
        if config.algorithm in LEARNED:  # there is no policy, as policies are trained against models
            config = dataclasses.replace(config, algorithm=DEFAULT_SHARDER)
    provenance = _plan_provenance(by, config)
    if config.algorithm in LEARNED:
        policy, of_policy = policy_registry.champion_policy(client, LEARNED[config.algorithm][0], hardware)
        provenance |= {"policy": of_policy.name, "policy_version": str(of_policy.version)}
        if of_policy.tags.get("cost_model_version") != by.version:
            logger.warning(
                "policy version %s was trained against cost model version %s; the champion is %s",
                of_policy.version,
                of_policy.tags.get("cost_model_version"),
                by.version,
            )
    return by, Publisher(by.model, plans, config, provenance, plan_page.published_version_page, policy)


def _last_decisions(plans: str | Path) -> dict[str, Decision | None]:
    """Last decision on each problem of a plan store. None for a decision that cannot be read."""
    decisions: dict[str, Decision | None] = {}
    for name in store.published_problem_names(plans):
        decisions[name] = None
        with suppress(ShardCoreError):
            decisions[name] = store.last_decision(plans, name)
    return decisions


def _plan_provenance(pricing: Pricing, config: PublishConfig) -> dict[str, Any]:
    """Provenance of plans: the cost model, its training data, the code version and the search settings."""
    return {
        "model": pricing.name,
        "model_version": pricing.version,
        "setting": str(pricing.model.setting),
        **(_training_provenance(pricing.model) if pricing.champion else {"profile": NOT_MEASURED}),
        "git_commit": git_commit(),
        "algorithm": config.algorithm,
        "budget_evals": config.budget_evals,
        "seed": config.seed,
        **({} if config.max_moved_tables is None else {"max_moved_tables": config.max_moved_tables}),
    }


def _training_provenance(model: CostModel) -> dict[str, Any]:
    """Provenance of a trained cost model: data versions, code version and seed."""
    trained: Any = known_errors.trained_models(model)  # NeuralModels, in tests stand-ins
    of_each = [one.meta["provenance"] for one in trained]

    def joined_value(name: str, default: Any) -> Any:
        """Provenance value of a model of several precisions: the common value, or the values joined by "+"."""
        values = list(dict.fromkeys(each.get(name, default) for each in of_each))
        return values[0] if len(values) == 1 else "+".join(map(str, values))

    datasets = {name: one["digest"] for each in of_each for name, one in each.get("lent", {}).items()}
    return {
        "data_version": joined_value("data_version", "unversioned"),
        "data": joined_value("data", "unknown"),
        "model_git_commit": joined_value("git_commit", "no git"),
        "model_seed": joined_value("seed", None),
        **({"datasets": datasets} if datasets else {}),
    }
