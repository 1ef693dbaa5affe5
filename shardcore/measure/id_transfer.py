"""Input distribution among real processes, as TorchRec's KJTAllToAll runs it.

It takes three all-to-alls: how much each rank will send, lengths, and ids. Lengths and ids arrive rank by
rank. A permutation by FBGEMM then orders them by feature, as the lookups need them.

Shapes: n ranks, F features of a rank, b samples of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardcore.job import Job
from shardcore.layouts import CHANNELS, IDS, layout_of
from shardcore.measurements import CollectiveRequest
from shardcore.types import OUTPUT_BYTES
from shardcore.workload import Workload

_COLUMNS = 32
"""A drawn exchange has a feature for so many columns. An eighth of its bytes are then lengths."""
_JOB = Job()
_TYPES = {4: torch.int32, 8: torch.int64}


def features_and_ids(request: CollectiveRequest) -> tuple[list[int], list[int]]:
    """[n] features of each rank, and [n] ids that it receives from each rank.

    Together they take as many bytes as the outputs of the request's columns.
    """
    local = request.batch // len(request.widths)
    features = [-(-width // _COLUMNS) for width in request.widths]
    ids = [max(0, OUTPUT_BYTES * width - _JOB.length_bytes * f) * local // _JOB.id_bytes
           for width, f in zip(request.widths, features, strict=True)]
    return features, ids


def of_workload(workload: Workload, rank: int, device: torch.device | str = "cpu") -> IdTransfer | None:
    """One rank's input distribution of a step. None where no ids travel."""
    n, job = len(workload.ops), workload.job
    received_bytes = workload.traffic[CHANNELS.index(IDS)]
    if n == 1 or not received_bytes.any():
        return None
    # Several columns of a table on a device get their ids once.
    features = [sum(table.features for table, _ in
                    {(s.table, s.row_lo) for op in ops if not layout_of(op.kind).local_batch
                     for s in op.shards}) for ops in workload.ops]
    local = workload.global_batch // n
    ids = [max(0, round((bytes_of / n - job.length_bytes * local * f) / job.id_bytes))
           for bytes_of, f in zip(received_bytes, features, strict=True)]
    return IdTransfer(features, ids, local, rank, device, job)


class IdTransfer:
    """One rank's part of an input distribution, over and over.

    features: [n] F of each rank.
    ids: [n] ids that a rank receives from each rank.
    local_batch: b.
    job: the types of ids and lengths.
    """

    def __init__(self, features: Sequence[int], ids: Sequence[int], local_batch: int, rank: int,
                 device: torch.device | str = "cpu", job: Job = _JOB) -> None:
        import fbgemm_gpu  # noqa: F401 (it registers the permutation)

        n, id_type, length_type = len(features), _TYPES[job.id_bytes], _TYPES[job.length_bytes]
        self._lengths_to = [f * local_batch for f in features]
        self._ids_to = list(ids)
        self._lengths_from, self._ids_from = [self._lengths_to[rank]] * n, [self._ids_to[rank]] * n
        self._announced = torch.tensor([*zip(self._lengths_to, self._ids_to, strict=True)],
                                       device=device).flatten()
        self._expected = torch.empty_like(self._announced)
        self._lengths = torch.cat([_lengths(f * local_batch, total) for f, total
                                   in zip(features, ids, strict=True)]).to(device, length_type)
        self._ids = torch.arange(sum(ids), device=device).to(id_type)
        self._arrived = (torch.empty(sum(self._lengths_from), dtype=length_type, device=device),
                         torch.empty(sum(self._ids_from), dtype=id_type, device=device))
        # Feature f of each rank, one after another.
        self._by_feature = torch.arange(n * features[rank], dtype=torch.int32, device=device).view(
            n, features[rank]).T.flatten()
        self._local_batch = local_batch

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths [F · n, b] and ids that this rank will look up, by feature."""
        return self.finish(self.start())

    def start(self) -> list[dist.Work]:
        """Send lengths and ids, once it is known how many will come. They travel from then on."""
        dist.all_to_all_single(self._expected, self._announced)
        # Sizes of what arrives: the host waits for them.
        lengths_from, ids_from = zip(*self._expected.view(-1, 2).tolist(), strict=True)
        lengths, ids = self._arrived
        return [dist.all_to_all_single(lengths, self._lengths, list(lengths_from), self._lengths_to,
                                       async_op=True),
                dist.all_to_all_single(ids, self._ids, list(ids_from), self._ids_to, async_op=True)]

    def finish(self, works: Sequence[dist.Work]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `run` gives, once all has arrived."""
        for work in works:
            work.wait()
        lengths, ids = self._arrived
        if not len(self._by_feature):
            return lengths, ids
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
            self._by_feature, lengths.view(len(self._by_feature), self._local_batch), ids, None, len(ids))
        return lengths, ids


def _lengths(n: int, total: int) -> torch.Tensor:
    """[n] lengths that sum to `total`, as even as they can be."""
    if not n:
        return torch.zeros(0, dtype=torch.int32)
    each, more = divmod(total, n)
    return each + (torch.arange(n) < more).to(torch.int32)
