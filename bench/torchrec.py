"""Do plans of ours come back from TorchRec as they went, and does TorchRec train them? Random plans of all
kinds.

    python -m bench.torchrec --round-trips 1000 --plans 200 --sequence --out trained.json

Round trips go to a ShardingPlan, with random kernels, caches and types of its tables, to its file, and back,
on 1 to 8 devices on 1 to 3 hosts. Training runs three steps of DistributedModelParallel on gloo processes,
beside an unsharded copy, and compares outputs, parameters, and ops with what `lower` says that they are. It
takes ten plans at a time and writes what came of them to --out; run again, it goes on from there, and tries
again what failed. Exits 1 if any plan failed.

    python -m bench.torchrec --statistics

How far off are the unique rows of a batch that `fbgemm_statistics` makes of FBGEMM's estimate of its ids?
Streams of 1,024 samples, of power laws and of a part of the calibrated pool.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from shardcore import report
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem, Table
from shardcore.io import files, schema
from shardcore.step import access
from shardcore.tables import streams
from shardcore.tables.generate import generate_pool
from shardcore.torchrec.fbgemm_statistics import rows_by_count

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import training

SHAPES = ((1, 4), (2, 2), (2, 4), (3, 2), (1, 1))
"""Hosts and devices on each, of the round trips."""
TOGETHER = 10


def round_trips(n: int, seed: int) -> int:
    """How many of n random plans lose something; says what."""
    module, failed = training.Model(sequence=True), 0
    for i in range(n):
        rng, given = (
            np.random.default_rng([seed, i, 1]),
            training.problem(*SHAPES[i % len(SHAPES)], sequence=True),
        )
        if words := training.lost(training.draw(given, rng), given, module, rng):
            print(f"round trip {i} loses {words}", flush=True)
            failed += 1
    return failed


def drawn(given: Problem, i: int, seed: int) -> Plan:
    return training.draw(given, np.random.default_rng([seed, i]))


def trained(args: argparse.Namespace) -> dict[int, str]:
    """Of each plan what failed."""
    given = training.problem(args.hosts, args.per_host, args.sequence)
    asked = {"seed": args.seed, "hosts": args.hosts, "per_host": args.per_host, "sequence": args.sequence}
    said = _before(args.out, asked) if args.out else {}
    waiting = [i for i in range(args.plans) if said.get(i) != ""]
    while waiting:
        now = {i: drawn(given, i, args.seed) for i in waiting[:TOGETHER]}
        found = training.train(given, now, args.sequence)
        said |= found
        waiting = [i for i in waiting if i not in found]
        if args.out:
            files.write_json(
                args.out, {**asked, "plans": {str(i): words for i, words in sorted(said.items())}}
            )
        print(f"{args.plans - len(waiting)} of {args.plans}", file=sys.stderr, flush=True)
    return {i: said[i] for i in range(args.plans)}


def _before(path: Path, asked: dict) -> dict[int, str]:
    if not path.exists():
        return {}
    written = schema.read_json(path)
    for name, value in asked.items():
        if written.get(name) != value:
            raise ShardCoreError(
                f"{path} has plans of {name} {written.get(name)}, not {value}; give another --out"
            )
    return {int(i): words for i, words in written["plans"].items()}


BATCH, MOST_LOOKUPS, POOL_TABLES = 1024, 100_000, 40


def statistics() -> str:
    """A table of the errors in unique rows."""
    import fbgemm_gpu  # noqa: F401 (its ops)

    laws = [
        Table(f"zipf-{a}-{rows}-{pooling}", rows, 4, pooling, Zipf(a))
        for a in (0, 0.3, 0.6, 0.8, 1.05, 1.2, 1.5)
        for rows in (300, 5_000, 100_000, 5_000_000)
        for pooling in (1, 10, 60)
    ]
    pool = [t for t in generate_pool() if t.pooling > 0]
    some = [pool[i] for i in np.random.default_rng(0).permutation(len(pool))[:POOL_TABLES]]
    shown = []
    for name, drawn_from in (("power laws", laws), ("pool", some)):
        found = [
            _unique_rows(streams.stream(t, BATCH, seed=1)[0], t.rows)
            for t in drawn_from
            if 0 < access.lookups(t, BATCH) < MOST_LOOKUPS
        ]
        errors = np.array([estimate / true - 1 for estimate, true in filter(None, found)])
        off = np.abs(errors)
        shown.append(
            (
                name,
                len(found),
                found.count(None),
                f"{np.median(off):.0%}",
                f"{np.quantile(off, 0.9):.0%}",
                f"{np.median(errors):+.0%}",
            )
        )
    return report.text_table(
        ("streams", "number", "FBGEMM fails", "median error", "90th percentile", "bias"), shown
    )


def _unique_rows(ids: np.ndarray, rows: int) -> tuple[float, int] | None:
    """Estimated and true; None where FBGEMM's estimate fails."""
    try:
        with _no_output():
            hitters, q, s, _, n = torch.ops.fbgemm.tbe_estimate_indices_distribution(torch.from_numpy(ids))
    except RuntimeError:
        return None
    return rows_by_count(hitters.tolist(), q, s, n, rows).sum(), len(np.unique(ids))


@contextmanager
def _no_output() -> Iterator[None]:
    """The op prints every step of its fit, from C++."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--round-trips", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=200, help="to train (200)")
    parser.add_argument("--hosts", type=int, default=2, help="of the devices that train (2)")
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--sequence", action="store_true", help="train an EmbeddingCollection too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the plans that were trained")
    parser.add_argument(
        "--statistics", action="store_true", help="only compare FBGEMM's estimates of reuse with the truth"
    )
    args = parser.parse_args()
    if args.statistics:
        print(statistics())
        return 0
    failed, began = 0, time.monotonic()
    if args.round_trips:
        failed = round_trips(args.round_trips, args.seed)
        print(
            f"{args.round_trips} round trips, {failed} lost something, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    began = time.monotonic()
    said = trained(args)
    given = training.problem(args.hosts, args.per_host, args.sequence)
    kinds = Counter(
        kind.split()[0]
        for i in said
        for kind in training.kinds_of(drawn(given, i, args.seed), given, args.sequence).values()
    )
    wrong = {i: words for i, words in said.items() if words}
    print(
        f"{len(said)} plans trained, {len(wrong)} failed, {time.monotonic() - began:.0f} s; tables "
        + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    )
    for i, words in wrong.items():
        print(f"plan {i}: {words}\n    {training.kinds_of(drawn(given, i, args.seed), given, args.sequence)}")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        sys.exit(main())
    except ShardCoreError as error:
        sys.exit(str(error))
