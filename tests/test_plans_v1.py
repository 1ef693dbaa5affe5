"""Plan files of version 1 read as what they meant. tests/files holds one that the commit before kinds
(facde50) wrote."""

import json
from pathlib import Path

import numpy as np
import pytest
from shapes import column, entering, host_row, on_hosts, replica, row, sends

from shardcore import files
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.errors import ShardCoreError
from shardcore.layouts import shards_on
from shardcore.plans_v1 import PlacedShard, PlanFile, placements
from shardcore.types import Plan, Problem, Setting, Table
from shardcore.workload import lower

KEPT = Path(__file__).parent / "files"


@pytest.fixture(scope="module")
def kept():
    problem = files.read_problem(KEPT / "problem-v1.json")
    return problem, files.read_plan(KEPT / "plan-v1.json", problem)


def test_a_kept_file_is_read(kept):
    problem, plan = kept
    t = {x.name: x for x in problem.tables}
    assert set(plan.placements) == {
        column(t["cut"], 0, 0, 8), column(t["cut"], 3, 8, 24),
        column(t["whole"], 1), row(t["divided"], problem.topology), replica(t["replica"], problem.topology),
        host_row(t["host"], (2, 3)), host_row(t["grid"], (0, 1), 0, 12), host_row(t["grid"], (2, 3), 12, 32)}
    assert (plan.provenance["algorithm"], plan.provenance["seed"]) == ("by hand", 3)


@pytest.mark.parametrize("version", [1, 2])
def test_a_plan_says_who_made_it_in_the_names_of_today(version, kept, tmp_path):
    problem, plan = kept
    path = tmp_path / "plan.json"
    files.write_plan(path, Plan(plan.placements, {"algorithm": "local_columns"}), problem)
    if version == 1:
        written = json.loads((KEPT / "plan-v1.json").read_text())
        written["provenance"]["algorithm"] = "local_columns"
        content = {key: of for key, of in written.items() if key not in ("schema", "version", "digest")}
        path.write_text(json.dumps({**written, "digest": files.digest(content)}))
    assert files.read_plan(path, problem).provenance["algorithm"] == "anneal_columns"


def test_each_device_has_the_cells_that_the_file_says(kept):
    _, plan = kept
    written = json.loads((KEPT / "plan-v1.json").read_text())["placements"]
    said = {(p["table"], *p["rows"], *p["columns"], d) for p in written for d in p["devices"]}
    assert {(s.table.name, s.row_lo, s.row_hi, s.col_lo, s.col_hi, d) for p in plan.placements
            for d, s in shards_on(p)} == said


def test_it_cost_another_price_than_rows_of_a_host_have(kept):
    """They were priced as if over all devices: in the op and the reduce-scatter of the others."""
    problem, plan = kept
    model = AnalyticModel(Setting("made-up", 256, "fp32", "rowwise_adagrad"))
    work = lower(plan, problem)
    now, entered = price(work, model), entering(work.traffic)
    assert entered["reduce_scatter_host"] == [256 * 4 * 12] * 2 + [256 * 4 * (16 + 20)] * 2
    together = np.array(entered["reduce_scatter"]) + entered["reduce_scatter_host"]
    compute_ms = np.array(now.compute_ms) - model.launch_ms
    comm = model.comm(sends(all_to_all=entered["all_to_all"], reduce_scatter=together,
                            all_reduce=entered["all_reduce"]),
                      compute_ms, problem.topology)
    # AnalyticModel priced rings over hosts 0.2% lower then.
    before = pytest.approx(plan.provenance["predicted_ms"], rel=3e-3)
    assert max(compute_ms + comm.total_ms) == before != now.total_ms


def test_it_is_written_as_the_version_of_today_and_read_back(kept, tmp_path):
    problem, plan = kept
    files.write_plan(tmp_path / "plan.json", plan, problem)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["version"] == 2
    assert {p["kind"] for p in written["placements"]} == {"column", "row", "host_row", "data_parallel"}
    assert files.read_plan(tmp_path / "plan.json", problem) == plan


TALL, ORDERED = Table("t", 10, 16, 2.0), Table("t", 10, 16, 2.0, ordered=True)


def read(table: Table, hosts: str, *parts, columns=(0, 16)) -> tuple:
    """What ranges (low, high, device or devices) of a table's rows are read as."""
    problem = Problem("p", (table,), on_hosts(hosts), 48)
    listed = [PlacedShard("t", (lo, hi), columns, d if isinstance(d, tuple) else (d,)) for lo, hi, d in parts]
    return placements(PlanFile("p", "", {}, tuple(listed)), problem)


def test_row_ranges_become_one_placement():
    mixed = on_hosts("xyxy")
    by_rank = ((0, 3, 0), (3, 6, 2), (6, 9, 1), (9, 10, 3))  # ranks are host by host
    assert read(TALL, "xyxy", *by_rank) == read(TALL, "xyxy", *by_rank[::-1]) == (row(TALL, mixed),)
    assert read(ORDERED, "xyxy", *by_rank) == (row(ORDERED, mixed),)
    by_number = ((0, 3, 0), (3, 6, 1), (6, 9, 2), (9, 10, 3))
    # hashed ids do not mind which device has which
    assert read(TALL, "xyxy", *by_number) == (row(TALL, mixed),)
    with pytest.raises(ShardCoreError, match="4 ranges of"):
        read(ORDERED, "xyxy", *by_number)
    assert read(TALL, "xyxy", (0, 5, 3), (5, 10, 1), columns=(4, 8)) == (host_row(TALL, (1, 3), 4, 8),)


def test_replicas_on_all_devices_are_read_in_whatever_order():
    assert read(TALL, "aabb", (0, 10, (3, 1, 0, 2))) == (replica(TALL, on_hosts("aabb")),)
    assert read(TALL, "a", (0, 10, (0,))) == (column(TALL, 0),)


@pytest.mark.parametrize("hosts, parts", [
    ("aaaa", [(0, 4, 0), (4, 6, 1), (6, 9, 2), (9, 10, 3)]),  # uneven
    ("aaaa", [(0, 5, 0), (5, 10, 1)]),  # on some devices of the only host
    ("aabb", [(0, 5, 0), (5, 10, 2)]),  # across hosts
    ("aab", [(0, 5, 0), (5, 10, 1)]),  # on a host unlike the other
    ("aabb", [(0, 5, 0), (5, 10, 0)]),  # twice on one device
    ("aaaa", [(0, 3, 0), (3, 6, 1), (6, 9, 2)]),  # the last is lacking
])
def test_rows_that_no_kind_divides_so_are_refused(hosts, parts):
    with pytest.raises(ShardCoreError,
                       match=f"plan has rows of table 't' in {len(parts)} ranges of .* on devices? [0-3, ]+; "
                                             "TorchRec divides rows evenly, "
                                             "over all devices or those of one host: plan again"):
        read(TALL, hosts, *parts)


def test_a_replica_on_some_devices_is_refused():
    problem = Problem("p", (TALL,), on_hosts("aabb"), 48)
    with pytest.raises(ShardCoreError,
                       match="by data_parallel on devices 0, 1; such a shard lives on devices 0, 1, 2, 3"):
        lower(Plan(read(TALL, "aabb", (0, 10, (0, 1)))), problem)


def test_a_shard_out_of_its_table_is_refused():
    with pytest.raises(ShardCoreError, match=r"rows \[0, 11\); the table has \[0, 10\)"):
        read(TALL, "aabb", (0, 11, 0))


def test_a_file_of_no_version_that_was_ever_is_refused(kept, tmp_path):
    document = json.loads((KEPT / "plan-v1.json").read_text())
    for version in (0, 3, "1", True):
        files.write_json(tmp_path / "plan.json", {**document, "version": version})
        with pytest.raises(ShardCoreError, match=f"version {version!r} of 'shardcore/plan'|reads 1 to 2"):
            files.read_plan(tmp_path / "plan.json", kept[0])
    files.write_json(tmp_path / "plan.json", {**document, "version": 2})  # the other version's keys
    with pytest.raises(ShardCoreError, match="digest|rows|kind"):
        files.read_plan(tmp_path / "plan.json", kept[0])
