"""Placing in lockstep: its order, ties, and shards that no device may have."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from cuts import MODEL, draw_problem

from shardcore.core.constraints import Constraints
from shardcore.core.types import Shard
from shardcore.search.lockstep import PlacedPlans, place_in_order, search_space_by_columns

CONSTRAINTS = Constraints(pinned=(("t3", (1, 2)),))
PROBLEM = replace(draw_problem(0, n_tables=4), constraints=CONSTRAINTS)


def placed(scores: np.ndarray, costs=(1.0, 3.0, 2.0, 0.0)) -> tuple[PlacedPlans, list[str]]:
    """Two plans of four tables with the same scores at each step, and the names in the order of placing."""
    space = search_space_by_columns(PROBLEM, MODEL, [Shard.whole(t) for t in PROBLEM.tables], cut=False)
    names = [space.cache.table_of_item(item).name for item in range(4)]
    keys = np.array([[(item, int(space.cache.size[item])) for item in range(4)]])
    of_name = dict(zip(("t0", "t1", "t2", "t3"), costs, strict=True))

    def scorer(batch, keys, devices) -> Iterator[np.ndarray]:
        for _ in range(4):
            yield scores

    made = place_in_order(space, keys, np.array([[of_name[n] for n in names]]), 2, scorer)
    return made, [names[i] for i in made.order[0]]


def test_what_has_fewest_devices_is_placed_first_and_then_what_costs_most():
    made, names = placed(np.zeros(4))
    assert names == ["t3", "t1", "t2", "t0"] and made.feasible_plans.all()
    back = made.device_of_each_shard[0, 0]
    assert [back[i] for i in made.order[0]] == made.devices[0, 0].tolist()


def test_of_equal_devices_the_one_with_most_memory_left_has_the_next_shard():
    made, _ = placed(np.zeros(4))
    assert sorted(made.devices[0, 0].tolist()) == [0, 1, 2, 3] and made.devices[0, 0, 0] in (1, 2)
    one = placed(np.array([2.0, 2.0, 1.0, 3.0]))[0]
    assert (one.devices == 2).all()


def test_an_infinite_score_forbids_a_device_and_a_plan_without_one_costs_infinitely_much():
    made, _ = placed(np.array([0.0, np.inf, np.inf, 0.0]))
    # The pinned table has no device left.
    assert not made.legal[..., 1:3].any() and not made.feasible_plans.any() and np.isinf(made.total_ms).all()
