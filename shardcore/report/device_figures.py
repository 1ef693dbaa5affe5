"""Bars of devices: the parts of a step, and memory. Plans under each other compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, price
from shardcore.io.writing import write_atomic
from shardcore.report.figures import figure_with_panels, png_bytes, svg_text
from shardcore.report.plan_explorer import PARTS
from shardcore.step.lower import lower
from shardcore.step.memory import usable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 16


@dataclass(frozen=True)
class DeviceLoad:
    """ms and bytes of each of D devices under a plan.

    memory_bytes: [D] bytes that each needs.
    free_bytes: [D] bytes that each may hold.
    name: name of the plan, where there are several.
    """

    cost: StepCost
    memory_bytes: Sequence[int]
    free_bytes: Sequence[int]
    name: str = ""


@dataclass(frozen=True)
class Picture:
    """Matplotlib figure that a notebook shows and `save` writes.

    figure: matplotlib's, to change it.
    """

    figure: Figure

    def save(self, path: str | Path) -> None:
        """Write the figure to a file whose path ends in .png or .svg. Raises ShardCoreError for other endings."""
        suffix = Path(path).suffix
        if suffix not in (".png", ".svg"):
            raise ShardCoreError(f"path is {path}; it needs to end in .png or .svg")
        write_atomic(
            Path(path), png_bytes(self.figure) if suffix == ".png" else svg_text(self.figure).encode()
        )

    def _repr_png_(self) -> bytes:
        return png_bytes(self.figure)


def plot(plan: Plan, problem: Problem, model: CostModel, before: Plan | None = None) -> Picture:
    """Bars of each device under a plan: the parts of a step in ms, and the memory used.

    plan: the plan to draw.
    problem: the problem that it is a plan of.
    model: cost model that prices it, as `model.for_problem(problem)` gives it.
    before: another plan of the problem, which is drawn above, to the same scale.

    Needs matplotlib: pip install 'shardcore[report]'. In a notebook, the last line of a cell shows the
    picture:

        shardcore.plot(plan, problem, model)
        shardcore.plot(plan, problem, model).save("plan.svg")
    """
    free, loads = usable_bytes(problem), []
    for shown, name in ((before, "before"), (plan, "after")):
        if shown is not None:
            workload = lower(shown, problem)
            cost = price(workload, model)
            by = shown.provenance.get("algorithm", "an unknown algorithm")
            words = f"{name}, by {by}: {cost.total_ms:.2f} ms a step" * (before is not None)
            loads.append(DeviceLoad(cost, workload.memory_bytes, free, words))
    return Picture(device_figure(loads))


def device_figure(loads: Sequence[DeviceLoad]) -> Figure:
    """Figure with two panels for each load: stacked step parts by device, and memory used."""
    made, of_loads = figure_with_panels((11, 3.4 * len(loads)), len(loads), 2)
    # The legends are wider than their panels, for which a constrained layout would leave room.
    made.set_layout_engine(None)
    made.subplots_adjust(0.06, 0.14 / len(loads), 0.99, 1 - 0.08 / len(loads), 0.16, 0.35)
    for load, costs, memory in zip(loads, of_loads[::2], of_loads[1::2], strict=True):
        _draw_step_parts(costs, load, max(max(x.cost.device_ms) for x in loads))
        _draw_memory(memory, load)
    return made


def _draw_step_parts(axes: Axes, load: DeviceLoad, most_ms: float) -> None:
    below = np.zeros(len(load.memory_bytes))
    for label, name, color in PARTS:
        below = _draw_bars(axes, np.array(getattr(load.cost, name)), below, color, label)
    # Plans under each other have one scale. Room above the bars, for the name.
    axes.set(ylabel="ms of one step", xlabel="device", ylim=(0, most_ms * (1.18 if load.name else 1.05)))
    axes.text(0.01, 0.99, load.name, transform=axes.transAxes, va="top", weight="bold")
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=len(PARTS),
        loc="lower left",
        bbox_to_anchor=(-0.12, 1.0),
        columnspacing=0.9,
        handlelength=1.0,
        handletextpad=0.4,
    )


def _draw_memory(axes: Axes, load: DeviceLoad) -> None:
    # The largest unit in which the fullest device reads as 1 or more.
    unit, name = next(
        (u, n)
        for u, n in ((2**30, "GiB"), (2**20, "MiB"), (1, "bytes"))
        if max(load.free_bytes) >= u or u == 1
    )
    free = np.array(load.free_bytes) / unit
    used = np.array(load.memory_bytes) / unit
    _draw_bars(axes, free, np.zeros(len(free)), "#eeeeee", "may be used")
    _draw_bars(axes, used, np.zeros(len(free)), "#228833", "used")
    axes.set(ylabel=f"memory, {name}", xlabel="device")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _draw_bars(axes: Axes, heights: np.ndarray, below: np.ndarray, color: str, label: str) -> np.ndarray:
    """Draw one layer of stacked bars on top of `below`, and return the new tops."""
    n = len(heights)
    # One outline per layer: a rectangle per device would bloat the SVG of 1,000 devices.
    edges = np.column_stack([np.arange(n) - 0.4, np.arange(n) + 0.4]).ravel()
    tops, base = (np.column_stack([x, np.full(n, np.nan)]).ravel()[:-1] for x in (below + heights, below))
    axes.stairs(
        np.nan_to_num(tops),
        edges,
        baseline=np.nan_to_num(base),
        fill=True,
        color=color,
        label=label,
        linewidth=0,
    )
    axes.set_xlim(-0.7, n - 0.3)
    axes.set_xticks(np.arange(0, n, -(-n // _MOST_TICKS)))
    return below + heights
