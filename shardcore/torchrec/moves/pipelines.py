"""TorchRec's training pipelines, emptied while tables move and filled again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardcore.core.validation import require


@contextmanager
def drain_pipeline(pipeline: Any) -> Iterator[None]:
    """Context in which a training pipeline holds no batches. On exit it is refilled, and ids go to their new ranks.

    Their ids were sent to the ranks of the old plan. Filling the pipeline sends them again.

    pipeline: TrainPipelineSparseDist, TrainPipelineBase, which sends nothing ahead, or None.

    Raises ShardCoreError for another kind of pipeline.
    """
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

    if pipeline is None or type(pipeline) is TrainPipelineBase:
        yield
        return
    require(
        type(pipeline) is TrainPipelineSparseDist,
        f"the pipeline is a {type(pipeline).__name__}; tables can be moved under TrainPipelineSparseDist and "
        "TrainPipelineBase",
    )
    # Batches that were copied to the device but not trained on.
    batches = list(pipeline.batches)
    pipeline.detach()
    pipeline.batches.clear()
    pipeline.contexts.clear()
    # Without contexts this forgets the pipelined modules, so that filling finds the new ones.
    pipeline.attach()
    pipeline._original_forwards = []
    pipeline._original_kjt_dist_forwards = []
    try:
        yield
    finally:
        # Filling sends ids again, to the ranks of the new plan. An empty pipeline needs none.
        if batches:
            pipeline.fill_pipeline(iter(batches))
