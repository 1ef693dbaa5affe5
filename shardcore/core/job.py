"""Job: properties of the training job around the embeddings that a plan's cost depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.payloads import require_payload
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_MS,
    MOST_RATIO,
    Record,
    number_within,
    one_of,
    require,
)


@dataclass(frozen=True)
class BatchesOfIds:
    """Number of batches whose ids are in memory in one moment of a training step, by state of the ids.

    batches: as they come.
    sent: in the order of the plan and in buckets, as they travel.
    arrived: on the devices of their tables.
    replicas: batches that stay besides as they are sent, if there are replicas. Replicas look up in such a
        batch, so it lives until backward.
    """

    batches: int
    sent: int
    arrived: int
    replicas: int = 0


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A training pipeline of TorchRec, with the ids in memory in each moment of a step.

    theirs: its class.
    hides_ids: whether ids travel while the dense part runs.
    ids_arrive, lookups, outputs_arrive, dense, backward, update: ids in memory in these moments of a step.
    looks_up_ahead: whether the next batch is looked up between forward and backward.
    fetches_ahead: whether caches fetch the next batch's rows meanwhile (cost.model.fetch_wait_ms).
    """

    theirs: str
    hides_ids: bool
    ids_arrive: BatchesOfIds
    lookups: BatchesOfIds
    outputs_arrive: BatchesOfIds
    dense: BatchesOfIds
    backward: BatchesOfIds
    update: BatchesOfIds
    looks_up_ahead: bool = False
    fetches_ahead: bool = False

    @property
    def ids_by_moment(self) -> tuple[BatchesOfIds, ...]:
        """Batches of ids that are in memory in each moment of a training step, in order."""
        return self.ids_arrive, self.lookups, self.outputs_arrive, self.dense, self.backward, self.update

    @cached_property
    def min_arrived_batches(self) -> int:
        """Smallest number of batches whose received ids are in memory, over all moments of a step."""
        return min(ids.arrived for ids in self.ids_by_moment)


PIPELINES = {
    "none": Pipeline(
        "TrainPipelineBase",
        False,
        ids_arrive=BatchesOfIds(2, 1, 3),
        lookups=BatchesOfIds(2, 0, 1, replicas=1),
        outputs_arrive=BatchesOfIds(2, 0, 1, replicas=1),
        dense=BatchesOfIds(2, 0, 1, replicas=1),
        backward=BatchesOfIds(1, 0, 1, replicas=1),
        update=BatchesOfIds(1, 0, 1),
    ),
    "sparse_dist": Pipeline(
        "TrainPipelineSparseDist",
        True,
        ids_arrive=BatchesOfIds(3, 2, 3),
        lookups=BatchesOfIds(3, 2, 2),
        outputs_arrive=BatchesOfIds(3, 1, 1, replicas=1),
        dense=BatchesOfIds(3, 1, 2, replicas=1),
        backward=BatchesOfIds(3, 1, 2, replicas=1),
        update=BatchesOfIds(3, 1, 2, replicas=1),
    ),
    # The next batch's ids arrive between forward and backward.
    "prefetch": Pipeline(
        "PrefetchTrainPipelineSparseDist",
        True,
        ids_arrive=BatchesOfIds(3, 1, 3),
        lookups=BatchesOfIds(3, 1, 2, replicas=1),
        outputs_arrive=BatchesOfIds(3, 1, 2, replicas=1),
        dense=BatchesOfIds(3, 1, 3, replicas=1),
        backward=BatchesOfIds(3, 0, 2, replicas=1),
        update=BatchesOfIds(3, 1, 2),
        fetches_ahead=True,
    ),
    # A batch's request, with what it sent and received, lives until the step ends.
    "fused": Pipeline(
        "TrainPipelineFusedSparseDist",
        True,
        ids_arrive=BatchesOfIds(2, 1, 3),
        lookups=BatchesOfIds(2, 1, 2),
        outputs_arrive=BatchesOfIds(3, 2, 2),
        dense=BatchesOfIds(3, 2, 3),
        backward=BatchesOfIds(3, 2, 3),
        update=BatchesOfIds(3, 2, 3),
    ),
    "semi_sync": Pipeline(
        "TrainPipelineSemiSync",
        True,
        ids_arrive=BatchesOfIds(3, 3, 4),
        lookups=BatchesOfIds(3, 3, 4),
        outputs_arrive=BatchesOfIds(3, 3, 3),
        dense=BatchesOfIds(3, 3, 5),
        backward=BatchesOfIds(3, 3, 5),
        update=BatchesOfIds(3, 2, 3),
        looks_up_ahead=True,
    ),
}
"""TorchRec's training pipelines.

none: ids of a batch travel right before their lookups, and the step waits for them.
sparse_dist: the next batch's ids travel once the forward pass is launched, before backward (`progress`, TorchRec 1.8).
    NCCL runs the collectives of a process group one after another. So ids travel after the exchange of outputs and
    before that of gradients: while the dense part runs.
prefetch, fused, semi_sync: send ids as sparse_dist does, and have its price. prefetch fetches rows for
    caches, too (cost.model.fetch_wait_ms). What the others hide besides is not priced: lookups beside the
    dense optimizer; lookups and outputs beside the backward pass.

Ids in memory are those that live tensors of TorchRec's CPU processes showed (docs/benchmarks/2026-11-26-pipelines.md).
"""


@dataclass(frozen=True)
class Job(Record, noun="job"):
    """Properties of the training job around the embeddings.

    pipeline: pipeline of TorchRec, which decides whether ids travel while the dense part runs
    dense_forward_ms: time of the dense part's forward pass on a device; give both times or neither
    dense_backward_ms: time of the dense part's backward pass on a device; give both times or neither
    dense_mflops: in place of these times, millions of floating-point operations of the dense part's forward pass on a
      sample (a multiplication and an addition are two; backward takes twice as many), for hardware profiles, which know
      a rate of them
    id_bytes: bytes of an id: 8 for int64, 4 for int32.
    length_bytes: bytes of a length: how many ids a sample has for a feature.
    forward_payload: type in which outputs travel: fp32, fp16, bf16, fp8, int8 or mx4; fp8-256: with a scale for 256
      elements
    backward_payload: type in which gradients travel
    tower_ratio: factor by which a tower module compresses outputs before they cross hosts (io/towers.py).
        None: there are no towers.
    replica_optimizer: dense optimizer of the job, which updates replicas; default: the one most like that of the tables
    dense_bytes: bytes of the dense part on each device: weights, optimizer state, DDP's buckets of gradients.
    activation_bytes: the most that its forward and backward pass take besides, with outputs of embeddings and
        their gradients left out.
    update_bytes: the most that its optimizer takes besides.
    input_bytes: bytes of a local batch that are not ids: dense features and labels.
    """

    pipeline: Annotated[str, one_of(PIPELINES)] = "sparse_dist"
    dense_forward_ms: Annotated[float | None, number_within(0, MOST_MS), "MS"] = None
    dense_backward_ms: Annotated[float | None, number_within(0, MOST_MS), "MS"] = None
    dense_mflops: Annotated[float | None, number_within(0, MOST_COUNT), "MFLOPS"] = None
    id_bytes: Annotated[int, one_of((4, 8))] = 8
    length_bytes: Annotated[int, one_of((4, 8))] = 4
    forward_payload: Annotated[str, require_payload, "PAYLOAD"] = "fp32"
    backward_payload: Annotated[str, require_payload, "PAYLOAD"] = "fp32"
    tower_ratio: Annotated[float | None, number_within(1, MOST_RATIO)] = None
    replica_optimizer: Annotated[str | None, one_of(DENSE_OPTIMIZERS)] = None
    dense_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 0
    activation_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 0
    update_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 0
    input_bytes: Annotated[int, number_within(0, MOST_BYTES)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.dense_forward_ms is None) == (self.dense_backward_ms is None)
            and None in (self.dense_forward_ms, self.dense_mflops),
            f"job has dense_forward_ms {self.dense_forward_ms} and dense_backward_ms "
            f"{self.dense_backward_ms}; it needs both, or neither, and neither with dense_mflops ({self.dense_mflops})",
        )

    @property
    def payloads(self) -> dict[str, str]:
        """Payload names by direction: outputs forward, gradients backward."""
        return {"forward": self.forward_payload, "backward": self.backward_payload}

    @property
    def dense_ms(self) -> float:
        """ms of the dense part of a training step, forward and backward. 0 for dense_mflops, until a model knows their
        ms (cost.model.with_predicted_dense_ms)."""
        return (self.dense_forward_ms or 0.0) + (self.dense_backward_ms or 0.0)

    @property
    def fetches_ahead(self) -> bool:
        """True if caches fetch the next batch's rows during a step."""
        return PIPELINES[self.pipeline].fetches_ahead

    @property
    def id_overlap_ms(self) -> float:
        """ms of a training step during which transfers of ids are hidden behind the dense part."""
        return self.dense_ms if PIPELINES[self.pipeline].hides_ids else 0.0
