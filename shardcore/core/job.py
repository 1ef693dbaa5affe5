"""Job: properties of the training job around the embeddings that a plan's cost depends on."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.payloads import require_payloads
from shardcore.core.validation import (
    MOST_MS,
    MOST_RATIO,
    require,
    require_known,
    require_types,
    require_within,
)

HIDES_IDS = {"none": False, "sparse_dist": True}
"""TorchRec's pipelines, and whether ids travel while the dense part runs.

none: TrainPipelineBase. Ids of a batch travel right before their lookups, and the step waits for them.
sparse_dist: TrainPipelineSparseDist. It sends the next batch's ids once the forward pass is launched, before
    backward (`progress`, TorchRec 1.8). NCCL runs the collectives of a process group one after another. So
    ids travel after the exchange of outputs and before that of gradients: while the dense part runs.
"""


@dataclass(frozen=True)
class Job:
    """Properties of the training job around the embeddings.

    pipeline: a name of HIDES_IDS.
    dense_forward_ms, dense_backward_ms: ms of the dense part on each device. Both are given, or neither.
    id_bytes: bytes of an id: 8 for int64, 4 for int32.
    length_bytes: bytes of a length: how many ids a sample has for a feature.
    forward_payload, backward_payload: forms in which outputs and gradients travel (core/payloads.py).
    tower_ratio: factor by which a tower module compresses outputs before they cross hosts (io/towers.py).
        None: there are no towers.
    replica_optimizer: optimizer of replicas, a name of DENSE_OPTIMIZERS. TorchRec gives them to DDP, and to a
        dense optimizer of the job. None: the one that is most like the problem's optimizer.
    """

    pipeline: str = "sparse_dist"
    dense_forward_ms: float | None = None
    dense_backward_ms: float | None = None
    id_bytes: int = 8
    length_bytes: int = 4
    forward_payload: str = "fp32"
    backward_payload: str = "fp32"
    tower_ratio: float | None = None
    replica_optimizer: str | None = None

    def __post_init__(self) -> None:
        require_types(self, "job")
        require_known(self, "job", pipeline=HIDES_IDS)
        require_payloads(self, "job", "forward_payload", "backward_payload")
        ms = (0, MOST_MS)
        require_within(self, "job", dense_forward_ms=ms, dense_backward_ms=ms, tower_ratio=(1, MOST_RATIO))
        if self.replica_optimizer is not None:
            require_known(self, "job", replica_optimizer=DENSE_OPTIMIZERS)
        require(
            (self.dense_forward_ms is None) == (self.dense_backward_ms is None),
            f"job has dense_forward_ms {self.dense_forward_ms} and dense_backward_ms "
            f"{self.dense_backward_ms}; it needs both, or neither",
        )
        for name in ("id_bytes", "length_bytes"):
            require(getattr(self, name) in (4, 8), f"job has {name} {getattr(self, name)}; it needs 4 or 8")

    @property
    def payloads(self) -> dict[str, str]:
        """Payloads by direction."""
        return {"forward": self.forward_payload, "backward": self.backward_payload}

    @property
    def dense_ms(self) -> float:
        """ms of the dense part of a step."""
        return (self.dense_forward_ms or 0.0) + (self.dense_backward_ms or 0.0)

    @property
    def hides_ids_ms(self) -> float:
        """ms for which ids may travel without making a step longer."""
        return self.dense_ms if HIDES_IDS[self.pipeline] else 0.0
