"""Memory tiers in words: what shares of the memory give, and what crosses the link to host memory."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.memory import gib
from shardcore.memory_tiers import gains_ms, tiers_of
from shardcore.report.text import text_table
from shardcore.search.memory_tiers import Share
from shardcore.types import Problem

_MORE_GIB = (1, 2, 4, 8, 16, 32, 64)
"""Of device memory, all devices together."""


def share_line(tried: Share) -> str:
    """What was just tried, while others are."""
    return f"{tried.share:.0%} of the memory for rows: {tried.words}"


def shares_table(tried: Sequence[Share], best: Share) -> str:
    """All shares of the memory that were tried, and what they give."""
    lines = [(f"{one.share:.0%}" + " (best)" * (one is best),
              str(sum(table.in_host_memory for table in one.problem.tables)),
              f"{tiers_of(one.problem).link_bytes / 1e6:,.3f}", one.words) for one in tried]
    return text_table(("memory shared out first", "tables in host memory", "MB over the link", "step"), lines)


def tiers_report(problem: Problem) -> str:
    """The tables that are not all in device memory, by what crosses the link for them, most first; and what
    more memory would bring."""
    found = tiers_of(problem)
    some = sorted((t for t in found.tiers if t.table.in_host_memory), key=lambda t: -t.link_bytes)
    if not some:
        return "All rows fit in device memory."
    rows = [(t.table.name, t.table.kernel, gib(t.table.bytes), f"{t.table.load_factor:.2%}",
             f"{t.link_bytes / 1e6:,.3f}") for t in some]
    more = [(f"{n} GiB", f"{ms:,.3f}") for n, ms in zip(_MORE_GIB, gains_ms(problem, _MORE_GIB), strict=True)]
    return "\n".join([
        text_table(("table", "kernel", "weights", "rows cached", "MB over the link"), rows), "",
        f"{len(some)} of {len(problem.tables)} tables are not all in device memory. Each step "
        f"{found.link_bytes / 1e6:,.1f} MB cross the link: {found.link_ms:,.3f} ms at least, at "
        f"{' and '.join(f'{x.gbps:g}' for x in problem.topology.memory)} GB/s a device (given).", "",
        text_table(("more device memory", "ms saved"), more)])
