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
        """Payloads that it is measured with."""
        return MEASURED if self.cast else ("fp32",)


# --- memory -------------------------------------------------------------------------------------------------


def _outputs(*buffers: str) -> Alive:
    # A Counter, as a buffer may be alive twice in a phase.
    return {"outputs": Counter(buffers)}


def _payloads(*buffers: str) -> dict[str, Counter[str]]:
    return {"payloads": Counter(buffers)}


def _gradients(*buffers: str) -> dict[str, Counter[str]]:
    return {"output gradients": Counter(buffers)}


_RECEIVED: Alive = {"received outputs": {"local": 1}}


def _looked_up(entering: str, sent: Alive, **phases: Alive) -> StageBuffers:
    """Outputs are there until the next run looked up."""
    return stage_buffers(after=sent, freed_late=_outputs(entering), looked_up=_outputs(entering), **phases)


def _awaited(sent: Alive) -> StageBuffers:
    """Outputs arrive, and are put together, in the order of columns."""
    return stage_buffers(
        sent, _RECEIVED, outputs_arrive={**_RECEIVED, **_payloads("local there", "local decoded")}
    )


def _sent_back(payloads: Alive, **phases: Alive) -> StageBuffers:
    return stage_buffers(_gradients("gradient"), payloads, **phases)


def _exchanged_back(channel: str) -> StageBuffers:
    """Gradients are put in the order of devices, and of columns if some are cut, cast, and exchanged."""
    sent = _payloads("local back", f"{channel} back")
    return _sent_back(
        sent,
        gradients_of_columns=_gradients("gradient", "cut"),
        gradients_in_order={**_gradients("uncut", "joined"), **_payloads("local", "local")},
        gradients_cast={**_gradients("uncut", "cut"), **_payloads("local", "local clamped", "local recast")},
        backward_exchange={**_gradients("uncut", "cut"), **sent},
    )


def _updated(sent: Alive, channel: str, **phases: Alive) -> StageBuffers:
    return stage_buffers(
        sent,
        **phases,
        gradients_arrive={**_gradients(f"{channel} decoded"), **_payloads(f"{channel} back")},
        update={**_gradients(channel), "sorting": {"sorting": 1}},
    )


def _exchanged(channel: str) -> Stages:
    # What travels lives until it is waited for: this device's outputs, and those that it receives.
    sent, outputs = _payloads(f"{channel} there", "local there"), _outputs(channel)
    return (
        _looked_up(
            channel,
            sent,
            # A codec clamps FP32 values to the range of the payload before it casts them.
            outputs_cast={**outputs, **_payloads(f"{channel} cast", f"{channel} clamped")},
            # Once cast, the clamped copy is freed, and buffers of the exchange exist.
            outputs_sent={**outputs, **_payloads(f"{channel} cast", f"{channel} there", "local there")},
        ),
        _awaited(sent),
        # Backward, gradients of local outputs leave, and those of the channel arrive.
        _exchanged_back(channel),
        _updated(_payloads("local back", f"{channel} back"), channel),
    )


def _sequences(channel: str) -> Stages:
    """Lookups of all devices are put in order, and are not copied once more to be sent."""
    sent, outputs = _payloads(f"{channel} there", "local there"), _outputs(channel)
    sent_back = _payloads("local back", f"{channel} back")
    return (
        _looked_up(
            channel,
            sent,
            # A second copy of all lookups, while they are put in order.
            outputs_in_order=_outputs(channel, channel),
            outputs_cast={
                **outputs,
                **_payloads(f"{channel} clamped", f"{channel} clamped", f"{channel} cast"),
            },
            outputs_sent={**outputs, **sent},
        ),
        _awaited(sent),
        # Those of features are joined, and sent as they are.
        _sent_back(
            sent_back,
            gradients_joined=_gradients("gradient", "local"),
            gradients_cast={**_gradients("local"), **_payloads("local clamped", "local recast")},
            backward_exchange={**_gradients("local"), **_payloads("local recast", f"{channel} back")},
        ),
        _updated(sent_back, channel, gradients_in_order=_gradients(channel, channel)),
    )


def _summed(channel: str, *crossing: str) -> Stages:
    """Gloo sums in a separate buffer, and gathers in one."""
    if crossing:
        return _summed_and_exchanged(channel, *crossing)
    # Forward: each device enters outputs of the global batch, and receives sums for its samples.
    sent, outputs = _payloads(f"{channel} there", "local there"), _outputs(channel)
    # The all-gather holds its output and gloo's own buffer: twice the channel's bytes.
    gathered = _payloads("local copied", f"{channel} back", f"{channel} back")
    return (
        _looked_up(
            channel,
            sent,
            sums_cast={**outputs, **_payloads(f"{channel} cast", f"{channel} clamped")},
            sums_sent={**outputs, **_payloads(f"{channel} cast", f"{channel} there", "local there")},
        ),
        _awaited(sent),
        _sent_back(gathered, gradients_gathered={**_gradients("gradient"), **gathered}),
        _updated(gathered, channel),
    )


def _summed_and_exchanged(channel: str, crossing: str) -> Stages:
    """Summed within hosts, and waited for. Then exchanged across them."""
    sent, outputs = _payloads(f"{crossing} there", "local there"), _outputs(channel)
    cast, gathered = f"{channel} cast", f"{channel} back"
    return (
        _looked_up(
            # After the sum within the host, only the sums are left to cross hosts.
            channel,
            sent,
            sums_of_hosts_cast={**outputs, **_payloads(cast, f"{channel} clamped")},
            sums_of_hosts_sent={**outputs, **_payloads(cast, f"{channel} there", f"{crossing} there")},
            # Gloo's thread may still have its buffer of sums.
            sums_of_hosts_cross={
                **_outputs(channel, crossing),
                **_payloads(f"{channel} there", f"{crossing} cast", f"{crossing} there", "local there"),
            },
        ),
        _awaited(sent),
        # Backward, hosts exchange first, as forward they do last.
        _exchanged_back(crossing),
        _updated(
            _payloads("local back", f"{crossing} back"),
            channel,
            # Each device then gathers from its host what the reduce-scatter had divided.
            gradients_gathered={
                **_gradients(crossing),
                **_payloads(f"{crossing} recast", gathered, gathered),
            },
        ),
    )


def _replicated(channel: str) -> Stages:
    """The dense kernel makes gradients in addition to DDP's buckets.

    Until then, those of its outputs live. Those of the collection include them.
    """
    gradients = _gradients("gradient")
    return (
        # Lookups are local, so outputs exist at once and nothing is waited for.
        stage_buffers(after=_outputs("local"), looked_up=_outputs("local")),
        stage_buffers(_outputs("local"), _RECEIVED),
        stage_buffers(gradients, gradients),
        # The dense kernel makes a gradient in addition to DDP's bucket, which is always there.
        stage_buffers(gradients, gradients_of_replicas={**gradients, "dense gradients": {"dense": 1}}),
    )


# --- draws --------------------------------------------------------------------------------------------------


def _hot(widths: Widths, rng: Any) -> Widths:
    """A few hot tables have most lookups.

    So ranks that own equally many columns may receive a hundred times as many ids.
    """
    # Log-normal shares: few ranks have most ids, as hot tables make them in plans.
    shares = rng.lognormal(0.0, 1.0, len(widths))
    return [round(sum(widths) * share) for share in shares / shares.sum()]


def _near_even(widths: Widths, rng: Any) -> Widths:
    """Ranks that hold row ranges receive nearly as many ids each."""
    # Between half and all of the largest: ranges of rows have about even lookups.
    return [max(1, round(max(widths) * part)) for part in rng.uniform(0.5, 1, len(widths))]


def _same(widths: Widths, rng: Any) -> Widths:
    """An all-reduce sums the same tensor on every rank."""
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
            memory=_exchanged,
            memory_of_sequences=_sequences,
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
            memory=_summed,
        ),
        Collective(
            "all_reduce",
            "all-reduce",
            ("backward",),
            # DDP reduces the same tensor on every rank, so drawn widths are made equal.
            "all_reduce",
            Draw(0.3, loads=_same),
            ring=True,
            # A ring all-reduce is a reduce-scatter and an all-gather, each of which passes all bytes.
            passes=2,
            dense=True,
            memory=_replicated,
        ),
        Collective(
            "all_to_all_ids",
            "all-to-all of ids",
            ("forward",),
            "ids",
            Draw(0.1, stream=5, loads=_hot),
            # How much will come, lengths, then ids (KJTAllToAll).
            exchanges=3,
            ids=True,
        ),
        Collective(
            "all_to_all_ids_bucketized",
            "all-to-all of ids, bucketized",
            ("forward",),
            "ids",
            Draw(0.07, stream=8, loads=_near_even),
            # It travels as plain ids do, so it has their rates and adds its own work.
            like="all_to_all_ids",
            exchanges=3,
            ids=True,
            work=IdWork("bucketize_ids", lambda transfer: transfer.in_buckets(), buckets=True),
        ),
    )
}
"""By name. The first is the stand-in for all that were not measured."""


def carried_as(row: Collective, way: str, payload: str) -> str:
    """Payload that a collective carries in a direction, in a job with a payload.

    TorchRec substitutes those that do not sum (get_qcomm_codecs_registry in its fbgemm_qcomm_codec.py).
    """
    if not row.cast:
        return "fp32"
    summed = payload_of(payload).summed if row.ring else None
    return summed[way == "backward"] if summed else payload


def collective_of(name: str) -> Collective:
    """The row of a collective. Raises ShardCoreError for an unknown name."""
    if name not in COLLECTIVES:
        raise ShardCoreError(f"collective {name!r} is not known; known are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]


@cache
def stages_of(collective: str, channels: tuple[str, ...], sequence: bool) -> Stages:
    """The memory of a run in the four stages of a step. One object each, for phases are cached by it.

    channels: names of all that the run has. The first is of this collective.
    """
    row = collective_of(collective)
    # Sequences differ only for the all-to-all. Replicas have the same buffers for both.
    memory = row.memory_of_sequences if sequence and row.memory_of_sequences else row.memory
    if memory is None:
        raise ShardCoreError(f"collective {collective!r} carries ids; it has no memory in stages")
    return memory(*channels)
