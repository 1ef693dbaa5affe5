"""Input distribution among real processes, as TorchRec's KJTAllToAll runs it.

It takes three all-to-alls: the numbers of elements that follow, lengths, and ids. Lengths and ids arrive rank
by rank. A permutation by FBGEMM then orders them by feature, as the lookups need them. Where rows of tables
are divided, FBGEMM first puts a rank's ids in buckets, one for each row range.

Bucketizing and permuting are work of the device. The dense part hides transfers, but not this work, as it
runs on the same device. TrainPipelineSparseDist (TorchRec 1.8) bucketizes ids at the start of a step, before
the forward pass of the previous batch (`start_sparse_data_dist`). It permutes them when their own forward
pass begins, right before the lookups (`PipelinedForward`, `KJTAllToAllTensorsAwaitable._wait_impl`).

Shapes: n ranks, F features of a rank, b samples of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardcore.core.job import Job
from shardcore.core.types import OUTPUT_BYTES
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure.exchanges import start_all_to_all
from shardcore.step.collectives import IdWork
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.lower import Workload

Parts = Sequence[tuple[Callable[[], object], bool]]
"""Calls in order, each with True if it is the device's own work and False if it transfers."""
_COLUMNS = 32
"""Columns of outputs that make one feature of a drawn exchange. An eighth of its bytes are then lengths."""
_JOB = Job()
_RANGE_ROWS = 1 << 20
"""Rows of a range, in exchanges with buckets."""
_TYPES = {4: torch.int32, 8: torch.int64}


def make_id_transfer(request: CollectiveRequest, rank: int, device: torch.device | str = "cpu") -> IdTransfer:
    """Make one rank's side of a measured exchange of ids."""
    work, ranks = request.definition.work, len(request.widths)
    features, ids = feature_and_id_counts(request)
    groups = [range(ranks)] if work and work.buckets else []
    return IdTransfer(features, ids, request.batch // ranks, rank, device, groups=groups, work=work)


def feature_and_id_counts(request: CollectiveRequest) -> tuple[list[int], list[int]]:
    """[n] number of features on each rank, and [n] number of ids that each receives from each rank.

    Lengths and ids together take as many bytes as the outputs of the request's columns would.
    """
    local = request.batch // len(request.widths)
    features = [-(-width // _COLUMNS) for width in request.widths]
    # A feature in buckets has lengths on all ranks, so all have equally many features.
    if (work := request.definition.work) and work.buckets:
        features = [min(features)] * len(features)
    # Bytes that lengths leave, in whole ids.
    ids = [
        max(0, OUTPUT_BYTES * width - _JOB.length_bytes * f) * local // _JOB.id_bytes
        for width, f in zip(request.widths, features, strict=True)
    ]
    return features, ids


def make_step_transfers(
    workload: Workload, rank: int, device: torch.device | str = "cpu"
) -> list[IdTransfer]:
    """Make one rank's input distributions of a workload's step, one for each kind of sharding."""
    n, job, local = len(workload.ops), workload.job, workload.global_batch // len(workload.ops)
    transfers = []
    for sharding_kind in workload.traffic_slots if n > 1 else ():
        if sharding_kind.ids is None:
            continue
        # Several columns of a table on a device get their ids once.
        shards = [
            {(s.table, s.row_lo): s for op in ops if op.sharding_kind is sharding_kind for s in op.shards}
            for ops in workload.ops
        ]
        # A run without shards has no exchange.
        if not any(shards):
            continue
        # Of features with batches of their own, other numbers of lengths travel: here as of fewer features.
        features = [math.ceil(sum(s.table.mean_bags for s in of.values())) for of in shards]
        n_bytes = [sum(received_id_bytes(s, workload) for s in of.values()) for of in shards]
        # A rank receives equally much from each: an n-th of its bytes, less the lengths.
        ids = [
            max(0, round((b / n - job.length_bytes * local * f) / job.id_bytes))
            for b, f in zip(n_bytes, features, strict=True)
        ]
        groups = sharding_kind.shared_by(workload.topology) if sharding_kind.divides_rows else ()
        transfers.append(
            IdTransfer(features, ids, local, rank, device, job, groups, sharding_kind.ids.definition.work)
        )
    return transfers


class IdTransfer:
    """One rank's side of an input distribution, which can run any number of times.

    features: [n] F of each rank.
    ids: [n] ids that each rank receives from each other one.
    local_batch: b.
    job: it states the types of ids and lengths.
    groups: groups of ranks that divide rows among them. The ranks of a group have the same features.
    work: work on the rank's own ids before they travel.
    """

    def __init__(
        self,
        features: Sequence[int],
        ids: Sequence[int],
        local_batch: int,
        rank: int,
        device: torch.device | str = "cpu",
        job: Job = _JOB,
        groups: Sequence[Sequence[int]] = (),
        work: IdWork | None = None,
    ) -> None:
        import fbgemm_gpu  # noqa: F401 (it registers the operators)

        n, id_type, length_type = len(features), _TYPES[job.id_bytes], _TYPES[job.length_bytes]
        self._local_batch, self._work = local_batch, work
        self._lengths_to, self._ids_to = [f * local_batch for f in features], list(ids)
        # Each rank receives equally much from all, as batches are divided evenly.
        lengths_from, ids_from = [self._lengths_to[rank]] * n, [self._ids_to[rank]] * n
        sizes = [size for both in zip(self._lengths_to, self._ids_to, strict=True) for size in both]
        # Both numbers for each rank travel in one all-to-all, as in TorchRec.
        self._announced = torch.tensor(sizes, device=device)
        self._expected = torch.empty_like(self._announced)
        if groups:
            # A group's features are listed once, with the ids of all its ranks: they are not yet in buckets.
            parts = [(features[group[0]], [ids[r] for r in group]) for group in groups]
            drawn = torch.cat([_random_range_ids(counts) for _, counts in parts])
        else:
            parts = [(f, [total]) for f, total in zip(features, ids, strict=True)]
            drawn = torch.arange(sum(ids))
        self.ids = drawn.to(device, id_type)
        lengths = torch.cat([_even_lengths(f * local_batch, sum(counts)) for f, counts in parts])
        self.lengths = lengths.to(device, length_type)
        self._buckets = len(groups[0]) if groups else 0
        self._ranges = torch.full((sum(f for f, _ in parts),), _RANGE_ROWS, dtype=id_type, device=device)
        # Several groups have a bucket 0, 1, ... each. These are the places of each rank's features in them.
        self._by_rank = _bucket_order_by_rank(groups, features).to(device) if len(groups) > 1 else None
        # Buffers for what arrives, made once: steps reuse them.
        self._arrived = (
            torch.empty(sum(lengths_from), dtype=length_type, device=device),
            torch.empty(sum(ids_from), dtype=id_type, device=device),
        )
        # The order after the transfer: feature 0 of all ranks, then feature 1, and so on.
        by_feature = torch.arange(n * features[rank], dtype=torch.int32, device=device)
        self._by_feature = by_feature.view(n, features[rank]).T.flatten()

    @property
    def timed_calls(self) -> Parts:
        """Calls of one input distribution, each with whether it is the rank's own work."""
        return (
            (self.prepare, True),
            (self.send_sizes, False),
            (self.send_ids, False),
            (self.wait, False),
            (self.order_by_feature, True),
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the input distribution. Returns lengths [F · n, b] and ids that this rank looks up, by feature."""
        for part, _ in self.timed_calls:
            part()
        return self.received

    def prepare(self) -> None:
        """Prepare the lengths and ids to send, ordered by destination rank."""
        self._leaving = self._work.run(self) if self._work else (self.lengths, self.ids)

    def send_sizes(self) -> None:
        """Start to send the numbers of lengths and ids to all ranks."""
        self._pending = start_all_to_all(self._expected, self._announced)

    def send_ids(self) -> None:
        """Start to send lengths and ids, after waiting for their numbers."""
        # As TorchRec, which needs the numbers on the host to size its tensors.
        self.wait()
        from_each = zip(*self._expected.view(-1, 2).tolist(), strict=True)
        sent = zip(self._arrived, self._leaving, from_each, (self._lengths_to, self._ids_to), strict=True)
        self._pending = [pending for of in sent for pending in start_all_to_all(*of)]

    def wait(self) -> None:
        """Wait for the transfers that were started last."""
        for pending in self._pending:
            pending.wait()

    def order_by_feature(self) -> None:
        """Order the received lengths and ids by feature, into `received`."""
        lengths, ids = self._arrived
        if len(self._by_feature):
            of_feature = lengths.view(len(self._by_feature), self._local_batch)
            # The operator that TorchRec calls. Each row of lengths is one feature of one rank.
            lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._by_feature, of_feature, ids, None, len(ids)
            )
        self.received = lengths, ids

    def bucketize_by_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and ids bucketized by rank, as TorchRec's bucketize_kjt_before_all2all makes them."""
        lengths, ids, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            self.lengths, self.ids, False, False, self._ranges, self._buckets
        )
        # With one group, the order of buckets is that of ranks.
        if self._by_rank is not None:
            lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._by_rank, lengths.view(-1, self._local_batch), ids, None, len(ids)
            )
            lengths = lengths.flatten()
        return lengths, ids


def _bucket_order_by_rank(groups: Sequence[Sequence[int]], features: Sequence[int]) -> torch.Tensor:
    """[F of all ranks] positions of each rank's features in the output of FBGEMM's bucketize op.

    These are ordered by bucket, then by group, then by feature.
    """
    of_group = [features[group[0]] for group in groups]
    at = {
        rank: bucket * sum(of_group) + sum(of_group[:g])
        for g, group in enumerate(groups)
        for bucket, rank in enumerate(group)
    }
    return torch.tensor(
        [at[rank] + f for rank in range(len(features)) for f in range(features[rank])], dtype=torch.int32
    )


def _random_range_ids(counts: Sequence[int]) -> torch.Tensor:
    """Ids of several row ranges in random order.

    counts: number of ids of each range.
    """
    ranges = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    # Any rows do within a range, as FBGEMM only looks at the range.
    ids = ranges * _RANGE_ROWS + torch.arange(len(ranges)) % _RANGE_ROWS
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


def _even_lengths(n: int, total: int) -> torch.Tensor:
    """[n] lengths that sum to `total` and differ by 1 at most."""
    if not n:
        return torch.zeros(0, dtype=torch.int32)
    each, more = divmod(total, n)
    return each + (torch.arange(n) < more).to(torch.int32)
