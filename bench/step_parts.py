"""What does a TorchRec step do that a replay does not? The embedding part of real steps, by what it does.

    python -m bench.replays MODEL --problems 30 --out FOLDER
    python -m bench.step_parts FOLDER --problems 10

Of each problem, the default sharder's plan trains as in bench.steps, first timed, then under torch.profiler.
A part is the self time of its events on the thread that trains, of the slowest rank's median step. What no
event covers is Python's. The profiler itself makes steps longer; `timed` says how long they are without it.
Waiting for the other rank is in exchanges. Replays ran at another time, so their lookups and updates say how
fast the machine was then. All are given as the clock showed them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import steps_training
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Setting
from shardcore.cost import replay_metrics
from shardcore.io import replays
from shardcore.measure import local_ranks, own_core
from shardcore.step.lower import lower

PARTS = {
    "lookups and updates": ("codegen", "SplitLookup"),
    "exchanges": ("All2All", "ReduceScatter", "AllGather", "c10d::", "gloo:", "all2all"),
    "ids checked and arranged": ("bounds_check", "permute", "recat", "cumsum", "KJT", "splits"),
    "outputs joined, split and scaled": ("aten::",),
}
"""Parts by words in the names of their events. The first that fits counts."""
REST = "Python between them"
MARK, TURNS = "shardcore: mark", 8


@dataclass(eq=False)
class _Marked(steps_training.Trainer):
    """A Trainer whose marks the profiler sees."""

    def mark(self) -> None:
        with torch.profiler.record_function(MARK):
            super().mark()


def _work(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    given: Sequence[tuple[Problem, Plan]],
    setting: Setting,
    elements: int,
) -> None:
    """One process of the gang: of each problem it says ms of the embedding part, and of each of its parts."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ranks = len(given[0][0].topology)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    torch.set_num_threads(1)
    arena = torch.empty(elements).fill_(0.01)
    cache = torch.zeros(steps_training.EVICT_BYTES // 4)
    with local_ranks.exchanging():
        dist.init_process_group("gloo", init_method, rank=rank, world_size=ranks)
        own_core.take(rank)
        for problem, plan in given:
            batches = [steps_training._batch(problem, rank, seed) for seed in range(steps_training.BATCHES)]
            trainer = _Marked.of(plan, problem, setting, arena, batches, cache)
            own_core.let_network_wait()
            for _ in range(TURNS):
                trainer.turn()
            marks = np.stack(trainer.turns[2:])
            with torch.profiler.profile() as profiler:
                for _ in range(TURNS):
                    trainer.turn()
            say((marks, parts(profiler.events())))


def parts(events: Sequence[Any]) -> dict[str, float]:
    """ms of each part in the median step, from a profiler's events."""
    [thread] = {e.thread for e in events if e.name == MARK}
    mine = [e for e in events if e.thread == thread]
    at = sorted(e.time_range.start for e in mine if e.name == MARK)
    found: dict[str, list[float]] = defaultdict(list)
    # Windows of one step: gradients known to weights updated, then the next lookup to pooled outputs.
    for i in range(steps_training.GRADIENT, len(at) - 5, 5):
        windows = (at[i], at[i + 1]), (at[i + 2], at[i + 3])
        spent = dict.fromkeys([*PARTS, REST], 0.0)
        for lo, hi in windows:
            inside = [e for e in mine if lo <= e.time_range.start < hi and e.name != MARK]
            for e in inside:
                spent[_part(e.name)] += e.self_cpu_time_total / 1e3
            spent[REST] += (hi - lo) / 1e3 - sum(e.self_cpu_time_total for e in inside) / 1e3
        for name, ms in spent.items():
            found[name].append(ms)
    return {name: float(np.median(ms)) for name, ms in found.items()}


def _part(name: str) -> str:
    return next((part for part, words in PARTS.items() if any(w in name for w in words)), REST)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("replays", type=Path, help="folder of bench.replays, of this machine")
    parser.add_argument("--problems", type=int, default=10)
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.replays.glob("*/replays.json"))[: args.problems]
    if not folders:
        raise ShardCoreError(f"folder {str(args.replays)!r} has no replays; run python -m bench.replays")
    kept = [replays.read(folder) for folder in folders]
    setting = kept[0].setting
    ours = [next(name for by, name in one.made if by == replay_metrics.OURS) for one in kept]
    given = [(one.problem, one.plans[name]) for one, name in zip(kept, ours, strict=True)]
    largest = max(max(lower(plan, problem).memory_bytes) for problem, plan in given)
    ranks, elements = len(kept[0].problem.topology), largest // PRECISION_BYTES["fp32"] + steps_training.LARGE
    said: list[list[Any]] = [[] for _ in range(ranks)]
    for rank, value in local_ranks.run(
        "steps", _work, ranks, (given, setting, elements), steps_training.TIMEOUT_S
    ):
        said[rank].append(value)
        print(f"rank {rank}: problem {len(said[rank])} of {len(given)}", file=sys.stderr, flush=True)
    rows = []
    for i, (one, name) in enumerate(zip(kept, ours, strict=True)):
        cost = one.costs[name]
        timed = steps_training.combine([s[i][0] for s in said]).embedding.median_ms
        slowest = max((s[i][1] for s in said), key=lambda x: sum(x.values()))
        compute = max(cost.compute_ms)
        rows.append(
            (
                one.problem.name,
                compute,
                cost.total_ms - max(cost.input_ms) - cost.dense_ms - compute,
                timed,
                *slowest.values(),
            )
        )
    shown = [(name, *(f"{x:.2f}" for x in values)) for name, *values in rows]
    mean = np.mean([values for _, *values in rows], axis=0)
    print(
        report.markdown_table(
            (
                "problem",
                "replay: lookups and updates",
                "exchanges and waiting",
                "TorchRec: timed",
                *PARTS,
                REST,
            ),
            [*shown, ("mean", *(f"{x:.2f}" for x in mean))],
        )
    )


if __name__ == "__main__":
    try:
        main()
    except ShardCoreError as error:
        sys.exit(str(error))
