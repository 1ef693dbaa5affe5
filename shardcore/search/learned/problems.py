"""The problems of a policy's training, and how good it is on tables that it never saw.

Half of a pool's tables are for training. Test problems have only tables of the other half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.core.validation import MOST_COUNT, require, require_within
from shardcore.cost.model import CostModel
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search.learned.learner import PolicyConfig
from shardcore.search.learned.policy import NETS, Policy
from shardcore.search.learned.sharder import place
from shardcore.search.learned.train import Progress, TrainedPolicy, greedy_ms, train
from shardcore.tables.held_out import kept_for_testing


@dataclass(frozen=True)
class PolicyProblems(ProblemConfig):
    """Which problems are drawn for a policy, as in ProblemConfig.

    problems: to learn from.
    validation: to choose the best round by, of the same tables.
    test: to judge the policy by, of the other tables.
    """

    slack: float = 2.0
    problems: int = 60
    validation: int = 15
    test: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        count = (1, MOST_COUNT)
        require_within(self, "policy problems", problems=count, validation=count, test=count)


def draw(
    pool: Sequence[Table], setting: Setting, config: PolicyProblems, seed: int, like: Topology | None = None
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Problems to learn from, to validate with, and to test with.

    like: devices' speeds, hosts and links. None: equal devices of one host, without stated links.

    Raises ShardCoreError if half of the pool is too small, and if the devices do not divide the batch.
    """
    config = _for_devices(config, like)
    require(
        setting.batch % config.devices == 0,
        f"the cost model is for batch {setting.batch}, which {config.devices} devices do not divide evenly",
    )
    halves = [[t for t in pool if kept_for_testing(t, one_of=2) == testing] for testing in (False, True)]
    sides = (
        (halves[0], 0, config.problems),
        (halves[0], config.problems, config.validation),
        (halves[1], 0, config.test),
    )
    try:
        return tuple(
            [_on(draw_problem(tables, first + i, setting, seed, config), like) for i in range(n)]
            for tables, first, n in sides
        )
    except ShardCoreError as error:
        raise ShardCoreError(
            f"half of the pool is for training, the other for tests; of one, {error}"
        ) from None


def _for_devices(config: PolicyProblems, like: Topology | None) -> PolicyProblems:
    return replace(config, devices=len(like)) if like else config


def _on(problem: Problem, like: Topology | None) -> Problem:
    """The problem on devices like these, each with the memory that was drawn."""
    if like is None:
        return problem
    memory_bytes = problem.topology.devices[0].memory_bytes
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in like.devices)
    return replace(problem, topology=replace(like, devices=devices))


def make_policy(
    name: str,
    pool: Sequence[Table],
    model: CostModel,
    problems: PolicyProblems | None = None,
    config: PolicyConfig | None = None,
    like: Topology | None = None,
    progress: Progress | None = None,
) -> TrainedPolicy:
    """Draw problems of a pool, train a policy on them, and judge it. Its meta has the metrics.

    Raises as `draw` and `train` do.
    """
    problems, config = _for_devices(problems or PolicyProblems(), like), config or PolicyConfig()
    if name not in NETS:
        raise ShardCoreError(f"there is no policy {name!r}; known are {', '.join(NETS)}")
    to_learn, validation, test = draw(pool, model.setting, problems, config.seed, like)
    trained = train(name, to_learn, validation, model, config, progress)
    meta = trained.policy.meta
    meta = {
        **meta,
        "config": {**meta["config"], "problems_drawn": dataclasses.asdict(problems)},
        "metrics": {**meta["metrics"], **judge(trained.policy, test, model)},
    }
    return replace(trained, policy=replace(trained.policy, meta=meta))


def judge(policy: Policy, problems: Sequence[Problem], model: CostModel) -> dict[str, float]:
    """Cost of a policy's plans relative to the best greedy order's: mean and worst; and the share of solved
    problems."""
    ratios = []
    for problem in problems:
        own = model.for_problem(problem)
        try:
            ms = place(policy, policy.name, problem, own).provenance["predicted_ms"]
            ratios.append(ms / greedy_ms(problem, own))
        except Infeasible:
            continue
    solved = {"test_solved": len(ratios) / len(problems)}
    return solved | ({"test_cost": float(np.mean(ratios)), "test_worst": max(ratios)} if ratios else {})
