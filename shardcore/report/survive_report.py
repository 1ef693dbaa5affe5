"""Prepared plans for the loss of a rank or a host, in words."""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.plans.survive import PreparedPlan
from shardcore.report.text import percent_change, text_table

READ_GBPS = 1.0
"""GB/s at which a rank is taken to read a checkpoint."""


def prepared_plans_text(prepared: Sequence[PreparedPlan], before_ms: float) -> str:
    """Table of prepared plans, and a line for each loss without one. before_ms: a step before the loss."""
    headers = ["lost", "step, ms", "against before", "tables that move", "GiB to read", "s"]
    rows = []
    for one in prepared:
        if one.plan:
            ms, n_bytes = one.plan.provenance["predicted_ms"], one.read_bytes
            change = percent_change(ms, before_ms)
            row = [_losses_text(one), f"{ms:.3f}", change, one.moved_tables]
            rows.append([*row, f"{n_bytes / 2**30:.2f}", f"{n_bytes / READ_GBPS / 1e9:.1f}"])
    lines = [f"no plan without {_losses_text(one)}: {one.reason}" for one in prepared if not one.plan]
    note = f"(GiB to read: of the fullest rank; s: at {READ_GBPS:g} GB/s of checkpoint for each rank, which is assumed)"
    return "\n".join(([text_table(headers, rows), note] if rows else []) + lines)


def _losses_text(prepared: PreparedPlan) -> str:
    """Name of the first loss that a plan is for, and the number of others."""
    more = len(prepared.losses) - 1
    return prepared.losses[0] + f" (and {more} like it)" * (more > 0)
