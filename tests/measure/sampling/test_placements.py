"""Wanted samples stay the same: groups of plans follow from draws and recorded plans, not from today's sharders."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

import record_draws

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Setting, Table
from shardcore.io import dataset, files
from shardcore.measure.sampling import placements
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem, sample_table_bytes
from shardcore.step.lower import lower

SHIPPED = Path(__file__).parents[3] / "datasets/cpu-amd-epyc"
SETTING = Setting("test", 2048)


@pytest.fixture(scope="module")
def pool():
    [path] = SHIPPED.glob("pool-*.json")
    return [t for t in files.read_pool(path) if t.pooling > 0]


@pytest.fixture(scope="module")
def planned(pool):
    """Problems of the shipped pool, with the planners that they are drawn with."""
    return list(record_draws.planned_draws(pool, 0, 400, SETTING))


def test_draws_of_plans_are_in_the_shipped_dataset(pool):
    [setting], measured = dataset.dataset_settings(SHIPPED), dataset.read_timed_ids(SHIPPED, "compute")
    # As its README says, at the one batch of then, and pooled.
    config = GroupConfig(max_shard_bytes=4 << 30, smaller_batches=0.0, sequences=0.0)
    drawn = [i for i in range(300) if np.random.default_rng([1, 0, i]).random() < config.planned]
    assert len(drawn) > 70
    for i in drawn:
        request = draw_compute_request(pool, i, setting, 0, config)
        assert dataset.compute_id(setting, request) in measured, i


def test_all_columns_of_all_tables_are_placed_where_they_fit(planned):
    assert {planner for _, planner in planned} == set(placements.PLANNERS)
    for drawn, _ in planned[:20]:
        for planner in placements.PLANNERS:
            if found := placements.place_shards(drawn, planner):
                shards = [Placement("column", s, (d,)) for d, of in enumerate(found) for s in of]
                lower(Plan(tuple(shards)), drawn, fits=False)
                assert all(
                    sum(sample_table_bytes(s.table, drawn, s.width) for s in of) <= d.memory_bytes
                    for of, d in zip(found, drawn.topology.devices, strict=True)
                )
                assert len({(p.shard.table.name, p.devices) for p in shards}) == len(shards)


def test_tables_that_fit_no_device_are_cut():
    large = Table("large", 10_000, 32, 1.0, Zipf(1.0))
    drawn = draw_problem([large], 3, SETTING, 0, ProblemConfig(4, 1, 1, 64))
    room = Device(sample_table_bytes(large, drawn, 12))
    drawn = dataclasses.replace(drawn, tables=(large,), topology=Topology((room,) * 4))
    assert sorted(s.width for of in placements.place_shards(drawn, "size_greedy") for s in of) == [8, 8, 8, 8]


def test_planners_balance_what_they_are_named_after():
    tables = tuple(
        Table(f"t{i}", rows, dim, pooling, Zipf(1.0))
        for i, (rows, dim, pooling) in enumerate([(8000, 4, 1.0), (1000, 16, 1.0), (1000, 8, 9.0)])
    )
    drawn = draw_problem(tables, 0, SETTING, 0, ProblemConfig(2, 3, 3))
    drawn = dataclasses.replace(drawn, tables=tables, topology=Topology((Device(1 << 30),) * 2))
    alone = {
        planner: [{s.table.name for s in of} for of in placements.place_shards(drawn, planner)]
        for planner in ("size_greedy", "dim_greedy", "lookup_greedy")
    }
    assert alone == {
        "size_greedy": [{"t0"}, {"t1", "t2"}],
        "dim_greedy": [{"t1"}, {"t0", "t2"}],
        "lookup_greedy": [{"t2"}, {"t0", "t1"}],
    }


def test_a_record_is_used_where_its_tables_fit(planned):
    drawn = next(p for p, planner in planned if placements.recorded_placement(p, planner))
    planner = next(planner for p, planner in planned if p is drawn)
    lines = placements.recorded_plans()[placements.recorded_plan_key(drawn, planner)]
    assert [
        placements.recorded_plan_line(of, drawn) for of in placements.recorded_placement(drawn, planner)
    ] == lines
    tight = dataclasses.replace(drawn, topology=Topology((Device(1),) * len(drawn.topology)))
    assert placements.recorded_plan_key(tight, planner) == placements.recorded_plan_key(drawn, planner)
    assert (
        placements.recorded_placement(tight, planner) is None
        and placements.place_shards(tight, planner) is None
    )


def test_plans_without_a_record_are_cut_and_stay_the_same(planned):
    drawn = next(p for p, _ in planned if len(p.topology) == 4)
    other = dataclasses.replace(drawn, global_batch=4096)
    assert placements.recorded_placement(other, placements.NEUROSHARD) is None
    found = placements.place_shards(other, placements.NEUROSHARD)
    assert found == placements.place_shards(other, placements.NEUROSHARD)
    assert any(s.width < s.table.dim for of in found for s in of)


def test_recording_keeps_plans_that_the_draws_do_not_find(pool):
    setting = Setting("test", 512)
    new = record_draws.record(pool, 7, 60, setting)
    wanted = dict(record_draws.planned_draws(pool, 7, 60, setting))
    by_key = {
        placements.recorded_plan_key(drawn, planner): (drawn, planner) for drawn, planner in wanted.items()
    }
    searched = {k for k, (_, planner) in by_key.items() if planner == placements.NEUROSHARD}
    assert new and set(new) <= set(by_key) and any(k in searched for k in new)
    for key, lines in new.items():
        drawn, planner = by_key[key]
        columns = record_draws.columns_of(drawn, planner, setting)
        assert lines == [placements.recorded_plan_line(of, drawn) for of in columns]
        assert columns != placements.compute_placement(drawn, planner)
