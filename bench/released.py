"""Our searches against NeuroShard's released code: the same problems, the same networks, one run, one thread.

    git clone https://github.com/daochenzha/neuroshard FOLDER
    OMP_NUM_THREADS=1 python -m bench.released datasets/cpu-amd-epyc --neuroshard FOLDER --problems 20 --out
        OUT

`released` is its NeurSharder as published (beam 3, 10 + 10 candidates, 10 cuts, 11 caps); `neuroshard` is
ours with its defaults, the same and a pass without cap; `anneal` is our annealing in the same space, columns
halved, `as long` with the seconds that the released search took. Problems are those of bench/search.py for 4
devices, with the memory drawn there (twice what the tables need) and with little (1.02 times that). A
device's memory is counted alike for all: weights, pooled outputs and their gradients (the released code knows
weights alone: its size of a table is replaced, nothing else).

All search under networks that the released classes' own train() made: compute from the dataset's groups at
the setting's batch; communication, as exchanges of 4 devices were not measured, from what explicit links (as
the problems have them) take for random columns and starts. What is trained and found is kept in OUT: killed,
it goes on.

  cost            of the plan as it runs, a table's columns on a device being one shard, over that of the
                  released plan: mean and worst of the problems that all solved
  as searched     the same, over what the released search itself counts, which prices halves of a table on one
                  device apart
  seconds         of the processor, the mean of the same problems (searches run on one thread; others may use
                  the machine)
  prices differ   at most by, relative: ShardCore's price of any of the plans, and the released simulator's

Shapes: S samples, N shards, F features, H hidden units, G groups, D devices.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba import float64, njit

from bench import common
from bench.common import say
from bench.kept import with_memory
from bench.neuroshard_net import table_features
from bench.search import problems
from shardcore import report
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import OUTPUT_BYTES, Problem, Setting, Shard
from shardcore.cost import drift_correction
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.collective_model import ALL_TO_ALL
from shardcore.cost.model import CommCost, Compiled, price
from shardcore.io import writing
from shardcore.measure.sampling.collectives import comm_request
from shardcore.search import Budget
from shardcore.search.neuroshard import neuroshard
from shardcore.search.portfolio import annealing as anneal
from shardcore.search.state.shards import placed, priced
from shardcore.step.kinds import CHANNELS
from shardcore.step.lower import Workload, lower
from tasks import evaluate

DEVICES = 4
TIGHT = 1.02
"""Memory of all devices over what the tables need, in the problems with little of it."""
EVALS = (2_000, 20_000, 200_000)
EXCHANGES = 10_000
MAX_START_MS = 100.0

# --- the released code --------------------------------------------------------------------------------------


def released(folder: Path) -> SimpleNamespace:
    """The functions of a checkout that this bench calls."""
    if not (folder / "neuroshard" / "neurosharder.py").is_file():
        raise ShardCoreError(
            f"{folder} holds no neuroshard/neurosharder.py; "
            "it needs to be a checkout of daochenzha/neuroshard"
        )
    sys.path.insert(0, str(folder))
    names = {
        "compute": "compute_cost_model",
        "comm": "comm_cost_model",
        "search": "neurosharder",
        "simulator": "simulator",
        "sizes": "utils",
    }
    return SimpleNamespace(
        **{name: importlib.import_module(f"neuroshard.{module}") for name, module in names.items()}
    )


def table_config(shard: Shard, batch: int) -> dict[str, float]:
    """A table as the released code describes it."""
    rows, dim, pooling, *bins = table_features(shard, batch)
    return {
        "row": rows,
        "dim": dim,
        "pooling_factor": pooling,
        **{f"bin_{i}": share for i, share in enumerate(bins)},
    }


@dataclass(frozen=True)
class Found:
    """The plan of the released search, by device, with its ms as that search counts it and its seconds. Without
    shards, none was found."""

    shards: list[Shard]
    devices: list[int]
    ms: float
    seconds: float


def search(theirs: SimpleNamespace, networks: Sequence[Any], problem: Problem) -> Found:
    """The released search on a problem of equal devices."""
    batch, memory_gib = problem.global_batch, problem.topology.devices[0].memory_bytes / 2**30
    configs = [table_config(Shard.whole(t), batch) for t in problem.tables]

    class NeurSharder(theirs.search.NeurSharder):
        def _tables_size(self, x: Sequence[int]) -> float:
            tables = [self._table_configs[i] for i in x]
            return sum(theirs.sizes.table_size(t["row"] + 2 * batch, t["dim"]) for t in tables)

    began = time.process_time()
    cuts, found = NeurSharder(*networks, configs, DEVICES, memory_gib).shard(
        k=3, n=10, max_length=10, search_steps=11
    )
    seconds = time.process_time() - began
    if found is None:
        return Found([], [], math.inf, seconds)
    of_table, widths = list(range(len(configs))), [t.dim for t in problem.tables]
    for i in cuts:
        widths[i] //= 2
        of_table.append(of_table[i])
        widths.append(widths[i])
    ends, shards = [0] * len(configs), []
    for t, width in zip(of_table, widths, strict=True):
        table = problem.tables[t]
        shards.append(Shard(table, 0, table.rows, ends[t], ends[t] + width))
        ends[t] += width
    device_of = {i: d for d, held in enumerate(found) for i in held}
    devices = [device_of[i] for i in range(len(shards))]
    return Found(shards, devices, simulated(theirs, networks, shards, devices, batch), seconds)


def simulated(
    theirs: SimpleNamespace,
    networks: Sequence[Any],
    shards: Sequence[Shard],
    devices: Sequence[int],
    batch: int,
) -> float:
    """ms of a plan by the released simulator."""
    held = [[i for i, where in enumerate(devices) if where == d] for d in range(DEVICES)]
    configs = [table_config(s, batch) for s in shards]
    return theirs.simulator.ShardingSimulator(*networks, configs, DEVICES, float("inf")).get_final_cost(held)


# --- its networks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Published:
    """Trained networks of the released code as a CostModel of DEVICES equal devices that exchange by
    all-to-all, in float64. The forward network's ms hold the waiting."""

    setting: Setting
    compute: Any
    forward: Any
    backward: Any

    def for_problem(self, problem: Problem) -> Published:
        """Itself: the networks were trained for one batch."""
        return self

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, F]"""
        configs = [sorted(table_config(s, batch or self.setting.batch).items()) for s in shards]
        features = _scaled(self.compute, np.array([[value for _, value in c] for c in configs], dtype=float))
        return np.maximum(_layers(self.compute._cost_net.t_hidden, features), 0)

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[G] ms"""
        return np.where(sums.any(-1), _layers(self.compute._cost_net.c_hidden, sums)[:, 0], 0.0)

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        """[G] 0: it does not tell."""
        return np.zeros(len(sums))

    def link_ms(self, sums: np.ndarray) -> np.ndarray:
        """[G] 0: no rows are in host memory."""
        return np.zeros(len(sums))

    def out_of_range(self, workload: Workload) -> list[str]:
        return ["priced by the released networks of NeuroShard, not measured"]

    @property
    def lower(self) -> None:
        """None: no bound is proved for a network."""
        return None

    def compiled(self) -> Compiled:
        """`head` for one group at a time."""
        hidden, out = self.compute._cost_net.c_hidden
        weights = (hidden.weight.T, hidden.bias, out.weight, out.bias)
        parameters = np.concatenate([np.ravel(w.detach().double().numpy()) for w in weights])
        return Compiled(_head, parameters, parameters)

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """[..., D]; all-to-alls among all devices only."""
        columns = traffic[CHANNELS.index(ALL_TO_ALL)] / (self.setting.batch * OUTPUT_BYTES)
        backward_ms = _layers(self.backward._cost_net.hidden, _scaled(self.backward, columns))
        late_ms = compute_ms + backward_ms
        starts = np.concatenate([columns, late_ms - late_ms.min(-1, keepdims=True)], -1)
        forward_ms = _layers(self.forward._cost_net.hidden, _scaled(self.forward, starts))
        nothing = np.zeros_like(forward_ms)
        return CommCost(forward_ms, backward_ms, nothing, nothing, nothing)


@njit(float64(float64[::1], float64[::1]), cache=True, error_model="numpy")
def _head(sums: np.ndarray, p: np.ndarray) -> float:
    """p: weights [F, H] and biases [H] of the hidden layer, those [H] and [1] of the output."""
    f = len(sums)
    h = (len(p) - 1) // (f + 2)
    hidden = p[f * h : (f + 1) * h].copy()
    for i in range(f):
        for j in range(h):
            hidden[j] += sums[i] * p[i * h + j]
    ms = p[-1]
    for j in range(h):
        ms += max(hidden[j], 0.0) * p[(f + 1) * h + j]
    return ms


def _scaled(network: Any, features: np.ndarray) -> np.ndarray:
    return (features - network._feature_means.double().numpy()) / network._feature_stds.double().numpy()


def _layers(layers: Sequence[torch.nn.Linear], x: np.ndarray) -> np.ndarray:
    """A ReLU between layers, none after the last."""
    for i, layer in enumerate(layers):
        weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
        x = np.maximum(x, 0) @ weight.T + bias if i else x @ weight.T + bias
    return x


def trained(
    theirs: SimpleNamespace, args: argparse.Namespace, setting: Setting, topology: Topology
) -> tuple[Any, Any, Any]:
    """Compute, forward and backward networks: from OUT, or trained and kept there."""
    made = {"compute": theirs.compute.ComputeCostModel()}
    made |= {way: theirs.comm.CommCostModel(DEVICES) for way in ("forward", "backward")}
    for name, network in made.items():
        path = args.out / f"{name}.pt"
        if not path.exists():
            began, seed = time.perf_counter(), list(made).index(name)
            module = theirs.compute if name == "compute" else theirs.comm
            module.WEIGHT_TMP_PATH = str(args.out / f"{name}.best")
            torch.manual_seed(seed)
            np.random.seed(seed)
            data = groups(args.dataset, setting) if name == "compute" else exchanges(setting, topology, name)
            with contextlib.redirect_stdout(io.StringIO()):
                errors = network.train(*data, epochs=args.epochs)
            network.save(str(path.with_suffix(".part")))
            path.with_suffix(".part").rename(path)
            say(f"{name} network: {time.perf_counter() - began:.0f} s, RMSE {errors['test'] ** 0.5:.3f} ms")
        network.load(str(path))
    return tuple(made.values())


def groups(folder: str, setting: Setting) -> tuple[list[list[int]], list[float], torch.Tensor]:
    """X, y and table features of the released compute model's train()."""
    samples = [
        s
        for s in drift_correction.read(folder, setting).compute
        if s.error is None and s.request.batch == setting.batch
    ]
    x, features = [], []
    for s in samples:
        x.append(list(range(len(features), len(features) + len(s.request.shards))))
        features += [
            [value for _, value in sorted(table_config(shard, setting.batch).items())]
            for shard in s.request.shards
        ]
    return x, [s.total_ms for s in samples], torch.tensor(features, dtype=torch.float32)


def exchanges(setting: Setting, topology: Topology, way: str) -> tuple[np.ndarray, np.ndarray]:
    """X and y of the released communication models' train(): columns and starts in ms, and ms from the own
    start to the end."""
    drawn = [comm_request(i, DEVICES, setting.batch, max_start_ms=MAX_START_MS) for i in range(EXCHANGES)]
    columns, start_ms = (
        np.array([getattr(r, name) for r in drawn], dtype=float) for name in ("widths", "start_ms")
    )
    traffic = np.zeros((len(CHANNELS), *columns.shape))
    traffic[CHANNELS.index(ALL_TO_ALL)] = columns * setting.batch * OUTPUT_BYTES
    cost = AnalyticModel(setting).comm(traffic, start_ms, topology)
    if way == "backward":
        return columns, np.array(cost.backward_ms)
    return np.concatenate([columns, start_ms], 1), cost.forward_ms + cost.waiting_ms


# --- the comparison -----------------------------------------------------------------------------------------


def compared(
    theirs: SimpleNamespace, networks: Sequence[Any], model: Published, problem: Problem
) -> dict[str, Any]:
    """seconds of each sharder, ms of those that find a plan, what the released search counts, and how far
    prices differ."""
    found = search(theirs, networks, problem)
    plans = {}
    if found.shards:
        placements = placed([(s,) for s in found.shards], found.devices, problem)
        plans["released"] = priced(placements, problem, model)
    seconds = {"released": found.seconds}
    budgets = {**{f"{n:,} evals": Budget(evals=n) for n in EVALS}, "as long": Budget(seconds=found.seconds)}
    ours = {
        "neuroshard": lambda: neuroshard(problem, model),
        **{
            f"anneal, {name}": lambda b=b: anneal(problem, model, budget=b, space="halves")
            for name, b in budgets.items()
        },
    }
    for name, arm in ours.items():
        began = time.process_time()
        with contextlib.suppress(Infeasible):
            plans[name] = arm()
        seconds[name] = time.process_time() - began
    ms = {name: price(lower(plan, problem), model).total_ms for name, plan in plans.items()}
    again = {
        name: simulated(
            theirs,
            networks,
            [p.shard for p in plan.placements],
            [p.devices[0] for p in plan.placements],
            problem.global_batch,
        )
        for name, plan in plans.items()
    }
    return {
        "ms": ms,
        "seconds": seconds,
        "as_searched_ms": found.ms if found.shards else None,
        "differ": max((abs(again[name] / ms[name] - 1) for name in ms), default=0.0),
    }


def rows(memory: str, found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table, one a sharder."""
    names = list(found[0]["seconds"])
    ms, seconds = (
        {name: [f[figure].get(name) for f in found] for name in names} for figure in ("ms", "seconds")
    )
    standings = evaluate.standings(ms, seconds, "released")
    counted = [f for f in found if len(f["ms"]) == len(names)]
    searched = {name: [f["ms"][name] / f["as_searched_ms"] for f in counted] or [math.nan] for name in names}
    return [
        (
            memory,
            name,
            f"{s.solved:.0%}",
            f"{s.cost:.4f}",
            f"{s.worst:.3f}",
            f"{np.mean(searched[name]):.4f}",
            f"{max(searched[name]):.3f}",
            f"{s.seconds:.3f}",
            f"{s.seconds / standings['released'].seconds:.3f}",
        )
        for name, s in standings.items()
    ]


def main() -> None:
    parser = common.parser(
        __doc__,
        {"dataset": "folder of measurements of one setting"},
        neuroshard=(..., "checkout of the released code"),
        problems=20,
        seed=(2026, "of the problems"),
        epochs=(100, "of the networks' training"),
        out=(..., "folder that keeps what was trained and found"),
    )
    args = parser.parse_args()
    setting = common.only_setting(args.dataset)
    theirs = released(args.neuroshard)
    torch.set_num_threads(1)
    made_of, note = (
        {"dataset": args.dataset, "setting": str(setting), "epochs": args.epochs},
        args.out / "made_of.json",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        writing.write_json(note, made_of)
    if (kept := json.loads(note.read_text())) != made_of:
        raise ShardCoreError(f"{args.out} is of {kept}, this run of {made_of}; give another --out")
    drawn = problems(SimpleNamespace(setting=setting), args.problems, DEVICES, args.seed)
    networks = trained(theirs, args, setting, drawn[0].topology)
    model = Published(setting, *networks)
    anneal(drawn[0], model, budget=Budget(evals=100), space="halves")  # compiled before the clock starts
    found: dict[str, list[dict[str, Any]]] = {}
    for problem in drawn:
        for memory, of in {"as drawn": problem, "tight": with_memory(problem, TIGHT)}.items():
            path = args.out / f"{problem.name}-{memory.split()[0]}.json"
            row = common.kept(path, lambda of=of: compared(theirs, networks, model, of))
            found.setdefault(memory, []).append(row)
        say(f"{problem.name}: {len(problem.tables)} tables")
    differ = max(f["differ"] for of in found.values() for f in of)
    print(f"{setting}; {args.problems} problems of {DEVICES} devices; prices differ by {differ:.0e}\n")
    print(
        report.text_table(
            (
                "memory",
                "sharder",
                "solved",
                "cost",
                "worst",
                "as searched",
                "worst",
                "seconds",
                "of released",
            ),
            [row for memory, of in found.items() for row in rows(memory, of)],
        )
    )


if __name__ == "__main__":
    main()
