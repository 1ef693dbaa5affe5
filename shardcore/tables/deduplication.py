"""Deduplication: values that samples of a batch repeat, as those of one session do, are looked up once.

Features that are deduplicated together share an inverse index: it maps each sample to a distinct value. The value of
several features is the tuple of their values. Source: RecD, arXiv 2211.05239.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.errors import ShardCoreError


def deduplication_factor(features: Sequence[tuple[np.ndarray, np.ndarray]], batch: int) -> float:
    """Mean number of samples that share one distinct value (Table.dedup).

    features: for each feature, its ids, sample after sample, and the number of ids of each sample.
    batch: samples of a device's batch, within which values are deduplicated.

    Raises ShardCoreError if features differ in their number of samples, or lengths do not sum to the ids.
    """
    # Features with one inverse index have a value for each sample, so they have equally many samples.
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
            # The value of a sample is its ids of all features, as bytes.
            {
                tuple(
                    ids[end[i] - lengths[i] : end[i]].tobytes()
                    for (ids, lengths), end in zip(features, ends, strict=True)
                )
                for i in range(first, min(first + batch, samples))
            }
        )
    return samples / distinct
