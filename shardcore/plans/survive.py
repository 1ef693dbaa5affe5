"""Plans for a job that loses a rank or a host, made before the loss.

A job that torchrun restarts on what is left takes the prepared plan (`ShardCorePlanner(prepared=FOLDER)`), and loads
its rows from the last checkpoint (torchrec/moves/checkpoints.py). A rank keeps its number of samples, so the global
batch shrinks with the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.io import files
from shardcore.plans.diff import diff_plans
from shardcore.plans.replan import ReplanConfig, renumber_devices, replan
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.budget import Budget
from shardcore.search.sharders import DEFAULT_SHARDER, SHARDERS
from shardcore.search.state.shards import priced_plan
from shardcore.step.lower import require_valid_plan
from shardcore.step.memory import memory_by_part

_FRESH_GAIN = 0.05
"""Gain of a plan that is searched from nothing, from which it replaces one that leaves tables where they are."""
_PLAN, _PROBLEM = ".plan.json", ".problem.json"


@dataclass(frozen=True)
class PreparedPlan:
    """Plan for a job that lost a rank or a host, or the reason why there is none.

    losses: names of losses that leave the same devices, such as ("rank 0", "rank 1"). The plan is for the first.
    problem: of the devices that are left, with as many samples on each as before.
    plan: None if no plan fits.
    moved_tables: tables with rows or columns on other devices than before the loss.
    read_bytes: bytes of weights and optimizer state that the fullest rank reads from a checkpoint.
    reason: why there is no plan; "" if there is one.
    """

    losses: tuple[str, ...]
    problem: Problem
    plan: Plan | None = None
    moved_tables: int = 0
    read_bytes: int = 0
    reason: str = ""


def prepare_plans(
    plan: Plan, problem: Problem, model: CostModel, unit: str, seed: int = 0, budget: Budget | None = None
) -> Iterator[PreparedPlan]:
    """Plans for the loss of each rank or of each host. Losses that leave the same devices have one plan.

    Only tables that were on the lost devices move. Where that fits no plan, or one that is searched from nothing is
    cheaper by _FRESH_GAIN, any table may.

    unit: "rank" or "host". seed, budget: of each search.

    Raises ShardCoreError for a problem with one rank or one host only.
    """
    topology = problem.topology
    lost = {
        "rank": {f"rank {rank}": (device,) for rank, device in enumerate(topology.ranks)},
        "host": dict(zip(topology.hosts, topology.devices_by_host, strict=True)),
    }[unit]
    require(len(lost) > 1, f"problem {problem.name!r} has one {unit}; a job that loses it has none left")
    alike: dict[object, list[str]] = defaultdict(list)
    for name, gone in lost.items():
        left = _problem_without(problem, gone).topology
        # Names of hosts do not matter, only which devices share one.
        key = tuple((d.memory_bytes, d.speed) for d in left.devices), left.domain_numbers.tobytes()
        alike[key].append(name)
    for names in alike.values():
        prepared = PreparedPlan(tuple(names), _problem_without(problem, lost[names[0]]))
        try:
            old, now = renumber_devices(plan, problem, prepared.problem, lost[names[0]])
            priced = model.for_problem(now)
            found = SHARDERS[DEFAULT_SHARDER](now, priced, seed=seed, budget=budget)
            with suppress(ShardCoreError):
                kept = replan(old, now, priced, ReplanConfig(max_moved_tables=0, seed=seed, budget=budget))
                found = min(found, kept, key=lambda p: _step_ms(p) * (1 + _FRESH_GAIN * (p is not kept)))
        except ShardCoreError as error:
            yield replace(prepared, reason=str(error))
        else:
            yield replace(
                prepared,
                plan=found,
                moved_tables=len(diff_plans(old, found, now).moves),
                read_bytes=max(
                    device.parts["weights"] + device.parts["optimizer state"]
                    for device in memory_by_part(found, now)
                ),
            )


def _problem_without(problem: Problem, lost_devices: Sequence[int]) -> Problem:
    """Problem of a job on the devices that are left, with as many samples on each as before.

    A table whose pins are all gone may live anywhere.
    """
    number = {d: i for i, d in enumerate(d for d in problem.topology.device_indices if d not in lost_devices)}
    pins = ((name, tuple(number[d] for d in of if d in number)) for name, of in problem.constraints.pinned)
    return replace(
        problem,
        topology=problem.topology.restricted_to(list(number)),
        global_batch=problem.local_batch * len(number),
        constraints=replace(problem.constraints, pinned=tuple((name, of) for name, of in pins if of)),
    )


def _step_ms(plan: Plan) -> float:
    """Predicted ms of a step under a plan of a search."""
    return plan.provenance["predicted_ms"]


def write_prepared_plan(folder: Path, prepared: PreparedPlan) -> None:
    """Write a prepared plan and its problem to a folder."""
    path = folder / f"without-{prepared.losses[0].replace(' ', '-').replace('/', '-')}"
    # The problem first: a plan that is there can be read.
    files.write_problem(f"{path}{_PROBLEM}", prepared.problem)
    files.write_plan(f"{path}{_PLAN}", cast(Plan, prepared.plan), prepared.problem)


def read_prepared_plan(folder: str | Path, problem: Problem, model: CostModel) -> Plan | None:
    """The cheapest plan prepared in a folder that is valid for a problem, priced anew; None if there is none.

    Tables go by their names, and the plan has to be for as many devices. Its provenance has the file as `prepared`.

    Raises ShardCoreError if there is no such folder.
    """
    require(
        Path(folder).is_dir(), f"prepared is {str(folder)!r}; it needs to be a folder of `plan --survive`"
    )
    found: list[Plan] = []
    for path in sorted(Path(folder).glob(f"*{_PLAN}")):
        with suppress(ShardCoreError):
            of = files.read_problem(str(path).removesuffix(_PLAN) + _PROBLEM)
            plan = rebind_tables(files.read_plan(path, of), problem)
            require_valid_plan(plan, problem)
            if len(of.topology) == len(problem.topology):
                found.append(priced_plan(plan.placements, problem, model, prepared=str(path)))
    return min(found, key=_step_ms, default=None)
