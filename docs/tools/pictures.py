"""Pictures of the documentation, drawn from real plans, searches and profiles.

    python -m docs.tools.pictures            writes docs/pictures/*.svg (half a minute)

Prices in them are those of a hardware profile: published measurements, not of a machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import shardcore
from docs.tools.blocks import ROOT
from shardcore import (
    SHARDERS,
    Budget,
    Constraints,
    Placement,
    Plan,
    Problem,
    Shard,
    Table,
    Topology,
    lower,
    price,
)
from shardcore.core.topology import default_reserved_bytes
from shardcore.io.files import read_problem
from shardcore.io.writing import write_atomic
from shardcore.plans.decisions import PlanVersion
from shardcore.report.device_figures import device_figure
from shardcore.report.figures import svg_text
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, SHARDING_KINDS
from shardcore.tables.public import public_optimizer, public_pool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs/pictures"
CARD, POOL = "nvidia-h100-sxm", "mlperf-dlrm-dcnv2"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
"""A color for each of four devices."""


def main() -> None:
    for name, draw in {
        "step": step,
        "kinds": kinds,
        "search": search,
        "profile": profile,
        "stages": stages,
    }.items():
        write_atomic(FOLDER / f"{name}.svg", svg_text(draw()).encode())
        print(FOLDER / f"{name}.svg")


def mlperf() -> Problem:
    """MLPerf's DLRM-DCNv2 on a host of eight H100 cards."""
    topology = Topology.of_hosts(1, 8, memory_gib=80, hardware=CARD)
    limits = Constraints(reserved_bytes=default_reserved_bytes(topology.devices))
    return Problem(POOL, public_pool(POOL), topology, 65_536, public_optimizer(POOL), limits)


# --- a step ---------------------------------------------------------------------------------------------------


def step() -> Figure:
    """A step before and after a plan, per device."""
    problem = mlperf()
    model = shardcore.load_profile(CARD).cost_model().for_problem(problem)
    before = SHARDERS["size_greedy"](problem, model)
    after = SHARDERS["portfolio"](problem, model, budget=Budget(evals=50_000))
    shown = []
    for plan, words in (
        (before, "before: the largest table first, to the emptiest device"),
        (after, "after: ShardCore"),
    ):
        workload = lower(plan, problem)
        cost = price(workload, model)
        shown.append(PlanVersion(f"{words}, {cost.total_ms:.1f} ms", plan, cost, workload.memory_bytes))
    return device_figure(problem, shown)


# --- kinds of sharding ----------------------------------------------------------------------------------------


def kinds() -> Figure:
    """A table under each kind of sharding: where its rows and columns are, and what travels."""
    table = Table("t", 10_000_000, 128, 20.0)
    problem = Problem("one", (table,), Topology.of_hosts(2, 2, memory_gib=80), 32_768)
    whole = Shard.whole(table)
    columns = [Placement("column", Shard(table, 0, table.rows, 32 * d, 32 * d + 32), (d,)) for d in range(4)]
    plans = {
        "whole": [Placement("column", whole, (0,))],
        "cut by columns": columns,
        "row": [Placement("row", whole, (0, 1, 2, 3))],
        "host_row": [Placement("host_row", whole, (0, 1))],
        "data_parallel": [Placement("data_parallel", whole, (0, 1, 2, 3))],
    }
    made = _figure(12, 6.2)
    for panel, (name, placements) in zip(_row(made, len(plans)), plans.items(), strict=True):
        _kind(panel, name, problem, Plan(tuple(placements)))
    return made


def _kind(axes: Axes, name: str, problem: Problem, plan: Plan) -> None:
    from matplotlib.patches import Rectangle

    axes.set(xlim=(0, 10), ylim=(0, 20))
    axes.axis("off")
    first = plan.placements[0]
    sharding_kind = SHARDING_KINDS[first.kind]
    theirs = "column_wise" if name == "cut by columns" else sharding_kind.torchrec[0]
    axes.text(5, 19.2, name, ha="center", weight="bold")
    axes.text(5, 18.3, f"TorchRec: {theirs}", ha="center", fontsize=8, color="#555")
    # The table: 8 wide, 6 high, in the colors of its devices.
    for device in range(4):
        x, y, width, height = _place(plan, device)
        if width:
            axes.add_patch(
                Rectangle((1 + 8 * x, 11 + 6 * y), 8 * width, 6 * height, color=COLORS[device], alpha=0.8)
            )
            words = "all" if len(first.devices) == 4 and not sharding_kind.divides_rows else f"{device}"
            axes.text(
                1 + 8 * (x + width / 2),
                11 + 6 * (y + height / 2),
                words,
                ha="center",
                va="center",
                color="white",
            )
    axes.add_patch(Rectangle((1, 11), 8, 6, fill=False))
    workload = lower(plan, problem)
    traffic = workload.traffic.reshape(-1, len(CHANNELS), 4).sum(0)  # [C, D] bytes
    batch = max(op.batch for ops in workload.ops for op in ops)
    outputs = _travel(traffic, ids=False)
    replicated = sharding_kind.dense_gradient
    lines = {
        "ids": _travel(traffic, ids=True) or ["each keeps its own"],
        "looked up": [f"{batch:,} samples on {sum(map(bool, workload.ops))} of 4"],
        "outputs": ["stay where they are"] if replicated else outputs,
        "gradients": outputs if replicated else ["the same way back"],
        "memory": [f"{max(workload.memory_bytes) / 2**30:.1f} GiB at most"],
    }
    y = 10.0
    for title, words in lines.items():
        axes.text(1, y, title, weight="bold", fontsize=8)
        for i, line in enumerate(words):
            axes.text(1, y - 0.75 * (i + 1), line, fontsize=8)
        y -= 2.7 if title == "outputs" else 2.0  # those of some kinds travel twice


def _place(plan: Plan, device: int) -> tuple[float, float, float, float]:
    """Place of a device's part in a table of 1 × 1: left, bottom, width, height. Rows go down. 0s: none."""
    for p in plan.placements:
        if device not in p.devices:
            continue
        table, i, n = p.shard.table, p.devices.index(device), len(p.devices)
        left, width = p.shard.col_lo / table.dim, p.shard.width / table.dim
        if SHARDING_KINDS[p.kind].divides_rows:
            return left, 1 - (i + 1) / n, width, 1 / n
        return (left, 0, width, 1) if i == 0 else (0, 0, 0, 0)
    return 0, 0, 0, 0


def _travel(traffic: np.ndarray, ids: bool) -> list[str]:
    """Lines on what travels: the collective, and MB of the device that has most."""
    words = []
    for channel, row in zip(CHANNELS, traffic, strict=True):
        if row.any() and (channel in ID_CHANNELS) == ids:
            where = {"world": "", "host": " in a host", "cross": " across hosts"}[channel.group]
            name = channel.collective.removesuffix("_bucketized").removesuffix("_ids").replace("_", "-")
            words.append(f"{name}{where}: {row.max() / 1e6:,.0f} MB")
    return words


# --- a search -------------------------------------------------------------------------------------------------


def search() -> Figure:
    """The cheapest plan by number of evaluations, and what other algorithms find."""
    problem = read_problem(ROOT / "problems/hugectr-180-16.json")
    problem = replace(problem, topology=replace(problem.topology, hardware=CARD))
    model = shardcore.load_profile(CARD).cost_model().for_problem(problem)

    def ms(name: str, budget: Budget | None = None) -> float:
        return price(lower(SHARDERS[name](problem, model, budget=budget), problem), model).total_ms

    evals = [1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000]
    best_ms = [ms("portfolio", Budget(evals=n)) for n in evals]
    others = {name: ms(name) for name in ("size_lookup_greedy", "lookup_greedy", "neuroshard")}
    made = _figure(9, 3.6)
    axes = made.subplots()
    made.subplots_adjust(0.08, 0.15, 0.9, 0.96)
    axes.step(evals, best_ms, where="post", color=COLORS[0], linewidth=2)
    for name, other in others.items():
        axes.axhline(other, color="#999999", linewidth=0.8)
        axes.text(
            0.99, other, f"{name} {other:.3f}", ha="right", va="bottom", transform=axes.get_yaxis_transform()
        )
    axes.text(evals[-1], best_ms[-1], f"  portfolio\n  {best_ms[-1]:.3f}", va="center", color=COLORS[0])
    axes.set(xscale="log", xlabel="plans priced (evaluations)", ylabel="predicted ms of the best plan")
    axes.spines[["top", "right"]].set_visible(False)
    return made


# --- a profile ------------------------------------------------------------------------------------------------


def profile() -> Figure:
    """Rates of a profile, each with the range that it may be in."""
    known = shardcore.load_profile(CARD).rates.items()
    rates = {
        n: r for n, r in known if r.uncertainty > 0 and r.unit in ("GB/s", "us", "ns") and "ramp" not in n
    }
    names = sorted(rates, key=lambda name: rates[name].uncertainty)
    made = _figure(9, 0.2 * len(names) + 0.7)
    axes = made.subplots()
    made.subplots_adjust(0.34, 0.06, 0.8, 0.99)
    for y, name in enumerate(names):
        rate = rates[name]
        low, high = np.exp(-rate.uncertainty), np.exp(rate.uncertainty)
        axes.plot([100 * low, 100 * high], [y, y], color=COLORS[0], linewidth=4, solid_capstyle="butt")
        axes.text(
            1.02,
            y,
            f"{rate.value:,.3g} {rate.unit}",
            va="center",
            fontsize=8,
            transform=axes.get_yaxis_transform(),
        )
    axes.axvline(100, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
    axes.set(xscale="log", xlabel="a standard deviation around the rate, %", ylim=(-0.7, len(names) - 0.3))
    ticks = [50, 70, 100, 140, 200]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    return made


# --- the stages -----------------------------------------------------------------------------------------------


def stages() -> Figure:
    """The stages, and who owns each."""
    from matplotlib.patches import FancyBboxPatch

    boxes = {
        "tables": "a pool of 856\ntables",
        "measure": "FBGEMM ops,\ncollectives, steps\non each device: Ray",
        "train": "cost models;\na run in MLflow",
        "evaluate": "held-out error,\nsharders compared",
        "promote": "challenger against\nchampion: MLflow",
        "publish": "a search for each\nproblem: plan store",
    }
    made = _figure(12, 2.1)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 6), ylim=(0, 1))
    axes.axis("off")
    for i, (name, words) in enumerate(boxes.items()):
        owned = "#e8eef5" if i < 4 else "#f3f3f3"
        style = "round,pad=0.02"
        box = FancyBboxPatch((i + 0.1, 0.25), 0.76, 0.55, style, facecolor=owned, edgecolor="#4477aa")
        axes.add_patch(box)
        axes.text(i + 0.48, 0.7, name, ha="center", weight="bold")
        axes.text(i + 0.48, 0.43, words, ha="center", va="center", fontsize=8.5)
        if i:
            axes.annotate("", (i + 0.07, 0.52), (i - 0.11, 0.52), arrowprops={"arrowstyle": "->"})
    for x, y, words in (
        (2, 0.08, "DVC: what is stale, and which data made what"),
        (5, 0.08, "problems/*.json in, plans/ out"),
        (3, 0.92, "Prefect runs each stage: retries, schedules, deployments"),
    ):
        axes.text(x, y, words, ha="center", fontsize=9, color="#4477aa")
    return made


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _row(made: Figure, n: int) -> list[Axes]:
    made.subplots_adjust(0.01, 0.01, 0.99, 0.99, 0.02)
    return list(made.subplots(1, n))


if __name__ == "__main__":
    main()
