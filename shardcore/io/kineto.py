"""Kineto's trace files, which torch.profiler writes: JSON, plain or gzip, read as a stream.

With stacks, a trace of a few steps has gigabytes. So a file is decoded event by event, and memory holds a
chunk of text and one event. A reader goes through it twice: once for the steps, once for the events of the
steps that it wants. Versions of torch that write the base time at the end cost a third pass.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_MS
from shardcore.io import schema

SUFFIXES = (".json", ".json.gz")
_MOST_CHARACTERS = 1 << 24
"""Most characters of an event, of the text before all events, and of the text after them."""
_MOST_TIME = 1e19
"""Largest time, in ns or µs. The year 2026 is 1.8e18 ns since the epoch."""
_STARTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


class TraceEvent(NamedTuple):
    """One event of a profiler trace that has a duration.

    begin_ms, end_ms: ms since the epoch, by the clock of its rank.
    thread: process and thread; on a GPU, device and stream.
    """

    name: str
    category: str
    begin_ms: float
    end_ms: float
    thread: tuple[Any, Any]
    args: Mapping[str, Any]


@dataclass
class KinetoFile:
    """A trace file of torch.profiler (Kineto).

    header: entries of the file except its events.
    cut_short: True if the end of the file is missing. It is known once `events` has been read.
    malformed: number of events without a name, time or duration. It is known then, too.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    cut_short: bool = False
    malformed: int = 0

    def __post_init__(self) -> None:
        schema.require_file(self.path)
        next(self._decode_events(_Text(self.path), only_header=True), None)

    @property
    def distributed_info(self) -> Mapping[str, Any]:
        """Backend, rank and world_size of the traced job; empty where the trace does not say."""
        return info if isinstance(info := self.header.get("distributedInfo"), dict) else {}

    def events(self) -> Iterator[TraceEvent]:
        """Events of the trace that have a duration, in the order of the file.

        Raises ShardCoreError for a file that is no trace.
        """
        self.malformed = 0
        base_ns = self.header.get("baseTimeNanoseconds")
        base_ms = base_ns / 1e6 if _is_valid_time(base_ns) else 0.0
        for raw in self._decode_events(_Text(self.path)):
            if not isinstance(raw, dict):
                self.malformed += 1
            elif raw.get("ph") == "X":
                begin, duration, name = raw.get("ts"), raw.get("dur", 0), raw.get("name")
                # An event longer than MOST_MS is no part of a step.
                if not (
                    _is_valid_time(begin) and _is_valid_time(duration) and 0 <= duration <= 1e3 * MOST_MS
                ) or not isinstance(name, str):
                    self.malformed += 1
                    continue
                begin_ms, args = base_ms + begin / 1e3, raw.get("args")
                yield TraceEvent(
                    name,
                    str(raw.get("cat", "")),
                    begin_ms,
                    begin_ms + duration / 1e3,
                    (str(raw.get("pid")), str(raw.get("tid"))),
                    args if isinstance(args, dict) else {},
                )

    def _decode_events(self, text: _Text, only_header: bool = False) -> Iterator[Any]:
        """Decode the trace's events one by one. Sets `header` and `cut_short`.

        only_header: stop as soon as the header is known, and yield no events.
        """
        while not (starts := _STARTS.search(text.buffer)):
            if len(text.buffer) > _MOST_CHARACTERS or not text.read_more():
                raise ShardCoreError(f"{self.path} is no trace of torch.profiler; it has no 'traceEvents'")
        self._add_header(text.buffer[: starts.start()].rstrip().rstrip(",") + "}")
        if only_header and "baseTimeNanoseconds" in self.header:
            return
        at, self.cut_short = starts.end(), False
        while True:
            at = _BETWEEN.match(text.buffer, at).end()  # type: ignore[union-attr]
            if text.buffer[at : at + 1] == "]":
                break
            try:
                value, end = _DECODER.raw_decode(text.buffer, at)
            except RecursionError:
                raise ShardCoreError(f"{self.path} has an event that is nested too deep") from None
            except ValueError:  # also for a number with thousands of digits
                # The event is incomplete in the buffer, unless this is longer than any event.
                if len(text.buffer) - at > _MOST_CHARACTERS:
                    raise ShardCoreError(f"{self.path} has an event that is not JSON") from None
                text.buffer, at = text.buffer[at:], 0
                if not text.read_more():
                    self.cut_short = True
                    return
                continue
            at = end
            if not only_header:
                yield value
        # What follows the events are further entries of the header.
        text.buffer = text.buffer[at + 1 :]
        while len(text.buffer) < _MOST_CHARACTERS and text.read_more():
            pass
        self.cut_short = not self._add_header("{" + text.buffer.lstrip().lstrip(","))

    def _add_header(self, content: str) -> bool:
        """Add a trace file's entries other than events to `header`; False if they are not JSON."""
        try:
            self.header |= json.loads(content)
        except (ValueError, RecursionError):
            return False
        return True


class _Text:
    """Incrementally read text of a file, plain or gzip.

    buffer: text that was read and not yet decoded.
    """

    def __init__(self, path: Path) -> None:
        self.buffer = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._chunks = _read_chunks(path)

    def read_more(self) -> bool:
        """Read more of the file into the buffer, at least doubling the buffer's length. False at the end of the
        file."""
        read: list[str] = []
        for chunk in self._chunks:
            read.append(self._decode(chunk))
            if sum(map(len, read)) >= len(self.buffer):
                break
        self.buffer += "".join(read)
        return bool(read)


def _read_chunks(path: Path) -> Iterator[bytes]:
    """Chunks of a file's content, unpacked if gzip; they end early if a gzip file is damaged."""
    try:
        yield from schema.unpacked_chunks(path)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return
    except OSError as error:
        raise ShardCoreError(f"cannot read {path}: {error.strerror}") from None


def _is_valid_time(value: object) -> TypeGuard[float]:
    """Tell if a trace's value is a number that may be a time."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_TIME
