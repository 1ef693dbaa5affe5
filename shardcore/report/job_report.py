"""A running job in words: what its step spends, why, and what a better plan brings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from shardcore.core.step_cost import PARTS, StepCost
from shardcore.io.traced_steps import TRACED_PARTS, UNNAMED, RankStep, TracedJob, TracedStep
from shardcore.plans.traced_job import ReadJob
from shardcore.report.text import percent_change, text_table

MOST_RANKS = 4
"""Ranks that are shown: those that wait least, which others wait for, and the one that waits most."""
WORDS = {
    "forward_compute_ms": "lookups forward",
    "backward_compute_ms": "lookups backward and update",
    "forward_comm_ms": "exchange of outputs",
    "backward_comm_ms": "exchange of gradients",
    "waiting_ms": "waiting for the last rank",
    "input_ms": "ids",
    "dense_ms": "dense part and all else",
}
"""Fields of a StepCost."""
_UNEVEN = 1.1
"""Ids of the rank that has most, over the mean of ranks, from which a job is told what even ranks would bring."""
_OWN_PARTS = (
    ("ids", "dense_forward", "dense_backward"),
    ("ids_transfer", "outputs_transfer", "gradients_transfer"),
)
"""Parts of a traced step that grow with the ids of a rank's own samples: its work, and its transfers."""
_WAITS = 0.1
"""Share of the step from which waiting is worth a sentence."""


def traced_step_text(job: TracedJob) -> str:
    """Table of the parts of a job's last traced step in ms, for each rank."""
    step = job.steps[-1]
    shown = _ranks_to_show(step)
    parts = [
        [part.words, *(f"{rank.ms.get(name, 0.0):.2f}" for rank in shown)]
        for name, part in TRACED_PARTS.items()
        if any(rank.ms.get(name) for rank in shown)
    ]
    sums = [
        ["step", *(f"{rank.total_ms:.2f}" for rank in shown)],
        ["named", *(f"{rank.recognised_share:.1%}" for rank in shown)],
        ["hidden transfers", *(f"{rank.hidden_ms:.2f}" for rank in shown)],
    ]
    table = text_table(["ms", *(f"rank {rank.rank}" for rank in shown)], [*parts, *sums])
    left = len(step.ranks) - len(shown)
    return table + f"\nand {left} more ranks" * (left > 0) + _missing_ranks_text(step, "\n")


def prediction_text(
    step: TracedStep, cost_before: StepCost, cost_after: StepCost, ranks: Sequence[int]
) -> str:
    """Table of measured and predicted step parts of each rank, before and after correction.

    ranks: the device of each rank.
    """
    headers = ["rank", "part", "measured ms", "predicted", "difference", "corrected", "difference"]
    rows = []
    for rank in _ranks_to_show(step):
        device = ranks[rank.rank]
        for name in (*PARTS, "dense_ms"):
            measured = rank.cost_ms(name)
            both = [getattr(cost, name) for cost in (cost_before, cost_after)]
            values = both if name == "dense_ms" else [of_devices[device] for of_devices in both]
            if measured or any(values):
                cells = [x for ms in values for x in (f"{ms:.2f}", f"{ms - measured:+.2f}")]
                rows.append([rank.rank, WORDS[name], f"{measured:.2f}", *cells])
    return text_table(headers, rows, words=(1,)) + _missing_ranks_text(step, "\n")


def _missing_ranks_text(step: TracedStep, before: str) -> str:
    """Sentence on ranks without a trace, after a separator; "" if all ranks have one."""
    words = f"{before}{step.missing_ranks_text.capitalize()} missing: exchanges hold the waiting for them, uncorrected."
    return words if step.missing_ranks_text else ""


def bottleneck_sentence(step: TracedStep) -> str:
    """Sentence on what limits a traced step: a rank that others wait for, or the longest part."""
    last = min(step.ranks, key=lambda rank: rank.cost_ms("waiting_ms"))
    others = [rank for rank in step.ranks if rank is not last]
    waits, missing = [rank.cost_ms("waiting_ms") for rank in others], _missing_ranks_text(step, " ")
    if waits and max(waits) > _WAITS * step.total_ms:
        name, more_ms = max(
            (
                (name, last.cost_ms(name) - sum(rank.cost_ms(name) for rank in others) / len(others))
                for name in WORDS
                if name != "waiting_ms"
            ),
            key=lambda x: x[1],
        )
        first = f"Ranks wait up to {max(waits):.1f} ms of {step.total_ms:.1f} for rank {last.rank}"
        if more_ms < max(waits) / 2:
            return f"{first}, which began the step later.{missing}"
        return f"{first}: its {WORDS[name]} took {more_ms:.1f} ms more than those of others.{missing}"
    mean_ms = {
        name: sum(rank.ms.get(name, 0.0) for rank in step.ranks) / len(step.ranks)
        for name in TRACED_PARTS
        if name != UNNAMED
    }
    name, ms = max(mean_ms.items(), key=lambda x: x[1])
    return (
        f"Most of the step goes to {TRACED_PARTS[name].words}: {ms:.1f} ms of {step.total_ms:.1f} "
        f"({ms / step.total_ms:.0%}).{missing}"
    )


def unrecognised_kernels_text(step: TracedStep) -> str:
    """Names of kernels in a trace that no step part claims, with their mean ms over ranks; "" if there are none."""
    total_ms: Counter[str] = Counter()
    for rank in step.ranks:
        total_ms.update(rank.names_ms)
    return "; ".join(f"{name[:60]} {ms / len(step.ranks):.2f} ms" for name, ms in total_ms.most_common(5))


def _ranks_to_show(step: TracedStep) -> list[RankStep]:
    order = sorted(step.ranks, key=lambda rank: rank.cost_ms("waiting_ms"))
    return sorted([*order[: MOST_RANKS - 1], *order[MOST_RANKS - 1 :][-1:]], key=lambda rank: rank.rank)


def step_headline(total_ms: float, predicted_ms: float, interval_ms: tuple[float, float]) -> str:
    """Sentence with the measured and the predicted ms of a step, and the interval after correction."""
    low, high = interval_ms
    return (
        f"step {total_ms:.1f} ms measured, {predicted_ms:.1f} predicted "
        f"({percent_change(predicted_ms, total_ms)}), {low:.1f} to {high:.1f} after correction"
    )


def balance_remarks(job: ReadJob) -> list[str]:
    """A sentence on what evenly long sequences on all ranks would save of a job's last traced step, at most; none if
    they are about even, or a rank has no lookups.

    Shuffling samples between ranks leaves the sum of their work as it is. So the slowest rank still takes the mean of
    what its own samples decide, and exchanges the mean of ids. Packing leaves out the padding of samples.
    """
    tables, step = job.problem.tables if job.problem else (), job.traced.steps[-1]
    # Where a rank has none, nobody has checked that the others have all features.
    ranks = job.lookups if len(job.lookups) == step.world_size else []
    features = [f for t in tables if t.sequence for f in job.features.get(t.name, ())]
    ids = np.array([sum(len(rank[f][0]) for f in features) for rank in ranks], float)
    if not ids.any() or ids.max() <= _UNEVEN * ids.mean():
        return []
    own_ms, transfer_ms = (
        np.array([sum(rank.ms.get(part, 0.0) for part in parts) for rank in step.ranks])
        for parts in _OWN_PARTS
    )
    saved_ms = own_ms.max() - own_ms.mean() + transfer_ms.max() * (1 - ids.mean() / ids.max())
    padded = sum(len(rank[f][1]) * rank[f][1].max(initial=0) for rank in ranks for f in features)
    return [
        f"sequences of a rank have {ids.min() / ids.mean():.2f} to {ids.max() / ids.mean():.2f} times the mean of ids: "
        f"shuffling samples between ranks would save at most {saved_ms:.1f} of {step.total_ms:.1f} ms. Padded to the "
        f"longest of a rank, {1 - ids.sum() / padded:.0%} of them is padding, which packing would leave out of the "
        "dense part"
    ]
