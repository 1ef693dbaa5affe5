import dataclasses
import hashlib
import io
import json
import os
import pickle
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from sealing import edit
from shapes import column, host_row, on_hosts, replica, row

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io import files, model_files, writing
from shardcore.step.lower import lower


@pytest.fixture
def problem_path(problem, tmp_path):
    files.write_problem(tmp_path / "p.json", problem)
    return tmp_path / "p.json"


def whole(problem):
    return Plan(
        tuple(Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(problem.tables)),
        {"algorithm": "by hand"},
    )


def test_problems_round_trip(problem, problem_path, tmp_path):
    assert files.read_problem(problem_path) == problem
    unequal = Problem(
        "u",
        problem.tables,
        Topology(
            (Device(1 << 24), Device(1 << 25, 2.0, "b"), Device(1 << 25, 2.0, "b"), Device(1 << 24)),
            "nvidia-h200",
            make_links(0.01, within_host=400.0, between_hosts=50.0),
        ),
        256,
        "rowwise_adagrad",
        Constraints(7, ("hot",)),
    )
    files.write_problem(tmp_path / "u.json", unequal)
    assert files.read_problem(tmp_path / "u.json") == unequal
    pinned = dataclasses.replace(
        unequal,
        constraints=Constraints(
            pinned=(("hot", (0, "b")), ("cold", (3,))),
            together=(("hot", "wide"),),
            kinds=(("zipf", ("row", "column")),),
            min_widths=(("zipf", 8),),
        ),
    )
    files.write_problem(tmp_path / "c.json", pinned)
    assert files.read_problem(tmp_path / "c.json") == pinned
    data = json.loads((tmp_path / "c.json").read_text())["constraints"]
    assert (data["pinned"], data["together"]) == ({"hot": [0, "b"], "cold": [3]}, [["hot", "wide"]])
    assert (data["kinds"], data["min_widths"]) == ({"zipf": ["row", "column"]}, {"zipf": 8})


def test_jobs_and_tables_of_several_features_round_trip(problem, problem_path, tmp_path):
    first, *rest = problem.tables
    several = dataclasses.replace(first, features=3, weighted=True, collection="model.users")
    for job in (
        Job("none"),
        Job(replica_optimizer="adam"),
        Job(dense_mflops=32.06),
        Job(dense_forward_ms=1.5, dense_backward_ms=3.0, id_bytes=4, forward_payload="fp16"),
    ):
        other = dataclasses.replace(problem, tables=(several, *rest), job=job)
        files.write_problem(tmp_path / "j.json", other)
        assert files.read_problem(tmp_path / "j.json") == other
    assert json.loads((tmp_path / "j.json").read_text())["job"] == {
        "dense_forward_ms": 1.5,
        "dense_backward_ms": 3.0,
        "id_bytes": 4,
        "forward_payload": "fp16",
    }
    # What is as by default is not written: plans of earlier versions know their problem.
    before = json.loads(problem_path.read_text())
    assert "job" not in before and not any({"features", "weighted"} & set(t) for t in before["tables"])


def test_constraints_that_a_problem_does_not_have_leave_its_file_and_digest_alone(problem, problem_path):
    data = json.loads(problem_path.read_text())
    assert data["constraints"] == {"reserved_bytes": 0, "unsplit": []}
    assert files.problem_digest(problem) == files.json_digest(data)
    del data["constraints"]
    problem_path.write_text(json.dumps(data))
    # But for what is reserved: a file that does not say it keeps a share.
    found = files.read_problem(problem_path)
    assert found.constraints.reserved_bytes > 0
    assert dataclasses.replace(found, constraints=problem.constraints) == problem


@pytest.mark.parametrize(
    "constraints, reserved",
    [(None, 150), ({}, 150), ({"unsplit": []}, 150), ({"reserved_bytes": 0}, 0), ({"reserved_bytes": 7}, 7)],
)
def test_a_problem_that_does_not_say_what_is_reserved_keeps_a_share_for_the_dense_part(
    tmp_path, constraints, reserved
):
    """The default follows from the smallest device. It is written to the file, so that it does not change later."""
    problem = Problem("p", (Table("t", 10, 4, 1.0),), Topology((Device(2000), Device(1000))), 4)
    data = files.problem_to_json(problem)
    del data["constraints"]
    given = {**data, **({"constraints": constraints} if constraints is not None else {})}
    writing.write_json(tmp_path / "p.json", given)
    assert files.read_problem(tmp_path / "p.json").constraints.reserved_bytes == reserved
    # A job that says what its dense part takes keeps nothing else free, unless told.
    with_dense = {**given, "job": {"dense_bytes": 5}}
    writing.write_json(tmp_path / "p.json", with_dense)
    found = files.read_problem(tmp_path / "p.json").constraints.reserved_bytes
    assert found == (constraints or {}).get("reserved_bytes", 0)
    files.write_problem(tmp_path / "q.json", problem)
    assert files.read_problem(tmp_path / "q.json") == problem


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda d: d.update(batchsize=3), ["unknown key 'batchsize'", "global_batch"]),
        (lambda d: d.pop("global_batch"), ["lacks the key 'global_batch'"]),
        (lambda d: d.update(job={"pipline": "none"}), ["job", "unknown key 'pipline'", "pipeline"]),
        (lambda d: d.update(job={"pipeline": "semi"}), ["'semi'", "known are none, sparse_dist"]),
        (
            lambda d: d.update(job={"dense_forward_ms": -2.0, "dense_backward_ms": 1.0}),
            ["dense_forward_ms -2.0"],
        ),
        (lambda d: d["tables"][0].update(rows="many"), ["'cold'", "rows", "'many'", "whole number"]),
        (lambda d: d["tables"][0].update(row=3), ["'cold'", "unknown key 'row'"]),
        (lambda d: d["tables"][0].pop("dim"), ["'cold'", "lacks the key 'dim'"]),
        (lambda d: d["tables"][0].update(zipf_alpha=1.0), ["'cold'", "both"]),
        (lambda d: d.update(schema="shardcore/plan"), ["schema 'shardcore/plan'", "shardcore/problem"]),
        (lambda d: d.update(version=2), ["version 2", "reads 1"]),
        (lambda d: d.pop("version"), ["lacks 'version'", '"schema": "shardcore/problem", "version": 1']),
        (lambda d: d.pop("schema"), ["lacks 'schema'", '"schema": "shardcore/problem", "version": 1']),
        (lambda d: d.clear(), ["lacks 'schema' and 'version'"]),
        (lambda d: d.update(global_batch=True), ["global_batch is True", "whole number"]),
        (lambda d: d.update(global_batch=256.0), ["global_batch is 256.0", "whole number"]),
        (lambda d: d["topology"]["devices"][0].update(count=True), ["count True"]),
        (lambda d: d["topology"]["devices"][0].update(count=0), ["count 0"]),
        (
            lambda d: d["topology"]["devices"][0].update(count=10**9),
            ["count 1000000000", "65536 devices at most"],
        ),
        (
            lambda d: d["topology"]["devices"][0].update(memory_gb=3),
            ["unknown key 'memory_gb'", "memory_bytes"],
        ),
        (lambda d: d.pop("topology"), ["lacks 'topology'; it needs a list of 'devices'"]),
        (lambda d: d.update(topology=7), ["topology 7", "a list of 'devices'"]),
        (lambda d: d.pop("tables"), ["lacks 'tables'"]),
        (lambda d: d.update(tables=7), ["tables 7"]),
        (lambda d: d["tables"].append(7), ["7"]),
        (lambda d: d["tables"].append(d["tables"][0]), ["'cold'"]),
        (lambda d: d.update(constraints=[]), ["constraints", "[]", "object"]),
        (lambda d: d["constraints"].update(pin={}), ["unknown key 'pin'", "unsplit", "pinned", "together"]),
        (lambda d: d["constraints"].update(pinned=["hot"]), ["pinned is ['hot']", "object of tables"]),
        (
            lambda d: d["constraints"].update(pinned={"hot": 0}),
            ["constraints", "pinned of table 'hot' is 0", "a list"],
        ),
        (
            lambda d: d["constraints"].update(kinds={"hot": ["row", "rows"]}),
            ["kinds of table 'hot' has 'rows'; known are column, row, host_row"],
        ),
        (lambda d: d["constraints"].update(kinds=["hot"]), ["kinds is ['hot']", "object of tables"]),
        (lambda d: d["constraints"].update(min_widths={"hot": "8"}), ["min_widths of table 'hot' is '8'"]),
        (lambda d: d["constraints"].update(min_widths=8), ["min_widths is 8", "object of tables"]),
        (lambda d: d["constraints"].update(together={}), ["together is {}", "list of lists of texts"]),
        (lambda d: d["constraints"].update(together=["hot"]), ["together[0] is 'hot'", "a list"]),
    ],
)
def test_bad_problems_are_refused_by_name(problem_path, edit, named):
    data = json.loads(problem_path.read_text())
    edit(data)
    problem_path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError) as error:
        files.read_problem(problem_path)
    assert all(word in str(error.value) for word in [str(problem_path), *named]), str(error.value)


def test_of_a_key_that_appears_twice_neither_counts(problem_path):
    problem_path.write_text(
        problem_path.read_text().replace('"global_batch": 256', '"global_batch": 256, "global_batch": 512')
    )
    with pytest.raises(ShardCoreError, match="'global_batch' appears twice"):
        files.read_problem(problem_path)


def test_plans_round_trip_and_know_their_problem(problem, tmp_path):
    path = tmp_path / "plan.json"
    files.write_plan(path, whole(problem), problem)
    read = files.read_plan(path, problem)
    assert read == whole(problem) and read.provenance == {"algorithm": "by hand"}
    other = Problem("other", problem.tables, problem.topology, 512)
    with pytest.raises(ShardCoreError, match="plan for problem 'small'"):
        files.read_plan(path, other)
    data = json.loads(path.read_text())
    data["placements"][0]["devices"] = [3]
    path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError, match="edited"):
        files.read_plan(path, problem)
    del data["digest"]
    path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError, match="lacks its digest; it was edited"):
        files.read_plan(path, problem)


def test_a_plan_of_each_kind_round_trips(problem, tmp_path):
    two = dataclasses.replace(problem, topology=on_hosts("xyxy", 16 << 20))
    cold, hot, wide, zipf, one, empty = two.tables
    plan = Plan(
        (
            host_row(cold, (1, 3), 0, 12),
            host_row(cold, (0, 2), 12, 16),
            row(hot, two.topology),
            column(wide, 0, 0, 24),
            column(wide, 3, 24, 64),
            replica(zipf, two.topology),
            column(one, 1),
            column(empty, 1),
        )
    )
    files.write_plan(tmp_path / "plan.json", plan, two)
    assert files.read_plan(tmp_path / "plan.json", two) == plan


def test_files_have_a_line_for_each_record_and_no_slow_indents(problem, tmp_path, monkeypatch):
    """With an indent, json encodes in Python: 100,000 placements took longer than their search may
    overrun."""
    monkeypatch.setattr(json.encoder, "_make_iterencode", None)
    files.write_plan(tmp_path / "plan.json", whole(problem), problem)
    files.write_problem(tmp_path / "problem.json", problem)
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert f'  {{"table": "{problem.tables[0].name}", "kind": "column", "columns": ' in "\n".join(lines)
    assert sum('"table": ' in line for line in lines) == len(problem.tables) and ' "placements": [' in lines
    lines = (tmp_path / "problem.json").read_text().splitlines()
    assert sum('"pooling": ' in line for line in lines) == len(problem.tables) and ' "tables": [' in lines
    odd = {"a": {}, "b": [], "c": [[], {}, 1], "d": {"e": (1, None)}, "f": [{"g": [{}]}], 'h"': "i\n"}
    assert json.loads(writing.json_bytes(odd)) == {**odd, "d": {"e": [1, None]}}


def test_a_plan_is_of_its_problem_as_it_was_not_of_its_name(problem, tmp_path):
    files.write_plan(tmp_path / "plan.json", whole(problem), problem)
    for other in (
        dataclasses.replace(problem, global_batch=512),
        dataclasses.replace(problem, constraints=Constraints(1)),
    ):
        assert files.problem_digest(other) != files.problem_digest(problem)
        with pytest.raises(ShardCoreError, match="is a plan for problem 'small' with digest"):
            files.read_plan(tmp_path / "plan.json", other)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.pop(), "plan places 0 of the"),
        (lambda p: p.append(p[0]), "plan places cells twice"),
        (lambda p: p[0].update(devices=[4]), "on device 4; problem 'small' has devices 0 to 3"),
        (lambda p: p[0].update(devices=[0.9]), "placements[0]: devices[0] is 0.9; it needs to be a whole"),
        (lambda p: p[0].update(devices=[True]), "placements[0]: devices[0] is True; it needs to be a whole"),
        (lambda p: p[0].update(columns=[0]), "placements[0]: columns is [0]; it needs to be [a whole"),
        (lambda p: p[0].update(table="none"), "places table 'none', which problem 'small' does not have"),
        (lambda p: p[0].update(rows=[0, 1]), "placements[0] has an unknown key 'rows'"),
        (lambda p: p[0].pop("kind"), "placements[0] lacks the key 'kind'"),
        (lambda p: p[0].update(kind="twin"), "a placement or constraint has kind 'twin'; known are column"),
        (lambda p: p[0].update(kind="row"), "plan places cold[0:50000, 0:16] by row on device 0; such a"),
        (lambda p: p[0].update(kind="host_row", devices=[0, 1]), "it needs several hosts with the same"),
    ],
)
def test_a_plan_that_is_none_of_the_problem_is_refused_with_its_file(problem, tmp_path, change, message):
    path = tmp_path / "plan.json"
    files.write_plan(path, whole(problem), problem)
    edit(path, lambda data: change(data["placements"]))
    with pytest.raises(ShardCoreError) as error:
        plan = files.read_plan(path, problem)
        with files.name_file_in_errors(path):
            lower(plan, problem)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


def error_lines(read, *given) -> list[str]:
    with pytest.raises(ShardCoreError) as error:
        read(*given)
    return str(error.value).split("\n")


def test_a_problem_file_with_several_faults_names_them_all(tmp_path):
    path = tmp_path / "p.json"
    tables = Table("a", 100, 4, 1.0), Table("b", 100, 8, 1.0)
    files.write_problem(path, Problem("p", tables, Topology((Device(2000),) * 2), 4))

    data = json.loads(path.read_text())
    data.pop("global_batch")
    data["topology"]["devices"][0].update(memory_bytes=-1)
    data["topology"]["devices"].append({"count": 0})
    data["tables"][0].update(rows="many")
    data["tables"][1].update(reuse={})
    data["job"] = {"pipline": "none"}
    path.write_text(json.dumps(data))
    lines = error_lines(files.read_problem, path)
    assert lines.pop() == "... and 1 more" and all(line.startswith(str(path)) for line in lines)
    named = (
        "lacks the key 'global_batch'",
        "device has memory_bytes -1; it needs 1 to",
        "a device entry has count 0; it needs a whole number",
        "table 'a': rows is 'many'; it needs to be a whole number",
        "table 'b' has both reuse and zipf_alpha; it needs one of them",
    )
    assert [words in line for words, line in zip(named, lines, strict=True)] == [True] * 5


def test_limits_of_a_problems_own_fields_are_named_together_with_faults_of_its_tables(tmp_path):
    path = tmp_path / "p.json"
    files.write_problem(path, Problem("p", (Table("a", 100, 4, 1.0),), Topology((Device(2000),)), 4))
    data = json.loads(path.read_text())
    data.update(name="a/b", global_batch=0, optimizer="adamm", job={"pipeline": "semi"})
    data["tables"][0].update(rows=0, precision="fp13", dim=8)
    path.write_text(json.dumps(data))
    assert [line.split(";")[0] for line in error_lines(files.read_problem, path)] == [
        f"{path} has name 'a/b'",
        f"{path} has global_batch 0",
        f"{path} has optimizer 'adamm'",
        f"{path}, table 'a' has rows 0",
        f"{path}, table 'a' has precision 'fp13'",
        "... and 1 more",
    ]
    # Neither a topology nor tables of another form hide the rest.
    data.update(topology=7, tables={}, name="p", global_batch=4)
    path.write_text(json.dumps(data))
    assert [line.split(";")[0] for line in error_lines(files.read_problem, path)] == [
        f"{path} has optimizer 'adamm'",
        f"{path} has topology 7",
        f"{path} has tables {{}}",
        f"{path}: job has pipeline 'semi'",
    ]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d["tables"][0].update(dim=6), ", table 'x: y' has dim 6; FBGEMM needs"),
        (lambda d: d.update(job={"id_bytes": 5}), ": job has id_bytes 5; known are 4, 8"),
        (lambda d: d.update(constraints={"unsplit": ["x: y", 3]}), ": constraints: unsplit[1] is 3; it"),
        (
            lambda d: d["tables"][0].update(managed_collision={"row_bytes": 8, "routing": "contiguous"}),
            ", table 'x: y': managed_collision has routing 'contiguous' and",
        ),
    ],
)
def test_the_thing_at_fault_is_named_once(tmp_path, change, said):
    path = tmp_path / "p.json"
    files.write_problem(path, Problem("p", (Table("x: y", 100, 8, 1.0),), Topology((Device(2000),)), 4))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    [line] = error_lines(files.read_problem, path)
    assert line.startswith(f"{path}{said}"), line


def test_constraints_and_devices_of_another_form_are_named_with_what_is_known(problem, tmp_path):
    data = files.problem_to_json(problem)
    names = [t.name for t in problem.tables[:2]]
    path = tmp_path / "p.json"
    data["topology"]["devices"] = ["a100", 80]
    data["constraints"] = {"kinds": {name: ["rows"] for name in names}}
    path.write_text(json.dumps(data))
    assert [line.removeprefix(f"{path}: ") for line in error_lines(files.read_problem, path)] == [
        "device is 'a100'; it needs to be an object with keys",
        "device is 80; it needs to be an object with keys",
        *(
            f"constraints: kinds of table {name!r} has 'rows'; known are column, row, host_row, pod_row, data_parallel"
            for name in names
        ),
    ]
    path.write_text(json.dumps(files.problem_to_json(problem) | {"constraints": {"pined": {}}}))
    assert error_lines(files.read_problem, path) == [
        f"{path}: constraints has an unknown key 'pined'; known are reserved_bytes, unsplit, pinned, together, kinds, "
        "min_widths"
    ]


def test_a_plan_file_with_several_faults_names_them_all(problem, tmp_path):
    path = tmp_path / "plan.json"
    files.write_plan(path, whole(problem), problem)

    def damage(placements):
        placements[0].pop("kind")
        placements[1].update(devices=[True])

    edit(path, lambda data: damage(data["placements"]))
    first, second = error_lines(files.read_plan, path, problem)
    assert first == f"{path}: placements[0] lacks the key 'kind'"
    assert second.startswith(f"{path}: placements[1]: devices[0] is True; it needs")
    files.write_plan(path, whole(problem), problem)

    def misplace(placements):
        placements[0].update(table="none")
        placements[1].update(kind="twin")

    edit(path, lambda data: misplace(data["placements"]))
    first, second = error_lines(files.read_plan, path, problem)
    assert "places table 'none'" in first and "has kind 'twin'" in second


def test_a_pool_with_several_faults_names_them_all(tables, tmp_path):
    path = tmp_path / "pool.json"
    files.write_pool(path, tables)
    edit(path, lambda data: [t.update(dim="wide") for t in data["tables"][:2]])
    assert [line.split(": ")[1] for line in error_lines(files.read_pool, path)] == [
        "dim is 'wide'; it needs to be a whole number"
    ] * 2


def test_equal_devices_in_a_row_are_counted(problem):
    a, b = Device(1 << 24), Device(1 << 25)
    mixed = dataclasses.replace(problem, global_batch=255, topology=Topology((a, a, a, b, a)))
    written = files.problem_to_json(mixed)["topology"]["devices"]
    assert [(d["count"], d["memory_bytes"]) for d in written] == [(3, 1 << 24), (1, 1 << 25), (1, 1 << 24)]


def test_pools_round_trip(tables, tmp_path):
    files.write_pool(tmp_path / "pool.json", tables)
    assert files.read_pool(tmp_path / "pool.json") == tables


def test_models_round_trip_and_a_touched_one_is_refused(tmp_path):
    tensors = {"w": np.arange(6.0).reshape(2, 3)}
    model_files.write_model(tmp_path, {"a": 1}, tensors)
    meta, read = model_files.read_model(tmp_path)
    assert meta == {"a": 1}
    np.testing.assert_array_equal(read["w"], tensors["w"])
    weights = tmp_path / model_files.MODEL_WEIGHTS
    content = weights.read_bytes()
    for touched in (
        content[:-1],
        content[:-8] + np.float64(7.0).tobytes(),
    ):  # the second is whole safetensors
        weights.write_bytes(touched)
        with pytest.raises(
            ShardCoreError, match="weights.safetensors does not match the digest in model.json"
        ):
            model_files.read_model(tmp_path)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return os.mkdir, (self._path,)


def as_pickle(payload) -> bytes:
    return pickle.dumps(payload)


def as_array(payload) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([payload], dtype=object), allow_pickle=True)
    return content.getvalue()


def as_torch(payload) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, part in (("data.pkl", pickle.dumps(payload)), ("version", b"3"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", part)
    return content.getvalue()


@pytest.mark.parametrize("written", [as_pickle, as_array, as_torch])
def test_a_model_file_whose_digest_is_right_runs_no_code(tmp_path, written):
    content, ran = written(Payload(tmp_path / "ran")), tmp_path / "ran"
    model_files.write_model(tmp_path, {"a": 1}, {"w": np.zeros(1)})
    (tmp_path / model_files.MODEL_WEIGHTS).write_bytes(content)
    right = hashlib.sha256(content).hexdigest()
    edit(tmp_path / model_files.MODEL_JSON, lambda meta: meta.update(weights_sha256=right))
    with pytest.raises(ShardCoreError, match="weights.safetensors is not safetensors"):
        model_files.read_model(tmp_path)
    assert not ran.exists()
    if written is as_pickle:  # it would
        pickle.loads(content)
        assert ran.exists()


def test_a_models_digest_is_of_its_weights_and_what_it_says_of_them_not_of_where_it_comes_from(tmp_path):
    def written(meta, weight):
        model_files.write_model(tmp_path, meta, {"w": np.full(2, weight)})
        return model_files.model_digest(tmp_path)

    first = written({"a": 1, "provenance": {"git_commit": "x"}}, 1.0)
    assert len(first) == 16 and written({"a": 1, "provenance": {"git_commit": "y"}}, 1.0) == first
    assert len({first, written({"a": 2}, 1.0), written({"a": 1}, 2.0)}) == 3


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    writing.write_atomic(path, b"old")
    monkeypatch.setattr(writing.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(ShardCoreError, match="cannot write .*: no space left"):
        writing.write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_table_needs_no_access_statistics_but_needs_to_be_an_object():
    with pytest.raises(ShardCoreError, match="needs to be a table"):
        files.table_from_json([], "x.json")
    assert files.table_from_json({"name": "t", "rows": 3, "dim": 4, "pooling": 1}, "x.json") == Table(
        "t", 3, 4, 1
    )


def test_writing_leaves_what_a_link_of_its_temporary_name_leads_to(tmp_path):
    (tmp_path / "precious").write_text("1")
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    writing.write_json(tmp_path / "a.json", 2)
    assert (tmp_path / "precious").read_text() == "1"
    assert (tmp_path / "a.json").read_text() == "2\n" and not (tmp_path / "a.json").is_symlink()


SLOW_WRITER = """
import os, sys, time
from shardcore.io import writing
real = os.fsync
def slow(fd):
    print("writing", flush=True)
    sys.stdin.readline()
    real(fd)
os.fsync = slow
writing.write_atomic(sys.argv[1], b"slow")
"""


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    path = tmp_path / "plan.json"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_WRITER, path],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    assert [w.stdout.readline() for w in writers] == ["writing\n"] * 2
    writers[0].kill()
    writers[0].communicate()
    left, living = (tmp_path / f".plan.json.{w.pid}.tmp" for w in writers)
    (tmp_path / ".plan.json.notes").write_text("mine")
    (tmp_path / ".other.json.1.tmp").write_text("of another file")
    (tmp_path / ".plan.json.1.tmp").symlink_to(tmp_path / ".plan.json.notes")
    assert left.exists()
    writing.write_atomic(path, b"quick")
    assert not left.exists() and living.exists() and path.read_bytes() == b"quick"
    writers[1].communicate("go on\n")
    assert path.read_bytes() == b"slow"
    assert {p.name for p in tmp_path.iterdir()} == {
        "plan.json",
        ".plan.json.notes",
        ".other.json.1.tmp",
        ".plan.json.1.tmp",
    }


def test_a_device_or_pipe_is_written_to_and_stays(tmp_path):
    """For root, renaming a file over /dev/null would take it from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writing.write_json(pipe, {"a": 1})
        assert json.loads(os.read(reader, 100)) == {"a": 1} and stat.S_ISFIFO(os.stat(pipe).st_mode)
    finally:
        os.close(reader)


def test_standard_output_is_written_to_also_where_it_is_a_file(tmp_path):
    shown, link = tmp_path / "shown", tmp_path / "stdout"
    with open(shown, "w") as f:
        link.symlink_to(f"/proc/self/fd/{f.fileno()}")
        writing.write_json(link, {"a": 1})
        assert link.is_symlink() and json.loads(shown.read_text()) == {"a": 1}


def edit_json(path, change):
    """Change a file without a digest in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_several_faults_of_one_table_are_named_at_once(problem_path):
    edit_json(problem_path, lambda data: data["tables"][0].update(dim=30, rows=0))
    lines = error_lines(files.read_problem, problem_path)
    assert len(lines) == 2 and all(line.startswith(f"{problem_path}, table 'cold' has ") for line in lines)
    assert "rows 0; it needs 1 to" in lines[0] and "dim 30; FBGEMM needs a multiple of 4" in lines[1]


def test_several_faults_of_a_device_and_of_a_job_are_named_at_once(problem_path):
    def spoil(data):
        data["topology"]["devices"][0] |= {"memory_bytes": 0, "speed": -1.0}
        data["job"] = {"id_bytes": 3, "length_bytes": 5}

    edit_json(problem_path, spoil)
    faults = ("memory_bytes 0", "speed -1.0", "id_bytes 3", "length_bytes 5")
    for line, fault in zip(error_lines(files.read_problem, problem_path), faults, strict=True):
        assert fault in line


def test_the_first_of_very_many_repeated_entries_is_named_before_any_is_made(problem, problem_path, tmp_path):
    """Records of 800,000 placements take a minute to make. Those that come after the first twin are none."""
    path = tmp_path / "plan.json"
    files.write_plan(path, whole(problem), problem)
    name, columns = problem.tables[1].name, [0, problem.tables[1].dim]
    edit(path, lambda data: data["placements"].extend([data["placements"][1], *[{"kind": 3}] * 1000]))
    [line] = error_lines(files.read_plan, path, problem)
    assert line.startswith(f"{path}: plan places cells twice: table {name!r}, columns {columns}; ")
    # Other columns of a table, or the same ones of another, are no twins.
    edit(path, lambda data: data["placements"].__delitem__(slice(len(problem.tables), None)))
    assert files.read_plan(path, problem) == whole(problem)
    edit_json(problem_path, lambda data: data["tables"].extend([data["tables"][2], *[{"rows": "x"}] * 1000]))
    [line] = error_lines(files.read_problem, problem_path)
    assert line.startswith(f"{problem_path} has several tables of a name: name {problem.tables[2].name!r}; ")


def test_a_pool_with_a_table_twice_is_refused_by_its_name(tables, tmp_path):
    files.write_pool(tmp_path / "pool.json", (*tables, tables[1]))
    with pytest.raises(
        ShardCoreError, match=f"has several tables of a name: name {tables[1].name!r}; it needs"
    ):
        files.read_pool(tmp_path / "pool.json")
