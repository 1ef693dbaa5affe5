"""Deduplicated features: the factor that data have, and that a session of samples gives."""

import numpy as np
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.tables.deduplication import deduplication_factor


def sessions(n: int, samples: int, unchanged: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and lengths of `n` sessions, each of so many samples, whose value stays with a probability."""
    rng, ids, lengths, value = np.random.default_rng(seed), [], [], np.zeros(0, int)
    for i in range(n * samples):
        if i % samples == 0 or rng.random() > unchanged:
            value = rng.integers(0, 10**9, rng.integers(1, 5))
        ids.append(value)
        lengths.append(len(value))
    return np.concatenate(ids), np.array(lengths)


@pytest.mark.parametrize("samples, unchanged", [(1, 0.9), (4, 0.0), (8, 0.8), (16, 0.95), (4, 1.0)])
def test_sessions_give_the_factor_of_recd(samples, unchanged):
    """S / (1 + (S - 1)(1 - d)): arXiv 2211.05239."""
    found = deduplication_factor([sessions(1000, samples, unchanged, 0)], 1000 * samples)
    assert found == pytest.approx(samples / (1 + (samples - 1) * (1 - unchanged)), rel=0.03)


def test_features_deduplicated_together_have_the_factor_of_their_joint_value():
    a, b = np.array([1, 1, 2, 2]), np.array([5, 6, 7, 7])
    ones = np.ones(4, int)
    assert deduplication_factor([(a, ones)], 4) == 2 and deduplication_factor(
        [(b, ones)], 4
    ) == pytest.approx(4 / 3)
    assert deduplication_factor([(a, ones), (b, ones)], 4) == pytest.approx(4 / 3)


def test_each_device_deduplicates_its_own_batch():
    a, ones = np.array([1, 1, 1, 1]), np.ones(4, int)
    assert [deduplication_factor([(a, ones)], batch) for batch in (1, 2, 3, 4)] == [1, 2, 2, 4]


def test_values_differ_by_where_their_ids_end():
    assert deduplication_factor([(np.array([1, 2, 1, 2]), np.array([1, 1, 2]))], 3) == 1
    assert deduplication_factor([(np.array([], int), np.array([0, 0, 0]))], 3) == 3


@pytest.mark.parametrize(
    "features, message",
    [
        ([], "features have [] samples; they need the same number, 1 or more"),
        ([(np.zeros(0, int), np.zeros(0, int))], "features have [0] samples"),
        ([(np.array([1]), np.array([1])), (np.array([1]), np.array([1, 0]))], "features have [1, 2] samples"),
        ([(np.array([1]), np.array([2]))], "a feature has 1 ids, and lengths of 2 in all; they need to"),
    ],
)
def test_features_that_do_not_fit_are_refused(features, message):
    with pytest.raises(ShardCoreError) as refused:
        deduplication_factor(features, 4)
    assert str(refused.value).startswith(message)
