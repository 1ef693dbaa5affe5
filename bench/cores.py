"""What measuring on several cores at once gains in rate and costs in disturbed medians.

    python -m bench.cores

The same groups, in passes that alternate: one process alone, then one process on each core at once. Two
passes of a kind tell how well medians repeat; between the kinds, whether company shifts or disturbs them.
Figures are at the clock's own slowdown (nothing corrected) and at the usual speed (as datasets keep them).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch

from shardcore import report
from shardcore.core.types import Setting
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import hardware, kernels
from shardcore.measure.sampling.groups import compute_request, reference_request
from shardcore.tables.generate import generate_pool

Medians = dict[ComputeRequest, tuple[float, float]]
"""Forward + backward ms of each group: at the clock's slowdown, and at the usual one."""


def serve(
    pipe: Connection, core: int, setting: Setting, config: kernels.KernelConfig, reference: ComputeRequest
) -> None:
    """A bench on one core: for the requests that it is sent, their medians and its seconds."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    bench = kernels.KernelBench(setting, "cpu", config, reference)
    while (requests := pipe.recv()) is not None:
        bench.reference_ms = bench.reference_ms or bench.calibrate(requests[:16])
        began = time.perf_counter()
        samples = [s for s in bench.measure(requests) if s.request != reference]
        pipe.send(
            ({s.request: (s.total_ms * s.slowdown, s.total_ms) for s in samples}, time.perf_counter() - began)
        )


def measure(pipes: Sequence[Connection], requests: Sequence[ComputeRequest]) -> tuple[list[Medians], float]:
    """What each process measured of the same requests, all at once, and the seconds of the slowest."""
    for pipe in pipes:
        pipe.send(requests)
    answers = [pipe.recv() for pipe in pipes]
    return [m for m, _ in answers], max(s for _, s in answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=100, help="groups to measure (100)")
    parser.add_argument("--passes", type=int, default=2, help="of each kind (2)")
    parser.add_argument("--batch", type=int, default=2048, help="global batch (2048)")
    parser.add_argument("--seed", type=int, default=12)
    args = parser.parse_args()
    setting = Setting(hardware.hardware_name("cpu"), args.batch)
    pool = [t for t in generate_pool() if t.pooling > 0]
    requests = [compute_request(pool, i, setting, args.seed) for i in range(args.groups)]
    config = kernels.KernelConfig(min_repeats=12, max_repeats=12)
    context, pipes = multiprocessing.get_context("spawn"), []
    cores = sorted(os.sched_getaffinity(0))
    for core in cores:
        pipe, theirs = context.Pipe()
        context.Process(
            target=serve, args=(theirs, core, setting, config, reference_request(pool, setting)), daemon=True
        ).start()
        pipes.append(pipe)
    measure(pipes, requests[:16])  # every process has its arena, its streams and its reference
    alone, company, seconds = [], [], {"alone": 0.0, "company": 0.0}
    for _ in range(args.passes):
        [found], took = measure(pipes[:1], requests)
        alone.append(found)
        seconds["alone"] += took
        both, took = measure(pipes, requests)
        company.append(both)
        seconds["company"] += took
    for pipe in pipes:
        pipe.send(None)
    rows = [
        (
            "samples a minute",
            f"{60 * args.passes * len(requests) / seconds['alone']:.0f}",
            f"{60 * args.passes * len(requests) * len(cores) / seconds['company']:.0f}",
        )
    ]
    for k, slowdown in enumerate(("clock's slowdown", "usual speed")):

        def differ(pairs: list[tuple[Medians, Medians]], slowdown: int = k) -> np.ndarray:
            return np.array([abs(b[r][slowdown] / a[r][slowdown] - 1) for a, b in pairs for r in requests])

        one, many = (
            differ(list(itertools.pairwise(alone))),
            differ([p for ms in zip(*company, strict=True) for p in itertools.pairwise(ms)]),
        )
        shift = np.median(
            [
                c[r][k] / a[r][k]
                for a, both in zip(alone, company, strict=True)
                for c in both[:1]
                for r in requests
            ]
        )
        rows += [
            (f"two medians differ by, {slowdown}: median", f"{np.median(one):.1%}", f"{np.median(many):.1%}"),
            (
                f"two medians differ by, {slowdown}: 90%",
                f"{np.quantile(one, 0.9):.1%}",
                f"{np.quantile(many, 0.9):.1%}",
            ),
            (f"median over that of the same core alone, {slowdown}", "1", f"{shift:.3f}"),
        ]
    print(f"{setting}; {len(requests)} groups, 12 repeats, {args.passes} passes of each kind\n")
    print(report.text_table(("", "one core", f"{len(cores)} cores at once"), rows))


if __name__ == "__main__":
    main()
