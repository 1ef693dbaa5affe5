"""Rates of a machine at moving a running job's tables: measured once, by moves of tables made for it.

`torchrec.moves.move_rates` measures them. A pause is the sum of its phases, each with its rate:

    pause = move + collections * collection + tables * table + built / build + copied / copy + digest + freed / free
            + max over levels of links of sent / link

Each of these amounts is that of the device that has most of it, for ranks wait for each other after each
phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from shardcore.core.links import LEVELS
from shardcore.core.validation import MOST_GBPS, Record, each_entry, number_within, require, short_repr
from shardcore.io import writing
from shardcore.io.envelope import read_record, sealed_document

SCHEMA = "move-rates"
Time = Annotated[float, number_within(0, 1e6)]
"""s or ns of a rate."""
_GBPS = number_within(1 / MOST_GBPS, MOST_GBPS)
Gbps = Annotated[float, _GBPS]


@dataclass(frozen=True)
class MoveRates(Record, noun="a set of move rates"):
    """Rates of a machine at moving a running job's tables.

    move_s: seconds of any move: votes, a process group, a collection of garbage.
    collection_s: seconds of each collection that changes: TorchRec shards it anew.
    table_s: seconds of each table in a collection that changes: checks of its plan, and its part in TorchRec's
      sharding.
    build_gbps: bytes of new shards, at which they are made.
    copy_gbps: bytes that stay on a rank.
    digest_ns: ns of each number that is digested, on the old shards and on the new ones.
    digest_row_ns: ns of each row of a tensor, in addition to its numbers.
    free_gbps: bytes of old shards, at which they are freed.
    link_gbps: bytes of a rank on each level of links, with packing. Other levels have the cost model's rate,
      or that of the next level out.
    """

    move_s: Time
    collection_s: Time
    table_s: Time
    build_gbps: Gbps
    copy_gbps: Gbps
    digest_ns: Time
    digest_row_ns: Time
    free_gbps: Gbps
    link_gbps: Annotated[Mapping[str, float], each_entry(_GBPS)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for level in self.link_gbps:
            require(
                level in LEVELS, f"move rates have links {short_repr(level)}; known are {', '.join(LEVELS)}"
            )


def write_move_rates(path: str | Path, rates: MoveRates) -> None:
    """Write a machine's rates of moving tables to a file."""
    writing.write_json(path, sealed_document(SCHEMA, asdict(rates)))


def read_move_rates(path: str | Path) -> MoveRates:
    """Read a machine's rates of moving tables. Raises ShardCoreError for a file that has none, or was edited."""
    return read_record(MoveRates, path, SCHEMA)
