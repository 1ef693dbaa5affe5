"""What the order of ranks brings: a job whose ranks were dealt to hosts at random, and the same job with its
ranks in the order that `topology measure` finds. Hosts and links are emulated, exchanges real.

    python -m bench.box_order MODEL --exchanges BOX --problems 10 --out order.jsonl

Both run one plan, which `anneal` makes for hosts of consecutive ranks, as TorchRec assumes them. Problems,
prices and replays are those of bench.box_replays. A line of --out is a problem; a rerun goes on after those
done.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import box_replays
from shardcore.core.types import Table
from shardcore.cost import neural, replay_metrics
from shardcore.measure import hosts, pairs
from shardcore.measure.rank_order import order
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.search.portfolio import annealing as anneal
from shardcore.step.lower import lower

QUICK = pairs.PairConfig(message_kib=128, load_kib=512)
"""On links so slow, 1 MiB between all pairs of 16 ranks would take ten minutes."""


def both_ms(
    tables: Sequence[Table], model: neural.NeuralModel, index: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Replayed ms of a step, ranks as dealt and in the order found."""
    problem, box = box_replays.problem_of(tables, model, index, args.seed, args.exchanges is not None)
    own = model.for_problem(problem)
    plan, config = anneal(problem, own), ReplayConfig(args.repeats, 2, arena_bytes=4 << 30)
    dealt = np.random.default_rng([args.seed, index]).permutation(box.ranks)
    took = {}
    with hosts.box_of(box) as places:
        shuffled = [places[i] for i in dealt]
        found = pairs.measure(box.ranks, QUICK, on=shuffled)
        ordered = [shuffled[rank] for rank in order(found.levels, box.ranks)]
        for name, where in (("dealt", shuffled), ("ordered", ordered)):
            # The plan takes consecutive ranks for a host, wherever they are.
            taken = [replace(place, host=rank // box.ranks_per_host) for rank, place in enumerate(where)]
            [sample] = replay_all([lower(plan, problem)], own.setting, config, on=taken)
            took[name] = sample.total_ms
    return {
        "problem": problem.name,
        "box": [box.hosts, box.ranks_per_host],
        "found": len(found.levels) == 1,
        "kinds": sorted({p.kind for p in plan.placements}),
        **took,
    }


def said(rows: Sequence[dict[str, Any]]) -> str:
    gain = replay_metrics.bootstrap(np.array([row["ordered"] / row["dealt"] for row in rows]))
    return (
        f"{len(rows)} problems: a step in the order found takes {gain.mean:.3f} ({gain.low:.3f} to "
        f"{gain.high:.3f}) of that as dealt"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.box_order",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder of a model of this machine")
    parser.add_argument("--exchanges", type=Path, metavar="BOX", help="dataset of emulated exchanges")
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9, help="steps of each (9)")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = box_replays.of_box(neural.load(args.model), args.exchanges)
    tables = box_replays.pool()
    print(said(box_replays.rows_of(args.out, args.problems, lambda i: both_ms(tables, model, i, args))))


if __name__ == "__main__":
    main()
