"""WarmRows: rows that each host has once, divided over its ranks (the middle scope of FlexShard, arXiv 2301.02959).

A lookup of a warm row travels within a host, or a pod. Backward, each rank all-reduces the gradients of its rows with
the ranks of its number on other hosts: 1 / L of what a replica on every rank would send. TorchRec runs no sequences so.

Rows of a table go to the L ranks of a unit in turn, so that each has about as many lookups.
Shapes: N lookups of a rank, W warm rows of a table, L ranks of a unit, D columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError

if TYPE_CHECKING:
    from torchrec import EmbeddingConfig


class DenseRows(nn.ParameterDict):
    """Rows as plain parameters, by name of the table.

    A separate module: DistributedModelParallel allocates what is on the meta device module by module, and
    calls `reset_parameters` of those that have such parameters.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingConfig],
        rows: Mapping[str, int],
        device: torch.device | str | None,
    ) -> None:
        """tables: the configs of the whole tables. rows: how many are here, of some of them."""
        from torchrec.modules.embedding_configs import data_type_to_dtype

        super().__init__()
        self._of = dict(tables)
        for name, n in rows.items():
            dtype = data_type_to_dtype(tables[name].data_type)
            self[name] = nn.Parameter(torch.empty(n, tables[name].embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill them as an EmbeddingCollection fills its rows: within the range of the whole table."""
        for name, weight in self.items():
            config = self._of[name]
            with torch.no_grad():
                if config.init_fn is not None:
                    config.init_fn(weight)
                # Weights on the meta device have no memory to fill.
                elif weight.device.type != "meta":
                    weight.uniform_(config.get_weight_init_min(), config.get_weight_init_max())


@dataclass(frozen=True)
class Unit:
    """The unit of a rank, such as its host.

    size: ranks of a unit, which have consecutive numbers.
    rank: among those of the unit.
    first: True for the unit of rank 0.
    """

    size: int = 1
    rank: int = 0
    first: bool = True

    @classmethod
    def of_rank(cls, size: int | None = None) -> Unit:
        """The unit of this process. size: default LOCAL_WORLD_SIZE. Without a process group, one rank.

        Raises ShardCoreError for a size that does not divide the ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        size = size or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if not 1 <= size <= ranks or ranks % size:
            raise ShardCoreError(
                f"warm rows were asked for over units of {size} ranks, and there are {ranks}; it needs a divisor, such "
                "as the ranks of a host"
            )
        return cls(size, rank % size, rank < size)

    def share(self, rows: int) -> int:
        """Rows of this rank, of so many that are dealt to the ranks of a unit in turn."""
        return len(range(self.rank, rows, self.size))


class WarmRows(DenseRows):
    """This rank's warm rows. DDP must leave them alone: `warm_parameter_names` gives DMP's wrapper their names.

    rows: warm rows W of some of the tables.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingConfig],
        rows: Mapping[str, int],
        device: torch.device | str | None,
        unit: Unit,
    ) -> None:
        for name, n in rows.items():
            if n < unit.size:
                raise ShardCoreError(
                    f"table {name!r} was given {n} warm rows for the {unit.size} ranks of a unit; it needs one for each"
                )
        super().__init__(tables, {name: unit.share(n) for name, n in rows.items()}, device)
        self.unit = unit
        self._within: Any = None
        self._across: Any = None

    def join(self) -> None:
        """Make the groups of ranks, and the rows of all units equal to those of the first.

        Once, as it is a collective: all ranks make their first call together.
        """
        if not len(self) or self._within is not None or not (dist.is_available() and dist.is_initialized()):
            return
        n, ranks = self.unit.size, range(dist.get_world_size())
        mine = dist.get_rank()
        # All ranks make all groups, in one order.
        for group in [ranks[i : i + n] for i in ranks[::n]]:
            made = dist.new_group(list(group))
            self._within = made if mine in group else self._within
        for group in [ranks[i::n] for i in range(n)]:
            made = dist.new_group(list(group))
            self._across = made if mine in group else self._across
        for weight in self.values():
            # DDP does so with what it has. Units would drift apart without.
            dist.broadcast(weight.data, self.unit.rank, group=self._across)
            weight.register_post_accumulate_grad_hook(self._sum)

    def _sum(self, weight: torch.Tensor) -> None:
        """Sum a gradient over the units. Of all ranks it is the mean, as DDP and TorchRec have it."""
        assert weight.grad is not None
        dist.all_reduce(weight.grad, group=self._across)
        weight.grad /= dist.get_world_size()

    def look_up(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """[N, D] the warm rows of a table. rows: [N] int64 numbers among its W."""
        if self._within is None:
            return nn.functional.embedding(rows, self[name])
        from torch.distributed.nn.functional import all_to_all_single

        n = self.unit.size
        # Lookups in the order of the ranks that have them.
        order = torch.argsort(rows % n, stable=True)
        sent = torch.bincount(rows % n, minlength=n)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._within)
        there, back = received.tolist(), sent.tolist()
        requested = rows.new_empty(sum(there))
        dist.all_to_all_single(requested, (rows // n)[order], there, back, group=self._within)
        vectors = nn.functional.embedding(requested, self[name])
        arrived = vectors.new_empty((len(rows), vectors.shape[1]))
        # Autograd sends gradients the same way back.
        values = all_to_all_single(arrived, vectors, back, there, group=self._within)
        # The inverse of a permutation is where each lookup went.
        return values[torch.argsort(order)]


def warm_parameter_names(model: nn.Module) -> list[str]:
    """Names of the warm rows of a model, for DefaultDataParallelWrapper(params_to_ignore=...)."""
    return [
        name
        for path, module in model.named_modules()
        if isinstance(module, WarmRows)
        for name, _ in module.named_parameters(prefix=path)
    ]
