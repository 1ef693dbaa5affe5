"""Measured links between ranks: the problem with them, the order of ranks, and lines for people."""

from __future__ import annotations

from pathlib import Path

from shardcore.core.types import Problem
from shardcore.io import files, writing
from shardcore.measure.pairs import PairMeasurement
from shardcore.measure.rank_order import order_ranks, reorder_problem


def write_measured_topology(
    pairs: PairMeasurement,
    problem: Problem,
    out: Path,
    ranks: Path | None = None,
) -> str:
    """Write a problem with the measured topology to a file. Returns lines for people.

    ranks: file for the order of ranks, their hosts and groups, and the times of pairs. None: nowhere.
    """
    files.write_problem(out, reorder_problem(pairs.levels, pairs.links, problem))
    if ranks:
        writing.write_json(
            ranks,
            {
                "order": list(order_ranks(pairs.levels, len(pairs.pair_ms))),
                "levels": pairs.levels,
                "pair_ms": pairs.pair_ms.round(6).tolist(),
                "nodes": list(pairs.nodes),
            },
        )
    return "\n".join(measured_topology_lines(pairs))


def measured_topology_lines(pairs: PairMeasurement) -> list[str]:
    """Lines for people on measured groups of ranks, links, and the order of ranks."""
    arranged, links = order_ranks(pairs.levels, len(pairs.pair_ms)), pairs.links
    text = [
        f"{len(groups)} groups of ranks: "
        + "; ".join([*(" ".join(map(str, group)) for group in groups[:8]), *["..."] * (len(groups) > 8)])
        for groups in pairs.levels
    ]
    carried = [f"within {links.within_gbps:.3g} GB/s"] if links.within_gbps else []
    for groups, link in zip(pairs.levels, links.outward, strict=False):
        carried.append(f"between {len(groups)} groups {link.gbps:.3g} GB/s")
        if link.shared_gbps:
            carried.append(f"{link.shared_gbps:.3g} GB/s between them, shared by all ranks of one")
    return [
        *(text or ["all ranks are equally near each other: they count as one host"]),
        f"links of a rank carry {' and '.join(carried)}; a collective takes {links.latency_ms:.3g} ms",
        f"order of ranks: {' '.join(map(str, arranged))}",
        "Device i of the new problem is that of the i-th rank in this order. Start ranks in it.",
    ]
