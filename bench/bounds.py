"""Lower bounds (search/bound/lower_bound.py) against optima found by enumeration, and against
plans of drawn problems.

    python -m bench.bounds MODEL --tiny 40 --problems 10 --devices 4

MODEL is a folder as `python -m shardcore train` writes it. Tiny problems have 4 or 5 tables of the calibrated
pool with dims up to 16 on 2 devices, or 2 or 3 with dims up to 8 on 4; every second pair of problems has
devices of different speeds. Every plan is priced that cuts each table by columns (multiples of 4), divides
its rows over all devices, or replicates it. `above` says in how many of them a bound (or a sharder's plan)
was above the optimum. Drawn problems are those of bench.search: the gap is that of a plan over the bound.
"""

from __future__ import annotations

import time
from itertools import combinations_with_replacement

import numpy as np
import torch

from bench import common
from bench.common import print_progress
from bench.search import draw_problems
from shardcore import report
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, OUTPUT_BYTES, Placement, Problem, Shard, Table
from shardcore.cost import neural
from shardcore.cost.model import CostModel, step_ms
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search import SHARDERS
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.step import kinds
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.kinds import SHARDING_KINDS, WHOLE_ROWS, possible_groups, shards_by_device
from shardcore.step.lower import traffic_of_outputs
from shardcore.step.shard_memory import exchanged_amounts
from shardcore.tables.generate import generate_pool

KINDS = tuple(SHARDING_KINDS.values())
SHARDERS_SHOWN = ("size_lookup_greedy", "neuroshard", "anneal_columns", "anneal")


def tiny_problem(pool: list[Table], model: neural.NeuralModel, seed: int) -> Problem:
    rng = np.random.default_rng([seed, 17])
    n_devices = 2 + 2 * (seed % 2)
    shape = ProblemConfig(2, 4, 5, 16) if n_devices == 2 else ProblemConfig(4, 2, 3, 8)
    drawn = draw_problem(pool, seed, model.setting, 2027, shape)
    speeds = rng.choice([0.5, 1.0, 2.0], n_devices) if seed % 4 >= 2 else np.ones(n_devices)
    devices = tuple(Device(1 << 40, s) for s in speeds)
    links = make_links(within_host=float(rng.choice([0.2, 1.0, 5.0])), latency_ms=0.2)
    return Problem(drawn.name, drawn.tables, Topology(devices, links=links), model.setting.batch)


def table_ways(table: Table, problem: Problem, model: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """Encodings [W, D, K, F] by sharding type and exchanged bytes [W, C, D] by channel, of a table's W placements."""
    n, topology = len(problem.topology), problem.topology
    of_columns = model.encode(
        [Shard(table, 0, table.rows, 0, w) for w in range(MIN_WIDTH, table.dim + 1, MIN_WIDTH)]
    )
    codes, sent, of_block = [], [], problem.global_batch * OUTPUT_BYTES * MIN_WIDTH * table.features
    # All divisions of the table's blocks over devices, as counts of each.
    for way in combinations_with_replacement(range(n), len(of_columns)):
        held = np.bincount(way, minlength=n)
        codes.append(np.zeros((n, len(SHARDING_KINDS), of_columns.shape[1])))
        codes[-1][:, KINDS.index(WHOLE_ROWS)] = np.where(held[:, None] > 0, of_columns[held - 1], 0.0)
        id_bytes = np.where(held > 0, received_id_bytes(Shard.whole(table), problem), 0)
        sent.append(traffic_of_outputs({WHOLE_ROWS: of_block * held}, problem, {WHOLE_ROWS: id_bytes}))
    for sharding_kind in kinds.kinds_on_all_devices(topology):
        for group in possible_groups(sharding_kind, table.rows, topology, None):
            codes.append(np.zeros_like(codes[0]))
            sent.append(np.zeros_like(sent[0]))
            for device, shard in shards_by_device(Placement(sharding_kind.name, Shard.whole(table), group)):
                codes[-1][device, KINDS.index(sharding_kind)] = model.encode(
                    [shard], sharding_kind.op_batch(problem)
                )[0]
                ids, outputs = np.array(exchanged_amounts(sharding_kind, shard, problem)[:2])[:, None]
                sent[-1][:, device] = traffic_of_outputs(
                    {sharding_kind: outputs}, problem, {sharding_kind: ids}
                )[:, 0]
    return np.stack(codes), np.stack(sent)


def optimum_ms(problem: Problem, model: CostModel) -> tuple[float, int]:
    """Least cost over all plans of a small problem, in ms, and the number of plans."""
    codes, sent = np.zeros(()), np.zeros(())
    for table in problem.tables:
        more, bytes_ = table_ways(table, problem, model)
        codes = (codes[..., None, :, :, :] + more).reshape(-1, *more.shape[1:]) if codes.ndim else more
        sent = (sent[..., None, :, :] + bytes_).reshape(-1, *bytes_.shape[1:]) if sent.ndim else bytes_
    speed = np.array([d.speed for d in problem.topology.devices])
    compute = model.op_ms(codes).sum(-1) / speed
    comm = model.comm_cost(np.moveaxis(sent, 1, 0), compute, problem.topology)
    return float(step_ms(compute, comm, problem.job).min()), len(sent)


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a trained model"},
        tiny=40,
        skip=(0, "tiny problems to leave out first"),
        problems=10,
        devices=4,
        seed=(2026, "of the drawn problems"),
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = neural.load(args.model)
    found, pool = [], [t for t in generate_pool() if t.rows >= 100]
    for seed in range(args.skip, args.skip + args.tiny):
        problem = tiny_problem(pool, model, seed)
        optimum, n = optimum_ms(problem, model)
        b = prove_lower_bound(problem, model)
        searched = [SHARDERS[name](problem, model).provenance["predicted_ms"] for name in SHARDERS_SHOWN]
        found.append([ms / optimum for ms in (b.proved_ms, *searched)])
        print_progress(
            f"tiny {seed}: {n} plans, optimum {optimum:.3f} ms, bound {b.proved_ms:.3f}, {b.limit}"
        )
    print(f"{model.setting}; {args.tiny} problems of 2 to 5 tables, all plans priced\n")
    if found:
        rows = [
            (
                name,
                f"{np.median(v):.3f}",
                f"{v.min():.3f} to {v.max():.3f}",
                f"{np.mean(v > 1 + 1e-9):.1%}",
                f"{np.mean(np.abs(v - 1) <= 0.01):.1%}",
            )
            for name, v in zip(("proved bound", *SHARDERS_SHOWN), np.array(found).T, strict=True)
        ]
        print(report.text_table(("over the optimum", "median", "range", "above", "within 1%"), rows))
    gaps, seconds = {name: [] for name in SHARDERS_SHOWN}, []
    for problem in draw_problems(model, args.problems, args.devices, args.seed):
        began = time.process_time()
        b = prove_lower_bound(problem, model)
        seconds.append(time.process_time() - began)
        for name in SHARDERS_SHOWN:
            ms = SHARDERS[name](problem, model).provenance["predicted_ms"]
            gaps[name].append(ms / b.proved_ms - 1)
            if name == SHARDERS_SHOWN[-1]:
                print_progress(
                    f"{problem.name}: {len(problem.tables)} tables, {name} {ms:.2f} ms, "
                    f"bound {b.proved_ms:.2f}"
                )
    if seconds:
        print(
            f"\n{args.problems} problems as in bench.search, {args.devices} devices; "
            f"a bound takes {np.mean(seconds):.2f} s of the processor, {max(seconds):.2f} at most\n"
        )
        gaps["best of these"] = np.min(list(gaps.values()), axis=0)
        rows = [
            (name, *(f"{x:+.1%}" for x in (np.median(v), np.min(v), np.max(v)))) for name, v in gaps.items()
        ]
        print(
            report.text_table(
                (
                    "sharder",
                    "over the bound: median",
                    "least",
                    "most",
                ),
                rows,
            )
        )


if __name__ == "__main__":
    main()
