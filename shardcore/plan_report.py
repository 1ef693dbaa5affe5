"""What an explanation of a plan says to people; pure: data in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardcore.memory import gib
from shardcore.report import percent_change, text_table
from shardcore.search.explain import Alternative, Explanation

MOST_SHARDS = 8
"""Shards of the bounding device that are shown."""


def text(found: Explanation) -> str:
    """Several paragraphs and tables, for a terminal."""
    return "\n\n".join(_paragraphs(found))


def _paragraphs(x: Explanation) -> Iterator[str]:
    yield f"{_bounding(x)}\n{_exchange(x)}\n{_memory(x)}\n{_bound(x)}"
    shown, rest = x.shards[:MOST_SHARDS], x.shards[MOST_SHARDS:]
    rows = [(s.shard, s.kind, f"{s.saves_ms:.3f}", gib(s.bytes)) for s in shown]
    rows += [(f"{len(rest)} more", "", f"{sum(s.saves_ms for s in rest):.3f}", gib(sum(s.bytes for s in rest)))] if rest else []
    if rows:
        yield text_table((f"on device {x.device}", "kind", "without it, ms less", "weights"), rows)
    rows = [*_rows(x.baselines, x.total_ms), *_rows(x.changes, x.total_ms)]
    yield f"{text_table(('instead', 'ms', 'against this plan'), rows)}\n({x.searched})"


def _bounding(x: Explanation) -> str:
    cost, d, waiting = x.cost, x.device, x.cost.waiting_ms
    last = (f"{x.total_ms:.3f} ms, most of it {x.limit}. Device {d} is ready last, after {cost.forward_compute_ms[d]:.3f} ms of "
            f"forward and {cost.backward_compute_ms[d]:.3f} ms of backward compute\nand {cost.backward_comm_ms[d]:.3f} ms of "
            f"backward exchange; then come {max(cost.forward_comm_ms):.3f} ms of forward exchange.")
    if len(waiting) == 1:
        return last
    others = [w for i, w in enumerate(waiting) if i != d]
    return (f"{last}\nThe others wait {sum(others) / len(others):.3f} ms for it on average, {max(others):.3f} ms at most; "
            f"compute is {x.balance:.0%} balanced (mean over largest).")


def _exchange(x: Explanation) -> str:
    total = sum(x.exchange_bytes)
    if not total or len(x.exchange_bytes) == 1:
        return "Nothing is exchanged."
    mean = total / len(x.exchange_bytes)
    most = x.exchange_bytes[x.widest]
    return f"Device {x.widest} has most to exchange: {gib(most)} each way, {most / mean:.2f} times the mean."


def _memory(x: Explanation) -> str:
    shares = [used / free if free > 0 else 0.0 for used, free in zip(x.memory_bytes, x.free_bytes, strict=True)]
    fullest = shares.index(max(shares))
    return (f"Memory is {sum(x.memory_bytes) / max(1, sum(x.free_bytes)):.0%} used; device {fullest} is fullest, with "
            f"{gib(x.memory_bytes[fullest])} of {gib(x.free_bytes[fullest])}.")


def _bound(x: Explanation) -> str:
    b = x.bound
    proved = (f"No plan takes less than {b.proved_ms:.3f} ms (proved; this one: {percent_change(x.total_ms, b.proved_ms)})"
              if b.proved_ms else "No lower bound is proved")
    if b.proved_ms and x.total_ms < b.proved_ms:
        proved = f"This plan is of another kind than those of which none takes less than {b.proved_ms:.3f} ms (proved)"
    return (f"{proved}; estimated, about {b.estimate_ms:.3f} ms (this one: {percent_change(x.total_ms, b.estimate_ms)}).\n"
            f"In the way of less: {b.limit}.\nPlans meant: {b.space}; memory not counted.")


def _rows(alternatives: Sequence[Alternative], total_ms: float) -> list[tuple[str, str, str]]:
    return [(a.what, f"{a.total_ms:.3f}", percent_change(a.total_ms, total_ms)) if a.total_ms is not None
            else (a.what, "none", (a.error or "")[:60]) for a in alternatives]
