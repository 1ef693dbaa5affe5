"""Is the sharding group that `plan --groups` chooses the best one, where it really runs? Hosts and links are
emulated, exchanges real.

    python -m bench.box_groups --problems 10 --out groups.jsonl

Each problem is planned for groups of every size, in both layouts. All groups of a layout run their steps side
by side on a cluster in a box, each a gang of its own. So they share the links of hosts, as in one job. All
begin each step together: otherwise one would have links to itself while another prepares its step.
Compute is measured before and slept for. A synchronisation is one all-reduce of the weights of each device
among its replicas, all at once. What a step takes is its median, plus its share of a synchronisation.

Prices are those of AnalyticModel, with the bandwidth that the topology gives of a host's link. Nothing is
fitted; compute is a few percent of a step. Tables are cut to ROWS rows, so that weights synchronise within
seconds. A line of --out is a problem; a rerun goes on after those done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import box_replays
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.metrics import mape
from shardcore.measure import collectives, hosts, local_ranks, processes, replay
from shardcore.measure.hardware import hardware_name
from shardcore.measure.step_compute import measure_compute
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.groups import FoundGroups, Groups
from shardcore.step.lower import Workload, lower
from shardcore.step.sharding_groups import members, replicas, synced_bytes

ROWS = 20_000
ROOM_BYTES = 8 << 30
"""Of a device: every division fits."""
BATCH = 2048
RATES = {"launch_us": 300.0, "lookup_ns": 20.0, "gather_gbps": 5.0, "update_gbps": 2.0}
"""Of a core, roughly."""
SYNC_EVERY = (10, 30, 100)
"""Steps between two synchronisations, by problem."""
BOXES = ((4, 2), (2, 4))
_TIMEOUT_S = 300.0


def step_ms(
    found: FoundGroups,
    problem: Problem,
    setting: Setting,
    config: replay.ReplayConfig,
    places: Sequence[hosts.Place],
) -> float:
    """Median ms of a step of all groups side by side."""
    grouped, of_group = found.grouped, members(problem.topology, found.grouping)
    work = lower(grouped.plan, grouped.problem)
    own = replace(setting, batch=grouped.problem.global_batch)
    [(_, (alone, _))] = local_ranks.run("compute", measure_compute, 1, ([work], own, config, None), _TIMEOUT_S)

    # Gangs begin each step together. Else one would have links to itself while another prepares its step.
    all_there = processes.context().Barrier(len(places), timeout=_TIMEOUT_S)

    def run(devices: Sequence[int]) -> float:
        n, on = len(devices), [places[d] for d in devices]
        said = dict(
            local_ranks.run("replay", _replay, n, (work, own, config, alone, all_there), _TIMEOUT_S, on)
        )
        [sample] = replay.combine_all([said[rank] for rank in range(n)], None, work.job)
        return sample.total_ms

    def run_or_end_all(devices: Sequence[int]) -> float:
        try:
            return run(devices)
        except BaseException:
            all_there.abort()  # or the other gangs would wait for this one
            raise

    with ThreadPoolExecutor(len(of_group)) as side_by_side:
        return float(np.median(list(side_by_side.map(run_or_end_all, of_group))))


def _replay(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    work: Workload,
    own: Setting,
    config: replay.ReplayConfig,
    alone: Any,
    all_there: Any,
) -> None:
    say(
        replay.replay_rank(
            rank,
            init_method,
            [work],
            own,
            config,
            progress=lambda: say(None),
            compute_ms=alone,
            meet=all_there.wait,
        )
    )


def sync_ms(found: FoundGroups, problem: Problem, places: Sequence[hosts.Place]) -> float:
    """ms of one synchronisation; 0 where there is but one group."""
    among = replicas(problem.topology, found.grouping)
    if len(among[0]) < 2:
        return 0.0
    n_bytes = [sum(of) for of in synced_bytes(found.plan, found.problem)]
    told = local_ranks.run("sync", _reduce, len(places), (len(places), among, n_bytes), _TIMEOUT_S, places)
    return max(ms for _, ms in told)


def _reduce(
    rank: int,
    init_method: str,
    say: Callable[[float], None],
    ranks: int,
    among: Sequence[Sequence[int]],
    n_bytes: Sequence[int],
) -> None:
    torch.set_num_threads(1)
    with local_ranks.exchanging():
        collectives.connect(rank, ranks, init_method, "cpu", _TIMEOUT_S)
        made = [dist.new_group(list(of)) for of in among]
        position = next(i for i, of in enumerate(among) if rank in of)
        weights, took = torch.zeros(n_bytes[position] // 4), []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(weights, group=made[position])
            took.append(1e3 * (time.perf_counter() - began))
        say(float(np.median(took)))
        dist.barrier()
        dist.destroy_process_group()


def judged(
    tables: Sequence[Table], model: AnalyticModel, index: int, args: argparse.Namespace
) -> dict[str, Any]:
    """What each way to divide a problem's devices costs, predicted and run."""
    every = SYNC_EVERY[index % len(SYNC_EVERY)]
    problem, box = box_replays.problem_of(tables, model, index, args.seed, False, BOXES)
    devices = tuple(replace(d, memory_bytes=ROOM_BYTES) for d in problem.topology.devices)
    problem = replace(problem, topology=replace(problem.topology, devices=devices))
    config = replay.ReplayConfig(args.repeats, 2, arena_bytes=4 << 30)
    best = decide(
        problem,
        model.for_problem(problem),
        [Groups(sync_every=every)],
        SHARDERS["anneal_columns"],
        budget=Budget(evals=20_000),
    )
    rows = []
    with hosts.box_of(box) as places:
        for found in (x.found for x in best.outcomes if x.found):
            ran = step_ms(found, problem, model.setting, config, places), sync_ms(found, problem, places)
            rows.append(
                {
                    "size": found.grouping.size,
                    "layout": found.grouping.layout,
                    "step_ms": found.cost.step_ms,
                    "sync_ms": found.cost.sync_ms,
                    "ran_step_ms": ran[0],
                    "ran_sync_ms": ran[1],
                    "total_ms": found.cost.total_ms,
                    "ran_total_ms": ran[0] + ran[1] / every,
                }
            )
            print(rows[-1], flush=True)
    chosen = best.grouping
    return {
        "problem": problem.name,
        "box": [box.hosts, box.ranks_per_host],
        "every": every,
        "chosen": [chosen.size, chosen.layout],
        "rows": rows,
    }


def said(done: Sequence[dict[str, Any]]) -> str:
    """How often the chosen division was the best that ran, and what the others cost."""
    hits, regrets, predicted, ran = 0, [], [], []
    for of in done:
        cost = {(r["size"], r["layout"]): r["ran_total_ms"] for r in of["rows"]}
        least = min(cost, key=cost.get)
        hits += tuple(of["chosen"]) == least
        regrets.append(cost[tuple(of["chosen"])] / cost[least] - 1)
        predicted += [r["total_ms"] for r in of["rows"]]
        ran += [r["ran_total_ms"] for r in of["rows"]]
    error = mape(np.array(predicted), np.array(ran))
    return (
        f"{len(done)} problems: the chosen division ran best in {hits}; it took {np.mean(regrets):.1%} "
        f"longer than the best on average, {max(regrets):.1%} at most; {len(ran)} predictions are off by "
        f"{error:.0f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.box_groups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9, help="steps of each (9)")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AnalyticModel(Setting(hardware_name("cpu"), BATCH), **RATES)
    tables = [replace(t, rows=min(t.rows, ROWS)) for t in box_replays.pool()]
    print(said(box_replays.rows_of(args.out, args.problems, lambda i: judged(tables, model, i, args))))


if __name__ == "__main__":
    main()
