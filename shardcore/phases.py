"""What of a device's memory is alive in each phase of a training step, as TorchRec runs it.

Read from the live tensors of TorchRec's CPU processes (bench/memory.py), and from its comm_ops.py. Gloo
gathers in a buffer of its own, which its thread frees when it is done. It counts until it is waited for.

A run is a kind's op and exchange (`layouts.run_of`). TorchRec runs them in the order of the first table of
each, in four stages. Each run has a turn in each stage:

1. It looks up, and sends outputs.
2. It waits for outputs.
3. Autograd goes back from the last run to the first: each sends gradients.
4. Again so: each waits for gradients, and updates its rows.

So in a turn, some runs had theirs and others did not. What they hold then is in RUNS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BATCHES = 3
"""Local batches that TrainPipelineSparseDist holds: in compute, in input distribution, being copied."""

IDS_ALIVE = 2
"""Batches whose ids are in the order of the plan, in buckets and on their devices at once."""

Alive = Mapping[str, Mapping[str, int]]
"""part -> amount -> how many of it are alive."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A run's turn in a stage.

    before: what of the run is alive until its turn, from the start of the stage.
    phases: what is in each phase of its turn.
    lingers: what is, besides what follows, in the first phase of the next run's turn.
    after: what is until the end of the stage.
    """

    before: Alive
    phases: Mapping[str, Alive]
    lingers: Alive
    after: Alive


def _turn(before: Alive | None = None, after: Alive | None = None, lingers: Alive | None = None,
          **phases: Alive) -> Turn:
    return Turn(before or {}, {name.replace("_", " "): alive for name, alive in phases.items()},
                lingers or {}, after or {})


def _outputs(*amounts: str) -> Alive:
    return {"outputs": Counter(amounts)}


def _payloads(*amounts: str) -> dict[str, Counter[str]]:
    return {"payloads": Counter(amounts)}


def _gradients(*amounts: str) -> dict[str, Counter[str]]:
    return {"output gradients": Counter(amounts)}


_EXCHANGED, _CROSSED = "all_to_all world", "all_to_all cross"
_SUMMED, _SUMMED_ON_HOST = "reduce_scatter world", "reduce_scatter host"
_IDLE: Alive = {"ids": {"batch": BATCHES, **dict.fromkeys(("permuted", "bucketized", "arrived"), IDS_ALIVE)},
                "dense gradients": {"dense": 1}}
"""Of a run whenever it is nothing else: ids, and DDP's buckets."""


def _looked_up(entering: str, sent: Alive, **phases: Alive) -> Turn:
    """Outputs are there until the next run looked up."""
    return _turn(after=sent, lingers=_outputs(entering), looked_up=_outputs(entering), **phases)


def _awaited(sent: Alive) -> Turn:
    """Outputs arrive, and are put together, in the order of columns."""
    received = {"received outputs": {"local": 1}}
    return _turn(sent, received, outputs_arrive={**received, **_payloads("local there", "local decoded")})


def _sent_back(payloads: Alive, **phases: Alive) -> Turn:
    return _turn(_gradients("gradient"), payloads, **phases)


def _exchanged_back(channel: str) -> Turn:
    """Gradients are put in the order of devices, and of columns if some are cut, cast, and exchanged."""
    sent = _payloads("local back", f"{channel} back")
    return _sent_back(sent, gradients_of_columns=_gradients("gradient", "cut"),
                      gradients_in_order={**_gradients("uncut", "joined"), **_payloads("local", "local")},
                      gradients_cast={**_gradients("uncut", "cut"),
                                      **_payloads("local", "local clamped", "local recast")},
                      backward_exchange={**_gradients("uncut", "cut"), **sent})


def _updated(sent: Alive, channel: str, **phases: Alive) -> Turn:
    return _turn(sent, **phases,
                 gradients_arrive={**_gradients(f"{channel} decoded"), **_payloads(f"{channel} back")},
                 update={**_gradients(channel), "sorting": {"sorting": 1}})


def _exchanged() -> tuple[Turn, ...]:
    sent = _payloads(f"{_EXCHANGED} there", "local there")
    outputs, cast = _outputs(_EXCHANGED), f"{_EXCHANGED} cast"
    return (_looked_up(_EXCHANGED, sent,
                       outputs_cast={**outputs, **_payloads(cast, f"{_EXCHANGED} clamped")},
                       outputs_sent={**outputs, **_payloads(cast, f"{_EXCHANGED} there", "local there")}),
            _awaited(sent), _exchanged_back(_EXCHANGED),
            _updated(_payloads("local back", f"{_EXCHANGED} back"), _EXCHANGED))


def _sequences() -> tuple[Turn, ...]:
    """Lookups of all devices are put in order, and are not copied once more to be sent."""
    sent, outputs = _payloads(f"{_EXCHANGED} there", "local there"), _outputs(_EXCHANGED)
    sent_back = _payloads("local back", f"{_EXCHANGED} back")
    return (_looked_up(_EXCHANGED, sent,
                       outputs_in_order=_outputs(_EXCHANGED, _EXCHANGED),
                       outputs_cast={**outputs, **_payloads(f"{_EXCHANGED} clamped", f"{_EXCHANGED} clamped",
                                                            f"{_EXCHANGED} cast")},
                       outputs_sent={**outputs, **sent}),
            _awaited(sent),
            # Those of features are joined, and sent as they are.
            _sent_back(sent_back, gradients_joined=_gradients("gradient", "local"),
                       gradients_cast={**_gradients("local"), **_payloads("local clamped", "local recast")},
                       backward_exchange={**_gradients("local"),
                                          **_payloads("local recast", f"{_EXCHANGED} back")}),
            _updated(sent_back, _EXCHANGED, gradients_in_order=_gradients(_EXCHANGED, _EXCHANGED)))


def _summed() -> tuple[Turn, ...]:
    """Gloo sums in a buffer of its own, and gathers in one."""
    sent, outputs = _payloads(f"{_SUMMED} there", "local there"), _outputs(_SUMMED)
    gathered = _payloads("local copied", f"{_SUMMED} back", f"{_SUMMED} back")
    return (_looked_up(_SUMMED, sent,
                       sums_cast={**outputs, **_payloads(f"{_SUMMED} cast", f"{_SUMMED} clamped")},
                       sums_sent={**outputs, **_payloads(f"{_SUMMED} cast", f"{_SUMMED} there",
                                                         "local there")}),
            _awaited(sent), _sent_back(gathered, gradients_gathered={**_gradients("gradient"), **gathered}),
            _updated(gathered, _SUMMED))


def _summed_on_hosts() -> tuple[Turn, ...]:
    """Summed within hosts, and waited for. Then exchanged across them."""
    sent, outputs = _payloads(f"{_CROSSED} there", "local there"), _outputs(_SUMMED_ON_HOST)
    cast, gathered = f"{_SUMMED_ON_HOST} cast", f"{_SUMMED_ON_HOST} back"
    return (_looked_up(_SUMMED_ON_HOST, sent,
                       sums_of_hosts_cast={**outputs, **_payloads(cast, f"{_SUMMED_ON_HOST} clamped")},
                       sums_of_hosts_sent={**outputs, **_payloads(cast, f"{_SUMMED_ON_HOST} there",
                                                                  f"{_CROSSED} there")},
                       # Gloo's thread may still have its buffer of sums.
                       sums_of_hosts_cross={**_outputs(_SUMMED_ON_HOST, _CROSSED),
                                            **_payloads(f"{_SUMMED_ON_HOST} there", f"{_CROSSED} cast",
                                                        f"{_CROSSED} there", "local there")}),
            _awaited(sent), _exchanged_back(_CROSSED),
            _updated(_payloads("local back", f"{_CROSSED} back"), _SUMMED_ON_HOST,
                     gradients_gathered={**_gradients(_CROSSED),
                                         **_payloads(f"{_CROSSED} recast", gathered, gathered)}))


def _replicated() -> tuple[Turn, ...]:
    """The dense kernel makes gradients of its own, beside DDP's buckets.

    Until then, those of its outputs live. They are a part of those of the collection.
    """
    received, gradients = {"received outputs": {"local": 1}}, _gradients("gradient")
    return (_turn(after=_outputs("local"), looked_up=_outputs("local")), _turn(_outputs("local"), received),
            _turn(gradients, gradients),
            _turn(gradients, gradients_of_replicas={**gradients, "dense gradients": {"dense": 1}}))


RUNS: Mapping[tuple[str, ...], tuple[Turn, ...]] = {
    (_EXCHANGED,): _exchanged(), (_EXCHANGED, "sequence"): _sequences(), (_SUMMED,): _summed(),
    (_SUMMED_ON_HOST, _CROSSED): _summed_on_hosts(), ("all_reduce world",): _replicated()}
"""What is alive of a run, by its channels: in each stage. Besides, what _IDLE says.

Amounts of a run on a device:

- arrived: the ids of a global batch that it gets.
- a collective and its group: the outputs that enter it. There, back: as they travel, and their gradients.
- cast, clamped: what TorchRec's codec makes of them, in the number type that travels and before. 0 for FP32.
  decoded, recast: the same of what comes back: FP32, and in the type that travels.
- sorting: what backward sorts.
- dense: a replica's gradient.

Amounts of a run's part of a local batch. A plan decides them, and they are the same on all devices:

- permuted: its ids in the order of the plan. Those of a table cut by columns are in it several times. A batch
  whose features are in that order already is not copied; it counts as if, for its order is not known.
- bucketized: its ids of tables whose rows are divided. Of sequences, also where each id was.
- local: its outputs. There, back, cast, clamped, decoded, recast: as above.
- copied: as they travel back, if they are not the whole of a tensor.
- together: as local, if outputs of several runs are joined to one tensor.
- joined: as local, if columns of tables, or outputs of several runs, have to be joined.
- cut: as local, if columns of tables have to be.
- gradient: of all outputs of its collection, if this run is the last that needs it. Uncut: the same, if none
  of its columns are cut. Else they are copied before.

Others: batch, the ids of a local batch, and stepped, what the dense optimizer makes to update the largest
replica. They count for the first run.
"""


def run_key(channels: Sequence[str], sequence: bool) -> tuple[str, ...]:
    """The key in RUNS. Replicas run sequences as they do others."""
    key = (*channels, "sequence") if sequence else tuple(channels)
    return key if key in RUNS else tuple(channels)


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase of a step. alive: (part, run, amount) -> how many are alive. Runs by their number."""

    name: str
    alive: Mapping[tuple[str, int, str], int]


def _sum(each: Iterable[tuple[int, Alive]]) -> dict[tuple[str, int, str], int]:
    found: Counter[tuple[str, int, str]] = Counter()
    for run, alive in each:
        for part, amounts in alive.items():
            for amount, n in amounts.items():
                found[part, run, amount] += n
    return found


@lru_cache(maxsize=256)
def phases_of(keys: tuple[tuple[str, ...], ...]) -> tuple[Phase, ...]:
    """The phases of a step with these runs, in the order of TorchRec."""
    runs = range(len(keys))
    idle = [(run, _IDLE) for run in runs]
    # The last batch's ids live until the next lookup. The new ones are permuted on arrival.
    found = [Phase("ids arrive", _sum([*idle, *((run, {"ids": {"arrived": 1}}) for run in runs)]))]
    for stage in range(4):
        turns = [RUNS[key][stage] for key in keys]
        held, lingering = [turn.before for turn in turns], []
        if stage == 2:  # outputs in one tensor, and its gradient
            received = [*idle, *((run, {"received outputs": {"local": 1}}) for run in runs)]
            found += [Phase("outputs joined", _sum([*received, *(
                          (run, {"received outputs": {"together": 1}}) for run in runs)])),
                      Phase("dense part", _sum([*received, *enumerate(held)]))]
        for run in reversed(runs) if stage > 1 else runs:
            held[run] = {}
            for name, alive in turns[run].phases.items():
                found.append(Phase(name, _sum([*idle, *enumerate(held), *lingering, (run, alive)])))
                lingering = []
            held[run], lingering = turns[run].after, [(run, turns[run].lingers)]
    # A dense optimizer updates one table after another. Gradients are in DDP's buckets only.
    return (*found, Phase("dense update", _sum([*idle, (0, {"dense gradients": {"stepped": 1}})])))


@lru_cache(maxsize=256)
def times_of(keys: tuple[tuple[str, ...], ...]) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """(run, amount) that count, and [amounts, phases] how many are alive, all parts together."""
    found = phases_of(keys)
    amounts = tuple(dict.fromkeys((run, amount) for phase in found for _, run, amount in phase.alive))
    rows, times = {amount: row for row, amount in enumerate(amounts)}, np.zeros((len(amounts), len(found)))
    for column, phase in enumerate(found):
        for (_, run, amount), n in phase.alive.items():
            times[rows[run, amount], column] += n
    return amounts, times


@lru_cache(maxsize=256)
def needed_times(keys: tuple[tuple[str, ...], ...]) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """`times_of` without phases in which nothing is alive that is not in another, too."""
    amounts, times = times_of(keys)
    times = np.unique(times, axis=1)
    less = (times[:, :, None] <= times[:, None, :]).all(0)
    return amounts, times[:, less.sum(1) == 1]
