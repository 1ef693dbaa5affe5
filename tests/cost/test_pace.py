"""Two machines of one name: whether their samples may join."""

from dataclasses import replace

import pytest
from laws import cache_law, compute_samples

from shardcore.cost.pace import FEWEST, is_equal, pace


def slower(samples, by: float):
    return [
        replace(
            s,
            **{
                way: replace(
                    getattr(s, way),
                    **{k: by * getattr(getattr(s, way), k) for k in ("median_ms", "q1_ms", "q3_ms")},
                )
                for way in ("forward", "backward")
            },
        )
        for s in samples
    ]


@pytest.fixture(scope="module")
def samples():
    return compute_samples(cache_law, 240, noise=0.1)


@pytest.mark.parametrize("by, equal", [(0.4, False), (0.8, True), (1.0, True), (1.5, True), (2.5, False)])
def test_the_pace_is_found_from_other_ops(samples, by, equal):
    found = pace(slower(samples[:80], by), samples[80:])
    assert found == pytest.approx(by, rel=0.15) and is_equal(found) == equal


def test_of_few_samples_nothing_is_known(samples):
    few = samples[: FEWEST - 1]
    failed = [replace(s, error="it failed", forward=None, backward=None) for s in samples[:100]]
    assert pace(few, samples) is pace(samples, few) is pace(failed, samples) is pace([], samples) is None
    assert is_equal(None)
