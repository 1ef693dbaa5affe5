"""The collectives of a training step. One row of COLLECTIVES defines each.

Cost models, draws, measurements, replays and reports read these rows and name none of them.
To add a collective, add a row, and let a kind of sharding use it (layouts.LAYOUTS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.errors import ShardCoreError

Widths = Sequence[int]
"""Columns of each rank."""


@dataclass(frozen=True)
class Draw:
    """How a collective is drawn to be measured.

    share: of the varied draws; with a `stream`, of all draws.
    stream: seed of a random stream for it alone, so that other draws do not depend on it. 0: none.
    loads: (columns of each rank, rng) -> columns of each rank, as plans have them in this collective.
    scope: of some draws over several hosts (scopes.SCOPES). "": none.
    scope_share: of draws over several hosts that have this scope.
    """

    share: float
    stream: int = 0
    loads: Callable[[Widths, Any], Widths] = lambda widths, rng: widths
    scope: str = ""
    scope_share: float = 0.0


@dataclass(frozen=True)
class Work:
    """Work of a device on the ids of its own samples, before they travel.

    weight: name of a model's weight [2]: ms once, and ms a byte of these ids.
    run: (measure/id_transfer.IdTransfer) -> (lengths, ids) that leave.
    buckets: True if it puts ids in buckets, one for each row range. Then all devices receive ids.
    """

    weight: str
    run: Callable[[Any], tuple[Any, Any]]
    buckets: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective among the devices of a group.

    name: as channels and files give it.
    words: for people.
    ways: its directions, in the order in which they run: "forward", "backward", or both.
    call: the exchange in torch, a key of measure/transfers.CALLS.
    draw: how it is drawn to be measured.
    like: the collective whose rates stand in where its own were not measured. "": none.
    ring: True if bytes go round a ring. Otherwise each device sends to each other one.
    passes: times that all bytes go round. An all-reduce is a reduce-scatter and an all-gather.
    exchanges: calls, one after another. For ids: how much will come, lengths, then ids.
    cast: True if it has a payload that a job may choose: one with a codec in TorchRec (fbgemm_qcomm_codec).
    ids: True if it carries ids, before the lookups.
    dense: True if it sums a dense gradient, the same on all devices that have it. Only they take part.
    work: of a device, before ids travel. They then travel by the rates of `like`. None: no such work.
    """

    name: str
    words: str
    ways: tuple[str, ...]
    call: str
    draw: Draw
    like: str = "all_to_all"
    ring: bool = False
    passes: int = 1
    exchanges: int = 1
    cast: bool = False
    ids: bool = False
    dense: bool = False
    work: Work | None = None


def _hot(widths: Widths, rng: Any) -> Widths:
    """A few hot tables have most lookups.

    So ranks that own equally many columns may receive a hundred times as many ids.
    """
    shares = rng.lognormal(0.0, 1.0, len(widths))
    return [round(sum(widths) * share) for share in shares / shares.sum()]


def _near_even(widths: Widths, rng: Any) -> Widths:
    """Ranks that hold row ranges receive nearly as many ids each."""
    return [max(1, round(max(widths) * part)) for part in rng.uniform(0.5, 1, len(widths))]


def _same(widths: Widths, rng: Any) -> Widths:
    """An all-reduce sums the same tensor on every rank."""
    return [max(widths)] * len(widths)


# Without such shares, too few samples would cover divided rows and data-parallel tables.
COLLECTIVES: Mapping[str, Collective] = {row.name: row for row in (
    Collective("all_to_all", "all-to-all", ("forward", "backward"), "all_to_all",
               Draw(0.2, scope="cross", scope_share=0.4), like="", cast=True),
    # Backward it is an all-gather.
    Collective("reduce_scatter", "reduce-scatter", ("forward", "backward"), "reduce_scatter",
               Draw(0.5, scope="host", scope_share=0.5), ring=True, cast=True),
    Collective("all_reduce", "all-reduce", ("backward",), "all_reduce",
               Draw(0.3, loads=_same), ring=True, passes=2, dense=True),
    Collective("all_to_all_ids", "all-to-all of ids", ("forward",), "ids",
               Draw(0.1, stream=5, loads=_hot), exchanges=3, ids=True),
    Collective("all_to_all_ids_bucketized", "all-to-all of ids, bucketized", ("forward",), "ids",
               Draw(0.07, stream=8, loads=_near_even), like="all_to_all_ids", exchanges=3, ids=True,
               work=Work("bucketize_ids", lambda transfer: transfer.in_buckets(), buckets=True)),
)}
"""By name. The first is the stand-in for all that were not measured."""


def collective_of(name: str) -> Collective:
    """The row of a collective. Raises ShardCoreError for an unknown name."""
    if name not in COLLECTIVES:
        raise ShardCoreError(f"collective {name!r} is not known; known are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]
