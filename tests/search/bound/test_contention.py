"""The least rates of ops against those of drawn ops of the same load."""

import numpy as np
import pytest
from test_lower_bound import contended, crowded

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.search.bound.contention import least_feature_sums, op_rates_lower_bound
from shardcore.search.bound.options import RunShards, bundles_and_runs
from shardcore.testing.problems import BATCH, MIB, draw_random_tables


def run_of(model) -> RunShards:
    """Columns of 8 tables on two devices."""
    tables = draw_random_tables(np.random.default_rng(1), 8, dims=(4, 8, 12))
    problem = Problem("ops", tables, Topology((Device(MIB),) * 2), BATCH)
    _, [run] = bundles_and_runs(problem, model, ())
    return run


@pytest.mark.parametrize(
    "model",
    [pytest.param(contended(1), marks=pytest.mark.long), crowded(0.3), crowded()],
    ids=["contended", "crowded", "steep"],
)
def test_no_op_of_a_load_has_lower_rates(model):
    rng, run = np.random.default_rng(0), run_of(model)
    usual = model.rate_lower_bounds(run.codes.sum(0) / 3)
    load = run.codes @ usual
    # Ops that have much of some features and little of others are among those of one kind of table.
    drawn, unit = [], np.maximum(run.codes.sum(0), 1e-9)
    for i in range(600):
        liking = run.codes @ (rng.lognormal(0, 3, len(unit)) / unit)
        best = [max(np.flatnonzero(run.bundle == t), key=lambda s: liking[s] / load[s]) for t in range(8)]
        op = sorted(best, key=lambda s: liking[s] / load[s])[: 1 + i % 8]
        drawn.append((load[op].sum(), run.codes[op].sum(0)))
    loads = np.array([of for of, _ in drawn])
    least = op_rates_lower_bound(model, run.codes, load, run.bundle, loads)
    for (_, sums), rates in zip(drawn, least, strict=True):
        assert (model.rate_lower_bounds(sums) >= rates * (1 - 1e-9)).all()


class Alternatives:
    """Rates that grow with the sum of two features, of which each shard has one."""

    def rate_lower_bounds(self, least: np.ndarray) -> np.ndarray:
        slow = 1 + least[..., :1] + least[..., 1:2]
        return np.concatenate([np.zeros_like(least[..., :2]), slow], -1)


def test_what_has_little_of_one_feature_has_much_of_another():
    """Each feature by itself may be 0. Both together are as many as there are run."""
    codes = np.concatenate([np.tile([1.0, 0.0, 1.0], (10, 1)), np.tile([0.0, 1.0, 1.0], (10, 1))])
    load, table, wanted = np.ones(20), np.arange(20), np.array([3.0, 10.0])
    assert not least_feature_sums(codes, load, table, wanted)[:, :2].any()
    rates = op_rates_lower_bound(Alternatives(), codes, load, table, wanted)
    assert ([4.0 * 0.9, 11.0 * 0.9] < rates[:, 2]).all() and (rates[:, 2] <= [4.0, 11.0]).all()


def test_features_that_raise_no_rate_are_not_divided():
    model = crowded()
    run = run_of(model)
    load = run.codes @ model.rate_lower_bounds(run.codes.sum(0))
    wanted = np.array([load.max()])
    [rates] = op_rates_lower_bound(model, run.codes, load, run.bundle, wanted)
    each = least_feature_sums(run.codes, load, run.bundle, wanted)
    # Only the number of shards counts, and it is one feature.
    assert rates == pytest.approx(model.rate_lower_bounds(each)[0], rel=1e-6)
