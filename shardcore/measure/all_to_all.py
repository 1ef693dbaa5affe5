"""An all-to-all among real processes.

Over the hosts of a box, ranks post receives before sends. Gloo's own all-to-all posts sends first. So a rank
that is late sends all it has to another before it tells that it can receive, and their connection carries one
way after the other. Two hosts of two ranks then take up to 1.5 times as long (docs/decisions/many-hosts.md).
NCCL's sends and receives do not wait for each other, and the box stands for its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardcore.measure import hosts


class Work(Protocol):
    def wait(self) -> object:
        """Until it is done."""


def launch(
    into: torch.Tensor,
    source: torch.Tensor,
    arriving: Sequence[int] | None = None,
    leaving: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Work]:
    """Have elements travel from now on. They are there when all that it returns has been waited for.

    into, source: flat.
    arriving, leaving: elements from and to each rank of the group. None: as many for each.

    Raises RuntimeError where these are not all elements.
    """
    n, own = dist.get_world_size(group), dist.get_rank(group)
    if hosts.own_host() is None:
        splits = (None if of is None else list(of) for of in (arriving, leaving))
        return [dist.all_to_all_single(into, source, *splits, group, async_op=True)]
    parts_in, parts_out = (
        of.split(list(of_each) if of_each is not None else [of.numel() // n] * n)
        for of, of_each in ((into, arriving), (source, leaving))
    )
    parts_in[own].copy_(parts_out[own])
    found: list[Work] = []
    for transfer, parts, way in ((dist.irecv, parts_in, -1), (dist.isend, parts_out, 1)):
        for other in ((own + way * i) % n for i in range(1, n)):
            if parts[other].numel():
                found.append(transfer(parts[other], _global_rank(group, other), group))
    return found


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def run(
    into: torch.Tensor,
    source: torch.Tensor,
    arriving: Sequence[int] | None = None,
    leaving: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """As `launch`, until all is there."""
    for work in launch(into, source, arriving, leaving, group):
        work.wait()
