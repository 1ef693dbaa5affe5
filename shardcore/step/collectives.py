"""The collectives of a training step. One row of COLLECTIVES defines each.

Cost models, draws, measurements, replays and reports read these rows and name none of them.
To add a collective, add a row, and let a kind of sharding use it (kinds.SHARDING_KINDS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import MEASURED, payload_by_name
from shardcore.step.memory_timeline import Stages, buffers_of_stage

Widths = Sequence[int]
"""Columns of each rank."""


@dataclass(frozen=True)
class DrawRule:
    """Rule by which a collective is drawn to be measured.

    share: share of the varied draws; with a `stream`, of all draws.
    stream: seed of a random stream for it alone, so that other draws do not depend on it. 0: none.
    loads: (columns of each rank, rng) -> columns of each rank, as plans have them in this collective.
    scope: scope of some draws over several hosts (scopes.SCOPES). "": none.
    scope_share: share of draws over several hosts that have this scope.
    """

    share: float
    stream: int = 0
    loads: Callable[[Widths, Any], Widths] = lambda widths, rng: widths
    scope: str = ""
    scope_share: float = 0.0


@dataclass(frozen=True)
class IdWork:
    """Work of a device on the ids of its local samples, before they travel.

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
    directions: its directions, in the order in which they run: "forward", "backward", or both.
    call: the exchange in torch, a key of measure/exchanges.EXCHANGES. Ids have another (measure/id_transfer.py).
    draw: rule by which it is drawn to be measured.
    like: the collective whose rates stand in where its own were not measured. "": none.
    ring: True if bytes go round a ring. Otherwise each device sends to each other one.
    passes: times that all bytes go round. An all-reduce is a reduce-scatter and an all-gather.
    exchanges: calls, one after another. For ids: how much will come, lengths, then ids.
    cast: True if it has a payload that a job may choose: one with a codec in TorchRec (fbgemm_qcomm_codec).
    ids: True if it carries ids, before the lookups.
    dense: True if it sums a dense gradient, the same on all devices that have it. Only they take part.
    work: work of a device before ids travel. They then travel by the rates of `like`. None: no such work.
    memory: buffers of a run in each stage (memory_timeline.py) whose first collective it is. None: ids, which are there
      in all phases.
    memory_of_sequences: of runs of tables whose lookups are not pooled. None: the same.
    memory_with_another: of runs in which another collective follows. None: the same.
    """

    name: str
    words: str
    directions: tuple[str, ...]
    call: str
    draw: DrawRule
    like: str = "all_to_all"
    ring: bool = False
    passes: int = 1
    exchanges: int = 1
    cast: bool = False
    ids: bool = False
    dense: bool = False
    work: IdWork | None = None
    memory: Stages | None = None
    memory_of_sequences: Stages | None = None
    memory_with_another: Stages | None = None

    @property
    def payloads(self) -> tuple[str, ...]:
        """Payload types that a collective is measured with."""
        return MEASURED if self.cast else ("fp32",)


# --- memory -------------------------------------------------------------------------------------------------


# In all: outputs stay until the next op looked up. What travels lives until it is waited for: this device's outputs,
# and those that it receives.
_RECEIVED = "received outputs: local"
_SENT = "payloads: last there, local there"
_SENT_BACK = "payloads: local back, last back"
_WAIT = buffers_of_stage(
    # Outputs are put together in the order of columns.
    _SENT,
    _RECEIVED,
    outputs_arrive=f"{_RECEIVED}; payloads: local there, local decoded",
)
_SEND_GRADIENTS = buffers_of_stage(
    # Gradients of outputs are ordered, cast and exchanged.
    "output gradients: gradient",
    _SENT_BACK,
    gradients_of_columns="output gradients: gradient, cut",
    gradients_in_order="output gradients: uncut, joined; payloads: local, local",
    gradients_cast="output gradients: uncut, cut; payloads: local, local clamped, local recast",
    backward_exchange=f"output gradients: uncut, cut; {_SENT_BACK}",
)
_UPDATE = {
    "gradients_arrive": "output gradients: first decoded; payloads: first back",
    "update": "output gradients: first; sorting: sorting",
}
_ALL_TO_ALL: Stages = (
    buffers_of_stage(
        looked_up="outputs: first",
        # A codec clamps FP32 values to the range of the payload before it casts them.
        outputs_cast="outputs: first; payloads: first cast, first clamped",
        # Once cast, the clamped copy is freed, and buffers of the exchange exist.
        outputs_sent="outputs: first; payloads: first cast, first there, local there",
        after=_SENT,
        freed_late="outputs: first",
    ),
    _WAIT,
    # Backward, gradients of local outputs leave, and those of the channel arrive.
    _SEND_GRADIENTS,
    buffers_of_stage(_SENT_BACK, **_UPDATE),
)
_SEQUENCES: Stages = (
    buffers_of_stage(
        looked_up="outputs: first",
        # A second copy of all lookups, while they are put in order.
        outputs_in_order="outputs: first, first",
        outputs_cast="outputs: first; payloads: first clamped, first clamped, first cast",
        outputs_sent=f"outputs: first; {_SENT}",
        after=_SENT,
        freed_late="outputs: first",
    ),
    _WAIT,
    buffers_of_stage(
        # Those of features are joined, and sent as they are.
        "output gradients: gradient",
        _SENT_BACK,
        gradients_joined="output gradients: gradient, local",
        gradients_cast="output gradients: local; payloads: local clamped, local recast",
        backward_exchange="output gradients: local; payloads: local recast, first back",
    ),
    buffers_of_stage(_SENT_BACK, gradients_in_order="output gradients: first, first", **_UPDATE),
)
# The all-gather holds its output and gloo's own buffer: twice the channel's bytes.
_GATHERED = "payloads: local copied, first back, first back"
_REDUCE_SCATTER: Stages = (
    buffers_of_stage(
        # Each device enters outputs of the global batch, and receives sums for its samples.
        looked_up="outputs: first",
        sums_cast="outputs: first; payloads: first cast, first clamped",
        sums_sent="outputs: first; payloads: first cast, first there, local there",
        after=_SENT,
        freed_late="outputs: first",
    ),
    _WAIT,
    buffers_of_stage(
        "output gradients: gradient",
        _GATHERED,
        gradients_gathered=f"output gradients: gradient; {_GATHERED}",
    ),
    buffers_of_stage(_GATHERED, **_UPDATE),
)
_WITHIN_AND_ACROSS: Stages = (
    buffers_of_stage(
        looked_up="outputs: first",
        # After the sum within the host, only the sums are left to cross hosts.
        sums_of_hosts_cast="outputs: first; payloads: first cast, first clamped",
        sums_of_hosts_sent="outputs: first; payloads: first cast, first there, last there",
        # Gloo's thread may still have its buffer of sums.
        sums_of_hosts_cross="outputs: first, last; payloads: first there, last cast, last there, local there",
        after=_SENT,
        freed_late="outputs: first",
    ),
    _WAIT,
    # Backward, hosts exchange first, as forward they do last.
    _SEND_GRADIENTS,
    buffers_of_stage(
        _SENT_BACK,
        # Each device then gathers from its host what the reduce-scatter had divided.
        gradients_gathered="output gradients: last; payloads: last recast, first back, first back",
        **_UPDATE,
    ),
)
# Gradients of replicas are beside DDP's buckets. Until then, those of outputs live, which a collection's include.
_REPLICAS: Stages = (
    # Lookups are local, so outputs exist at once and nothing is waited for.
    buffers_of_stage(looked_up="outputs: local", after="outputs: local"),
    buffers_of_stage("outputs: local", _RECEIVED),
    buffers_of_stage("output gradients: gradient", "output gradients: gradient"),
    # The dense kernel makes a gradient in addition to DDP's bucket, which is always there.
    buffers_of_stage(
        "output gradients: gradient",
        gradients_of_replicas="output gradients: gradient; dense gradients: dense",
    ),
)


# --- draws --------------------------------------------------------------------------------------------------


def _skewed_loads(widths: Widths, rng: Any) -> Widths:
    """Columns of ranks as if a few hot tables had most lookups, to draw exchanges of ids.

    So ranks that own equally many columns may receive a hundred times as many ids.
    """
    # Log-normal shares: few ranks have most ids, as hot tables make them in plans.
    shares = rng.lognormal(0.0, 1.0, len(widths))
    return [round(sum(widths) * share) for share in shares / shares.sum()]


def _near_even_loads(widths: Widths, rng: Any) -> Widths:
    """Columns of ranks as if each received nearly as many ids, as with divided rows."""
    # Between half and all of the largest: ranges of rows have about even lookups.
    return [max(1, round(max(widths) * part)) for part in rng.uniform(0.5, 1, len(widths))]


def _equal_loads(widths: Widths, rng: Any) -> Widths:
    """Columns of ranks made equal, as an all-reduce sums one tensor on every rank."""
    # Unequal sizes would not be an all-reduce.
    return [max(widths)] * len(widths)


# Without such shares, too few samples would cover divided rows and data-parallel tables.
COLLECTIVES: Mapping[str, Collective] = {
    row.name: row
    for row in (
        Collective(
            "all_to_all",
            "all-to-all",
            ("forward", "backward"),
            "all_to_all",
            DrawRule(0.2, scope="cross", scope_share=0.4),
            # Nothing stands in for it: it is the stand-in for others.
            like="",
            cast=True,
            memory=_ALL_TO_ALL,
            memory_of_sequences=_SEQUENCES,
        ),
        # Backward it is an all-gather.
        Collective(
            "reduce_scatter",
            "reduce-scatter",
            ("forward", "backward"),
            "reduce_scatter",
            DrawRule(0.5, scope="host", scope_share=0.5),
            ring=True,
            cast=True,
            memory=_REDUCE_SCATTER,
            memory_with_another=_WITHIN_AND_ACROSS,
        ),
        Collective(
            "all_reduce",
            "all-reduce",
            ("backward",),
            # DDP reduces the same tensor on every rank, so drawn widths are made equal.
            "all_reduce",
            DrawRule(0.3, loads=_equal_loads),
            ring=True,
            # A ring all-reduce is a reduce-scatter and an all-gather, each of which passes all bytes.
            passes=2,
            dense=True,
            memory=_REPLICAS,
        ),
        Collective(
            "all_to_all_ids",
            "all-to-all of ids",
            ("forward",),
            "ids",
            DrawRule(0.1, stream=5, loads=_skewed_loads),
            # How much will come, lengths, then ids (KJTAllToAll).
            exchanges=3,
            ids=True,
        ),
        Collective(
            "all_to_all_ids_bucketized",
            "all-to-all of ids, bucketized",
            ("forward",),
            "ids",
            DrawRule(0.07, stream=8, loads=_near_even_loads),
            # It travels as plain ids do, so it has their rates and adds its own work.
            like="all_to_all_ids",
            exchanges=3,
            ids=True,
            work=IdWork("bucketize_ids", lambda transfer: transfer.bucketize_by_rank(), buckets=True),
        ),
    )
}
"""By name. The first is the stand-in for all that were not measured."""


def carried_payload(collective: Collective, direction: str, payload: str) -> str:
    """The payload type that a collective carries in a direction, in a job that asks for `payload`.

    TorchRec substitutes those that do not sum (get_qcomm_codecs_registry in its fbgemm_qcomm_codec.py).
    """
    if not collective.cast:
        return "fp32"
    summed = payload_by_name(payload).summed if collective.ring else None
    return summed[direction == "backward"] if summed else payload


def collective_by_name(name: str) -> Collective:
    """The definition of a collective. Raises ShardCoreError for an unknown name."""
    if name not in COLLECTIVES:
        raise ShardCoreError(f"collective {name!r} is not known; known are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]
