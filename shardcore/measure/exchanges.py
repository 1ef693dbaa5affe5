"""The exchanges of a step: one for each channel of a rank, with buffers.

A run (kinds.sharding_kinds_for_tables) is the tables of one kind and one collection. Its channels form a chain.
Forward, the result of one exchange enters the next. Backward, gradients go the other way. Payloads are encoded as in
TorchRec's quantised communication: FP32 tensors are cast, or encoded by FBGEMM's codec, before the
collective, and decoded after it, inside the timed part, as a step pays for both. Gloo sums FP16 and BF16
(seen with torch 2.13). NCCL has the same interface and has not been run here.

Over the hosts of a box, an all-to-all posts receives before sends. Gloo's own posts sends first: a late rank
sends all its data before it announces that it can receive, so their connection carries one way after the
other. Two hosts of two ranks then take up to 1.5 times as long (docs/decisions/many-hosts.md). NCCL's sends
and receives do not wait for each other, and the box stands for its links.

Shapes: n ranks of a group, B global batch, W columns of an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardcore.core.catalog import PRECISIONS
from shardcore.core.payloads import payload_by_name
from shardcore.core.topology import Topology
from shardcore.core.types import OUTPUT_BYTES
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import hosts, own_core
from shardcore.measure.fused_op import split_evenly
from shardcore.step import collectives
from shardcore.step.collectives import carried_payload
from shardcore.step.kinds import Channel, ShardingKind
from shardcore.step.lower import Workload, traffic_row
from shardcore.step.scopes import SCOPES, WORLD, groups_in_topology

Full = Callable[[Sequence[int]], torch.Tensor]
"""Makes a buffer of the given shape."""
Collective = Callable[[torch.Tensor, torch.Tensor], object]
"""Called with the tensor to fill and the one to send."""
Group = tuple[Sequence[int], "dist.ProcessGroup | None"]
"""Ranks in torch's order, and their process group (None: all ranks)."""
Groups = Mapping[str, Group]
"""This rank's group of each scope."""
Payloads = tuple[str, str]
"""Names of payloads, forward and backward (core/payloads.py)."""


# --- collectives of torch -----------------------------------------------------------------------------------


class PendingTransfer(Protocol):
    """A transfer that was started and can be waited for."""

    def wait(self) -> object: ...


def start_all_to_all(
    into: torch.Tensor,
    source: torch.Tensor,
    arriving: Sequence[int] | None = None,
    leaving: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[PendingTransfer]:
    """Start an all-to-all, and return its pending transfers, to be waited for.

    into, source: flat.
    arriving, leaving: elements from and to each rank of the group. None: equally many.

    Raises RuntimeError where these do not sum to all elements.
    """
    # Parts are numbered by ranks within the group.
    n, own = dist.get_world_size(group), dist.get_rank(group)
    arriving = list(arriving) if arriving is not None else [into.numel() // n] * n
    leaving = list(leaving) if leaving is not None else [source.numel() // n] * n
    if hosts.emulated_host_number() is None:
        # Outside a box, torch's own all-to-all, as TorchRec calls it.
        work = dist.all_to_all_single(into, source, arriving, leaving, group, async_op=True)
        return [work] if work else []
    parts_in, parts_out = into.split(arriving), source.split(leaving)
    # A rank's part for itself never leaves it.
    parts_in[own].copy_(parts_out[own])
    pending: list[PendingTransfer] = []
    # Each rank begins with its neighbour. Else all would send to rank 0 first.
    for transfer, parts, direction in ((dist.irecv, parts_in, -1), (dist.isend, parts_out, 1)):
        for other in ((own + direction * i) % n for i in range(1, n)):
            # isend and irecv take ranks of the whole job.
            peer = other if group is None else dist.get_global_rank(group, other)
            # Empty parts are not sent: the other side expects none.
            if parts[other].numel() and (work := transfer(parts[other], peer, group)):
                pending.append(work)
    return pending


def all_to_all(into: torch.Tensor, source: torch.Tensor, *arguments: Any, **named: Any) -> None:
    """Run an all-to-all and wait for its end. Arguments are those of `start_all_to_all`."""
    for pending in start_all_to_all(into, source, *arguments, **named):
        pending.wait()


def _reduce_scatter(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # Renamed in torch 2.13.
    """Run a reduce-scatter of flat tensors."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(into, source, group=group)


def _all_gather(into: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Run an all-gather of flat tensors."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(into, source, group=group)


def _run_with_payload(
    into: torch.Tensor, source: torch.Tensor, payload: str, collective: Collective
) -> torch.Tensor:
    """Run a collective from FP32 `source` into FP32 `into`, encoded as a payload type in between."""
    if payload not in PRECISIONS:
        codec = quantized_codec(payload)
        context = codec.create_context()
        sent = codec.encode(source, context)
        arrived = sent.new_empty(codec.calc_quantized_size(into.numel(), context))
        collective(arrived, sent)
        return into.copy_(codec.decode(arrived, context))
    dtype = getattr(torch, PRECISIONS[payload].torch)
    # FP32 travels as it is, without a copy.
    if source.dtype == dtype:
        collective(into, source)
        return into
    # The casts are timed, as a step pays for them.
    sent = source.to(dtype)
    arrived = torch.empty_like(into, dtype=dtype)
    collective(arrived, sent)
    return into.copy_(arrived)


def quantized_codec(payload: str) -> Any:
    """FBGEMM's codec (QuantizedCommCodec) of a payload, configured as by TorchRec."""
    from fbgemm_gpu.quantize_comm import QuantizedCommCodec
    from fbgemm_gpu.split_embedding_configs import SparseType

    row, name = payload_by_name(payload), payload.partition("-")[0]
    return QuantizedCommCodec(SparseType[name.upper()], row_dim=row.block if row.scale_bytes else None)


# --- exchanges with buffers ---------------------------------------------------------------------------------


class Exchange:
    """One collective forward, and its counterpart backward, over flat FP32 buffers.

    outputs: buffer that is sent where `forward` is given none. Gradients that `backward` has no place for
      come here.
    arrived: result of `forward`.
    gradients: buffer of the gradients of `arrived`, which is sent where `backward` is given none.
    """

    def __init__(
        self, n_outputs: int, n_arrived: int, payloads: Payloads, directions: Sequence[Collective], full: Full
    ):
        self.outputs, self.gradients = full((n_outputs,)), full((n_arrived,))
        # Buffers are made before timing, as in a training loop that reuses memory.
        self.arrived = torch.empty_like(self.gradients)
        self._payloads, self._ways = payloads, directions

    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        """Send a rank's outputs and return those that arrive.

        outputs: None if this rank computes none; then a buffer is sent.
        """
        # The result replaces the buffer of the last step, so memory does not grow.
        return _run_with_payload(
            self.arrived, _flat_prefix(outputs, self.outputs), self._payloads[0], self._ways[0]
        )

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor | None:
        """Send gradients back. The result is in `into` if large enough, else in the buffer `outputs`."""
        back, source = _flat_prefix(into, self.outputs), _flat_prefix(gradients, self.gradients)
        return _run_with_payload(back, source, self._payloads[1], self._ways[1])


def _flat_prefix(tensor: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """Flat view of a tensor's first elements, as many as a buffer has; the buffer itself if the tensor has fewer.

    Batches differ in their lookups. The workload states how many elements travel: those of the buffer.
    """
    return buffer if tensor is None or tensor.numel() < buffer.numel() else tensor.view(-1)[: buffer.numel()]


class AllReduce(Exchange):
    """All-reduce of dense gradients in place, in FP32, backward only. Outputs pass through unchanged."""

    def __init__(self, n_gradients: int, group: dist.ProcessGroup | None, full: Full):
        self.gradients, self._group, self._under_way = full((n_gradients,)), group, None

    def forward(self, outputs: torch.Tensor | None) -> torch.Tensor | None:
        return outputs

    def start(self) -> None:
        """Start the all-reduce before other exchanges; `backward` then only waits for its end."""
        # NCCL and gloo reduce in place: the tensor to send is the one to fill.
        self._under_way = dist.all_reduce(self.gradients, group=self._group, async_op=True)

    def backward(self, gradients: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor:
        if self._under_way is None:
            self.start()
        if self._under_way is not None:  # None where torch has nothing to wait for
            self._under_way.wait()
        self._under_way = None
        return self.gradients


def _make_all_to_all(
    elements: Sequence[int], rank: int, group: Group, payloads: Payloads, full: Full
) -> Exchange:
    """Make the all-to-all exchange of outputs [B, W], or of sequences' rows, to the ranks of their samples.

    Across hosts only the outputs of tower modules travel. The modules themselves are not run.
    """
    ranks, process_group = group
    # Samples are divided over ranks as evenly as they can be, in blocks that codecs take.
    block = math.lcm(*(payload_by_name(payload).block for payload in payloads))
    shares = [[block * n for n in split_evenly(-(-n // block), len(ranks))] for n in elements]
    own = ranks.index(rank)
    leaving, arriving = shares[own], [share[own] for share in shares]

    def make_call(arriving: Sequence[int], leaving: Sequence[int]) -> Collective:
        def run_all_to_all(into: torch.Tensor, source: torch.Tensor) -> None:
            # An encoded tensor has bytes, equally many for each block.
            sizes = (
                [n * tensor.numel() // max(1, sum(parts)) for n in parts]
                for tensor, parts in ((into, arriving), (source, leaving))
            )
            all_to_all(into, source, *sizes, group=process_group)

        return run_all_to_all

    # Backward is the same exchange with what arrives and what leaves swapped.
    directions = make_call(arriving, leaving), make_call(leaving, arriving)
    return Exchange(sum(leaving), sum(arriving), payloads, directions, full)


def _make_reduce_scatter(
    elements: Sequence[int], rank: int, group: Group, payloads: Payloads, full: Full
) -> Exchange:
    """Make the reduce-scatter of partial outputs [B, W], with the all-gather of their gradients.

    A reduce-scatter has equally many elements on all ranks, so ranks with fewer columns pad.
    """
    ranks, process_group = group
    # Rounded up, as distinct values may not divide evenly over the ranks. Samples do.
    most = -(-max(elements) // len(ranks))
    directions = (partial(_reduce_scatter, group=process_group), partial(_all_gather, group=process_group))
    return Exchange(most * len(ranks), most, payloads, directions, full)


def _make_all_reduce(
    elements: Sequence[int], rank: int, group: Group, payloads: Payloads, full: Full
) -> Exchange:
    """Make the all-reduce of dense gradients."""
    ranks, process_group = group
    return AllReduce(elements[ranks.index(rank)], process_group, full)


EXCHANGES = {
    "all_to_all": _make_all_to_all,
    "reduce_scatter": _make_reduce_scatter,
    "all_reduce": _make_all_reduce,
}
"""Makers of exchanges, by step.collectives.Collective.call.

elements: number of elements of the outputs (of dense gradients) of each rank of the group.
"""


def _carried_payloads(row: collectives.Collective, requested: Payloads) -> Payloads:
    """Payloads that a collective really carries, forward and backward, in a job that asks for some payloads."""
    return carried_payload(row, "forward", requested[0]), carried_payload(row, "backward", requested[1])


def make_exchange(
    request: CollectiveRequest, rank: int, process_group: dist.ProcessGroup | None, full: Full
) -> Exchange:
    """Make the exchange of a measured request, of outputs or gradients.

    process_group: that of `rank`; None: all ranks.
    """
    ranks = next(ranks for ranks in request.rank_groups if rank in ranks)
    elements = [request.batch * request.widths[r] for r in ranks]
    payloads = _carried_payloads(request.definition, (request.payload, request.payload))
    return EXCHANGES[request.definition.call](elements, rank, (ranks, process_group), payloads, full)


# --- a step -------------------------------------------------------------------------------------------------


def make_own_group(rank: int, groups: Iterable[Sequence[int]]) -> tuple[Sequence[int], dist.ProcessGroup]:
    """Make torch process groups, and return this rank's. All ranks of the gang have to call this together."""
    own = None
    # Torch requires every rank to call new_group for every group, also for those that it is not in.
    for ranks in map(sorted, groups):  # torch numbers the ranks of a group in rising order
        made = dist.new_group(ranks)
        if isinstance(made, dist.ProcessGroup) and rank in ranks:
            own = ranks, made
    # A new group has started network threads.
    own_core.deprioritize_network_threads()
    if own is None:
        raise AssertionError(f"rank {rank} is in none of the groups")
    return own


def make_process_groups(rank: int, topology: Topology, channels: Sequence[Channel]) -> Groups:
    """Make this rank's process groups for some channels of a plan's step. All ranks have to call this together."""
    # Torch has a group of all ranks already.
    used = [name for name in SCOPES if name != WORLD and any(c.group == name for c in channels)]
    whole: Group = range(len(topology)), None
    return {WORLD: whole, **{name: make_own_group(rank, groups_in_topology(topology, name)) for name in used}}


def used_channels(workload: Workload) -> list[Channel]:
    """Channels (collective and group) of a workload that carry bytes."""
    if len(workload.ops) == 1:
        return []
    carrying = zip(workload.channels, workload.traffic, strict=True)
    return list(dict.fromkeys(channel for channel, sent in carrying if sent.any()))


def make_exchange_chains(
    workload: Workload, rank: int, full: Full, own_groups: Groups
) -> dict[ShardingKind, list[Exchange]]:
    """Make the chains of exchanges of a workload's step on one rank, by kind of sharding."""
    job = workload.job
    if len(workload.ops) == 1:
        return {}
    # The gradients of all replicas are one exchange, even of several runs. It goes to the first of these
    # runs: in reverse order, the first is written last.
    run_of_rows = {
        tuple(traffic_row(slot, c) for c in run.channels_in_job(job, workload.topology)): run
        for run, slot in reversed(workload.traffic_slots.items())
    }
    carrying = {run: rows for rows, run in run_of_rows.items() if workload.traffic[list(rows)].any()}

    def make_channel_exchange(channel: Channel, row: int) -> Exchange:
        group = own_groups[channel.group]
        # Traffic counts bytes before the cast to the payload, so elements are FP32.
        elements = [round(workload.traffic[row][r] / OUTPUT_BYTES) for r in group[0]]
        payloads = _carried_payloads(channel.definition, (job.forward_payload, job.backward_payload))
        return EXCHANGES[channel.definition.call](elements, rank, group, payloads, full)

    return {
        run: [
            make_channel_exchange(c, row)
            for c, row in zip(run.channels_in_job(job, workload.topology), carrying[run], strict=True)
        ]
        for run in workload.traffic_slots
        if run in carrying
    }


def send_outputs(chain: Sequence[Exchange], outputs: torch.Tensor | None) -> torch.Tensor | None:
    """Send the outputs of one kind of sharding through its chain of exchanges."""
    for exchange in chain:
        outputs = exchange.forward(outputs)
    return outputs


def backward_order(chains: Mapping[ShardingKind, Sequence[Exchange]]) -> list[ShardingKind]:
    """Kinds of sharding in the order of their exchanges of gradients. All-reduces over emulated hosts are started here.

    So DDP has it: launched first in the backward pass, and waited for last.
    On one host an all-reduce has its turn among the others, as in the steps of datasets.
    """
    if hosts.emulated_host_number() is None:
        return list(chains)
    of_replicas = {kind: x for kind, (x, *_) in chains.items() if isinstance(x, AllReduce)}
    for exchange in of_replicas.values():
        exchange.start()
    return sorted(chains, key=lambda kind: kind in of_replicas)


def send_gradients_back(chain: Sequence[Exchange], output_gradients: torch.Tensor | None) -> None:
    """Send the dense part's gradients back through a chain of exchanges.

    into: tensor for the gradients of the outputs.
    """
    # In reverse: the chain's first exchange comes last, and its result is the gradients of the outputs.
    gradients = None
    for i, exchange in reversed(list(enumerate(chain))):
        gradients = exchange.backward(gradients, None if i else output_gradients)
