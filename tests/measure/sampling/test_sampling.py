import dataclasses
import itertools

import numpy as np
import pytest
from shapes import entering

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset, files
from shardcore.measure.sampling import distinct_requests
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.groups import (
    REPLICATED_BYTES,
    GroupConfig,
    draw_compute_request,
    reference_request,
)
from shardcore.measure.sampling.problems import (
    DIMS,
    ProblemConfig,
    draw_problem,
    sample_table_bytes,
    with_sized_devices,
)
from shardcore.measure.sampling.steps import draw_plans_of_measured_steps, draw_step_plans
from shardcore.step.access import output_bytes
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.kinds import shards_by_device
from shardcore.step.lower import lower
from shardcore.step.memory import local_batch_bytes, table_peak_bytes

SETTING = Setting("test", 256)


def test_draws_depend_on_seed_and_index_alone(tables):
    assert draw_compute_request(tables, 5, SETTING, seed=1) == draw_compute_request(
        tables, 5, SETTING, seed=1
    )
    assert draw_compute_request(tables, 5, SETTING, seed=1) != draw_compute_request(
        tables, 5, SETTING, seed=2
    )
    assert draw_collective_request(4, 3, 252) == draw_collective_request(4, 3, 252)


def as_in_version_1(plan):
    """The placements as plan files had them."""
    parts = [
        (s, p.devices if p.kind == "data_parallel" else (d,))
        for p in plan.placements
        for d, s in ([(0, p.shard)] if p.kind == "data_parallel" else shards_by_device(p))
    ]
    return [
        {
            "table": s.table.name,
            "rows": [s.row_lo, s.row_hi],
            "columns": [s.col_lo, s.col_hi],
            "devices": list(devices),
        }
        for s, devices in parts
    ]


def test_draws_are_those_of_earlier_versions(tables):
    """Or every dataset would be measured anew. Where this fails and should, raise no version: say so to who
    measures."""
    config = GroupConfig(
        planned=0.0, max_shard_bytes=1 << 20, smaller_batches=0.0, one_sided=0.0, sequences=0.0
    )
    groups = [
        dataset.compute_id(SETTING, draw_compute_request(tables, i, SETTING, 3, config)) for i in range(50)
    ]
    assert files.json_digest(groups) == "77f112ed76628dbc"
    control = reference_request(tables, SETTING, config)
    assert dataset.compute_id(SETTING, control) == "6f71e685ca7151a4"
    exchanges = [draw_collective_request(i, 4, 256, 3) for i in range(50)]
    ids = [i for i, r in enumerate(exchanges) if r.collective == "all_to_all_ids"]
    assert ids == [8, 10, 11, 16, 30, 34, 37]  # earlier versions drew something else for these
    bucketized = [i for i, r in enumerate(exchanges) if r.collective == "all_to_all_ids_bucketized"]
    assert bucketized == [6]
    others = [
        dataset.collective_id(SETTING, r) for i, r in enumerate(exchanges) if i not in (*ids, *bucketized)
    ]
    assert files.json_digest(others) == "e4fda0b05b8252bd"
    problem = draw_problem(tables, 5, SETTING, 3, ProblemConfig(min_tables=3))
    # With memory as it was counted then: only that may differ.
    as_then = with_sized_devices(problem, ProblemConfig().slack, sample_table_bytes)
    assert files.json_digest(files.problem_to_json(as_then)) == "dbf5ab6aef520427"
    problem, plans = draw_step_plans(tables, 1, SETTING, 2, 32 << 20, 3)
    before = {
        "column": "columns",
        "column, row": "rows",
        "column, data_parallel": "copies",
        "column, row, data_parallel": "rows and copies",
    }
    placed = [[before[kinds], as_in_version_1(plan)] for kinds, plan in plans]
    as_then = with_sized_devices(problem, 2.0 * len(problem.topology), sample_table_bytes)
    assert files.json_digest([files.problem_to_json(as_then), placed]) == "14b722963760f6c5"


def test_different_draws_are_counted_once_and_a_tiny_pool_ends():
    assert list(distinct_requests(lambda i: i // 2, str, 3)) == [("0", 0), ("1", 1), ("2", 2)]
    assert [key for key, _ in distinct_requests(lambda i: i % 3, str, 5)] == ["0", "1", "2"]
    assert len(list(distinct_requests(lambda i: i % 7, str, None))) == 7
    assert list(itertools.islice(distinct_requests(lambda i: i, str, None), 2000))[-1] == ("1999", 1999)


def test_a_tenth_of_groups_is_of_small_tables_at_a_local_batch(tables):
    large = [*tables[:5], dataclasses.replace(tables[0], name="large", rows=10**7)]
    requests = [
        draw_compute_request(large, i, SETTING, config=GroupConfig(planned=0.0, smaller_batches=0.0))
        for i in range(400)
    ]
    local = [r for r in requests if r.batch != 256]
    assert {r.batch for r in local} == {128, 64, 32} and 25 <= len(local) <= 60
    assert all(s.has_all_rows or s.table.name == "large" for r in local for s in r.shards)
    assert max(s.bytes for r in local for s in r.shards) <= REPLICATED_BYTES
    assert max(s.bytes for r in requests for s in r.shards) > REPLICATED_BYTES


def test_a_fifth_of_other_groups_runs_over_smaller_batches(tables):
    """They are groups of all kinds, with large tables and of plans."""
    requests = [
        draw_compute_request(tables, i, SETTING, config=GroupConfig(replicated=0.0)) for i in range(400)
    ]
    smaller = [r for r in requests if r.batch != 256]
    assert {r.batch for r in smaller} == {128, 64, 32} and 60 <= len(smaller) <= 100
    assert any(not s.has_all_rows for r in smaller for s in r.shards)
    alike = [
        draw_compute_request(tables, i, SETTING, config=GroupConfig(replicated=0.0, smaller_batches=0.0))
        for i in range(400)
    ]
    assert [r.shards for r in alike] == [r.shards for r in requests]


def test_a_twentieth_of_other_groups_is_of_sequences_and_the_rest_as_without(tables):
    """Each of one width, and with outputs no larger than a shard."""
    config = GroupConfig(replicated=0.0, max_shard_bytes=1 << 20)
    requests = [draw_compute_request(tables, i, SETTING, config=config) for i in range(400)]
    sequences = [r for r in requests if r.shards[0].table.sequence]
    assert 10 <= len(sequences) <= 30
    for request in sequences:
        assert {(s.width, s.table.sequence) for s in request.shards} == {(request.shards[0].width, True)}
        assert max(output_bytes(s, request.batch) for s in request.shards) <= 1 << 20
    without = [
        draw_compute_request(tables, i, SETTING, config=dataclasses.replace(config, sequences=0.0))
        for i in range(400)
    ]
    assert [r for r in requests if r not in sequences] == [
        w for w, r in zip(without, requests, strict=True) if r not in sequences
    ]


def test_a_fifth_of_random_groups_has_narrow_shards_only_or_wide_ones_only(tables):
    """Kernels on GPUs choose by the widest table of an op."""
    config = GroupConfig(planned=0.0, replicated=0.0)
    requests = [draw_compute_request(tables, i, SETTING, config=config) for i in range(600)]
    widths = [[s.width for s in r.shards] for r in requests if len(r.shards) >= 8]
    assert 0.07 < np.mean([max(w) <= 32 for w in widths]) < 0.15
    assert 0.05 < np.mean([min(w) > 32 for w in widths]) < 0.15
    both = [
        [
            s.width
            for s in draw_compute_request(
                tables, i, SETTING, config=dataclasses.replace(config, one_sided=0.0)
            ).shards
        ]
        for i in range(200)
    ]
    assert not any(min(w) > 32 for w in both if len(w) >= 8)

    narrow = dataclasses.replace(config, max_width=16)
    assert (
        max(
            s.width for i in range(50) for s in draw_compute_request(tables, i, SETTING, config=narrow).shards
        )
        <= 16
    )


def test_a_problem_has_half_as_much_memory_again_as_it_needs(tables):
    problem = draw_problem(tables, 0, SETTING, config=ProblemConfig(min_tables=5, devices=2))
    need = sum(table_peak_bytes(t, problem) for t in problem.tables)
    each = int(need * 1.5 / 2) + local_batch_bytes(problem)
    assert [d.memory_bytes for d in problem.topology.devices] == [each] * 2
    one = [tables[0]]  # of which each device holds at least one column
    problem = draw_problem(one, 0, SETTING, config=ProblemConfig(min_tables=1, max_dim=4, devices=4))
    assert problem.topology.devices[0].memory_bytes == (
        table_peak_bytes(problem.tables[0], problem, 4) + local_batch_bytes(problem)
    )


def test_groups_cover_what_a_search_asks_about(tables):
    config = GroupConfig(max_shards=30, max_width=256, max_shard_bytes=1 << 20)
    requests = [draw_compute_request(tables, i, SETTING, config=config) for i in range(300)]
    shards = [s for r in requests for s in r.shards]
    assert {len(r.shards) for r in requests} >= {1, 30}
    assert all(s.bytes <= 1 << 20 and s.width % 4 == 0 and s.width <= 256 for s in shards)
    assert any(s.width not in DIMS for s in shards) and any(not s.has_all_rows for s in shards)
    assert any(len(set(r.shards)) < len(r.shards) for r in requests)


def test_exchanges_vary_in_kind_load_and_skew():
    requests = [draw_collective_request(i, 4, 256) for i in range(400)]
    plain = [r for r in requests if (r.collective, r.batch) == ("all_to_all", 256)]
    assert 0.45 < len(plain) / 400 < 0.55
    of_rows = [r for r in requests if r.collective == "reduce_scatter"]
    assert 0.12 < len(of_rows) / 400 < 0.25
    assert 0.05 < sum(r.collective == "all_to_all_ids" for r in requests) / 400 < 0.15
    bucketized = [r.widths for r in requests if r.collective == "all_to_all_ids_bucketized"]
    assert 0.03 < len(bucketized) / 400 < 0.12 and all(2.1 * min(w) >= max(w) for w in bucketized)
    kinds = {(r.collective, r.payload) for r in requests}
    assert kinds == {
        *((c, "fp32") for c, row in COLLECTIVES.items() if row.ids),
        ("all_reduce", "fp32"),
        *itertools.product(("all_to_all", "reduce_scatter"), ("fp32", "fp16", "bf16")),
    }
    assert 0.15 < sum(r.payload != "fp32" for r in requests) / 400 < 0.3
    assert {r.batch for r in requests} == {32, 64, 128, 256} and any(0 in r.widths for r in plain)
    assert all(max(r.widths) <= 30 * 4 * 128 for r in requests)
    assert {r.hosts for r in requests} == {1} and draw_collective_request(3, 4, 256, hosts=2).hosts == 2
    # A draw depends on seed, index and ranks only.
    assert draw_collective_request(3, 4, 512).widths == requests[3].widths


def test_exchanges_vary_in_balance_and_skew():
    requests = [draw_collective_request(i, 2, 256) for i in range(100)]
    ratios = [max(r.widths) / max(1, min(r.widths)) for r in requests]
    assert min(ratios) < 1.1 and max(ratios) > 1.5
    assert all(min(r.start_ms) == 0 for r in requests) and sum(max(r.start_ms) > 0 for r in requests) == 50


def test_steps_are_of_random_plans_of_all_ways_that_run(tables):
    pool = [dataclasses.replace(t, name=f"{t.name}{i}") for i in range(10) for t in tables]
    steps = draw_plans_of_measured_steps(pool, 15, SETTING, 2, 32 << 20, seed=3)
    assert [len(made) for _, made in steps] == [6, 6, 3]
    for problem, made in steps:
        assert len(problem.topology) == 2 and all(t.bytes <= 32 << 20 for t in problem.tables)
        for kind, plan in made:
            entered = set(entering(lower(plan, problem).traffic))
            assert entered == {"all_to_all"} | ({"reduce_scatter"} if "row" in kind else set()) | (
                {"all_reduce"} if "data_parallel" in kind else set()
            )
    more = draw_plans_of_measured_steps(pool, 30, SETTING, 2, 32 << 20, seed=3)
    assert more[:2] == steps[:2] and more[2][1][:3] == steps[2][1]
    large = [dataclasses.replace(t, rows=2_000_000) for t in pool]
    assert {kind for kind, _ in draw_step_plans(large, 0, SETTING, 2, 1 << 29)[1]} == {
        "column",
        "column, row",
    }
    few = {draw_step_plans(tables[:4], i, SETTING, 2, 1 << 29)[0].tables for i in range(5)}
    assert max(t.dim for some in few for t in some) >= 32
    output = "none of the pool's 60 tables has lookups and fits 1 MiB at a dim of 4"
    with pytest.raises(ShardCoreError, match=output):
        draw_plans_of_measured_steps(large, 1, SETTING, 2, 1 << 20)
    assert draw_plans_of_measured_steps(large, 0, SETTING, 2, 1 << 20) == []


def test_problems_are_like_neuroshards(tables):
    pool = [dataclasses.replace(t, name=f"{t.name}{i}") for i in range(10) for t in tables]
    for i in range(20):
        problem = draw_problem(pool, i, SETTING, config=ProblemConfig(max_dim=32))
        assert 10 <= len(problem.tables) <= 50 and len(problem.topology) == 4
        assert all(t.dim <= 32 and t.pooling > 0 for t in problem.tables)
    with pytest.raises(ShardCoreError, match="5 tables with lookups"):
        draw_problem(tables, 0, SETTING)
    with pytest.raises(ShardCoreError, match="no tables"):
        draw_compute_request([], 0, SETTING)


def test_draws_are_in_the_setting(tables):
    setting = Setting("test", 128, "fp16", "rowwise_adagrad")
    request = draw_compute_request(tables, 0, setting)
    assert request.batch == 128 and all(s.table.precision == "fp16" for s in request.shards)
    small = ProblemConfig(min_tables=2, max_tables=4)
    draw_problem(tables, 0, setting, config=small).require_setting(setting)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GroupConfig(max_shards=0),
        lambda: GroupConfig(max_width=2),
        lambda: ProblemConfig(min_tables=5, max_tables=4),
        lambda: ProblemConfig(max_dim=2),
        lambda: ProblemConfig(devices=0),
    ],
)
def test_bad_configs_are_refused(make):
    with pytest.raises(ShardCoreError, match="needs"):
        make()
