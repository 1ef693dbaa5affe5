"""What of a device's memory is alive in each phase of a training step, as TorchRec runs it.

Read from the live tensors of TorchRec's CPU processes (bench/memory.py), and from its comm_ops.py. Gloo has
buffers of its own, which its threads free sooner or later. They count for as long as they may be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

BATCHES = 3
"""Local batches that TrainPipelineSparseDist holds: in compute, in input distribution, being copied."""

_Alive = Mapping[str, Mapping[str, int]]
"""part -> amount -> how many of it are alive."""
EXCHANGED, _SUMMED = "all_to_all world", "reduce_scatter world"
_CROSSED, _SUMMED_ON_HOST = "all_to_all cross", "reduce_scatter host"
_IDS = {"batch": BATCHES, "permuted": 2, "bucketized": 2, "arrived": 2}
_DENSE = {"dense": 1}


def _of(what: str, *collectives: str) -> dict[str, int]:
    return {f"{collective} {what}": 1 for collective in collectives}


_SENT = {**_of("there", EXCHANGED, _CROSSED), "arriving": 1}
"""All-to-alls that are under way."""
_BEING_SUMMED = {**_of("there", _SUMMED), "scattered there": 1}
"""Reduce-scatters that are under way. Gloo sums in a buffer of its own."""
_GATHERED = {f"{_SUMMED} back": 2, "scattered back": 1}
"""All-gathers of gradients that are under way. Gloo gathers in a buffer of its own."""
_SENT_BACK = {**_of("back", EXCHANGED, _CROSSED), "ordered back": 1}
"""All-to-alls of gradients that are under way."""


def _backward(payloads: Mapping[str, int], **gradients: int) -> _Alive:
    return {"ids": _IDS, "output gradients": {"received": 1, **gradients}, "payloads": payloads,
            "dense gradients": _DENSE}


def _forward(outputs: Mapping[str, int], payloads: Mapping[str, int]) -> _Alive:
    return {"ids": _IDS, "outputs": {"replicated": 1, **outputs}, "payloads": payloads,
            "dense gradients": _DENSE}


PHASES: Mapping[str, _Alive] = {
    # The last batch's ids live until the next lookup. The new ones are permuted on arrival.
    "ids arrive": {"ids": {**_IDS, "arrived": 3}, "dense gradients": _DENSE},
    # Kinds run one after another: each looks up, casts to what travels, and sends. Any may be the last.
    "outputs sent": _forward({EXCHANGED: 1}, {**_SENT, **_BEING_SUMMED, **_of("cast", EXCHANGED)}),
    "outputs cast": _forward({EXCHANGED: 1}, {**_BEING_SUMMED, **_of("cast", EXCHANGED),
                                              **_of("clamped", EXCHANGED)}),
    "sums sent": _forward({_SUMMED: 1}, {**_SENT, **_BEING_SUMMED, **_of("cast", _SUMMED)}),
    "sums cast": _forward({_SUMMED: 1}, {**_SENT, **_of("cast", _SUMMED), **_of("clamped", _SUMMED)}),
    "sums of hosts sent": _forward({_SUMMED_ON_HOST: 1, _CROSSED: 1},
                                   {**_SENT, **_BEING_SUMMED, **_of("there", _SUMMED_ON_HOST),
                                    **_of("cast", _CROSSED)}),
    "sums of hosts cast": _forward({_SUMMED_ON_HOST: 1}, {**_of("there", EXCHANGED), **_BEING_SUMMED,
                                                          **_of("cast", _SUMMED_ON_HOST),
                                                          **_of("clamped", _SUMMED_ON_HOST)}),
    "outputs joined": {"ids": _IDS, "outputs": {"replicated": 1, "ordered": 1, "scattered": 1},
                       "received outputs": {"received": 1}, "dense gradients": _DENSE},
    # Before an all-to-all, gradients are put in the order of devices, and of columns if some are cut.
    "gradients in order": _backward({"ordered": 2, "joined": 1, **_GATHERED}),
    "gradients cast": _backward({"ordered": 1, "cut": 1, "ordered clamped": 1, "ordered cast": 1,
                                 **_GATHERED}),
    "backward exchange": _backward({"cut": 1, **_SENT_BACK, **_GATHERED}),
    "gradients gathered": _backward({**_GATHERED, f"{_SUMMED_ON_HOST} back": 2}, **{_CROSSED: 1}),
    # The dense kernel makes gradients of its own, beside DDP's buckets. Exchanges are still under way.
    "gradients of replicas": {**_backward({**_SENT_BACK, **_GATHERED}), "dense gradients": {"dense": 2}},
    "update": {"ids": _IDS, "sorting": {"sorting": 1},
               "output gradients": {"received": 1, EXCHANGED: 1, _SUMMED: 1, _SUMMED_ON_HOST: 1},
               "dense gradients": {"dense": 2}},
    # A dense optimizer updates one table after another. Gradients are in DDP's buckets only.
    "dense update": {"ids": _IDS, "dense gradients": {"dense": 1, "stepped": 1}},
}
"""What of which amount is alive in each phase of a step.

Amounts of a shard:

- arrived: the ids of a global batch that it gets.
- a collective and its group: the outputs that enter it. There, back: as they travel, and their gradients.
- cast, clamped: what TorchRec's codec makes of them, in the number type that travels and before. 0 for FP32.
- sorting: what backward sorts.
- dense: a replica's gradient.

Amounts of a local batch. A plan as a whole decides them, and they are the same on all devices:

- batch: its ids.
- permuted: its ids in the order of the plan. Those of a table cut by columns are in it several times.
- bucketized: its ids of tables whose rows are divided.
- received: its outputs of all tables. replicated: of replicas.
- arriving: as they travel, those that come by all-to-all.
- ordered, scattered: outputs that come by all-to-all, and by reduce-scatter. There, back, cast, clamped: as
  above.
- joined: as ordered, if columns of tables, or outputs of several kinds, have to be joined.
- cut: as ordered, if columns of tables have to be.
- stepped: what the dense optimizer makes to update the largest replica.
"""
TIMES: Mapping[str, Mapping[str, int]] = {
    phase: sum((Counter(counts) for counts in alive.values()), Counter()) for phase, alive in PHASES.items()}
"""phase -> amount -> how many of it are alive, all parts together."""
