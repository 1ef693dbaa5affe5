"""Table 1 of NeuroShard's paper (MLSys 2023, arXiv 2305.01868) on our kernels: its baselines, itself, ours.

    python -m bench.paper_table MODEL --out OUT                           100 tasks a cell, predicted
    python -m bench.paper_table MODEL --out OUT --tasks 20 --minutes 40   what of 20 is done in 40 minutes
    python -m bench.paper_table MODEL --out OUT --replay --tasks 3 --measurements DIR    2 devices, replayed

MODEL is a folder as `python -m shardcore train` writes it. A cell is a number of devices (4, 8) and a largest
dim (4 to 128). Tasks are drawn as the released tools/gen_tasks.py draws them: 10 to 59 tables for 4 devices,
drawn again and again from the pool until they fit 15 GiB, each dim of 4 to the largest as likely; a device
has 4 GiB. For other numbers of devices tables and memory are in proportion: that is not public. If none of
20,000 draws fits, as for many tables of large dims, the number of tables is drawn anew.

Ours to choose: the pool is ours (tables/generate.py), calibrated to theirs, without its empty tables. Batch
and kernels are the model's. Links are given (1 GB/s, 0.2 ms), as only two processes were measured. Half of
the pool is for training AutoShard and DreamShard, once for each number of devices; tasks are of the other.

Memory holds outputs and ids, too. An arm has solved a task if its own algorithm found the plan. Where no
device holds a table, or a placing finds no memory, ours cut the table or pack; the published ones fail. So
that counts as not solved: in all rows but ours for packing, and for cuts where tables stay whole. Means are
over the tasks that an arm solved. Ratios are over anneal_columns, our default, on the tasks that both
solved, with a 95% interval (Student's t over tasks). Seconds are of the processor.

OUT keeps tasks.jsonl (a line a task), policies, and table.md. After an interruption, the same command goes on.

--replay: all arms' plans of tasks for 2 devices run on two real processes, in alternation, as in
bench/replays.py; OUT gets its report too. MODEL must be of this machine. Nothing about links is given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import common
from bench import replays as one_host
from bench.common import print_progress
from bench.learned import load_or_train_policy, train_and_test_tables
from bench.peers import PEERS
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Setting, Shard, Table
from shardcore.cost import metrics, neural, replay_metrics
from shardcore.cost.neural import NeuralModel
from shardcore.cost.replay_metrics import OURS, PlanReplay
from shardcore.io import dataset, model_files, replays, writing
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measure.sampling.problems import DIMS
from shardcore.report.text import markdown_table
from shardcore.search import SHARDERS, sharder
from shardcore.search.greedy import ORDERS
from shardcore.step.memory import local_batch_bytes

DEVICE_BYTES, SPARE_BYTES = 4 << 30, 1 << 30
"""Of a device; and what the tables of a task leave free of all devices' memory."""
FEWEST, MOST = 10, 60
"""Tables of a task for 4 devices; fewer than MOST."""
DRAWS, AT_ONCE = 20, 1000
"""Draws of one number of tables: so often so many."""
DEVICES = (4, 8)
POLICIES = ("autoshard", "dreamshard")
WHOLE = ("random", *ORDERS, *POLICIES)
"""Arms that keep tables whole, as published."""
BASELINES = (*WHOLE, "torchrec")
"""Those of the paper's table."""
_SEED = 2026

Row = Mapping[str, Any]
"""A task: devices, max_dim, task, tables, model, seed; arms: by name, {ms, seconds, solved}."""


# --- tasks and arms -----------------------------------------------------------------------------------------


def paper_task(
    pool: Sequence[Table], setting: Setting, index: int, cell: tuple[int, int], seed: int
) -> Problem:
    """Draw sharding task `index` of a table cell (devices, largest dim)."""
    devices, max_dim = cell
    rng = np.random.default_rng([seed, devices, max_dim, index])
    live, dims = [t for t in pool if t.pooling > 0], np.array([d for d in DIMS if d <= max_dim])
    a_column = np.array([t.rows * PRECISION_BYTES[setting.precision] for t in live])
    chosen, widths = draw_task_tables(a_column, dims, devices, rng)
    tables = tuple(
        replace(live[i], name=f"{live[i].name}-{k}", dim=int(dim), precision=setting.precision)
        for k, (i, dim) in enumerate(zip(chosen, widths, strict=True))
    )
    problem = Problem(
        f"paper-{devices}x{max_dim}-{index:03d}",
        tables,
        Topology((Device(1),) * devices),
        setting.batch,
        setting.optimizer,
    )
    device = Device(DEVICE_BYTES + local_batch_bytes(problem))
    return replace(problem, topology=Topology((device,) * devices))


def draw_task_tables(
    a_column: np.ndarray, dims: np.ndarray, devices: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw [N] tables and their dims [N] that leave SPARE_BYTES free. a_column: bytes per column of each table."""
    while True:
        n = int(rng.integers(FEWEST * devices // 4, MOST * devices // 4))
        for _ in range(DRAWS):
            chosen, widths = rng.integers(len(a_column), size=(AT_ONCE, n)), rng.choice(dims, (AT_ONCE, n))
            fits = (a_column[chosen] * widths).sum(1) <= devices * DEVICE_BYTES - SPARE_BYTES
            if fits.any():
                return chosen[fits.argmax()], widths[fits.argmax()]


def with_given_links(problem: Problem) -> Problem:
    """Problem with assumed links, for models measured on two processes only."""
    return replace(problem, topology=replace(problem.topology, **common.LINKS))


def is_solved(name: str, plan: Plan) -> bool:
    """Tell if an arm's own algorithm found a plan, with whole tables if published for whole tables."""
    packed = plan.provenance.get("packed", False)
    return not packed and (
        name not in WHOLE or all(p.shard == Shard.whole(p.shard.table) for p in plan.placements)
    )


def sharding_arms(
    model: NeuralModel, devices: int, pool: Sequence[Table], folder: Path
) -> dict[str, common.Arm]:
    """Sharding arms by name. pool: tables to train policies on; folder: stores the policies."""

    def training_problems(n: int, seed: int) -> list[Problem]:
        cells = [(devices, DIMS[i % len(DIMS)]) for i in range(n)]
        return [
            with_given_links(paper_task(pool, model.setting, i, cell, seed)) for i, cell in enumerate(cells)
        ]

    found = {name: sharder(name) for name in ("random", *ORDERS)}
    found |= {
        name: sharder(
            name, load_or_train_policy(name, f"{devices} devices", folder, training_problems, model)
        )
        for name in POLICIES
    }
    found |= {name: SHARDERS[name] for name in ("torchrec", "neuroshard") if name in SHARDERS}
    found |= {**PEERS, OURS: SHARDERS[OURS], "anneal": SHARDERS["anneal"]}
    return {name: lambda problem, of=of: of(problem, model) for name, of in found.items()}


# --- tables of figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Results of one sharding algorithm in one cell of the paper's table.

    ms: [N] of the tasks, nan where it is not solved.
    ours_ms: [N] of ours.
    """

    ms: np.ndarray
    ours_ms: np.ndarray

    @classmethod
    def of_rows(cls, rows: Sequence[Row], name: str) -> Cell:
        ms, ours_ms = (
            np.array(
                [one["ms"] if (one := row["arms"].get(arm, {})).get("solved") else np.nan for row in rows],
                dtype=float,
            )
            for arm in (name, OURS)
        )
        return cls(ms, ours_ms)

    @property
    def n_solved(self) -> int:
        return int(np.isfinite(self.ms).sum())

    @property
    def mean_ms(self) -> float:
        """Mean ms over the cell's tasks; nan unless all are solved."""
        return float(np.mean(self.ms)) if len(self.ms) else np.nan

    def mean_ms_text(self) -> str:
        """Text of the mean ms over solved tasks, with their number unless all are solved; "-" if none is."""
        of = "" if self.n_solved == len(self.ms) else f" ({self.n_solved} of {len(self.ms)})"
        return (f"{np.nanmean(self.ms):.2f}" if self.n_solved else "-") + of

    def ratio_text(self) -> str:
        both = np.isfinite(self.ms) & np.isfinite(self.ours_ms)
        return (
            common.interval_text(metrics.mean_interval(self.ms[both] / self.ours_ms[both]))
            if both.any()
            else "-"
        )


def gain_over_baselines(rows: Sequence[Row], name: str) -> str:
    """Gain as in the paper: 1 - mean cost of an arm / mean cost of the best baseline that solved all tasks."""
    best = np.array([Cell.of_rows(rows, baseline).mean_ms for baseline in BASELINES])
    own = Cell.of_rows(rows, name).mean_ms
    return f"{1 - own / np.nanmin(best):+.1%}" if np.isfinite(own) and np.isfinite(best).any() else "-"


def result_tables(rows: Sequence[Row], what: str) -> str:
    """Markdown tables of results: ms as in the paper, and cost relative to ours by number of devices."""
    names = list(dict.fromkeys(name for row in rows for name in row["arms"]))
    by_cell: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row["devices"], row["max_dim"]), []).append(row)
    of_devices = sorted({devices for devices, _ in by_cell})
    found = [
        f"## {what} ms, mean over tasks",
        markdown_table(
            ("arm", *(f"{d} devices, {dim}" for d, dim in by_cell)),
            [
                *(
                    (name, *(Cell.of_rows(own, name).mean_ms_text() for own in by_cell.values()))
                    for name in names
                ),
                *(
                    (
                        f"{name} below the best baseline",
                        *(gain_over_baselines(own, name) for own in by_cell.values()),
                    )
                    for name in ("neuroshard", OURS, "anneal")
                ),
            ],
        ),
    ]
    for devices in of_devices:
        cells = {dim: own for (d, dim), own in by_cell.items() if d == devices}
        every = [row for own in cells.values() for row in own]
        seconds = {
            name: np.mean([row["arms"][name]["seconds"] for row in every if name in row["arms"]])
            for name in names
        }
        found += [
            f"## {devices} devices: {what} ms over {OURS}'s",
            markdown_table(
                ("arm", *(f"up to {dim}" for dim in cells), "all", "solved", "seconds"),
                [
                    (
                        name,
                        *(Cell.of_rows(own, name).ratio_text() for own in cells.values()),
                        Cell.of_rows(every, name).ratio_text(),
                        f"{Cell.of_rows(every, name).n_solved} of {len(every)}",
                        f"{seconds[name]:.3f}",
                    )
                    for name in names
                ],
            ),
        ]
    return "\n\n".join(found)


# --- the file of tasks --------------------------------------------------------------------------------------


def read_rows_by_task(path: Path, made_with: Mapping[str, Any]) -> dict[tuple[int, int, int], Row]:
    """Read result rows by (devices, dim, task). Raises ShardCoreError if made with different inputs."""
    rows = common.read_rows(path)
    for row in rows:
        if (found := {name: row.get(name) for name in made_with}) != made_with:
            raise ShardCoreError(
                f"{path} has tasks of {found}; this run is with {dict(made_with)}: give another --out"
            )
    return {(row["devices"], row["max_dim"], row["task"]): row for row in rows}


def complete_tasks(
    rows: Mapping[tuple[int, int, int], Row], cells: Sequence[tuple[int, int]], most: int
) -> list[Row]:
    """First tasks of each cell, equally many per cell."""
    n = next((i for i in range(most) if any((*cell, i) not in rows for cell in cells)), most)
    return [rows[*cell, i] for cell in cells for i in range(n)]


# --- both parts ---------------------------------------------------------------------------------------------


def predicted_report(args: argparse.Namespace, model: NeuralModel) -> str:
    path, end = args.out / "tasks.jsonl", time.monotonic() + 60 * args.minutes
    made_with = {"model": model_files.model_digest(args.model), "seed": args.seed}
    rows = read_rows_by_task(path, made_with)
    cells = [(devices, dim) for devices in args.devices for dim in args.dims]
    to_learn, testing = train_and_test_tables()
    all_arms: dict[int, dict[str, common.Arm]] = {}
    # A task of every cell before the next: cut off, all cells have about as many.
    for i, cell in ((i, cell) for i in range(args.tasks) for cell in cells):
        if (*cell, i) in rows or time.monotonic() > end:
            continue
        if cell[0] not in all_arms:
            all_arms[cell[0]] = sharding_arms(model, cell[0], to_learn, args.policies)
            for arm in all_arms[cell[0]].values():  # compiled and imported before the clock starts
                common.timed_plan(
                    arm, with_given_links(paper_task(testing, model.setting, 0, (2, DIMS[0]), args.seed + 1))
                )
        problem = with_given_links(paper_task(testing, model.setting, i, cell, args.seed))
        found = {
            name: {
                "ms": plan and plan.provenance["predicted_ms"],
                "seconds": seconds,
                "solved": plan is not None and is_solved(name, plan),
            }
            for name, arm in all_arms[cell[0]].items()
            for plan, seconds in [common.timed_plan(arm, problem)]
        }
        rows[*cell, i] = {
            "devices": cell[0],
            "max_dim": cell[1],
            "task": i,
            **made_with,
            "tables": len(problem.tables),
            "arms": found,
        }
        common.write_rows(path, list(rows.values()))
        print_progress(
            f"task {i + 1}: {cell[0]} devices, dims up to {cell[1]}, {len(problem.tables)} tables, "
            f"{sum(one['seconds'] for one in found.values()):.1f} s"
        )
    done = {
        devices: complete_tasks(rows, [(devices, dim) for dim in args.dims], args.tasks)
        for devices in args.devices
    }
    each = ", ".join(f"{len(own) // len(args.dims)} tasks a cell of {d} devices" for d, own in done.items())
    return (
        f"{model.setting}; {each}, seed {args.seed}; predicted, links given.\n\n"
        f"{result_tables([row for own in done.values() for row in own], 'Predicted')}\n"
    )


def replayed_report(args: argparse.Namespace, model: NeuralModel) -> str:
    config, kept, seconds = ReplayConfig(args.repeats, 2, arena_bytes=DEVICE_BYTES), [], {}
    reference = dataset.reference_op(args.measurements, model.setting) if args.measurements else None
    to_learn, testing = train_and_test_tables()
    cells = [(2, dim) for dim in args.dims]
    all_arms = sharding_arms(model, DEVICES[0], to_learn, args.policies)
    end = time.monotonic() + 60 * args.minutes
    for i, cell in ((i, cell) for i in range(args.tasks) for cell in cells):
        if time.monotonic() > end:
            break
        problem, began = paper_task(testing, model.setting, i, cell, args.seed), time.monotonic()
        plans = {name: common.timed_plan(arm, problem) for name, arm in all_arms.items()}
        seconds |= {(problem.name, name): took for name, (_, took) in plans.items()}
        made = [(name, plan) for name, (plan, _) in plans.items() if plan and is_solved(name, plan)]
        kept.append(
            replays.replay_or_reuse(
                args.out / problem.name,
                problem,
                made,
                model.setting,
                config,
                lambda w: replay_all(w, model.setting, config, reference=reference),
            )
        )
        print_progress(
            f"{problem.name}: {len(problem.tables)} tables, {len(made)} plans, "
            f"{time.monotonic() - began:.0f} s"
        )
    n = len(kept) // len(cells)
    if not n:
        raise ShardCoreError(
            f"{len(kept)} of {len(cells)} cells were replayed in --minutes {args.minutes}; "
            "a table needs them all: the same command goes on"
        )
    kept = kept[: n * len(cells)]
    records = replay_metrics.judge_replays(kept, model)
    noise = np.median([r.noise_ms / r.replayed_ms for r in records])
    head = (
        f"{model.setting}; 2 processes, {n} tasks a cell, seed {args.seed}, {args.repeats} "
        f"steps of each plan in alternation; a replay is known to ±{noise:.1%} (median, 95%)."
    )
    one_host.write_report(args.out, kept, model, head)
    names = [(f"paper-2x{dim}-{i:03d}", dim, i) for _, dim in cells for i in range(n)]
    rows = [
        {"devices": 2, "max_dim": dim, "task": i, "arms": replayed_arms(records, name, all_arms, seconds)}
        for name, dim, i in names
    ]
    return f"{head}\n\n{result_tables(rows, 'Replayed')}\n"


def replayed_arms(
    records: Sequence[PlanReplay],
    problem: str,
    names: Sequence[str],
    seconds: Mapping[tuple[str, str], float],
) -> dict[str, dict[str, Any]]:
    """Results by arm from the replays of one problem. An arm without a replay has not solved the problem."""
    ms = {r.algorithm: r.replayed_ms for r in records if r.problem == problem}
    return {
        name: {"ms": ms.get(name), "seconds": seconds[problem, name], "solved": name in ms} for name in names
    }


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a trained model"},
        out=...,
        policies=(Path, "folder that keeps trained policies (OUT)"),
        tasks=(100, "of a cell"),
        minutes=(float("inf"), "begin no task after"),
        seed=(_SEED, "of the tasks"),
        replay=(False, "on 2 devices, by real processes"),
        repeats=(15, "replayed steps of each plan"),
        measurements=(
            Path,
            "the dataset of MODEL, whose reference op tells the machine's slowdown while it replays",
        ),
    )
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, help="(4 8)")
    parser.add_argument(
        "--dims",
        type=int,
        nargs="+",
        default=DIMS,
        choices=DIMS,
        metavar="DIM",
        help="largest of a cell (4 8 16 32 64 128)",
    )
    args = parser.parse_args()
    args.policies = args.policies or args.out
    torch.set_num_threads(1)
    page = (replayed_report if args.replay else predicted_report)(args, neural.load(args.model))
    writing.write_atomic(args.out / "table.md", page.encode())
    print(page)


if __name__ == "__main__":
    main()
