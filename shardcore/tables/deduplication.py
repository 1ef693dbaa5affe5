"""Values that samples of a batch repeat, as those of one session do. RecD looks them up once.

Features that are deduplicated together share an inverse index: of each sample, the number of its distinct
value. A value of several features is that of all of them. Source: RecD, arXiv 2211.05239.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.errors import ShardCoreError


def dedup_of(features: Sequence[tuple[np.ndarray, np.ndarray]], batch: int) -> float:
    """Samples for each distinct value, in batches of `batch` samples one after another. See Table.dedup.

    features: of each, its ids, sample after sample, and how many each sample has.
    batch: of a device, where it deduplicates.
    """
    # Features with one inverse index have a value for each sample, so their samples have to agree.
    counts = {len(lengths) for _, lengths in features}
    if len(counts) != 1 or 0 in counts:
        raise ShardCoreError(f"features have {sorted(counts)} samples; they need the same number, 1 or more")
    for ids, lengths in features:
        if lengths.sum() != len(ids):
            raise ShardCoreError(
                f"a feature has {len(ids)} ids, and lengths of {lengths.sum()} in all; they need to agree"
            )
    samples, distinct = counts.pop(), 0
    # Ends of samples in each feature's ids. A sample's ids begin at its end less its length.
    ends = [np.cumsum(lengths) for _, lengths in features]
    # A device deduplicates within its batch only, so repeats in another batch count again.
    for first in range(0, samples, batch):
        distinct += len(
            # Bytes of all features together are the value: samples agree if they agree in each.
            {
                tuple(
                    ids[end[i] - lengths[i] : end[i]].tobytes()
                    for (ids, lengths), end in zip(features, ends, strict=True)
                )
                for i in range(first, min(first + batch, samples))
            }
        )
    return samples / distinct
