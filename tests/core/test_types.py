import dataclasses
import pickle

import numpy as np
import pytest

from shardcore.core import constraints, topology, types
from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Problem, Setting, Shard, Table
from shardcore.io import measurements
from shardcore.step import lower

HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))
FOUR = tuple(Table(name, 10, 8, 1.0) for name in "stuv")


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: Table("t", 0, 8, 1.0), ["'t'", "rows 0"]),
        (lambda: Table("t", 10, 6, 1.0), ["'t'", "dim 6", "multiple of 4"]),
        (lambda: Table("t", 10, 8, -1.0), ["'t'", "pooling -1.0"]),
        (lambda: Table("t", 10, 8, 1.0, features=0), ["'t'", "features 0", "1 to 10,000"]),
        (lambda: Table("t", 10, 8, float("nan")), ["'t'", "nan"]),
        (lambda: Table("t", 10, 8, 1.0, precision="fp8"), ["fp8", "fp32"]),
        (lambda: Table("t", 10, 8, 1.0, Reuse((0.0,) * 17, 4)), ["'t'", "empty reuse histogram"]),
        (lambda: Reuse((0.5,) * 17, 4), ["8.5", "sum to 1"]),
        (lambda: Reuse((1.0,), 4), ["1 bins", "17 fractions"]),
        (lambda: Zipf(-1), ["-1"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 11, 0, 8), ["'t'", "[0, 11)", "[0, 10)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 2, 8), ["[2, 8)", "multiples of 4"]),
        (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), (1, 1)), ["(1, 1)"]),
        (lambda: Problem("p", (Table("t", 10, 8, 1.0),) * 2, Topology((Device(1),)), 4), ["'p'", "'t'"]),
        (
            lambda: Problem("p", (Table("t", 10, 8, 1.0),), Topology((Device(1),) * 3), 4),
            ["global_batch 4", "3 devices"],
        ),
        (lambda: Problem("../p", (Table("t", 10, 8, 1.0),), Topology((Device(1),)), 4), ["'../p'", "folder"]),
        (lambda: Table("", 10, 8, 1.0), ["a table has name ''"]),
        (lambda: Table("a\nb", 10, 8, 1.0), ["a table has name 'a\\nb'", "1 to 200 printable characters"]),
        (lambda: Table("x" * 201, 10, 8, 1.0), ["a table has name 'xxx", "1 to 200 printable characters"]),
        (lambda: Table("t", 2**40 + 1, 8, 1.0), ["rows 1099511627777"]),
        (lambda: Table("t", 10, 65540, 1.0), ["dim 65540"]),
        (lambda: Table("t", 10, 8, 1e6 + 1), ["pooling 1000001.0"]),
        (lambda: Zipf(float("nan")), ["alpha is nan"]),
        (lambda: Setting("x" * 101, 1), ["hardware 'xxx"]),
        (lambda: Setting("x", 2**40 + 1), ["batch 1099511627777"]),
        (lambda: Table("t", 10, 0, 1.0), ["dim 0"]),
        (lambda: Table("t", 10, 8, float("inf")), ["pooling inf"]),
        (lambda: Reuse((1.0, *(0.0,) * 16), 0), ["reuse histogram has batch 0"]),
        (lambda: Reuse((1.5, -0.5, *(0.0,) * 15), 4), ["1.5, -0.5", "fractions"]),
        (lambda: Reuse((0.998, *(0.0,) * 16), 4), ["0.998", "sum to 1"]),
        (lambda: Zipf(10), ["10.0", "within 0 and 10"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), -1, 10, 0, 8), ["[-1, 10)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 4, 4, 0, 8), ["[4, 4)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 4, 4), ["[4, 4)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, -4, 4), ["[-4, 4)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 4, 12), ["[4, 12)", "[0, 8)"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 0, 6), ["[0, 6)", "multiples of 4"]),
        (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 2, 6), ["[2, 6)", "multiples of 4"]),
        (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), ()), ["()", "one or more"]),
        (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), (0, -1)), ["(0, -1)"]),
        (lambda: Problem("p", (), HOSTS, 4), ["no tables"]),
        (lambda: Problem("p", FOUR, HOSTS, 0), ["global_batch 0", "1 to"]),
        (
            lambda: Problem("p", FOUR, HOSTS, 4, "adagrad"),
            ["problem 'p' has optimizer 'adagrad'; known are exact_sgd, rowwise_adagrad"],
        ),
        (lambda: Setting("x", 1, "fp16+fp8"), ["setting has precision 'fp8'; known are fp32, fp16, bf16"]),
        (lambda: Setting("x", 1, "fp8"), ["setting has precision 'fp8'; known are fp32, fp16, bf16"]),
        (
            lambda: Table("t", 1, 4, 0.0, dedup=0.9),
            ["table 't' has dedup 0.9; it needs 1 to 1,099,511,627,776"],
        ),
        (lambda: Table("t", 1, 4, 0.0, dedup=float("nan")), ["dedup nan"]),
        (lambda: Table("t", 1, 4, 0.0, collection="a\nb"), ["the collection of table 't'"]),
        (lambda: Table("t", 1, 4, 0.0, precision="int8"), ["table 't' has precision 'int8'; known are fp32"]),
        (lambda: Setting("a/b", 4), ["'a/b'"]),
        (lambda: Setting("x", 0), ["batch 0"]),
        (lambda: Setting("x", 1, optimizer="sgd"), ["'sgd'", "exact_sgd"]),
    ],
)
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_values_at_their_limits_are_taken():
    table = Table("t", 1, 4, 0.0, Reuse((0.0,) * 17, 1))
    assert (table.bytes, Table("u", 3, 8, 1, precision="fp16").bytes) == (16, 48)
    assert Zipf(0).alpha == 0.0 and Reuse((0.9995, *(0.0,) * 16), 1).batch == 1
    assert Problem("p", (table,), Topology((Device(1),)), 1).local_batch == 1


def test_what_is_not_said_has_its_default():
    table, problem = Table("t", 10, 8, 1.0), Problem("p", FOUR, HOSTS, 4)
    assert (table.access, table.precision, table.ordered) == (Zipf(1.05), "fp32", False)
    assert (problem.optimizer, problem.constraints) == ("exact_sgd", Constraints(0, (), (), ()))
    assert (Setting("x", 1).precision, Setting("x", 1).optimizer) == ("fp32", "exact_sgd")


def test_nouns_are_values_that_nobody_changes():
    nouns = [
        x
        for module in (types, topology, constraints, measurements, lower)
        for x in vars(module).values()
        if dataclasses.is_dataclass(x) and x.__module__ == module.__name__
    ]
    assert len(nouns) > 15 and all(x.__dataclass_params__.frozen for x in nouns)
    by_array = {x.__name__ for x in nouns if not x.__dataclass_params__.eq}
    assert by_array == {"Workload"}  # whose arrays have no one answer to ==
    pinned = Constraints(0, ["s"], [["s", [0]]], [["t"]])
    listed = Problem("p", list(FOUR), Topology(list(HOSTS.devices)), 4, constraints=pinned)
    hash(listed)
    assert listed.constraints == Constraints(0, ("s",), (("s", (0,)),), (("t",),)) and listed.tables == FOUR
    placement = Placement("data_parallel", Shard.whole(FOUR[0]), np.array([1, 0]))
    assert placement.devices == (1, 0) and {*map(type, placement.devices)} == {int}


def test_tables_that_differ_in_anything_differ_as_keys():
    table = Table("t", 10, 8, 1.0)
    others = [
        dataclasses.replace(table, **change)
        for change in (
            {"name": "u"},
            {"rows": 11},
            {"dim": 4},
            {"pooling": 2.0},
            {"access": Zipf(0)},
            {"precision": "fp16"},
            {"dedup": 2.0},
            {"collection": "users"},
            {"ordered": True},
            {"features": 2},
            {"weighted": True},
        )
    ]
    assert len({hash(t) for t in (table, *others)}) == len({table, *others, Table("t", 10, 8, 1)}) == 12


def test_a_shard_knows_its_shape():
    shard = Shard(Table("t", 10, 16, 1.0, precision="fp16"), 2, 10, 4, 16)
    assert (shard.rows, shard.width, shard.bytes, shard.full_rows, shard.label) == (
        8,
        12,
        192,
        False,
        "t[2:10, 4:16]",
    )
    assert Shard(shard.table, 0, 10, 4, 8).full_rows and Shard.whole(shard.table).label == "t[0:10, 0:16]"


def test_a_step_is_as_long_as_that_of_the_device_that_takes_longest():
    parts = (1.0, 2.0), (3.0, 5.0), (0.5, 0.25), (0.125, 4.0), (7.0, 0.0)
    cost = StepCost(*parts)
    assert cost.compute_ms == (4.0, 7.0) and cost.device_ms == (11.625, 11.25) and cost.total_ms == 11.625


def test_a_problem_of_another_setting_is_refused_with_both_shown(problem):
    problem.require_setting(Setting("anything", 256))  # a topology without hardware takes the model's
    named = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, hardware="h"))
    named.require_setting(Setting("h", 256))
    for other in (
        Setting("i", 256),
        Setting("h", 128),
        Setting("h", 256, "fp16"),
        Setting("h", 256, "bf16"),
        Setting("h", 256, "fp32", "rowwise_adagrad"),
        Setting("h", 256, "fp32", "adam"),
    ):
        with pytest.raises(SettingMismatch):
            named.require_setting(other)
    with pytest.raises(SettingMismatch) as error:
        problem.require_setting(Setting("nvidia-h200", 65536))
    assert "batch 256" in str(error.value) and "batch 65536" in str(error.value)


def test_a_table_stays_a_key_across_processes(tables):
    """Its hash, of strings, is another in each process; so it is not taken along."""
    for table in tables:
        hash(table)
        taken = pickle.loads(pickle.dumps(table))
        assert (
            "_hash" in vars(table)
            and "_hash" not in vars(taken)
            and taken == table
            and hash(taken) == hash(table)
        )
