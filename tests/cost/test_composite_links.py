"""Rows in host memory: what they add to the cost of ops."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.composite import Composite, MemoryLinks
from shardcore.cost.model import at_confidence, price
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.search.decisions.memory_tiers import tier_of_each_table, with_load_factors
from shardcore.step.lower import lower

MODEL = AnalyticModel(Setting("made-up", 512))
TABLES = tuple(Table(f"t{i}", 5_000, 16, 3.0, Zipf(0.9)) for i in range(4))
HOST = {"memory": (Memory("host", 1 << 30, 2.0),)}
PLAIN = Problem("p", TABLES, Topology((Device(1 << 30),) * 2, **HOST), 512)
LINKS = MemoryLinks({"host": 2.0}, "exact_sgd", 512)
TIERED = with_load_factors(PLAIN, {"t0": 0.1, "t1": 0.0})


def plan(of: Problem) -> Plan:
    return Plan(tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(of.tables)))


def ms(of: Problem, model=MODEL) -> np.ndarray:
    cost = price(lower(plan(of), of), model.for_problem(of))
    return np.array(cost.forward_compute_ms) + np.array(cost.backward_compute_ms)


def test_a_device_takes_as_much_longer_as_its_bytes_take_on_the_link():
    link = [tier.link_bytes / 2e6 for tier in tier_of_each_table(TIERED)]
    assert min(link[:2]) > 0 and link[2:] == [0, 0]
    assert ms(TIERED) - ms(PLAIN) == pytest.approx(link[:2])
    faster = replace(TIERED, topology=replace(TIERED.topology, memory=(Memory("host", 1 << 30, 4.0),)))
    assert ms(faster) - ms(PLAIN) == pytest.approx(np.array(link[:2]) / 2)


def test_rows_on_ssd_cross_its_own_link_and_bring_no_optimizer_state():
    """A tier is as slow as its link. FBGEMM has state of cells in host memory, and none on SSD."""
    memory = (*HOST["memory"], Memory("ssd", 1 << 30, 0.5))
    rowwise = replace(PLAIN, optimizer="rowwise_adagrad", topology=replace(PLAIN.topology, memory=memory))
    model = AnalyticModel(replace(MODEL.setting, optimizer="rowwise_adagrad"))
    below = {
        tier: replace(rowwise, tables=(replace(TABLES[0], load_factor=0.1, tier=tier), *TABLES[1:]))
        for tier in ("host", "ssd")
    }
    more = {tier: (ms(of, model) - ms(rowwise, model))[0] for tier, of in below.items()}
    assert 0 < more["ssd"] == pytest.approx(4 * more["host"])
    warnings = model.for_problem(below["ssd"]).out_of_range(lower(plan(below["ssd"]), below["ssd"]))
    assert (
        "table 't0' has rows in SSD: the topology gives the 0.5 GB/s of their link, not measured" in warnings
    )


def test_problems_without_such_rows_keep_their_model():
    assert MODEL.for_problem(TIERED).for_problem(PLAIN) == MODEL.for_problem(PLAIN)


def test_columns_and_row_ranges_have_their_share():
    model, table = MODEL.for_problem(TIERED), TIERED.tables[0]
    whole, half, range_ = model.encode(
        [Shard.whole(table), Shard(table, 0, table.rows, 0, 8), Shard(table, 0, table.rows // 2, 0, 16)]
    )[:, -3:]
    assert half == pytest.approx(whole / 2) and range_ == pytest.approx(whole / 2)


def test_compiled_equals_head_for_every_model(model):
    short = replace(model, setting=replace(model.setting, precision="fp16"))
    for models in ((MODEL,), (model,), (short, model)):
        own = Composite(models, LINKS)
        sums = own.encode([p.shard for p in plan(TIERED).placements]).sum(0)
        compiled = own.compiled_op_ms()
        assert compiled.head(sums, compiled.parameters) == pytest.approx(float(own.op_ms(sums[None])[0]))
        forward, backward, _ = own.op_part_ms(sums)
        assert min(forward, backward) > 0


def test_a_cautious_model_takes_the_link_as_it_is(model):
    own = Composite((model,), LINKS)
    sums = own.encode([p.shard for p in plan(TIERED).placements]).sum(0, keepdims=True)
    cautious, inner = at_confidence(own, 0.9), at_confidence(model, 0.9)
    assert cautious.op_ms(sums)[0] == pytest.approx(inner.op_ms(sums[:, :-3])[0] + sums[0, -3:].sum())
    compiled = cautious.compiled_op_ms()
    assert compiled.head(sums[0], compiled.parameters) == pytest.approx(cautious.op_ms(sums)[0])


def test_what_is_no_cost_model_is_refused():
    unhashable = type("Unhashable", (AnalyticModel,), {"__hash__": None})(MODEL.setting)
    for what in (5, None, object(), LINKS, unhashable):
        with pytest.raises(ShardCoreError, match="it needs to be a cost model, as load_model"):
            price(lower(plan(PLAIN), PLAIN), what)


def test_no_plan_costs_less_than_the_bound():
    tiered = MODEL.for_problem(TIERED)
    found = prove_lower_bound(TIERED, tiered)
    assert 0 < found.proved_ms <= price(lower(plan(TIERED), TIERED), tiered).total_ms
    assert found.proved_ms > prove_lower_bound(PLAIN, MODEL).proved_ms
