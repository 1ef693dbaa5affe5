"""Timings of collectives from the standard output of nccl-tests or rccl-tests, to fit a profile's rates of links to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardcore.core.validation import field_rules, require, require_rules, to_path_name
from shardcore.cost.profile import Profile
from shardcore.cost.profile_fit import Timing
from shardcore.io import schema

_TAG = re.compile(r"^\s*(?:\[[^\]\s]*\](?:<\w+>:)?|\d+:)?\s*")
"""Prefix by which mpirun or srun tags a line."""
_STARTS = re.compile(r"Collective test starting: (\w+)")
_TOOL = re.compile(r"\b(\w+?)_perf(?:_\w+)?\b")
_COLLECTIVE = re.compile(r"all_?to_?all(?!v)|all_?gather|reduce_?scatter|all_?reduce")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})(?:\s+Group\s+(\d+))?\b.*\bon\s+(\S+)\s+device\s+\d+\s+\[(\S+)\]\s+(.*\S)"
)
_SEVERAL = "a run after several tools were named"

Ranks = dict[int, tuple[str | None, str, str, str]]
"""Group, host, bus id and card of each rank of a run."""


def read_nccl_logs(paths: Iterable[Path], profile: Profile) -> tuple[list[Timing], Counter[str]]:
    """Timings from logs of nccl-tests on a profile's card, and the number of rows left out by reason.

    A log may have several runs, one after another. Each run names its collective, else a command before it or the file
    has to.

    Raises ShardCoreError for a log without a table of nccl-tests, and for ranks that were built without MPI.
    """
    timings, reasons = list[Timing](), Counter[str]()
    for path in paths:
        started, named, tool = "", set[str](), path.stem
        columns, ranks, made = list[str](), Ranks(), None
        for number, tagged in enumerate(schema.read_text(path).splitlines(), 1):
            line = _TAG.sub("", tagged)
            what, values = f"{path}, line {number}", line.lstrip("#").split()
            if starts := _STARTS.search(line):
                started = starts[1]
            elif found := _TOOL.search(line):
                named.add(found[1])
            if "Using devices" in line:
                ranks = {}
            elif rank := _RANK.match(line):
                require(
                    int(rank[1]) not in ranks,
                    f"{what} has rank {rank[1]} a second time; build nccl-tests with MPI=1, for one run of all ranks",
                )
                ranks[int(rank[1])] = rank[2], rank[3], rank[4], rank[5]
            elif values[:2] == ["size", "count"]:
                columns = values
                tool = started or (_SEVERAL if len(named) > 1 else next(iter(named), path.stem))
                started, named = "", set()
            elif columns and values and values[0].isdigit():
                made = _parse_row(columns, values, tool, ranks, profile, str(path))
                if isinstance(made, Timing):
                    require_rules(made, what, field_rules(Timing))
                    timings.append(made)
                else:
                    reasons[made] += 1
        require(
            made is not None,
            f"{path} has no table of nccl-tests; it needs what such a tool prints, or .csv at the end of its name",
        )
    return timings, reasons


def _parse_row(
    columns: Sequence[str], values: Sequence[str], tool: str, ranks: Ranks, profile: Profile, source: str
) -> Timing | str:
    """Parse a row of nccl-tests into a timing, or give the reason why it is left out."""
    row: dict[str, str] = {}
    for name, value in zip(columns, values, strict=False):
        # Columns in place have the same names, and come later.
        row.setdefault(name, value)
    wrong = row.get("#wrong", "0")
    # A timestamp is two words.
    if len(values) != len(columns) + (columns[-1] == "timestamp") or not (wrong.isdigit() or wrong == "N/A"):
        return "the row is cut, or has other columns"
    if wrong.isdigit() and wrong.strip("0"):
        return "its values were wrong"
    if reason := _rejection_reason(tool, ranks, profile):
        return reason
    try:
        time_us, size = float(row.get("time", "")), float(row["size"])
    except ValueError:
        return "its wall time is not there, or no number"
    if not (time_us > 0 and size > 0):
        return "nothing was exchanged"
    [op] = _COLLECTIVE.findall(tool.lower())[:1]
    n_hosts = len({host for _, host, _, _ in ranks.values()})
    return Timing(source, "", op.replace("_", ""), time_us, sent=(size,) * len(ranks), hosts=n_hosts)


def _rejection_reason(tool: str, ranks: Ranks, profile: Profile) -> str | None:
    """The reason why a run of nccl-tests does not fit a hardware profile's law. None if it does."""
    groups, hosts, buses, cards = zip(*ranks.values(), strict=True) if ranks else ((), (), (), ())
    other = next((card for card in cards if not profile.covers_hardware(to_path_name(card))), None)
    reasons = {
        f"{tool} is no collective of the law, or does not say which": not _COLLECTIVE.search(tool.lower()),
        "its run lists fewer than two ranks": len(ranks) < 2,
        "its list of ranks has gaps": set(ranks) != set(range(len(ranks))),
        "its ranks are in several groups": len(set(groups)) > 1,
        "two of its ranks have one device, or two hosts have one name": len({*zip(hosts, buses, strict=True)})
        < len(ranks),
        "its hosts have unequal numbers of ranks": len(set(Counter(hosts).values())) > 1,
        f"it is of {other}": other is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
