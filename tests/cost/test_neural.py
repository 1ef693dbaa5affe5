"""What a search relies on: monotone, 0 for nothing, order-free, any number of devices, files that are what
was saved."""

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from laws import SETTING, by_hand, pool
from shapes import ALL_TO_ALL, REDUCE_SCATTER, WITHIN, host_row, on_hosts, row, sends

from shardcore.core.access_statistics import REUSE_BINS, Reuse, Zipf
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.links import links_of
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.cost import collective_model, neural
from shardcore.cost.model import QuantileCostModel, at_confidence, group_costs, price
from shardcore.io import files, model_files, schema, writing
from shardcore.step.kinds import CHANNELS
from shardcore.step.lower import lower

GIB = 1 << 30


def topology(n: int, **links) -> Topology:
    return Topology((Device(64 * GIB),) * n, **links)


# --- compute


def test_adding_a_shard_never_lowers_a_cost(model):
    rng = np.random.default_rng(0)
    odd = [Table("huge", 10**9, 256, 500.0), Table("never", 10, 4, 0.0), Table("one", 1, 4, 1.0, Zipf(0.0))]
    shards = [Shard.whole(t) for t in [*pool(), *odd]]
    groups = [[shards[i] for i in rng.integers(0, len(shards), rng.integers(0, 20))] for _ in range(2000)]
    more = [[*g, shards[rng.integers(len(shards))]] for g in groups]
    before, after = group_costs(groups, model), group_costs(more, model)
    assert (after >= before).all() and (after > 0).all() and np.isfinite(after).all()
    surely = [group_costs(x, QuantileCostModel(model, 0.95)) for x in (groups, more)]
    assert (surely[1] >= surely[0]).all()


def test_empty_group_costs_nothing(model):
    assert group_costs([[]], model).tolist() == [0.0]
    assert model.head(np.zeros((3, model.encode([]).shape[1]))).tolist() == [0.0] * 3
    assert model.forward_share(np.zeros((1, model.encode([]).shape[1]))).tolist() == [0.0]


def test_order_does_not_matter(model):
    shards = [Shard.whole(t) for t in pool()]
    assert group_costs([shards], model) == pytest.approx(group_costs([shards[::-1]], model), rel=1e-12)


def test_sums_can_be_kept_by_adding_and_subtracting(model):
    codes = model.encode([Shard.whole(t) for t in pool()])
    assert model.head(codes[:10].sum(0) - codes[3] + codes[20]) == pytest.approx(
        model.head(codes[[0, 1, 2, 4, 5, 6, 7, 8, 9, 20]].sum(0))
    )


def test_fusing_pays(model):
    shards = [Shard.whole(t) for t in pool()[:5]]
    assert group_costs([shards], model)[0] < group_costs([[s] for s in shards], model).sum()


def test_intervals_widen_with_the_confidence(model):
    sums = model.encode([Shard.whole(t) for t in pool()])
    (low, high), (lower, higher) = model.interval(sums, 0.5), model.interval(sums, 0.95)
    assert (lower < low).all() and (low < high).all() and (high < higher).all()


def test_a_cautious_model_costs_what_measurements_stay_below():
    model = by_hand()
    sums, cautious = model.encode([Shard.whole(t) for t in pool()]), QuantileCostModel(model, 0.9)
    assert cautious.head(sums) == pytest.approx(np.exp(0.4) * model.head(sums))
    assert (
        cautious.encode([Shard.whole(pool()[0])]) == pytest.approx(sums[:1]) and cautious.setting == SETTING
    )
    assert cautious.forward_share(sums) == pytest.approx(model.forward_share(sums))
    assert at_confidence(model, 0.9).confidence == 0.9 and at_confidence(model, None) is model
    with pytest.raises(ShardCoreError, match="confidence leads to level 0.999"):
        QuantileCostModel(model, 0.999).head(sums)


def test_batch_defaults_to_the_settings(model):
    shards = [Shard.whole(pool()[0])]
    assert np.array_equal(model.encode(shards), model.encode(shards, SETTING.batch))
    assert model.head(model.encode(shards, 64).sum(0)) < model.head(model.encode(shards).sum(0))


def test_far_beyond_the_range_costs_grow_as_the_drivers(model):
    one, ten = (Shard.whole(Table("far", 10**9, 64, p, Zipf(0.5))) for p in (1e3, 1e4))
    a, b = group_costs([[one], [ten]], model)
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
            least, *others = (model.head(beside + model.encode(shards)) for shards in (none, some))
            assert least.max() <= np.min(others) * (1 + 1e-3)
            assert least.min() > 0  # its op runs


def test_permuting_devices_permutes_costs(model):
    rng = np.random.default_rng(0)
    owned, compute, order = rng.random(6) * 1e6, rng.random(6), rng.permutation(6)
    traffic = sends(all_to_all=owned, reduce_scatter=owned[::-1], all_reduce=np.full(6, 1e5))
    permuted = traffic[:, order]
    a, b = model.comm(traffic, compute, topology(6)), model.comm(permuted, compute[order], topology(6))
    for name in ("forward_ms", "backward_ms", "waiting_ms"):
        assert getattr(b, name) == pytest.approx(getattr(a, name)[order])


def test_several_plans_at_once(model):
    rng = np.random.default_rng(1)
    owned, compute = rng.random((2, 5, 4)) * 1e6, rng.random((2, 5, 4))
    owned[1, 2] = 0
    links = topology(4, links=links_of(within_host=10.0))
    for where in (topology(4), links):
        together = model.comm(sends(all_to_all=owned), compute, where)
        alone = model.comm(sends(all_to_all=owned[0, 3]), compute[0, 3], where)
        assert together.total_ms.shape == (2, 5, 4)
        assert together.total_ms[0, 3] == pytest.approx(alone.total_ms)
        assert not together.total_ms[1, 2].any()


def rates(channel, **ways) -> dict[str, np.ndarray]:
    """Weights by which a channel takes ways["forward"] and ways["backward"] of some terms."""
    return {
        collective_model.weight(channel, way): np.array(
            [some.get(t, 0.0) for t in collective_model.EXCHANGE_TERMS]
        )
        for way, some in ways.items()
    }


def exchanging(**ways) -> neural.NeuralModel:
    """A model by hand whose all-to-alls take so long."""
    return by_hand(**rates(ALL_TO_ALL, **ways))


def test_waiting_ends_when_the_last_is_ready():
    """All take 0.5 ms forward; backward 0.1 ms and 1 ms a MB of their own, out and in: 2/3 of the own, 1/3
    of the others'."""
    model, compute = (
        exchanging(forward={"once": 0.5}, backward={"once": 0.1, "near_bytes": 1e-6}),
        np.array([1.0, 5.0, 2.0]),
    )
    cost = model.comm(sends(all_to_all=np.array([3e6, 0.0, 6e6])), compute, topology(3))
    assert cost.forward_ms == pytest.approx([0.5, 0.5, 0.5])
    assert cost.backward_ms == pytest.approx([0.1 + 2 + 2, 0.1 + 0 + 3, 0.1 + 4 + 1])
    assert cost.waiting_ms == pytest.approx([8.1 - 5.1, 0.0, 8.1 - 7.1])
    assert cost.total_ms == pytest.approx([0.5 + 4.1 + 3.0, 0.5 + 3.1, 0.5 + 5.1 + 1.0])
    reduced = sends(all_reduce=np.full(3, 3e6))  # who replicates meets the others, too
    assert model.comm(reduced, compute, topology(3)).waiting_ms == pytest.approx([4.0, 0.0, 3.0])
    assert not model.comm(sends(all_to_all=np.zeros(3)), compute, topology(3)).waiting_ms.any()


def test_a_late_start_is_the_first_exchanges(model):
    """Of the compute's skew, 10 ms of it at most; an exchange after an all-to-all begins together."""
    model, own = exchanging(forward={"skew_ms": 0.1}, backward={"once": 1.0}), np.array([1e6, 1e6])
    for traffic, expected in (
        (sends(all_to_all=own), 0.4),
        (sends(reduce_scatter=own), 0.4),
        (sends(all_to_all=own, reduce_scatter=own), 0.4),
        (sends(all_reduce=own), 0.0),
    ):
        assert model.comm(traffic, np.array([1.0, 5.0]), topology(2)).forward_ms == pytest.approx(
            [expected] * 2
        )
    late = model.comm(sends(all_to_all=own), np.array([1.0, 90.0]), topology(2))
    assert late.forward_ms == pytest.approx([1.0, 1.0]) and late.backward_ms == pytest.approx([1.0, 1.0])


def test_one_device_exchanges_nothing(model):
    cost = model.comm(np.full((len(CHANNELS), 1), 1e6), np.array([4.0]), topology(1))
    assert cost.total_ms.tolist() == [0.0]


def test_more_bytes_never_take_less(model):
    owned = np.array([1e5, 2e5, 3e5, 0.0])
    before = model.comm(sends(all_to_all=owned), np.zeros(4), topology(4))
    after = model.comm(sends(all_to_all=owned + [0, 0, 0, 5e5]), np.zeros(4), topology(4))
    assert (after.forward_ms >= before.forward_ms).all() and (after.backward_ms >= before.backward_ms).all()


def test_links_that_the_topology_gives():
    hosts = tuple(Device(GIB, host=f"host-{d // 2}") for d in range(4))
    links = Topology(hosts, links=links_of(within_host=100.0, between_hosts=10.0, latency_ms=0.5))
    fitted = {
        collective_model.weight(ALL_TO_ALL, way): np.full(len(collective_model.EXCHANGE_TERMS), 7.0)
        for way in ("forward", "backward")
    }
    model = neural.NeuralModel(SETTING, fitted, {})
    cost = model.comm(
        sends(all_to_all=np.full(4, 4e6)), np.zeros(4), links
    )  # 1 MB to each: 2 MB leave the host at 10 GB/s
    assert cost.forward_ms == pytest.approx(np.full(4, 0.5 + 0.2))
    reduced = model.comm(sends(all_reduce=np.full(4, 4e6)), np.zeros(4), links)
    assert reduced.backward_ms == pytest.approx(np.full(4, 0.5 + 6 / 10))  # 2 · 3/4 of 4 MB at 10 GB/s
    assert not reduced.forward_ms.any()
    one_host = Topology(hosts[:2], links=links_of(within_host=100.0, latency_ms=0.5))
    cost = model.comm(sends(all_to_all=np.array([2e6, 0.0])), np.zeros(2), one_host)
    assert cost.forward_ms == pytest.approx([0.51, 0.51])


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
    assert not model.comm(
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
    assert np.array_equal(group_costs([shards], again), group_costs([shards], model))


def test_saving_twice_gives_the_same_files(model, tmp_path):
    for name in ("a", "b"):
        neural.save(model, tmp_path / name)
    for name in ("model.json", "weights.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_damaged_files_are_refused(model, tmp_path):
    neural.save(model, tmp_path)
    weights, text = (tmp_path / "weights.safetensors").read_bytes(), (tmp_path / "model.json").read_text()
    (tmp_path / "weights.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ShardCoreError, match="weights.safetensors does not match the digest"):
        neural.load(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(weights)
    (tmp_path / "model.json").write_text(text.replace('"batch": 256', '"batch": 512'))
    with pytest.raises(ShardCoreError, match="edited"):
        neural.load(tmp_path)
    (tmp_path / "model.json").write_text(text[: len(text) // 2])
    with pytest.raises(ShardCoreError, match="not whole JSON"):
        neural.load(tmp_path)
    with pytest.raises(ShardCoreError, match="cannot read"):
        neural.load(tmp_path / "nowhere")


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_model_file_runs_no_code(tmp_path, protocol):
    """Its weights are a pickle that would, and model.json says that they are just what they should be."""
    ran = tmp_path / "ran"
    weights = pickle.dumps(Payload(ran), protocol)
    pickle.loads(weights)
    assert ran.read_text() == "ran"
    ran.unlink()
    neural.save(by_hand(), tmp_path / "model")
    (tmp_path / "model/weights.safetensors").write_bytes(weights)
    meta = schema.read_json(tmp_path / "model/model.json") | {
        "weights_sha256": hashlib.sha256(weights).hexdigest()
    }
    meta["digest"] = files.digest({k: v for k, v in meta.items() if k not in ("schema", "version", "digest")})
    writing.write_json(tmp_path / "model/model.json", meta)
    with pytest.raises(ShardCoreError, match="weights.safetensors is not safetensors"):
        neural.load(tmp_path / "model")
    assert not ran.exists()


def test_a_model_of_other_features_is_refused(model, tmp_path):
    neural.save(model, tmp_path)
    meta, weights = model_files.read_model(tmp_path)
    body = {k: v for k, v in meta.items() if k != "schema"}
    model_files.write_model(tmp_path, {**body, "drivers": ["lookups"]}, weights)
    with pytest.raises(ShardCoreError, match=r"was trained on drivers \['lookups'\]; .*train again"):
        neural.load(tmp_path)


def test_a_model_that_knows_fewer_terms_of_exchanges_prices_as_before(model, tmp_path):
    known = collective_model.EXCHANGE_TERMS.index("shared_uplink_bytes")
    laws = {
        name
        for name, law in model.weights.items()
        if len(law) == len(collective_model.EXCHANGE_TERMS) and name.startswith("exchange_")
    }
    short = {name: law[:known] if name in laws else law for name, law in model.weights.items()}
    body = {k: v for k, v in model.meta.items() if k != "provenance"}
    model_files.write_model(
        tmp_path,
        {
            **body,
            "setting": files.setting_to_json(model.setting),
            **neural._NAMES,
            "exchange_terms": list(collective_model.EXCHANGE_TERMS[:known]),
        },
        short,
    )
    old = neural.load(tmp_path).weights
    assert laws and all(
        (old[name][:known] == short[name]).all() and not old[name][known:].any() for name in laws
    )


def test_a_model_prices_problems_of_all_batches_between_those_that_were_measured():
    table = Table("t", 1000, 8, 2.0)
    model = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {"batch": [64, 256]}})
    half = model.for_batch(128)
    assert half.setting == dataclasses.replace(SETTING, batch=128)
    shards = [Shard.whole(table)]
    np.testing.assert_array_equal(half.encode(shards), model.encode(shards, 128))
    assert half.for_batch(256).setting == SETTING and model.for_batch(64).setting.batch == 64
    for batch in (63, 257):
        with pytest.raises(
            SettingMismatch,
            match=rf"global batch {batch} was not measured; .*batch 256.* is "
            rf"good for 64 to 256: measure with --batch {batch}",
        ):
            model.for_batch(batch)
    earlier = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {}})
    assert earlier.for_batch(256).setting == SETTING
    with pytest.raises(SettingMismatch, match="is good for 256: measure with --batch 128"):
        earlier.for_batch(128)


def test_meta_says_what_was_measured(model):
    assert model.meta["ranges"]["op_batch"] == [64.0, 256.0]
    assert model.meta["ranges"]["devices"] == [2.0, 4.0]
    assert sum(v for k, v in model.meta["samples"].items() if k.startswith("compute")) == 240
    assert model.meta["metrics"]["compute_mape"] > 0
    json.dumps(dict(model.meta), allow_nan=False)
