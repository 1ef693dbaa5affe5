"""A small DLRMv3 trains with hot rows on every rank.

    torchrun --standalone --nproc_per_node=4 train.py --check

The plans of TorchRec's planner train beside it, in alternation. Tables and features are those of MLPerf DLRMv3
(shardcore/tables/public_tables.json), with rows, columns and sequences scaled down. The 128 categories are a dense
nn.Embedding. Its ranker is one layer of HSTU's pointwise attention: candidates over the history. Ids follow a
power law, and lie anywhere in their tables. The clicks are synthetic: each item has a hidden score. --hosts
divides the ranks over hosts, for the plans. --check trains an unsharded copy too, on the batches of
all ranks, and compares all rows at the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore import Setting
from shardcore.core.constraints import Constraints
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel
from shardcore.io.hot_ids import HotIds
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.tables.heat import count_row_lookups
from shardcore.tables.hot_rows import HOT, cold_part_names
from shardcore.tables.public import public_pool
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

ROWS_SCALE, LENGTH_SCALE, DIM, CANDIDATES, LEARNING_RATE = 5000, 100, 32, 4, 1.0
FEATURES = {"item_id": ("item_id", "item_candidate_id"), "user_id": ("user_id",)}
"""Features of each sharded table, with DLRMv3's names: the history, then the candidates."""
CATEGORIES = 128
COLLECTION = "sequences"
SWEEP = (
    ["table_wise", "column_wise", "row_wise"],
    ["table_wise"],
    ["column_wise"],
    ["row_wise"],
)
"""Sharding types that TorchRec's planner is given, one after another. On CPUs it replicates no sequences."""
OTHER_BATCHES, SEEDS = 16, 1 << 20
"""Batches that hot ids are counted in, with seeds from here on: none of those that are trained."""


@dataclass(frozen=True)
class Arm:
    """A plan that trains, and its problem: hot rows are tables of their own."""

    problem: Problem
    plan: Plan


# --- the problem --------------------------------------------------------------------------------------------


def problem_of(topology: Topology, samples: int, alpha: float, seed: int = 0) -> Problem:
    """DLRMv3, scaled down. samples: of a device. alpha: exponent of the power law of ids. seed: of the ids."""
    tables = tuple(
        replace(
            table,
            rows=table.rows // ROWS_SCALE,
            dim=DIM,
            # One user a sample, as at full size.
            pooling=max(1.0, table.pooling / LENGTH_SCALE),
            precision="fp32",
            collection=COLLECTION,
        )
        for table in public_pool("mlperf-dlrmv3", alpha)
        if table.name in FEATURES
    )
    # So few lookups would make a replica of users cheap, which TorchRec does not run on CPUs.
    constraints = Constraints(kinds=(("user_id", ("column", "row")),))
    batch = samples * len(topology)
    return Problem(
        f"dlrmv3-scaled-{seed}",
        tables,
        topology,
        batch,
        "exact_sgd",
        constraints=constraints,
        job=Job("none"),
    )


@cache
def _ranked(name: str, rows: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """[rows] cumulative shares of lookups by rank, and the id of each rank."""
    shares = np.arange(1.0, rows + 1) ** -alpha
    return np.cumsum(shares) / shares.sum(), np.random.default_rng([*name.encode()]).permutation(rows)


def batch_of(problem: Problem, seed: int) -> tuple[Any, torch.Tensor]:
    """Features of a device's samples [B], and clicks [B, CANDIDATES]."""
    from torchrec import KeyedJaggedTensor

    rng, samples = np.random.default_rng([seed, *problem.name.encode()]), problem.local_batch
    item, user = problem.tables
    mean = item.pooling - CANDIDATES
    # Lengths as the reference draws them: normal, a quarter of the mean wide.
    history = np.maximum(1, rng.normal(mean, mean / 4, samples).round()).astype(int)
    candidates = np.full(samples, CANDIDATES)

    def ids(table: Any, n: int) -> np.ndarray:
        shares, ranked = _ranked(f"{problem.name} {table.name}", table.rows, table.zipf_alpha)
        # The last sum may be a rounding error below 1.
        return ranked[np.searchsorted(shares[:-1], rng.random(n))]

    seen, shown, users = ids(item, history.sum()), ids(item, candidates.sum()), ids(user, samples)
    features = KeyedJaggedTensor(
        keys=[name for names in FEATURES.values() for name in names],
        values=torch.from_numpy(np.concatenate([seen, shown, users])),
        lengths=torch.from_numpy(np.concatenate([history, candidates, np.ones(samples, dtype=int)])),
    )
    chance = 1 / (1 + np.exp(-3 * np.sin(shown * 12.9898)))
    clicks = (rng.random(len(shown)) < chance).reshape(samples, CANDIDATES)
    return features, torch.from_numpy(clicks).float()


# --- the model ----------------------------------------------------------------------------------------------


def collection_of(problem: Problem, hot: Mapping[str, HotIds], device: str) -> nn.Module:
    """An EmbeddingCollection of the whole tables, with hot rows where there are any."""
    from torchrec import EmbeddingCollection, EmbeddingConfig

    configs = [
        EmbeddingConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=list(FEATURES[t.name]),
            weight_init_min=-0.5,
            weight_init_max=0.5,
        )
        for t in problem.tables
    ]
    if hot:
        return HotColdEmbeddingCollection(configs, hot, device)
    return EmbeddingCollection(configs, device=torch.device(device))


class Ranker(nn.Module):
    """Candidates attend over the history, as in HSTU: silu in place of a softmax."""

    def __init__(self, sequences: nn.Module) -> None:
        super().__init__()
        self.sequences = sequences
        # The same weights on all ranks, and in all arms.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.category = nn.Embedding(CATEGORIES, DIM)
            self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
            self.top = nn.Sequential(nn.Linear(3 * DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1))

    def forward(self, features: Any) -> torch.Tensor:
        """Logits [B, CANDIDATES]."""
        found = self.sequences(features)
        ids = features.to_dict()
        names, length = FEATURES["item_id"], found["item_id"].lengths()
        longest = (int(length.max()), CANDIDATES)
        history, shown = (
            _padded(found[name], self.category(ids[name].values() % CATEGORIES), n)
            for name, n in zip(names, longest, strict=True)
        )
        # Rows past the end of a history are 0. So are their keys' weights, once the bias is masked.
        there = torch.arange(history.shape[1]) < length[:, None]
        scores = nn.functional.silu(self.query(shown) @ self.key(history).transpose(1, 2))
        scores = scores * there[:, None] / length[:, None, None]
        context = scores @ self.value(history)
        user = found["user_id"].values()[:, None].expand_as(shown)
        return self.top(torch.cat([shown, context, user], dim=-1)).squeeze(-1)


def _padded(items: Any, categories: torch.Tensor, longest: int) -> torch.Tensor:
    """[B, longest, DIM] items with their categories, 0 past the end."""
    from torchrec import JaggedTensor

    return JaggedTensor(values=items.values() + categories, lengths=items.lengths()).to_padded_dense(longest)


# --- plans --------------------------------------------------------------------------------------------------


def arms_of(problem: Problem, model: CostModel, budget: Budget) -> dict[str, Arm]:
    """The plans of TorchRec's planner that differ, and ours without and with hot rows."""
    arms: dict[str, Arm] = {}
    for types in SWEEP:
        plan = _theirs(problem, types)
        if plan and all(set(plan.placements) != set(arm.plan.placements) for arm in arms.values()):
            arms[f"TorchRec, {types[0] if len(types) == 1 else 'all types'}"] = Arm(problem, plan)
    found = decide(problem, model, [HotRows()], SHARDERS["portfolio"], budget=budget)
    without = found.outcomes[0].found
    assert without is not None
    arms["ours, no hot rows"] = Arm(problem, without.plan)
    if found.problem != problem:
        arms["ours, hot rows"] = Arm(found.problem, found.plan)
    return arms


def _theirs(problem: Problem, types: Sequence[str]) -> Plan | None:
    """The plan of TorchRec's planner, called as its users do. None: it has none."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.planner.types import PlannerError

    topology, per_host = problem.topology, len(problem.topology.devices_by_host[0])
    # On one host nothing is between hosts.
    within, between = (topology.link(level).gbps or 1.0 for level in ("within_host", "between_hosts"))
    theirs = TheirTopology(
        len(topology),
        "cpu",
        ddr_cap=1 << 40,
        local_world_size=per_host,
        intra_host_bw=within * 1e6,
        inter_host_bw=between / per_host * 1e6,
    )
    constraints = {
        t.name: ParameterConstraints(
            sharding_types=list(types), pooling_factors=[t.pooling / t.features] * t.features
        )
        for t in problem.tables
    }
    model = Ranker(collection_of(problem, {}, "meta"))
    planner = EmbeddingShardingPlanner(theirs, problem.local_batch, constraints=constraints, stats=[])
    try:
        plan = planner.plan(model, [EmbeddingCollectionSharder()])  # pyright: ignore[reportArgumentType]
    except PlannerError:
        return None
    return from_torchrec(plan, problem, model)


def ids_of(arm: Arm, whole: Problem) -> dict[str, HotIds]:
    """The ids with the most lookups in other batches, as many as there are hot rows."""
    names, rows = cold_part_names(arm.problem), {t.name: t.rows for t in arm.problem.tables}
    batches = [batch_of(whole, SEEDS + k)[0].to_dict() for k in range(OTHER_BATCHES)] if names else []
    hot = {}
    for table in (t for t in whole.tables if t.name in names):
        name, n = table.name, rows[table.name + HOT]
        counts = sum(count_row_lookups(table, b[f].values().numpy()) for b in batches for f in FEATURES[name])
        hot[name] = HotIds(name, table.rows, np.sort(np.argsort(-counts, kind="stable")[:n]))
    return hot


# --- training -----------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizers and its step. arm None: whole tables, on this rank alone."""

    def __init__(self, whole: Problem, arm: Arm | None) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder

        self.losses: list[float] = []
        hot = ids_of(arm, whole) if arm else {}
        self.model: nn.Module = Ranker(collection_of(whole, hot, "cpu" if arm is None else "meta"))
        if arm is not None:
            fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
            self.model = DistributedModelParallel(
                self.model,
                device=torch.device("cpu"),
                plan=to_torchrec(arm.plan, arm.problem, self.model, "cpu"),
                sharders=[EmbeddingCollectionSharder(fused_params=fused)],  # pyright: ignore[reportArgumentType]
            )
        # Fused kernels update sharded tables in the backward pass. The rest is dense: hot rows, too.
        dense = [p for name, p in self.model.named_parameters() if arm is None or ".embeddings." not in name]
        self.optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)

    def step(self, batches: Sequence[tuple[Any, torch.Tensor]]) -> float:
        """Train on the mean of the batches: a rank's own or, unsharded, those of all ranks. Gives its ms."""
        began = time.perf_counter()
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        loss = torch.stack([cross_entropy(self.model(x), clicks) for x, clicks in batches]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return 1e3 * (time.perf_counter() - began)


def train(
    rank: int, whole: Problem, arms: Mapping[str, Arm], steps: int, check: bool, say: Callable[[Any], None]
) -> dict[str, Trainer]:
    """Train all arms step by step in turn, from the same rows. Says (arm, step, ms) of each step.

    check: says (arm, "apart", the largest difference of a weight from an unsharded copy's), too, and (arm, "moved",
    the largest that training made).
    """
    n = len(whole.topology)
    with tempfile.TemporaryDirectory() as own_folder:
        # One folder for all ranks: rows go through files, whatever each arm's plan is.
        names = [own_folder]
        dist.broadcast_object_list(names)
        folder = Path(names[0])
        torch.manual_seed(1)
        unsharded = Trainer(whole, None)
        first = {key: rows.clone() for key, rows in _tables(unsharded.model).items()}
        trainers = {name: Trainer(whole, arm) for name, arm in arms.items()}
        save_rows(unsharded.model, folder / "first")
        for trainer in trainers.values():
            load_rows(trainer.model, folder / "first")
        for step in range(steps):
            batches = [batch_of(whole, step * n + r) for r in range(n) if check or r == rank]
            own = batches[rank] if check else batches[0]
            # Every other step in reverse, so that no arm always runs behind the same one.
            for name in list(trainers)[:: 1 if step % 2 else -1]:
                dist.barrier()
                say((name, step, trainers[name].step([own])))
            if check:
                unsharded.step(batches)
        if check:
            for i, (name, trainer) in enumerate(trainers.items()):
                save_rows(trainer.model, folder / f"last-{i}")
                again = Ranker(collection_of(whole, {}, "cpu"))
                load_rows(again, folder / f"last-{i}")
                last = _tables(unsharded.model)
                for what, other in (("apart", _tables(again)), ("moved", first)):
                    say((name, what, max((other[key] - last[key]).abs().max().item() for key in last)))
        dist.barrier()
    return trainers


def _tables(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: rows for key, rows in model.state_dict().items() if ".embeddings." in key}


def topology_of(hosts: int, ranks: int, within_gbps: float, between_gbps: float) -> Topology:
    """Ranks on hosts. within_gbps, between_gbps: of their links, given."""
    devices = tuple(Device(1 << 36, host=f"h{i * hosts // ranks}") for i in range(ranks))
    between = {"between_hosts": between_gbps} if hosts > 1 else {}
    return Topology(devices, links=make_links(0.3, shared=True, within_host=within_gbps, **between))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=128, help="of a rank")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the power law of ids")
    parser.add_argument("--hosts", type=int, default=2, help="that the plans take the ranks to be on")
    parser.add_argument("--check", action="store_true", help="train an unsharded copy too, and compare")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        parser.error("RANK is not set; it needs to be run by torchrun")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.hosts < 1 or ranks % args.hosts or args.steps < 3 or args.samples < 1:
        parser.error(
            f"--hosts {args.hosts}, --steps {args.steps}, --samples {args.samples}: {ranks} ranks need hosts that "
            "divide them, 3 steps and a sample, or more"
        )
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks // args.hosts)
    dist.init_process_group("gloo")
    whole = problem_of(topology_of(args.hosts, ranks, 1.0, 0.0125), args.samples, args.alpha)
    # Rates of the order of two CPU cores, not measured.
    model = AnalyticModel(
        Setting("cpu", whole.global_batch), 500, 20, 20, gather_gbps=8, update_gbps=2, exchange_gbps=1
    )
    # Rank 0 plans, so that all have one plan.
    arms = [arms_of(whole, model, Budget(evals=2000)) if rank == 0 else {}]
    dist.broadcast_object_list(arms)
    said: dict[tuple[str, Any], float] = {}
    trainers = train(rank, whole, arms[0], args.steps, args.check, lambda x: said.update({x[:2]: x[2]}))
    for name, trainer in trainers.items():
        # A step takes as long as its slowest rank.
        found = torch.tensor([said[name, step] for step in range(args.steps)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        losses = torch.tensor(trainer.losses)
        dist.all_reduce(losses)
        arm = arms[0][name]
        hot = sum(t.rows for t in arm.problem.tables if t.name.endswith(HOT))
        if rank == 0:
            first, last = losses[:3].mean() / ranks, losses[-3:].mean() / ranks
            apart = (
                f"   rows moved by {said[name, 'moved']:.1e}, {said[name, 'apart']:.1e} apart from unsharded"
                if args.check
                else ""
            )
            print(
                f"{name:26} loss {first:.4f} -> {last:.4f}   step {found[2:].median():.1f} ms   "
                f"{hot:,} hot{apart}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
