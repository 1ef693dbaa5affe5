"""Are steps of sequence models shorter with hot rows? TorchRec's real training steps over emulated hosts.

    python -m bench.hot_row_steps MODEL --out steps.jsonl --seeds 3       # needs root; 1 min a model

Models are those of bench.hot_rows: sequence tables of the calibrated pool, and with power laws. Four gloo
ranks on two emulated hosts (network namespaces) run whole steps: ids, lookups, exchanges, backward, update. A
slow link joins the hosts, so what crosses it takes most of a step; ranks share the cores of this machine.

Arms, interleaved step by step in the same processes:

- row-wise; TorchRec's planner, given all sharding types and each by itself, as often as plans differ.
  (TorchRec runs no sequences table-row-wise, and on a CPU replicates none.)
- ours without hot rows: `plan --algorithm anneal`. Ours with them: `hot-rows`. Hot ids are those of 16 other
  batches.

A step takes as long as its slowest rank. A figure is the median of an arm's steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.hot_rows import OTHER_BATCHES, PER_HOST, N, _batch, models, planned
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost import composite
from shardcore.cost.model import CostModel
from shardcore.cost.replay_metrics import bootstrap
from shardcore.io import files
from shardcore.io.hot_ids import HotIds
from shardcore.measure import local_ranks
from shardcore.measure.hosts import Box, box_of
from shardcore.report.text import markdown_table
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.tables.heat import row_counts
from shardcore.tables.streams import stream
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection
from shardcore.torchrec.planner_pieces import quiet
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

SWEEP = (["table_wise", "column_wise", "row_wise"], ["table_wise"], ["column_wise"], ["row_wise"])
WITHIN_GBPS, LATENCY_MS = 1.0, 0.3
"""Of this machine's loopback, about. Given, not measured."""
WARM, BATCHES, SECONDS = 2, 3, 600
Arm = tuple[Problem, Plan]


def collection(problem: Problem, hot: dict[str, HotIds]) -> torch.nn.Module:
    """A model of one collection, with hot rows if there are any."""
    from torchrec import EmbeddingCollection, EmbeddingConfig

    configs = [
        EmbeddingConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"]
        )
        for t in problem.tables
    ]
    model, meta = torch.nn.Module(), torch.device("meta")
    model.ec = (
        HotColdEmbeddingCollection(configs, hot, device=meta)
        if hot
        else EmbeddingCollection(configs, device=meta)
    )
    model.forward = lambda batch: model.ec(batch)
    return model


def theirs(problem: Problem, types: list[str]) -> Plan:
    """The plan of TorchRec's planner."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology

    ours = problem.topology
    topology = TheirTopology(
        N,
        "cpu",
        ddr_cap=1 << 40,
        local_world_size=PER_HOST,
        intra_host_bw=ours.link("within_host").gbps * 1e6,
        inter_host_bw=ours.link("between_hosts").gbps / PER_HOST * 1e6,
    )
    constraints = {
        t.name: ParameterConstraints(sharding_types=types, pooling_factors=[t.pooling])
        for t in problem.tables
    }
    model = collection(problem, {})
    planner = EmbeddingShardingPlanner(topology, problem.local_batch, constraints=constraints, stats=[])
    return from_torchrec(planner.plan(model, [EmbeddingCollectionSharder()]), problem, model)


def arms_of(problem: Problem, model: CostModel, budget: Budget) -> dict[str, Arm]:
    found: dict[str, Arm] = {"row-wise": (problem, planned(problem))}
    for types in SWEEP:
        with quiet():
            plan = theirs(problem, types)
        if all(set(plan.placements) != set(old.placements) for _, old in found.values()):
            found[f"TorchRec, {'all types' if len(types) > 1 else types[0]}"] = problem, plan
    best = decide(problem, model, [HotRows()], SHARDERS["anneal"], budget=budget)
    found["ours, no hot rows"] = problem, best.outcomes[0].found.plan
    if best.problem != problem:
        found["ours, hot rows"] = best.problem, best.plan
    return found


def steps(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    problem: Problem,
    arms: dict[str, Arm],
    hot: dict[str, dict[str, HotIds]],
    repeats: int,
    seed: int,
) -> None:
    """Run the steps of all arms, in turn; says ms of each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(N), LOCAL_WORLD_SIZE=str(PER_HOST), LOCAL_RANK=str(rank % PER_HOST)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=N)
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
    )
    made = {}
    for name, (own, plan) in arms.items():
        model = collection(problem, hot[name])
        made[name] = DistributedModelParallel(
            model, device=torch.device("cpu"), sharders=[sharder], plan=to_torchrec(plan, own, model, "cpu")
        )
    dense = {
        name: torch.optim.SGD(list(model.module.ec.hot.parameters()), 0.01) if hot[name] else None
        for name, model in made.items()
    }
    batches = [_batch(problem, rank, seed + k) for k in range(BATCHES)]
    for step in range(WARM + repeats):
        for name, model in made.items():
            dist.barrier()
            began = time.perf_counter()
            found = model(batches[step % BATCHES])
            sum(found[f"f_{t.name}"].values().sum() for t in problem.tables).backward()
            if dense[name]:
                dense[name].step()
                dense[name].zero_grad()
            say((name, step, 1e3 * (time.perf_counter() - began)))
    dist.barrier()


def measured(problem: Problem, arms: dict[str, Arm], box: Box, repeats: int, seed: int) -> dict[str, float]:
    """ms of a step of each arm."""
    tables = {t.name: t for t in problem.tables}
    hot = {
        name: {
            table: HotIds.of_counts(
                table,
                sum(
                    row_counts(
                        tables[table], stream(tables[table], problem.global_batch, 10_000 + seed + k)[0]
                    )
                    for k in range(OTHER_BATCHES)
                ),
                n,
            )
            for table, n in hot_rows(own).items()
        }
        for name, (own, _) in arms.items()
    }
    slowest: dict[tuple[str, int], float] = defaultdict(float)
    with box_of(box) as places:
        for _, (name, step, ms) in local_ranks.run(
            "steps", steps, N, (problem, arms, hot, repeats, seed), SECONDS, places
        ):
            slowest[name, step] = max(slowest[name, step], ms)
    return {
        name: float(np.median([ms for (of, step), ms in slowest.items() if of == name and step >= WARM]))
        for name in arms
    }


def hot_rows(problem: Problem) -> dict[str, int]:
    """Hot rows of each table."""
    return {t.name.removesuffix("_hot"): t.rows for t in problem.tables if t.name.endswith("_hot")}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="folder of a model of this machine")
    p.add_argument("--out", type=Path, required=True, help="a line for each model; run again, it goes on")
    p.add_argument("--seeds", type=int, default=3, help="four models each")
    p.add_argument("--tables", type=int, default=5, help="of a model")
    p.add_argument("--repeats", type=int, default=9, help="steps of each arm")
    p.add_argument("--gbit", type=float, default=0.1, help="Gbit/s of a host's link")
    args = p.parse_args()
    model, box = composite.load([args.model]), Box(2, PER_HOST, args.gbit)
    topology = Topology(
        tuple(Device(1 << 36, host=f"h{i // PER_HOST}") for i in range(N)),
        links=links_of(LATENCY_MS, shared=True, within_host=WITHIN_GBPS, between_hosts=args.gbit / 8),
    )
    lines = args.out.read_text().splitlines() if args.out.exists() else ()
    done = {(x["model"], x["seed"]): x for x in map(json.loads, lines)}
    for seed in range(args.seeds):
        for name, tables in models(args.tables, seed).items():
            if (name, seed) in done:
                continue
            problem = Problem("sequences", tables, topology, model.setting.batch)
            problem = replace(problem, job=replace(problem.job, pipeline="none"))
            arms = arms_of(problem, model, Budget(5000))
            predicted = {k: plan.provenance.get("predicted_ms") for k, (_, plan) in arms.items()}
            done[name, seed] = {
                "model": name,
                "seed": seed,
                "gbit": args.gbit,
                "predicted": predicted,
                "ms": measured(problem, arms, box, args.repeats, seed),
            }
            print(json.dumps(done[name, seed]), file=sys.stderr, flush=True)
            files.write_atomic(args.out, "".join(json.dumps(x) + "\n" for x in done.values()).encode())
    print(table(list(done.values())))


def table(rows: list[dict[str, Any]]) -> str:
    """ms of each model, and how much longer the steps of other arms are."""
    swept = [min(ms for arm, ms in x["ms"].items() if not arm.startswith("ours")) for x in rows]
    ours = [
        min(
            ms
            for arm, ms in x["ms"].items()
            if arm.startswith("ours, h") or (arm.startswith("ours, n") and "ours, hot rows" not in x["ms"])
        )
        for x in rows
    ]
    shown = ("row-wise", "ours, no hot rows", "ours, hot rows")
    found = markdown_table(
        ["model", "seed", "row-wise", "best of TorchRec's", *shown[1:]],
        [
            [
                x["model"],
                str(x["seed"]),
                f"{x['ms']['row-wise']:.0f}",
                f"{best:.0f}",
                *(f"{x['ms'][arm]:.0f}" if arm in x["ms"] else "-" for arm in shown[1:]),
            ]
            for x, best in zip(rows, swept, strict=True)
        ],
    )
    for what, their in (
        ("row-wise", [x["ms"]["row-wise"] for x in rows]),
        ("the best of TorchRec's", swept),
        ("ours without hot rows", [x["ms"]["ours, no hot rows"] for x in rows]),
    ):
        ratios = bootstrap(np.array(their) / np.array(ours))
        found += f"\n\n{what}, over ours: {ratios.mean:.2f} ({ratios.low:.2f} to {ratios.high:.2f})"
    return found


if __name__ == "__main__":
    main()
