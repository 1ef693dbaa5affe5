"""What one rank sends and receives in a collective.

Payloads of 16 bits are cast as in TorchRec's quantised communication: FP32 tensors are encoded before and
decoded after the collective, inside the timed part, for a step pays for both. Gloo sums FP16 and BF16 (seen
with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardcore.fused import PRECISIONS
from shardcore.layouts import BUCKETIZED_IDS
from shardcore.measure import all_to_all
from shardcore.measure.id_transfer import IdTransfer, features_and_ids
from shardcore.measurements import CollectiveRequest
from shardcore.types import OF_IDS

Collective = Callable[[torch.Tensor, torch.Tensor], Any]
"""Called with the tensor to fill and the one to send."""


def carried(into: torch.Tensor, source: torch.Tensor, payload: str, collective: Collective) -> torch.Tensor:
    """`into`, FP32, filled by a collective from FP32 `source`, with casts to the payload and back."""
    dtype = getattr(torch, PRECISIONS[payload].torch)
    if source.dtype == dtype:
        collective(into, source)
        return into
    sent = source.to(dtype)
    arrived = sent if into is source else torch.empty_like(into, dtype=dtype)
    collective(arrived, sent)
    return into.copy_(arrived)


@dataclass(frozen=True, eq=False)
class Transfer:
    """One collective, over and over, from FP32 `source` to FP32 `into`, both flat."""

    collective: Collective
    source: torch.Tensor
    into: torch.Tensor
    payload: str = "fp32"

    @property
    def parts(self) -> tuple[tuple[Callable[[], None], bool], ...]:
        """As IdTransfer's. Casts count with the collective."""
        return ((self.run, False),)

    def run(self) -> None:
        carried(self.into, self.source, self.payload, self.collective)


def transfers(request: CollectiveRequest, rank: int, device: torch.device | str = "cpu",
              group: dist.ProcessGroup | None = None
              ) -> tuple[Transfer | IdTransfer | None, Transfer | None]:
    """What `rank` does of a request forward and backward (None: nothing), over buffers of its own that hold
    zeros. group: torch's name for the ranks of its group; None: all."""
    def both(outputs: int, arrived: int, forward: Collective,
             backward: Collective) -> tuple[Transfer, Transfer]:
        there, here = _filled(outputs, device), _filled(arrived, device)
        return (Transfer(forward, there, here, request.payload),
                Transfer(backward, here, there, request.payload))

    widths = [request.widths[r] for r in next(ranks for ranks in request.groups if rank in ranks)]
    ranks, batch, width = len(widths), request.batch, max(widths)
    local = batch // ranks
    if request.collective == "all_to_all":
        mine, theirs = [local * request.widths[rank]] * ranks, [local * w for w in widths]
        return both(sum(mine), sum(theirs),
                    lambda into, source: all_to_all.run(into, source, theirs, mine, group),
                    lambda into, source: all_to_all.run(into, source, mine, theirs, group))
    if request.collective == "reduce_scatter":
        return both(batch * width, local * width, partial(reduce_scatter, group=group),
                    partial(all_gather, group=group))
    if request.collective in OF_IDS:
        groups = [range(ranks)] if request.collective == BUCKETIZED_IDS.collective else []
        return IdTransfer(*features_and_ids(request), local, rank, device, groups=groups), None
    dense = _filled(batch * width, device)
    return None, Transfer(lambda into, source: dist.all_reduce(into, group=group), dense, dense,
                          request.payload)


def _filled(elements: int, device: torch.device | str) -> torch.Tensor:
    """Zeros, which stay finite however often they are summed; written, for memory that was only reserved
    reads faster."""
    return torch.empty(elements, device=device).fill_(0.0)


def reduce_scatter(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    # torch 2.13 renames it
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(into, source, group=group)


def all_gather(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(into, source, group=group)
