"""Train a policy against a CostModel, with no device in the loop.

DreamShard (arXiv 2210.02023) imagines: its cost network learns from some plans that the CostModel prices.
It then rewards many more that nobody prices. dreamshard_direct has the CostModel price them all.
AutoShard (arXiv 2208.06399) is rewarded for even compute; an actor-critic replaces its V-trace.

Differences to the released codes: legal devices are masked in the update, too. Costs and policy have
separate optimizers. Features are scaled once, not by task. An update takes plans of several problems.

Half of a pool's tables are for training. Test problems have only tables of the other half.

Shapes: K plans of a problem, N shards, F features, D devices, B devices of several plans, R numbers of the
cache, L latents, H a context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.core.validation import MOST_COUNT, MOST_SEED, require, require_within
from shardcore.cost.model import CostModel
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search.anneal.batch import space_by_columns
from shardcore.search.greedy import ORDERS
from shardcore.search.learned.nets import AutoShard, DreamShard, Net, PolicyInputs, features
from shardcore.search.learned.policy import NETS, Policy, place
from shardcore.search.learned.rollout import Rollout, Rollouts
from shardcore.search.state.feasible import feasible_shards
from shardcore.tables.held_out import kept_for_testing

_KEPT_PLANS, _BATCH = 5_000, 64
"""Latest plans that a cost network learns from, and plans of one update."""

Progress = Callable[[int, dict[str, float]], None]
"""Called as progress(round, values), once a round."""


@dataclass(frozen=True)
class PolicyConfig:
    """Parameters of a policy's training.

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

    rounds: int = 30
    patience: int = 10
    priced: int = 20
    cost_updates: int = 100
    policy_updates: int = 20
    problems_at_once: int = 2
    plans_each: int = 16
    learning_rate: float = 2e-3
    entropy: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require_within(
            self,
            "policy config",
            rounds=(1, MOST_COUNT),
            patience=(1, MOST_COUNT),
            priced=(1, MOST_COUNT),
            cost_updates=(1, MOST_COUNT),
            policy_updates=(1, MOST_COUNT),
            problems_at_once=(1, MOST_COUNT),
            # The advantage of a single plan over the mean of its kind is always 0.
            plans_each=(2, MOST_COUNT),
            entropy=(0, 1),
            seed=(0, MOST_SEED),
        )
        require(
            0 < self.learning_rate < 1,
            f"policy config has learning_rate {self.learning_rate}; it needs to be within 0 and 1",
        )


@dataclass(frozen=True)
class PolicyProblems(ProblemConfig):
    """Problems that are drawn for a policy, as in ProblemConfig.

    problems: problems to learn from.
    validation: problems to choose the best round by, of the same tables.
    test: problems to judge the policy by, of the other tables.
    """

    slack: float = 2.0
    problems: int = 60
    validation: int = 15
    test: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within(
            self,
            "policy problems",
            problems=(1, MOST_COUNT),
            validation=(1, MOST_COUNT),
            test=(1, MOST_COUNT),
        )


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A policy and its learning curves.

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
    like: Topology | None = None,
    progress: Progress | None = None,
) -> TrainedPolicy:
    """Draw problems of a pool, train a policy on them, and judge it. Its meta has the metrics.

    Raises ShardCoreError as `draw` and `train` do.
    """
    problems, config = problems or PolicyProblems(), config or PolicyConfig()
    if like:
        problems = replace(problems, devices=len(like))
    to_learn, validation, test = draw(pool, model.setting, problems, config.seed, like)
    trained = train(name, to_learn, validation, model, config, progress)
    meta = {
        **trained.policy.meta,
        "config": {**trained.policy.meta["config"], "problems_drawn": asdict(problems)},
        "metrics": {**trained.policy.meta["metrics"], **judge(trained.policy, test, model)},
    }
    return replace(trained, policy=replace(trained.policy, meta=meta))


def draw(
    pool: Sequence[Table], setting: Setting, config: PolicyProblems, seed: int, like: Topology | None = None
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Problems to learn from, to validate with, and to test with.

    like: devices' speeds, hosts and links. None: equal devices of one host, without stated links.

    Raises ShardCoreError if half of the pool is too small, and if the devices do not divide the batch.
    """
    if like:
        config = replace(config, devices=len(like))
    require(
        setting.batch % config.devices == 0,
        f"the cost model is for batch {setting.batch}, which {config.devices} devices do not divide evenly",
    )

    def drawn(tables: list[Table], first: int, n: int) -> list[Problem]:
        problems = [draw_problem(tables, first + i, setting, seed, config) for i in range(n)]
        return [_on(like, problem) for problem in problems] if like else problems

    # By table, not by problem: test problems show how it does on tables that it never saw.
    half = [t for t in pool if not kept_for_testing(t, one_of=2)]
    other = [t for t in pool if kept_for_testing(t, one_of=2)]
    try:
        to_learn = drawn(half, 0, config.problems)
        validation = drawn(half, config.problems, config.validation)
        return to_learn, validation, drawn(other, 0, config.test)
    except ShardCoreError as error:
        raise ShardCoreError(
            f"half of the pool is for training, the other for tests; of one, {error}"
        ) from None


def _on(like: Topology, problem: Problem) -> Problem:
    """The problem on devices like these, each with the memory that was drawn."""
    memory_bytes = problem.topology.devices[0].memory_bytes
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in like.devices)
    return replace(problem, topology=replace(like, devices=devices))


def train(
    name: str,
    problems: Sequence[Problem],
    validation: Sequence[Problem],
    model: CostModel,
    config: PolicyConfig = PolicyConfig(),
    progress: Progress | None = None,
) -> TrainedPolicy:
    """A policy with the networks of NETS[name]. The same problems and config give the same policy.

    problems: problems to learn from.
    validation: other problems. Their mean cost says when to stop, and which round was best.

    Raises ShardCoreError for an unknown name, and without problems.
    """
    require(name in NETS, f"there is no policy {name!r}; known are {', '.join(NETS)}")
    require(
        bool(problems and validation),
        f"training got {len(problems)} problems and {len(validation)} for validation; "
        "it needs 1 or more of both",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small, and results no longer depend on the number of threads
    try:
        # Prepared once: each serves many rollouts.
        all_prepared = [Prepared(problem, model) for problem in problems]
        unseen = [Prepared(problem, model) for problem in validation]
        # Costs relative to the best greedy order: problems differ in size, and weigh the same so.
        greedy = np.array([_greedy_ms(problem, model.for_problem(problem)) for problem in validation])
        # The learner changes its arrays in place, so validation sees each round's weights.
        learner = LEARNERS[type(NETS[name])](NETS[name], all_prepared, config)
        best, best_round, kept, curves = np.inf, 0, {}, []
        for i in range(config.rounds):
            # The rate falls to 0, so the last rounds refine.
            for optimizer in learner.optimizers:
                optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - i / config.rounds)
            values = learner.round()
            policy = Rollouts(learner.net, learner.arrays)
            ms = np.array([policy.run(one.space, one.keys).total_ms[0, 0] for one in unseen])
            # A plan that does not fit counts as twice the greedy one.
            cost = float(np.where(np.isfinite(ms), ms / greedy, 2.0).mean())
            curves.append({"round": i + 1, "validation_cost": cost, **values})
            if progress:
                progress(i + 1, curves[-1])
            if cost < best:
                best, best_round = cost, i
                # A copy, as training goes on in these arrays. The critic's weights are not of the policy.
                kept = {k: array.copy() for k, array in learner.arrays.items() if k in learner.net.shapes}
            elif i - best_round >= config.patience:
                break
    finally:
        torch.set_num_threads(threads)
    meta = {"config": asdict(config), "metrics": {"validation_cost": best, "rounds": best_round + 1}}
    return TrainedPolicy(Policy(name, model.setting, kept, meta), curves)


def judge(policy: Policy, problems: Sequence[Problem], model: CostModel) -> dict[str, float]:
    """Mean and worst cost of a policy's plans relative to the best greedy order's; share of solved problems."""
    ratios = []
    for problem in problems:
        for_problem = model.for_problem(problem)
        try:
            ms = place(policy, policy.name, problem, for_problem).provenance["predicted_ms"]
            ratios.append(ms / _greedy_ms(problem, for_problem))
        except Infeasible:
            continue
    metrics = {"test_solved": len(ratios) / len(problems)}
    if ratios:
        metrics |= {"test_cost": float(np.mean(ratios)), "test_worst": max(ratios)}
    return metrics


def _greedy_ms(problem: Problem, model: CostModel) -> float:
    """Cost of the best greedy order."""
    return min(order(problem, model).provenance["predicted_ms"] for order in ORDERS.values())


# --- plans to learn from ------------------------------------------------------------------------------------


class Prepared:
    """A problem, ready for rollouts.

    keys: [1, N, 2] its shards, each a strip and units.
    x: [M, F] features of all shards of the cache; a bundle has several rows.
    bundle: [M] number of each row's shard in the cache.
    """

    def __init__(self, problem: Problem, model: CostModel) -> None:
        shards = feasible_shards(problem)
        self.space = space_by_columns(problem, model.for_problem(problem), shards, cut=False)
        self.cache = self.space.cache
        self.keys = np.array([sorted(self.cache.keys(shards))])
        self.x = features([s for bundle in self.cache.made for s in bundle], problem.global_batch)
        self.bundle = np.repeat(np.arange(len(self.cache.made)), [len(b) for b in self.cache.made])

    @property
    def compute_ms(self) -> float:
        """Compute of a device in an even plan."""
        numbers = self.cache.numbers(*self.keys[0].T)
        return self.cache.single_ms[numbers].sum() / self.cache.speed.sum()


@dataclass(frozen=True, eq=False)
class CostSample:
    """A plan that the CostModel priced, for a cost network to learn from.

    x: [N, F] features of its shards.
    devices: [N] their devices.
    speed: [D, 1] of the devices.
    parts: [D, PARTS] costs, in units of w["scale_ms"].
    total: cost of the plan, in the same unit; infinite if it does not fit.
    """

    x: np.ndarray
    devices: np.ndarray
    speed: np.ndarray
    parts: np.ndarray
    total: float

    @classmethod
    def of(cls, prepared: Prepared, rollout: Rollout, scale_ms: np.ndarray) -> CostSample:
        """The first plan of a rollout."""
        cache = prepared.cache
        held = rollout.held(len(cache.made))[0, -1]  # [D, R]
        held[:, 0] = 0  # number 0 is nothing
        # One row for each table of a bundle, on the device that holds the bundle.
        rows, devices = np.nonzero(held.T[prepared.bundle])
        return cls(
            x=prepared.x[rows],
            devices=devices,
            speed=cache.speed.astype(np.float32)[:, None],
            parts=(rollout.parts_ms[0, 0] / scale_ms).astype(np.float32),
            total=float(rollout.total_ms[0, 0] / scale_ms[0]),
        )


class Batch:
    """Several plans as one, so that a network runs once on all their shards.

    x: [N, F] features. device: [N] number of each shard's device. speed: [B, 1]. parts: [B, PARTS].
    total: [plans]. sizes: devices of each plan.
    """

    def __init__(self, plans: Sequence[CostSample]) -> None:
        self.sizes = [len(plan.speed) for plan in plans]
        # Devices of all plans are numbered through.
        firsts = np.cumsum([0, *self.sizes[:-1]])
        devices = [plan.devices + first for plan, first in zip(plans, firsts, strict=True)]
        self.x = torch.from_numpy(np.concatenate([plan.x for plan in plans]))
        self.device = torch.from_numpy(np.concatenate(devices))
        self.speed = torch.from_numpy(np.concatenate([plan.speed for plan in plans]))
        self.parts = torch.from_numpy(np.concatenate([plan.parts for plan in plans]))
        self.total = torch.tensor([plan.total for plan in plans])

    def sums(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, L] latents of the devices, from those of the shards [N, L]."""
        zeros = torch.zeros(len(self.speed), latents.shape[1])
        return zeros.index_add(0, self.device, latents) / self.speed


# --- learners -----------------------------------------------------------------------------------------------


class Learner:
    """Weights in training, and gradients of the plans that were made.

    w: tensors by name. arrays: the same memory, so that the next rollout uses what an update changes.
    plans: priced plans that the cost network learns from.
    """

    def __init__(
        self,
        net: Net,
        all_prepared: Sequence[Prepared],
        config: PolicyConfig,
        critic_shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self.all_prepared, self.config = all_prepared, config
        self.net = net
        # Another stream than that of problems, which are drawn with the same seed.
        self.rng = np.random.default_rng([5, config.seed])
        self.w = _initial({**net.shapes, **critic_shapes}, all_prepared, config.seed)
        self.arrays = {name: weight.detach().numpy() for name, weight in self.w.items()}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.plans: deque[CostSample] = deque(maxlen=_KEPT_PLANS)

    def round(self) -> dict[str, float]:
        """Train for a round. Returns means of losses and others by name."""
        raise NotImplementedError

    def optimizer(self, *prefixes: str) -> torch.optim.Optimizer:
        """An optimizer of the weights whose names begin with one of these."""
        weights = [weight.requires_grad_() for name, weight in self.w.items() if name.startswith(prefixes)]
        self.optimizers.append(torch.optim.Adam(weights, lr=self.config.learning_rate))
        return self.optimizers[-1]

    def roll(self, prepared: Prepared, plans: int, priced: bool) -> Rollout:
        """Random plans of a problem, with the present weights."""
        rollouts = Rollouts(self.net, self.arrays, plans, self.rng, greedy_first=False, priced=priced)
        return rollouts.run(prepared.space, prepared.keys)

    def drawn(self, n: int) -> list[Prepared]:
        """Problems to learn from, drawn with replacement."""
        return [self.all_prepared[i] for i in self.rng.integers(len(self.all_prepared), size=n)]

    def batch(self) -> tuple[Batch, torch.Tensor]:
        """Some of the priced plans, and the latents [B, L] of their devices."""
        batch = Batch([self.plans[i] for i in self.rng.integers(len(self.plans), size=_BATCH)])
        return batch, batch.sums(self.net.latents(self.w, batch.x, torch))

    def logits(self, prepared: Prepared, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[K, N, D] scores of the devices as the rollout saw them, legal ones only; and contexts [N, H]."""
        cache = prepared.cache
        rows = self.net.latents(self.w, torch.from_numpy(prepared.x), torch)
        zeros = torch.zeros(len(cache.made), rows.shape[1])
        latents = zeros.index_add(0, torch.from_numpy(prepared.bundle), rows)
        latents = latents * (torch.arange(len(latents)) > 0)[:, None]  # number 0 is nothing
        speed = torch.from_numpy(cache.speed.astype(np.float32))
        held = torch.from_numpy(rollout.held(len(cache.made))[:, :-1])
        keys = prepared.keys[0][rollout.order[0]]
        context = self.net.context(self.w, latents[cache.numbers(keys[:, 0], keys[:, 1])], torch)
        costs = None if rollout.costs is None else torch.from_numpy(rollout.costs[0])
        inputs = PolicyInputs(
            held @ latents / speed[:, None], torch.from_numpy(rollout.used[0]), costs, context
        )
        scores = self.net.scores(self.w, inputs, torch)
        # A finite number, as 0 × inf would make the entropy NaN.
        return scores.masked_fill(~torch.from_numpy(rollout.legal[0]), -1e9), context

    def policy_loss(self, logits: torch.Tensor, rollout: Rollout, advantage: torch.Tensor) -> torch.Tensor:
        """REINFORCE's loss. advantage: [K, N] or [K, 1]."""
        logs = logits.log_softmax(-1)  # [K, N, D]
        # [K, N] log-probability of the device that each shard went to.
        chosen = logs.gather(-1, torch.from_numpy(rollout.devices[0])[..., None])[..., 0]
        entropy = -(logs.exp() * logs).sum(-1)
        # Where there is no choice, there is nothing to learn.
        choice = torch.from_numpy(rollout.legal[0].sum(-1) > 1)
        gain = (chosen * advantage + self.config.entropy * entropy) * choice
        return -gain.sum() / choice.sum().clamp(min=1)


class DreamShardLearner(Learner):
    """REINFORCE, rewarded by the cost network or by the CostModel."""

    net: DreamShard

    def __init__(self, net: DreamShard, all_prepared: Sequence[Prepared], config: PolicyConfig) -> None:
        super().__init__(net, all_prepared, config, {})
        self.cost_optimizer = None if net.asks_model else self.optimizer("cost_table", "heads", "overall")
        self.policy_optimizer = self.optimizer("table", "costs", "choice")

    def round(self) -> dict[str, float]:
        config, values = self.config, {}
        if self.cost_optimizer:
            scale_ms, drawn = self.arrays["scale_ms"], self.drawn(config.priced)
            priced = (CostSample.of(one, self.roll(one, 1, True), scale_ms) for one in drawn)
            # A plan that does not fit has no cost to learn.
            self.plans += [plan for plan in priced if np.isfinite(plan.total)]
            updates = config.cost_updates if self.plans else 0
            losses = [self.cost_update(self.cost_optimizer) for _ in range(updates)]
            values["cost_loss"] = float(np.mean(losses)) if losses else 0.0
        values["entropy"] = float(np.mean([self.policy_update() for _ in range(config.policy_updates)]))
        return values

    def cost_update(self, optimizer: torch.optim.Optimizer) -> float:
        """Train the cost network on some priced plans. Returns the loss."""
        batch, sums = self.batch()
        parts = self.net.parts(self.w, sums) - batch.parts
        # [plans, D, L]. Plans with fewer devices have zeros, like empty devices.
        by_plan = torch.nn.utils.rnn.pad_sequence(list(sums.split(batch.sizes)), batch_first=True)
        overall = self.net.overall(self.w, by_plan, torch) - batch.total
        return _step(optimizer, (parts**2).mean(0).sum() + (overall**2).mean())

    def policy_update(self) -> float:
        """Train the policy on plans of some problems. Returns the mean entropy."""
        losses, entropies = [], []
        for prepared in self.drawn(self.config.problems_at_once):
            rollout = self.roll(prepared, self.config.plans_each, self.net.asks_model)
            ms = rollout.total_ms[0]  # [K]
            if not self.net.asks_model:
                ms = np.where(np.isfinite(ms), self.net.overall(self.arrays, rollout.latents[0]), np.inf)
            logits, _ = self.logits(prepared, rollout)
            losses.append(self.policy_loss(logits, rollout, _standardised(-ms)[:, None]))
            entropies.append(_mean_entropy(logits))
        _step(self.policy_optimizer, torch.stack(losses).mean())
        return float(np.mean(entropies))


class AutoShardLearner(Learner):
    """An actor-critic, rewarded for even compute: the least device's over the most. -1 for no plan."""

    net: AutoShard

    def __init__(self, net: AutoShard, all_prepared: Sequence[Prepared], config: PolicyConfig) -> None:
        super().__init__(net, all_prepared, config, net.critic_shapes)
        # Of all weights but the scaling of features and costs.
        self.adam = self.optimizer("table", "cost", "progress", "device", "score.", "lstm", "value")

    def round(self) -> dict[str, float]:
        # The cost network learns from the plans of the policy updates.
        balance, entropy = np.mean([self.policy_update() for _ in range(self.config.policy_updates)], 0)
        loss = float(np.mean([self.cost_update() for _ in range(self.config.cost_updates)]))
        return {"cost_loss": loss, "balance": float(balance), "entropy": float(entropy)}

    def cost_update(self) -> float:
        """Train the cost network on some priced plans. Returns the loss."""
        batch, sums = self.batch()
        # Forward and backward compute of each device, [B].
        errors = self.net.single(self.w, sums) - (batch.parts[:, 0] + batch.parts[:, 2])
        return _step(self.adam, (errors**2).mean())

    def policy_update(self) -> np.ndarray:
        """Train policy and critic on plans of some problems. Returns the mean balance and entropy, [2]."""
        losses, values = [], []
        for prepared in self.drawn(self.config.problems_at_once):
            rollout = self.roll(prepared, self.config.plans_each, True)
            self.plans.append(CostSample.of(prepared, rollout, self.arrays["scale_ms"]))
            # Forward and backward compute, without exchanges: [K, D].
            compute = rollout.parts_ms[0, ..., 0] + rollout.parts_ms[0, ..., 2]
            balance = compute.min(-1) / np.maximum(compute.max(-1), 1e-9)
            reward = torch.from_numpy(np.where(np.isfinite(rollout.total_ms[0]), balance, -1.0)).float()
            logits, context = self.logits(prepared, rollout)
            errors = reward[:, None] - self.net.value(self.w, context)
            # The critic's error is the advantage. No gradient may flow through it to the policy.
            loss = self.policy_loss(logits, rollout, errors.detach())
            losses.append(loss + 0.5 * (errors**2).mean())
            values.append((float(balance.mean()), _mean_entropy(logits)))
        _step(self.adam, torch.stack(losses).mean())
        return np.mean(values, 0)


LEARNERS: dict[type[Net], Callable[..., Learner]] = {
    AutoShard: AutoShardLearner,
    DreamShard: DreamShardLearner,
}
"""Learners by the networks that they train."""


def _initial(
    shapes: dict[str, tuple[int, ...]], all_prepared: Sequence[Prepared], seed: int
) -> dict[str, torch.Tensor]:
    """Weights at the start. Features of the problems' tables set their scaling."""
    # Number 0, which is nothing, has no features to scale by.
    x = np.concatenate([prepared.x[prepared.bundle > 0] for prepared in all_prepared])
    # A device in an even plan costs about 1.
    scale_ms = max(float(np.mean([prepared.compute_ms for prepared in all_prepared])), 1e-6)
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


def _standardised(reward: np.ndarray) -> torch.Tensor:
    """[K] rewards with mean 0 and deviation 1. A plan that does not fit counts as the worst that does."""
    fits = np.isfinite(reward)
    if not fits.any():
        return torch.zeros(len(reward))
    reward = np.where(fits, reward, reward[fits].min() - reward[fits].std())
    return torch.from_numpy(((reward - reward.mean()) / (reward.std() + 1e-8)).astype(np.float32))


def _mean_entropy(logits: torch.Tensor) -> float:
    return torch.distributions.Categorical(logits=logits.detach()).entropy().mean().item()


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one step down a loss. Returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    # Few plans make noisy gradients.
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    return loss.item()
