"""Which rows of a problem's tables are hot, and which lie in device memory, as tables."""

from __future__ import annotations

from typing import Any

from shardcore.limits import require
from shardcore.memory import gib
from shardcore.memory_tiers import Tiers, gains_ms
from shardcore.report.text import text_table
from shardcore.tables.access import lookups
from shardcore.tables.heat import heat_of
from shardcore.types import Problem

_MOST = 0.8
_MORE_GIB = (1, 2, 4, 8, 16, 32, 64)
"""Of device memory, all devices together."""


def heat_table(problem: Problem, held: float) -> str:
    """Tables by the rows that a batch touches, most first: hot rows, and what a cache misses.

    held: share of each table's rows that the cache has.
    """
    require(0 <= held <= 1, f"the cache holds a share of {held:g} of the rows; it needs to be within 0 and 1")
    found, batch = [], problem.global_batch
    for table in problem.tables:
        if lookups(table, batch) == 0:
            found.append((0.0, 0.0, table, 0.0))
            continue
        [heat] = heat_of([table], batch, unseen=True)
        found.append((heat.unique_rows, float(heat.misses(held * table.rows)), table, heat.rows_of(_MOST)))
    found.sort(key=lambda x: -x[0])
    rows = [(table.name, f"{table.rows:,}", f"{table.pooling:.1f}", f"{hot:,.0f}", f"{hot / table.rows:.1%}",
             f"{touched:,.0f}", f"{missed / touched:.0%}" if touched else "-")
            for touched, missed, table, hot in found]
    all_touched, all_missed = (sum(x[i] for x in found) for i in (0, 1))
    share = all_missed / all_touched if all_touched else 0.0
    return "\n".join([
        text_table(("table", "rows", "lookups a sample", f"rows with {_MOST:.0%} of them", "of all",
                    "rows a batch touches", f"misses with {held:.0%} held"), rows),
        "", f"A batch of {batch:,} samples touches {all_touched:,.0f} rows; a cache of {held:.0%} of each "
        f"table (LRU) has to fetch {all_missed:,.0f} of them ({share:.0%})."])


def tiers_report(problem: Problem, found: Tiers) -> str:
    """The tables that are not all in device memory, by what crosses the slow link for them, most first; and
    what more memory would bring."""
    some = sorted((t for t in found.tiers if t.kernel != "fused"), key=lambda t: -t.slow_bytes)
    if not some:
        return "All rows fit in device memory."
    rows = [(t.table.name, t.kernel, gib(t.table.bytes), f"{t.load_factor:.2%}", f"{t.slow_bytes / 1e6:,.3f}")
            for t in some]
    more = [(f"{n} GiB", f"{ms:,.3f}") for n, ms in zip(_MORE_GIB, gains_ms(problem, found.link, _MORE_GIB),
                                                         strict=True)]
    return "\n".join([
        text_table(("table", "kernel", "weights", "rows cached", "MB over the link"), rows), "",
        f"{len(some)} of {len(problem.tables)} tables are not all in device memory. Each step "
        f"{found.slow_bytes / 1e6:,.1f} MB cross the link: {found.slow_ms:,.3f} ms at least, at "
        f"{found.link.gbps:g} GB/s a device (given).", "",
        text_table(("more device memory", "ms saved"), more)])


def tiers_to_json(found: Tiers) -> dict[str, Any]:
    """What TorchRec needs of each table: its compute kernel, and the load factor of its cache."""
    return {"schema": "shardcore/tiers", "version": 1, "tables": {
        t.table.name: {"compute_kernel": t.kernel} | (
            {"load_factor": t.load_factor} if t.kernel == "fused_uvm_caching" else {}) for t in found.tiers}}
