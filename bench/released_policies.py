"""Our DreamShard and AutoShard against the released codes: the same tasks, the same cost model, one thread.

    git clone https://github.com/daochenzha/dreamshard FOLDER
    git clone https://github.com/daochenzha/autoshard FOLDER2
    OMP_NUM_THREADS=1 python -m bench.released_policies MODEL --dreamshard FOLDER --autoshard FOLDER2 \
        --out OUT

Tasks are as published: a pool of 856 tables at dim 16 in two halves, 50 training tasks of one, 50 test tasks
of the other, tables whole, 4 devices. Where the released codes measure on GPUs, MODEL prices: DreamShard's
Evaluator and AutoShard's Env.single_step are replaced, and gym, of which they use names only, by a stub.
Memory is loose, and alike for all. Ours see the same training tasks, and stop by 15 more of the same half.

What is trained and found is kept in OUT, one file an arm and seed: killed, it goes on.

  cost            of the test tasks' plans, over the best greedy order's: mean and worst, then the same over
                  the released code's
  failed          tasks without a plan
  seconds         of the processor for training, AutoShard's actor included
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench import common
from bench.common import say
from bench.neuroshard_net import table_features
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost import neural
from shardcore.cost.model import group_costs, price
from shardcore.cost.neural import NeuralModel
from shardcore.io import writing
from shardcore.search import SHARDERS, Budget, sharder
from shardcore.search.greedy import ORDERS
from shardcore.search.learned.training import PolicyConfig, train
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import lower
from shardcore.step.memory_account import local_batch_bytes, table_bytes
from shardcore.tables.generate import PoolConfig, generate_pool

DEVICES, TASKS, VALIDATION, DIM, SLACK = 4, 50, 15, 16, 2.0
OURS = ("dreamshard", "dreamshard_direct", "autoshard")


def tasks(model: NeuralModel, tables: int) -> dict[str, list[Problem]]:
    """train, validation and test tasks, on devices that are all alike."""
    pool = [t for t in generate_pool(PoolConfig(dim=DIM)) if t.pooling > 0]
    rng = np.random.default_rng(0)
    order = rng.permutation(len(pool))
    halves = {
        "train": order[: len(pool) // 2],
        "validation": order[: len(pool) // 2],
        "test": order[len(pool) // 2 :],
    }
    made = {}
    for side, half in halves.items():
        drawn = [
            tuple(pool[i] for i in rng.choice(half, tables, replace=False))
            for _ in range(VALIDATION if side == "validation" else TASKS)
        ]
        made[side] = [
            Problem(
                f"{side}-{i}",
                of,
                Topology((Device(1),) * DEVICES, **common.LINKS),
                model.setting.batch,
                model.setting.optimizer,
            )
            for i, of in enumerate(drawn)
        ]
    every = [p for of in made.values() for p in of]
    needs = [sum(table_bytes(t, p) for t in p.tables) / DEVICES * SLACK for p in every]
    largest = max(table_bytes(t, p) for p in every for t in p.tables)
    device = Device(int(max(*needs, largest)) + max(map(local_batch_bytes, every)))
    return {
        side: [replace(p, topology=replace(p.topology, devices=(device,) * DEVICES)) for p in of]
        for side, of in made.items()
    }


def cpu_seconds() -> float:
    """Seconds of the processor, of this process and of those that it started and that ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def plan_of(problem: Problem, devices: Sequence[int]) -> Plan:
    return Plan(
        tuple(
            Placement(WHOLE_ROWS.name, Shard.whole(t), (int(d),))
            for t, d in zip(problem.tables, devices, strict=True)
        )
    )


# --- the released codes -------------------------------------------------------------------------------------


def stub_gym() -> None:
    """The names of gym that the released codes use."""
    gym, spaces = ModuleType("gym"), ModuleType("gym.spaces")
    spaces.Box = lambda low, high, shape: SimpleNamespace(shape=shape)
    spaces.Discrete, spaces.Dict = (lambda n: n), dict
    gym.Env, gym.spaces = type("Env", (), {"seed": lambda self, seed: None}), spaces
    sys.modules |= {"gym": gym, "gym.spaces": spaces}


def write_tasks(folder: Path, made: dict[str, list[Problem]], batch: int) -> dict[Table, int]:
    """Table configs and tasks as both released codes read them. Returns each table's number."""
    number: dict[Table, int] = {}
    for of in made.values():
        for problem in of:
            for table in problem.tables:
                number.setdefault(table, len(number))
    configs = []
    for table, i in number.items():
        rows, dim, pooling, *bins = table_features(Shard.whole(table), batch)
        configs.append(
            {
                "index": i,
                "row": rows,
                "dim": dim,
                "pooling_factor": pooling,
                **{f"bin_{k}": share for k, share in enumerate(bins)},
            }
        )
    writing.write_json(folder / "table_configs.json", {"tables": configs})
    for side in ("train", "test"):
        lines = [",".join(str(number[t]) for t in p.tables) for p in made[side]]
        writing.write_atomic(folder / f"{side}.txt", ("\n".join(lines) + "\n").encode())
    # AutoShard hands these to its Env: a table's number tells single_step which it is.
    torch.save(
        {"lS_offsets": list(range(len(number))), "lS_indices": list(range(len(number)))}, folder / "data.pt"
    )
    return number


def released_dreamshard(
    checkout: Path, folder: Path, made: dict[str, list[Problem]], model: NeuralModel, seed: int
) -> tuple[list[list[int]], float]:
    """Devices of each test task's tables, and seconds of training."""
    sys.path.insert(0, str(checkout))
    training, utils, env, models, sharders = (
        importlib.import_module(f"dreamshard.{name}")
        for name in ("training", "utils", "env", "models", "sharders")
    )

    class Evaluator:
        def __init__(self, data_dir: str, task_path: str, gpu_devices: str) -> None:
            pass

        def evaluate(self, task: int, sharding: Sequence[int]) -> tuple[float, np.ndarray]:
            cost = price(lower(plan_of(made["train"][task], sharding), made["train"][task]), model)
            forward = np.sum([cost.forward_comm_ms, cost.waiting_ms, cost.input_ms], 0)
            parts = np.stack(
                [cost.forward_compute_ms, forward, cost.backward_comm_ms, cost.backward_compute_ms], 1
            )
            return float(parts.sum(1).max()), parts

        def terminate(self) -> None:
            pass

    training.Evaluator = Evaluator
    np.random.seed(seed)
    torch.manual_seed(seed)
    out = folder / f"dreamshard-{seed}"
    out.mkdir(exist_ok=True)
    memory_gib = made["train"][0].topology.devices[0].memory_bytes / 2**30
    args = SimpleNamespace(
        num_iterations=10,
        bench_steps=10,
        rl_num_batches=10,
        rl_batch_size=10,
        ndevices=DEVICES,
        bench_training_steps=300,
        entropy_weight=0.001,
        batch_size=64,
        max_memory=memory_gib,
        data_dir=str(folder),
        task_path=str(folder / "train.txt"),
        gpu_devices="0,1,2,3",
        out_dir=str(out),
    )
    began = cpu_seconds()
    training.train(args)
    seconds = cpu_seconds() - began
    trained = models.Model(table_feature_dim=21)
    trained.load_state_dict(torch.load(out / "9.pt"))
    found = []
    for ids in utils.get_table_ids_list(str(folder / "test.txt")):
        _, features, sizes = utils.load_table_configs_features_sizes(str(folder), ids)
        of_task = env.Env(features, sizes, trained, DEVICES, memory_gib)
        found.append(sharders.shard(of_task, "dreamshard"))
    return found, seconds


def released_autoshard(
    checkout: Path, folder: Path, made: dict[str, list[Problem]], model: NeuralModel, seed: int, steps: int
) -> tuple[list[list[int]], float]:
    """The released AutoShard, trained and run as `released_dreamshard` is."""
    sys.path.insert(0, str(checkout))
    bench, training, sharders = (
        importlib.import_module(f"autoshard.{name}") for name in ("bench", "training", "sharders")
    )
    tables = {i: t for t, i in write_tasks(folder, made, model.setting.batch).items()}

    def single_step(self: Any, held: Sequence[int]) -> float:
        return float(group_costs([[Shard.whole(tables[self.offsets[i]]) for i in held]], model)[0])

    bench.Env.single_step = single_step
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    np.random.seed(seed)
    torch.manual_seed(seed)
    memory_gib = made["train"][0].topology.devices[0].memory_bytes / 2**30
    flags = SimpleNamespace(
        data_dir=str(folder),
        ndevices=DEVICES,
        gpu_devices="0",
        max_memory=memory_gib,
        xpid=f"autoshard-{seed}",
        disable_cost_model=False,
        checkpoint_history=False,
        checkpoint_history_every=2400,
        disable_checkpoint=False,
        savedir=str(folder),
        total_steps=steps,
        batch_size=8,
        unroll_length=100,
        num_learner_threads=1,
        num_cost_updates=20,
        num_min_buf_size=0,
        entropy_cost=0.001,
        baseline_cost=0.5,
        discounting=1.0,
        reward_clipping="none",
        learning_rate=0.001,
        grad_norm_clipping=40.0,
        num_actors=1,
    )
    began = cpu_seconds()
    training.train(flags)
    for actor in torch.multiprocessing.active_children():
        actor.join()  # or its seconds are not known
    seconds = cpu_seconds() - began
    # Its checkpoint, written a moment ago, holds numpy's numbers.
    torch.load = partial(torch.load, weights_only=False)
    found = []
    for problem in made["test"]:
        ids = [i for t in problem.tables for i, known in tables.items() if known == t]
        configs = json.loads((folder / "table_configs.json").read_text())["tables"]
        data = {"lS_offsets": range(len(tables)), "lS_indices": range(len(tables))}
        selected = training.select_data(configs, data, ids)
        of_task = bench.Env(*selected, DEVICES, memory_gib)
        of_task.checkpointpath = str(folder / f"autoshard-{seed}" / "model.tar")
        found.append(sharders.shard(of_task, "autoshard")[0])
    return found, seconds


# --- the comparison -----------------------------------------------------------------------------------------


def ours(name: str, made: dict[str, list[Problem]], model: NeuralModel, seed: int) -> dict[str, Any]:
    began = cpu_seconds()
    trained = train(name, made["train"], made["validation"], model, PolicyConfig(seed=seed))
    seconds = cpu_seconds() - began
    search = sharder(name, trained.policy)
    return {
        "seconds": seconds,
        **{
            arm: [search(p, model, budget=budget).provenance["predicted_ms"] for p in made["test"]]
            for arm, budget in (("ms", None), ("best_of_32_ms", Budget(evals=32)))
        },
    }


def theirs(
    found: tuple[list[list[int]], float], made: dict[str, list[Problem]], model: NeuralModel
) -> dict[str, Any]:
    ms: list[float | None] = []
    for problem, devices in zip(made["test"], found[0], strict=True):
        try:
            ms.append(price(lower(plan_of(problem, devices), problem), model).total_ms)
        except ShardCoreError:
            ms.append(None)
    return {"seconds": found[1], "ms": ms}


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        found = common.kept(path, make)
    say(f"{path.name}: {found['seconds']:.0f} s")
    return found


def main() -> None:
    parser = common.parser(
        __doc__,
        {"model": "folder of a trained model"},
        dreamshard=(Path, "checkout of the released code"),
        autoshard=(Path, "checkout of the released code"),
        seeds=3,
        tables=(50, "of a task"),
        autoshard_steps=(100_000, "of its training"),
        out=(..., "folder that keeps what was trained and found"),
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    stub_gym()
    args.out.mkdir(parents=True, exist_ok=True)
    model = neural.load(args.model)
    made = tasks(model, args.tables)
    write_tasks(args.out, made, model.setting.batch)
    greedy = np.array(
        [min(SHARDERS[n](p, model).provenance["predicted_ms"] for n in ORDERS) for p in made["test"]]
    )
    arms: dict[str, list[list[float | None]]] = {
        "random": [
            [SHARDERS["random"](p, model, seed=s).provenance["predicted_ms"] for p in made["test"]]
            for s in range(args.seeds)
        ]
    }
    seconds: dict[str, list[float]] = {}

    def add(arm: str, found: dict[str, Any], ms: str = "ms") -> None:
        arms.setdefault(arm, []).append(found[ms])
        seconds.setdefault(arm, []).append(found["seconds"])

    for seed in range(args.seeds):
        if args.dreamshard:
            add(
                "dreamshard, released",
                kept(
                    args.out / f"released-dreamshard-{seed}.json",
                    lambda s=seed: theirs(
                        released_dreamshard(args.dreamshard, args.out, made, model, s), made, model
                    ),
                ),
            )
        if args.autoshard:
            add(
                "autoshard, released",
                kept(
                    args.out / f"released-autoshard-{seed}.json",
                    lambda s=seed: theirs(
                        released_autoshard(args.autoshard, args.out, made, model, s, args.autoshard_steps),
                        made,
                        model,
                    ),
                ),
            )
        for name in OURS:
            found = kept(args.out / f"{name}-{seed}.json", lambda n=name, s=seed: ours(n, made, model, s))
            add(name, found)
            add(f"{name}, best of 32", found, "best_of_32_ms")
    rows = []
    for arm, of_seeds in arms.items():
        ms = np.array([[np.nan if x is None else x for x in one] for one in of_seeds])
        base = np.nanmean(
            np.array(arms.get(f"{arm.split(',')[0].split('_')[0]}, released", of_seeds), dtype=float), 0
        )
        rows.append(
            (
                arm,
                f"{np.nanmean(ms / greedy):.4f}",
                f"{np.nanmax(ms / greedy):.3f}",
                f"{np.nanmean(ms / base):.4f}" if "shard" in arm else "",
                " ".join(f"{x:.4f}" for x in np.nanmean(ms / greedy, 1)),
                int(np.isnan(ms).sum()),
                f"{np.mean(seconds[arm]):.0f}" if arm in seconds else "",
            )
        )
    print(f"{model.setting}; {TASKS} test tasks of {args.tables} tables at dim {DIM} on {DEVICES} devices\n")
    print(
        report.text_table(("arm", "cost", "worst", "of released", "cost by seed", "failed", "seconds"), rows)
    )


if __name__ == "__main__":
    main()
