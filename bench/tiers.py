"""Plans for tables that do not fit in device memory: ours against three other ways.

    python -m bench.tiers plans --problems 30 --out plans.jsonl
    python -m bench.tiers ahead --problems 4 --out ahead.jsonl

Run again, a part goes on from there. Nothing is measured: rows in host memory need a GPU.

plans: 12 to 24 tables on 4 H100 (profile nvidia-h100-sxm), half of the problems by power laws, half from the
    calibrated pool, with device memory for 5% to 60% of the weights beside what a step needs. In every third
    one, device and host memory together hold 15% more than the weights. All arms are priced by one model,
    ours: one LRU cache an op, as wide as its widest table. All plans are for the same bytes, and keep to them.
    Arms:

    ours: `plan --tiers`.
    TorchEasyRec: its dynamic program over HBM and DDR, reimplemented, in TorchRec's planner.
    scale-up: TorchRec's planner with its own EmbeddingOffloadScaleupProposer.
    largest to host: until the others fit. Then our search for places.

    Both planners run with several load factors, sharding types and shares of the memory; the plan that is
    cheapest under our model counts. Its load factors get our search for places, too.
ahead: our plans of the same problems for pipeline prefetch, with dense parts of 0 and 2 ms. Arms:

    sparse_dist: nothing hides the link.
    its plan: the same load factors and places, priced for prefetch.
    prefetch: `plan --tiers` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer, UniformProposer

from bench import common
from bench.common import print_progress
from bench.peers.tiers import DynamicProgram, torchrec_plan
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Device
from shardcore.core.types import Problem, Table
from shardcore.cost.model import CostModel, predicted_total_ms, price
from shardcore.cost.profile import load_profile
from shardcore.report.text import markdown_table
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.memory_tiers import (
    MemoryTiers,
    device_bytes_for_tables,
    tier_of_each_table,
    with_load_factors,
)
from shardcore.search.state.shards import priced_plan
from shardcore.step.lower import lower
from shardcore.step.memory import plan_fits
from shardcore.tables.generate import generate_pool
from shardcore.torchrec.baseline import silence_torchrec_logging

Row = dict[str, Any]
PROFILE, DEVICES, BATCH, EVALS = "nvidia-h100-sxm", 4, 16_384, 2_000
WEIGHTS = (0.05, 0.15, 0.3, 0.6)
"""Shares of the weights that fit in device memory."""
FACTORS = (0.01, 0.2)
"""Load factors that planners start from, or offer. 0.2 is TorchRec's default."""
TYPES = ("table_wise", "column_wise", "row_wise")
MEMORY = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory that an arm gets, as ours tries them."""


# --- plans --------------------------------------------------------------------------------------------------


def draw_problem(seed: int) -> Problem:
    rng = np.random.default_rng([seed, 29])
    n = int(rng.integers(12, 25))
    if seed % 2:
        pool = [t for t in generate_pool() if t.pooling > 0.01]
        tables = tuple(pool[k] for k in rng.choice(len(pool), n, replace=False))
    else:
        tables = tuple(
            Table(
                f"t{i}",
                int(10 ** rng.uniform(4.5, 7.5)),
                int(rng.choice((32, 64, 128))),
                float(rng.lognormal(1.5, 1.0)),
                Zipf(float(rng.uniform(0.5, 1.3))),
            )
            for i in range(n)
        )
    weights = sum(t.bytes for t in tables)
    on_host = int(weights * (1.15 - WEIGHTS[seed % len(WEIGHTS)] if seed % 3 == 2 else 2))
    topology = load_profile(PROFILE).topology(1, DEVICES, on_host)
    rich = Problem(
        f"tiers-{seed}", tables, replace(topology, devices=(Device(1 << 40),) * DEVICES), BATCH, "exact_sgd"
    )
    beside = DEVICES * (1 << 40) - device_bytes_for_tables(rich)
    memory = int(beside + WEIGHTS[seed % len(WEIGHTS)] * weights) // DEVICES
    return replace(rich, topology=replace(topology, devices=(Device(memory),) * DEVICES))


def our_plan_ms(problem: Problem, model: CostModel) -> float:
    """Predicted ms of our plan for a problem; infinite if infeasible."""
    try:
        plan = SHARDERS["portfolio"](problem, model.for_problem(problem), budget=Budget(EVALS))
    except Infeasible:
        return np.inf
    return plan.provenance["predicted_ms"]


def our_ms(problem: Problem, model: CostModel) -> Sequence[float]:
    return [decide(problem, model, [MemoryTiers()], SHARDERS["portfolio"], budget=Budget(EVALS)).ms]


def easyrec_planner_ms(problem: Problem, model: CostModel) -> Sequence[float]:
    kernels = "fused", "fused_uvm", "fused_uvm_caching"
    return _rival_ms(problem, model, lambda: [DynamicProgram(), UniformProposer()], kernels, [TYPES])


def scale_up_ms(problem: Problem, model: CostModel) -> Sequence[float]:
    # It takes one sharding type a table.
    types = [[name] for name in TYPES]
    return _rival_ms(
        problem, model, lambda: [EmbeddingOffloadScaleupProposer()], ["fused_uvm_caching"], types
    )


def _rival_ms(
    problem: Problem,
    model: CostModel,
    proposers: Callable[[], Sequence[Any]],
    kernels: Sequence[str],
    types: Sequence[Sequence[str]],
) -> Sequence[float]:
    """Predicted ms of a rival's best plan, and of the best with the rival's load factors and our placements."""
    best, chosen = np.inf, None
    for some, factor in ((some, factor) for some in types for factor in FACTORS):
        for share in MEMORY:
            with silence_torchrec_logging():
                found = torchrec_plan(problem, proposers(), kernels, some, factor, share)
            if found is None:
                continue
            own, placements = found
            try:
                plan = priced_plan(placements, own, model.for_problem(own))
            # Rows that do not divide evenly are no plan that TorchRec trains.
            except ShardCoreError:
                break
            if plan_fits(plan, own):
                best, chosen = min((best, chosen), (plan.provenance["predicted_ms"], own), key=lambda x: x[0])
                break
    return [best, our_plan_ms(chosen, model) if chosen else np.inf]


def largest_to_host_ms(problem: Problem, model: CostModel) -> Sequence[float]:
    names = [t.name for t in sorted(problem.tables, key=lambda t: -t.bytes)]
    several = [with_load_factors(problem, dict.fromkeys(names[:n], 0.0)) for n in range(len(names) + 1)]
    found = [np.inf]
    for share in MEMORY:
        fitting = (
            p
            for p in several
            if sum(t.device_bytes for t in tier_of_each_table(p)) <= share * device_bytes_for_tables(p)
        )
        found += [our_plan_ms(p, model) for p in [next(fitting, None)] if p]
    return [min(found)]


ARMS = {
    "ours": our_ms,
    "TorchEasyRec's dynamic program": easyrec_planner_ms,
    "TorchRec's scale-up": scale_up_ms,
    "largest to host": largest_to_host_ms,
}


def plan_costs(seed: int) -> Row:
    problem, model = draw_problem(seed), load_profile(PROFILE).cost_model()
    ms = {}
    for name, arm in ARMS.items():
        for what, one in zip((name, f"{name}, our places"), arm(problem, model), strict=False):
            ms[what] = float(one) if np.isfinite(one) else None
    return {"ms": ms}


def plan_costs_report(rows: Sequence[Row]) -> str:
    cells = []
    for name in rows[0]["ms"]:
        if ratios := [r["ms"][name] / r["ms"]["ours"] for r in rows if r["ms"][name]]:
            figures = f"{np.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"
            cells.append([name, *figures, str(sum(x < 0.9995 for x in ratios)), str(len(ratios))])
    return markdown_table(["arm", "ms over ours, median", "range", "faster than ours", "has a plan"], cells)


# --- ahead --------------------------------------------------------------------------------------------------

DENSE_MS = (0.0, 2.0)


def prefetch_costs(seed: int) -> Row:
    model, rows = load_profile(PROFILE).cost_model(), {}
    for dense_ms in DENSE_MS:
        plain, fetching = (
            replace(
                draw_problem(seed),
                job=Job(name, dense_forward_ms=dense_ms / 3, dense_backward_ms=2 * dense_ms / 3),
            )
            for name in ("sparse_dist", "prefetch")
        )
        found, best = (
            decide(of, model, [MemoryTiers()], SHARDERS["portfolio"], budget=Budget(EVALS))
            for of in (plain, fetching)
        )
        same = replace(found.problem, job=fetching.job)
        # It may not fit: this pipeline has more ids in memory.
        its_ms = predicted_total_ms(lower(found.plan, same, fits=False), model.for_problem(same))
        cost = price(lower(best.plan, best.problem), model.for_problem(best.problem))
        rows[f"{dense_ms:g}"] = {
            "sparse_dist": found.ms,
            "its plan": its_ms,
            "prefetch": best.ms,
            "link": max(cost.link_ms),
            "waited": max(cost.fetch_wait_ms),
            "cached": [sum(0 < t.load_factor < 1 for t in of.problem.tables) for of in (found, best)],
        }
    return {"by_dense_ms": rows}


def prefetch_report(rows: Sequence[Row]) -> str:
    cells = [
        [
            str(row["seed"]),
            dense_ms,
            *(f"{x[name]:.3f}" for name in ("sparse_dist", "its plan", "prefetch", "link", "waited")),
            " and ".join(map(str, x["cached"])),
        ]
        for row in rows
        for dense_ms, x in row["by_dense_ms"].items()
    ]
    head = [
        "problem",
        "dense part",
        "sparse_dist",
        "its plan",
        "prefetch",
        "link",
        "waited for",
        "cached tables",
    ]
    return markdown_table(head, cells)


PARTS: Mapping[str, tuple[Callable[[int], Row], Callable[[Sequence[Row]], str]]] = {
    "plans": (plan_costs, plan_costs_report),
    "ahead": (prefetch_costs, prefetch_report),
}
"""By name: what one drawn problem gives, and the report of all."""


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"part": f"one of {', '.join(PARTS)}"},
        problems=(30, "to draw"),
        first=(0, "number of the first"),
        out=(..., "a line of JSON for each problem"),
    )
    args = parser.parse_args()
    if args.part not in PARTS:
        parser.error(f"part is {args.part!r}; known are {', '.join(PARTS)}")
    take, show = PARTS[args.part]
    rows = common.read_rows_of_settings(args.out, {"part": args.part})
    for seed in range(args.first + len(rows), args.first + args.problems):
        rows.append({"part": args.part, "seed": seed, **take(seed)})
        common.write_rows(args.out, rows)
        print_progress(f"{len(rows)} of {args.problems}")
    print(show(rows))


if __name__ == "__main__":
    main()
