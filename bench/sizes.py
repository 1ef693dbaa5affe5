"""Cost against size: annealing beside NeuroShard's and the best greedy one, from tens of tables to ten
thousand.

    python -m bench.sizes MODEL --out docs/benchmarks/search-sizes.png

MODEL is a folder as `python -m shardcore train` writes it. Tables are those of the calibrated pool, repeated
beyond its size, at dims 16 to 128, the devices in hosts of 8 with explicit links (1 and 0.5 GB/s), with 1.5
times the memory that the tables need. `best known` is annealing with ten times as long. Peak memory is that
of a process of its own for each size.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from bench import common
from bench.common import say
from bench.kept import of_size
from shardcore import report
from shardcore.cost import neural
from shardcore.search import BASELINES, SHARDERS, Budget
from shardcore.search.bound.lower_bound import bound
from shardcore.search.portfolio import annealing as anneal

SIZES = {(40, 4): (0.5, 5.0), (160, 16): (1.0, 10.0), (856, 128): (4.0, 40.0), (10_000, 1024): (100.0, None)}
"""Tables and devices: seconds of annealing, and of the best known plan (None: not looked for)."""
COMPARED = 128
"""On more devices neuroshard's first pass alone takes longer than annealing."""


def one(model: neural.NeuralModel, n_tables: int, n_devices: int) -> dict[str, float | None]:
    seconds, long_s = SIZES[n_tables, n_devices]
    asked = of_size(n_tables, n_devices, model.setting.batch)
    # Compiled before the clock starts.
    anneal(of_size(8, 2, model.setting.batch), model, budget=Budget(evals=100))
    began = time.perf_counter()
    found = {"anneal_ms": anneal(asked, model, budget=Budget(seconds=seconds)).provenance["predicted_ms"]}
    found["anneal_s"] = time.perf_counter() - began
    found["anneal_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if n_devices <= COMPARED:
        began = time.perf_counter()
        found["neuroshard_ms"] = SHARDERS["neuroshard"](
            asked, model, budget=Budget(seconds=seconds)
        ).provenance["predicted_ms"]
        found["neuroshard_s"] = time.perf_counter() - began
    found["greedy_ms"] = min(SHARDERS[n](asked, model).provenance["predicted_ms"] for n in BASELINES)
    best = (
        anneal(asked, model, seed=1, budget=Budget(seconds=long_s)).provenance["predicted_ms"]
        if long_s
        else np.inf
    )
    found["best_ms"] = min(best, found["anneal_ms"])
    found["estimate_ms"] = bound(asked, model).estimate_ms
    return found


def main() -> None:
    parser = common.parser(
        __doc__, {"model": "folder of a trained model"}, out=(Path("search-sizes.png"), "the plot")
    )
    parser.add_argument("--one", type=int, nargs=2, metavar=("TABLES", "DEVICES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(one(neural.load(args.model), *args.one)))
        return
    rows, found = [], []
    for size in SIZES:
        done = subprocess.run(
            [sys.executable, "-m", "bench.sizes", args.model, "--one", *map(str, size)],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        f = json.loads(done.stdout)
        found.append(f)
        theirs = (
            f"{f['neuroshard_ms'] / f['anneal_ms']:.3f} ({f['neuroshard_s']:.1f} s)"
            if "neuroshard_ms" in f
            else "-"
        )
        rows.append(
            (
                f"{size[0]:,} x {size[1]:,}",
                f"{f['anneal_ms']:.2f}",
                f"{f['anneal_s']:.1f}",
                f"{f['anneal_mib']:.0f}",
                theirs,
                f"{f['greedy_ms'] / f['anneal_ms']:.2f}",
                f"{f['anneal_ms'] / f['best_ms']:.3f}",
                f"{f['anneal_ms'] / f['estimate_ms']:.3f}",
            )
        )
        say(f"{size[0]} tables, {size[1]} devices done")
    print(
        report.text_table(
            (
                "tables x devices",
                "local ms",
                "seconds",
                "peak MiB",
                "neuroshard over it",
                "best greedy over it",
                "over best known",
                "over estimate",
            ),
            rows,
        )
    )
    _plot(found, args.out)


def _plot(found: list[dict[str, float]], out: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes, devices = figure.subplots(), [d for _, d in SIZES]
    for key, label in (
        ("greedy_ms", "best greedy"),
        ("neuroshard_ms", "neuroshard, as long"),
        ("anneal_ms", "anneal"),
        ("estimate_ms", "estimate of the least"),
    ):
        axes.plot(devices, [f.get(key, np.nan) / f["estimate_ms"] for f in found], marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel="devices (40, 160, 856, 10,000 tables)",
        ylabel="cost over the estimate",
        xticks=devices,
        xticklabels=devices,
    )
    axes.legend()
    common.write_png(out, figure)


if __name__ == "__main__":
    main()
