"""Bytes of the buffers of a training step: of a shard, and of a local batch (see memory_timeline.Alive)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.job import PIPELINES, Job
from shardcore.core.payloads import payload_by_name
from shardcore.core.progress import iterate_with_progress
from shardcore.core.types import OUTPUT_BYTES, Placement, Problem, Shard, Table
from shardcore.step.access import access_share, output_bytes, table_output_rows
from shardcore.step.collectives import carried_payload
from shardcore.step.id_bytes import id_bytes_per_sample, received_id_bytes
from shardcore.step.kinds import Channel, ShardingKind, sharding_kind_for_table
from shardcore.step.memory_timeline import DENSE_PART, MOMENTS, PARTS

SORTING_BYTES = 52
"""Bytes a lookup that FBGEMM's CUDA backward needs to sort rows. Given, not measured.

8 each for linear indices, sorted ones and unique ones. 4 each for infos, sorted infos, run lengths and their
sums. 12 for the radix sort's second copy. Source: transpose_embedding_input in FBGEMM.
"""

OFFSET_BYTES = 8
"""Bytes of an offset of a lookup: int64, whatever lengths are (batched_embedding_kernel.py of TorchRec)."""


def exchanged_amounts(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> tuple[int, int, float]:
    """Bytes of ids that a device receives for a shard in a step, bytes that it enters into collectives, and its
    lookups.

    It enters outputs of the global batch, in FP32, or a replica's gradient.
    """
    # Mean ids that its op looks up.
    lookups = sharding_kind.op_batch(problem) * shard.table.lookups_per_sample * access_share(shard)
    # A replica looks up its own samples. Its gradient has the size of its weights.
    if sharding_kind.local_batch:
        return 0, shard.bytes * sharding_kind.dense_gradient, lookups
    return received_id_bytes(shard, problem), output_bytes(shard, problem.global_batch), lookups


def buffers_per_term(sharding_kind: ShardingKind, problem: Problem) -> list[dict[str, float]]:
    """Bytes of a run's memory buffers for a byte or lookup of each of its terms (memory_timeline.OF_ENTERED)."""
    terms: list[dict[str, float]] = []
    # Then gradients of outputs are there all the time (memory.run_stages).
    looks_up_ahead = PIPELINES[problem.job.pipeline].looks_up_ahead
    for cut in (False, True):
        for together in (False, True):
            terms.append(output_buffers(sharding_kind, 1.0, problem.job, cut, together))
            # Cut columns are copied before the exchange, so the gradient can go. Uncut ones keep it alive.
            terms.append({} if looks_up_ahead else {"gradient": 1.0, "uncut": float(not cut)})
    if sharding_kind.local_batch:
        return [*terms, {"dense": 1.0}, {}]
    entered: dict[str, float] = {}
    channels = list(sharding_kind.channels.items())
    # Each channel has its own buffers: host_row sends outputs twice. Without towers, as ShardingKind.memory_stages has
    # them.
    for name, (channel, entering) in (("first", channels[0]), ("last", channels[-1])):
        entered |= exchange_buffers(channel, name, entering(0, 1.0, problem), problem.job)
    # FBGEMM's CPU kernels do not sort in a buffer of this kind.
    return [*terms, entered, {"sorting": 0.0 if problem.topology.on_cpu else float(SORTING_BYTES)}]


def bytes_of_offsets(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> int:
    """Bytes of the offsets of a shard's lookups in a step: where the ids of each bag begin."""
    # Whole offsets, so that searches can add and subtract bytes exactly.
    return OFFSET_BYTES * round(sharding_kind.op_batch(problem) * shard.table.mean_bags)


def exchange_buffers(channel: Channel, name: str, n_bytes: float, job: Job) -> dict[str, float]:
    """Bytes of the buffers of an exchange of `n_bytes`: FP32 values, their payloads, and copies made by casts.

    name: of the buffers (memory_timeline.Alive). "local": of what arrives, whose gradients leave.
    """
    row = channel.definition
    there = payload_by_name(carried_payload(row, "forward", job.forward_payload))
    back = payload_by_name(carried_payload(row, "backward", job.backward_payload))
    # The receiver's forward is the sender's backward, so the two types swap.
    leaves, arrives = (back, there) if name == "local" else (there, back)
    return {
        name: n_bytes,
        # Bytes of the payload for a byte of FP32: 1 means that no cast is made.
        f"{name} there": n_bytes * there.size_ratio,
        f"{name} back": n_bytes * back.size_ratio,
        # FP32 needs no codec, so no copies. (leaves.size_ratio < 1) is 0 then.
        f"{name} cast": n_bytes * leaves.size_ratio * (leaves.size_ratio < 1),
        f"{name} clamped": n_bytes * leaves.copies,
        # Decoding makes an FP32 copy, whatever arrived.
        f"{name} decoded": n_bytes * (arrives.size_ratio < 1),
        f"{name} recast": n_bytes * back.size_ratio * (back.size_ratio < 1),
    }


class LocalBatchShare(NamedTuple):
    """Share of a run, or of a shard, in a local batch. It is the same on all devices.

    outputs: bytes of outputs of a device's own samples, from all tables, wherever they are.
    cut: True if some of the tables are cut by columns.
    sent: bytes of ids in the order of the plan, and in buckets where rows are divided (of sequences, also the place of
      each id). A table cut by columns has several copies. TorchRec does not copy a batch whose features are in that
      order already. It counts nevertheless, for its order is not known.
    scratch: bytes by which the dense optimizer updates the largest replica.
    """

    outputs: int
    cut: bool
    sent: float
    scratch: int


def local_batch_share(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> LocalBatchShare:
    """A shard's share of a local batch: outputs, ids sent, and optimizer scratch."""
    table, local = shard.table, problem.local_batch
    sent = id_bytes_per_sample(table, problem.job)
    # Kinds that hold all rows need no buckets.
    if sharding_kind.divides_rows:
        sent += bucketized_id_bytes(table, problem.job, len(sharding_kind.shared_by(problem.topology)[0]))
    outputs = OUTPUT_BYTES * shard.width * table_output_rows(table, local)
    scratch = shard.bytes * sharding_kind.dense_gradient * DENSE_OPTIMIZERS[problem.replica_optimizer].scratch
    return LocalBatchShare(outputs, shard.width < table.dim, local * sent, scratch)


def local_batch_shares(
    placements: Iterable[Placement], problem: Problem
) -> dict[ShardingKind, LocalBatchShare]:
    """Each sharding kind's share of a local batch, in the order in which TorchRec runs their ops.

    That is the order of their first tables. Collections are in the order of theirs.

    placements: each counts as one shard, whatever its devices.
    """
    # Sorting by table order makes the first table of a run decide its place, as in TorchRec.
    numbers = table_sort_keys(problem)
    runs: dict[ShardingKind, list[LocalBatchShare]] = {}
    for placement in iterate_with_progress(sorted(placements, key=lambda p: numbers[p.shard.table.name])):
        run = sharding_kind_for_table(placement.kind, placement.shard.table)
        runs.setdefault(run, []).append(local_batch_share(run, placement.shard, problem))
    batches = {}
    for run, each in runs.items():
        outputs, cut, sent, scratch = zip(*each, strict=True)
        # The dense optimizer takes one replica after another, so only the largest counts.
        batches[run] = LocalBatchShare(sum(outputs), any(cut), sum(sent), max(scratch))
    return batches


def table_sort_keys(problem: Problem) -> dict[str, tuple[int, int]]:
    """Sort key of each table: number of the first table of its collection, and its own number."""
    of_collection: dict[tuple[str, bool], int] = {}
    return {
        # Collections stay together even if the tables of two are interleaved.
        table.name: (of_collection.setdefault((table.collection, table.sequence), number), number)
        for number, table in enumerate(problem.tables)
    }


def bucketized_id_bytes(table: Table, job: Job, ranges: int) -> float:
    """Bytes of a sample's ids and lengths in buckets, one bucket for each range of a table's rows.

    For a sequence TorchRec also keeps the place of each id (unbucketize_permute_tensor), to order its outputs.
    """
    return (
        id_bytes_per_sample(table, job, ranges=ranges)
        + table.sequence * table.lookups_per_sample * job.id_bytes
    )


def output_buffers(
    sharding_kind: ShardingKind, outputs: float, job: Job, cut: bool, together: bool
) -> dict[str, float]:
    """Bytes of the memory buffers of an op's outputs for a local batch."""
    # Outputs arrive by the run's last exchange.
    buffers = exchange_buffers(tuple(sharding_kind.channels)[-1], "local", outputs, job)
    # Outputs that are the whole tensor, and travel as FP32, are sent without a copy.
    copied = buffers["local back"] * (together or buffers["local back"] < outputs)
    return buffers | {
        "local copied": copied,
        "cut": outputs * cut,
        "together": outputs * together,
        "joined": outputs * (cut or together),
    }


def bytes_by_moment(problem: Problem) -> np.ndarray:
    """[2, M, Q, 3] bytes of each part that are there whatever runs hold, at each moment of a step
    (memory_timeline.MOMENTS), without and with replicas.

    Bytes of batches and of the dense part, and multiples of ids that are sent, and of those that arrived. Offsets of a
    batch are resident (memory.ShardSums): backward needs them until the next lookup.
    """
    job, pipeline = problem.job, PIPELINES[problem.job.pipeline]
    # A local batch of input: ids, lengths, and dense features.
    batch = problem.local_batch * sum(id_bytes_per_sample(t, job) for t in problem.tables) + job.input_bytes
    found = np.zeros((2, len(MOMENTS), len(PARTS), 3))
    moments = [pipeline.ids_by_moment[place] for place in MOMENTS]
    found[:, :, PARTS.index("ids")] = [
        [(ids.batches * batch, ids.sent + replicas * ids.replicas, ids.arrived) for ids in moments]
        for replicas in (False, True)
    ]
    # Pooled outputs of tables with variable batches are copied from bags to samples, twice. They count in all phases,
    # though they live from the last exchange of outputs to the first of gradients.
    cells = sum(t.dim * t.features for t in problem.tables if t.strides and not t.sequence)
    expanded = 2.0 * OUTPUT_BYTES * problem.local_batch * cells
    found[:, :, PARTS.index("received outputs"), 0] = expanded
    found[:, :, PARTS.index("dense part"), 0] = job.dense_bytes
    # Between forward and backward, activations are there.
    with_activations = [0, 1, DENSE_PART] if pipeline.looks_up_ahead else [DENSE_PART]
    found[:, with_activations, PARTS.index("activations"), 0] = job.activation_bytes
    return found
