"""The price of moving a running job: bytes by level of links, the pause, and when it has paid back."""

from math import inf

import numpy as np
import pytest
from shapes import column, on_hosts, replica, row

from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.plans.diff import diff
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
    price = price_move(Plan(tuple(WHOLE)), Plan((row(TABLE, FOUR),)), problem, MODEL, overhead_s=2.0)
    assert price.bytes == {"within_host": 900, "between_hosts": 1800}
    assert price.busiest_bytes == {"within_host": 900, "between_hosts": 1800}
    gbps = link_gbps(MODEL, problem.topology)
    assert price.seconds == pytest.approx({k: price.busiest_bytes[k] / gbps[k] / 1e9 for k in gbps})
    assert price.pause_s == pytest.approx(2.0 + max(price.seconds.values()))


def test_a_pause_pays_back_once_as_many_steps_are_done():
    price = MovePrice({"between_hosts": 8}, {"between_hosts": 8}, {"between_hosts": 1.0}, 2.0)
    after_s = price.pays_back_s(before_ms=10.0, now_ms=8.0)
    assert (after_s - price.pause_s) / 8.0 == pytest.approx(after_s / 10.0)
    assert price.pays_back_s(10.0, 10.0) == inf
    assert MovePrice({}, {}, {}).pays_back_s(10.0, 10.0) == 0


@pytest.mark.parametrize(
    "limits, moves",
    [
        ({"pay_back_in_s": 1e6, "max_pause_s": 1.0}, True),
        ({"pay_back_in_s": 60, "move_overhead_s": 1e6}, False),
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
    assert bool(diff(old, found).moves) == moves
    assert (
        found.provenance["predicted_ms"]
        <= replan(old, problem, MODEL, ReplanConfig(0)).provenance["predicted_ms"]
    )
