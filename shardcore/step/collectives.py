"""The collectives of a training step. One row of COLLECTIVES defines each.

Cost models, draws, measurements, replays and reports read these rows and name none of them.
To add a collective, add a row, and let a kind of sharding use it (kinds.LAYOUTS).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import MEASURED, payload_of
from shardcore.step.memory_timeline import Alive, StageBuffers, Stages, stage_buffers

Widths = Sequence[int]
"""Columns of each rank."""


@dataclass(frozen=True)
class Draw:
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
    ways: its directions, in the order in which they run: "forward", "backward", or both.
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
    memory: (names of a run's channels, this first) -> buffers of the run in each stage (memory_timeline.py).
      None: ids, which are there in all phases.
    memory_of_sequences: the same of tables whose lookups are not pooled. None: the same.
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
    work: IdWork | None = None
    memory: Callable[..., Stages] | None = None
    memory_of_sequences: Callable[..., Stages] | None = None

    @property
    def payloads(self) -> tuple[str, ...]:
        """Payload types that a collective is measured with."""
        return MEASURED if self.cast else ("fp32",)


# --- memory -------------------------------------------------------------------------------------------------


def _output_buffers(*buffers: str) -> Alive:
    # A Counter, as a buffer may be alive twice in a phase.
    return {"outputs": Counter(buffers)}


def _payload_buffers(*buffers: str) -> dict[str, Counter[str]]:
    return {"payloads": Counter(buffers)}


def _gradient_buffers(*buffers: str) -> dict[str, Counter[str]]:
    return {"output gradients": Counter(buffers)}


_RECEIVED: Alive = {"received outputs": {"local": 1}}


def _lookup_stage(entering: str, sent: Alive, **phases: Alive) -> StageBuffers:
    """Buffers of the stage that looks up rows and sends outputs. Outputs stay until the next op looked up."""
    return stage_buffers(
        after=sent, freed_late=_output_buffers(entering), looked_up=_output_buffers(entering), **phases
    )


def _wait_stage(sent: Alive) -> StageBuffers:
    """Buffers of the stage that waits for outputs, and puts them together in the order of columns."""
    return stage_buffers(
        sent, _RECEIVED, outputs_arrive={**_RECEIVED, **_payload_buffers("local there", "local decoded")}
    )


def _send_gradients_stage(payloads: Alive, **phases: Alive) -> StageBuffers:
    """Buffers of the stage that sends gradients of outputs back."""
    return stage_buffers(_gradient_buffers("gradient"), payloads, **phases)


def _exchange_gradients_stage(channel: str) -> StageBuffers:
    """Buffers of the stage that orders, casts and exchanges gradients of outputs."""
    sent = _payload_buffers("local back", f"{channel} back")
    return _send_gradients_stage(
        sent,
        gradients_of_columns=_gradient_buffers("gradient", "cut"),
        gradients_in_order={**_gradient_buffers("uncut", "joined"), **_payload_buffers("local", "local")},
        gradients_cast={
            **_gradient_buffers("uncut", "cut"),
            **_payload_buffers("local", "local clamped", "local recast"),
        },
        backward_exchange={**_gradient_buffers("uncut", "cut"), **sent},
    )


def _update_stage(sent: Alive, channel: str, **phases: Alive) -> StageBuffers:
    """Buffers of the stage that receives gradients and updates rows."""
    return stage_buffers(
        sent,
        **phases,
        gradients_arrive={**_gradient_buffers(f"{channel} decoded"), **_payload_buffers(f"{channel} back")},
        update={**_gradient_buffers(channel), "sorting": {"sorting": 1}},
    )


def _all_to_all_stages(channel: str) -> Stages:
    # What travels lives until it is waited for: this device's outputs, and those that it receives.
    """Memory buffers of an op whose outputs travel in an all-to-all, in each stage of a step."""
    sent, outputs = _payload_buffers(f"{channel} there", "local there"), _output_buffers(channel)
    return (
        _lookup_stage(
            channel,
            sent,
            # A codec clamps FP32 values to the range of the payload before it casts them.
            outputs_cast={**outputs, **_payload_buffers(f"{channel} cast", f"{channel} clamped")},
            # Once cast, the clamped copy is freed, and buffers of the exchange exist.
            outputs_sent={
                **outputs,
                **_payload_buffers(f"{channel} cast", f"{channel} there", "local there"),
            },
        ),
        _wait_stage(sent),
        # Backward, gradients of local outputs leave, and those of the channel arrive.
        _exchange_gradients_stage(channel),
        _update_stage(_payload_buffers("local back", f"{channel} back"), channel),
    )


def _sequence_stages(channel: str) -> Stages:
    """Memory buffers of an op with unpooled outputs, in each stage of a step."""
    sent, outputs = _payload_buffers(f"{channel} there", "local there"), _output_buffers(channel)
    sent_back = _payload_buffers("local back", f"{channel} back")
    return (
        _lookup_stage(
            channel,
            sent,
            # A second copy of all lookups, while they are put in order.
            outputs_in_order=_output_buffers(channel, channel),
            outputs_cast={
                **outputs,
                **_payload_buffers(f"{channel} clamped", f"{channel} clamped", f"{channel} cast"),
            },
            outputs_sent={**outputs, **sent},
        ),
        _wait_stage(sent),
        # Those of features are joined, and sent as they are.
        _send_gradients_stage(
            sent_back,
            gradients_joined=_gradient_buffers("gradient", "local"),
            gradients_cast={
                **_gradient_buffers("local"),
                **_payload_buffers("local clamped", "local recast"),
            },
            backward_exchange={
                **_gradient_buffers("local"),
                **_payload_buffers("local recast", f"{channel} back"),
            },
        ),
        _update_stage(sent_back, channel, gradients_in_order=_gradient_buffers(channel, channel)),
    )


def _reduce_scatter_stages(channel: str, *crossing: str) -> Stages:
    """Memory buffers of an op whose outputs are summed by a reduce-scatter, in each stage of a step."""
    if crossing:
        return _hierarchical_stages(channel, *crossing)
    # Forward: each device enters outputs of the global batch, and receives sums for its samples.
    sent, outputs = _payload_buffers(f"{channel} there", "local there"), _output_buffers(channel)
    # The all-gather holds its output and gloo's own buffer: twice the channel's bytes.
    gathered = _payload_buffers("local copied", f"{channel} back", f"{channel} back")
    return (
        _lookup_stage(
            channel,
            sent,
            sums_cast={**outputs, **_payload_buffers(f"{channel} cast", f"{channel} clamped")},
            sums_sent={**outputs, **_payload_buffers(f"{channel} cast", f"{channel} there", "local there")},
        ),
        _wait_stage(sent),
        _send_gradients_stage(gathered, gradients_gathered={**_gradient_buffers("gradient"), **gathered}),
        _update_stage(gathered, channel),
    )


def _hierarchical_stages(channel: str, crossing: str) -> Stages:
    """Memory buffers of an op whose outputs are summed within hosts, then exchanged across hosts, in each stage of a
    step.
    """
    sent, outputs = _payload_buffers(f"{crossing} there", "local there"), _output_buffers(channel)
    cast, gathered = f"{channel} cast", f"{channel} back"
    return (
        _lookup_stage(
            # After the sum within the host, only the sums are left to cross hosts.
            channel,
            sent,
            sums_of_hosts_cast={**outputs, **_payload_buffers(cast, f"{channel} clamped")},
            sums_of_hosts_sent={**outputs, **_payload_buffers(cast, f"{channel} there", f"{crossing} there")},
            # Gloo's thread may still have its buffer of sums.
            sums_of_hosts_cross={
                **_output_buffers(channel, crossing),
                **_payload_buffers(
                    f"{channel} there", f"{crossing} cast", f"{crossing} there", "local there"
                ),
            },
        ),
        _wait_stage(sent),
        # Backward, hosts exchange first, as forward they do last.
        _exchange_gradients_stage(crossing),
        _update_stage(
            _payload_buffers("local back", f"{crossing} back"),
            channel,
            # Each device then gathers from its host what the reduce-scatter had divided.
            gradients_gathered={
                **_gradient_buffers(crossing),
                **_payload_buffers(f"{crossing} recast", gathered, gathered),
            },
        ),
    )


def _replica_stages(channel: str) -> Stages:
    """Memory buffers of an op of replicated tables, in each stage of a step, with gradients beside DDP's buckets.

    Until then, those of its outputs live. Those of the collection include them.
    """
    gradients = _gradient_buffers("gradient")
    return (
        # Lookups are local, so outputs exist at once and nothing is waited for.
        stage_buffers(after=_output_buffers("local"), looked_up=_output_buffers("local")),
        stage_buffers(_output_buffers("local"), _RECEIVED),
        stage_buffers(gradients, gradients),
        # The dense kernel makes a gradient in addition to DDP's bucket, which is always there.
        stage_buffers(gradients, gradients_of_replicas={**gradients, "dense gradients": {"dense": 1}}),
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
            Draw(0.2, scope="cross", scope_share=0.4),
            # Nothing stands in for it: it is the stand-in for others.
            like="",
            cast=True,
            memory=_all_to_all_stages,
            memory_of_sequences=_sequence_stages,
        ),
        # Backward it is an all-gather.
        Collective(
            "reduce_scatter",
            "reduce-scatter",
            ("forward", "backward"),
            "reduce_scatter",
            Draw(0.5, scope="host", scope_share=0.5),
            ring=True,
            cast=True,
            memory=_reduce_scatter_stages,
        ),
        Collective(
            "all_reduce",
            "all-reduce",
            ("backward",),
            # DDP reduces the same tensor on every rank, so drawn widths are made equal.
            "all_reduce",
            Draw(0.3, loads=_equal_loads),
            ring=True,
            # A ring all-reduce is a reduce-scatter and an all-gather, each of which passes all bytes.
            passes=2,
            dense=True,
            memory=_replica_stages,
        ),
        Collective(
            "all_to_all_ids",
            "all-to-all of ids",
            ("forward",),
            "ids",
            Draw(0.1, stream=5, loads=_skewed_loads),
            # How much will come, lengths, then ids (KJTAllToAll).
            exchanges=3,
            ids=True,
        ),
        Collective(
            "all_to_all_ids_bucketized",
            "all-to-all of ids, bucketized",
            ("forward",),
            "ids",
            Draw(0.07, stream=8, loads=_near_even_loads),
            # It travels as plain ids do, so it has their rates and adds its own work.
            like="all_to_all_ids",
            exchanges=3,
            ids=True,
            work=IdWork("bucketize_ids", lambda transfer: transfer.bucketize_by_rank(), buckets=True),
        ),
    )
}
"""By name. The first is the stand-in for all that were not measured."""


def carried_payload(row: Collective, way: str, payload: str) -> str:
    """The payload type that a collective carries in a direction, in a job that asks for `payload`.

    TorchRec substitutes those that do not sum (get_qcomm_codecs_registry in its fbgemm_qcomm_codec.py).
    """
    if not row.cast:
        return "fp32"
    summed = payload_of(payload).summed if row.ring else None
    return summed[way == "backward"] if summed else payload


def collective_by_name(name: str) -> Collective:
    """The definition of a collective. Raises ShardCoreError for an unknown name."""
    if name not in COLLECTIVES:
        raise ShardCoreError(f"collective {name!r} is not known; known are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]


@cache
def memory_stages(collective: str, channels: tuple[str, ...], sequence: bool) -> Stages:
    """Memory buffers of an op and its collectives in the four stages of a step. Cached, so equal arguments give one
    object.

    channels: names of all that the run has. The first is of this collective.
    """
    row = collective_by_name(collective)
    # Sequences differ only for the all-to-all. Replicas have the same buffers for both.
    memory = row.memory_of_sequences if sequence and row.memory_of_sequences else row.memory
    if memory is None:
        raise ShardCoreError(f"collective {collective!r} carries ids; it has no memory in stages")
    return memory(*channels)
