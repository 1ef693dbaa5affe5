"""NeuroShard's network: what its arms see, which epoch is kept, and what a group's ms are of."""

import numpy as np
import pytest
import torch

from bench import neuroshard_net
from bench.neuroshard_net import RECIPES
from shardcore.core.access_statistics import Reuse
from shardcore.core.types import Setting, Shard, Table
from shardcore.cost import features
from shardcore.cost.metrics import mape
from shardcore.io.dataset import split_of_sample
from shardcore.io.measurements import ComputeRequest, ComputeSample, TimingSpread

SETTING = Setting("made-up", 64)
PUBLISHED, OUR_LOSS, OUR_FEATURES = RECIPES.values()


def groups(n: int = 120) -> list[ComputeSample]:
    """Groups of 1 to 6 tables. Forward takes a fixed time a cell looked up, backward twice as long."""
    rng, found = np.random.default_rng(0), []
    for i in range(n):
        shards = tuple(
            Shard.whole(
                Table(
                    f"t{i}-{k}",
                    int(rng.integers(100, 9000)),
                    int(rng.choice([4, 16, 64])),
                    float(rng.integers(1, 9)),
                    Reuse((0.9, 0.1) + (0.0,) * 15, 64),
                )
            )
            for k in range(rng.integers(1, 7))
        )
        ms = 0.01 * sum(s.width * s.table.pooling for s in shards)
        forward, backward = (TimingSpread(x, x, x, 3) for x in (ms, 2 * ms))
        found.append(ComputeSample(f"{i:04d}", SETTING, ComputeRequest(shards, 64), forward, backward, 0.0))
    return found


GROUPS = groups()


def of_side(side: str) -> tuple[list[ComputeRequest], np.ndarray]:
    found = [s for s in GROUPS if split_of_sample(s.id) == side]
    return [s.request for s in found], np.array([s.total_ms for s in found])


def test_arms_see_what_is_published_or_what_our_model_sees():
    request = GROUPS[0].request
    published, ours = PUBLISHED.features(request), OUR_FEATURES.features(request)
    assert published.shape == (len(request.shards), 20)
    assert np.array_equal(OUR_LOSS.features(request), published)
    assert ours[:, -1] == pytest.approx(np.log(64))  # the last condition is the batch
    assert ours.shape == (len(request.shards), len(features.DRIVERS) + len(features.CONDITIONS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if i else []) for i, name in enumerate(RECIPES)]
)
def test_the_best_epoch_is_kept_and_errors_fall(name):
    requests, ms = of_side("validation")
    predict, curve = neuroshard_net.train_network(GROUPS, RECIPES[name], 1, 150)
    assert len(curve) == 150
    first, again = (neuroshard_net.train_network(GROUPS, RECIPES[name], 1, 5)[0] for _ in range(2))
    assert np.array_equal(first(requests), again(requests))
    kept = mape(predict(requests), ms)
    assert kept < curve[0] / 2
    if RECIPES[name] is not PUBLISHED:  # which keeps the least squared error
        assert kept == pytest.approx(min(curve), rel=1e-4)
        assert (predict(requests) > 0).all()


def test_a_groups_ms_are_of_its_own_tables_in_any_order():
    requests, _ = of_side("test")
    predict, _ = neuroshard_net.train_network(GROUPS, OUR_FEATURES, 1, 3)
    turned = [ComputeRequest(r.shards[::-1], r.batch) for r in requests]
    apart = [predict([r])[0] for r in requests]
    assert predict(requests) == pytest.approx(apart, rel=1e-4)
    assert predict(turned) == pytest.approx(apart, rel=1e-4)


def test_our_loss_counts_forward_and_backward():
    """The published loss cannot tell 2 + 4 ms from 3 + 3. Ours can."""
    measured = torch.tensor([[2.0, 4.0]])
    swapped, right = torch.tensor([[3.0, 3.0]]), torch.tensor([[2.0, 4.0]])
    assert PUBLISHED.loss(swapped, measured) == 0
    assert OUR_LOSS.loss(right, measured) == 0 < OUR_LOSS.loss(swapped, measured)
