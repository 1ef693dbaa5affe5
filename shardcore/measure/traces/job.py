"""Traces of all ranks, as steps of a job.

Spans overlap: a kernel runs beside a collective, while the host launches the next. Each moment counts for the
topmost of these: a kernel or op, a transfer, waiting for the last rank, the host. Transfers that overlap
share the link, so they share the moment.

Shapes: C collectives, M moments between two edges of spans.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_DEVICES, short_repr
from shardcore.io.kineto import SUFFIXES, KinetoFile
from shardcore.io.schema import Faults
from shardcore.io.traced_steps import UNNAMED, RankStep, TracedExchange, TracedJob, TracedStep
from shardcore.measure.traces import clocks
from shardcore.measure.traces.rank import RankTrace, StepSpans, read_rank_trace

_MOST_NAMES = 20
_TRANSFER = "transfer"
_HOST = "host: "
"""Before a part: the host works on it, and the device idles."""
_RANK = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.I)


def trace_files(folder: str | Path) -> list[Path]:
    """Profiler trace files in a folder and its subfolders, by name. Raises ShardCoreError where there are none."""
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    paths = sorted(p for s in SUFFIXES for p in folder.rglob(f"*trace{s}") if not p.name.startswith("."))
    if not paths:
        raise ShardCoreError(
            f"{folder} has no traces; it needs files *trace.json or *trace.json.gz, one a rank"
        )
    return paths


def read_traced_job(folder: str | Path, world_size: int | None = None) -> TracedJob:
    """Read a job's profiler traces: the steps that all readable traces of a folder have.

    world_size: ranks of the job. None: as the traces say.

    Raises ShardCoreError where no trace can be read, or traces are of different jobs.
    """
    traces: dict[int, RankTrace] = {}
    remarks, digests, errors = [], {}, []
    for path in trace_files(folder):
        try:
            trace = read_rank_trace(KinetoFile(path))
        except ShardCoreError as error:
            errors.append(error)
            continue
        rank = trace.rank if trace.rank is not None else _rank_from_path(path, len(traces))
        if rank in traces:
            # Later traces of a rank, of the same job, replace earlier ones.
            remarks.append(f"rank {rank} has several traces; the last one counts")
        traces[rank] = trace
        digests[rank] = _file_digest(path)
        remarks += [f"trace of rank {rank} {remark}" for remark in trace.remarks]
    if not traces:
        raise Faults(faults=errors)
    remarks += map(str, errors)
    traces = _drop_incomplete_steps(traces, remarks)
    sizes = {s for s in (world_size, *(trace.world_size for trace in traces.values())) if s}
    if len(sizes) > 1:
        raise ShardCoreError(
            f"{folder} has traces of jobs of {' and '.join(map(str, sorted(sizes)))} ranks; they need to be of one job"
        )
    size = next(iter(sizes), max(traces) + 1)
    if not 0 <= min(traces) <= max(traces) < size <= MOST_DEVICES:
        raise ShardCoreError(
            f"{folder} has traces of ranks {', '.join(map(str, sorted(traces)))}; a job of {size} has 0 to {size - 1}, "
            f"and {MOST_DEVICES:,} ranks at most"
        )
    numbers = sorted(set.intersection(*({step.number for step in t.steps} for t in traces.values())))
    if not numbers:
        raise ShardCoreError(
            f"{folder} has traces of no common step; ranks have "
            f"{'; '.join(f'{r}: {[s.number for s in t.steps]}' for r, t in sorted(traces.items())[:4])}"
        )
    if more := sorted({step.number for t in traces.values() for step in t.steps} - set(numbers)):
        remarks.append(f"steps {short_repr(more)} do not count, as not all ranks have them")
    steps = _align_steps(dict(sorted(traces.items())), numbers, size, remarks)
    if missing := steps[-1].missing_ranks_text:
        remarks.append(
            f"traces of {len(traces)} of {size} ranks: {missing} missing; "
            "waiting for missing ranks counts as transfer"
        )
    return TracedJob(
        tuple(steps),
        next(iter(traces.values())).backend,
        tuple(sorted({trace.device for trace in traces.values()})),
        tuple(dict.fromkeys(remarks)),
        {rank: digest for rank, digest in digests.items() if rank in traces},
    )


def _drop_incomplete_steps(traces: dict[int, RankTrace], remarks: list[str]) -> dict[int, RankTrace]:
    """Rank traces without the incomplete steps of files that were cut short.

    A step is complete if it has the collectives that it has in whole traces.
    """
    whole = [clocks.collective_counts_by_step(t.steps) for t in traces.values() if not t.cut_short]
    kept = {}
    for rank, trace in traces.items():
        own = clocks.collective_counts_by_step(trace.steps)
        if trace.cut_short and whole:
            steps = [s for s in trace.steps if all(own[s.number] == of.get(s.number) for of in whole)]
            if not steps:
                remarks.append(f"trace of rank {rank} does not count: no step of it is whole")
                continue
            trace = replace(trace, steps=steps)
        kept[rank] = trace
    return kept


def _align_steps(
    traces: dict[int, RankTrace], numbers: Sequence[int], size: int, remarks: list[str]
) -> list[TracedStep]:
    """Traced steps of a job with the ranks' clocks aligned. Adds remarks on what cannot be aligned."""
    steps, before = [], {}
    on_gpu = any(trace.on_gpu for trace in traces.values())
    for number in numbers:
        spans = {rank: next(s for s in t.steps if s.number == number) for rank, t in traces.items()}
        groups, unequal = clocks.match_collectives({rank: s.collectives for rank, s in spans.items()})
        if unequal:
            remarks.append(
                f"ranks differ in collectives: {', '.join(unequal)}; these are not aligned, and not corrected"
            )
        clock = clocks.clock_offsets(groups, list(traces))
        length_ms = max(s.end_ms - s.begin_ms for s in spans.values())
        for rank, offset in list(clock.items()):
            if offset.spread_ms > clocks.MOST_SPREAD * length_ms:
                remarks.append(
                    f"clock of rank {rank} is known to {offset.spread_ms:.1f} ms only in step {number}: a transfer "
                    "takes as long as on the rank where it is shortest"
                )
                del clock[rank]
            elif rank in before and abs(offset.ms - before[rank]) > clocks.JUMP * length_ms:
                remarks.append(
                    f"clock of rank {rank} jumps by {offset.ms - before[rank]:.1f} ms before step {number}; each step "
                    "is aligned alone"
                )
            before[rank] = offset.ms
        clocks.set_last_rank_begins(groups, clock, size)
        steps.append(
            TracedStep(number, tuple(divide_rank_step(rank, s, on_gpu) for rank, s in spans.items()), size)
        )
    return steps


def divide_rank_step(rank: int, spans: StepSpans, on_gpu: bool) -> RankStep:
    """Divide the time of a rank's traced step among the step's parts."""
    # While a GPU idles, the host launches what comes next.
    idle = [
        (s.begin_ms, s.end_ms, _HOST + s.part if on_gpu and s.part != UNNAMED else s.part) for s in spans.host
    ]
    work = [s for s in (spans.device if on_gpu else spans.host) if s.works]
    transfers = [(c.transfer_begin_ms, c.end_ms) for c in spans.collectives]
    painted, exposed_ms, shared_ms = _exclusive_ms(
        [
            (spans.begin_ms, spans.end_ms, UNNAMED),
            *idle,
            *((c.begin_ms, c.transfer_begin_ms, "waiting") for c in spans.collectives),
            *((*transfer, _TRANSFER) for transfer in transfers),
            *((s.begin_ms, s.end_ms, s.part) for s in work),
        ],
        transfers,
        (spans.begin_ms, spans.end_ms),
    )
    ms = _sums_by_name(
        [
            *(
                (f"{c.role}_transfer", value)
                for c, value in zip(spans.collectives, exposed_ms, strict=True)
                if value
            ),
            *(("host" if part.startswith(_HOST) else part, value) for part, value in painted.items()),
        ]
    )
    host_ms = {part.removeprefix(_HOST): ms for part, ms in painted.items() if part.startswith(_HOST)}
    names = _sums_by_name(
        [(s.name, s.end_ms - s.begin_ms) for s in (*spans.host, *spans.device) if s.part == UNNAMED]
    )
    kernels = [
        *((s.part, s.end_ms - s.begin_ms) for s in spans.device),
        *((f"{c.role}_transfer", c.end_ms - c.begin_ms) for c in spans.collectives),
    ]
    exchanges = tuple(
        TracedExchange(
            c.collective,
            c.role,
            c.n_bytes,
            c.transfer_begin_ms - c.begin_ms,
            c.end_ms - c.transfer_begin_ms,
            value,
            shared,
            c.is_aligned,
        )
        for c, value, shared in zip(spans.collectives, exposed_ms, shared_ms, strict=True)
    )
    return RankStep(
        rank,
        spans.end_ms - spans.begin_ms,
        ms,
        sum(x.transfer_ms - x.exposed_ms for x in exchanges),
        exchanges,
        dict(sorted(names.items(), key=lambda x: -x[1])[:_MOST_NAMES]),
        host_ms,
        _sums_by_name(kernels) if on_gpu else {},
    )


def _sums_by_name(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum of the values of each name."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in values:
        sums[name] += value
    return dict(sums)


def _exclusive_ms(
    layers: Iterable[tuple[float, float, str]],
    transfers: Sequence[tuple[float, float]],
    within_ms: tuple[float, float],
) -> tuple[dict[str, float], list[float], list[float]]:
    """Exclusive time of each step part in a window, [C] exposed ms of each transfer, and [C] ms of these with other
    transfers in flight.

    Later layers cover earlier ones.

    transfers: those of the layers of _TRANSFER, which is among the parts no more.
    """
    begin_ms, end_ms = within_ms
    clipped = [(max(a, begin_ms), min(b, end_ms), part) for a, b, part in layers]
    clipped = [layer for layer in clipped if layer[1] > layer[0]]
    edges = np.unique([x for a, b, _ in clipped for x in (a, b)])
    parts = list(dict.fromkeys(part for _, _, part in clipped))
    number = {part: i for i, part in enumerate(parts)}
    widths = np.diff(edges)
    # A layer is two windows of 2^k moments, which may overlap. Windows are halved until they are moments.
    begins, ends = np.searchsorted(edges, [(a, b) for a, b, _ in clipped]).T
    exponents = np.frexp(ends - begins)[1] - 1
    # [M] the last layer that covers the window from a moment on. The first layer covers all.
    top = np.zeros(len(widths), dtype=int)
    for k in range(exponents.max(), -1, -1):
        top[1 << k :] = np.maximum(top[1 << k :], top[: len(top) - (1 << k)])
        of_size = np.flatnonzero(exponents == k)
        for first in (begins[of_size], ends[of_size] - (1 << k)):
            np.maximum.at(top, first, of_size)
    top = np.array([number[part] for _, _, part in clipped])[top]
    totals = dict(zip(parts, np.bincount(top, widths, len(parts)).tolist(), strict=True))
    totals.pop(_TRANSFER, None)
    # [C] first and last moments of transfers; [M] transfers that are under way at once.
    first, last = np.minimum(np.searchsorted(edges, np.reshape(transfers, (-1, 2))), len(widths)).T
    at_once = np.cumsum(np.bincount(first, minlength=len(edges)) - np.bincount(last, minlength=len(edges)))[
        :-1
    ]
    exposed_ms = np.where(top == number.get(_TRANSFER, -1), widths, 0.0) / np.maximum(at_once, 1)
    # [M + 1] sums of all moments before. A table of transfers by moments would fill memory.
    sums = [np.append(0.0, np.cumsum(ms)) for ms in (exposed_ms, np.where(at_once > 1, exposed_ms, 0.0))]
    return (
        {part: ms for part, ms in totals.items() if ms > 0},
        (sums[0][last] - sums[0][first]).tolist(),
        (sums[1][last] - sums[1][first]).tolist(),
    )


def _rank_from_path(path: Path, otherwise: int) -> int:
    """Rank number in the name of a trace file or its folder; `otherwise` if there is none."""
    match = _RANK.search(path.name) or _RANK.search(path.parent.name)
    return int(match[1]) if match else otherwise


def _file_digest(path: Path) -> str:
    """First 16 hex digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
