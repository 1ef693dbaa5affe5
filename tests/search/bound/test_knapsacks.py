"""Worth that a device collects within a time, against drawn sets of shards and against its own fillings."""

import numpy as np
import pytest
from test_contention import shards_of
from test_lower_bound import contended, crowded

from shardcore.search.bound import ops, packing


def bag_of(model, high: float):
    """Shards, their bag, and its steps of time up to `high` times an op of all tables."""
    shards = shards_of(model)
    step = high * float(model.head(shards.codes[shards.whole].sum(0)[None])[0]) / packing.STEPS
    number, curve = np.arange(len(shards.kind)), ops.Ops(shards, model, 0).every
    return shards, packing.Bag(number, curve, shards, step, model.launch_ms), step


@pytest.mark.parametrize("high", [0.4, 1.0])
@pytest.mark.parametrize("model", [contended(2), crowded(0.3)], ids=["contended", "crowded"])
def test_no_set_of_shards_within_a_time_is_worth_more(model, high):
    rng, (shards, bag, step) = np.random.default_rng(0), bag_of(model, high)
    for near in (0.0, 0.2, 3.0):
        worth = shards.alone_ms * rng.lognormal(0, near, len(shards.kind))
        most, _ = bag.fill(worth)
        for i in range(300):
            op = [
                max(np.flatnonzero(shards.table == t), key=lambda s: worth[s] * rng.random())
                for t in rng.permutation(8)[: 1 + i % 8]
            ]
            ms = float(model.head(shards.codes[op].sum(0)[None])[0])
            # It takes no longer than the end of this step, and longer than that of the one before.
            at = max(0, int(np.ceil(ms / step - 1e-9)) - 1)
            if at < packing.STEPS:
                assert worth[op].sum() <= most[at] * (1 + 1e-9)


def test_a_filling_is_worth_what_is_collected():
    """Cutting planes rely on that: a filling says with which worths less would be collected."""
    shards, bag, _ = bag_of(contended(2), 1.0)
    for seed in range(3):
        worth = shards.alone_ms * np.random.default_rng(seed).lognormal(0, 0.5, len(shards.kind))
        most, counts_at = bag.fill(worth)
        for at in range(20, packing.STEPS, 37):
            assert worth @ counts_at(at) == pytest.approx(most[at], rel=0.02)
