"""A plan of another problem is refused by the name of what differs."""

from dataclasses import replace

import pytest
from shapes import column

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.io import files
from shardcore.io.files import read_grouped_plan, write_grouped_plan
from shardcore.step.sharding_groups import GroupedPlan, Grouping, problem_of_group

TABLES = tuple(Table(name, 100, 16, 2.0) for name in ("b", "a", "c"))
WHOLE = Problem("p", TABLES, Topology(tuple(Device(10**9, host=f"h{d // 2}") for d in range(4))), 64)


def with_table(**changed) -> Problem:
    return replace(WHOLE, tables=(replace(TABLES[0], **changed), *TABLES[1:]))


def on(**changed) -> Problem:
    devices = (replace(WHOLE.topology.devices[0], **changed), *WHOLE.topology.devices[1:])
    return replace(WHOLE, topology=Topology(devices))


@pytest.mark.parametrize(
    "other, message",
    [
        (with_table(name="d"), "name of tables"),
        (replace(WHOLE, tables=TABLES[::-1]), "order of tables"),
        (replace(WHOLE, tables=TABLES[:2]), "name of tables"),
        (with_table(rows=101), "rows of tables"),
        (with_table(dim=32), "dim of tables"),
        (with_table(pooling=2.5), "pooling of tables"),
        (with_table(access=Zipf(1.2)), "access of tables"),
        (with_table(features=2, weighted=True), "features of tables, weighted of tables"),
        (on(host="h9"), "host of devices"),
        (on(memory_bytes=2 * 10**9), "memory_bytes of devices"),
        (on(speed=2.0), "speed of devices"),
        (replace(WHOLE, topology=Topology(WHOLE.topology.devices[:2])), "number of devices"),
        (
            replace(WHOLE, topology=replace(WHOLE.topology, links=make_links(within_host=9.0))),
            "topology.links",
        ),
        (replace(WHOLE, global_batch=128), "global_batch"),
        (replace(WHOLE, optimizer="adam"), "optimizer"),
        (replace(WHOLE, job=Job(id_bytes=4)), "job.id_bytes"),
        (replace(WHOLE, constraints=Constraints(unsplit=("a",))), "constraints"),
    ],
)
def test_a_plan_of_another_problem_names_what_differs(tmp_path, other, message):
    path = tmp_path / "plan.json"
    files.write_plan(path, Plan(tuple(column(t, 0) for t in TABLES)), WHOLE)
    with pytest.raises(ShardCoreError, match=f"is a plan for problem 'p' .*; they differ in {message}$"):
        files.read_plan(path, other)
    grouped, own = tmp_path / "grouped.json", problem_of_group(WHOLE, Grouping(2, "contiguous"))
    plan = Plan(tuple(column(t, 0) for t in TABLES))
    write_grouped_plan(grouped, GroupedPlan(Grouping(2, "contiguous"), plan, own), WHOLE)
    with pytest.raises(
        ShardCoreError, match=f"is a grouped plan for problem 'p' .*; they differ in {message}$"
    ):
        read_grouped_plan(grouped, other)


def test_a_name_alone_makes_no_other_plan(tmp_path):
    """The digest has it too, but nothing of the plan depends on it."""
    path = tmp_path / "plan.json"
    files.write_plan(path, Plan(tuple(column(t, 0) for t in TABLES)), WHOLE)
    with pytest.raises(ShardCoreError, match="is a plan for problem 'p' .*; problem 'q' here has [0-9a-f]*$"):
        files.read_plan(path, replace(WHOLE, name="q"))
