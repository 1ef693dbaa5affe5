"""Bars of devices: the parts of a step, and memory. Plans under each other compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, price
from shardcore.io.writing import write_atomic
from shardcore.plans.decisions import PlanVersion
from shardcore.report.figures import Axes, Figure, figure_with_panels, png_bytes, svg_text
from shardcore.report.plan_explorer import PARTS
from shardcore.step.lower import lower
from shardcore.step.memory import usable_bytes

_MOST_TICKS = 16
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (1, "bytes"))


@dataclass(frozen=True)
class PlanPicture:
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


def plot(plan: Plan, problem: Problem, model: CostModel, before: Plan | None = None) -> PlanPicture:
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
    shown = []
    for drawn, name in ((before, "before"), (plan, "after")):
        if drawn is not None:
            workload = lower(drawn, problem)
            cost = price(workload, model)
            by = drawn.provenance.get("algorithm", "an unknown algorithm")
            words = f"{name}, by {by}: {cost.total_ms:.2f} ms a step" * (before is not None)
            shown.append(PlanVersion(words, drawn, cost, workload.memory_bytes))
    return PlanPicture(device_figure(problem, shown))


def device_figure(problem: Problem, plans: Sequence[PlanVersion]) -> Figure:
    """Figure with two panels for each plan of a problem: stacked step parts by device, and memory used."""
    n = len(plans)
    made, panels = figure_with_panels((11, 3.4 * n), n, 2)
    # The legends are wider than their panels, for which a constrained layout would leave room.
    made.set_layout_engine(None)
    made.subplots_adjust(0.06, 0.14 / n, 0.99, 1 - 0.08 / n, 0.16, 0.35)
    for plan, costs, memory in zip(plans, panels[::2], panels[1::2], strict=True):
        _draw_step_parts(costs, plan, max(max(x.cost.device_ms) for x in plans))
        _draw_memory(memory, plan.memory_bytes, usable_bytes(problem))
    return made


def _draw_step_parts(axes: Axes, plan: PlanVersion, most_ms: float) -> None:
    below = np.zeros(len(plan.memory_bytes))
    for label, name, color in PARTS:
        heights = np.array(getattr(plan.cost, name))
        _draw_bars(axes, heights, color, label, below)
        below += heights
    # Plans under each other have one scale. Room above the bars, for the name.
    axes.set(ylabel="ms of one step", xlabel="device", ylim=(0, most_ms * (1.18 if plan.name else 1.05)))
    axes.text(0.01, 0.99, plan.name, transform=axes.transAxes, va="top", weight="bold")
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


def _draw_memory(axes: Axes, used_bytes: Sequence[int], free_bytes: Sequence[int]) -> None:
    # The largest unit in which the fullest device reads as 1 or more.
    unit, name = next((u, n) for u, n in _UNITS if max(free_bytes) >= u or u == 1)
    _draw_bars(axes, np.array(free_bytes) / unit, "#eeeeee", "may be used")
    _draw_bars(axes, np.array(used_bytes) / unit, "#228833", "used")
    axes.set(ylabel=f"memory, {name}", xlabel="device")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _draw_bars(
    axes: Axes, heights: np.ndarray, color: str, label: str, below: np.ndarray | float = 0.0
) -> None:
    """Draw a bar of each device, on top of those below."""
    n = len(heights)
    axes.bar(range(n), heights, bottom=below, color=color, label=label)
    axes.set(xlim=(-0.7, n - 0.3), xticks=range(0, n, -(-n // _MOST_TICKS)))
