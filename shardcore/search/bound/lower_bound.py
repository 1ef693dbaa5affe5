"""A lower bound on the cost of the plans of a space, where the model allows a proof.

A step takes max over devices of (compute + backward exchange), plus the longest exchanges forward and of ids.
Each way to cut a table adds work to devices and bytes to exchanges. Each shard needs all ids of its rows.
Both add up over tables. So no plan is cheaper than the least work of all tables divided by the devices'
speeds, with exchanges of evenly divided bytes. These count by a line that is nowhere above the law: a tangent
of a convex one, a chord of a concave one. Groups within units count by their worst division.

The proof is a linear program over options (program.py). It holds for sequences, several collections and too little
memory, too. Where an even division may not be the cheapest one, it is without exchanges and ids.

Plans in which groups share parts of tables (search/state/column_parts.py) are outside of the space, and may cost less.

Constraints count that keep tables whole, together or on some devices, or that name kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search.bound.options import layouts_shared_by_groups, runs_of_problem, space_description
from shardcore.search.bound.program import Program
from shardcore.step.kinds import Layout

_MORE = 1e-2
"""Share by which a bound has to be above that of evenly divided work for another cause to be named."""
_ROUNDING = 2.0**-23
"""Share by which a cost may be off as encodings are rounded to 24 bits (cost.model.round_encodings)."""


@dataclass(frozen=True)
class Bound:
    """A bound on the plans of a space.

    proved_ms: no plan costs less.
    limit: cause that prevents cheaper plans.
    space: the plans considered, in words.
    """

    proved_ms: float
    limit: str
    space: str


def prove_lower_bound(
    problem: Problem, model: CostModel, shared: Sequence[Layout] | None = None
) -> Bound | None:
    """Lower bound on the cost of plans that cut tables by columns, or let groups of devices share them.

    shared: the kinds of sharing to consider; None for all.

    None where the model proves nothing. Raises SettingMismatch for a model of another setting.
    """
    problem.require_setting(model.setting)
    if (bounding := model.bounding_model) is None:
        return None
    runs = runs_of_problem(
        problem, bounding, layouts_shared_by_groups(problem.topology) if shared is None else shared
    )
    program = Program(problem, bounding, runs)
    proved_ms, even_ms = program.lower_bound_ms()
    limit = "the work of all tables, divided evenly"
    if proved_ms > even_ms * (1 + _MORE):
        item = program.costliest_item()
        shown = ", ".join(repr(t.name) for t in item[:3]) + ", ..." * (len(item) > 3)
        limit = (
            f"tables {shown}: kept together on one device they take more than an even share of all"
            if len(item) > 1
            else f"table {shown}: whole on a device it takes more than an even share of all, "
            "and its parts together cost more"
        )
    # Subtract a trace for rounding errors.
    return Bound(proved_ms * (1 - _ROUNDING) + problem.job.dense_ms, limit, space_description(problem, runs))
