"""Kept problems: what is compared between two commits, and plans that enumerations find."""

import csv

from bench import kept, production
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.step import memory


def found(**costs: float | None) -> dict:
    return {
        name: {"ms": ms, "seconds": 1.0} if ms else {"refused": "too large", "seconds": 1.0}
        for name, ms in costs.items()
    }


def test_dearer_and_refused_plans_are_named_and_others_are_not():
    old = {"p": {"problem": "p", "found": found(same=1.0, dearer=1.0, cheaper=2.0, refused=1.0, new=None)}}
    rows = [{"problem": "p", "found": found(same=1.0005, dearer=1.02, cheaper=1.0, refused=None, new=3.0)}]
    table, worse = kept.against(rows, old, ["same", "dearer", "cheaper", "refused", "new"])
    assert worse == ["p, dearer: 1 ms, now 1.02 ms", "p, refused: 1 ms, now too large"]
    assert "50.00%" in next(line for line in table.splitlines() if line.startswith("cheaper"))


def test_a_packing_fits_exactly_and_is_none_where_memory_is_short():
    problem = kept.drawn("tight", 4)
    plan = kept.packed(problem)
    assert memory.fits(plan, problem) and {p.shard.table for p in plan.placements} == set(problem.tables)
    assert kept.packed(kept.with_memory(problem, 0.3)) is None


def test_a_problem_of_another_run_keeps_its_memory():
    assert kept.drawn("ordinary", 9, 12_345).topology.devices[0].memory_bytes == 12_345
    assert kept.drawn("ordinary", 9).tables == kept.drawn("ordinary", 9, 12_345).tables


def test_published_shards_of_a_table_on_one_rank_are_one(tmp_path):
    with open(tmp_path / production.PLACEMENTS, "w") as file:
        lines = csv.writer(file)
        lines.writerows(
            [("table", "sharding", "cw_dim", "ranks"), ("a", "CW", "16", "0,1,1"), ("b", "RW", "8", "0-1")]
        )
    problem = Problem(
        "p",
        (Table("a", 100, 48, 1.0), Table("b", 100, 8, 5.0, sequence=True)),
        Topology((Device(1 << 30),) * 2),
        64,
    )
    plan = production.published(tmp_path, problem)
    assert sorted((p.kind, p.shard.label, p.devices) for p in plan.placements) == [
        ("column", "a[0:100, 0:16]", (0,)),
        ("column", "a[0:100, 16:48]", (1,)),
        ("row", "b[0:100, 0:8]", (0, 1)),
    ]
