"""What one rank sends and receives in a collective.

Payloads of 16 bits are cast as in TorchRec's quantised communication: FP32 tensors are encoded before and
decoded after the collective, inside the timed part, for a step pays for both. Gloo sums FP16 and BF16 (seen
with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardcore.core.catalog import PRECISIONS
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import all_to_all
from shardcore.measure.id_transfer import IdTransfer, features_and_ids

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


def transfers(
    request: CollectiveRequest,
    rank: int,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> tuple[Transfer | IdTransfer | None, Transfer | None]:
    """What `rank` does of a request forward and backward (None: nothing), over buffers of its own that hold
    zeros. group: torch's name for the ranks of its group; None: all."""
    widths = [request.widths[r] for r in next(ranks for ranks in request.groups if rank in ranks)]
    return CALLS[request.row.call](request, rank, widths, device, group)


def _exchange(
    request: CollectiveRequest,
    rank: int,
    widths: Sequence[int],
    device: torch.device | str,
    group: dist.ProcessGroup | None,
) -> tuple[Transfer, Transfer]:
    local = request.batch // len(widths)
    mine, theirs = [local * request.widths[rank]] * len(widths), [local * w for w in widths]
    return _both(
        request,
        (sum(mine), sum(theirs)),
        device,
        lambda into, source: all_to_all.run(into, source, theirs, mine, group),
        lambda into, source: all_to_all.run(into, source, mine, theirs, group),
    )


def _sum(
    request: CollectiveRequest,
    rank: int,
    widths: Sequence[int],
    device: torch.device | str,
    group: dist.ProcessGroup | None,
) -> tuple[Transfer, Transfer]:
    elements = request.batch * max(widths)
    return _both(
        request,
        (elements, elements // len(widths)),
        device,
        partial(reduce_scatter, group=group),
        partial(all_gather, group=group),
    )


def _sum_dense(
    request: CollectiveRequest,
    rank: int,
    widths: Sequence[int],
    device: torch.device | str,
    group: dist.ProcessGroup | None,
) -> tuple[None, Transfer]:
    dense = _filled(request.batch * max(widths), device)
    return None, Transfer(
        lambda into, source: dist.all_reduce(into, group=group), dense, dense, request.payload
    )


def _send_ids(
    request: CollectiveRequest,
    rank: int,
    widths: Sequence[int],
    device: torch.device | str,
    group: dist.ProcessGroup | None,
) -> tuple[IdTransfer, None]:
    work, ranks = request.row.work, len(widths)
    return IdTransfer(
        *features_and_ids(request),
        request.batch // ranks,
        rank,
        device,
        groups=[range(ranks)] if work and work.buckets else [],
        work=work,
    ), None


CALLS = {"all_to_all": _exchange, "reduce_scatter": _sum, "all_reduce": _sum_dense, "ids": _send_ids}
"""By Collective.call: the transfers of a rank in a group whose ranks have some widths."""


def _both(
    request: CollectiveRequest,
    elements: tuple[int, int],
    device: torch.device | str,
    forward: Collective,
    backward: Collective,
) -> tuple[Transfer, Transfer]:
    """Transfers between a buffer of outputs and one of what arrived, of so many elements."""
    there, here = (_filled(n, device) for n in elements)
    return Transfer(forward, there, here, request.payload), Transfer(backward, here, there, request.payload)


def _filled(elements: int, device: torch.device | str) -> torch.Tensor:
    """Zeros, which stay finite however often they are summed; written, for memory that was only reserved
    reads faster."""
    return torch.empty(elements, device=device).fill_(0.0)


def reduce_scatter(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    # torch 2.13 renames it
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(into, source, group=group)


def all_gather(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(into, source, group=group)
