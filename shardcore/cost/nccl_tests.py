"""Timings of collectives from the standard output of nccl-tests or rccl-tests, to fit a profile's rates of links to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardcore.core.validation import MOST_BYTES, MOST_MS, path_name_of, require, require_within
from shardcore.cost.profile import Profile
from shardcore.cost.profile_fit import Timing
from shardcore.cost.profile_law import MS_PER_US
from shardcore.io import schema

_TAG = re.compile(r"^\s*(?:\[\d+,\d+\]<\w+>:|\d+:)?\s*")
"""What mpirun or srun puts before a line that it tags."""
_TOOL = re.compile(r"\b(\w+)_perf\b")
_COLLECTIVE = re.compile(r"all_?to_?all(?!v)|all_?gather|reduce_?scatter|all_?reduce")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\b.*\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.*\S)")

Ranks = dict[int, tuple[str, str]]
"""Host and card of each rank of a run."""


def read_logs(paths: Iterable[Path], profile: Profile) -> tuple[list[Timing], Counter[str]]:
    """Timings of a profile's card, out of place, and the reasons to leave out other rows, with their numbers.

    A log may have several runs, one after another. Each run names its collective, else the file has to.

    Raises ShardCoreError for a log without a table of nccl-tests, and for ranks that were built without MPI.
    """
    timings, reasons = list[Timing](), Counter[str]()
    for path in paths:
        tool, columns, ranks, made = path.stem, list[str](), Ranks(), None
        for number, tagged in enumerate(schema.read_text(path).splitlines(), 1):
            line = _TAG.sub("", tagged)
            what, values = f"{path}, line {number}", line.lstrip("#").split()
            if named := _TOOL.search(line):
                tool = named[1]
            if "Using devices" in line:
                ranks = {}
            elif rank := _RANK.match(line):
                require(
                    int(rank[1]) not in ranks,
                    f"{what} has rank {rank[1]} a second time; build nccl-tests with MPI=1, for one run of all ranks",
                )
                ranks[int(rank[1])] = rank[2], rank[3]
            elif values[:2] == ["size", "count"]:
                columns = values
            elif columns and len(values) == len(columns) and values[0].isdigit():
                # Columns in place have the same names, and come later.
                row = dict(zip(reversed(columns), reversed(values), strict=True))
                made = _timing(row, tool, ranks, profile, str(path))
                if isinstance(made, Timing):
                    require_within(made, what, time_us=(0, MOST_MS / MS_PER_US), bytes=(0, MOST_BYTES))
                    timings.append(made)
                else:
                    reasons[made] += 1
        require(made is not None, f"{path} has no table of nccl-tests; it needs what such a tool prints")
    return timings, reasons


def _timing(row: Mapping[str, str], tool: str, ranks: Ranks, profile: Profile, source: str) -> Timing | str:
    """A row as a timing, or why it is none."""
    collective, hosts = _COLLECTIVE.search(tool.lower()), Counter(host for host, _ in ranks.values())
    if collective is None:
        return f"{tool} is no collective of the law, or does not say which"
    if len(ranks) < 2:
        return "its run lists fewer than two ranks"
    if len(set(hosts.values())) > 1:
        return "its hosts have unequal numbers of ranks"
    for _, card in ranks.values():
        if not profile.is_of(path_name_of(card)):
            return f"it is of {card}"
    if row.get("#wrong", "0") not in ("0", "N/A"):
        return "its values were wrong"
    try:
        time_us, size = float(row["time"]), float(row["size"])
    except ValueError:
        return "its time is no number"
    if not (time_us > 0 and size > 0):
        return "nothing was exchanged"
    op = collective[0].replace("_", "")
    return Timing(source, "", op, time_us, ranks=len(ranks), hosts=len(hosts), bytes=size)
