"""MLPerf's DLRMv3: predicted steps at full size, and real steps of the example on emulated hosts.

    python -m bench.dlrmv3 predicted --out predicted.jsonl
    python -m bench.dlrmv3 steps --model MODEL --out steps.jsonl --seeds 6          # needs root

Each part writes a line for each case. Run again, it goes on from there.

predicted: all three tables at full size (963 GiB) on 64 and 128 H100, 8 a host, 64 samples each, by the profile
    nvidia-h100-sxm: published measurements, nothing measured here. Ids are even, as the benchmark's generator
    draws them, and follow power laws, as data does. Arms: TorchRec's planner, swept, with our statistics; ours
    without hot rows; ours with them (`plan --hot-rows`).
steps: examples/torchrec_dlrmv3 on four gloo ranks, two by two on emulated hosts, whose link is slow. Whole
    steps of TorchRec's modules with the dense part, all arms in turn in the same processes. A step takes as long
    as its slowest rank; a figure is the median of an arm's. MODEL is of this machine.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import print_progress
from bench.hosts import Box, emulated_hosts
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible
from shardcore.core.topology import default_reserved_bytes
from shardcore.core.types import Problem
from shardcore.cost import composite
from shardcore.cost.metrics import mean_interval
from shardcore.cost.model import CostModel
from shardcore.cost.profile import load_profile
from shardcore.report.text import markdown_table
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.tables.public import public_optimizer, public_pool

LIST, PROFILE, SAMPLES, PER_HOST = "mlperf-dlrmv3", "nvidia-h100-sxm", 64, 8
SIZES, ALPHAS = (64, 128), (0.0, 0.8, 1.05, 1.2)
HOSTS, RANKS, WITHIN_GBPS = 2, 4, 1.0
"""WITHIN_GBPS: of this machine's loopback, about. Given, not measured."""
SETTLE, SECONDS = 3, 900
"""Steps that do not count, and the longest that a rank may be silent."""
Row = dict[str, Any]


# --- predicted ----------------------------------------------------------------------------------------------


def full_size_problem(devices: int, alpha: float) -> Problem:
    topology = load_profile(PROFILE).topology(devices // PER_HOST, PER_HOST)
    limits = Constraints(reserved_bytes=default_reserved_bytes(topology.devices))
    return Problem(
        LIST,
        public_pool(LIST, alpha),
        topology,
        SAMPLES * devices,
        public_optimizer(LIST),
        constraints=limits,
    )


def predict_arms(devices: int, alpha: float, evals: int) -> Row:
    problem, model = full_size_problem(devices, alpha), load_profile(PROFILE).cost_model()
    row: Row = {"devices": devices, "alpha": alpha, "ms": {}, "hot": {}}
    for name, sharder, decisions in (
        ("TorchRec", "torchrec", []),
        ("ours, no hot rows", "portfolio", []),
        ("ours, hot rows", "portfolio", [HotRows()]),
    ):
        try:
            found = decide(problem, model, decisions, SHARDERS[sharder], budget=Budget(evals=evals))
        except Infeasible as error:
            row["ms"][name] = None
            print_progress(name, str(error))
            continue
        row["ms"][name] = found.plan.provenance["predicted_ms"]
        hot = {t.name: t.rows for t in found.problem.tables if t.name.endswith("_hot")}
        row |= {"hot": hot} if decisions else {}
    return row


def predicted_table(rows: Sequence[Row]) -> str:
    return markdown_table(
        [
            "devices",
            "exponent of ids",
            "TorchRec's planner, ms",
            "ours, no hot rows",
            "ours, hot rows",
            "TorchRec's over ours",
            "hot rows",
        ],
        [
            [
                str(x["devices"]),
                f"{x['alpha']:g}",
                *(f"{ms:.2f}" if ms else "no plan" for ms in x["ms"].values()),
                f"{x['ms']['TorchRec'] / x['ms']['ours, hot rows']:.2f}" if all(x["ms"].values()) else "-",
                f"{sum(x['hot'].values()):,}",
            ]
            for x in rows
        ],
    )


# --- steps --------------------------------------------------------------------------------------------------


def _train_rank(
    rank: int, init_method: str, tell: Callable[[Any], None], whole: Problem, arms: Any, steps: int
) -> None:
    """Train as one rank of a gang. Sends (arm, step, ms)."""
    import torch
    import torch.distributed as dist

    from examples.torchrec_dlrmv3 import train

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    each = RANKS // HOSTS
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(each),
        "LOCAL_RANK": str(rank % each),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS)
    train.train(rank, whole, arms, steps, False, tell)


def measure_arms(seed: int, alpha: float, model: CostModel, gbit: float, repeats: int) -> Row:
    """Median step ms of each arm, measured by training. seed: of the batches."""
    from examples.torchrec_dlrmv3 import train
    from shardcore.measure import local_ranks
    from shardcore.torchrec.baseline import silence_torchrec_logging

    topology = train.topology_of(HOSTS, RANKS, WITHIN_GBPS, gbit / 8)
    whole = train.problem_of(topology, model.setting.batch // RANKS, alpha, seed)
    with silence_torchrec_logging():
        arms = train.arms_of(whole, model, Budget(evals=3000))
    slowest: dict[tuple[str, int], float] = defaultdict(float)
    with emulated_hosts(Box(HOSTS, RANKS // HOSTS, gbit)) as places:
        given = (whole, arms, SETTLE + repeats)
        for _, (name, step, ms) in local_ranks.run_ranks(
            "dlrmv3", _train_rank, RANKS, given, SECONDS, places
        ):
            slowest[name, step] = max(slowest[name, step], ms)
    return {
        "seed": seed,
        "alpha": alpha,
        "predicted": {name: arm.plan.provenance.get("predicted_ms") for name, arm in arms.items()},
        "ms": {
            name: float(
                np.median([ms for (arm, step), ms in slowest.items() if arm == name and step >= SETTLE])
            )
            for name in arms
        },
    }


def steps_table(rows: Sequence[Row]) -> str:
    best = [min(ms for name, ms in x["ms"].items() if name.startswith("TorchRec")) for x in rows]
    without = [x["ms"]["ours, no hot rows"] for x in rows]
    # Where no hot rows pay, ours is the plan without them.
    ours = [x["ms"].get("ours, hot rows", x["ms"]["ours, no hot rows"]) for x in rows]
    arms = {"best of TorchRec's": best, "ours, no hot rows": without, "ours, hot rows": ours}
    shown = markdown_table(
        ["exponent of ids", "seed", *(f"{name}, ms" for name in arms)],
        [
            [f"{x['alpha']:g}", str(x["seed"]), *(f"{ms:.0f}" for ms in of)]
            for x, *of in zip(rows, *arms.values(), strict=True)
        ],
    )
    for name, ms in list(arms.items())[:-1]:
        ratio = mean_interval(np.array(ms) / np.array(ours))
        shown += f"\n\n{name} over ours, hot rows: {ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return shown


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"part": "predicted or steps"},
        out=...,
        model=(Path, "steps: folder of a model of this machine"),
        seeds=(6, "steps: of each exponent"),
        repeats=(9, "steps: of each arm"),
        gbit=(0.05, "steps: Gbit/s of a host's link, as in bench.box_replays"),
        alphas=([0.8, 1.05, 1.2], "steps: exponents of ids"),
        evals=(300, "predicted: evaluations of each search"),
    )
    args = parser.parse_args()
    if args.part not in ("predicted", "steps") or (args.part == "steps" and not args.model):
        parser.error(f"part is {args.part!r}; it needs to be predicted, or steps with --model")
    names = ("part", "evals") if args.part == "predicted" else ("part", "gbit", "repeats")
    settings = {name: getattr(args, name) for name in names}
    rows = common.read_rows_of_settings(args.out, settings)
    if args.part == "predicted":
        cases = [(devices, alpha) for devices in SIZES for alpha in ALPHAS]
        done = {(x["devices"], x["alpha"]): x for x in rows}
    else:
        cases = [(seed, alpha) for seed in range(args.seeds) for alpha in args.alphas]
        done = {(x["seed"], x["alpha"]): x for x in rows}
        model = composite.load_models([args.model])
    for case in (case for case in cases if case not in done):
        began = time.monotonic()
        if args.part == "predicted":
            done[case] = settings | predict_arms(*case, args.evals)
        else:
            done[case] = settings | measure_arms(*case, model, args.gbit, args.repeats)
        common.write_rows(args.out, list(done.values()))
        print_progress(f"{case}: {done[case]['ms']}, {time.monotonic() - began:.0f} s")
    print((predicted_table if args.part == "predicted" else steps_table)([done[case] for case in cases]))


if __name__ == "__main__":
    main()
