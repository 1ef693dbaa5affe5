"""A job that follows a store of plans: it moves to each new version, and back where that is slower.

    follower = PlanFollower(model, StoredPlans("plans/", "ads"), optimizer)
    for batch in batches:
        train(batch)
        follower.step()

Rank 0 reads the store's pointer from time to time, and tells the others. All move between the same two steps.
Then they measure as many steps as before. Where steps are slower than before, and than predicted beyond the
interval of the gain, the job moves back and tells the store, which then publishes no such plan.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_COUNT, Count, Record, number_within
from shardcore.plans.followed import JobEvent
from shardcore.torchrec.moves.agreement import Agreement, ChangeUndecided
from shardcore.torchrec.moves.reshard import MoveConfig, MoveResult, reshard
from shardcore.torchrec.plan_files import plan_from_json, plan_to_json
from shardcore.torchrec.sharding_plan import to_torchrec

_LOG = logging.getLogger(__name__)
_REPORTED = 20
"""Events in a report, at most."""
MOVED, REFUSED, STAYED, ROLLED_BACK = "moved", "refused", "stayed", "rolled back"


@dataclass(frozen=True)
class FollowConfig(Record):
    """Settings of a job that follows published plans.

    every_steps: steps between two looks at the store.
    measured_steps: steps that are measured before a move, and after it.
    report_s: seconds between two reports to the store, at least. Changes are reported at once.
    move: settings of each move.
    """

    every_steps: Count = 100
    measured_steps: Annotated[int, number_within(3, MOST_COUNT)] = 50
    report_s: Annotated[float, number_within(0, MOST_COUNT)] = 30.0
    move: MoveConfig = field(default_factory=MoveConfig)


class Plans(Protocol):
    """Plans that a job follows, such as plans.followed.StoredPlans. Only rank 0 calls a method."""

    def version(self) -> str:
        """Name of the store's current plan version."""
        ...

    def read(self, version: str) -> Any:
        """Plan and problem of a version in the store, and the step time above which its prediction counts as wrong."""

    def roll_back(self, version: str, reason: str) -> str:
        """Mark a version as slower than predicted, for a reason in words. Returns the version that is current then."""
        ...

    def report(self, report: Mapping[str, Any]) -> None:
        """Keep a job's report, a JSON mapping, in the store."""


class PlanFollower:
    """A running job's link to a store of plans. All ranks have one, and call `step` after each step.

    model: a DistributedModelParallel.
    plans: plans that it follows.
    optimizer, pipeline: the job's (see `reshard`).

    events: all changes so far, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Plans,
        optimizer: Any = None,
        pipeline: Any = None,
        config: FollowConfig | None = None,
    ) -> None:
        self.model, self.plans = model, plans
        self.optimizer, self.pipeline = optimizer, pipeline
        self.config = config or FollowConfig()
        self.events: list[JobEvent] = []
        self._seen: str | None = None
        self._version: str | None = None
        self._step_ms: float | None = None
        self._reported_s = float("-inf")
        self._steps_ms: deque[float] = deque(maxlen=self.config.measured_steps)
        self._last_s: float | None = None
        self._count = 0
        self._trial: _MoveTrial | None = None

    def step(self) -> JobEvent | None:
        """Count a training step; at the due steps look for a new plan in the store, or judge the last move.

        Returns what changed. Raises ShardCoreError if a rank does not come to a look or judgement in time, and
        Undecided where the job has to end.
        """
        now = time.perf_counter()
        if self._last_s is not None:
            self._steps_ms.append(1e3 * (now - self._last_s))
        self._count += 1
        event = None
        if self._trial is not None:
            if len(self._steps_ms) == self.config.measured_steps:
                event = self._judge_move(self._trial)
        elif self._count % self.config.every_steps == 0:
            event = self._follow_store()
        if event is not None:
            event = replace(event, step=self._count, at_s=time.time())
            self.events.append(event)
        if event is not None or (
            self._step_ms is not None and now - self._reported_s >= self.config.report_s
        ):
            self._reported_s = now
            self._report_to_store()
        # The pause of a move is no part of a step.
        self._last_s = time.perf_counter()
        return event

    def _follow_store(self) -> JobEvent | None:
        """Move the tables to the store's current plan if its version is new."""
        change = Agreement.new(self.config.move.timeout_s)
        measured = list(self._steps_ms)
        with change.agreed_phase("look", lambda: {"found": current, "ms": measured}) as shared:
            current = self._encode_new_version() if change.rank == 0 else None
        current, self._step_ms = shared[0]["found"], _slowest_median_ms([s["ms"] for s in shared]) or None
        if current is None:
            return None
        version = self._seen = current["version"]
        if current["error"]:
            return JobEvent(version, REFUSED, current["error"])
        old = plan_to_json(self.model.plan)  # type: ignore[arg-type]
        try:
            moved = self._move_tables(current["plan"])
        except ChangeUndecided:
            raise
        except ShardCoreError as error:
            return JobEvent(version, REFUSED, str(error))
        before, self._version = self._version, version
        if not moved.tables:  # the job's own plan
            return None
        self._trial = _MoveTrial((before, version), old, moved, [s["ms"] for s in shared], current["ratio"])
        self._steps_ms.clear()
        return JobEvent(version, MOVED, before_ms=self._trial.before_ms, **_moved_amounts(moved))

    def _encode_new_version(self) -> dict[str, Any] | None:
        """New plan from the store, encoded for broadcast; None if unchanged."""
        try:
            version = self.plans.version()
        except ShardCoreError:  # it may be there at the next look
            return None
        if version == self._seen:
            return None
        try:
            new, model = self.plans.read(version), self.model
            at: Any = model
            exported = to_torchrec(new.plan, new.problem, model, at.device.type, like=at.plan)
            return {"version": version, "plan": plan_to_json(exported), "ratio": new.most_ratio, "error": ""}
        except ShardCoreError as error:
            return {"version": version, "error": str(error)}

    def _move_tables(self, plan: Mapping[str, Any]) -> MoveResult:
        return reshard(
            self.model, plan_from_json(plan), self.optimizer, pipeline=self.pipeline, config=self.config.move
        )

    def _judge_move(self, trial: _MoveTrial) -> JobEvent:
        """Compare measured steps before and after a move; move back to the old plan if the new one is slower."""
        self._trial = None
        version, change = trial.versions[1], Agreement.new(self.config.move.timeout_s)
        measured = list(self._steps_ms)
        with change.agreed_phase("judge", lambda: measured) as after:
            pass
        before_ms, after_ms = trial.before_ms, _slowest_median_ms(after)
        self._step_ms = after_ms
        noise_ms = 2 * float(np.hypot(_median_error_ms(trial.before), _median_error_ms(after)))
        expected_ms = None if trial.ratio is None else before_ms * trial.ratio
        numbers = {"before_ms": before_ms, "after_ms": after_ms, "expected_ms": expected_ms}
        if after_ms - noise_ms <= max(before_ms, expected_ms or 0.0):
            return JobEvent(version, STAYED, **numbers)
        reason = (
            f"measured {after_ms:.3g} ms a step in the job, {before_ms:.3g} ms before (median of the slowest rank, "
            f"noise {noise_ms:.2g} ms)" + (f"; predicted at most {expected_ms:.3g} ms" if expected_ms else "")
        )
        try:
            moved = self._move_tables(trial.old)
        except ChangeUndecided:
            raise
        except ShardCoreError as error:  # the new plan still trains
            return JobEvent(version, STAYED, f"{reason}; the job cannot move back: {error}", **numbers)
        self._steps_ms.clear()
        self._version, self._step_ms = trial.versions[0], before_ms
        if change.rank == 0:
            try:
                self._seen = self.plans.roll_back(version, reason)
            except ShardCoreError as error:  # the job is back, whatever the store
                reason += f"; the store was not told: {error}"
        return JobEvent(version, ROLLED_BACK, reason, **numbers, **_moved_amounts(moved))

    def _report_to_store(self) -> None:
        """Write the job's current plan version and recent events to the store. Failures are only logged."""
        if dist.get_rank():
            return
        report = {
            "current": self._version,
            "step": self._count,
            "at_s": time.time(),
            "step_ms": self._step_ms,
            "events": [asdict(event) for event in self.events[-_REPORTED:]],
        }
        try:
            self.plans.report(report)
        except ShardCoreError as error:
            _LOG.warning("the job's report was not written: %s", error)


@dataclass(frozen=True)
class _MoveTrial:
    """A completed move to a new plan whose step times are still being judged.

    versions: before it, None if the store does not have it, and after it.
    old: the plan before it.
    before: ms of steps before it, by rank.
    ratio: the longest step that the prediction allows, over the step before.
    """

    versions: tuple[str | None, str]
    old: Mapping[str, Any]
    moved: MoveResult
    before: Sequence[Sequence[float]]
    ratio: float | None

    @property
    def before_ms(self) -> float:
        return _slowest_median_ms(self.before)


def _moved_amounts(moved: MoveResult) -> dict[str, Any]:
    """Tables, bytes and pause of a move, as fields of a JobEvent."""
    return {"tables": len(moved.tables), "bytes": dict(moved.bytes), "pause_s": moved.pause_s}


def _slowest_median_ms(by_rank: Sequence[Sequence[float]]) -> float:
    """Median step time in ms of the slowest rank; 0 without steps."""
    return max((float(np.median(ms)) for ms in by_rank if len(ms)), default=0.0)


def _median_error_ms(by_rank: Sequence[Sequence[float]]) -> float:
    """Standard error in ms of the slowest rank's median step, from its quartiles, for normally distributed steps."""
    ms = max((list(x) for x in by_rank if len(x)), key=lambda x: float(np.median(x)), default=[0.0])
    low, high = np.percentile(ms, [25, 75])
    return 1.2533 * float(high - low) / 1.349 / float(np.sqrt(len(ms)))
