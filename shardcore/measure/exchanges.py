"""The exchanges of a replayed step: how a rank takes part in each channel of layouts, with buffers of its
own.

The channels of a run form a chain. Forward, what arrives over one is what enters the next; backward,
gradients go the other way. Gloo on CPU; NCCL has the same interface and has not been run here.

Shapes: n ranks of a group, B global batch, W columns of an op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from shardcore.core.topology import Topology
from shardcore.core.types import OUTPUT_BYTES
from shardcore.measure import all_to_all, own_core
from shardcore.measure.fused_op import even_parts
from shardcore.measure.transfers import all_gather, carried, reduce_scatter
from shardcore.step.kinds import Channel, Layout
from shardcore.step.lower import Workload
from shardcore.step.scopes import SCOPES, WORLD, groups_in
from shardcore.step.traffic import row_in

Full = Callable[[Sequence[int]], torch.Tensor]
"""Makes a buffer of some shape."""
Groups = Mapping[str, "tuple[Sequence[int], dist.ProcessGroup | None]"]
"""By scope: the ranks of the own group, and torch's name for it (None: all ranks)."""


class Exchange(Protocol):
    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        """What arrives, for what this rank enters (None: nothing)."""

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
        """The gradients of what it entered, in `into` where that has their shape. gradients: of what arrived
        (None: the dense part's)."""


def groups(rank: int, topology: Topology, channels: Sequence[Channel]) -> Groups:
    """The own groups for some channels. All ranks of the gang have to call this together, ranks being
    devices."""
    found: dict[str, tuple[Sequence[int], dist.ProcessGroup | None]] = {WORLD: (range(len(topology)), None)}
    for name in (n for n in SCOPES if n != WORLD and any(c.group == n for c in channels)):
        for ranks in map(sorted, groups_in(topology, name)):  # as torch numbers them
            made = dist.new_group(ranks)
            if rank in ranks:
                found[name] = ranks, made
    own_core.let_network_wait()
    return found


def used_channels(workload: Workload) -> list[Channel]:
    """Those that carry something."""
    several = len(workload.ops) > 1
    return list(
        dict.fromkeys(
            c for c, sent in zip(workload.channels, workload.traffic, strict=True) if several and sent.any()
        )
    )


def chains(workload: Workload, rank: int, full: Full, own_groups: Groups) -> dict[Layout, list[Exchange]]:
    """The exchanges of each run that carry something, in the order of runs."""
    # Gradients of all replicas are one exchange, of the first run that has any.
    job = workload.job
    of_rows = {
        tuple(row_in(lane, c) for c in run.channels_in(job)): run
        for run, lane in reversed(workload.lanes.items())
    }
    found = {
        run: rows
        for rows, run in of_rows.items()
        if len(workload.ops) > 1 and workload.traffic[list(rows)].any()
    }
    return {
        run: [
            _EXCHANGES[c.row.call](workload.traffic[row], workload, rank, full, own_groups[c.group])
            for c, row in zip(run.channels_in(job), found[run], strict=True)
        ]
        for run in workload.lanes
        if run in found
    }


def forward(chain: Sequence[Exchange], outputs: torch.Tensor | None) -> torch.Tensor | None:
    for exchange in chain:
        outputs = exchange.forward(outputs)
    return outputs


def backward(chain: Sequence[Exchange], into: torch.Tensor | None) -> None:
    gradients = None
    for i, exchange in reversed(list(enumerate(chain))):
        gradients = exchange.backward(gradients, None if i else into)


class _AllToAll:
    """Outputs [B, W] of each rank, or as many rows as an exchange before it left, to where their samples
    are; and rows of sequences, of which each rank asked for as many.

    A batch has more lookups or fewer, but as many bytes of sequences travel as the workload says. Across
    hosts, only what tower modules leave of outputs travels. These modules are not run.
    """

    def __init__(
        self,
        entering: np.ndarray,
        workload: Workload,
        rank: int,
        full: Full,
        group: tuple[Sequence[int], dist.ProcessGroup | None],
    ) -> None:
        ranks, self._group = group
        shares = [even_parts(round(entering[r] / OUTPUT_BYTES), len(ranks)) for r in ranks]
        self._mine, self._theirs = shares[ranks.index(rank)], [of[ranks.index(rank)] for of in shares]
        self._entered, self._sent = full((sum(self._mine),)), full((sum(self._theirs),))
        self._arrived, self._job = torch.empty_like(self._sent), workload.job

    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        send = partial(all_to_all.run, arriving=self._theirs, leaving=self._mine, group=self._group)
        return carried(self._arrived, _as_much(outputs, self._entered), self._job.forward_payload, send)

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
        send = partial(all_to_all.run, arriving=self._mine, leaving=self._theirs, group=self._group)
        return carried(
            _as_much(into, self._entered), _as_much(gradients, self._sent), self._job.backward_payload, send
        )


def _as_much(tensor: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """The first of a tensor's elements, flat, as many as travel. Where it has fewer, an own buffer."""
    return own if tensor is None or tensor.numel() < own.numel() else tensor.view(-1)[: own.numel()]


class _ReduceScatter:
    """Partial outputs [B, W] summed, each rank having its samples; and gradients to all. A rank with fewer
    columns pads, for every rank gives as much."""

    def __init__(
        self,
        entering: np.ndarray,
        workload: Workload,
        rank: int,
        full: Full,
        group: tuple[Sequence[int], dist.ProcessGroup | None],
    ) -> None:
        ranks, self._group = group
        # Of pooled outputs, each rank has as many samples. Of distinct values, it has about as many.
        most = -(-max(round(entering[r] / OUTPUT_BYTES) for r in ranks) // len(ranks))
        self._padded, self._sent = full((most * len(ranks),)), full((most,))
        self._arrived, self._job = torch.empty_like(self._sent), workload.job

    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        return carried(
            self._arrived,
            self._as_wide(outputs),
            self._job.forward_payload,
            partial(reduce_scatter, group=self._group),
        )

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
        back, own = self._as_wide(into), self._sent
        return carried(
            back, _as_much(gradients, own), self._job.backward_payload, partial(all_gather, group=self._group)
        )

    def _as_wide(self, tensor: torch.Tensor | None) -> torch.Tensor:
        return tensor.view(-1) if tensor is not None and tensor.numel() == len(self._padded) else self._padded


class _AllReduce:
    """Dense gradients summed, backward only."""

    def __init__(
        self,
        entering: np.ndarray,
        workload: Workload,
        rank: int,
        full: Full,
        group: tuple[Sequence[int], dist.ProcessGroup | None],
    ) -> None:
        self._dense, self._group = full((round(entering[rank] / OUTPUT_BYTES),)), group[1]

    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        return outputs

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
        dist.all_reduce(self._dense, group=self._group)
        return into


_EXCHANGES = {"all_to_all": _AllToAll, "reduce_scatter": _ReduceScatter, "all_reduce": _AllReduce}
