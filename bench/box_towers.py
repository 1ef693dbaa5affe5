"""What towers bring where they really run: the exchanges of a plan with tower modules and without. Hosts and
links are emulated, exchanges real.

    python -m bench.box_towers MODEL --exchanges BOX --problems 6 --out towers.jsonl

Tables have few lookups, so that all devices reach an exchange together and it is all that is timed. Pairs of
tables are towers, whose modules make outputs 2, 4 or 8 times smaller (RATIOS, by problem). The plan
is the one that `plan --towers` makes. Its placements run twice: their outputs cross hosts as they are, or
within each host first and then what modules leave of them. Modules are not run: a buffer of the size that
they leave travels. Problems, prices and replays are those of bench.box_replays. What is compared is the
exchange of outputs and that of gradients, of the last device each.

A line of --out is a problem; a rerun goes on after those done.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import box_replays
from shardcore import report
from shardcore.core.step_cost import StepCost
from shardcore.core.types import Table
from shardcore.cost import neural
from shardcore.cost.metrics import mape
from shardcore.cost.model import price
from shardcore.io.towers import Towers
from shardcore.measure import hosts
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.search.decisions.towers import tower_hosts, tower_traffic
from shardcore.search.portfolio import annealing as anneal
from shardcore.step.lower import lower

RATIOS = (2.0, 4.0, 8.0)
BOXES = ((4, 2), (2, 4), (4, 4))
WAYS = ("with", "without")
ROOM_BYTES = 8 << 30
"""Of a device: any pair fits on any host."""
MOST_LOOKUPS = 4.0
"""Of a table by a sample, on average."""


def outputs_ms(cost: StepCost) -> float:
    """Of the exchanges of outputs and of gradients."""
    return max(cost.forward_comm_ms) + max(cost.backward_comm_ms)


def judged(
    tables: Sequence[Table], model: neural.NeuralModel, index: int, args: argparse.Namespace
) -> dict[str, Any]:
    """What the exchanges of a problem's plan take with towers and without, predicted and replayed."""
    problem, box = box_replays.problem_of(tables, model, index, args.seed, True, BOXES)
    devices = tuple(replace(d, memory_bytes=ROOM_BYTES) for d in problem.topology.devices)
    problem = replace(problem, topology=replace(problem.topology, devices=devices))
    names = [t.name for t in problem.tables]
    ratio = RATIOS[index // len(BOXES) % len(RATIOS)]
    pairs = tuple(tuple(names[i : i + 2]) for i in range(0, len(names), 2))
    towered = tower_hosts(problem, Towers(ratio, pairs), model.for_problem(problem)).problem
    own, config = model.for_problem(towered), ReplayConfig(args.repeats, 2, arena_bytes=4 << 30)
    plan = anneal(towered, own, space="columns")
    row = {
        "problem": problem.name,
        "box": [box.hosts, box.ranks_per_host],
        "tables": len(names),
        "ratio": ratio,
        "bytes": asdict(tower_traffic(plan, towered)),
    }
    for way, of in zip(WAYS, (towered, replace(towered, job=problem.job)), strict=True):
        work = lower(plan, of)
        predicted = price(work, own)
        with hosts.box_of(box) as places:
            [ran] = replay_all([work], own.setting, config, on=places)
        row[way] = {
            "predicted_ms": outputs_ms(predicted),
            "ran_ms": outputs_ms(ran),
            "step_ms": predicted.total_ms,
            "ran_step_ms": ran.total_ms,
        }
    return row


def said(rows: Sequence[dict[str, Any]]) -> str:
    """The exchanges by problem, what towers take of those without, and how far predictions are off."""

    def share(row: dict[str, Any], of: str) -> float:
        return row["with"][of] / row["without"][of]

    predicted, ran = (
        np.array([row[way][of] for row in rows for way in WAYS]) for of in ("predicted_ms", "ran_ms")
    )
    shares, found = (np.array([share(row, of) for row in rows]) for of in ("predicted_ms", "ran_ms"))
    table = report.text_table(
        (
            "hosts x ranks",
            "tables",
            "ratio",
            "without, ms",
            "predicted",
            "with, ms",
            "predicted",
            "with / without",
            "predicted",
        ),
        [
            (
                "{} x {}".format(*row["box"]),
                row["tables"],
                f"{row['ratio']:g}",
                *(f"{row[way][of]:.0f}" for way in reversed(WAYS) for of in ("ran_ms", "predicted_ms")),
                f"{share(row, 'ran_ms'):.2f}",
                f"{share(row, 'predicted_ms'):.2f}",
            )
            for row in rows
        ],
    )
    return (
        f"{table}\n\n{len(rows)} problems: exchanges are predicted to {mape(predicted, ran):.1f}%, what "
        f"towers leave of them to {mape(shares, found):.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.box_towers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder of a model of this machine")
    parser.add_argument(
        "--exchanges", type=Path, required=True, metavar="BOX", help="dataset of emulated exchanges"
    )
    parser.add_argument("--problems", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=9, help="steps of each (9)")
    parser.add_argument("--seed", type=int, default=57)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = box_replays.of_box(neural.load(args.model), args.exchanges)
    tables = [t for t in box_replays.pool() if t.pooling <= MOST_LOOKUPS]
    print(said(box_replays.rows_of(args.out, args.problems, lambda i: judged(tables, model, i, args))))


if __name__ == "__main__":
    main()
