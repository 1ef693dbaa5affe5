"""Publish plans of problems: search them side by side, and say what came of each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.progress import report_to_listener
from shardcore.core.types import Problem
from shardcore.cost.known_errors import NOT_MEASURED
from shardcore.io import files
from shardcore.plans import store
from shardcore.plans.publisher import PublishedPlan, Publisher
from shardcore.report import published_report
from shardcore.stages.progress import Progress, StageWork

_KILLED = (
    "a process that searches plans was killed, as for lack of memory; lower publish.processes, publish again"
)


@dataclass(frozen=True)
class PublishResults:
    """Outcomes of publishing plans for several problems.

    problems: their files.
    published: decisions, by number of the problem.
    failures: reasons why others have no new plan.
    """

    problems: Sequence[Path]
    published: dict[int, PublishedPlan] = dataclasses.field(default_factory=dict)
    failures: dict[int, ShardCoreError] = dataclasses.field(default_factory=dict)

    @property
    def decision_rows(self) -> list[tuple[Any, ...]]:
        """Table rows of the published decisions, under published_report.HEADERS, in the order of the problems."""
        return [published_report.published_plan_row(found) for _, found in sorted(self.published.items())]

    @property
    def profile_notes(self) -> list[str]:
        """A line of text for each profile that prices plans in place of a measured model, with the problems' names."""
        priced = [
            (found.decision.provenance["model"], found.decision.problem)
            for _, found in sorted(self.published.items())
            if "profile" in found.decision.provenance
        ]
        return [
            f"{profile}, {NOT_MEASURED}: {', '.join(name for by, name in priced if by == profile)}"
            for profile in dict(priced)
        ]

    def require_all_published(self) -> None:
        """Raise ShardCoreError if a problem has no new plan."""
        if self.failures:
            first, *others = sorted(self.failures)
            named = ", ".join(self.problems[i].stem for i in others[:3]) + " ..." * (len(others) > 3)
            more = f"; {store.REPORT} and the log say why also of {named}" if others else ""
            raise ShardCoreError(
                f"{len(self.failures)} of {len(self.problems)} problems have no new plan: {self.failures[first]}{more}"
            )


def publish(
    problems: Sequence[Path],
    publisher_of: Callable[[str | None], Publisher],
    processes: int | None,
    progress: Progress,
    begin: Callable[[], object] | None = None,
) -> PublishResults:
    """Search a plan for each problem file, and publish the plan if worth the move. A failure does not stop the other
    problems.

    publisher_of: publisher of plans for a hardware. None: of problems that name none.
    processes: problems that are searched at once (see PublishConfig).
    begin: called first in each process.

    Raises Unreachable at the end if a disk or service did not answer.
    """
    results, items = PublishResults(problems), dict[int, tuple[Publisher, Problem]]()
    work = StageWork(progress, "problems", len(problems))

    def record_result(i: int, found: PublishedPlan | BaseException) -> None:
        path = problems[i]
        if isinstance(found, PublishedPlan):
            results.published[i] = found
            decision = found.decision
            progress.info(
                "%s: %s, %.2f ms: %s",
                decision.problem,
                decision.outcome,
                found.cost.total_ms,
                decision.reason,
                extra={"problem": decision.problem},
            )
        else:
            failure = results.failures[i] = _publish_failure(path, found)
            cause = None if isinstance(found, ShardCoreError) else found
            progress.warning("%s", failure, extra={"problem": path.stem}, exc_info=cause)
        work.show_done(len(results.published) + len(results.failures))

    for i, path in enumerate(problems):
        try:
            problem = files.read_problem(path)
            if problem.name in (other.name for _, other in items.values()):
                raise ShardCoreError(
                    f"another problem of this run is named {problem.name!r} too; give it a name of its own"
                )
            items[i] = publisher_of(problem.topology.hardware), problem
        except Exception as error:
            record_result(i, error)
    for i, found in _publish_each(items, processes, work, begin):
        record_result(i, found)
    for failure in results.failures.values():
        if isinstance(failure, Unreachable):
            raise failure
    return results


def _publish_failure(path: Path, error: BaseException) -> ShardCoreError:
    """Error that names a problem's file and why the problem has no new plan."""
    message = str(error) if isinstance(error, ShardCoreError) else repr(error)
    if isinstance(error, BrokenExecutor):
        message = _KILLED
    kind = Unreachable if isinstance(error, Unreachable) else ShardCoreError
    return kind(message if message.startswith(str(path)) else f"{path}: {message}")


def publish_plan_of_problem(publisher: Publisher, problem: Problem) -> PublishedPlan:
    """Search and publish a plan of one problem under the publisher's model. Raises as Publisher.publish."""
    model = publisher.model.for_problem(problem)
    problem.require_setting(model.setting)
    provenance = publisher.provenance
    if "profile" in provenance:  # a profile gets its setting from the problem
        provenance = {**provenance, "setting": str(model.setting)}
    return dataclasses.replace(publisher, model=model, provenance=provenance).publish(problem)


def _publish_each(
    items: Mapping[int, tuple[Publisher, Problem]],
    processes: int | None,
    work: StageWork,
    begin: Callable[[], object] | None,
) -> Iterator[tuple[int, PublishedPlan | BaseException]]:
    """Publish plans of problems in several processes. Yields each problem's number with its result or error, in order
    of completion."""
    count = min(processes or len(os.sched_getaffinity(0)), len(items))
    if count > 1:
        # Spawned, as a fork would copy locks that threads of the caller hold.
        with ProcessPoolExecutor(count, get_context("spawn"), begin) as pool, ExitStack() as stack:
            # If this run is stopped, items that wait do not begin. One that was handed to a process may.
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            numbers = {pool.submit(publish_plan_of_problem, *item): i for i, item in items.items()}
            # A future has no result if a process was killed.
            yield from ((numbers[x], x.exception() or x.result()) for x in as_completed(numbers))
        return
    for i, item in items.items():
        try:
            with report_to_listener(work.show_phase):
                found = publish_plan_of_problem(*item)
        except Exception as error:
            found = error
        yield i, found
