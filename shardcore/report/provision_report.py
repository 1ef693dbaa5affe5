"""Clusters that were searched: a table, and the curve of speed against price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardcore.provision import Cluster, frontier
from shardcore.report.text import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ("offer", "hosts", "devices", "step ms", "samples/s", "price/h", "price of 10^9 samples", "kW")


def row(cluster: Cluster) -> tuple[Any, ...]:
    """As HEADERS. What is not known is "-"."""
    found = cluster.offer.name, cluster.hosts, len(cluster.problem.topology)
    price, watts = f"{cluster.price_per_hour:,.2f}", cluster.watts
    kw = "-" if watts is None else f"{watts / 1e3:.1f}"
    if cluster.cost is None:
        return (*found, "-", "-", price, "-", kw)
    hours = 1e9 / cluster.samples_per_s / 3600
    return (*found, f"{cluster.step_ms:.2f}", f"{cluster.samples_per_s:,.0f}", price,
            f"{hours * cluster.price_per_hour:,.2f}", kw)


def table(clusters: Sequence[Cluster]) -> str:
    return text_table(HEADERS, [row(cluster) for cluster in clusters])


def figure(found: Sequence[Cluster], chosen: Cluster | None) -> Figure:
    """Samples a second against price an hour: clusters by offer, the best for each price, the chosen one.

    chosen: None if none meets the target.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    made = Figure(figsize=(8, 5), layout="constrained")
    axes = made.subplots()
    best = frontier(found)
    axes.step([c.price_per_hour for c in best], [c.samples_per_s for c in best], where="post", color="0.8",
              label="best for the price", zorder=0)
    for name in dict.fromkeys(c.offer.name for c in found):
        of = [c for c in found if c.offer.name == name and c.cost]
        axes.plot([c.price_per_hour for c in of], [c.samples_per_s for c in of], marker="o", markersize=4,
                  linewidth=1, label=name)
    if chosen:
        axes.scatter([chosen.price_per_hour], [chosen.samples_per_s], s=120, facecolors="none",
                     edgecolors="black", label="chosen", zorder=3)
    axes.set(xlabel="price per hour", ylabel="samples per second", ylim=(0, None), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return made
