"""Properties that a search relies on: monotone, 0 for nothing, order-free, any number of devices, and files
that hold what was saved."""

import dataclasses
import json

import numpy as np
import pytest
from laws import SETTING, by_hand, pool
from shapes import ALL_TO_ALL, REDUCE_SCATTER, WITHIN, host_row, on_hosts, row, sends

from shardcore.core.access_statistics import REUSE_BINS, Reuse, Zipf
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.cost import collective_model, neural
from shardcore.cost.model import at_confidence, group_op_ms, price
from shardcore.io import model_files
from shardcore.step.lower import lower

GIB = 1 << 30


def topology(n: int, **links) -> Topology:
    return Topology((Device(64 * GIB),) * n, **links)


# --- compute


@pytest.mark.parametrize("draws", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_adding_a_shard_never_lowers_a_cost(model, draws):
    rng = np.random.default_rng(0)
    odd = [Table("huge", 10**9, 256, 500.0), Table("never", 10, 4, 0.0), Table("one", 1, 4, 1.0, Zipf(0.0))]
    shards = [Shard.whole(t) for t in [*pool(), *odd]]
    groups = [[shards[i] for i in rng.integers(0, len(shards), rng.integers(0, 20))] for _ in range(draws)]
    more = [[*g, shards[rng.integers(len(shards))]] for g in groups]
    before, after = group_op_ms(groups, model), group_op_ms(more, model)
    assert (after >= before).all() and (after > 0).all() and np.isfinite(after).all()
    surely = [group_op_ms(x, at_confidence(model, 0.95)) for x in (groups, more)]
    assert (surely[1] >= surely[0]).all()


def test_intervals_widen_with_the_confidence(model):
    sums = model.encode([Shard.whole(t) for t in pool()])
    (low, high), (lower, higher) = model.ms_interval(sums, 0.5), model.ms_interval(sums, 0.95)
    assert (lower < low).all() and (low < high).all() and (high < higher).all()


def test_a_cautious_model_costs_what_measurements_stay_below():
    model = by_hand()
    sums, cautious = model.encode([Shard.whole(t) for t in pool()]), at_confidence(model, 0.9)
    assert cautious.op_ms(sums) == pytest.approx(np.exp(0.4) * model.op_ms(sums))
    assert (
        cautious.encode([Shard.whole(pool()[0])]) == pytest.approx(sums[:1]) and cautious.setting == SETTING
    )
    assert cautious.op_part_ms(sums) == pytest.approx(np.exp(0.4) * model.op_part_ms(sums))
    assert at_confidence(model, 0.9).confidence == 0.9 and at_confidence(model, None) is model
    with pytest.raises(ShardCoreError, match="confidence leads to level 0.999"):
        at_confidence(model, 0.999).op_ms(sums)


def test_far_beyond_the_range_costs_grow_as_the_drivers(model):
    one, ten = (Shard.whole(Table("far", 10**9, 64, p, Zipf(0.5))) for p in (1e3, 1e4))
    a, b = group_op_ms([[one], [ten]], model)
    assert 5 < b / a < 10.5  # contention grows, too


# --- communication


@pytest.mark.parametrize("sequence", [False, True])
def test_a_shard_without_lookups_costs_no_more_than_one_with_some(model, sequence):
    """Also beside others, and of a table whose histogram is empty."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, dim = int(10 ** rng.uniform(1, 7)), 4 * int(rng.integers(1, 32))
        access = Zipf(float(rng.choice([0.0, 1.05])))
        some = [
            Shard.whole(Table("t", rows, dim, pooling, access, sequence=sequence))
            for pooling in (0.0002, 0.001, 0.01, 0.05, 0.5, 5.0)
        ]
        none = [
            Shard.whole(Table("t", rows, dim, 0.0, access, sequence=sequence))
            for access in (access, Reuse((0.0,) * REUSE_BINS, 64))
        ]
        for beside in (np.zeros(model.encode(none).shape[1]), model.encode([Shard.whole(pool()[0])])[0]):
            least, *others = (model.op_ms(beside + model.encode(shards)) for shards in (none, some))
            assert least.max() <= np.min(others) * (1 + 1e-3)
            assert least.min() > 0  # its op runs


def rates(channel, **directions) -> dict[str, np.ndarray]:
    """Weights by which a channel takes ways["forward"] and ways["backward"] of some terms."""
    return {
        collective_model.rates_weight_name(channel, direction): np.array(
            [some.get(t, 0.0) for t in collective_model.EXCHANGE_TERMS]
        )
        for direction, some in directions.items()
    }


def exchanging(**directions) -> neural.NeuralModel:
    """A model by hand whose all-to-alls take so long."""
    return by_hand(**rates(ALL_TO_ALL, **directions))


def test_waiting_ends_when_the_last_is_ready():
    """All take 0.5 ms forward; backward 0.1 ms and 1 ms a MB of their own, out and in: 2/3 of the own, 1/3
    of the others'."""
    model, compute = (
        exchanging(forward={"once": 0.5}, backward={"once": 0.1, "near_bytes": 1e-6}),
        np.array([1.0, 5.0, 2.0]),
    )
    cost = model.comm_cost(sends(all_to_all=np.array([3e6, 0.0, 6e6])), compute, topology(3))
    assert cost.forward_ms == pytest.approx([0.5, 0.5, 0.5])
    assert cost.backward_ms == pytest.approx([0.1 + 2 + 2, 0.1 + 0 + 3, 0.1 + 4 + 1])
    assert cost.waiting_ms == pytest.approx([8.1 - 5.1, 0.0, 8.1 - 7.1])
    assert cost.total_ms == pytest.approx([0.5 + 4.1 + 3.0, 0.5 + 3.1, 0.5 + 5.1 + 1.0])
    reduced = sends(all_reduce=np.full(3, 3e6))  # who replicates meets the others, too
    assert model.comm_cost(reduced, compute, topology(3)).waiting_ms == pytest.approx([4.0, 0.0, 3.0])
    assert not model.comm_cost(sends(all_to_all=np.zeros(3)), compute, topology(3)).waiting_ms.any()


def test_rows_over_a_host_by_hand():
    """A batch of 256 and 8 columns: 8,192 bytes enter the reduce-scatter of host a, half as many its devices'
    all-to-alls."""
    where, table = on_hosts("aabb"), Table("t", 100, 8, 2.0)
    weights = {
        **rates(REDUCE_SCATTER, forward={"once": 1.0, "near_busiest_bytes": 1e-3}, backward={"once": 2.0}),
        **rates(
            ALL_TO_ALL,
            forward={"once": 0.5, "far_bytes": 1e-3},
            backward={"once": 0.25, "uplink_bytes": 1e-3},
        ),
    }
    problem = Problem("p", (table,), where, 256)
    work = lower(Plan((host_row(table, (0, 1)),)), problem)
    cost = price(work, by_hand(**weights))
    # half goes to the other device; the way in is as long
    within, across = 1 + 8192 / 2 * 1e-3, 0.5 + 4096 / 2 * 1e-3
    assert cost.forward_comm_ms == pytest.approx([within + across] * 2 + [across] * 2)
    uplink = 0.25 + 2 * 4096 / 2 * 1e-3  # which the host's two devices share
    assert cost.backward_comm_ms == pytest.approx([2 + uplink] * 2 + [uplink] * 2)
    own = by_hand(**weights, **rates(WITHIN, forward={"once": 3.0}, backward={"once": 4.0}))
    assert price(work, own).forward_comm_ms == pytest.approx([3 + across] * 2 + [across] * 2)
    assert price(work, own).backward_comm_ms == pytest.approx([4 + uplink] * 2 + [uplink] * 2)
    world = price(lower(Plan((row(table, where),)), problem), own)
    assert world.forward_comm_ms == pytest.approx([1 + 8192 * 3 / 4 * 1e-3] * 4)


def test_rows_over_hosts_unlike_each_other_are_never_exchanged(model):
    assert not model.comm_cost(
        sends(reduce_scatter_host=np.full(3, 1e6)), np.zeros(3), on_hosts("aab")
    ).forward_ms.any()


# --- files


def test_saved_and_loaded_bit_for_bit(model, tmp_path):
    neural.save(model, tmp_path / "m")
    again = neural.load(tmp_path / "m")
    assert again.setting == model.setting and again.meta == model.meta
    assert again.weights.keys() == model.weights.keys()
    assert all(np.array_equal(again.weights[k], model.weights[k]) for k in model.weights)
    shards = [Shard.whole(t) for t in pool()]
    assert np.array_equal(group_op_ms([shards], again), group_op_ms([shards], model))


def test_a_model_of_other_features_is_refused(model, tmp_path):
    neural.save(model, tmp_path)
    meta, weights = model_files.read_model(tmp_path)
    body = {k: v for k, v in meta.items() if k != "schema"}
    model_files.write_model(tmp_path, {**body, "drivers": ["lookups"]}, weights)
    with pytest.raises(ShardCoreError, match=r"was trained on drivers \['lookups'\]; .*train again"):
        neural.load(tmp_path)


def test_a_model_prices_problems_of_all_batches_between_those_that_were_measured():
    table = Table("t", 1000, 8, 2.0)

    def of_batch(model, batch):
        return model.for_problem(Problem("p", (table,), Topology((Device(1 << 30),)), batch))

    model = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {"batch": [64, 256]}})
    half = of_batch(model, 128)
    assert half.setting == dataclasses.replace(SETTING, batch=128)
    shards = [Shard.whole(table)]
    np.testing.assert_array_equal(half.encode(shards), model.encode(shards, 128))
    assert of_batch(half, 256).setting == SETTING and of_batch(model, 64).setting.batch == 64
    for batch in (63, 257):
        with pytest.raises(
            SettingMismatch,
            match=rf"global batch {batch} was not measured; .*batch 256.* is "
            rf"good for 64 to 256: measure with --batch {batch}",
        ):
            of_batch(model, batch)
    earlier = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {}})
    assert of_batch(earlier, 256).setting == SETTING
    with pytest.raises(SettingMismatch, match="is good for 256: measure with --batch 128"):
        of_batch(earlier, 128)


def test_meta_says_what_was_measured(model):
    assert model.meta["ranges"]["op_batch"] == [64.0, 256.0]
    assert model.meta["ranges"]["devices"] == [2.0, 4.0]
    assert sum(v for k, v in model.meta["samples"].items() if k.startswith("compute")) == 240
    assert model.meta["metrics"]["compute_mape"] > 0
    json.dumps(dict(model.meta), allow_nan=False)


def test_a_measured_range_that_falls_is_refused_with_both_ends(tmp_path):
    ranges = {"batch": [64, 256], "devices": [8, 2]}
    neural.save(neural.NeuralModel(SETTING, by_hand().weights, {"ranges": ranges}), tmp_path)
    with pytest.raises(ShardCoreError, match="range of 'devices' is 8 to 2; it needs to rise"):
        neural.load(tmp_path)
