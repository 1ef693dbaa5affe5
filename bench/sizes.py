"""Cost against size, up to ten thousand tables: annealing, NeuroShard's search and the best greedy one.

    python -m bench.sizes MODEL --out docs/benchmarks/search-sizes.png [--pods]

MODEL is a folder as `python -m shardcore train` writes it. Tables are those of the calibrated pool, repeated
beyond its size, at dims 16 to 128, the devices in hosts of 8 with explicit links (1 and 0.5 GB/s), with 1.5
times the memory that the tables need. `best known` is annealing with ten times as long. Peak memory is that
of a process of its own for each size. With --pods, 64 devices or more in pods of 4 hosts, with links of three
levels (1, 0.5 and 0.125 GB/s): every search has rows over hosts and over pods, in the same seconds.
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
from bench.common import print_progress
from bench.kept import problem_of_size
from shardcore import report
from shardcore.cost import neural
from shardcore.search import BASELINES, SHARDERS, Budget
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.search.portfolio import search_with_annealing as anneal

SIZES = {(40, 4): (0.5, 5.0), (160, 16): (1.0, 10.0), (856, 128): (4.0, 40.0), (10_000, 1024): (100.0, None)}
"""Tables and devices: seconds of annealing, and of the best known plan (None: not looked for)."""
IN_PODS = {(428, 64): (8.0, 40.0), (856, 128): (8.0, 80.0), (10_000, 1024): (200.0, None)}
"""The same in pods."""
DEVICES_OF_POD = 32
COMPARED = 128
"""On more devices neuroshard's first pass alone takes longer than annealing."""


def search_times(model: neural.NeuralModel, n_tables: int, n_devices: int, pods: bool) -> dict[str, float]:
    seconds, long_s = (IN_PODS if pods else SIZES)[n_tables, n_devices]
    asked = problem_of_size(
        n_tables, n_devices, model.setting.batch, n_devices // DEVICES_OF_POD if pods else 1
    )

    def search_ms(name: str, seconds: float | None = None, seed: int = 0) -> float:
        return decide(
            asked, model, [RowDomains()], SHARDERS[name], seed=seed, budget=Budget(seconds=seconds)
        ).ms

    # Compiled before the clock starts.
    anneal(problem_of_size(8, 2, model.setting.batch), model, budget=Budget(evals=100))
    began = time.perf_counter()
    found = {"anneal_ms": search_ms("anneal", seconds)}
    found["anneal_s"] = time.perf_counter() - began
    found["anneal_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if n_devices <= COMPARED:
        began = time.perf_counter()
        found["neuroshard_ms"] = search_ms("neuroshard", seconds)
        found["neuroshard_s"] = time.perf_counter() - began
    found["greedy_ms"] = min(map(search_ms, BASELINES))
    best = search_ms("anneal", long_s, seed=1) if long_s else np.inf
    found["best_ms"] = min(best, found["anneal_ms"])
    least = prove_lower_bound(asked, model)
    found["proved_ms"] = least.proved_ms if least else np.nan
    return found


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a trained model"},
        out=(Path("search-sizes.png"), "the plot"),
        pods=(False, "devices in pods"),
    )
    parser.add_argument("--one", type=int, nargs=2, metavar=("TABLES", "DEVICES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        n_tables, n_devices = args.one
        print(json.dumps(search_times(neural.load(args.model), n_tables, n_devices, args.pods)))
        return
    rows, found = [], []
    sizes = IN_PODS if args.pods else SIZES
    for size in sizes:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bench.sizes",
                args.model,
                *["--pods"] * args.pods,
                "--one",
                *map(str, size),
            ],
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
                f"{f['anneal_ms'] / f['proved_ms']:.3f}",
            )
        )
        print_progress(f"{size[0]} tables, {size[1]} devices done")
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
                "over the bound",
            ),
            rows,
        )
    )
    _plot_times(found, list(sizes), args.out)


def _plot_times(found: list[dict[str, float]], sizes: list[tuple[int, int]], out: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes, devices = figure.subplots(), [d for _, d in sizes]
    for key, label in (
        ("greedy_ms", "best greedy"),
        ("neuroshard_ms", "neuroshard, as long"),
        ("anneal_ms", "anneal"),
        ("proved_ms", "lower bound"),
    ):
        axes.plot(devices, [f.get(key, np.nan) / f["proved_ms"] for f in found], marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel=f"devices ({', '.join(f'{n:,}' for n, _ in sizes)} tables)",
        ylabel="cost over the bound",
        xticks=devices,
        xticklabels=devices,
    )
    axes.legend()
    common.write_png(out, figure)


if __name__ == "__main__":
    main()
