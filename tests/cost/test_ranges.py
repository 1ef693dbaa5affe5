"""Sentences on the parts of a step beyond the measured range of a model."""

import dataclasses

from laws import SETTING, by_hand, pool
from shapes import replica, row
from test_neural import exchanging, topology

from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost import neural, ranges
from shardcore.cost.model import price
from shardcore.step.lower import lower


def beyond(model, tables, n_devices: int, placements, **links) -> list[str]:
    links.setdefault("hardware", SETTING.hardware)
    problem = Problem("p", tables, topology(n_devices, **links), 256)
    return ranges.describe_out_of_range(model, lower(Plan(tuple(placements)), problem))


def test_nothing_to_say_within_the_range(model):
    tables = tuple(pool()[:8])
    assert (
        beyond(
            model, tables, 4, [Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(tables)]
        )
        == []
    )


def test_operations_of_a_dense_part_have_no_rate_and_are_left_out_by_name(model):
    tables = tuple(pool()[:8])
    placements = [Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(tables)]
    given = Problem("p", tables, topology(4, hardware=SETTING.hardware), 256, job=Job(dense_mflops=32.06))
    workload = lower(Plan(tuple(placements)), given)
    [said] = ranges.describe_out_of_range(model, workload)
    assert said == (
        "the dense part of 32.06 million operations a sample is left out: trained models know no rate of it; give "
        "dense_forward_ms and dense_backward_ms in its place"
    )
    assert price(workload, model).dense_ms == 0


def test_what_lies_beyond_the_range_is_named(model):
    tables = (Table("c00", 2 * 10**7, 128, 300.0), Table("c01", 10**7, 128, 1.0))
    said = beyond(model, tables, 8, [Placement("column", Shard.whole(t), (i,)) for i, t in enumerate(tables)])
    largest = model.meta["ranges"]["shard_bytes"][1] / 2**20
    assert f"table 'c00' is 9.5 GiB (and 1 more); largest measured {largest:.1f} MiB" in said
    assert any(s.startswith("table 'c00' has 20,000,000 rows (and 1 more); most measured") for s in said)
    assert "table 'c01' is 128 columns wide (and 1 more); widest measured 64" in said
    assert any(s.startswith("table 'c00' has 300 lookups a sample; most measured") for s in said)
    assert "the topology has 8 devices; most measured 4" in said


def test_collectives_and_batches_never_measured_are_named(model):
    table = pool()[0]
    assert any("reduce-scatter" in s for s in beyond(model, (table,), 2, [row(table, topology(2))]))
    said = beyond(model, (table,), 8, [replica(table, topology(8))], links=make_links(within_host=5.0))
    assert any("all-reduce" in s for s in said)
    assert any("an op over 32 samples (and 7 more); smallest measured 64" in s for s in said)
    assert any("the topology gives within_host 5 GB/s: " in s for s in said)


def test_the_slack_of_a_range_and_its_two_ends():
    """A size counts as measured up to a tenth beyond the range, either way; numbers of devices and batches
    do not."""
    table, measured = (
        Table("t", 1000, 8, 2.0),
        {"shard_width": [4.4, 8 / 1.1], "op_batch": [256, 256], "shard_rows": [1000, 1000]},
    )
    model = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": measured})
    assert beyond(model, (table,), 1, [Placement("column", Shard.whole(table), (0,))]) == []
    for name, ends, said in (
        ("shard_width", [4, 7.2], "table 't' is 8 columns wide; widest measured 7.2"),
        ("shard_width", [9, 16], "table 't' is 8 columns wide; narrowest measured 9"),
        ("op_batch", [200, 255], "device 0 runs an op over 256 samples; largest measured 255"),
        ("op_batch", [257, 300], "device 0 runs an op over 256 samples; smallest measured 257"),
        ("op_shards", [0, 0], "device 0 runs 1 shards in one op; most measured 0"),
        ("op_bytes", [0, 20000], "device 0 holds 32000 bytes in one op; largest measured 20000 bytes"),
        ("shard_pooling", [0, 1.5], "table 't' has 2 lookups a sample; most measured 1.5"),
    ):
        model = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {**measured, name: ends}})
        assert beyond(model, (table,), 1, [Placement("column", Shard.whole(table), (0,))]) == [said]
    clicks = dataclasses.replace(table, sequence=True)
    for name, said in (
        (
            "op_batch",
            [
                "table 't' is a sequence: its lookups are priced from pooled ones with an output for each, not measured"
            ],
        ),
        ("op_sequences", []),
    ):
        model = neural.NeuralModel(SETTING, by_hand().weights, {"ranges": {name: [0, 1000]}})
        assert beyond(model, (clicks,), 1, [Placement("column", Shard.whole(clicks), (0,))]) == said
        others = tuple(dataclasses.replace(clicks, name=f"u{i}", rows=10) for i in range(3))
        placed = [Placement("column", Shard.whole(t), (0,)) for t in (clicks, *others)]
        assert beyond(model, (clicks, *others), 1, placed) == [
            line.replace("'t' is", "'t' (and 3 more) is") for line in said
        ]
    two = [Placement("column", Shard(table, 0, 1000, d * 4, d * 4 + 4), (d,)) for d in (0, 1)]
    model = neural.NeuralModel(
        SETTING,
        exchanging(forward={"once": 1.0}, backward={"once": 1.0}).weights,
        {"ranges": {"devices": [3, 4], "exchange_bytes": [0, 2000], "exchange_id_bytes": [0, 3000]}},
    )
    assert beyond(model, (table,), 2, two) == [
        "the topology has 2 devices; fewest measured 3",
        "device 1 exchanges 4096 bytes (and 1 more); largest measured 2000 bytes",
        "device 1 receives 5120 bytes of ids (and 1 more); largest measured 3000 bytes",
        "column shards: their all-to-all of ids is priced with the rates of the all-to-all, not measured",
    ]
