"""The price of moving a running job: bytes by level of links, the pause, and when it has paid back."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from shapes import column, on_hosts, replica, row

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.move_rates import MoveRates, read_move_rates, write_move_rates
from shardcore.plans.diff import diff_plans
from shardcore.plans.move_price import MovePrice, link_gbps, moved_bytes, price_move
from shardcore.plans.replan import ReplanConfig, replan
from shardcore.search import SHARDERS, Budget

MODEL = AnalyticModel(Setting("made-up", 240), lookup_ns=20)
FOUR = on_hosts("aabb", 2 << 20)
TABLE = Table("t", 100, 8, 2.0)
WHOLE = [column(TABLE, 0)]


@pytest.mark.parametrize(
    "old, new, sent",
    [
        (WHOLE, [column(TABLE, 1)], {(0, 1): 100 * 8 * 4 + 100 * 4}),
        (WHOLE, [column(TABLE, 0, 0, 4), column(TABLE, 3, 4)], {(0, 3): 100 * 4 * 4 + 100 * 4}),
        (WHOLE, [row(TABLE, FOUR)], {(0, d): 25 * 9 * 4 for d in (1, 2, 3)}),
        (WHOLE, [replica(TABLE, FOUR)], {(0, d): 100 * 9 * 4 for d in (1, 2, 3)}),
        ([replica(TABLE, FOUR)], [column(TABLE, 2)], {}),
        (WHOLE, WHOLE, {}),
    ],
)
def test_devices_take_the_cells_that_they_lack_with_their_state(old, new, sent):
    problem = Problem("moved", (TABLE,), FOUR, 240, "rowwise_adagrad")
    found = moved_bytes(Plan(tuple(old)), Plan(tuple(new)), problem)
    assert {(i, j): int(found[i, j]) for i, j in zip(*np.nonzero(found), strict=True)} == sent


def test_the_pause_is_that_of_the_busiest_device_on_the_slowest_level():
    problem = Problem("moved", (TABLE,), FOUR, 240, "rowwise_adagrad")
    rates = MoveRates(1.0, 0.25, 0.5, 1e-6, 2e-6, 100.0, 50.0, 4e-6)
    price = price_move(Plan(tuple(WHOLE)), Plan((row(TABLE, FOUR),)), problem, MODEL, rates)
    assert price.bytes == {"within_host": 900, "between_hosts": 1800}
    busiest_bytes = {"within_host": 900, "between_hosts": 1800}
    gbps = link_gbps(MODEL, problem.topology)
    assert price.seconds == pytest.approx({k: n / gbps[k] / 1e9 for k, n in busiest_bytes.items()})
    # Device 0 has all of the old shard; the new ones are 25 rows of 8 weights and a number of state each.
    assert price.overhead_s == pytest.approx(
        {
            "move": 1.0,
            "collections": 0.25,
            "tables": 0.5,
            "build": 0.9,
            "copy": 0.45,
            "digest": 125 * (9 * 100 + 2 * 50) / 1e9,
            "free": 0.9,
        }
    )
    assert price.pause_s == pytest.approx(sum(price.overhead_s.values()) + max(price.seconds.values()))


def test_all_tables_of_a_collection_that_changes_are_built_anew():
    tables = tuple(Table(name, 100, 8, 2.0, collection=name[0]) for name in ("a1", "a2", "b"))
    problem = Problem("moved", tables, FOUR, 240, "exact_sgd")
    rates = MoveRates(0.0, 0.0, 1.0, 1e-6, 1e-6, 0.0, 0.0, 1e-6, {"within_host": 0.5e-6})
    old, new = (Plan(tuple(column(t, d if t.name == "a1" else 0) for t in tables)) for d in (0, 1))
    price = price_move(old, new, problem, rates=rates)
    # Of the other level nothing is known, and nothing moves there.
    assert price.seconds == pytest.approx({"within_host": 6.4})
    assert price.overhead_s == pytest.approx(
        {"move": 0, "collections": 0, "tables": 2, "build": 3.2, "copy": 3.2, "digest": 0, "free": 6.4}
    )
    assert "the move takes 21.2 s" in str(price)
    assert "not known without rates" in str(price_move(old, new, problem))
    assert price_move(old, old, problem, rates=rates).pause_s == 0
    with pytest.raises(
        ShardCoreError, match="no link_gbps of within_host, where tables move; .* or give a model"
    ):
        price_move(old, new, problem, rates=replace(rates, link_gbps={}))
    # A level without a rate is as fast as the next one out.
    far = price_move(old, new, problem, rates=replace(rates, link_gbps={"between_hosts": 0.25e-6}))
    assert far.seconds == pytest.approx({"within_host": 12.8, "between_hosts": 0.0})


def test_rates_are_files(tmp_path):
    rates = MoveRates(1.0, 0.2, 0.5, 1.0, 2.0, 100.0, 50.0, 4.0, {"within_host": 3.0})
    write_move_rates(tmp_path / "rates.json", rates)
    assert read_move_rates(tmp_path / "rates.json") == rates
    for field, value, words in [
        ("copy_gbps", 0.0, "copy_gbps 0.0; it needs 1e-09 to"),
        ("link_gbps", {"far": 1.0}, "links 'far'; known are within_host"),
    ]:
        with pytest.raises(ShardCoreError, match=words):
            replace(rates, **{field: value})


def test_a_pause_pays_back_once_as_many_steps_are_done():
    price = MovePrice({"between_hosts": 8}, {"between_hosts": 1.0}, {"move": 2.0})
    after_s = price.payback_s(before_ms=10.0, now_ms=8.0)
    assert (after_s - price.pause_s) / 8.0 == pytest.approx(after_s / 10.0)
    assert price.payback_s(10.0, 10.0) == inf
    assert MovePrice({}, {}).payback_s(10.0, 10.0) == 0


@pytest.mark.parametrize(
    "limits, moves",
    [
        ({"pay_back_in_s": 1e6, "max_pause_s": 1.0}, True),
        ({"pay_back_in_s": 60, "move_rates": MoveRates(1e6, 0, 0, 1, 1, 0, 0, 1)}, False),
        ({"max_pause_s": 1e-12}, False),
    ],
)
def test_a_plan_moves_where_that_pays_back(limits, moves):
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(rng.integers(100, 4000)), 16, float(rng.uniform(1, 10))) for i in range(5)
    )
    problem = Problem("again", tables, FOUR, 240)
    old = SHARDERS["size_greedy"](problem, MODEL)
    found = replan(old, problem, MODEL, ReplanConfig(budget=Budget(evals=200), **limits))
    assert bool(diff_plans(old, found).moves) == moves
    assert (
        found.provenance["predicted_ms"]
        <= replan(old, problem, MODEL, ReplanConfig(0)).provenance["predicted_ms"]
    )
