"""Decisions before a search in words: their ledger, and tables of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardcore.core.types import Problem
from shardcore.cost.known_errors import error_bands
from shardcore.cost.model import CostModel
from shardcore.cost.profile import MEASUREMENTS
from shardcore.plans.hot_drift import HotDrift
from shardcore.report.figures import Figure, figure_with_panels
from shardcore.report.text import records_table, text_table
from shardcore.search.decisions.driver import DecisionLedger, FoundPlan, LedgerEntry, ProposalOutcome
from shardcore.search.decisions.memory_tiers import least_link_ms, link_ms_savings, tier_of_each_table
from shardcore.search.decisions.provision import Provision, best_cluster_of_each_offer
from shardcore.search.decisions.towers import with_towers_of_plan
from shardcore.step.lower import lower
from shardcore.step.memory import size_text
from shardcore.tables.hot_rows import HOT

MOST_ENTRIES = 30
"""The most proposals of a decision that are shown, without the best."""
_MORE_GIB = (1, 2, 4, 8, 16, 32, 64)
"""GiB of device memory, all devices together."""


# --- the ledger --------------------------------------------------------------------------------------------


def ledger_text(ledger: DecisionLedger | None) -> str:
    """Tables of all proposals in a ledger of decisions, nested ones after, each with the reason for its choice; "" for
    None.
    """
    if ledger is None:
        return ""
    table = proposals_table(ledger.decision, ledger.entries, ledger.winning_entry)
    because = f"\n{ledger.chosen}: {ledger.because}" * (len(ledger.entries) > 1)
    return f"{table}{because}\n\n{ledger_text(ledger.winning_entry.within)}".rstrip("\n")


def proposals_table(decision: str, entries: Sequence[LedgerEntry], chosen: LedgerEntry | None = None) -> str:
    """Table with a row for each proposal of a decision, at most MOST_ENTRIES.

    chosen: the proposal that won. None: none did.
    """
    names = dict.fromkeys(name for entry in entries for name in entry.facts)
    shown = [x for i, x in enumerate(entries) if i < MOST_ENTRIES or x is chosen]
    rows = [
        (
            entry.proposed + " (best)" * (entry is chosen and len(entries) > 1),
            *(_cell_text(entry.facts.get(name)) for name in names),
            _cell_text(entry.ms),
            f"{entry.seconds:.1f}",
            f"{entry.evals:,}",
            entry.why,
        )
        for entry in shown
    ]
    table = text_table((decision, *names, "total ms", "s", "evaluations", "why not"), rows)
    more = f"\nand {len(entries) - len(shown)} more{', in the provenance of the plan' * (chosen is not None)}"
    return table + more * (len(entries) > len(shown))


def has_several_proposals(ledger: DecisionLedger | None) -> bool:
    """Tell if a decision in the ledger, at any level, had more than one proposal."""
    return ledger is not None and (
        len(ledger.entries) > 1 or has_several_proposals(ledger.winning_entry.within)
    )


def _cell_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- hot rows ----------------------------------------------------------------------------------------------


def hot_rows_table(old_problem: Problem, problem: Problem) -> str:
    """Table of how many rows of each table are hot; "" if none are.

    old_problem: the problem without hot rows.
    """
    hot = {t.name.removesuffix(HOT): t for t in problem.tables if t.name.endswith(HOT)}
    rows = [
        (t.name, f"{t.rows:,}", f"{hot[t.name].rows:,}", f"{hot[t.name].pooling / t.pooling:.1%}")
        for t in old_problem.tables
        if t.name in hot
    ]
    return text_table(["table", "rows", "hot rows", "their lookups"], rows) if rows else ""


def hot_row_drift_table(drifts: Sequence[HotDrift]) -> str:
    """Table of how hot planned hot rows still are, and what newer hot ids would save and move."""
    rows = [
        {
            "table": x.new.table,
            "hot rows": f"{len(x.new.ids):,}",
            "still hot": f"{x.still_hot:.0%}",
            "lookups, planned": f"{x.planned_share:.1%}",
            "now": f"{x.share:.1%}",
            "with other ids": f"{x.best_share:.1%}",
            "rows that enter": f"{x.entering:,}",
            "MB saved a step": f"{x.saved_bytes / 1e6:,.3f}",
            "moves": size_text(x.moved_bytes),
        }
        for x in drifts
    ]
    saved, moved = sum(x.saved_bytes for x in drifts), sum(x.moved_bytes for x in drifts)
    return (
        f"{records_table(rows)}\n\n"
        f"Other hot ids would save {saved / 1e6:,.3f} MB a step between devices, and move {size_text(moved)} of "
        "weights once."
    )


# --- memory tiers ------------------------------------------------------------------------------------------


def memory_tiers_text(problem: Problem) -> str:
    """Tables with rows below device memory, those with most bytes over the host link first.

    A second table has the ms that more memory would save.
    """
    tiers = tier_of_each_table(problem)
    below = sorted((t for t in tiers if t.table.in_host_memory), key=lambda t: -t.link_bytes)
    if not below:
        return "All rows fit in device memory."
    rows = [
        {
            "table": t.table.name,
            "kernel": t.table.kernel,
            "weights": size_text(t.table.bytes),
            "rows cached": f"{t.table.load_factor:.2%}",
            "MB over the link": f"{t.link_bytes / 1e6:,.3f}",
        }
        for t in below
    ]
    more = [
        (f"{n} GiB", f"{ms:,.3f}")
        for n, ms in zip(_MORE_GIB, link_ms_savings(problem, _MORE_GIB), strict=True)
    ]
    return "\n".join(
        [
            records_table(rows),
            "",
            f"{len(below)} of {len(problem.tables)} tables are not all in device memory. Each step "
            f"{sum(t.link_bytes for t in tiers) / 1e6:,.1f} MB cross the link: {least_link_ms(problem):,.3f} ms at "
            f"least, at {' and '.join(f'{x.gbps:g}' for x in problem.topology.memory)} GB/s a device (given).",
            "",
            text_table(("more device memory", "ms saved"), more),
        ]
    )


# --- clusters ----------------------------------------------------------------------------------------------


def _error_band(model: CostModel, found: FoundPlan) -> float:
    """Relative error that a profile expects of a plan's step; 0 for a trained model."""
    problem = with_towers_of_plan(found.plan, found.problem)
    return (error_bands(model.for_problem(problem), lower(found.plan, problem)) or (0.0,))[0]


def _cluster_record(outcome: ProposalOutcome, band: float) -> dict[str, Any]:
    """Table row of a cluster that has a plan, by header. band: relative error of its step."""
    cluster, samples_per_s = outcome.proposal, outcome.proposal.samples_per_s(outcome.ms)
    return {
        "offer": cluster.offer.name,
        "hosts": cluster.hosts,
        "devices": len(cluster.problem.topology),
        "step ms": f"{outcome.ms:.2f}" + f" ±{band:.0%}" * (band > 0),
        "samples/s": f"{samples_per_s:,.0f}",
        "price/h": f"{cluster.price_per_hour:,.2f}",
        "price of 10^9 samples": f"{1e9 / samples_per_s / 3600 * cluster.price_per_hour:,.2f}",
    }


def cluster_lines(decision: Provision, result: FoundPlan) -> Iterator[str]:
    """Lines on provisioned clusters: the chosen one, the best of each offer, and those without a plan."""
    outcomes = result.outcomes
    best = best_cluster_of_each_offer(outcomes, decision.target)
    chosen = best[0].proposal
    yield (
        f"{chosen.words}, {chosen.price_per_hour:,.2f} an hour, {result.ms:.3f} ms a step; {len(outcomes)} "
        f"clusters searched in {sum(x.seconds for x in outcomes):.0f} s"
    )
    bands = {x.proposal.words: _error_band(x.proposal.model, x.found) for x in outcomes if x.found}
    yield records_table([_cluster_record(x, bands[x.proposal.words]) for x in best])
    # At the fast end of its band, such a cluster would be chosen.
    if unranked := [
        name
        for x in outcomes
        if x.found and (name := x.proposal.words) != chosen.words
        for fast in [replace(x, found=replace(x.found, ms=x.ms * (1 - bands[name])))]
        if best_cluster_of_each_offer([best[0], fast], decision.target)[0] is fast
    ]:
        yield (
            f"within the errors of their profiles these may be better, too: {', '.join(unranked)}. To rank them, "
            f"measure: {' or '.join(how for _, how in MEASUREMENTS.values())}"
        )
    if left_out := sum(offer.most_hosts for offer in decision.offers) - len(outcomes):
        yield (
            f"{left_out} clusters were left out: their devices do not divide the global batch of "
            f"{chosen.problem.global_batch:,} evenly"
        )
    if none := [x for x in outcomes if not x.found]:
        yield f"{len(none)} clusters have no plan, such as {none[0].proposal.words}: {none[0].error}"


def clusters_figure(outcomes: Sequence[ProposalOutcome], chosen: ProposalOutcome | None) -> Figure:
    """Figure of samples per second against price per hour, with the best cluster at each price and the chosen one.

    chosen: None if none meets the target.
    """

    def prices_and_rates(of: Sequence[ProposalOutcome]) -> tuple[list[float], list[float]]:
        return [x.proposal.price_per_hour for x in of], [x.proposal.samples_per_s(x.ms) for x in of]

    made, [axes] = figure_with_panels((8, 5))
    prices, rates = prices_and_rates(
        sorted((x for x in outcomes if x.found), key=lambda x: (x.proposal.price_per_hour, x.ms))
    )
    axes.step(
        prices,
        np.maximum.accumulate(rates),
        where="post",
        color="0.8",
        label="best for the price",
        zorder=0,
    )
    for name in dict.fromkeys(x.proposal.offer.name for x in outcomes):
        of = [x for x in outcomes if x.proposal.offer.name == name and x.found]
        axes.plot(*prices_and_rates(of), marker="o", markersize=4, linewidth=1, label=name)
    if chosen:
        axes.scatter(
            *prices_and_rates([chosen]),
            s=120,
            facecolors="none",
            edgecolors="black",
            label="chosen",
            zorder=3,
        )
    axes.set(xlabel="price per hour", ylabel="samples per second", ylim=(0, None), xlim=(0, None))
    axes.legend(frameon=False)
    return made
