"""One rank's trace: its steps, each with frames of the host, kernels of the device, and collectives.

Shapes: none; spans are lists sorted by begin.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_BYTES, short_repr
from shardcore.io.kineto import KinetoFile, TraceEvent
from shardcore.io.schema import is_whole_number
from shardcore.io.traced_steps import UNNAMED
from shardcore.measure.traces.names import (
    DENSE_KERNELS,
    DENSE_OPS,
    GLOO,
    NCCL_KERNEL,
    RUN_AS,
    STARTS_COLLECTIVE,
    STEP,
    collective_role,
    match_collective,
    match_kernel_name,
)

MOST_STEPS = 8
"""Steps of a trace that are read, the last ones."""
_MOST_OVERLAP = 0.01
"""Share of a step from which the next one counts as overlapping it: clocks are rounded."""
_HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "hip_runtime"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ARGUMENTS = ("correlation", "Collective name", "In msg nelems", "dtype", "Input Dims", "Input type")
"""Arguments of events that are read. Others take most of the memory."""
_ELEMENT_BYTES = {
    "long int": 8, "int": 4, "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2,
    "unsigned char": 1, "signed char": 1,
    "Long": 8, "Int": 4, "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1,
}  # fmt: skip
"""By the types of tensors as ops name them, and as collectives do."""


class Span(NamedTuple):
    """A span of time in a trace, with the step part that it belongs to.

    works: False for the host's own time in frames that wait or contain.
    name: of what is not recognised, or of what the host does.
    """

    begin_ms: float
    end_ms: float
    part: str
    works: bool
    name: str


@dataclass
class TracedCollective:
    """A collective of one rank in a trace.

    began_ms: when the last rank of it began, by this rank's clock. -inf where no other rank's trace has it.
    is_aligned: True if all ranks of the job have it, so that this is known.
    """

    collective: str
    role: str
    n_bytes: int
    begin_ms: float
    end_ms: float
    began_ms: float = -math.inf
    is_aligned: bool = False

    @property
    def transfer_begin_ms(self) -> float:
        """Begin of the transfer in ms: when the last rank has entered, within the collective's span."""
        return min(max(self.began_ms, self.begin_ms), self.end_ms)


@dataclass
class StepSpans:
    """One rank's traced step: spans of the host's main thread and of the device, and collectives by start time."""

    number: int
    begin_ms: float
    end_ms: float
    host: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    collectives: list[TracedCollective] = field(default_factory=list)


@dataclass
class RankTrace:
    """The steps in one rank's trace file.

    rank, world_size: None where it does not say.
    cut_short: True if its last events are missing.
    """

    rank: int | None
    world_size: int | None
    backend: str
    device: str
    steps: list[StepSpans]
    remarks: list[str]
    cut_short: bool

    @property
    def on_gpu(self) -> bool:
        """True if the trace has GPU events."""
        return any(step.device for step in self.steps)


def read_rank_trace(file: KinetoFile) -> RankTrace:
    """Read the last MOST_STEPS steps of a rank's trace file. Raises ShardCoreError where the file has no events of
    ops."""
    remarks: list[str] = []
    annotations: dict[int, list[TraceEvent]] = defaultdict(list)
    first, last = math.inf, -math.inf
    for e in file.events():
        if e.category in _HOST or e.category in _DEVICE:
            first, last = min(first, e.begin_ms), max(last, e.end_ms)
            match = STEP.match(e.name) if e.category == "user_annotation" else None
            if match and e.end_ms > e.begin_ms:
                annotations[int(match[1])].append(e)
    if last <= first:
        raise ShardCoreError(
            f"{file.path.name} has no ops{' and is cut short' * file.cut_short}; trace the activities CPU, or CPU and "
            "CUDA"
        )
    if file.cut_short:
        remarks.append("is cut short: its last events are missing")
    if file.malformed:
        remarks.append(f"has {file.malformed} events without a name or a possible time")
    if several := [number for number, events in annotations.items() if len(events) > 1]:
        remarks.append(
            f"has several ProfilerSteps of number {short_repr(several)}: the longest of each counts"
        )
    longest = {n: max(events, key=lambda e: e.end_ms - e.begin_ms) for n, events in annotations.items()}
    windows = _cut_overlaps({n: (e.begin_ms, e.end_ms) for n, e in longest.items()}, remarks)
    if not windows:
        remarks.append("has no ProfilerStep: all of it counts as one step (call profiler.step() each step)")
        windows[0] = first, last
    chosen = dict(sorted(windows.items())[-MOST_STEPS:])
    begin, end = min(w[0] for w in chosen.values()), max(w[1] for w in chosen.values())
    threads: dict[tuple, list[TraceEvent]] = defaultdict(list)
    kernels = []
    for e in file.events():
        # Collectives of gloo's threads, and kernels, may end after the host's step.
        if e.end_ms > begin and e.begin_ms < max(end, last):
            kept = e._replace(args={name: e.args[name] for name in _ARGUMENTS if name in e.args})
            if e.category in _HOST:
                threads[e.thread].append(kept)
            elif e.category in _DEVICE:
                kernels.append(kept)
    # Of threads with a ProfilerStep the one with most events: another may have no more than that.
    annotated = {e.thread for events in annotations.values() for e in events}
    main = max(annotated or threads, key=lambda t: len(threads[t]), default=())
    host = {thread: _Frames(events) for thread, events in threads.items()}
    launches = {k: v for frames in host.values() for k, v in frames.launches.items()}
    starts = sorted(
        itertools.chain.from_iterable(f.starts for f in host.values()), key=lambda start: start.begin_ms
    )
    device, collectives = _device_spans(kernels, launches)
    collectives += _gloo_collectives(threads, starts)
    collectives.sort(key=lambda x: x[0])
    steps = [
        StepSpans(
            number,
            from_ms,
            to_ms,
            _clip_spans(host[main].spans if main in host else [], from_ms, to_ms),
            _clip_spans(device, from_ms, to_ms),
            [c for start, c in collectives if from_ms <= start < to_ms],
        )
        for number, (from_ms, to_ms) in chosen.items()
    ]
    idle = [s.number for s in steps if not (s.collectives or any(x.works for x in (*s.host, *s.device)))]
    if idle:
        remarks.append(f"has steps without ops, which do not count: {idle}")
        steps = [s for s in steps if s.number not in idle]
    if not steps:
        raise ShardCoreError(
            f"{file.path.name} has no ops within its steps {idle}{' and is cut short' * file.cut_short}; trace steps "
            "that train"
        )
    if not any(step.collectives for step in steps):
        remarks.append("has no collectives: of exchanges it tells nothing")
    told = file.distributed_info
    devices = file.header.get("deviceProperties")
    names = [d.get("name") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    return RankTrace(
        told["rank"] if is_whole_number(told.get("rank")) else None,
        told["world_size"] if is_whole_number(told.get("world_size")) else None,
        str(told.get("backend", "")),
        str(names[0]) if names else "cpu",
        steps,
        remarks,
        file.cut_short,
    )


def _cut_overlaps(
    windows: Mapping[int, tuple[float, float]], remarks: list[str]
) -> dict[int, tuple[float, float]]:
    """Time windows of steps made disjoint: each ends where the next begins.

    Where some overlap, the last one is left out, as nothing tells its end.
    """
    ordered = sorted(windows.items(), key=lambda item: item[1])
    pairs = [(number, window, after[0]) for (number, window), (_, after) in itertools.pairwise(ordered)]
    longer = {
        n: round(end - after, 1)
        for n, (begin, end), after in pairs
        if end - after > _MOST_OVERLAP * (end - begin)
    }
    if not longer:
        return dict(windows)
    remarks.append(
        f"has ProfilerSteps that overlap the next one, by ms: {short_repr(longer)}. "
        f"Each counts until the next one begins, and the last one, {ordered[-1][0]}, does not count"
    )
    return {n: (begin, min(end, after)) for n, (begin, end), after in pairs if after > begin}


def _clip_spans(spans: Iterable[Span], from_ms: float, to_ms: float) -> list[Span]:
    """Spans of time clipped to a window."""
    return [
        s._replace(begin_ms=max(s.begin_ms, from_ms), end_ms=min(s.end_ms, to_ms))
        for s in spans
        if s.end_ms > from_ms and s.begin_ms < to_ms
    ]


# --- frames of a thread -------------------------------------------------------------------------------------


class _Start(NamedTuple):
    """The host's launch of a collective, and the step part that contains the launch."""

    begin_ms: float
    end_ms: float
    collective: str
    part: str
    n_bytes: int


class _Frame(NamedTuple):
    end_ms: float
    part: str
    works: bool
    name: str
    start: _Start | None


_OUTSIDE = _Frame(math.inf, "host", False, "outside of frames", None)


class _Frames:
    """The nested frames (ops and annotations) of a traced thread.

    spans: its time, each in the innermost frame.
    launches: what was around the launch of a kernel, by its correlation.
    starts: of collectives.
    """

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        self.spans: list[Span] = []
        self.launches: dict[int, _Frame] = {}
        self.starts: list[_Start] = []
        stack, self._at_ms = [_OUTSIDE], -math.inf
        for e in sorted(events, key=lambda e: (e.begin_ms, -e.end_ms)):
            while stack[-1].end_ms <= e.begin_ms:
                self._add_time(frame := stack.pop(), frame.end_ms)
            self._add_time(stack[-1], e.begin_ms)
            correlation = e.args.get("correlation")
            if isinstance(correlation, int):
                self.launches[correlation] = stack[-1]
            stack.append(self._make_frame(e, stack[-1]))
        while len(stack) > 1:
            self._add_time(frame := stack.pop(), frame.end_ms)

    def _add_time(self, frame: _Frame, until_ms: float) -> None:
        """Add the time up to `until_ms` to the spans, as spent in a frame."""
        if until_ms > self._at_ms > -math.inf:
            self.spans.append(Span(self._at_ms, until_ms, frame.part, frame.works, frame.name))
        self._at_ms = max(self._at_ms, until_ms)

    def _make_frame(self, event: TraceEvent, around: _Frame) -> _Frame:
        """Frame of a trace event nested in another frame, with its step part."""
        start = around.start
        named = str(event.args.get("Collective name", event.name))
        if STARTS_COLLECTIVE.match(event.name) and (start or match_collective(named)):
            if start is None:
                collective = match_collective(named) or "other"
                start = _Start(event.begin_ms, event.end_ms, collective, around.part, _input_bytes(event))
                self.starts.append(start)
            elif not start.n_bytes and (n_bytes := _input_bytes(event)):
                # The op of a list of tensors has no sizes; what it calls has.
                start = start._replace(n_bytes=n_bytes)
                self.starts[-1] = start
            return _Frame(event.end_ms, around.part, False, event.name, start)
        row = match_kernel_name(event.name)
        if STEP.match(event.name) and around.part in ("host", UNNAMED):
            # The step's own Python between ops. Nothing says what it does.
            return _Frame(event.end_ms, UNNAMED, False, "Python outside of ops and annotations", None)
        if row is not None and row.part != "host":
            # What a frame of an embedding's part calls is of that part, unless its own name says more.
            part = around.part if row.part == "dense_backward" and around.part == "optimizer" else row.part
            return _Frame(
                event.end_ms, part, row.works and event.category == "cpu_op", event.name, around.start
            )
        if event.category == "cpu_op" and around.part in ("host", UNNAMED):
            known = DENSE_OPS.match(event.name) or event.name in ("detach", "record_param_comms")
            return _Frame(event.end_ms, "dense_forward" if known else UNNAMED, True, event.name, around.start)
        works = around.works or event.category == "cpu_op"
        part = row.part if row and around.part == UNNAMED else around.part
        if part == UNNAMED and event.category not in ("cpu_op", "user_annotation"):
            part = "host"  # a launch, or a wait for the device
        return _Frame(event.end_ms, part, works, event.name, around.start)


def _input_bytes(event: TraceEvent) -> int:
    """Input bytes of a rank's collective, at most MOST_BYTES; 0 where the trace event does not say."""
    count, kind = event.args.get("In msg nelems"), event.args.get("dtype")
    if isinstance(count, int) and isinstance(kind, str) and kind in _ELEMENT_BYTES:
        return min(max(count, 0) * _ELEMENT_BYTES[kind], MOST_BYTES)
    dims, kinds = event.args.get("Input Dims"), event.args.get("Input type")
    # An op has its output first and its input next; what runs it has only the input.
    tensors = [
        (d, k)
        for d, k in (
            zip(dims, kinds, strict=False) if isinstance(dims, list) and isinstance(kinds, list) else ()
        )
        if isinstance(k, str) and k in _ELEMENT_BYTES
        if isinstance(d, list) and d and all(isinstance(n, int) and n >= 0 for n in d)
    ]
    if not tensors:
        return 0
    shape, kind = tensors[1 if event.name.startswith("c10d::") and len(tensors) > 1 else 0]
    return min(math.prod(shape) * _ELEMENT_BYTES[kind], MOST_BYTES)


# --- device and collectives ---------------------------------------------------------------------------------


def _device_spans(
    kernels: Iterable[TraceEvent], launches: dict[int, _Frame]
) -> tuple[list[Span], list[tuple[float, TracedCollective]]]:
    """Spans of GPU kernels, and NCCL collectives with the time of their launch by the host."""
    spans, collectives = [], []
    for e in kernels:
        correlation = e.args.get("correlation")
        around = launches.get(correlation) if isinstance(correlation, int) else None
        collective = match_collective(e.name) if NCCL_KERNEL.match(e.name) else None
        if collective or (around and around.start and NCCL_KERNEL.match(e.name)):
            start = around.start if around else None
            collectives.append(
                _collective_run(e, start or _Start(e.begin_ms, e.end_ms, collective or "other", "", 0))
            )
            continue
        spans.append(Span(e.begin_ms, e.end_ms, _kernel_part(e, around), True, e.name))
    return spans, collectives


def _collective_run(event: TraceEvent, start: _Start) -> tuple[float, TracedCollective]:
    """Collective of a kernel or gloo thread's event, with the time of its launch by the host."""
    return start.begin_ms, TracedCollective(
        start.collective,
        collective_role(start.collective, start.part),
        start.n_bytes,
        event.begin_ms,
        event.end_ms,
    )


def _kernel_part(event: TraceEvent, around: _Frame | None) -> str:
    """Step part that a GPU kernel belongs to."""
    row = match_kernel_name(event.name)
    if row and row.part != "dense_backward":
        return row.part
    if around and around.part not in ("host", UNNAMED):
        return around.part
    return "dense_forward" if DENSE_KERNELS.search(event.name) else UNNAMED


def _gloo_collectives(
    threads: dict[tuple, list[TraceEvent]], starts: Sequence[_Start]
) -> list[tuple[float, TracedCollective]]:
    """Collectives that gloo's threads ran, each with the time of its launch by the host.

    Gloo runs what a group was given in that order. So a collective is that of the first start which has none
    yet. A reduce-scatter that gloo runs as an all-reduce keeps its name.
    """
    runs = sorted(
        (e for events in threads.values() for e in events if GLOO.match(e.name)), key=lambda e: e.begin_ms
    )
    waiting: dict[str, deque[_Start]] = defaultdict(deque)
    for start in starts:
        waiting[start.collective].append(start)
    collectives = []
    for e in runs:
        kind = match_collective(e.name) or "other"
        queues = [queue for name, queue in waiting.items() if queue and kind in RUN_AS.get(name, (name,))]
        first = min(queues, key=lambda queue: queue[0].begin_ms, default=None)
        # It was started before it ran.
        started = first is not None and first[0].begin_ms <= e.begin_ms
        start = first.popleft() if first and started else _Start(e.begin_ms, e.end_ms, kind, "", 0)
        collectives.append(_collective_run(e, start._replace(n_bytes=start.n_bytes or _input_bytes(e))))
    return collectives
