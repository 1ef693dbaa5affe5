"""A plan in words: its explanation, moves, drift and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Placement, Problem
from shardcore.cost.profile import MEASUREMENTS
from shardcore.plans.decisions import Decision, PlanVersion
from shardcore.plans.diff import PlanDiff
from shardcore.plans.drift import PlanDrift
from shardcore.plans.replan import ReplanConfig
from shardcore.plans.words import count_text, moves_phrases, moves_summary, threshold_text, time_text
from shardcore.report.plan_explorer import PARTS, bottleneck_sentence
from shardcore.report.text import device_table, number_text, percent_change, text_table
from shardcore.search.explain import Explanation
from shardcore.step.kinds import device_names, sharding_kind_by_name
from shardcore.step.memory import size_text, usable_bytes

MOST_SHARDS = 8
"""Shards of the bottleneck device that are shown."""


# --- explanation -----------------------------------------------------------------------------------------


def explanation_text(x: Explanation) -> str:
    """Explanation of a plan as paragraphs and tables, for a terminal."""
    return "\n\n".join(_explanation_paragraphs(x))


def explanation_sentences(x: Explanation) -> tuple[str, str, str, str]:
    """Four sentences on a plan: bottleneck device, exchange, memory, and distance to a lower bound."""
    return _bottleneck_text(x), _exchange_text(x), _memory_text(x), _bound_text(x)


def _explanation_paragraphs(x: Explanation) -> Iterator[str]:
    yield "\n".join(explanation_sentences(x))
    shown, rest = x.shards[:MOST_SHARDS], x.shards[MOST_SHARDS:]
    rows = [(s.shard, s.kind, f"{s.saves_ms:.3f}", size_text(s.bytes)) for s in shown]
    if rest:
        saves_ms, n_bytes = sum(s.saves_ms for s in rest), sum(s.bytes for s in rest)
        rows.append((f"{len(rest)} more", "", f"{saves_ms:.3f}", size_text(n_bytes)))
    if rows:
        yield text_table((f"on device {x.device}", "kind", "without it, ms less", "weights"), rows)
    if x.cuts_ms:
        dearest = sorted(x.cuts_ms.items(), key=lambda cut: -cut[1])
        rows = [(name, f"{ms:+.3f} ({ms / x.total_ms:+.1%})") for name, ms in dearest[:MOST_SHARDS]]
        yield text_table(("in parts", "whole where its widest part is, ms"), rows)
    yield f"{text_table(MEMORY_HEADERS, memory_rows(x))}\n({peak_moment_text(x)})"
    yield f"{text_table(('instead', 'ms', 'against this plan'), alternative_rows(x))}\n({x.searched})"
    if x.doubts:
        rows = [
            (d.measured, f"±{d.band:.0%}", f"{d.regret:.1%}", MEASUREMENTS[d.measured][1]) for d in x.doubts
        ]
        yield text_table(
            ("measure", "error of the step", "another plan saves, at most", "how"), rows, words=(3,)
        )


def _bottleneck_text(x: Explanation) -> str:
    cost, d, waiting = x.cost, x.device, x.cost.waiting_ms
    last = (
        f"{x.total_ms:.3f} ms, most of it {x.limit}. Device {d} is ready last, after "
        f"{cost.forward_compute_ms[d]:.3f} ms of forward and {cost.backward_compute_ms[d]:.3f} ms of "
        f"backward compute\nand {cost.backward_comm_ms[d]:.3f} ms of backward exchange; then come "
        f"{max(cost.forward_comm_ms):.3f} ms of forward exchange.{_input_text(cost)}{_fetch_text(cost)}"
    )
    if len(waiting) == 1:
        return last
    # The bottleneck device itself never waits.
    others = [w for i, w in enumerate(waiting) if i != d]
    return (
        f"{last}\nThe others wait {sum(others) / len(others):.3f} ms for it on average, "
        f"{max(others):.3f} ms at most; compute is {x.balance:.0%} balanced (mean over largest)."
    )


def _input_text(cost: PredictedCost) -> str:
    """Sentence on the ms that input ids and the dense part add to a step; "" if there are none."""
    ids_ms = max(cost.input_ms)
    parts = [f"{ids_ms:.3f} ms until ids arrived"] if ids_ms else []
    parts += [f"{cost.dense_ms:.3f} ms of dense part"] if cost.dense_ms else []
    return f"\nAlso counted: {' and '.join(parts)}." if parts else ""


def _fetch_text(cost: PredictedCost) -> str:
    """Sentence on the ms for which a step waits for rows that caches prefetch; "" without prefetching."""
    if not any(cost.link_ms):
        return ""
    return (
        f"\nCaches fetch the next batch's rows meanwhile (pipeline prefetch): {max(cost.link_ms):.3f} ms of the "
        f"link to host memory at most, of which {max(cost.fetch_wait_ms):.3f} ms are waited for. No GPU was timed "
        "for that."
    )


def _exchange_text(x: Explanation) -> str:
    total = sum(x.exchange_bytes)
    if not total or len(x.exchange_bytes) == 1:
        return "Nothing is exchanged."
    mean = total / len(x.exchange_bytes)
    most = x.exchange_bytes[x.widest]
    message = f"Device {x.widest} has most to exchange: {size_text(most)} each way, {most / mean:.2f} times the mean."
    ids = max(x.input_bytes)
    if ids:
        message += f"\nDevice {x.input_bytes.index(ids)} receives most ids: {size_text(ids)} a step with their lengths."
    if x.without_towers_ms is not None:
        message += (
            f"\nTowers make what crosses hosts smaller: without them this plan would take {x.without_towers_ms:.3f} ms "
            f"({percent_change(x.without_towers_ms, x.total_ms)}). The tower modules' own work is not counted."
        )
    return message


def _memory_text(x: Explanation) -> str:
    return (
        f"Memory is {sum(x.memory_bytes) / max(1, sum(x.free_bytes)):.0%} used; device {x.fullest} is "
        f"fullest, with {size_text(x.memory_bytes[x.fullest])} of {size_text(x.free_bytes[x.fullest])}, "
        f"most of it {max(x.memory.parts, key=x.memory.parts.__getitem__)}."
    )


MEMORY_HEADERS = ("memory of the fullest device", "", "of what it needs")


def memory_rows(x: Explanation) -> list[tuple[str, str, str]]:
    """Table rows under MEMORY_HEADERS: each part of the fullest device's memory at its peak."""
    needs = x.memory.bytes
    rows = [
        (part, size_text(n_bytes), f"{n_bytes / needs:.1%}")
        for part, n_bytes in x.memory.parts.items()
        if n_bytes
    ]
    return [*rows, ("reserved", size_text(x.reserved_bytes), "not counted")]


def peak_moment_text(x: Explanation) -> str:
    """The moment of the step at which the fullest device reaches its memory peak."""
    return f"device {x.fullest} at its peak: {x.memory.phase}"


def _bound_text(x: Explanation) -> str:
    b = x.bound
    if b is None:
        return "No lower bound is proved under this model."
    # The bound covers only one space of plans: a plan outside it may be cheaper.
    proved = (
        f"This plan is of another kind than those of which none takes less than {b.proved_ms:.3f} ms (proved)"
        if x.total_ms < b.proved_ms
        else f"No plan takes less than {b.proved_ms:.3f} ms (proved; this one: "
        f"{percent_change(x.total_ms, b.proved_ms)})"
    )
    return (
        f"{proved}.\nThe limit is {b.limit}.\nThe bound is for plans of this kind: {b.space}; of memory it counts "
        "what is there at all times."
    )


def alternative_rows(x: Explanation) -> list[tuple[str, str, str]]:
    """Table rows of alternative plans with their costs, or the reason why there is none."""
    return [
        (a.what, f"{a.total_ms:.3f}", percent_change(a.total_ms, x.total_ms))
        if a.total_ms is not None
        else (a.what, "none", (a.error or "")[:60])
        for a in (*x.baselines, *x.changes)
    ]


# --- cost ------------------------------------------------------------------------------------------------


def device_costs_text(new_version: PlanVersion, problem: Problem) -> str:
    """Table of each device's step parts and memory, and a sentence on the bottleneck."""
    cost = new_version.cost
    columns = {words: getattr(cost, name) for words, name, _ in PARTS} | {
        "total ms": cost.device_ms,
        "memory": [size_text(used) for used in new_version.memory_bytes],
        "of its limit": [
            f"{used / max(1, most):.0%}"
            for used, most in zip(new_version.memory_bytes, usable_bytes(problem), strict=True)
        ],
    }
    dense = f" The dense part adds {cost.dense_ms:.3f} ms." if cost.dense_ms else ""
    return f"{device_table(columns, [-ms for ms in cost.waiting_ms])}\n\n{bottleneck_sentence(new_version)}{dense}"


# --- moves, drift ----------------------------------------------------------------------------------------


def replan_text(moves: PlanDiff, config: ReplanConfig) -> str:
    """Moves of a re-plan in words, with a remark if moves that had to be made exceed the limits."""
    beyond = max(config.moves_beyond_limits(moves)) > 0
    return (
        moves_summary(moves)
        + (f"; more than the limit of {config.limits_text}, which does not count what had to move") * beyond
    )


MOVES_HEADERS = ("table", "moves", "had to", "was", "is")


def move_rows(moves: PlanDiff) -> list[tuple[str, ...]]:
    """Table rows under MOVES_HEADERS: each table that moves, its bytes, and its old and new place."""
    return [
        (m.table, size_text(m.bytes), "yes" if m.forced else "", placement_text(m.old), placement_text(m.new))
        for m in moves.moves
    ]


def moves_by_table_text(moves: PlanDiff) -> str:
    """Summary and table of the moves between two plans."""
    listed = [text_table(MOVES_HEADERS, move_rows(moves), words=(2, 3, 4))] if moves.moves else []
    return "\n\n".join([moves_summary(moves), *listed])


def placement_text(placements: Iterable[Placement]) -> str:
    """Placement of a table in words: devices, columns if cut, and how devices share the rows."""
    words = []
    for p in sorted(placements, key=lambda p: p.shard.col_lo):
        s = p.shard
        columns = f" columns {s.col_lo}:{s.col_hi} of {s.table.dim}" * (s.width < s.table.dim)
        words.append(
            f"{device_names(p.devices)}{columns}{f', {sharding_kind_by_name(p.kind).words}' * (len(p.devices) > 1)}"
        )
    return "; ".join(words)


def plan_drift_text(x: PlanDrift) -> str:
    """Drift of a plan's cost under newer statistics, in a few lines for a terminal."""
    moved = count_text(len(x.moves.moves), "table")
    limit = "" if x.most_tables is None else f", of {x.most_tables} that may"
    lines = [
        f"The plan costs {x.now_ms:.3f} ms now, {percent_change(x.now_ms, x.planned_ms)} against the "
        f"{x.planned_ms:.3f} ms with the statistics that it was made for.",
        f"The best plan found costs {x.best_ms:.3f} ms: the plan is {x.cost_above_best:.1%} behind.",
    ]
    if x.moves.moves:
        lines.append(
            f"With {moved} moving{limit} ({size_text(x.moves.bytes)} of weights) it costs {x.replan_ms:.3f} ms: "
            f"{x.gain}, which {'pays' if x.is_replan_worthwhile else 'does not pay'}{threshold_text(x.threshold)}."
        )
    else:
        within = " within that limit" * (x.most_tables is not None)
        lines.append(f"No better plan was found{within}: keep it.")
    lines += [f"{words[0].upper()}{words[1:]}." for words in moves_phrases(x.moves)[1:]]
    return "\n".join(lines)


# --- decisions -------------------------------------------------------------------------------------------

DECISION_HEADERS = ("decided", "outcome", "version", "ms", "considered, ms", "model", "reason")


def decision_row(x: Decision) -> tuple[str, ...]:
    """Table row of a publishing decision under DECISION_HEADERS, in ms under the model of its time."""
    model, data = x.provenance.get("model_version"), str(x.provenance.get("data", ""))[:8]
    return (
        time_text(x.decided_at),
        x.outcome,
        x.current,
        number_text(x.total_ms),
        number_text(x.candidate_ms),
        f"version {model}{f', data {data}' * bool(data)}" if model else "-",
        x.reason,
    )


def decision_history_text(decisions: Iterable[Decision]) -> str:
    rows = [decision_row(x) for x in decisions]
    return text_table(DECISION_HEADERS, rows, words=(DECISION_HEADERS.index("reason"),))
