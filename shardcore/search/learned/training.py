"""Train a policy against a CostModel, with no device in the loop.

DreamShard (arXiv 2210.02023) imagines: its cost network learns from some plans that the CostModel prices.
It then rewards many more that nobody prices. dreamshard_direct has the CostModel price them all.
AutoShard (arXiv 2208.06399) is rewarded for even compute. All train by REINFORCE: a plan's reward counts over the mean
of the problem's other plans, which also replaces AutoShard's V-trace and critic.

Differences to the released codes: legal devices are masked in the update, too. Costs and policy have
separate optimizers. Features are scaled once, not by task. An update takes plans of several problems.

Half of a pool's tables are for training. Test problems have only tables of the other half.

Shapes: K plans of a problem, N shards, F features, D devices, P plans of several problems, S items, L latents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.core.validation import MOST_COUNT, Count, Record, Seed, Share, number_within, require
from shardcore.cost.model import CostModel
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search.greedy import ORDERS
from shardcore.search.learned.nets import AutoShard, DreamShard, PolicyInputs, Weights, shard_features
from shardcore.search.learned.policy import NETS, Policy
from shardcore.search.learned.rollout import Rollout, Rollouts
from shardcore.search.lockstep import PlacedPlans, search_space_by_columns
from shardcore.search.state.feasible import feasible_shards
from shardcore.tables.held_out import is_held_out

_KEPT_PLANS, _BATCH = 5_000, 64
"""Latest plans that a cost network learns from, and plans of one update."""

Progress = Callable[[int, dict[str, float]], None]
"""Called as progress(round, values), once a round."""


@dataclass(frozen=True)
class PolicyConfig(Record):
    """Parameters of training a sharding policy.

    rounds: rounds at most. A round is some priced plans, cost updates and policy updates.
    patience: rounds without a better validation cost, before training stops.
    priced: plans that a round prices for the cost network.
    cost_updates: updates of the cost network in a round.
    policy_updates: updates of the policy in a round.
    problems_at_once: problems of a policy update.
    plans_each: plans of each of them.
    learning_rate: rate of the first round; it falls to 0 with the last.
    entropy: weight of the policy's entropy in its loss.
    seed: seed of weights, problems and plans.
    """

    rounds: Count = 30
    patience: Count = 10
    priced: Count = 20
    cost_updates: Count = 100
    policy_updates: Count = 20
    problems_at_once: Count = 2
    # The advantage of a single plan over the mean of its kind is always 0.
    plans_each: Annotated[int, number_within(2, MOST_COUNT)] = 16
    learning_rate: Annotated[float, number_within(0, 1, above=True, below=True)] = 2e-3
    entropy: Share = 1e-3
    seed: Seed = 0


@dataclass(frozen=True)
class PolicyProblems(ProblemConfig, noun="problem config"):
    """Problems that are drawn for a policy, as in ProblemConfig.

    problems: problems to learn from.
    validation: problems to choose the best round by, of the same tables.
    test: problems to judge the policy by, of the other tables.
    """

    slack: Annotated[float, number_within(1, 1e6)] = 2.0
    problems: Count = 60
    validation: Count = 15
    test: Count = 30


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A trained sharding policy and its learning curves.

    policy: with the weights of the best round.
    curves: rows {round, validation_cost, ...}. The cost is relative to the best greedy order's.
    """

    policy: Policy
    curves: list[dict[str, float]]


def make_policy(
    name: str,
    pool: Sequence[Table],
    model: CostModel,
    problems: PolicyProblems | None = None,
    config: PolicyConfig | None = None,
    like_topology: Topology | None = None,
    progress: Progress | None = None,
) -> TrainedPolicy:
    """Draw problems from a pool, train a policy on them, and test the policy. The policy's meta has the metrics.

    Raises ShardCoreError as `draw_policy_problems` and `train_policy` do.
    """
    problems, config = problems or PolicyProblems(), config or PolicyConfig()
    if like_topology:
        problems = replace(problems, devices=len(like_topology))
    to_learn, validation, test = draw_policy_problems(
        pool, model.setting, problems, config.seed, like_topology
    )
    trained = train_policy(name, to_learn, validation, model, config, progress)
    meta = {
        **trained.policy.meta,
        "config": {**trained.policy.meta["config"], "problems_drawn": asdict(problems)},
        "metrics": {**trained.policy.meta["metrics"], **evaluate_policy(trained.policy, test, model)},
    }
    return replace(trained, policy=replace(trained.policy, meta=meta))


def draw_policy_problems(
    pool: Sequence[Table],
    setting: Setting,
    config: PolicyProblems,
    seed: int,
    like_topology: Topology | None = None,
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Problems for training, for validation and for testing of a policy, drawn from a pool of tables.

    like_topology: devices' speeds, hosts and links. None: equal devices of one host, without stated links.

    Raises ShardCoreError if half of the pool is too small, and if the devices do not divide the batch.
    """
    if like_topology:
        config = replace(config, devices=len(like_topology))
    require(
        setting.batch % config.devices == 0,
        f"the cost model is for batch {setting.batch}, which {config.devices} devices do not divide evenly",
    )

    def draw_problems(tables: list[Table], first: int, n: int) -> list[Problem]:
        problems = [draw_problem(tables, first + i, setting, seed, config) for i in range(n)]
        return (
            [_with_devices_of_topology(like_topology, problem) for problem in problems]
            if like_topology
            else problems
        )

    # By table, not by problem: test problems show how it does on tables that it never saw.
    half = [t for t in pool if not is_held_out(t, one_of=2)]
    other = [t for t in pool if is_held_out(t, one_of=2)]
    try:
        to_learn = draw_problems(half, 0, config.problems)
        validation = draw_problems(half, config.problems, config.validation)
        return to_learn, validation, draw_problems(other, 0, config.test)
    except ShardCoreError as error:
        raise ShardCoreError(
            f"half of the pool is for training, the other for tests; of one, {error}"
        ) from None


def _with_devices_of_topology(topology: Topology, problem: Problem) -> Problem:
    """Problem on devices with the speeds, hosts and links of a topology, each with the problem's memory per device."""
    memory_bytes = problem.topology.devices[0].memory_bytes
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in topology.devices)
    return replace(problem, topology=replace(topology, devices=devices))


def train_policy(
    name: str,
    problems: Sequence[Problem],
    validation: Sequence[Problem],
    model: CostModel,
    config: PolicyConfig = PolicyConfig(),
    progress: Progress | None = None,
) -> TrainedPolicy:
    """Train a policy with the networks of NETS[name]. The same problems and config give the same policy.

    problems: problems to learn from.
    validation: other problems. Their mean cost says when to stop, and which round was best.

    Raises ShardCoreError for an unknown name, without problems, and for problems of different numbers of devices.
    """
    require(name in NETS, f"there is no policy {name!r}; known are {', '.join(NETS)}")
    require(
        bool(problems and validation),
        f"training got {len(problems)} problems and {len(validation)} for validation; "
        "it needs 1 or more of both",
    )
    n_devices = {len(problem.topology) for problem in problems}
    require(
        len(n_devices) == 1, f"training got problems of {sorted(n_devices)} devices; all need as many devices"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small, and results no longer depend on the number of threads
    try:
        # Prepared once: each serves many rollouts.
        all_prepared = [PreparedProblem(problem, model) for problem in problems]
        unseen = [PreparedProblem(problem, model) for problem in validation]
        # The learner changes its arrays in place, so validation sees each round's weights.
        learner = PolicyLearner(name, all_prepared, config)
        best, best_round, kept, curves = np.inf, 0, {}, []
        for i in range(config.rounds):
            # The rate falls to 0, so the last rounds refine.
            values = learner.train_round(config.learning_rate * (1 - i / config.rounds))
            costs = relative_costs(Rollouts(learner.net, learner.arrays), unseen)
            # A plan that does not fit counts as twice the greedy one.
            cost = float(np.where(np.isfinite(costs), costs, 2.0).mean())
            curves.append({"round": i + 1, "validation_cost": cost, **values})
            if progress:
                progress(i + 1, curves[-1])
            if cost < best:
                best, best_round = cost, i
                # A copy, as training goes on in these arrays.
                kept = {k: array.copy() for k, array in learner.arrays.items()}
            elif i - best_round >= config.patience:
                break
    finally:
        torch.set_num_threads(threads)
    meta = {"config": asdict(config), "metrics": {"validation_cost": best, "rounds": best_round + 1}}
    return TrainedPolicy(Policy(name, model.setting, kept, meta), curves)


def evaluate_policy(policy: Policy, problems: Sequence[Problem], model: CostModel) -> dict[str, float]:
    """Mean and worst relative cost of a policy's plans, and the share of problems solved."""
    costs = relative_costs(
        Rollouts(policy.net, policy.weights), [PreparedProblem(p, model) for p in problems]
    )
    solved = costs[np.isfinite(costs)]
    metrics = {"test_solved": len(solved) / len(costs)}
    if len(solved):
        metrics |= {"test_cost": float(solved.mean()), "test_worst": float(solved.max())}
    return metrics


def relative_costs(policy: Rollouts, problems: Sequence[PreparedProblem]) -> np.ndarray:
    """Cost of each problem's plan under a policy, relative to the best greedy order's.

    inf where the plan does not fit.
    """
    return np.array([policy(one.space, one.keys).total_ms[0, 0] / one.best_greedy_ms for one in problems])


# --- plans to learn from ------------------------------------------------------------------------------------


class PreparedProblem:
    """A problem prepared for policy rollouts: search space, shards and their features.

    keys: [1, N, 2] its shards, each an item and blocks.
    x: [M, F] features of all shards of the cache; a bundle has several rows.
    bundle: [M] number of each row's shard in the cache.
    """

    def __init__(self, problem: Problem, model: CostModel) -> None:
        self.problem, shards = problem, feasible_shards(problem)
        self.space = search_space_by_columns(problem, model.for_problem(problem), shards, cut=False)
        self.cache = self.space.cache
        self.keys = np.array([sorted(self.cache.shard_keys(shards))])
        self.x = shard_features([s for bundle in self.cache.made for s in bundle], problem.global_batch)
        self.bundle = np.repeat(np.arange(len(self.cache.made)), [len(b) for b in self.cache.made])
        self.speed = self.cache.speed.astype(np.float32)[:, None]

    @property
    def even_compute_ms(self) -> float:
        """Compute ms of each device if all work of the problem were divided evenly."""
        numbers = self.cache.option_numbers(*self.keys[0].T)
        return self.cache.single_op_ms[numbers].sum() / self.cache.speed.sum()

    @cached_property
    def best_greedy_ms(self) -> float:
        """Cost of the cheapest plan of the greedy baselines."""
        plans = [order(self.problem, self.cache.model) for order in ORDERS.values()]
        return min(plan.provenance["predicted_ms"] for plan in plans)


@dataclass(frozen=True, eq=False)
class CostSample:
    """A plan that the CostModel priced, for a cost network to learn from.

    x: [N, F] features of its shards.
    devices: [N] their devices.
    speed: [D, 1] of the devices.
    parts_ms: [D, PARTS] their costs.
    total_ms: cost of the plan; infinite if it does not fit.
    """

    x: np.ndarray
    devices: np.ndarray
    speed: np.ndarray
    parts_ms: np.ndarray
    total_ms: float

    @classmethod
    def of_first_plan(cls, prepared: PreparedProblem, placed: PlacedPlans) -> CostSample:
        """Sample of the first plan among plans placed for a problem."""
        # [S, D] numbers of what devices hold. 0 is nothing.
        blocks = placed.batch.held_blocks[0, 0]
        numbers = prepared.cache.option_numbers(np.arange(len(blocks))[:, None], blocks)
        # One row for each table of a bundle, on the device that holds the bundle.
        held = (numbers[..., None] == prepared.bundle) & (prepared.bundle > 0)
        _, devices, rows = np.nonzero(held)
        return cls(
            x=prepared.x[rows],
            devices=devices,
            speed=prepared.speed,
            parts_ms=placed.batch.device_part_ms()[0, 0].astype(np.float32),
            total_ms=float(placed.total_ms[0, 0]),
        )


# --- learners -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLosses:
    """Losses from which the networks of a policy learn.

    reward: (net, weights, rollout) -> [K] rewards of its plans.
    policy_of: prefixes of the weights that rewards train.
    cost_loss: (net, weights, latents [P, D, L], parts [P, D, PARTS], totals [P]) -> errors of the cost network on P
      priced plans. None: there is no such network.
    costs_of: prefixes of the weights that it trains.
    """

    reward: Callable[[Any, Weights, Rollout], np.ndarray]
    policy_of: tuple[str, ...]
    cost_loss: Callable[[Any, Weights, Any, Any, Any], Any] | None = None
    costs_of: tuple[str, ...] = ()


def compute_evenness(net: AutoShard, weights: Weights, rollout: Rollout) -> np.ndarray:
    """[K] least over largest compute of devices under each plan, without exchanges: rewards."""
    parts_ms = rollout.placed.batch.device_part_ms()[0]
    compute_ms = parts_ms[..., 0] + parts_ms[..., 2]  # [K, D] forward and backward
    return compute_ms.min(-1) / np.maximum(compute_ms.max(-1), 1e-9)


def squared_cost_errors(net: DreamShard, weights: Weights, latents: Any, parts: Any, totals: Any) -> Any:
    """Squared errors of a cost network's predictions for devices and for plans."""
    of_parts, of_plans = (
        net.device_costs(weights, latents) - parts,
        net.plan_cost(weights, latents, torch) - totals,
    )
    return (of_parts**2).mean((0, 1)).sum() + (of_plans**2).mean()


_DREAMSHARD = ("table", "costs", "choice")
RECIPES = {
    "dreamshard": PolicyLosses(
        # The reward of a plan is its negative cost as the cost network predicts it.
        lambda net, w, rollout: -net.plan_cost(w, rollout.latents[0]),
        _DREAMSHARD,
        squared_cost_errors,
        ("cost_table", "heads", "overall"),
    ),
    # Here it is the negative cost under the CostModel.
    "dreamshard_direct": PolicyLosses(lambda net, w, rollout: -rollout.placed.total_ms[0], _DREAMSHARD),
    "autoshard": PolicyLosses(
        compute_evenness,
        ("table", "cost", "progress", "device", "score.", "next"),
        # Its network predicts the compute of devices, forward and backward.
        lambda net, w, latents, parts, totals: (
            (net.single_shard_cost(w, latents) - parts[..., 0] - parts[..., 2]) ** 2
        ).mean(),
        ("table", "cost"),
    ),
}
"""Recipes by the policy's name."""


class PolicyLearner:
    """Weights in training, and gradients of the plans that were made.

    w: tensors by name. arrays: the same memory, so that the next rollout uses what an update changes.
    plans: priced plans that the cost network learns from.
    """

    def __init__(self, name: str, all_prepared: Sequence[PreparedProblem], config: PolicyConfig) -> None:
        self.net, self.recipe = NETS[name], RECIPES[name]
        self.all_prepared, self.config = all_prepared, config
        # Another stream than that of problems, which are drawn with the same seed.
        self.rng = np.random.default_rng([5, config.seed])
        self.w = _initial_weights(self.net.shapes, all_prepared, config.seed)
        self.arrays = {name: weight.detach().numpy() for name, weight in self.w.items()}
        self.plans: deque[CostSample] = deque(maxlen=_KEPT_PLANS)
        self.policy_optimizer = self._make_optimizer(self.recipe.policy_of)
        self.cost_optimizer = self._make_optimizer(self.recipe.costs_of) if self.recipe.costs_of else None

    def _make_optimizer(self, prefixes: tuple[str, ...]) -> torch.optim.Optimizer:
        """Adam optimizer of the weights whose names begin with one of the prefixes."""
        weights = [weight.requires_grad_() for name, weight in self.w.items() if name.startswith(prefixes)]
        return torch.optim.Adam(weights, lr=self.config.learning_rate)

    def train_round(self, learning_rate: float) -> dict[str, float]:
        """Train for one round. Returns mean loss, reward and entropy, by name."""
        values = {}
        for optimizer in filter(None, (self.policy_optimizer, self.cost_optimizer)):
            optimizer.param_groups[0]["lr"] = learning_rate
        if self.cost_optimizer:
            priced = [
                CostSample.of_first_plan(one, self.roll_out_randomly(one, 1).placed)
                for one in self._draw_problems(self.config.priced)
            ]
            # A plan that does not fit has no cost to learn.
            self.plans += [plan for plan in priced if np.isfinite(plan.total_ms)]
            updates = self.config.cost_updates if self.plans else 0
            losses = [self._update_cost_network(self.cost_optimizer) for _ in range(updates)]
            values["cost_loss"] = float(np.mean(losses)) if losses else 0.0
        updates = [self._update_policy() for _ in range(self.config.policy_updates)]
        values["reward"], values["entropy"] = np.mean(updates, 0).tolist()
        return values

    def roll_out_randomly(self, prepared: PreparedProblem, plans: int) -> Rollout:
        """Random plans of a problem under the present weights."""
        rollouts = Rollouts(self.net, self.arrays, plans, self.rng)
        return rollouts.roll_out(prepared.space, prepared.keys)

    def _draw_problems(self, n: int) -> list[PreparedProblem]:
        """Training problems, drawn with replacement."""
        return [self.all_prepared[i] for i in self.rng.integers(len(self.all_prepared), size=n)]

    def _update_cost_network(self, optimizer: torch.optim.Optimizer) -> float:
        """Train the cost network on a batch of priced plans. Returns the loss."""
        plans = [self.plans[i] for i in self.rng.integers(len(self.plans), size=_BATCH)]
        n_plans, n_devices = len(plans), len(plans[0].speed)
        # Devices of all plans are numbered through, so that the network runs once on all shards.
        devices = np.concatenate([plan.devices + i * n_devices for i, plan in enumerate(plans)])
        latents = self.net.shard_latents(
            self.w, torch.from_numpy(np.concatenate([p.x for p in plans])), torch
        )
        held = torch.zeros(n_plans * n_devices, latents.shape[1])
        held = held.index_add(0, torch.from_numpy(devices), latents).reshape(n_plans, n_devices, -1)
        speed = torch.from_numpy(np.stack([plan.speed for plan in plans]))
        parts = torch.from_numpy(np.stack([plan.parts_ms for plan in plans])) / self.w["scale_ms"]
        totals = torch.tensor([plan.total_ms for plan in plans]) / self.w["scale_ms"]
        assert self.recipe.cost_loss
        return _take_optimizer_step(
            optimizer, self.recipe.cost_loss(self.net, self.w, held / speed, parts, totals)
        )

    def _update_policy(self) -> tuple[float, float]:
        """Train the policy on plans of some problems. Returns the mean reward and entropy."""
        losses, means = [], []
        for prepared in self._draw_problems(self.config.problems_at_once):
            rollout = self.roll_out_randomly(prepared, self.config.plans_each)
            rewards = self._plan_rewards(rollout)
            # Rewards over those of the problem's other plans.
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            logits = self.device_logits(prepared, rollout)
            losses.append(self._policy_loss(logits, rollout.placed, advantage))
            entropy = torch.distributions.Categorical(logits=logits.detach()).entropy().mean()
            means.append((float(rewards.mean()), float(entropy)))
        _take_optimizer_step(self.policy_optimizer, torch.stack(losses).mean())
        reward, entropy = np.mean(means, 0).tolist()
        return reward, entropy

    def _plan_rewards(self, rollout: Rollout) -> np.ndarray:
        """[K] rewards of plans. A plan that does not fit gets a bit less than the worst plan that fits."""
        fits = rollout.placed.feasible_plans[0]
        if not fits.any():
            return np.zeros(len(fits))
        rewards = self.recipe.reward(self.net, self.arrays, rollout)
        return np.where(fits, rewards, rewards[fits].min() - rewards[fits].std())

    def device_logits(self, prepared: PreparedProblem, rollout: Rollout) -> torch.Tensor:
        """[K, N, D] scores of devices at each step of a rollout; -1e9 for illegal devices."""
        placed, cache, speed = rollout.placed, prepared.cache, torch.from_numpy(prepared.speed)
        rows = self.net.shard_latents(self.w, torch.from_numpy(prepared.x), torch)
        rows = rows * torch.from_numpy(prepared.bundle > 0)[:, None]  # number 0 is nothing
        latents = torch.zeros(len(cache.made), rows.shape[1])
        latents = latents.index_add(0, torch.from_numpy(prepared.bundle), rows)
        # [K, N, D, L] what each step adds to the devices, and with it what they held before.
        chosen = torch.nn.functional.one_hot(torch.from_numpy(placed.devices[0]), len(speed))
        added = chosen[..., None] * (latents[rollout.after[0]] - latents[rollout.before[0]])[:, :, None]
        held = (added.cumsum(1) - added) / speed
        keys = prepared.keys[0][placed.order[0]]
        context = self.net.next_shard_contexts(
            self.w, latents[cache.option_numbers(keys[:, 0], keys[:, 1])], torch
        )
        costs = None if rollout.costs is None else torch.from_numpy(rollout.costs[0])
        inputs = PolicyInputs(held, torch.from_numpy(rollout.used[0]), costs, context)
        scores = self.net.device_scores(self.w, inputs, torch)
        # A finite number, as 0 × inf would make the entropy NaN.
        return scores.masked_fill(~torch.from_numpy(placed.legal[0]), -1e9)

    def _policy_loss(self, logits: torch.Tensor, placed: PlacedPlans, advantage: np.ndarray) -> torch.Tensor:
        """REINFORCE loss with an entropy bonus. advantage: [K]."""
        logs = logits.log_softmax(-1)  # [K, N, D]
        # [K, N] log-probability of the device that each shard went to.
        chosen = logs.gather(-1, torch.from_numpy(placed.devices[0])[..., None])[..., 0]
        entropy = -(logs.exp() * logs).sum(-1)
        # Where there is no choice, there is nothing to learn.
        choice = torch.from_numpy(placed.legal[0].sum(-1) > 1)
        gain = (
            chosen * torch.from_numpy(advantage.astype(np.float32))[:, None] + self.config.entropy * entropy
        )
        return -(gain * choice).sum() / choice.sum().clamp(min=1)


def _initial_weights(
    shapes: dict[str, tuple[int, ...]], all_prepared: Sequence[PreparedProblem], seed: int
) -> dict[str, torch.Tensor]:
    """Initial weights of a policy. Features of the problems' tables set the scaling."""
    # Number 0, which is nothing, has no features to scale by.
    x = np.concatenate([prepared.x[prepared.bundle > 0] for prepared in all_prepared])
    # A device in an even plan costs about 1.
    scale_ms = max(float(np.mean([prepared.even_compute_ms for prepared in all_prepared])), 1e-6)
    scaling = {
        "low": x.min(0),
        "high": x.max(0),
        "mean": x.mean(0),
        "sd": np.where(x.std(0) > 1e-6, x.std(0), 1.0),
        "scale_ms": np.array([scale_ms]),
    }
    generator = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes.items():
        if name in scaling:
            w[name] = torch.from_numpy(scaling[name].astype(np.float32))
        else:
            # Matrices as torch.nn.Linear makes them; biases by their own length, not by their inputs.
            reach = (shape[0] if len(shape) == 2 and name != "heads.1.weight" else shape[-1]) ** -0.5
            w[name] = (torch.rand(shape, generator=generator) * 2 - 1) * reach
    return w


def _take_optimizer_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one optimizer step down a loss. Returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    # Few plans make noisy gradients.
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    return loss.item()
